"""Given cases about local disks: C33, C36, C38, C39, C81. Public bug reports, tried on us."""

from __future__ import annotations

import os
import sys
import time

import pytest

from supervisor.errors import ExitCode
from tests.e2e.disks import (
    checkpoints_folder,
    committed_steps,
    events_named,
    leftovers,
    ready_sets,
    spool_on_tmpfs,
    steps_of,
    thread_limit,
)
from tests.e2e.harness import ROOT, assert_exact, read_log
from tests.fault_proxy import answer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
MIB = 1 << 20
SIZED = [sys.executable, str(ROOT / "tests" / "jobs" / "sized.py")]


@pytest.fixture
def sized(make_cluster):
    """One rank with a state of 12 MiB, saved at every fifth of 15 steps."""
    env = {"SIZED_MIB": "12", "SIZED_STEPS": "15", "SIZED_STEP_S": "0.3"}
    return make_cluster(world=1, env=env)


def assert_whole(cluster, node) -> list[int]:
    """Every checkpoint that is listed verifies to the last byte; their steps."""
    verdicts = cluster.cli(node, "verify", "--read-data")["checkpoints"]
    assert all(verdict["is_whole"] for verdict in verdicts), verdicts
    return committed_steps(cluster, node)


@pytest.mark.parametrize("loses_node", [False, True], ids=["disk stays", "disk is lost"])
def test_c33_whenever_the_power_goes_a_whole_checkpoint_is_there(
    quick_cluster, quick_twin, loses_node
):
    """Every flush and upload takes seconds; the cut comes right after the save and at moments in
    between. A checkpoint that was only begun is never the newest, and never replaces the last."""
    slow = "spool.write.before=sleep:1.5,upload.chunk.before=sleep:1.5,part.put.before=sleep:0.5"
    node = quick_cluster.node("start")
    quick_cluster.start(node, TOY_STEP_S="0.1")
    quick_cluster.wait_for_event(node, "checkpoint.committed", step=5)
    quick_cluster.kill_everything(node)
    stood = assert_whole(quick_cluster, node)

    for number, delay_s in enumerate((0.0, 0.7, 1.6, 2.1)):
        node = quick_cluster.node(f"cut-{number}") if loses_node else node
        num_lines = len(quick_cluster.lines(0))
        quick_cluster.start(node, TOY_STEP_S="0.1", LASTGASP_FAILPOINTS=slow)
        quick_cluster.wait(
            lambda n=num_lines: len(quick_cluster.lines(0)) > n + 1, "training to go on"
        )
        quick_cluster.cli(node, "save")
        quick_cluster.wait_for_event(node, "checkpoint.staged")
        time.sleep(delay_s)
        quick_cluster.kill_everything(node)
        now = assert_whole(quick_cluster, node)
        assert max(now) >= max(stood)
        stood = now

    last = quick_cluster.node("last") if loses_node else node
    code = quick_cluster.run(last)
    assert code == ExitCode.DONE
    assert_exact(read_log(quick_cluster.log), quick_twin)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_c36_a_disk_that_fills_during_the_second_save_leaves_the_first_untouched(sized, share):
    node = sized.node("a")
    with spool_on_tmpfs(node, size="40m") as folder:
        sized.start(node, command=SIZED, SIZED_STEP_S="0.5", LASTGASP_SPOOL__BALLAST="0")
        sized.wait_for_event(node, "checkpoint.spooled", step=5)
        first = ready_sets(node)
        fill(folder, but=int(share * 12 * MIB))
        failed = sized.wait_for_event(node, "spool.failed")
        code = sized.finish(node)
        left = ready_sets(node)

        assert failed["error_id"] == "disk_full"
        assert left == first
        assert leftovers(node) == []
    assert code == ExitCode.DONE
    assert assert_whole(sized, node)[-3:] == [5, 10, 15]


def fill(folder, *, but: int) -> None:
    """Have so many bytes left in a small file system."""
    free = os.statvfs(folder)
    with open(folder / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - but)


def test_c38_a_slow_writer_beside_the_uploader_gives_the_same_bytes_in_both_places(sized):
    """The upload reads the memory image and never a file that is still being written."""
    node = sized.node("a")

    sized.start(
        node,
        command=SIZED,
        SIZED_MIB="36",
        SIZED_STEP_S="0.6",
        LASTGASP_FAILPOINTS="spool.write.after=sleep:1",
    )
    code = sized.finish(node)

    assert code == ExitCode.DONE
    assert {5, 10} <= set(assert_whole(sized, node))
    spooled = ready_sets(node)
    assert spooled
    for _, step in spooled:
        shown = sized.cli(node, "show", id_of(sized, node, step))
        in_store = {shard["rank"]: shard["sha256"] for shard in shown["shards"]}
        record = next(item for (_, at), item in spooled.items() if at == step)
        assert {shard["rank"]: shard["sha256"] for shard in record["shards"]} == in_store


def id_of(cluster, node, step: int) -> str:
    rows = cluster.cli(node, "ls")["checkpoints"]
    return next(row["id"] for row in rows if row["step"] == step)


def test_c38_the_local_copy_stays_until_the_upload_is_confirmed(quick_cluster, quick_twin):
    node = quick_cluster.node("a")
    quick_cluster.start(
        node, TOY_STEP_S="0.15", LASTGASP_FAILPOINTS="upload.chunk.before=sleep:4@2"
    )
    quick_cluster.wait_for_event(node, "checkpoint.spooled", step=10)
    time.sleep(2)  # the upload of step 10 still waits

    held = [step for _, step in ready_sets(node)]
    listed = committed_steps(quick_cluster, node)
    code = quick_cluster.finish(node)

    assert 10 in held
    assert 10 not in listed
    assert code == ExitCode.DONE
    assert_exact(read_log(quick_cluster.log), quick_twin)


def test_c39_one_disk_error_and_a_store_that_is_away_do_not_end_the_training(
    proxied_cluster, proxy, quick_twin
):
    node = proxied_cluster.node("a")
    proxied_cluster.start(
        node,
        TOY_STEP_S="0.3",
        LASTGASP_FAILPOINTS="spool.write.before=EIO@1",
        LASTGASP_STORE__CHUNK_TIMEOUT="2s",
    )
    proxied_cluster.wait_for_event(node, "checkpoint.committed", step=5)
    rule = proxy.add(answer(500, "InternalError"), method="PUT", key="/data/")
    proxied_cluster.wait_for_event(node, "checkpoint.persist_failed")
    error = proxied_cluster.cli(node, "status")["last_error"]
    proxy.clear()
    code = proxied_cluster.finish(node)

    assert rule.num_hits > 0
    assert [event["error_id"] for event in events_named(node, "spool.failed")] == ["disk_io_error"]
    assert error["event"] == "checkpoint.persist_failed"
    assert steps_of(node, "checkpoint.committed")[-1] == 50
    assert code == ExitCode.DONE
    assert_exact(read_log(proxied_cluster.log), quick_twin)


def test_c81_a_save_that_can_have_no_thread_is_done_without_one(quick_cluster, quick_twin):
    """The limit stands while several saves are made; each is whole, and the refusal is said."""
    node = quick_cluster.node("a")
    quick_cluster.start(node, TOY_STEP_S="0.2")
    quick_cluster.wait_for_event(node, "checkpoint.committed", step=5)

    with thread_limit(node):
        before = len(steps_of(node, "checkpoint.committed"))
        quick_cluster.wait(
            lambda: len(steps_of(node, "checkpoint.committed")) > before + 1, "two more commits"
        )
        refused = events_named(node, "thread.refused")
        listed = assert_whole(quick_cluster, node)
    code = quick_cluster.finish(node)

    assert any(event["thread"].startswith("persist-") for event in refused)
    assert len(listed) > before + 1
    assert checkpoints_folder(node).is_dir()
    assert ready_sets(node)
    assert code == ExitCode.DONE
    assert_exact(read_log(quick_cluster.log), quick_twin)
