"""What operators and newcomers do to a job, on real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from supervisor.errors import ExitCode
from tests.e2e.harness import BIN, TOY, assert_exact, base_env, read_log
from tests.metadata_server import Imds

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
QUICK = {"TOY_WORKERS": "0"}


@pytest.fixture
def cluster(quick_cluster):
    return quick_cluster


def run_cli(cluster, node, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["lastgasp", *arguments],
        env=base_env(cluster.log),
        cwd=node.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_drill_rehearses_the_true_path_and_the_job_ends_exactly(cluster, quick_twin):
    node = cluster.node("a")
    cluster.start(node, TOY_STEP_S="0.15")
    cluster.wait_for_step(6)

    document = cluster.cli(node, "drill", "--deadline", "30s")
    code = cluster.finish(node)

    assert document["is_in_time"]
    milestones = document["milestones_s"]
    order = ["told", "staged", "committed", "stopped", "relaunched", "training"]
    assert [name for name in milestones if name in order] == order
    assert document["resume_step"] == document["committed_step"] >= 6
    assert code == ExitCode.DONE
    assert_exact(read_log(cluster.log), quick_twin)


def test_a_finished_job_ends_at_once_when_started_again(cluster):
    node = cluster.node("a")
    assert cluster.run(node) == ExitCode.DONE
    num_lines = len(cluster.lines(0))

    code = cluster.run(node)

    assert code == ExitCode.DONE
    assert len(cluster.lines(0)) == num_lines
    assert "finished" in node.stderr
    assert cluster.cli(node, "status")["phase"] == "finished"


def test_a_second_supervisor_on_the_node_leaves_the_first_alone(cluster, quick_twin):
    node = cluster.node("a")
    cluster.start(node, TOY_STEP_S="0.1")
    cluster.wait_for_step(2)

    second = run_cli(cluster, node, "run", "-c", "job.toml", "--", "torchrun", str(TOY))
    code = cluster.finish(node)

    assert second.returncode == ExitCode.ALREADY_RUNNING
    assert "already_running" in second.stderr
    assert code == ExitCode.DONE
    assert_exact(read_log(cluster.log), quick_twin)


def test_a_flipped_byte_everywhere_sets_the_checkpoint_aside_and_the_older_one_is_used(
    cluster, quick_twin
):
    first, second = cluster.node("a"), cluster.node("b")
    cluster.start(first, TOY_STEP_S="0.1")
    cluster.wait_for_event(first, "checkpoint.committed", step=10)
    cluster.kill_everything(first)
    shown = cluster.cli(first, "show")
    for shard in shown["shards"]:
        path = cluster.folder / "store" / "jobs" / "toy" / shard["key"]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.chmod(0o600)
        path.write_bytes(data)

    verdicts = cluster.cli(second, "verify", "--read-data", check=False)["checkpoints"]
    code = cluster.run(second)

    assert [v["is_whole"] for v in verdicts if v["id"] == shown["id"]] == [False]
    assert code == ExitCode.DONE
    failed = [event for event in second.events() if event["event"] == "fetch.failed"]
    assert failed[0]["is_checkpoint_bad"]
    assert "differs from its digest" in failed[0]["reason"]
    assert second.event("restore.completed")["step"] < shown["step"]
    assert_exact(read_log(cluster.log), quick_twin)


def test_killing_torchrun_leaves_no_orphan_and_the_job_goes_on(cluster, quick_twin):
    node = cluster.node("a")
    cluster.start(node, TOY_STEP_S="0.1")
    cluster.wait_for_step(7)
    orphans = [process.pid for process in cluster.ranks()]

    cluster.kill(*cluster.processes("torchrun"))
    code = cluster.finish(node)

    assert orphans
    assert not any(psutil.pid_exists(pid) for pid in orphans)
    assert code == ExitCode.DONE
    assert cluster.processes("all") == []
    assert_exact(read_log(cluster.log), quick_twin)


def test_a_script_that_always_fails_is_given_up_with_its_own_exit_code(cluster):
    node = cluster.node("a")

    code = cluster.run(node, TOY_FAULT="exit:0:3", LASTGASP_RESTART__MAX_CRASHES="1")

    crashes = [event for event in node.events() if event["event"] == "job.crashed"]
    assert code == 1  # torchrun turns every code of a worker into 1
    assert [event["num_crashes"] for event in crashes] == [1, 2]
    assert node.event("job.crash_loop")["num_crashes"] == 2


def test_a_script_that_never_attaches_is_told_what_is_missing(cluster):
    node = cluster.node("a")
    script = node.folder / "bare.py"
    script.write_text("print('training without the sdk')\n")

    cluster.start(node, command=["torchrun", "--nproc-per-node=1", str(script)])
    code = cluster.finish(node)

    assert code == ExitCode.DONE
    assert "trainer_sdk.attach" in node.event("rank.never_attached")["hint"]
    assert "training without the sdk" in node.stderr


def test_the_mistakes_of_the_first_ten_minutes_each_get_their_message(cluster):
    node = cluster.node("a")
    good = (node.folder / "job.toml").read_text()
    torchrun = ("--", "torchrun", "--nproc-per-node=1", str(TOY))
    (node.folder / "typo.toml").write_text(good.replace("every_steps", "every_step"))
    (node.folder / "gone.toml").write_text(good.replace('/store"', '/nowhere"'))
    (node.folder / "s3.toml").write_text(
        good.replace(cluster.store_url, "s3://some-bucket/x").replace(
            "[spool]", 'endpoint_url = "http://127.0.0.1:9"\nregion = "us-east-1"\n[spool]'
        )
    )

    cases = {
        "typo": run_cli(cluster, node, "run", "-c", "typo.toml", *torchrun),
        "no file": run_cli(cluster, node, "run", "-c", "missing.toml", *torchrun),
        "no store": run_cli(cluster, node, "run", "-c", "gone.toml", *torchrun),
        "no bucket": run_cli(cluster, node, "run", "-c", "s3.toml", *torchrun),
        "no torchrun": run_cli(cluster, node, "run", "-c", "job.toml", "--", "torchrunn", "x"),
        "no command": run_cli(cluster, node, "run", "-c", "job.toml"),
    }

    told = {name: (done.returncode, done.stderr) for name, done in cases.items()}
    assert told["typo"][0] == ExitCode.CONFIG
    assert "did you mean 'every_steps'" in told["typo"][1]
    assert told["no file"][0] == ExitCode.CONFIG
    assert "missing.toml" in told["no file"][1]
    assert told["no store"][0] == ExitCode.STORE_UNREACHABLE
    assert "create the directory" in told["no store"][1]
    assert told["no bucket"][0] == ExitCode.STORE_UNREACHABLE
    assert told["no torchrun"][0] == ExitCode.USAGE
    assert "command_not_found" in told["no torchrun"][1]
    assert told["no command"][0] == ExitCode.USAGE
    for name, (_, text) in told.items():
        assert "Traceback" not in text, name
        assert "what to do:" in text, (name, text)


def test_without_a_checkpoint_where_one_is_expected_nothing_starts_from_step_0(cluster):
    """A job whose log says that it ran, but whose checkpoints are not there."""
    node = cluster.node("a")
    cluster.start(node, TOY_STEP_S="0.3")
    cluster.wait_for_step(1)
    cluster.kill_everything(node)
    num_lines = len(cluster.lines(0))

    refused = cluster.run(node)
    allowed = cluster.run(node, "--allow-fresh")

    assert refused == ExitCode.NO_CHECKPOINT
    assert len(read_log(cluster.log)[0]) > num_lines
    assert allowed == ExitCode.DONE


def test_a_notice_in_a_long_evaluation_is_answered_at_its_poll(cluster, tmp_path):
    script = tmp_path / "evaluating.py"
    script.write_text(
        f"""
import json, os, sys, time
sys.path.insert(0, {str(TOY.parents[2])!r})
import torch, trainer_sdk
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with trainer_sdk.attach(model=model, optimizer=optimizer) as run:
    run.restore()
    while run.global_step < 6:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        with open(os.environ["TOY_LOG"] + "/rank-0.jsonl", "a") as log:
            log.write(json.dumps({{"step": run.global_step + 1}}) + "\\n")
        run.step()
        if run.global_step == 3 and not run.receipt.step:
            model.eval()
            for _ in range(600):  # an evaluation of a minute
                time.sleep(0.1)
                run.poll()
"""
    )
    command = ["torchrun", "--nproc-per-node=1", str(script)]
    node = cluster.node("a")
    cluster.start(node, command=command)
    cluster.wait_for_step(3)
    time.sleep(0.5)

    node.notice_file.touch()
    began_at = time.monotonic()
    code = cluster.finish(node)
    took_s = time.monotonic() - began_at
    node.notice_file.unlink()
    cluster.start(node, command=command)
    finished = cluster.finish(node)

    assert code == ExitCode.PREEMPTED_COMMITTED
    assert took_s < 30, "the evaluation was not waited for"
    assert finished == ExitCode.DONE
    assert node.event("restore.completed")["step"] == 3


def test_the_sdk_without_a_supervisor_changes_nothing_and_says_so_once(cluster):
    done = subprocess.run(
        [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=1", str(TOY)],
        env=base_env(cluster.log, **QUICK),
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )

    assert done.stderr.count("no supervisor") == 1


def test_supervisor_and_sdk_do_not_load_what_they_do_not_need():
    """Another process, since this one has loaded everything."""
    code = "import trainer_sdk, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"import json; {code}"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )

    loaded = set(json.loads(done.stdout))
    assert not loaded & {"torch", "numpy", "safetensors", "boto3", "structlog", "supervisor"}


def test_a_spot_interruption_told_by_ec2_metadata_is_committed_in_time(cluster, quick_twin):
    """The whole path from IMDSv2 over real HTTP to the exit code, and on to the next machine."""
    with Imds() as imds:
        environment = {
            "LASTGASP_NOTICE__SOURCES": "ec2",
            "LASTGASP_NOTICE__EC2_ENDPOINT": imds.url,
            "TOY_STEP_S": "0.1",
        }
        first, second = cluster.node("a"), cluster.node("b")
        cluster.start(first, **environment)
        cluster.wait_for_step(6)
        at = datetime.now(UTC) + timedelta(seconds=30)

        imds.announce(at.strftime("%Y-%m-%dT%H:%M:%SZ"))
        code = cluster.finish(first)
        imds.withdraw()
        cluster.lose(first)
        finished = cluster.run(second, **environment)

    assert (code, finished) == (ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE)
    assert second.event("restore.completed")["step"] >= 6
    assert_exact(read_log(cluster.log), quick_twin)
