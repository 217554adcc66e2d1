"""Given cases of kind h: which checkpoint is taken, ports, restart limits, stale sockets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from supervisor.errors import ExitCode
from tests.e2e.harness import (
    SIZED_COMMAND,
    TOY,
    Node,
    assert_exact,
    assert_sized,
    base_env,
    read_log,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
MANY = {"LASTGASP_CHECKPOINT__EVERY_STEPS": "333", "LASTGASP_CHECKPOINT__KEEP": "10"}
MANY_SIZED = {"SIZED_STEPS": "1400", "SIZED_STEP_S": "0.002", "SIZED_MIB": "0.1"}


@pytest.fixture
def many_checkpoints(make_cluster):
    """A node that saved steps 333, 666, 999 and 1332 and was then killed."""
    cluster = make_cluster(world=1, env={**MANY, **MANY_SIZED})
    node = cluster.node("a")
    cluster.start(node, command=SIZED_COMMAND, SIZED_STEP_S="0.004")
    cluster.wait_for_event(node, "checkpoint.committed", step=1332)
    cluster.kill_everything(node)
    return cluster, node


def test_c111_1332_is_newer_than_999_in_the_store_and_in_the_spool(many_checkpoints):
    cluster, first = many_checkpoints
    second = cluster.node("b")
    listed = [checkpoint["step"] for checkpoint in cluster.cli(first, "ls")["checkpoints"]]
    spooled = [path.name for path in (first.folder / "spool" / "toy" / "checkpoints").iterdir()]

    cluster.start(second, command=SIZED_COMMAND)
    code = cluster.finish(second)

    assert listed == [333, 666, 999, 1332]
    assert max(int(name.split("-")[1]) for name in spooled) == 1332
    assert second.event("restore.completed")["step"] == 1332
    assert code == ExitCode.DONE
    assert_sized(read_log(cluster.log), last_step=1400)


@pytest.mark.parametrize("order", ["equal", "reversed"])
def test_c112_file_times_do_not_decide(many_checkpoints, order):
    """As after a copy of the bucket, or a restore from a backup."""
    cluster, first = many_checkpoints
    paths = sorted(path for path in Path(cluster.folder / "store").rglob("*") if path.is_file())
    for place, path in enumerate(sorted(paths, key=lambda path: path.stat().st_mtime)):
        at = 1_700_000_000 if order == "equal" else 1_700_000_000 - place
        os.utime(path, (at, at))
    cluster.lose(first)
    second = cluster.node("b")

    cluster.start(second, command=SIZED_COMMAND)
    code = cluster.finish(second)

    assert second.event("restore.completed")["step"] == 1332
    assert code == ExitCode.DONE


def test_c112_a_clock_an_hour_back_changes_nothing(quick_cluster, quick_twin, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import time\nnow, now_ns = time.time, time.time_ns\n"
        "time.time = lambda: now() - 3600\ntime.time_ns = lambda: now_ns() - 3600 * 10**9\n"
    )
    first, second, third = (quick_cluster.node(name) for name in "abc")
    env = base_env(quick_cluster.log)
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    told = subprocess.check_output(
        [sys.executable, "-c", "import time; print(time.time())"], env=env
    )
    was_an_hour_back = time.time() - float(told) > 3500
    codes = [
        quick_cluster.run(first, TOY_NOTICE=f"7:{first.notice_file}"),
        quick_cluster.run(
            second,
            TOY_NOTICE=f"12:{second.notice_file}",
            PYTHONPATH=env["PYTHONPATH"],
        ),
        quick_cluster.run(third),
    ]

    assert codes == [75, 75, 0]
    assert was_an_hour_back
    assert third.event("restore.completed")["step"] == 12
    assert_exact(read_log(quick_cluster.log), quick_twin)


MEETING = """
import os, sys, torch.distributed as dist
dist.init_process_group("gloo")
told = [None, None]
dist.all_gather_object(told, os.environ["MEETING"])
print("MET", *told, flush=True)
dist.destroy_process_group()
"""


def test_c113_two_jobs_on_one_host_never_meet_though_the_default_port_is_taken(
    make_cluster, tmp_path
):
    script = tmp_path / "meeting.py"
    script.write_text(MEETING)
    command = ["torchrun", "--nproc-per-node=2", str(script)]
    clusters = [make_cluster(world=2) for _ in range(2)]
    jobs = [(cluster, cluster.node("a")) for cluster in clusters]
    taken = socket.create_server(("127.0.0.1", 29500))
    left_in_time_wait()

    for number in range(2):
        for place, (cluster, node) in enumerate(jobs):
            (node.folder / "job.toml").write_text(
                (node.folder / "job.toml")
                .read_text()
                .replace('id = "toy"', f'id = "job{place}"')
                .replace(f'"job{place}-{number - 1}"', f'"job{place}-{number}"')
            )
            cluster.start(node, command=command, MEETING=f"job-{place}")
        codes = [cluster.finish(node) for cluster, node in jobs]
        met = [
            [line.split()[1:] for line in node.stderr.splitlines() if line.startswith("MET")]
            for _, node in jobs
        ]

        assert codes == [0, 0], [node.stderr[-2000:] for _, node in jobs]
        assert met == [[["job-0"] * 2] * 2, [["job-1"] * 2] * 2]
    taken.close()


def left_in_time_wait() -> None:
    """Close connections of a server of ours first, so that its port stays in TIME_WAIT."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(5):
            client = socket.create_connection(server.getsockname())
            accepted, _ = server.accept()
            accepted.close()
            client.close()


@pytest.mark.parametrize(("fault", "detail"), [("3:1", "exit code 1"), ("3:-15", "signal 15")])
def test_c115_a_job_that_always_fails_is_given_up_after_rising_waits(make_cluster, fault, detail):
    """Also one that ends as if by SIGTERM, though nobody gave a notice."""
    cluster = make_cluster(world=1)
    node = cluster.node("a")
    cluster.start(
        node,
        command=SIZED_COMMAND,
        SIZED_EXIT=fault,
        LASTGASP_RESTART__MAX_CRASHES="3",
        LASTGASP_RESTART__BACKOFF="400ms",
        LASTGASP_CHECKPOINT__EVERY_STEPS="100",
    )

    code = cluster.finish(node)

    waits = [event["wait_s"] for event in node.events() if event["event"] == "relaunch.scheduled"]
    given_up = node.event("job.crash_loop")
    assert code != 0
    assert waits == sorted(waits)
    assert waits[-1] > 2 * waits[0]
    assert len(waits) == 3
    assert given_up["num_crashes"] == 4
    assert detail in str(given_up) or detail in node.stderr


def test_c115_preemptions_do_not_use_up_the_limit(quick_cluster, quick_twin):
    """Three notices in a row under a limit of one crash, then a crash, and it still goes on."""
    flag = quick_cluster.folder / "crashed"
    limit = {"LASTGASP_RESTART__MAX_CRASHES": "1"}
    nodes = [quick_cluster.node(name) for name in "abcd"]

    codes = [
        quick_cluster.run(node, TOY_NOTICE=f"{step}:{node.notice_file}", **limit)
        for node, step in zip(nodes, (4, 8, 12), strict=False)
    ]
    last = quick_cluster.run(nodes[3], TOY_FAULT=f"exit:0:15:{flag}", **limit)

    assert codes == [ExitCode.PREEMPTED_COMMITTED] * 3
    assert last == ExitCode.DONE
    assert flag.exists()
    assert_exact(read_log(quick_cluster.log), quick_twin)


def with_runtime_dir(node: Node, path: Path) -> None:
    config = node.folder / "job.toml"
    text = config.read_text().replace(
        f'runtime_dir = "{node.folder}/run"', f'runtime_dir = "{path}"'
    )
    config.write_text(text)


def test_c117_f60_a_socket_left_by_a_kill_is_replaced_also_in_a_deep_directory(
    quick_cluster, quick_twin
):
    node = quick_cluster.node("a")
    deep = node.folder / ("deep-" * 14) / ("deeper-" * 12)
    with_runtime_dir(node, deep)
    quick_cluster.start(node, TOY_STEP_S="0.1")
    quick_cluster.wait_for_step(3)
    quick_cluster.kill_everything(node)
    left = deep / "supervisor.sock"
    was_left = left.is_socket()

    quick_cluster.start(node, "--allow-fresh", TOY_STEP_S="0.1")
    quick_cluster.wait_for_step(4)
    live = quick_cluster.cli(node, "status")
    second = subprocess.run(
        ["lastgasp", "run", "-c", str(node.folder / "job.toml"), "--", "torchrun", str(TOY)],
        env=base_env(quick_cluster.log), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    code = quick_cluster.finish(node)

    assert len(str(deep)) > 150
    assert was_left
    assert live["is_live"]
    assert second.returncode == ExitCode.ALREADY_RUNNING
    assert "[already_running]" in second.stderr
    assert code == ExitCode.DONE
    assert_exact(read_log(quick_cluster.log), quick_twin)


def test_c117_a_file_in_the_sockets_place_is_refused_and_left(quick_cluster):
    node = quick_cluster.node("a")
    place = node.folder / "run" / "supervisor.sock"
    place.parent.mkdir()
    place.write_text("somebody's notes")

    code = quick_cluster.run(node)

    assert code == ExitCode.CONFIG
    assert "[runtime_dir_unsafe]" in node.stderr
    assert "what to do:" in node.stderr
    assert "Traceback" not in node.stderr
    assert place.read_text() == "somebody's notes"


def test_c117_a_supervisor_killed_while_another_waits_is_followed_by_it(quick_cluster, quick_twin):
    """The lock goes with its holder, however it died; the ranks never notice."""
    node = quick_cluster.node("a")
    quick_cluster.start(node, TOY_STEP_S="0.2")
    quick_cluster.wait_for_step(6)
    first = node.process
    first.send_signal(signal.SIGSTOP)  # it holds the lock, and answers nobody
    refused = subprocess.run(
        ["lastgasp", "run", "-c", str(node.folder / "job.toml"), "--", sys.executable, str(TOY)],
        env=base_env(quick_cluster.log), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    first.kill()
    first.wait()

    quick_cluster.start(node)
    code = quick_cluster.finish(node)

    assert refused.returncode == ExitCode.ALREADY_RUNNING
    assert node.event("job.taken_up")
    assert code == ExitCode.DONE
    assert_exact(read_log(quick_cluster.log), quick_twin)
