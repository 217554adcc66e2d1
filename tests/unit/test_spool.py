"""The spool: what has a final name is whole, and a full or broken disk is only told."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import msgspec
import pytest

from supervisor import failpoints
from supervisor.checkpoint.flush import Flusher
from supervisor.checkpoint.image_file import ImageWriter
from supervisor.checkpoint.notes import UploadNotes, UploadTokens
from supervisor.checkpoint.pace import PaceLimits
from supervisor.checkpoint.spool import READY, Spool, SpoolRecord, image_name
from supervisor.checkpoint.spool_errors import SpoolError, SpoolFull, SpoolNotMounted
from supervisor.clock import SystemClock
from supervisor.ranks.slots import SlotBuffer
from tests.unit.filesystems import tmpfs
from tests.unit.tables import a_shard
from trainer_sdk.protocol.failpoints import ENVIRONMENT_NAME

CONTENT = b"x" * 5000


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(str(tmp_path), "job")


def a_record(*, gen: int = 1, step: int = 10, **changes: object) -> SpoolRecord:
    shard = a_shard(gen=gen, step=step, content=CONTENT, chunk_bytes=4096)
    fields: dict[str, object] = {
        "fmt": 1,
        "gen": gen,
        "group": "a" * 32,
        "step": step,
        "world": 1,
        "shards": (shard,),
    }
    return SpoolRecord(**(fields | changes))  # type: ignore[arg-type]


def write_image(path: str, content: bytes = CONTENT) -> ImageWriter:
    padded = -(-len(content) // 4096) * 4096
    slot = SlotBuffer.in_memory("test", padded)
    slot.view(len(content))[:] = content
    writer = ImageWriter(path, size_bytes=len(content))
    writer.write(slot.view(padded), 0)
    return writer


def put(spool: Spool, *, gen: int = 1, step: int = 10, content: bytes = CONTENT) -> None:
    directory = spool.begin()
    write_image(os.path.join(directory, image_name(0, "state")), content).finish()
    spool.publish(directory, a_record(gen=gen, step=step))


def at(spool: Spool) -> list[tuple[int, int]]:
    return [(item.record.gen, item.record.step) for item in spool.ready()]


def names(spool: Spool) -> set[str]:
    return set(os.listdir(os.path.join(spool.path, "checkpoints")))


# ---------------------------------------------------------------- images


def test_an_image_is_cut_to_its_size_and_for_us_alone(tmp_path: Path) -> None:
    path = tmp_path / "image"

    write_image(str(path)).finish()

    assert path.read_bytes() == CONTENT
    assert path.stat().st_mode & 0o777 == 0o600


def test_chunks_may_come_in_any_order(tmp_path: Path) -> None:
    content = bytes(range(256)) * 48  # three pages
    slot = SlotBuffer.in_memory("test", len(content))
    slot.view(len(content))[:] = content
    writer = ImageWriter(str(tmp_path / "image"), size_bytes=len(content))

    for page in (2, 0, 1):
        writer.write(slot.view(len(content))[page * 4096 : (page + 1) * 4096], page * 4096)
    writer.finish()

    assert (tmp_path / "image").read_bytes() == content


def test_an_image_that_is_there_already_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"first")

    with pytest.raises(SpoolError):
        ImageWriter(str(tmp_path / "image"), size_bytes=10)

    assert (tmp_path / "image").read_bytes() == b"first"


def test_a_link_in_place_of_the_image_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "image").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(SpoolError):
        ImageWriter(str(tmp_path / "image"), size_bytes=10)

    assert not (tmp_path / "elsewhere").exists()


def test_an_abandoned_writer_may_be_abandoned_again(tmp_path: Path) -> None:
    writer = write_image(str(tmp_path / "image"))

    writer.abandon()
    writer.abandon()


def test_an_image_that_does_not_fit_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", size="1m") as folder:
        with pytest.raises(SpoolFull) as caught:
            ImageWriter(str(folder / "image"), size_bytes=8 << 20)

        assert caught.value.error_id == "disk_full"
        assert "[spool] path" in caught.value.hint


# ---------------------------------------------------------------- publishing


def test_nothing_is_seen_before_it_is_published(spool: Spool) -> None:
    directory = spool.begin()
    write_image(os.path.join(directory, image_name(0, "state"))).finish()
    assert spool.ready() == []

    spool.publish(directory, a_record())

    (found,) = spool.ready()
    assert found.record == a_record(shards=found.record.shards)
    assert Path(found.path(found.record.shards[0])).read_bytes() == CONTENT
    assert not os.path.exists(directory)


@pytest.mark.parametrize("point", ["spool.publish.before", "spool.publish.after"])
def test_a_publish_that_ends_half_way_leaves_all_or_nothing(
    spool: Spool, tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT_NAME, f"{point}=error")
    failpoints.reload()
    try:
        with pytest.raises(failpoints.FailpointError):
            put(spool)
    finally:
        monkeypatch.delenv(ENVIRONMENT_NAME)
        failpoints.reload()

    again = Spool(str(tmp_path), "job")
    assert at(again) == ([] if point.endswith("before") else [(1, 10)])
    assert not any(name.startswith("tmp-") for name in names(again))


def test_a_second_set_of_the_same_step_replaces_the_first(spool: Spool) -> None:
    put(spool, content=b"a" * 5000)
    put(spool, content=b"b" * 5000)

    (found,) = spool.ready()
    assert Path(found.path(found.record.shards[0])).read_bytes() == b"b" * 5000


def test_what_a_crash_left_is_removed_and_what_is_whole_stays(spool: Spool, tmp_path: Path) -> None:
    put(spool)
    leftover = spool.begin()
    write_image(os.path.join(leftover, image_name(0, "state"))).abandon()

    again = Spool(str(tmp_path), "job")

    assert not os.path.exists(leftover)
    assert at(again) == [(1, 10)]


def test_things_of_other_people_are_left_alone(spool: Spool, tmp_path: Path) -> None:
    folder = Path(spool.path, "checkpoints")
    (folder / "tmp-mine").mkdir()
    (folder / "notes.txt").touch()

    again = Spool(str(tmp_path), "job")

    assert names(again) == {"tmp-mine", "notes.txt"}
    assert again.ready() == []


def test_two_jobs_do_not_see_each_other(spool: Spool, tmp_path: Path) -> None:
    put(spool)

    assert Spool(str(tmp_path), "other").ready() == []


def test_newest_is_by_numbers_and_not_by_names_or_times(spool: Spool) -> None:
    for gen, step in ((2, 5), (10, 1), (1, 999), (2, 50)):
        put(spool, gen=gen, step=step)

    assert at(spool) == [(10, 1), (2, 50), (2, 5), (1, 999)]


# ---------------------------------------------------------------- READY.json


def _ready_path(spool: Spool) -> Path:
    return Path(spool.path, "checkpoints", f"{1:010d}-{10:012d}", READY)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"not json",
        b'{"fmt":1,"gen":1,"step":10,"world":1,"shards":[],"more":1}',
        b"\xff\xfe",
        b'{"fmt":1,"gen":"\xff\xfe"}',
        b"[" * 100_000,
        msgspec.json.encode(a_record(gen=2)),
        msgspec.json.encode(a_record(step=11)),
        msgspec.json.encode(a_record(fmt=2)),
    ],
    ids=lambda content: repr(content[:30]),
)
def test_a_ready_file_that_does_not_fit_its_directory_is_passed_over(
    spool: Spool, content: bytes
) -> None:
    put(spool, step=9)
    put(spool)
    _ready_path(spool).write_bytes(content)

    assert at(spool) == [(1, 9)]


def test_a_directory_without_a_ready_file_is_passed_over(spool: Spool) -> None:
    put(spool)
    _ready_path(spool).unlink()

    assert spool.ready() == []


def test_a_ready_file_that_is_a_link_is_passed_over(spool: Spool, tmp_path: Path) -> None:
    put(spool)
    _ready_path(spool).rename(tmp_path / "elsewhere")
    _ready_path(spool).symlink_to(tmp_path / "elsewhere")

    assert spool.ready() == []


# ---------------------------------------------------------------- space


@pytest.mark.parametrize(("keep", "left"), [(2, [40, 30]), (1, [40]), (0, [40]), (9, [40, 30, 20])])
def test_eviction_keeps_the_newest_and_at_least_one(
    spool: Spool, keep: int, left: list[int]
) -> None:
    for step in (30, 20, 40):
        put(spool, step=step)

    num_removed = spool.evict(keep=keep)

    assert [step for _, step in at(spool)] == left
    assert num_removed == 3 - len(left)


def test_a_full_disk_is_told_and_what_is_there_stays(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", size="1m") as folder:
        spool = Spool(str(folder), "job")
        put(spool)
        directory = spool.begin()
        with pytest.raises(SpoolFull):
            ImageWriter(os.path.join(directory, image_name(0, "state")), size_bytes=8 << 20)

        spool.discard(directory)

        assert at(spool) == [(1, 10)]
        put(spool, step=11)
        assert at(spool) == [(1, 11), (1, 10)]


def test_of_a_disk_that_is_gone_there_are_no_checkpoints(spool: Spool) -> None:
    put(spool)
    shutil.rmtree(spool.path)

    assert spool.ready() == []
    assert spool.evict(keep=1) == 0
    with pytest.raises(SpoolError):
        spool.begin()


def test_a_root_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SpoolError) as caught:
        Spool(str(tmp_path / "file"), "job")

    assert caught.value.error_id == "disk_io_error"
    assert caught.value.hint


# ---------------------------------------------------------------- uploads


@pytest.fixture
def notes(tmp_path: Path) -> UploadNotes:
    return UploadNotes(str(tmp_path))


def some_tokens(step: int = 10, *, gen: int = 1, **changes: object) -> UploadTokens:
    fields: dict[str, object] = {
        "fmt": 1,
        "gen": gen,
        "step": step,
        "shards": {"0/state": ("k", "t")},
    }
    return UploadTokens(**(fields | changes))  # type: ignore[arg-type]


def test_where_an_upload_goes_on_is_remembered_across_a_restart(
    notes: UploadNotes, tmp_path: Path
) -> None:
    notes.remember(some_tokens())

    again = UploadNotes(str(tmp_path))

    assert again.recall(gen=1, step=10) == some_tokens()
    assert again.recall(gen=1, step=11) is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", msgspec.json.encode(some_tokens(fmt=2))], ids=repr
)
def test_a_note_that_cannot_be_read_only_costs_sending_again(
    notes: UploadNotes, tmp_path: Path, content: bytes
) -> None:
    notes.remember(some_tokens())
    (path,) = Path(tmp_path, "uploads").iterdir()
    path.write_bytes(content)

    assert notes.recall(gen=1, step=10) is None


def test_a_commit_settles_its_own_notes_and_older_ones(notes: UploadNotes, tmp_path: Path) -> None:
    for gen, step in ((1, 99), (2, 10), (2, 20), (3, 1)):
        notes.remember(some_tokens(step, gen=gen))
    Path(tmp_path, "uploads", f"{1:010d}-{5:012d}.json.tmp").touch()
    Path(tmp_path, "uploads", "README").touch()

    notes.forget(gen=2, step=10)

    left = sorted(path.name for path in Path(tmp_path, "uploads").iterdir())
    assert left == [f"{2:010d}-{20:012d}.json", f"{3:010d}-{1:012d}.json", "README"]


def test_a_ready_file_that_cannot_be_read_makes_its_checkpoint_rubbish(tmp_path: Path) -> None:
    """A directory in its place, as after a bad repair; a failing disk looks the same."""
    spool = Spool(str(tmp_path), "job")
    (tmp_path / "job" / "checkpoints" / "0000000001-000000000005" / "READY.json").mkdir(
        parents=True
    )

    assert spool.ready() == []


# ---------------------------------------------------------------- ballast


def test_the_ballast_is_reserved_given_up_once_and_reserved_again(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", size="8m") as folder:
        spool = Spool(str(folder), "job", ballast_bytes=2 << 20)
        ballast = Path(spool.path, "ballast")
        assert ballast.stat().st_blocks * 512 == 2 << 20

        assert spool.make_room()
        assert not ballast.exists()
        assert not spool.make_room()
        spool.keep_ballast(beside_bytes=5 << 20)
        assert not ballast.exists()  # a checkpoint goes first
        spool.keep_ballast(beside_bytes=1 << 20)

        assert ballast.exists()


def test_a_disk_without_room_for_the_ballast_is_used_without(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", size="1m") as folder:
        spool = Spool(str(folder), "job", ballast_bytes=2 << 20)

        put(spool)

        assert at(spool) == [(1, 10)]
        assert not Path(spool.path, "ballast").exists()


def test_room_is_made_of_all_sets_but_the_newest(spool: Spool) -> None:
    for step in (10, 20, 30):
        put(spool, step=step)

    assert spool.make_room()

    assert at(spool) == [(1, 30)]


def test_a_set_that_is_spared_outlives_newer_ones(spool: Spool) -> None:
    for step in (10, 20, 30, 40):
        put(spool, step=step)

    spool.evict(keep=2, spare=(1, 10))

    assert at(spool) == [(1, 40), (1, 30), (1, 10)]


# ---------------------------------------------------------------- the right disk


def test_a_folder_is_refused_where_a_mount_is_required(tmp_path: Path) -> None:
    with pytest.raises(SpoolNotMounted, match="is not a mount point"):
        Spool(str(tmp_path), "job", require_mount=True)

    assert list(tmp_path.iterdir()) == []


def test_a_mount_is_taken_where_one_is_required(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", size="1m") as folder:
        assert Spool(str(folder), "job", require_mount=True).ready() == []


def test_a_read_only_disk_is_told_as_such(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", size="1m") as folder:
        Spool(str(folder), "job")
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)

        with pytest.raises(SpoolNotMounted, match="read-only"):
            Spool(str(folder), "job")


def test_another_disk_under_the_same_path_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    spool = Spool(str(tmp_path / "root"), "job")
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "lastgasp-test", str(tmp_path / "root")],
        check=True,
    )
    try:
        os.makedirs(os.path.join(spool.path, "checkpoints"))
        with pytest.raises(SpoolNotMounted, match="another disk"):
            spool.begin()
        assert names(spool) == set()
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path / "root")], check=True)


# ---------------------------------------------------------------- sets that are not whole


def test_a_set_that_is_rejected_is_gone_and_told(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    spool = Spool(str(tmp_path), "job", on_rejected=lambda *facts: told.append(facts))
    put(spool)
    (found,) = spool.ready()

    spool.reject(found, "differs from its digest")

    assert spool.ready() == []
    assert told == [(1, 10, "differs from its digest; it was removed")]


def test_a_writer_that_is_given_up_during_a_write_closes_when_the_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed before, its number could be another file's by the time the write goes on."""
    began, goes_on = threading.Event(), threading.Event()
    real_pwrite = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        began.set()
        assert goes_on.wait(20)
        return real_pwrite(fd, data, offset)

    writer = ImageWriter(str(tmp_path / "image"), size_bytes=4096)
    monkeypatch.setattr(os, "pwrite", pwrite)
    slot = SlotBuffer.in_memory("test", 4096)
    thread = threading.Thread(target=writer.write, args=(slot.view(4096), 0))
    thread.start()
    assert began.wait(20)

    writer.abandon()
    num_open = sum(_path_of(fd) == str(tmp_path / "image") for fd in os.listdir("/proc/self/fd"))
    goes_on.set()
    thread.join(20)

    assert num_open == 1
    assert not any(_path_of(fd) == str(tmp_path / "image") for fd in os.listdir("/proc/self/fd"))
    with pytest.raises(SpoolError, match="given up"):
        writer.write(slot.view(4096), 0)


def _path_of(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


# ---------------------------------------------------------------- a new generation


def test_a_claim_clears_what_older_generations_left_but_not_what_it_resumes_from(
    spool: Spool, tmp_path: Path
) -> None:
    notes = UploadNotes(spool.path)
    told: list[SpoolError] = []
    flusher = Flusher(
        spool,
        notes,
        clock=SystemClock(),
        limits=PaceLimits(least_bytes_per_s=1, patience_s=60),
        on_error=told.append,
    )
    for gen, step in ((1, 10), (2, 20), (3, 30), (4, 40), (9, 5)):
        put(spool, gen=gen, step=step)
        notes.remember(some_tokens(step, gen=gen))

    flusher.settle(gen=4, group="a" * 32, spare=(1, 10))

    assert at(spool) == [(4, 40), (3, 30), (1, 10)]
    left = [(g, s) for g, s in ((1, 10), (3, 30), (4, 40)) if notes.recall(gen=g, step=s)]
    assert left == [(4, 40)]
    assert told == []
    flusher.close()
