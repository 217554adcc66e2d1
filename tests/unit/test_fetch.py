"""Images come back from memory, spool or store, and no byte of them unverified."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.checkpoint.chunks import CHUNK_BYTES
from supervisor.checkpoint.fetch import (
    Fetch,
    FetchCancelled,
    FetchedCheckpoint,
    FetchTools,
    verified_in_memory,
    verified_in_spool,
)
from supervisor.checkpoint.local import LocalSets
from supervisor.checkpoint.workers import WorkerPool
from supervisor.clock import SystemClock
from supervisor.commit.records import LocalStep
from supervisor.errors import (
    ShardCorrupt,
    ShardMissing,
    StoreAccessDenied,
    TransientStoreError,
)
from supervisor.prefetch import Prefetch
from supervisor.ranks.slots import SlotBuffer
from supervisor.store.base import ObjectStore
from supervisor.store.faults import Fault, FaultKind, FaultyStore
from tests.fakes import wait_until
from tests.unit.images import Workshop, an_image, in_slots, some_images, workshops
from trainer_sdk.protocol.manifest import Manifest


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    yield from workshops(tmp_path)


def committed(workshop: Workshop, images: dict[int, bytes], *, step: int = 10) -> Manifest:
    return workshop.manifest(workshop.persist(images, step=step).seq)


def lose_spool(workshop: Workshop) -> None:
    assert workshop.spool is not None
    for item in workshop.spool.ready():
        workshop.spool.discard(item.directory)


def flip(path: Path, *, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)


def bytes_of(found: FetchedCheckpoint) -> dict[int, bytes]:
    return {image.rank: bytes(image.buffer.view(image.size_bytes)) for image in found.images}


# ---------------------------------------------------------------- where from


def test_memory_is_preferred_then_the_spool_then_the_store(workshop: Workshop) -> None:
    images = some_images(2)
    manifest = committed(workshop, images)

    from_memory = Fetch(workshop.fetch_tools, manifest, in_memory=[in_slots(images)]).run()
    from_spool = Fetch(workshop.fetch_tools, manifest).run()
    lose_spool(workshop)
    from_store = Fetch(workshop.fetch_tools, manifest).run()

    found = [from_memory, from_spool, from_store]
    assert [item.source for item in found] == ["memory", "spool", "store"]
    assert [bytes_of(item) for item in found] == [images] * 3
    assert (from_store.gen, from_store.step, from_store.world) == (manifest.gen, 10, 2)
    assert from_store.size_bytes == manifest.size_bytes


def test_each_rank_comes_from_the_nearest_place_that_has_it(workshop: Workshop) -> None:
    images = some_images(3)
    manifest = committed(workshop, images)
    assert workshop.spool is not None
    (item,) = workshop.spool.ready()
    Path(item.path(item.record.shards[2])).unlink()

    found = Fetch(workshop.fetch_tools, manifest, in_memory=[in_slots({0: images[0]})]).run()

    assert [image.source for image in found.images] == ["memory", "spool", "store"]
    assert bytes_of(found) == images


@pytest.mark.parametrize("changed", [an_image(0, seed=9), an_image(0, num_bytes=9_000)])
def test_another_image_in_memory_is_not_taken(workshop: Workshop, changed: bytes) -> None:
    images = some_images(1)
    manifest = committed(workshop, images)

    found = Fetch(workshop.fetch_tools, manifest, in_memory=[in_slots({0: changed})]).run()

    assert found.source == "spool"
    assert bytes_of(found) == images


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "empty"])
def test_a_damaged_spool_is_passed_over(workshop: Workshop, damage: str) -> None:
    images = some_images(1)
    manifest = committed(workshop, images)
    assert workshop.spool is not None
    (item,) = workshop.spool.ready()
    path = Path(item.path(item.record.shards[0]))
    if damage == "flip":
        flip(path)
    else:
        content = {"cut": images[0][:-1], "grow": images[0] + b"x", "empty": b""}[damage]
        path.write_bytes(content)

    found = Fetch(workshop.fetch_tools, manifest).run()

    assert found.source == "store"
    assert bytes_of(found) == images


def test_an_image_of_several_chunks_comes_back_whole(workshop: Workshop) -> None:
    images = {0: an_image(0, num_bytes=CHUNK_BYTES + 777)}
    manifest = committed(workshop, images)
    lose_spool(workshop)

    found = Fetch(workshop.fetch_tools, manifest).run()

    assert bytes_of(found) == images


# ---------------------------------------------------------------- a bad store


def damaged(tmp_path: Path, *faults: Fault) -> tuple[Workshop, FaultyStore, Manifest]:
    found: list[FaultyStore] = []

    def wrap(store: ObjectStore) -> ObjectStore:
        found.append(FaultyStore(store, clock=SystemClock()))
        return found[0]

    workshop = Workshop(tmp_path, wrap=wrap)
    manifest = committed(workshop, some_images(1))
    lose_spool(workshop)
    for fault in faults:
        found[0].add(fault)
    return workshop, found[0], manifest


def num_reads(store: FaultyStore) -> int:
    return [method for method, _ in store.calls].count("read_into")


def test_a_chunk_that_was_read_wrong_once_is_read_again(tmp_path: Path) -> None:
    workshop, store, manifest = damaged(
        tmp_path, Fault(kind=FaultKind.CORRUPT_READ, method="read_into", at_call=1)
    )

    found = Fetch(workshop.fetch_tools, manifest).run()

    assert bytes_of(found) == some_images(1)
    assert num_reads(store) == 2
    workshop.close()


@pytest.mark.parametrize("at", [0, 8, 5000, -1])
def test_a_flipped_byte_in_the_store_is_read_twice_and_the_shard_is_corrupt(
    tmp_path: Path, at: int
) -> None:
    workshop, store, manifest = damaged(tmp_path)
    flip(workshop.shard_path(manifest, 0), at=at)

    with pytest.raises(ShardCorrupt, match="chunk 0 of rank 0's shard"):
        Fetch(workshop.fetch_tools, manifest).run()

    assert num_reads(store) == 2
    workshop.close()


def test_an_object_that_is_gone_is_a_missing_shard(tmp_path: Path) -> None:
    workshop, _, manifest = damaged(tmp_path)
    workshop.shard_path(manifest, 0).unlink()

    with pytest.raises(ShardMissing) as caught:
        Fetch(workshop.fetch_tools, manifest).run()

    assert caught.value.hint
    workshop.close()


@pytest.mark.parametrize("length", [0, 1, 4096, -1])
def test_an_object_that_is_too_short_is_a_corrupt_shard(tmp_path: Path, length: int) -> None:
    """The store works: asking again would give the same for ever."""
    workshop, _, manifest = damaged(tmp_path)
    path = workshop.shard_path(manifest, 0)
    os.truncate(path, length if length >= 0 else path.stat().st_size - 1)

    with pytest.raises(ShardCorrupt):
        Fetch(workshop.fetch_tools, manifest).run()

    workshop.close()


def test_a_store_that_does_not_answer_says_nothing_about_the_checkpoint(tmp_path: Path) -> None:
    workshop, _, manifest = damaged(tmp_path, Fault(kind=FaultKind.DROP, method="read_into"))

    with pytest.raises(TransientStoreError):
        Fetch(workshop.fetch_tools, manifest).run()

    workshop.close()


def test_a_store_that_refuses_says_nothing_about_the_checkpoint(workshop: Workshop) -> None:
    class Refusing:
        def __getattr__(self, name: str) -> object:
            return getattr(workshop.store, name)

        def read_into(self, key: str, **options: object) -> None:
            raise StoreAccessDenied("no GetObject")

    manifest = committed(workshop, some_images(1))
    tools = workshop.fetch_tools
    tools = FetchTools(
        store=Refusing(),  # type: ignore[arg-type]
        keys=tools.keys,
        spool=None,
        readers=tools.readers,
        chunk_timeout_s=10.0,
        on_read=tools.on_read,
    )

    with pytest.raises(StoreAccessDenied):
        Fetch(tools, manifest).run()


# ---------------------------------------------------------------- cancelled


def test_a_cancelled_fetch_gives_nothing(workshop: Workshop) -> None:
    """What it would give was never read: zeros that look like an image."""
    manifest = committed(workshop, some_images(2))
    lose_spool(workshop)
    fetch = Fetch(workshop.fetch_tools, manifest)

    fetch.cancel()

    with pytest.raises(FetchCancelled):
        fetch.run()


class SlowReads:
    """A store whose reads wait at a gate, the first `num_gated` of them."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.is_gated = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def read_into(self, key: str, **options: object) -> None:
        if self.is_gated:
            self.reached.set()
            assert self.opened.wait(20)
        self._store.read_into(key, **options)  # type: ignore[arg-type]


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Workshop, SlowReads]]:
    found: list[SlowReads] = []

    def wrap(store: ObjectStore) -> ObjectStore:
        found.append(SlowReads(store))
        return found[0]  # type: ignore[return-value]

    workshop = Workshop(tmp_path, wrap=wrap)
    yield workshop, found[0]
    found[0].opened.set()
    workshop.close()


def test_what_is_fetched_ahead_is_taken_if_it_is_the_commit_that_was_claimed(
    workshop: Workshop,
) -> None:
    images = some_images(2)
    manifest = committed(workshop, images)
    prefetch = Prefetch(workshop.log, workshop.fetch_tools, workshop.clock)

    prefetch.start([])
    found = prefetch.take(manifest.seq)

    assert found is not None
    assert bytes_of(found) == images
    assert prefetch.take(manifest.seq) is None


def test_another_commit_than_the_claimed_one_is_not_taken(workshop: Workshop) -> None:
    old = committed(workshop, some_images(1, seed=1), step=10)
    committed(workshop, some_images(1, seed=2), step=20)
    prefetch = Prefetch(workshop.log, workshop.fetch_tools, workshop.clock)

    prefetch.start([])

    assert prefetch.take(old.seq) is None


def test_a_prefetch_that_was_overtaken_never_stands_in_for_the_newer_one(
    slow: tuple[Workshop, SlowReads],
) -> None:
    """Its images were given up half way; ranks would train on from rubbish."""
    workshop, store = slow
    images = {0: an_image(0, num_bytes=3 * CHUNK_BYTES)}
    manifest = committed(workshop, images)
    lose_spool(workshop)
    prefetch = Prefetch(workshop.log, workshop.fetch_tools, workshop.clock)
    store.is_gated = True
    prefetch.start([])
    assert store.reached.wait(20)
    store.is_gated = False

    workshop.shard_path(manifest, 0).rename(workshop.root / "hidden")
    prefetch.start([])  # this one fails: the shard is gone
    store.opened.set()
    found = prefetch.take(manifest.seq)
    wait_until(lambda: not any(t.name == "prefetch" for t in threading.enumerate()))

    assert found is None
    assert prefetch.take(manifest.seq) is None


def test_a_prefetch_that_fails_is_no_error_of_the_job(workshop: Workshop) -> None:
    manifest = committed(workshop, some_images(1))
    lose_spool(workshop)
    workshop.shard_path(manifest, 0).unlink()
    prefetch = Prefetch(workshop.log, workshop.fetch_tools, workshop.clock)

    prefetch.start([])

    assert prefetch.take(manifest.seq) is None


def test_without_a_commit_there_is_nothing_to_fetch_ahead(workshop: Workshop) -> None:
    prefetch = Prefetch(workshop.log, workshop.fetch_tools, workshop.clock)
    assert prefetch.take(1) is None

    prefetch.start([])

    assert prefetch.take(1) is None


def _num_images_in_memory(name: str = "lastgasp-fetch") -> int:
    """Descriptors of such memfds; a mapped one counts twice."""
    gc.collect()
    return sum(
        name in os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    )


@pytest.mark.parametrize("is_taken", [True, False])
def test_what_was_fetched_is_let_go_of_once_it_was_restored(
    workshop: Workshop, is_taken: bool
) -> None:
    """It is as large as the job's state on this node."""
    manifest = committed(workshop, some_images(2))
    lose_spool(workshop)
    before = _num_images_in_memory()
    prefetch = Prefetch(workshop.log, workshop.fetch_tools, workshop.clock)
    prefetch.start([])
    if is_taken:
        assert prefetch.take(manifest.seq) is not None
    else:
        wait_until(lambda: not any(t.name == "prefetch" for t in threading.enumerate()))
        assert _num_images_in_memory() > before

    prefetch.forget()

    wait_until(lambda: _num_images_in_memory() == before)


def test_an_idle_worker_keeps_nothing_of_its_last_call() -> None:
    pool = WorkerPool("test", 1)
    slot = SlotBuffer.in_memory("idle", 4096)
    call = slot.view(4096).__len__
    assert pool.submit(call).result(20) == 4096

    del slot, call

    wait_until(lambda: _num_images_in_memory("idle") == 0)
    pool.close()


# ---------------------------------------------------------------- local sets


def test_a_set_in_memory_is_whole_or_nothing() -> None:
    images = in_slots(some_images(2))

    assert verified_in_memory(images, 2) is not None
    assert verified_in_memory(images, 3) is None
    assert verified_in_memory({0: images[0]}, 2) is None


def test_a_slot_without_an_image_is_no_set() -> None:
    images = in_slots({0: b"\0" * 8192})

    assert verified_in_memory(images, 1) is None


def test_a_spooled_set_that_misses_a_rank_is_none(workshop: Workshop) -> None:
    workshop.persist(some_images(2))
    assert workshop.spool is not None
    (item,) = workshop.spool.ready()
    assert verified_in_spool(workshop.spool, item) is not None
    Path(item.path(item.record.shards[1])).unlink()

    assert verified_in_spool(workshop.spool, item) is None


class Local:
    """A node whose newest set is newer than the newest commit."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        committed(workshop, some_images(1, seed=1), step=10)
        self.sets = LocalSets(workshop.spool)
        self.gen = workshop.log.tail(workshop.deadline()).state.gen
        self.images = some_images(1, seed=2)

    def at(self, step: int = 20, *, gen: int | None = None) -> LocalStep:
        return LocalStep(gen=gen or self.gen, step=step, group=self.workshop.group.group)

    def newest(self, step: int = 20, *, gen: int | None = None) -> LocalStep | None:
        at = self.at(step, gen=gen)
        return self.sets.newest(
            self.workshop.log,
            (at, in_slots(self.images)),
            world=1,
            deadline=self.workshop.deadline(),
        )


@pytest.fixture
def local(workshop: Workshop) -> Local:
    return Local(workshop)


def test_a_newer_set_in_memory_is_offered_and_taken(local: Local) -> None:
    offered = local.newest()

    assert offered == local.at(20)
    assert bytes_of(local.sets.take(offered, world=1)) == local.images


@pytest.mark.parametrize("step", [9, 10])
def test_a_set_that_is_not_newer_than_the_newest_commit_is_not_offered(
    local: Local, step: int
) -> None:
    assert local.newest(step) is None


def test_a_set_of_a_generation_that_the_log_does_not_know_is_not_offered(local: Local) -> None:
    assert local.newest(gen=local.gen + 1) is None


def test_a_set_that_was_discarded_is_not_offered_again(local: Local) -> None:
    offered = local.newest()
    assert offered is not None

    local.sets.discard(offered)

    assert local.newest() is None
    with pytest.raises(ShardMissing):
        local.sets.take(offered, world=1)


def test_only_what_was_offered_can_be_taken(local: Local) -> None:
    local.newest()

    with pytest.raises(ShardMissing):
        local.sets.take(local.at(21), world=1)
