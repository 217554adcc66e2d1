"""What hostile testing found: each case as a whole life on real processes."""

from __future__ import annotations

import signal
import sys

import pytest

from supervisor.errors import ExitCode
from tests.e2e.harness import TOY, assert_exact, read_log

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
QUICK = {"TOY_WORKERS": "0"}


@pytest.fixture
def cluster(quick_cluster):
    return quick_cluster


def test_a_supervisor_killed_before_the_first_commit_is_followed_by_one_that_takes_up_the_job(
    cluster, quick_twin
):
    """The log has no checkpoint, but the job lives: nothing was lost and nothing is refused."""
    node = cluster.node("a")
    cluster.start(node, TOY_STEP_S="0.2", LASTGASP_FAILPOINTS="upload.chunk.after=kill@1")
    killed = cluster.finish(node)
    trainers = {process.pid for process in cluster.ranks()}

    cluster.start(node)
    cluster.wait_for_event(node, "job.taken_up")
    cluster.wait_for_event(node, "restore.completed")
    still_there = {process.pid for process in cluster.ranks()}
    code = cluster.finish(node)

    assert killed == -signal.SIGKILL
    assert still_there == trainers != set()
    assert code == ExitCode.DONE
    assert_exact(read_log(cluster.log), quick_twin)


def test_a_checkpoint_that_only_the_spool_holds_is_resumed_from(cluster, quick_twin):
    """Killed between the spool and the first commit, then everything else with it."""
    node = cluster.node("a")
    cluster.start(
        node,
        TOY_STEP_S="0.2",
        LASTGASP_FAILPOINTS="upload.complete.before=sleep:2@1,part.put.before=kill@1",
    )
    cluster.finish(node)
    cluster.kill_everything(node)

    code = cluster.run(node)

    assert code == ExitCode.DONE
    claimed = node.event("generation.claimed")
    assert (claimed["is_local"], claimed["resume_step"]) == (True, 5)
    assert node.event("fetch.completed")["source"] == "spool"
    assert_exact(read_log(cluster.log), quick_twin)


def test_sigterm_stands_when_another_notice_is_withdrawn(cluster, quick_twin):
    node = cluster.node("a")
    cluster.start(node, TOY_STEP_S="0.3")
    cluster.wait_for_step(3)

    cluster.cli(node, "notify", "--deadline", "20s", check=False)
    node.process.send_signal(signal.SIGTERM)
    cluster.cli(node, "notify", "--withdraw", check=False)
    code = cluster.finish(node)
    finished = cluster.run(node)

    assert code == ExitCode.PREEMPTED_COMMITTED
    assert finished == ExitCode.DONE
    assert_exact(read_log(cluster.log), quick_twin)


def test_a_script_that_leaves_early_with_success_goes_on_when_started_again(cluster, tmp_path):
    script = tmp_path / "leaves.py"
    script.write_text(
        f"""
import os, sys, time
sys.path.insert(0, {str(TOY.parents[2])!r})
import torch, trainer_sdk
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with trainer_sdk.attach(model=model, optimizer=optimizer) as run:
    run.restore()
    while run.global_step < 14:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        run.step()
        time.sleep(0.05)
        if run.global_step == 7 and "LEAVE" in os.environ:
            sys.exit(0)
"""
    )
    command = ["torchrun", "--nproc-per-node=1", str(script)]
    node = cluster.node("a")

    cluster.start(node, command=command, LEAVE="1")
    left = cluster.finish(node)
    hint = node.event("finish.missing")["hint"]
    cluster.start(node, command=command)
    finished = cluster.finish(node)

    assert (left, finished) == (ExitCode.DONE, ExitCode.DONE)
    assert "run.finish()" in hint
    assert node.event("restore.completed")["step"] == 5
    assert node.event("job.finished")["step"] == 14


def test_a_command_that_is_not_torchrun_is_supervised_as_well(cluster, quick_twin):
    node = cluster.node("a")

    cluster.start(node, command=[sys.executable, str(TOY)])
    code = cluster.finish(node)

    assert code == ExitCode.DONE
    assert_exact(read_log(cluster.log), quick_twin)
