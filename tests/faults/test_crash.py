"""Rows 1 to 13 of the fault matrix: SIGKILL at every write of the path, on one node.

Whatever died where: nothing committed before is lost, nothing half-written is resumed from, and the
job that is started again ends exactly as if it had never been killed.
"""

from __future__ import annotations

import signal

import pytest

from supervisor.errors import ExitCode
from tests.conftest import s3_options
from tests.e2e.harness import SIZED_COMMAND, assert_exact, assert_sized, read_log
from trainer_sdk.protocol.failpoints import NAMES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
LAST_STEP = 14
SIZED = {"SIZED_MIB": "34", "SIZED_STEPS": str(LAST_STEP), "SIZED_STEP_S": "0.15"}
IN_A_RANK = ("stage.", "restore.")
# Not written by a run: a person's `gc`, and retention, which the crash tests of the log cover.
NOT_IN_A_RUN = ("retire.", "sweep.")
IN_A_RESTORE = ("restore.", "fetch.")
# The job's record is written at the launch.
BEFORE_ANY_COMMIT = ("job.note.",)
# Which hit of a place falls into the second save, of three chunks each; the first save is
# committed by then, but for the places that come before any commit.
AT_HIT = {"log.put": 3, "upload.chunk": 4, "spool.write": 4, "dir.link": 6, "job.note": 1}


def names(*, of_a_rank: bool, of_a_restore: bool = False) -> list[str]:
    return sorted(
        name
        for name in NAMES
        if not name.startswith(NOT_IN_A_RUN)
        and name.startswith(IN_A_RANK) is of_a_rank
        and name.startswith(IN_A_RESTORE) is of_a_restore
    )


def kill_at(name: str) -> dict[str, str]:
    place = name.rpartition(".")[0]
    return {"LASTGASP_FAILPOINTS": f"{name}=kill@{AT_HIT.get(place, 2)}"}


def committed_before(cluster, node) -> list[int]:
    listed = cluster.cli(node, "ls", check=False)
    return [item["step"] for item in listed.get("checkpoints", [])]


def finish_again(cluster, node, name: str) -> None:
    """Start it once more; it must end, exactly, from what was committed or something newer."""
    before = committed_before(cluster, node)
    cluster.start(node, "--allow-fresh", command=SIZED_COMMAND)
    code = cluster.finish(node)

    assert before or name.startswith(BEFORE_ANY_COMMIT), f"{name} came before the first commit"
    assert code == ExitCode.DONE, node.stderr[-4000:]
    if "job.taken_up" not in node.stderr:  # else the ranks never stopped
        resumed_at = node.event("restore.completed")["step"]
        assert (resumed_at or 0) >= max(before, default=0)
    assert "Traceback" not in node.stderr
    verdicts = cluster.cli(node, "verify", "--read-data")["checkpoints"]
    assert verdicts[-1]["id"].endswith(f"-{LAST_STEP}")
    assert all(verdict["is_whole"] for verdict in verdicts)
    assert_sized(read_log(cluster.log), last_step=LAST_STEP)


# Every place once here, before or after the write by turns; `tests/crash` has both for the log.
EVERY_PLACE = [
    name for place, name in enumerate(names(of_a_rank=False)) if (place // 2 + place) % 2 == 0
]


@pytest.mark.parametrize("name", EVERY_PLACE)
def test_f5_f6_f7_f8_f9_f10_f11_f13_the_supervisor_is_killed_at(make_cluster, name):
    """Before a write alone, so that the next one takes up its job; after it with its whole job."""
    cluster = make_cluster(world=1, env=SIZED)
    node = cluster.node("a")
    cluster.start(node, command=SIZED_COMMAND, **kill_at(name))
    killed = cluster.finish(node)
    if name.endswith(".after"):
        cluster.kill_everything(node)

    assert killed == -signal.SIGKILL, f"{name} was never hit:\n{node.stderr[-3000:]}"
    finish_again(cluster, node, name)


@pytest.mark.s3
@pytest.mark.parametrize(
    "name",
    ["upload.chunk.after", "upload.complete.after"],
)
def test_f7_f8_f9_f10_with_an_s3_server_everything_is_killed_at(make_cluster, s3_server, name):
    options = s3_options(s3_server, s3_server.endpoint_url, **SIZED)
    cluster = make_cluster(world=1, **options)
    node = cluster.node("a")
    cluster.start(node, command=SIZED_COMMAND, **kill_at(name))
    killed = cluster.finish(node)
    cluster.kill_everything(node)

    assert killed == -signal.SIGKILL, f"{name} was never hit:\n{node.stderr[-3000:]}"
    finish_again(cluster, node, name)


@pytest.mark.parametrize("name", names(of_a_rank=True))
def test_f2_f3_f4_a_rank_is_killed_at(make_cluster, name):
    """In every life at its second save, so each life must have brought it one save further."""
    cluster = make_cluster(world=1, env=SIZED)
    node = cluster.node("a")

    cluster.start(node, command=SIZED_COMMAND, **kill_at(name))
    code = cluster.finish(node)

    crashes = [event for event in node.events() if event["event"] == "job.crashed"]
    assert crashes, f"{name} was never hit"
    assert code == ExitCode.DONE
    assert_sized(read_log(cluster.log), last_step=LAST_STEP)


@pytest.mark.parametrize("name", names(of_a_rank=False, of_a_restore=True))
def test_f12_the_supervisor_is_killed_while_it_fetches(make_cluster, name):
    cluster = make_cluster(world=1, env=SIZED)
    first, second = cluster.node("a"), cluster.node("b")
    cluster.start(first, command=SIZED_COMMAND)
    cluster.wait_for_event(first, "checkpoint.committed", step=5)
    cluster.lose(first)

    cluster.start(second, command=SIZED_COMMAND, **kill_at(name))
    killed = cluster.finish(second)
    cluster.kill_everything(second)

    assert killed == -signal.SIGKILL
    finish_again(cluster, second, name)


@pytest.mark.parametrize("name", names(of_a_rank=True, of_a_restore=True))
def test_f12_a_rank_is_killed_while_it_restores(make_cluster, name, tmp_path):
    """Once: the crash limit counts it, and the next try restores the same checkpoint."""
    cluster = make_cluster(world=1, env=SIZED)
    first, second = cluster.node("a"), cluster.node("b")
    cluster.start(first, command=SIZED_COMMAND)
    cluster.wait_for_event(first, "checkpoint.committed", step=5)
    cluster.lose(first)
    flag, failpoint = tmp_path / "done", f"LASTGASP_FAILPOINTS={name}=kill"
    once = f"[ -e {flag} ] || {{ touch {flag}; export {failpoint}; }}"
    command = ["sh", "-c", f"{once}; exec {' '.join(SIZED_COMMAND)}"]

    cluster.start(second, command=command)
    code = cluster.finish(second)

    assert second.event("job.crashed")["num_crashes"] == 1
    assert second.event("restore.completed")["step"] == 5
    assert code == ExitCode.DONE
    assert_sized(read_log(cluster.log), last_step=LAST_STEP)


def test_f1_a_rank_killed_before_anything_is_staged_goes_on_from_the_last_commit(
    quick_cluster, quick_twin, tmp_path
):
    node = quick_cluster.node("a")

    code = quick_cluster.run(node, TOY_FAULT=f"kill:0:8:{tmp_path}/flag", TOY_STEP_S="0.1")

    assert node.event("job.crashed")["num_crashes"] == 1
    assert node.event("restore.completed")["step"] == 5
    assert code == ExitCode.DONE
    assert_exact(read_log(quick_cluster.log), quick_twin)
