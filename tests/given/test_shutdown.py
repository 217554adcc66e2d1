"""Given cases of kinds d and e: who gets which signal at a shutdown, and pipes that fill."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys

import psutil
import pytest

from supervisor.errors import ExitCode
from tests.e2e.harness import (
    SIZED_COMMAND,
    TOY,
    assert_exact,
    assert_sized,
    base_env,
    read_log,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_c57_a_save_longer_than_torchruns_patience_ends_and_no_rank_is_killed(make_cluster):
    """torchrun kills 30 s after a SIGTERM; here nobody sends it one while the save goes on."""
    cluster = make_cluster(world=2)
    first, second = cluster.node("a"), cluster.node("b")
    sized = {"SIZED_STEPS": "60", "SIZED_STEP_S": "0.1"}
    command = ["torchrun", "--nproc-per-node=2", SIZED_COMMAND[1]]
    cluster.start(
        first,
        command=command,
        LASTGASP_CHECKPOINT__EVERY_STEPS="1000",
        LASTGASP_NOTICE__SIGTERM_LEAD="120s",
        LASTGASP_FAILPOINTS="upload.chunk.before=sleep:35@1",
        **sized,
    )
    for rank in range(2):  # they do not wait for each other here
        cluster.wait_for_step(4, rank=rank)

    first.process.send_signal(signal.SIGTERM)
    code = cluster.finish(first)
    committed = first.event("checkpoint.committed")
    said = first.stderr
    cluster.lose(first)
    cluster.start(second, command=command, **sized)
    finished = cluster.finish(second)

    assert code == ExitCode.PREEMPTED_COMMITTED
    assert committed["upload_s"] > 30
    assert "SIGKILL" not in said
    assert "exitcode: -9" not in said.replace(" ", "")
    assert second.event("restore.completed")["step"] == committed["step"] >= 4
    assert finished == ExitCode.DONE
    assert_sized(read_log(cluster.log), last_step=60)


def test_c61_behind_a_shell_that_keeps_the_signals_it_is_warned_and_notices_still_work(
    quick_cluster, quick_twin
):
    """`sh -c '...; true'` as a container's first process: in a pid namespace of its own."""
    first, second = quick_cluster.node("a"), quick_cluster.node("b")
    line = shlex.join(["lastgasp", "run", "-c", f"{first.folder}/job.toml", "--"])
    job = shlex.join(["sh", "-c", f"{shlex.join([sys.executable, str(TOY)])}; true"])
    first.num_starts = 1
    with open(first.folder / "stderr-1.log", "wb") as stderr:
        first.process = subprocess.Popen(
            [*in_namespace(), "sh", "-c", f"{line} {job}; true"],
            env=base_env(quick_cluster.log, TOY_WORKERS="0", TOY_STEP_S="0.1"),
            stdout=stderr,
            stderr=stderr,
            start_new_session=True,
        )
    quick_cluster.wait_for_step(6)
    first.process.send_signal(signal.SIGTERM)  # stays with the shell, or with unshare
    quick_cluster.wait_for_step(8)

    first.notice_file.touch()
    quick_cluster.finish(first)
    quick_cluster.lose(first)
    finished = quick_cluster.run(second)

    assert finished == ExitCode.DONE
    assert second.event("restore.completed")["step"] >= 8
    assert_exact(read_log(quick_cluster.log), quick_twin)


def in_namespace() -> list[str]:
    """Where a process may make pid namespaces, the shell is pid 1; else it is a plain shell."""
    if os.getuid() == 0:
        return ["unshare", "--pid", "--fork", "--mount-proc"]
    return []


def test_c61_the_shell_is_named_at_the_start_and_exec_needs_no_warning(quick_cluster):
    node = quick_cluster.node("a")
    line = shlex.join(["lastgasp", "run", "-c", f"{node.folder}/job.toml", "--", "true"])

    with_shell, with_exec = (
        subprocess.run(
            ["sh", "-c", script],
            env=base_env(quick_cluster.log),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        ).stderr
        for script in (f"{line}; true", f"exec {line}")
    )

    assert "signals.may_not_arrive" in with_shell
    assert "exec lastgasp run" in with_shell
    assert "supervisor.started" in with_exec
    assert "signals.may_not_arrive" not in with_exec


def test_c63_a_signal_to_every_process_at_once_leaves_a_complete_checkpoint(make_cluster, twin):
    """systemd's default KillMode: the supervisor, torchrun, the ranks and their loader workers."""
    cluster = make_cluster(world=2)
    node = cluster.node("a")
    cluster.start(node, TOY_STEP_S="0.15")
    cluster.wait_for_event(node, "checkpoint.committed", step=5)
    cluster.wait_for_step(8)

    everyone = [*cluster.processes("all"), psutil.Process(node.process.pid)]
    for process in everyone:
        process.send_signal(signal.SIGTERM)
    code = cluster.finish(node)
    left = cluster.processes("all")
    verdicts = cluster.cli(node, "verify", "--read-data")["checkpoints"]
    finished = cluster.run(node)

    assert len(everyone) >= 4
    assert code in (ExitCode.PREEMPTED_COMMITTED, ExitCode.PREEMPTED_OLDER_STANDS)
    assert left == []
    assert verdicts
    assert all(verdict["is_whole"] for verdict in verdicts)
    assert finished == ExitCode.DONE
    assert_exact(read_log(cluster.log), twin(2))


CHATTY = """
import os, sys, time
sys.path.insert(0, os.environ["PYTHONPATH"])
import torch, trainer_sdk
rank = int(os.environ["RANK"])
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with trainer_sdk.attach(model=model, optimizer=optimizer) as run:
    run.restore()
    while run.global_step < 12:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        if run.global_step == 4 and rank == 0:
            for stream, letter in ((sys.stdout, "o"), (sys.stderr, "e")):
                stream.write((letter * 1023 + "\\n") * 5120)
                stream.flush()
        if run.global_step == 4 and rank == 1:
            sys.stdout.write("half a line")
            sys.stdout.flush()
            time.sleep(2)
        time.sleep(0.02)
        run.step()
"""


def test_c77_ranks_that_write_megabytes_at_once_are_not_blocked_and_nothing_is_lost(
    make_cluster, tmp_path
):
    script = tmp_path / "chatty.py"
    script.write_text(CHATTY)
    cluster = make_cluster(world=2)
    node = cluster.node("a")

    cluster.start(node, command=["torchrun", "--nproc-per-node=2", str(script)])
    code = cluster.finish(node)

    said = node.stderr
    assert code == ExitCode.DONE
    assert said.count("o" * 1023) == 5120
    assert said.count("e" * 1023) == 5120
    assert "half a line" in said
    assert node.event("checkpoint.committed")["step"] == 12


def test_c77_a_reader_that_stops_reading_our_own_output_stops_only_the_words(
    quick_cluster, quick_twin
):
    """Whoever starts the supervisor may keep its output in a pipe and never read it."""
    node = quick_cluster.node("a")
    node.num_starts = 1
    (node.folder / "stderr-1.log").touch()
    run = ["lastgasp", "run", "-c", str(node.folder / "job.toml")]
    node.process = subprocess.Popen(
        [*run, "--", "sh", "-c", f"exec {sys.executable} {TOY} 2>/dev/null"],
        env=base_env(
            quick_cluster.log,
            TOY_WORKERS="0",
            LASTGASP_LOG__LEVEL="debug",
            LASTGASP_CHECKPOINT__EVERY_STEPS="1",
        ),
        stdout=subprocess.DEVNULL,
        stderr=full_pipe(),
        start_new_session=True,
    )

    code = quick_cluster.finish(node)

    assert code == ExitCode.DONE
    assert_exact(read_log(quick_cluster.log), quick_twin)


def full_pipe() -> int:
    """The writing end of a pipe without any room left, whose reading end stays open."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    try:
        while True:
            os.write(write_end, b"x" * 65536)
    except BlockingIOError:
        pass
    try:
        while True:
            os.write(write_end, b"x")
    except BlockingIOError:
        os.set_blocking(write_end, True)
    full_pipe.kept = read_end  # type: ignore[attr-defined]
    return write_end
