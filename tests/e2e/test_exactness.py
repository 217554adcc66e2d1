"""Resume is exact: every line of every life equals the line of the job that was never stopped."""

from __future__ import annotations

import signal

import pytest

from supervisor.errors import ExitCode
from tests.e2e.harness import assert_exact, read_log

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
# Batches of an epoch by world size: 97 samples, batch 4 on each rank, padded to equal lengths.
EPOCH = {1: 25, 2: 13, 4: 7}


def stop_at(cluster, node, *steps: int) -> dict[str, str]:
    return {"TOY_NOTICE": f"{','.join(map(str, steps))}:{node.notice_file}"}


@pytest.mark.parametrize(
    ("world", "step"),
    [
        (1, 1),
        (1, EPOCH[1]),
        (2, 1),
        (2, 7),
        (2, EPOCH[2]),
        (2, EPOCH[2] + 1),
        (4, 4),
    ],
)
def test_a_notice_at_a_step_resumes_at_that_step_on_another_node(make_cluster, twin, world, step):
    """First step, mid-epoch, last batch of an epoch, first batch of the next."""
    cluster = make_cluster(world=world)
    first, second = cluster.node("a"), cluster.node("b")

    code = cluster.run(first, **stop_at(cluster, first, step))
    cluster.lose(first)
    finished = cluster.run(second)

    assert (code, finished) == (ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE)
    assert second.event("restore.completed")["step"] == step
    assert second.event("fetch.completed")["source"] == "store"
    assert_exact(read_log(cluster.log), twin(world))


def test_two_notices_in_a_row_resume_exactly_twice(make_cluster, twin):
    cluster = make_cluster()
    nodes = [cluster.node(name) for name in "abc"]

    codes = [
        cluster.run(nodes[0], **stop_at(cluster, nodes[0], 6)),
        cluster.run(nodes[1], **stop_at(cluster, nodes[1], 7)),
        cluster.run(nodes[2]),
    ]

    assert codes == [ExitCode.PREEMPTED_COMMITTED, ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE]
    assert nodes[2].event("restore.completed")["step"] == 7
    assert_exact(read_log(cluster.log), twin(2))


def test_sigterm_to_the_supervisor_commits_and_the_next_start_goes_on(make_cluster, twin):
    cluster = make_cluster()
    node = cluster.node("a")
    cluster.start(node, TOY_STEP_S="0.1")
    cluster.wait_for_step(7)

    node.process.send_signal(signal.SIGTERM)
    code = cluster.finish(node)
    finished = cluster.run(node)

    assert (code, finished) == (ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE)
    assert_exact(read_log(cluster.log), twin(2))


def test_a_killed_trainer_resumes_from_its_committed_image_in_memory(make_cluster, twin, tmp_path):
    cluster = make_cluster()
    node = cluster.node("a")

    code = cluster.run(node, TOY_FAULT=f"kill:1:7:{tmp_path}/killed", TOY_STEP_S="0.1")

    assert code == ExitCode.DONE
    assert node.event("fetch.completed")["source"] == "memory"
    assert node.event("restore.completed")["step"] == 5
    assert_exact(read_log(cluster.log), twin(2))


def test_a_killed_trainer_resumes_from_the_memory_image_alone(make_cluster, twin, tmp_path):
    """No spool, and the store has not taken the checkpoint: only the images that outlive the ranks
    are left, and the claim names them."""
    cluster = make_cluster(env={"LASTGASP_SPOOL__PATH": "/dev/null/spool"})
    node = cluster.node("a")

    code = cluster.run(
        node,
        TOY_FAULT=f"kill:1:7:{tmp_path}/killed",
        TOY_STEP_S="0.1",
        LASTGASP_FAILPOINTS="upload.complete.before=EIO@1",
    )

    claimed = [event for event in node.events() if event["event"] == "generation.claimed"]
    assert [(event["is_local"], event["resume_step"]) for event in claimed] == [
        (False, None),
        (True, 5),
    ]
    assert node.event("fetch.completed")["source"] == "memory"
    assert code == ExitCode.DONE
    assert_exact(read_log(cluster.log), twin(2))
    committed = [row["step"] for row in cluster.cli(node, "ls")["checkpoints"]]
    assert committed[-1] == 26


@pytest.mark.parametrize(
    "setting",
    [{"LASTGASP_CHECKPOINT__SCHEDULE": "overlapped"}, {"LASTGASP_CHECKPOINT__STAGING": "disk"}],
    ids=["overlapped", "disk"],
)
def test_other_ways_of_staging_are_exact_too(make_cluster, twin, setting):
    cluster = make_cluster(env=setting)
    first, second = cluster.node("a"), cluster.node("b")
    cluster.start(first, TOY_STEP_S="0.1")
    cluster.wait_for_event(first, "checkpoint.committed", step=10)

    cluster.lose(first)
    code = cluster.run(second)

    assert code == ExitCode.DONE
    assert second.event("restore.completed")["step"] >= 10
    assert_exact(read_log(cluster.log), twin(2))


def test_a_killed_supervisor_takes_up_the_running_job(make_cluster, twin):
    cluster = make_cluster()
    node = cluster.node("a")
    cluster.start(node, TOY_STEP_S="0.2")
    cluster.wait_for_step(7)
    trainers = {process.pid for process in cluster.ranks()}

    cluster.kill_supervisor(node)
    cluster.start(node)
    cluster.wait_for_event(node, "job.taken_up")
    cluster.wait_for_event(node, "restore.completed")
    still_there = {process.pid for process in cluster.ranks()}
    code = cluster.finish(node)

    assert still_there == trainers
    assert code == ExitCode.DONE
    assert_exact(read_log(cluster.log), twin(2))
    assert max(row["step"] for row in cluster.cli(node, "ls")["checkpoints"]) == 26


def test_killing_everything_resumes_from_the_store_alone(make_cluster, twin):
    cluster = make_cluster()
    first, second = cluster.node("a"), cluster.node("b")
    cluster.start(first, TOY_STEP_S="0.1")
    cluster.wait_for_event(first, "checkpoint.committed", step=10)

    cluster.lose(first)
    code = cluster.run(second)

    assert code == ExitCode.DONE
    assert second.event("restore.completed")["step"] >= 10
    assert second.event("fetch.completed")["source"] == "store"
    assert_exact(read_log(cluster.log), twin(2))


def test_the_whole_path_on_a_real_s3_server(s3_cluster, twin):
    first, second = s3_cluster.node("a"), s3_cluster.node("b")

    code = s3_cluster.run(first, **stop_at(s3_cluster, first, 9))
    s3_cluster.lose(first)
    finished = s3_cluster.run(second)

    assert (code, finished) == (ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE)
    assert second.event("restore.completed")["step"] == 9
    assert_exact(read_log(s3_cluster.log), twin(2))
    verdicts = s3_cluster.cli(second, "verify", "--read-data")["checkpoints"]
    assert verdicts
    assert all(verdict["is_whole"] for verdict in verdicts)


def test_an_older_launch_that_was_taken_over_is_stopped_and_commits_nothing_more(
    make_cluster, twin
):
    """Two nodes run one job at once: the later claim wins, the earlier group ends as fenced."""
    cluster = make_cluster(world=1)
    first, second = cluster.node("a"), cluster.node("b")
    cluster.start(first, TOY_STEP_S="0.5")
    cluster.wait_for_event(first, "checkpoint.committed", step=5)

    cluster.start(second, TOY_STEP_S="0.2")
    fenced = cluster.finish(first)
    finished = cluster.finish(second)

    assert (fenced, finished) == (ExitCode.FENCED, ExitCode.DONE)
    commits = cluster.cli(second, "ls")["checkpoints"]
    generations = [row["generation"] for row in commits]
    assert generations == sorted(generations)
    assert_exact(read_log(cluster.log), twin(1))
