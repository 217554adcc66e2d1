"""Rows 16 to 23 of the fault matrix: the local disk is full, broken, slow, lying, or not there.

In every one of them training goes on, the store gets every checkpoint, and what is said is true.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from supervisor.errors import ExitCode
from tests.conftest import s3_options
from tests.e2e.disks import (
    checkpoints_folder,
    committed_steps,
    events_named,
    leftovers,
    ready_sets,
    spool_on_tmpfs,
    steps_of,
    unmount,
    write_limit,
)
from tests.e2e.harness import ROOT, assert_exact, read_log

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
MIB = 1 << 20
# A state of SIZED_MIB, so that it matters how much room a disk has and how fast it is.
SIZED = [sys.executable, str(ROOT / "tests" / "jobs" / "sized.py")]


@pytest.fixture
def sized(make_cluster):
    """One rank with a large state, saved at every fifth of 15 steps."""
    env = {"SIZED_MIB": "12", "SIZED_STEPS": "15", "SIZED_STEP_S": "0.3"}
    return make_cluster(world=1, env=env)


def failures(node) -> list[str]:
    return [event["error_id"] for event in events_named(node, "spool.failed")]


# ---------------------------------------------------------------- 16, 17: no space


def test_f16_a_full_disk_gives_its_ballast_and_its_older_sets_for_the_new_one(sized):
    node = sized.node("a")
    # Two sets and no ballast fit: the second set needs the ballast, the third the first set.
    with spool_on_tmpfs(node, size="30m"):
        sized.start(node, command=SIZED, SIZED_STEP_S="1", LASTGASP_SPOOL__BALLAST="8MiB")
        sized.wait_for_event(node, "checkpoint.spooled", step=5)
        had_ballast = (node.folder / "spool" / "toy" / "ballast").stat().st_blocks * 512
        code = sized.finish(node)
        kept = ready_sets(node)

    assert code == ExitCode.DONE
    assert had_ballast == 8 * MIB
    assert failures(node) == []
    spooled = set(steps_of(node, "checkpoint.spooled"))
    assert len(spooled) >= 2  # on a busy machine a save may be passed over
    assert spooled <= set(committed_steps(sized, node))
    assert max(step for _, step in kept) == 15


@pytest.mark.parametrize("call", ["spool.open.after", "spool.write.before"])
def test_f16_a_disk_that_stays_full_costs_the_local_copy_alone(quick_cluster, quick_twin, call):
    node = quick_cluster.node("a")

    code = quick_cluster.run(node, LASTGASP_FAILPOINTS=f"{call}=ENOSPC")

    assert code == ExitCode.DONE
    assert set(failures(node)) == {"disk_full"}
    assert len(failures(node)) == len(steps_of(node, "checkpoint.committed"))  # each set tries
    assert steps_of(node, "checkpoint.spooled") == []
    assert (ready_sets(node), leftovers(node)) == ({}, [])
    assert_exact(read_log(quick_cluster.log), quick_twin)


@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT"])
@pytest.mark.parametrize("call", ["spool.fsync.before", "spool.close.after"])
def test_f17_no_space_told_as_late_as_at_fsync_or_close_is_the_same(
    quick_cluster, quick_twin, call, error
):
    """The file is thrown away, room is made, and a second file is written whole."""
    node = quick_cluster.node("a")

    code = quick_cluster.run(node, LASTGASP_FAILPOINTS=f"{call}={error}@1")

    assert code == ExitCode.DONE
    assert failures(node) == []
    assert steps_of(node, "checkpoint.spooled")[0] == 5
    assert leftovers(node) == []
    assert ready_sets(node)
    assert_exact(read_log(quick_cluster.log), quick_twin)


# ---------------------------------------------------------------- 18: broken


@pytest.mark.parametrize("call", ["spool.write.before", "spool.fsync.before"])
def test_f18_a_disk_that_failed_once_is_not_used_again_in_this_life(
    quick_cluster, quick_twin, call
):
    """A second fsync would succeed here, as it may on a disk that lost what it was given."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    node = quick_cluster.node("a")
    quick_cluster.start(
        node,
        TOY_STEP_S="0.1",
        LASTGASP_STATUS__LISTEN=address,
        LASTGASP_FAILPOINTS=f"{call}=EIO@1",
    )
    quick_cluster.wait_for_event(node, "checkpoint.committed", step=10)

    state = quick_cluster.cli(node, "status")["spool_state"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        metrics = reply.read().decode()
    code = quick_cluster.finish(node)

    assert code == ExitCode.DONE
    assert failures(node) == ["disk_io_error"]
    assert (state["is_suspect"], state["last_error_id"]) == (True, "disk_io_error")
    assert re.search(r"^lastgasp_spool_suspect 1\.0$", metrics, re.M)
    assert re.search(
        r'^lastgasp_spool_failures_total\{error="disk_io_error"\} 1\.0$', metrics, re.M
    )
    assert steps_of(node, "checkpoint.spooled") == []
    assert (ready_sets(node), leftovers(node)) == ({}, [])
    assert_exact(read_log(quick_cluster.log), quick_twin)


def test_f18_the_next_life_tries_the_disk_again(quick_cluster):
    node = quick_cluster.node("a")
    quick_cluster.start(node, TOY_STEP_S="0.1", LASTGASP_FAILPOINTS="spool.fsync.before=EIO@1")
    quick_cluster.wait_for_event(node, "checkpoint.committed", step=10)
    quick_cluster.kill_everything(node)

    quick_cluster.run(node)

    assert failures(node) == []
    assert steps_of(node, "checkpoint.spooled")


# ---------------------------------------------------------------- 19: slow or stalled


def test_f19_a_stalled_disk_holds_no_commit_up_and_nothing_is_called_spooled(
    quick_cluster, quick_twin
):
    node = quick_cluster.node("a")
    began_at = time.monotonic()

    code = quick_cluster.run(
        node,
        LASTGASP_FAILPOINTS="spool.write.before=sleep:600",
        LASTGASP_SPOOL__PATIENCE="500ms",
    )

    assert code == ExitCode.DONE
    assert time.monotonic() - began_at < 300  # and not 600: the job ends although the disk hangs
    assert set(failures(node)) == {"disk_slow"}
    assert steps_of(node, "checkpoint.spooled") == []
    assert all(event["spool_s"] is None for event in events_named(node, "checkpoint.committed"))
    assert ready_sets(node) == {}
    assert_exact(read_log(quick_cluster.log), quick_twin)


@pytest.mark.parametrize("call", ["spool.note.before", "spool.open.before", "spool.publish.before"])
def test_f19_no_other_call_to_a_stalled_disk_holds_a_commit_up(quick_cluster, quick_twin, call):
    node = quick_cluster.node("a")

    code = quick_cluster.run(
        node, LASTGASP_FAILPOINTS=f"{call}=sleep:600", LASTGASP_SPOOL__PATIENCE="500ms"
    )

    assert code == ExitCode.DONE
    assert "disk_slow" in failures(node)
    assert steps_of(node, "checkpoint.committed")[0] == 5
    assert_exact(read_log(quick_cluster.log), quick_twin)


def test_f19_a_disk_that_wakes_up_again_is_used_for_the_next_set(quick_cluster):
    node = quick_cluster.node("a")

    code = quick_cluster.run(
        node,
        TOY_STEP_S="0.2",
        LASTGASP_FAILPOINTS="spool.write.before=sleep:2@1",
        LASTGASP_SPOOL__PATIENCE="500ms",
    )

    assert code == ExitCode.DONE
    assert failures(node)[0] == "disk_slow"
    assert 5 not in steps_of(node, "checkpoint.spooled")
    assert steps_of(node, "checkpoint.spooled")
    assert leftovers(node) == []
    assert ready_sets(node)


def test_f19_a_disk_that_is_too_slow_for_its_need_is_given_up(sized):
    """A real limit on a real disk: 2 MB/s where 16 MiB/s are the least."""
    node = sized.node("a")
    sized.start(
        node, command=SIZED, SIZED_MIB="40", SIZED_STEP_S="1", LASTGASP_SPOOL__PATIENCE="1s"
    )
    with write_limit(node, bytes_per_s=2_000_000):
        failed = sized.wait_for_event(node, "spool.failed")
    code = sized.finish(node)

    assert code == ExitCode.DONE
    assert failed["error_id"] == "disk_slow"
    assert committed_steps(sized, node)[-3:] == [5, 10, 15]
    assert 5 not in steps_of(node, "checkpoint.spooled")


# ---------------------------------------------------------------- 20, 21: other bytes


def test_f20_an_image_that_changes_before_it_is_sent_is_never_committed(
    s3_server, make_cluster, quick_twin
):
    """The store refuses it; a second try would commit what nobody trained: the set is dropped."""
    cluster = make_cluster(
        world=1, **s3_options(s3_server, s3_server.endpoint_url, TOY_WORKERS="0")
    )
    node = cluster.node("a")
    cluster.start(node, TOY_STEP_S="0.3", LASTGASP_FAILPOINTS="upload.chunk.before=sleep:3@1")
    cluster.wait_for_event(node, "checkpoint.staged", step=5)
    flip_last_byte_of_slots(node)

    failed = cluster.wait_for_event(node, "checkpoint.persist_failed")
    code = cluster.finish(node)

    assert failed["error_id"] == "shard_corrupt_local"
    assert "changed in memory" in failed["reason"]
    dropped = node.event("checkpoint.abandoned")  # and not kept to be tried again
    assert dropped["step"] == 5
    assert "changed in memory" in dropped["reason"]
    assert 5 not in committed_steps(cluster, node)
    assert 5 not in [step for _, step in ready_sets(node)]
    assert committed_steps(cluster, node)
    assert code == ExitCode.DONE
    assert_exact(read_log(cluster.log), quick_twin)


def flip_last_byte_of_slots(node) -> None:
    """A bit error in the supervisor's memory, in every image that it holds."""
    flipped: set[int] = set()  # the mapping's own descriptor shows the same memory again
    folder = Path(f"/proc/{node.process.pid}/fd")
    for link in folder.iterdir():
        if "memfd:lastgasp-0-" not in os.readlink(link):
            continue
        with open(link, "r+b", buffering=0) as slot:
            image = slot.read()
            at = len(image.rstrip(b"\0")) - 1  # the end of the tensors, not of the slot
            inode = os.fstat(slot.fileno()).st_ino
            if at > 0 and inode not in flipped:
                os.pwrite(slot.fileno(), bytes([image[at] ^ 1]), at)
                flipped.add(inode)
    assert flipped


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_f21_a_damaged_set_of_the_spool_is_discarded_and_never_uploaded(
    quick_cluster, quick_twin, damage
):
    node = quick_cluster.node("a")
    quick_cluster.start(
        node,
        TOY_STEP_S="0.1",
        LASTGASP_FAILPOINTS="upload.complete.before=sleep:2@3+,part.put.before=kill@2",
    )
    quick_cluster.finish(node)
    quick_cluster.kill_everything(node)
    newest = max(ready_sets(node))
    assert newest[1] == 10
    (image,) = (checkpoints_folder(node) / f"{newest[0]:010d}-{newest[1]:012d}").glob("*.safe*")
    damaged(image, damage)

    code = quick_cluster.run(node)

    assert code == ExitCode.DONE
    rejected = node.event("spool.rejected")
    assert (rejected["step"], rejected["error_id"]) == (10, "shard_corrupt_local")
    assert node.event("restore.completed")["step"] == 5
    assert newest not in ready_sets(node)
    assert_exact(read_log(quick_cluster.log), quick_twin)


def damaged(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(data if how == "flipped" else data[: len(data) // 2])


# ---------------------------------------------------------------- 22: not the disk it should be


def test_f22_a_path_that_is_no_mount_is_refused_where_a_mount_is_required(quick_cluster):
    node = quick_cluster.node("a")

    code = quick_cluster.run(node, LASTGASP_SPOOL__REQUIRE_MOUNT="true")

    assert code == ExitCode.CONFIG
    assert "nvme_not_mounted" in node.stderr
    assert quick_cluster.lines(0) == []
    assert not (node.folder / "spool").exists()  # nothing lands on the root disk


def test_f22_a_mount_is_taken_where_one_is_required(quick_cluster):
    node = quick_cluster.node("a")

    with spool_on_tmpfs(node, size="64m"):
        code = quick_cluster.run(node, LASTGASP_SPOOL__REQUIRE_MOUNT="true")

    assert code == ExitCode.DONE
    assert steps_of(node, "checkpoint.spooled")


@pytest.mark.parametrize(
    ("must_mount", "expected"), [("false", ExitCode.DONE), ("true", ExitCode.CONFIG)]
)
def test_f22_a_read_only_spool_is_told_and_refused_only_where_the_mount_is_required(
    quick_cluster, must_mount, expected
):
    node = quick_cluster.node("a")
    with spool_on_tmpfs(node, size="64m") as folder:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)

        code = quick_cluster.run(node, LASTGASP_SPOOL__REQUIRE_MOUNT=must_mount)

    assert code == expected
    assert "nvme_not_mounted" in node.stderr
    assert bool(steps_of(node, "checkpoint.committed")) == (expected == ExitCode.DONE)


def test_f22_a_disk_that_goes_away_is_noticed_and_the_root_disk_is_not_filled_instead(
    quick_cluster, quick_twin
):
    node = quick_cluster.node("a")
    with spool_on_tmpfs(node, size="64m") as folder:
        quick_cluster.start(node, TOY_STEP_S="0.15", LASTGASP_SPOOL__REQUIRE_MOUNT="true")
        quick_cluster.wait_for_event(node, "checkpoint.spooled", step=5)
        unmount(folder)
        code = quick_cluster.finish(node)
        below = list(folder.iterdir())

    assert code == ExitCode.DONE
    assert "nvme_not_mounted" in failures(node)
    assert below == []
    assert_exact(read_log(quick_cluster.log), quick_twin)


# ---------------------------------------------------------------- 23: rubbish


def test_f23_what_crashes_left_is_cleared_and_what_is_not_ours_is_not_touched(
    quick_cluster, quick_twin
):
    node = quick_cluster.node("a")
    quick_cluster.start(node, TOY_STEP_S="0.1", LASTGASP_FAILPOINTS="spool.write.after=kill@2")
    quick_cluster.finish(node)
    quick_cluster.kill_everything(node)
    (cut,) = leftovers(node)
    spool, folder = node.folder / "spool" / "toy", checkpoints_folder(node)
    elsewhere = node.folder / "elsewhere"
    for path in (elsewhere, folder / "tmp-mine", folder / "12-7", node.folder / "spool" / "other"):
        path.mkdir()
        (path / "precious").touch()
    (folder / f"tmp-{'0' * 32}").symlink_to(elsewhere)
    (spool / "uploads" / f"{0:010d}-{3:012d}.json").write_text("{}")
    (spool / "uploads" / "README").touch()
    (spool / "slot-a1b2c3d4").touch()

    code = quick_cluster.run(node)

    assert code == ExitCode.DONE
    assert not (folder / cut).exists()
    assert not (spool / "slot-a1b2c3d4").exists()
    assert [path.name for path in (spool / "uploads").iterdir()] == ["README"]
    for path in (elsewhere, folder / "tmp-mine", folder / "12-7", node.folder / "spool" / "other"):
        assert (path / "precious").exists()
    assert_exact(read_log(quick_cluster.log), quick_twin)


def test_f23_sets_of_older_generations_do_not_pile_up(quick_cluster):
    node = quick_cluster.node("a")
    for step in (10, 20, 30):
        quick_cluster.start(node, TOY_STEP_S="0.1")
        quick_cluster.wait_for_event(node, "checkpoint.spooled", step=step)
        quick_cluster.kill_everything(node)

    quick_cluster.run(node)

    assert len(ready_sets(node)) <= 2
