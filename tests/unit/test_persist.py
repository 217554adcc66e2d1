"""A set of images becomes a checkpoint: real memfd slots, a real store, a real log."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from supervisor import failpoints, inspecting
from supervisor.checkpoint.chunks import CHUNK_BYTES
from supervisor.checkpoint.pace import PaceLimits
from supervisor.checkpoint.persist import IncompleteSet, PersistCancelled, PersistJob
from supervisor.checkpoint.shards import StagedShard
from supervisor.checkpoint.upload import ImageChanged
from supervisor.clock import SystemClock
from supervisor.commit.reader import list_commits
from supervisor.errors import Fenced, TransientStoreError, UploadAbandoned
from supervisor.ranks.slots import SlotBuffer
from supervisor.store.base import ObjectStore, ShardUpload
from supervisor.store.faults import Fault, FaultKind, FaultyStore
from tests.fakes import wait_until
from tests.unit.filesystems import tmpfs
from tests.unit.images import Workshop, an_image, in_slots, some_images, workshops
from trainer_sdk.protocol.failpoints import ENVIRONMENT_NAME


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    yield from workshops(tmp_path)


@pytest.fixture
def failpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets what fails from here on."""

    def set_to(text: str) -> None:
        monkeypatch.setenv(ENVIRONMENT_NAME, text)
        failpoints.reload()

    yield set_to
    set_to("")


def faulty(tmp_path: Path, *faults: Fault) -> tuple[Workshop, FaultyStore]:
    found: list[FaultyStore] = []

    def wrap(store: ObjectStore) -> ObjectStore:
        found.append(FaultyStore(store, clock=SystemClock(), faults=faults))
        return found[0]

    workshop = Workshop(tmp_path, wrap=wrap)
    return workshop, found[0]


class Gate:
    """A store whose uploads wait at the gate before each chunk."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.chunks: list[tuple[str, int]] = []
        self.aborted: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def open_upload(self, key: str, **options: object) -> ShardUpload:
        upload = self._store.open_upload(key, **options)  # type: ignore[arg-type]
        return _GatedUpload(self, key, upload)  # type: ignore[return-value]


class _GatedUpload:
    def __init__(self, gate: Gate, key: str, upload: ShardUpload) -> None:
        self._gate, self._key, self._upload = gate, key, upload

    def __getattr__(self, name: str) -> object:
        return getattr(self._upload, name)

    def put_chunk(self, index: int, data: memoryview, **options: object) -> None:
        self._gate.reached.set()
        assert self._gate.opened.wait(20)
        self._upload.put_chunk(index, data, **options)  # type: ignore[arg-type]
        self._gate.chunks.append((self._key, index))

    def abort(self, *, timeout_s: float) -> None:
        self._gate.aborted.append(self._key)
        self._upload.abort(timeout_s=timeout_s)


def gated(tmp_path: Path) -> tuple[Workshop, Gate]:
    found: list[Gate] = []

    def wrap(store: ObjectStore) -> ObjectStore:
        found.append(Gate(store))
        return found[0]  # type: ignore[return-value]

    workshop = Workshop(tmp_path, wrap=wrap)
    return workshop, found[0]


def stored(workshop: Workshop, seq: int) -> Mapping[int, bytes]:
    manifest = workshop.manifest(seq)
    return {
        rank: workshop.shard_path(manifest, rank).read_bytes() for rank in range(manifest.world)
    }


# ---------------------------------------------------------------- the whole way


def test_a_whole_set_is_committed_byte_for_byte(workshop: Workshop) -> None:
    images = some_images(3)

    done = workshop.persist(images, step=10)

    assert stored(workshop, done.seq) == images
    assert workshop.steps() == [10]
    assert done.size_bytes == sum(map(len, images.values()))
    assert done.spool_s is not None


def test_the_commit_is_listed_and_every_byte_of_it_verifies(workshop: Workshop) -> None:
    workshop.persist(some_images(2), step=10)

    (commit,) = list_commits(workshop.log, workshop.deadline())
    verdict = inspecting.verify(workshop.log, commit, share=1.0, deadline=workshop.deadline())

    assert (commit.step, commit.is_good) == (10, True)
    assert verdict.problem == ""
    assert verdict.num_shards == 2
    assert verdict.checked_bytes == workshop.manifest(commit.seq).size_bytes


def test_what_is_in_the_store_opens_with_stock_safetensors(workshop: Workshop) -> None:
    image = an_image(0, num_bytes=1000)

    done = workshop.persist({0: image})

    path = workshop.shard_path(workshop.manifest(done.seq), 0)
    assert load_file(path)["weights"].tobytes() == image[-1000:]


def test_the_spool_holds_the_same_bytes_and_no_notes_are_left(workshop: Workshop) -> None:
    images = some_images(2)

    workshop.persist(images)

    assert workshop.spool is not None
    (found,) = workshop.spool.ready()
    assert {s.rank: Path(found.path(s)).read_bytes() for s in found.record.shards} == images
    assert os.listdir(os.path.join(workshop.spool.path, "uploads")) == []
    assert workshop.spooled.is_set()


def test_progress_reaches_the_whole(workshop: Workshop) -> None:
    images = some_images(2)
    job = workshop.job(in_slots(images), step=10)

    job.run()

    total = sum(map(len, images.values()))
    assert (job.progress.total_bytes, job.progress.uploaded_bytes) == (total, total)
    assert job.progress.spooled_bytes >= total
    assert sum(workshop.sent) == total


def test_an_image_of_several_chunks_is_committed_and_its_last_chunk_is_short(
    workshop: Workshop,
) -> None:
    image = an_image(0, num_bytes=CHUNK_BYTES + 12_345)

    done = workshop.persist({0: image})

    (shard,) = workshop.manifest(done.seq).shards
    assert len(shard.chunks) == 2
    assert stored(workshop, done.seq) == {0: image}


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097])
def test_images_of_any_length_come_through(workshop: Workshop, num_bytes: int) -> None:
    image = an_image(0, num_bytes=num_bytes)

    done = workshop.persist({0: image})

    assert stored(workshop, done.seq) == {0: image}
    assert workshop.spool is not None
    (found,) = workshop.spool.ready()
    assert Path(found.path(found.record.shards[0])).read_bytes() == image


def test_bytes_after_the_image_in_its_slot_go_nowhere(workshop: Workshop) -> None:
    image = an_image(0)
    slots = in_slots({0: image})
    slot, _ = slots[0]
    slot.view(slot.size_bytes)[len(image) :] = b"\xee" * (slot.size_bytes - len(image))

    done = workshop.job(slots, step=10).run()

    assert stored(workshop, done.seq) == {0: image}


def test_two_steps_are_two_commits_and_the_spool_keeps_the_newer_two(workshop: Workshop) -> None:
    for step in (10, 20, 30):
        workshop.persist(some_images(1, seed=step), step=step)

    assert workshop.steps() == [10, 20, 30]
    assert workshop.spool is not None
    assert [item.record.step for item in workshop.spool.ready()] == [30, 20]


# ---------------------------------------------------------------- a local disk that fails


def test_without_a_spool_the_store_has_it_all(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path, with_spool=False)
    images = some_images(2)

    done = workshop.persist(images)

    assert done.spool_s is None
    assert stored(workshop, done.seq) == images
    assert not workshop.spooled.is_set()
    workshop.close()


def test_a_full_local_disk_is_told_once_and_the_store_has_it_all(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "spool", size="1m"):
        workshop = Workshop(tmp_path)
        images = some_images(2, num_bytes=2 << 20)

        done = workshop.persist(images)

        assert [error.error_id for error in workshop.spool_errors] == ["disk_full"]
        assert stored(workshop, done.seq) == images
        assert done.spool_s is None
        assert workshop.spool is not None
        assert os.listdir(os.path.join(workshop.spool.path, "checkpoints")) == []
        workshop.close()


def test_an_older_copy_makes_room_for_the_newer_on_a_full_disk(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "spool", size="1m"):
        workshop = Workshop(tmp_path)
        for step in (10, 20, 30):
            workshop.persist(some_images(1, num_bytes=400_000, seed=step), step=step)

        assert workshop.spool_errors == []
        assert workshop.spool is not None
        assert next(item.record.step for item in workshop.spool.ready()) == 30
        workshop.close()


def test_a_local_disk_that_breaks_while_it_is_written_does_not_stop_the_upload(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_pwrite = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors"):
            raise OSError(errno.EIO, "Input/output error")
        return real_pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    images = some_images(2)

    done = workshop.persist(images)

    assert [error.error_id for error in workshop.spool_errors] == ["disk_io_error"]
    assert stored(workshop, done.seq) == images
    assert workshop.spool is not None
    assert workshop.spool.ready() == []


def test_a_local_disk_that_goes_away_at_the_end_does_not_make_a_commit_a_failure(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_unlink = os.unlink

    def unlink(path: str, **options: int) -> None:
        if path.endswith(".json"):
            raise OSError(errno.EROFS, "Read-only file system")
        real_unlink(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)

    done = workshop.persist(some_images(1))

    assert workshop.steps() == [10]
    assert done.seq > 0
    assert [error.error_id for error in workshop.spool_errors] == ["nvme_not_mounted"]


@pytest.mark.parametrize("call", ["open", "write", "fsync", "close"])
def test_no_space_at_any_call_is_mended_once_by_the_ballast(
    tmp_path: Path, failpoint: Callable[[str], None], call: str
) -> None:
    workshop = Workshop(tmp_path, ballast_bytes=1 << 20)
    when = "after" if call in ("open", "close") else "before"
    failpoint(f"spool.{call}.{when}=ENOSPC@1")

    workshop.persist(some_images(1))

    assert workshop.spool_errors == []
    assert workshop.spool is not None
    assert [item.record.step for item in workshop.spool.ready()] == [10]
    assert only_final_names(workshop)
    workshop.close()


def test_no_space_twice_is_told_and_the_next_set_tries_again(
    tmp_path: Path, failpoint: Callable[[str], None]
) -> None:
    workshop = Workshop(tmp_path, ballast_bytes=1 << 20)
    failpoint("spool.write.before=ENOSPC")
    workshop.persist(some_images(1), step=10)
    failpoint("")

    workshop.persist(some_images(1), step=20)

    assert [error.error_id for error in workshop.spool_errors] == ["disk_full"]
    assert workshop.steps() == [10, 20]
    assert workshop.spool is not None
    assert [item.record.step for item in workshop.spool.ready()] == [20]
    assert only_final_names(workshop)
    workshop.close()


def only_final_names(workshop: Workshop) -> bool:
    assert workshop.spool is not None
    names = os.listdir(os.path.join(workshop.spool.path, "checkpoints"))
    return not any(name.startswith("tmp-") for name in names)


def test_a_disk_that_failed_an_fsync_is_not_used_again(
    workshop: Workshop, failpoint: Callable[[str], None]
) -> None:
    failpoint("spool.fsync.before=EIO@1")

    workshop.persist(some_images(1), step=10)
    workshop.persist(some_images(1), step=20)

    assert [error.error_id for error in workshop.spool_errors] == ["disk_io_error"]
    assert workshop.steps() == [10, 20]
    assert workshop.spool is not None
    assert (workshop.spool.is_suspect, workshop.spool.ready()) == (True, [])
    assert only_final_names(workshop)


def test_a_disk_that_hangs_holds_no_commit_up_and_is_tried_again_once_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = PaceLimits(least_bytes_per_s=1, patience_s=0.2)
    workshop = Workshop(tmp_path, limits=limits)
    answers = hanging_writes(monkeypatch)
    first = workshop.job(in_slots(some_images(1)), step=10)
    second = workshop.job(in_slots(some_images(1, seed=1)), step=20)

    done = first.run()
    assert first.flush is not None
    assert first.flush.is_over.wait(20)
    second.run()
    assert second.flush is not None
    assert second.flush.is_over.wait(20)

    assert done.spool_s is None
    assert workshop.steps() == [10, 20]
    assert [error.error_id for error in workshop.spool_errors] == ["disk_slow", "disk_slow"]
    assert not workshop.spooled.is_set()
    answers.set()
    assert workshop.flusher is not None
    assert workshop.flusher.wait_idle(timeout_s=20)
    workshop.persist(some_images(1), step=30)
    assert workshop.spool is not None
    assert [item.record.step for item in workshop.spool.ready()] == [30]
    assert only_final_names(workshop)
    workshop.close()


def hanging_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes of images into the spool do not return before the event is set."""
    answers = threading.Event()
    real_pwrite = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if "/spool/" in path and path.endswith(".safetensors"):
            assert answers.wait(30)
        return real_pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    return answers


def test_a_slot_that_is_written_again_while_the_disk_lags_is_not_published(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = hanging_writes(monkeypatch)
    slots = in_slots(some_images(1))
    job = workshop.job(slots, step=10)
    job.run()

    job.release_images()
    slot, size_bytes = slots[0]
    slot.view(size_bytes)[-100:] = b"\xaa" * 100  # the next step
    answers.set()
    workshop.settle(job)

    assert workshop.steps() == [10]
    assert not workshop.spooled.is_set()
    assert workshop.spool is not None
    assert workshop.spool.ready() == []
    assert workshop.spool_errors == []
    assert only_final_names(workshop)


def test_a_set_that_is_on_the_disk_already_is_not_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop, store = faulty(tmp_path)
    workshop.claim(1)
    store.add(Fault(kind=FaultKind.DROP, method="complete"))
    images = some_images(1)
    with pytest.raises(TransientStoreError):
        workshop.persist(images)
    assert workshop.spool is not None
    (before,) = workshop.spool.ready()
    inode = os.stat(before.path(before.record.shards[0])).st_ino
    workshop.spooled.clear()

    workshop.persist(images)

    (after,) = workshop.spool.ready()
    assert os.stat(after.path(after.record.shards[0])).st_ino == inode
    assert workshop.spooled.is_set()
    workshop.close()


def test_other_bytes_under_the_step_of_a_set_on_the_disk_replace_it(tmp_path: Path) -> None:
    workshop, store = faulty(tmp_path)
    workshop.claim(1)
    store.add(Fault(kind=FaultKind.DROP, method="complete"))
    with pytest.raises(TransientStoreError):
        workshop.persist({0: an_image(0, seed=1)})

    workshop.persist({0: an_image(0, seed=2)})

    assert workshop.spool is not None
    (found,) = workshop.spool.ready()
    assert Path(found.path(found.record.shards[0])).read_bytes() == an_image(0, seed=2)
    workshop.close()


# ---------------------------------------------------------------- an image that changes


def test_an_image_that_changes_after_it_was_hashed_is_not_committed(tmp_path: Path) -> None:
    workshop, gate = gated(tmp_path)
    slots = in_slots(some_images(1))
    job = workshop.job(slots, step=10)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            job.run()
        except ImageChanged as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert gate.reached.wait(20)

    slot, size_bytes = slots[0]
    slot.view(size_bytes)[size_bytes - 1] ^= 1
    gate.opened.set()
    thread.join(20)

    assert [error.rank for error in failed if isinstance(error, ImageChanged)] == [0]
    assert workshop.steps() == []
    assert len(gate.aborted) == 1
    workshop.close()


# ---------------------------------------------------------------- a store that fails


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind=FaultKind.DROP, method="open_upload"),
        Fault(kind=FaultKind.DROP, method="put_chunk", key_part="/data/"),
        Fault(kind=FaultKind.THROTTLE, method="put_chunk", key_part="/data/"),
        Fault(kind=FaultKind.DROP, method="complete"),
        Fault(kind=FaultKind.LOST_REPLY, method="complete"),
    ],
    ids=lambda fault: f"{fault.kind.value} {fault.method}",
)
def test_an_error_of_the_store_commits_nothing_and_leaves_the_spooled_copy(
    tmp_path: Path, fault: Fault
) -> None:
    workshop, store = faulty(tmp_path)
    workshop.claim(2)
    store.add(fault)

    with pytest.raises(TransientStoreError):
        workshop.persist(some_images(2))

    assert workshop.steps() == []
    assert not (tmp_path / "store" / "jobs" / "job" / "part").exists()
    workshop.close()


def test_after_an_error_of_the_store_a_new_job_commits_the_same_set(tmp_path: Path) -> None:
    workshop, store = faulty(tmp_path)
    workshop.claim(2)
    store.add(Fault(kind=FaultKind.LOST_REPLY, method="complete"))
    images = some_images(2)
    with pytest.raises(TransientStoreError):
        workshop.persist(images)

    done = workshop.persist(images)

    assert stored(workshop, done.seq) == images
    assert len(workshop.data_files()) == 2
    workshop.close()


def test_a_set_of_a_group_that_was_superseded_is_fenced_off(workshop: Workshop) -> None:
    old = workshop.job(in_slots(some_images(1)), step=10)
    workshop.claim(1)

    with pytest.raises(Fenced):
        old.run()

    assert workshop.steps() == []


# ---------------------------------------------------------------- going on with an upload


def test_a_new_job_sends_only_the_chunks_that_are_missing(tmp_path: Path) -> None:
    images = {0: an_image(0, num_bytes=2 * CHUNK_BYTES + 100)}
    workshop, store = faulty(tmp_path)
    group = workshop.claim(1)
    store.add(Fault(kind=FaultKind.DROP, method="put_chunk", at_call=2))
    with pytest.raises(TransientStoreError):
        workshop.persist(images)
    num_kept = store.calls.count(("put_chunk", _only_key(store))) - 1
    workshop.close()

    again, store = faulty(tmp_path)
    again.group = group
    done = again.persist(images)

    assert store.calls.count(("put_chunk", _only_key(store))) == 3 - num_kept
    assert num_kept >= 1
    assert stored(again, done.seq) == images
    again.close()


def _only_key(store: FaultyStore) -> str:
    (key,) = {key for method, key in store.calls if method == "put_chunk"}
    return key


def test_another_content_under_the_same_step_is_sent_anew(tmp_path: Path) -> None:
    """A step may be staged again after a crash, with other bytes: none of the old may stay."""
    workshop, store = faulty(tmp_path)
    workshop.claim(1)
    store.add(Fault(kind=FaultKind.DROP, method="complete"))
    with pytest.raises(TransientStoreError):
        workshop.persist({0: an_image(0, seed=1)})

    done = workshop.persist({0: an_image(0, seed=2)})

    assert stored(workshop, done.seq) == {0: an_image(0, seed=2)}
    workshop.close()


def test_an_upload_that_cannot_go_on_is_begun_under_a_new_key_next_time(tmp_path: Path) -> None:
    keys: list[str] = []

    class Abandoning(Gate):
        is_broken = True

        def open_upload(self, key: str, **options: object) -> ShardUpload:
            keys.append(key)
            upload = self._store.open_upload(key, **options)  # type: ignore[arg-type]
            return _Abandoned(self, key, upload) if self.is_broken else upload  # type: ignore[return-value]

    class _Abandoned(_GatedUpload):
        def put_chunk(self, index: int, data: memoryview, **options: object) -> None:
            raise UploadAbandoned("the upload id is gone")

    stores: list[Abandoning] = []

    def wrap(store: ObjectStore) -> ObjectStore:
        stores.append(Abandoning(store))
        return stores[0]  # type: ignore[return-value]

    workshop = Workshop(tmp_path, wrap=wrap)
    images = some_images(1)
    with pytest.raises(UploadAbandoned):
        workshop.persist(images)
    stores[0].is_broken = False

    done = workshop.persist(images)

    assert keys[0] != keys[1]
    assert stored(workshop, done.seq) == images
    workshop.close()


# ---------------------------------------------------------------- cancelled


def test_a_cancelled_set_is_not_committed_and_what_was_sent_is_dropped(tmp_path: Path) -> None:
    workshop, gate = gated(tmp_path)
    job = workshop.job(in_slots(some_images(2)), step=10)
    ended: list[BaseException] = []

    def run() -> None:
        try:
            job.run()
        except PersistCancelled as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert gate.reached.wait(20)

    job.cancel()
    gate.opened.set()
    thread.join(20)

    assert len(ended) == 1
    assert workshop.steps() == []
    assert len(gate.aborted) == 2
    assert workshop.data_files() == []
    workshop.close()


def test_a_set_that_was_cancelled_before_it_began_sends_nothing(tmp_path: Path) -> None:
    workshop, gate = gated(tmp_path)
    gate.opened.set()
    job = workshop.job(in_slots(some_images(2)), step=10)
    job.cancel()

    with pytest.raises(PersistCancelled):
        job.run()

    workshop.settle(job)
    assert gate.chunks == []
    assert workshop.steps() == []
    assert workshop.spool is not None
    assert os.listdir(os.path.join(workshop.spool.path, "checkpoints")) == []
    workshop.close()


def test_a_slow_store_does_not_hold_the_local_disk_up(tmp_path: Path) -> None:
    workshop, gate = gated(tmp_path)
    thread = threading.Thread(target=workshop.job(in_slots(some_images(2)), step=10).run)
    thread.start()

    assert workshop.spooled.wait(20)
    assert workshop.steps() == []

    gate.opened.set()
    thread.join(20)
    assert workshop.steps() == [10]
    workshop.close()


def test_a_job_leaves_no_descriptor_behind(workshop: Workshop) -> None:
    workshop.persist(some_images(1), step=10)
    before = len(os.listdir("/proc/self/fd"))

    workshop.persist(some_images(1), step=20)

    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_set_without_every_ranks_image_is_never_begun(workshop: Workshop) -> None:
    group = workshop.claim(2)
    images = in_slots(some_images(1))

    with pytest.raises(IncompleteSet, match=r"ranks \[0\] in a world of 2"):
        PersistJob(workshop.tools, group=group, step=5, images=images, on_spooled=print)

    assert workshop.steps() == []


def test_a_step_that_the_log_does_not_take_is_not_told_as_committed(workshop: Workshop) -> None:
    """Step 0 has no place in the log: it begins after it."""
    with pytest.raises(IncompleteSet, match="the log stands at step 0"):
        workshop.persist(some_images(1), step=0)

    assert workshop.steps() == []


def test_an_image_that_ends_within_a_page_is_padded_for_the_disk() -> None:
    """As one out of the spool does, whose file is cut to its size."""
    size_bytes = 4096 + 1000
    fd = os.memfd_create("cut")
    os.write(fd, b"a" * size_bytes)
    shard = StagedShard.of(0, SlotBuffer(fd), size_bytes, key="k")

    padded = shard.padded_chunk(0)

    assert len(padded) == 8192
    assert bytes(padded) == b"a" * size_bytes + bytes(8192 - size_bytes)
