"""Bring the images that a generation restores to this node: memory, spool or store, verified.

A rank sees an image only after every chunk of it matched its digest. A chunk that does not match
is read once more; then the checkpoint is bad and the next older one is used.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from supervisor import failpoints
from supervisor.checkpoint.chunks import chunk_ranges
from supervisor.checkpoint.spool import Spool, SpooledCheckpoint
from supervisor.checkpoint.workers import WorkerPool
from supervisor.errors import (
    ForeignObject,
    ObjectMissing,
    PermanentStoreError,
    ShardCorrupt,
    ShardMissing,
    SupervisorError,
)
from supervisor.ranks.slots import SlotBuffer
from supervisor.store.base import ObjectStore
from trainer_sdk.protocol.errors import ProtocolError
from trainer_sdk.protocol.image import ALIGN_BYTES, MAX_HEADER_BYTES, parse_header
from trainer_sdk.protocol.manifest import Manifest, ShardEntry, shard_digest
from trainer_sdk.protocol.names import JobKeys

READ_BYTES = 4 << 20
Source = Literal["memory", "spool", "store"]
Images = Mapping[int, tuple[SlotBuffer, int]]


class FetchCancelled(SupervisorError):
    """Nobody wants these images any more; what was read is dropped."""

    error_id = "fetch_cancelled"
    mend = "nothing: another checkpoint is restored, or none"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FetchedImage:
    """A verified image; `buffer` keeps it alive, `fd` is opened for each rank anew."""

    rank: int
    name: str
    size_bytes: int
    buffer: SlotBuffer
    source: Source


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FetchedCheckpoint:
    """All images that the ranks of this node need, and where most of them came from."""

    gen: int
    step: int
    world: int
    images: tuple[FetchedImage, ...]

    @property
    def source(self) -> Source:
        sources = {image.source for image in self.images}
        return "store" if "store" in sources else "spool" if "spool" in sources else "memory"

    @property
    def size_bytes(self) -> int:
        return sum(image.size_bytes for image in self.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTools:
    """What every fetch needs; made once."""

    store: ObjectStore
    keys: JobKeys
    spool: Spool | None
    readers: WorkerPool
    chunk_timeout_s: float
    on_read: Callable[[Source, int], None]


def digests_of(buffer: SlotBuffer, size_bytes: int, chunk_bytes: int) -> list[bytes]:
    """SHA-256 of every chunk of an image in a buffer."""
    view = buffer.view(size_bytes)
    return [
        hashlib.sha256(view[start:end]).digest()
        for start, end in chunk_ranges(size_bytes, chunk_bytes)
    ]


def is_image(buffer: SlotBuffer, size_bytes: int) -> bool:
    """Whether a buffer holds a whole image, by its header."""
    view = buffer.view(size_bytes)
    try:
        parse_header(view[: 8 + MAX_HEADER_BYTES], image_bytes=size_bytes)
    except ProtocolError:
        return False
    return size_bytes >= ALIGN_BYTES


# ---------------------------------------------------------------- local sets


def verified_in_memory(images: Images, world: int) -> FetchedCheckpoint | None:
    """The set in these slots, if every rank's image is whole; the caller knows its step."""
    if sorted(images) != list(range(world)):
        return None
    if not all(is_image(buffer, size) for buffer, size in images.values()):
        return None
    return FetchedCheckpoint(
        gen=0,
        step=0,
        world=world,
        images=tuple(
            FetchedImage(rank=rank, name="state", size_bytes=size, buffer=buffer, source="memory")
            for rank, (buffer, size) in sorted(images.items())
        ),
    )


def verified_in_spool(spool: Spool, found: SpooledCheckpoint) -> FetchedCheckpoint | None:
    """A checkpoint of the spool, if every image is there and matches its digests; one that does not
    is removed."""
    images = []
    for shard in found.record.shards:
        buffer = _spooled_buffer(spool, found, shard)
        if buffer is None:
            return None
        images.append(
            FetchedImage(
                rank=shard.rank,
                name=shard.name,
                size_bytes=shard.size_bytes,
                buffer=buffer,
                source="spool",
            )
        )
    if sorted({image.rank for image in images}) != list(range(found.record.world)):
        return None
    return FetchedCheckpoint(
        gen=found.record.gen,
        step=found.record.step,
        world=found.record.world,
        images=tuple(images),
    )


def _spooled_buffer(spool: Spool, found: SpooledCheckpoint, shard: ShardEntry) -> SlotBuffer | None:
    path = found.path(shard)
    try:
        buffer = SlotBuffer(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
        if buffer.size_bytes != shard.size_bytes:
            reason = f"{path} has {buffer.size_bytes} bytes, not {shard.size_bytes}"
        elif _digest_of_file(buffer.fd, shard) != shard.sha256:
            reason = f"{path} differs from its digest"
        else:
            return buffer
    except FileNotFoundError:
        reason = f"{path} is not there"
    except OSError:  # it cannot be read now, which says nothing about its bytes
        return None
    spool.reject(found, reason)
    return None


def _digest_of_file(fd: int, shard: ShardEntry) -> str:
    """Read, not mapped: a bad block must be an error here and not SIGBUS."""
    block = memoryview(bytearray(READ_BYTES))
    digests = []
    for start, end in chunk_ranges(shard.size_bytes, shard.chunk_bytes):
        digest = hashlib.sha256()
        at = start
        while at < end:
            count = os.preadv(fd, [block[: min(READ_BYTES, end - at)]], at)
            if count == 0:
                break
            digest.update(block[:count])
            at += count
        digests.append(digest.digest())
    return shard_digest(digests).hex()


def _matches(buffer: SlotBuffer, shard: ShardEntry) -> bool:
    return (
        shard_digest(digests_of(buffer, shard.size_bytes, shard.chunk_bytes)).hex() == shard.sha256
    )


# ---------------------------------------------------------------- committed checkpoints


class Fetch:
    """Fetches one committed checkpoint. `run` is called once, on a thread of its own."""

    def __init__(
        self, tools: FetchTools, manifest: Manifest, *, in_memory: Sequence[Images] = ()
    ) -> None:
        """`in_memory`: sets of slots that may already hold these very images."""
        self._tools = tools
        self._manifest = manifest
        self._in_memory = in_memory
        self._stop = threading.Event()

    def cancel(self) -> None:
        """Stop as soon as possible."""
        self._stop.set()

    def run(self) -> FetchedCheckpoint:
        """Fetch and verify everything.

        Raises:
            ShardMissing, ShardCorrupt: the checkpoint is bad.
            FetchCancelled: `cancel` was called before every byte was verified.
            StoreError: the store could not be read in time; the checkpoint may be good.
        """
        images = []
        remote: list[tuple[ShardEntry, SlotBuffer, list[Future[None]]]] = []
        for shard in self._manifest.shards:
            local = self._from_memory(shard) or self._from_spool(shard)
            if local is not None:
                images.append(local)
            else:
                remote.append(self._start_download(shard))
        for shard, buffer, chunks in remote:
            for chunk in chunks:
                chunk.result()
            images.append(self._image(shard, buffer, "store"))
        return FetchedCheckpoint(
            gen=self._manifest.gen,
            step=self._manifest.step,
            world=self._manifest.world,
            images=tuple(sorted(images, key=lambda image: (image.rank, image.name))),
        )

    def _image(self, shard: ShardEntry, buffer: SlotBuffer, source: Source) -> FetchedImage:
        self._tools.on_read(source, shard.size_bytes)
        return FetchedImage(
            rank=shard.rank,
            name=shard.name,
            size_bytes=shard.size_bytes,
            buffer=buffer,
            source=source,
        )

    def _from_memory(self, shard: ShardEntry) -> FetchedImage | None:
        for images in self._in_memory:
            buffer, size_bytes = images.get(shard.rank, (None, 0))
            if buffer is not None and size_bytes == shard.size_bytes and _matches(buffer, shard):
                return self._image(shard, buffer, "memory")
        return None

    def _from_spool(self, shard: ShardEntry) -> FetchedImage | None:
        if self._tools.spool is None:
            return None
        for found in self._tools.spool.ready():
            if (found.record.gen, found.record.step) != (self._manifest.gen, self._manifest.step):
                continue
            buffer = _spooled_buffer(self._tools.spool, found, shard)
            if buffer is not None:
                return self._image(shard, buffer, "spool")
        return None

    def _start_download(
        self, shard: ShardEntry
    ) -> tuple[ShardEntry, SlotBuffer, list[Future[None]]]:
        buffer = SlotBuffer.in_memory(f"lastgasp-fetch-{shard.rank}", shard.size_bytes)
        ranges = chunk_ranges(shard.size_bytes, shard.chunk_bytes)
        futures = [
            self._tools.readers.submit(self._read_call(shard, buffer, index, start, end))
            for index, (start, end) in enumerate(ranges)
        ]
        return shard, buffer, futures

    def _read_call(
        self, shard: ShardEntry, buffer: SlotBuffer, index: int, start: int, end: int
    ) -> Callable[[], None]:
        def read() -> None:
            target = buffer.view(shard.size_bytes)[start:end]
            for _ in range(2):
                if self._stop.is_set():
                    raise FetchCancelled(f"step {self._manifest.step}: not wanted any more")
                failpoints.hit("fetch.chunk.before")
                self._read_chunk(shard, start, target)
                failpoints.hit("fetch.chunk.after")
                if hashlib.sha256(target).hexdigest() == shard.chunks[index]:
                    return
            raise ShardCorrupt(
                f"step {self._manifest.step}: chunk {index} of rank {shard.rank}'s shard differs "
                f"from its digest, also after a second read ({shard.key})",
                hint="the checkpoint is set aside and the next older one is used",
            )

        return read

    def _read_chunk(self, shard: ShardEntry, start: int, target: memoryview) -> None:
        try:
            self._tools.store.read_into(
                self._tools.keys.full(shard.key),
                offset=start,
                target=target,
                timeout_s=self._tools.chunk_timeout_s,
            )
        except ObjectMissing as error:
            raise ShardMissing(
                f"step {self._manifest.step}: rank {shard.rank}'s shard is gone ({shard.key})",
                hint="look for lifecycle rules or people that delete below the job's prefix",
            ) from error
        except ForeignObject as error:
            raise ShardCorrupt(
                f"step {self._manifest.step}: rank {shard.rank}'s shard was replaced: "
                f"{error.message}",
                hint="the checkpoint is set aside and the next older one is used",
            ) from error
        except PermanentStoreError as error:
            self._check_size(shard, error)
            raise

    def _check_size(self, shard: ShardEntry, error: PermanentStoreError) -> None:
        """An object of another size is a bad shard, not a store that refuses."""
        found = self._tools.store.head(
            self._tools.keys.full(shard.key), timeout_s=self._tools.chunk_timeout_s
        )
        if found.size_bytes != shard.size_bytes:
            raise ShardCorrupt(
                f"step {self._manifest.step}: rank {shard.rank}'s shard has {found.size_bytes} "
                f"bytes, not {shard.size_bytes} ({shard.key})",
                hint="the checkpoint is set aside and the next older one is used",
            ) from error
