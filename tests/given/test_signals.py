"""Kind d of the given cases: signals, notices at any moment, threads and subprocesses."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time

import psutil
import pytest

from supervisor.control import SupervisorNotRunning, ask
from supervisor.errors import ExitCode
from tests.e2e.harness import ROOT, TOY, assert_exact, read_log, run_twin
from tests.given.stored import saved_weights

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
MOMENTS = [sys.executable, str(ROOT / "tests" / "jobs" / "moments.py")]
MOMENTS_STEPS = 60


def signal_all(cluster, node, number: int) -> None:
    """One signal to every process of the tree at once, as `kill -TERM -pgid` or systemd sends it:
    supervisor, torchrun, ranks and loader workers."""
    tree = [psutil.Process(node.process.pid), *cluster.processes("all")]
    for process in tree:
        os.kill(process.pid, number)


@pytest.fixture(scope="module")
def moments_twin(tmp_path_factory):
    return run_twin(
        tmp_path_factory.mktemp("moments-twin"),
        world=1,
        command=MOMENTS,
        MOMENTS_STEPS=str(MOMENTS_STEPS),
    )


@pytest.fixture
def moments(make_cluster):
    return make_cluster(world=1, command=MOMENTS, env={"MOMENTS_STEPS": str(MOMENTS_STEPS)})


def phases(cluster) -> list[str]:
    path = cluster.log / "where"
    return path.read_text().splitlines() if path.exists() else []


def wait_for_phase(cluster, phase: str, *, more_than: int = 0) -> None:
    cluster.wait(lambda: phases(cluster).count(phase) > more_than, f"phase {phase}")


def test_c58_sigterm_to_the_whole_tree_still_saves_the_step_it_came_in(make_cluster, twin):
    """Two ranks under torchrun with four loader workers each, started anew in each epoch."""
    cluster = make_cluster(env={"TOY_WORKERS": "4", "LASTGASP_CHECKPOINT__EVERY_STEPS": "1000"})
    first, second = cluster.node("a"), cluster.node("b")
    cluster.start(first, TOY_STEP_S="0.3")
    cluster.wait_for_step(7)

    signal_all(cluster, first, signal.SIGTERM)
    code = cluster.finish(first)
    last_step = cluster.lines(0)[-1]["step"]
    cluster.lose(first)
    finished = cluster.run(second)

    assert (code, finished) == (ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE)
    assert second.event("restore.completed")["step"] == last_step >= 7
    assert_exact(read_log(cluster.log), twin(2))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_c58_persistent_workers_outlive_sigterm_as_well(make_cluster, tmp_path, context):
    toy = [sys.executable, str(TOY)]
    env = {"TOY_WORKERS": "4", "TOY_PERSISTENT": "1", "TOY_EPOCHS": "1", "TOY_CONTEXT": context}
    cluster = make_cluster(
        world=1, command=toy, env={**env, "LASTGASP_CHECKPOINT__EVERY_STEPS": "1000"}
    )
    node = cluster.node("a")
    cluster.start(node, TOY_STEP_S="0.3")
    cluster.wait_for_step(7)

    signal_all(cluster, node, signal.SIGTERM)
    code = cluster.finish(node)
    last_step = cluster.lines(0)[-1]["step"]
    finished = cluster.run(node)

    assert (code, finished) == (ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE)
    assert node.event("restore.completed")["step"] == last_step
    assert_exact(read_log(cluster.log), run_twin(tmp_path / "twin", world=1, command=toy, **env))


def test_c58_sigterm_without_a_notice_still_ends_a_rank(moments, moments_twin):
    """Whoever kills a rank alone means it: the job crashes and is started again."""
    node = moments.node("a")
    moments.start(node, MOMENTS_LONG="7:60")
    wait_for_phase(moments, "long step")
    (rank,) = moments.ranks()

    rank.terminate()
    moments.wait_for_event(node, "job.crashed", exit_code=-signal.SIGTERM)
    moments.kill_everything(node)
    finished = moments.run(node)

    assert finished == ExitCode.DONE
    assert node.event("restore.completed")["step"] == 5
    assert_exact(read_log(moments.log), moments_twin)


AWKWARD = ["backward", "optimizer", "import", "logging", "gc"]


def test_c59_notices_in_awkward_moments_always_end_at_a_step_boundary(moments, moments_twin):
    """SIGTERM to the whole tree in the middle of backward, of the optimizer's step, of an import,
    of logging with the lock held, of garbage collection."""
    node = moments.node("a")
    for phase in AWKWARD:
        num_before = phases(moments).count(phase)
        moments.start(node, MOMENTS_S="0.3", LASTGASP_CHECKPOINT__EVERY_STEPS="1000")
        wait_for_phase(moments, phase, more_than=num_before + 1)
        time.sleep(random.Random(phase).random() * 0.2)

        signal_all(moments, node, signal.SIGTERM)
        code = moments.finish(node)

        last_step = moments.lines(0)[-1]["step"]
        assert code == ExitCode.PREEMPTED_COMMITTED, phase
        assert node.event("checkpoint.committed")["step"] == last_step, phase
    finished = moments.run(node)

    assert finished == ExitCode.DONE
    assert_exact(read_log(moments.log), moments_twin)


def test_c59_two_hundred_saves_and_notices_at_random_moments_never_catch_half_a_step(
    moments, moments_twin
):
    """Saves, and notices that are withdrawn at once, in one life after another without a pause.
    Every checkpoint in the store is exactly what the log says of its step."""
    chance = random.Random(59)
    node = moments.node("a")
    asked = {"save": 0, "notify": 0}
    codes = []
    while not codes or codes[-1] == ExitCode.PREEMPTED_COMMITTED:
        moments.start(
            node,
            MOMENTS_S="0.04",
            LASTGASP_NOTICE__AFTER="hold",
            LASTGASP_CHECKPOINT__EVERY_STEPS="1000",
        )
        # A notice may come with the very end of training: then the next start ends at once.
        moments.wait(
            lambda: "restore.completed" in node.stderr or node.process.poll() is not None,
            "training",
        )
        hammer(node, chance, asked)
        codes.append(moments.finish(node))

    assert codes[-1] == ExitCode.DONE
    assert asked["save"] + asked["notify"] >= 200
    assert asked["notify"] >= 3
    assert_exact(read_log(moments.log), moments_twin)
    weights = {line["step"]: line["weights"] for line in moments_twin[0]}
    saved = saved_weights(moments)
    assert len(saved) >= 5  # how many of the wishes one save answers is a matter of speed
    assert {step: saved[step] for step in saved if saved[step] != weights[step]} == {}


def hammer(node, chance: random.Random, asked: dict[str, int]) -> None:
    """Ask the running supervisor for saves, now and then announce the end and take it back."""
    runtime = str(node.folder / "run")
    while node.process.poll() is None:
        verb = "notify" if chance.random() < 0.03 else "save"
        try:
            ask(runtime, verb, deadline_s=30.0 if verb == "notify" else None)
            if verb == "notify":
                time.sleep(chance.random() * 0.1)
                ask(runtime, "withdraw")
        except SupervisorNotRunning:
            continue  # it is about to end
        asked[verb] += 1
        time.sleep(chance.random() * 0.06)


def test_c60_a_notice_in_a_long_evaluation_that_polls_is_saved_in_time(moments, moments_twin):
    node = moments.node("a")
    moments.start(node, MOMENTS_EVAL="7:60:poll", LASTGASP_CHECKPOINT__EVERY_STEPS="1000")
    wait_for_phase(moments, "evaluation")

    node.notice_file.touch()
    code = moments.finish(node)
    node.notice_file.unlink()
    finished = moments.run(node, MOMENTS_EVAL="7:0:poll")

    assert (code, finished) == (ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE)
    assert node.event("restore.completed")["step"] == 7
    # The evaluation is not skipped in silence: the receipt tells.
    assert "evaluated" not in phases(moments)
    assert "it was interrupted in run.poll() and is not run again" in node.stderr
    assert_exact(read_log(moments.log), moments_twin)


@pytest.mark.parametrize(
    ("setting", "phase"),
    [({"MOMENTS_EVAL": "7:60"}, "evaluation"), ({"MOMENTS_LONG": "7:60"}, "long step")],
    ids=["evaluation that does not poll", "one long step"],
)
def test_c60_a_phase_longer_than_the_lead_time_falls_back_to_the_newest_checkpoint_and_says_so(
    moments, moments_twin, setting, phase
):
    node = moments.node("a")
    moments.start(node, LASTGASP_NOTICE__FILE_LEAD="4s", **setting)
    wait_for_phase(moments, phase)
    moments.wait_for_event(node, "checkpoint.committed", step=5)

    node.notice_file.touch()
    code = moments.finish(node)
    missed = node.event("deadline.missed")
    node.notice_file.unlink()
    finished = moments.run(node)

    assert (code, finished) == (ExitCode.PREEMPTED_OLDER_STANDS, ExitCode.DONE)
    assert missed
    assert node.event("restore.completed")["step"] == 5
    assert_exact(read_log(moments.log), moments_twin)


def test_c60_a_notice_in_the_start_up_before_the_first_step_says_that_there_is_nothing_to_save(
    moments, moments_twin
):
    node = moments.node("a")
    moments.start(node, MOMENTS_STARTUP="60", LASTGASP_NOTICE__FILE_LEAD="4s")
    wait_for_phase(moments, "start-up")

    node.notice_file.touch()
    code = moments.finish(node)
    said = [event["event"] for event in node.events()]
    node.notice_file.unlink()
    refused = moments.run(node)
    finished = moments.run(node, "--allow-fresh")

    assert code == ExitCode.PREEMPTED_OLDER_STANDS
    assert "deadline.missed" in said or "evacuation.nothing_to_save" in said
    assert refused == ExitCode.NO_CHECKPOINT
    assert finished == ExitCode.DONE
    assert_exact(read_log(moments.log), moments_twin)


@pytest.mark.parametrize("when", ["before", "after"])
def test_c64_handlers_of_the_script_run_and_the_save_happens_too(moments, moments_twin, when):
    node = moments.node("a")
    moments.start(node, MOMENTS_HANDLERS=when, MOMENTS_S="0.05")
    moments.wait_for_step(3)
    (rank,) = moments.ranks()

    rank.send_signal(signal.SIGUSR1)
    moments.wait(lambda: (moments.log / "signals").exists(), "the script's SIGUSR1 handler")
    signal_all(moments, node, signal.SIGTERM)
    code = moments.finish(node)
    last_step = moments.lines(0)[-1]["step"]
    finished = moments.run(node, MOMENTS_HANDLERS=when)

    assert (code, finished) == (ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE)
    assert node.event("restore.completed")["step"] == last_step
    assert (moments.log / "signals").read_text().splitlines() == [
        f"{rank.pid} SIGUSR1",
        f"{rank.pid} SIGTERM",
    ]
    before, after = (moments.log / "handlers").read_text().splitlines()[-2:]
    theirs = "on_signal on_signal"
    assert before == f"before {theirs if when == 'before' else '0 0'}"
    assert after == f"after {theirs}"
    assert_exact(read_log(moments.log), moments_twin)


def test_c64_a_script_without_handlers_finds_its_process_as_it_was(moments, moments_twin):
    node = moments.node("a")

    code = moments.run(node)

    assert code == ExitCode.DONE
    assert (moments.log / "handlers").read_text().splitlines() == ["before 0 0", "after 0 0"]
    assert_exact(read_log(moments.log), moments_twin)


@pytest.mark.parametrize("place", ["thread", "child"])
def test_c67_training_in_a_side_thread_or_a_subprocess_is_saved_and_resumed(
    moments, moments_twin, place
):
    node = moments.node("a")
    moments.start(node, MOMENTS_IN=place, MOMENTS_S="0.05")
    moments.wait_for_step(4)

    node.notice_file.touch()
    code = moments.finish(node)
    node.notice_file.unlink()
    last_step = moments.lines(0)[-1]["step"]
    finished = moments.run(node, MOMENTS_IN=place)

    assert (code, finished) == (ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE)
    assert node.event("restore.completed")["step"] == last_step
    assert_exact(read_log(moments.log), moments_twin)


def test_c67_children_of_a_rank_that_attach_too_are_told_and_training_goes_on(
    moments, moments_twin
):
    node = moments.node("a")

    code = moments.run(node, MOMENTS_IN="both")

    assert code == ExitCode.DONE
    told = re.findall(r"this rank's run is in process \d+, and this is its child", node.stderr)
    assert len(told) == 2
    assert re.search(r"process \d+ is rank 0 of this job, so process \d+ cannot be", node.stderr)
    assert [event["event"] for event in node.events()].count("generation.claimed") == 1
    assert_exact(read_log(moments.log), moments_twin)
