"""The staged images of one set, each with the digests that hashing brings, one chunk at a time."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from supervisor.checkpoint.chunks import chunk_ranges, chunk_size
from supervisor.checkpoint.workers import WorkerPool
from supervisor.ranks.slots import SlotBuffer, round_up
from trainer_sdk.protocol.manifest import ShardEntry, shard_digest

SHARD_NAME = "state"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedShard:
    """One rank's image on its way, and the key that it will have in the store."""

    rank: int
    key: str
    buffer: SlotBuffer
    size_bytes: int
    chunk_bytes: int
    ranges: tuple[tuple[int, int], ...]
    hashed: tuple[Future[bytes], ...]

    @classmethod
    def of(cls, rank: int, buffer: SlotBuffer, size_bytes: int, *, key: str) -> StagedShard:
        """Cut an image into chunks."""
        ranges = tuple(chunk_ranges(size_bytes, chunk_size(size_bytes)))
        return cls(
            rank=rank,
            key=key,
            buffer=buffer,
            size_bytes=size_bytes,
            chunk_bytes=chunk_size(size_bytes),
            ranges=ranges,
            hashed=tuple(Future() for _ in ranges),
        )

    @property
    def label(self) -> str:
        return shard_label(self.rank)

    def chunk(self, index: int) -> memoryview:
        """The bytes of a chunk."""
        start, end = self.ranges[index]
        return self.buffer.view(self.size_bytes)[start:end]

    def padded_chunk(self, index: int) -> memoryview:
        """The chunk with the rest of its last page; a copy only where the image ends within one,
        as an image out of the spool does."""
        start, end = self.ranges[index]
        view = self.buffer.view(round_up(self.size_bytes))[start : start + round_up(end - start)]
        if len(view) == round_up(end - start):
            return view
        bounce = mmap.mmap(-1, round_up(end - start))  # page aligned, as O_DIRECT wants it
        bounce[: end - start] = view[: end - start]
        return memoryview(bounce)

    def digests(self) -> list[bytes]:
        """Of every chunk; waits for hashing, which waits for no disk and no store."""
        return [future.result() for future in self.hashed]

    def entry(self) -> ShardEntry:
        """What the part and the spool's record say of it."""
        digests = self.digests()
        return ShardEntry(
            rank=self.rank,
            name=SHARD_NAME,
            key=self.key,
            size_bytes=self.size_bytes,
            sha256=shard_digest(digests).hex(),
            chunk_bytes=self.chunk_bytes,
            chunks=tuple(digest.hex() for digest in digests),
        )


def shard_label(rank: int) -> str:
    """A shard's name in the notes of its set."""
    return f"{rank}/{SHARD_NAME}"


def in_turns(shards: Sequence[StagedShard]) -> Iterator[tuple[StagedShard, int]]:
    """Every chunk of every shard, the shards in turn so that all of them progress."""
    for index in range(max(len(shard.ranges) for shard in shards)):
        for shard in shards:
            if index < len(shard.ranges):
                yield shard, index


def hash_all(
    shards: Sequence[StagedShard], pool: WorkerPool, *, is_cancelled: Callable[[], bool]
) -> None:
    """Queue the hashing of every chunk; once cancelled the rest of the futures is, too."""

    def work(shard: StagedShard, index: int) -> None:
        hashed = shard.hashed[index]
        if is_cancelled():
            hashed.cancel()
            return
        try:
            digest = hashlib.sha256(shard.chunk(index)).digest()
        except BaseException as error:
            hashed.set_exception(error)  # or whoever needs this digest waits for ever
            raise
        hashed.set_result(digest)

    for shard, index in in_turns(shards):
        pool.submit(partial(work, shard, index))
