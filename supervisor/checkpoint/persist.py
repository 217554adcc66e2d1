"""Make a complete set of images durable: hash, spool and upload in one pass, then vote and commit.

Each chunk is hashed once, from the image in memory. Its digest goes with the chunk to the store,
which refuses other bytes; into the spool's record; and into the part. Two pools work at the same
time, so a slow store does not delay the local disk, nor the disk the store. No byte is copied.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from supervisor import failpoints
from supervisor.checkpoint.chunks import chunk_ranges, chunk_size
from supervisor.checkpoint.spool import (
    ImageWriter,
    Spool,
    SpoolError,
    SpoolRecord,
    UploadTokens,
    image_name,
)
from supervisor.checkpoint.workers import WorkerPool
from supervisor.clock import Clock, Deadline
from supervisor.commit.advance import advance, write_part
from supervisor.commit.log import CommitLog
from supervisor.commit.rules import Retention
from supervisor.errors import (
    ChecksumMismatch,
    PermanentStoreError,
    StoreError,
    SupervisorError,
)
from supervisor.ranks.slots import SlotBuffer, round_up
from supervisor.store.base import ShardUpload
from trainer_sdk.protocol.manifest import PART_FORMAT, PartTable, ShardEntry, shard_digest
from trainer_sdk.protocol.names import DataName

SHARD_NAME = "state"
ABORT_TIMEOUT_S = 5.0


class PersistCancelled(SupervisorError):
    """Something newer counts; what was sent is dropped."""

    error_id = "persist_cancelled"


class IncompleteSet(SupervisorError):
    """Not every rank's image is here, or the log did not count the vote: nothing is committed."""

    error_id = "set_incomplete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The generation under which a set is committed."""

    gen: int
    epoch: int
    group: str
    world: int
    layout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """How it went: sizes in bytes, durations in seconds."""

    seq: int
    step: int
    size_bytes: int
    spool_s: float | None
    upload_s: float
    commit_s: float
    total_s: float


@dataclass(slots=True)
class Progress:
    """How far a set has come; read by the status at any time, written by its own thread."""

    total_bytes: int = 0
    uploaded_bytes: int = 0
    spooled_bytes: int = 0


@dataclass(slots=True)
class _Shard:
    """One image on its way."""

    rank: int
    buffer: SlotBuffer
    size_bytes: int
    chunk_bytes: int
    key: str
    token: str | None
    upload: ShardUpload | None = None
    writer: ImageWriter | None = None
    stored: dict[int, str] = field(default_factory=dict)
    digests: list[bytes] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.rank}/{SHARD_NAME}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What every set needs; made once."""

    log: CommitLog
    spool: Spool | None
    clock: Clock
    flushers: WorkerPool
    uploaders: WorkerPool
    retention: Retention
    chunk_timeout_s: float
    commit_timeout_s: float
    on_spool_error: Callable[[SpoolError], None]
    on_uploaded: Callable[[int], None]


class PersistJob:
    """One set of images becoming a checkpoint. `run` is called once, on a thread of its own."""

    def __init__(
        self,
        tools: Tools,
        *,
        group: Group,
        step: int,
        images: dict[int, tuple[SlotBuffer, int]],
        on_spooled: Callable[[], None],
        flags: tuple[str, ...] = (),
    ) -> None:
        if sorted(images) != list(range(group.world)):
            raise IncompleteSet(
                f"step {step}: images of ranks {sorted(images)} in a world of {group.world}"
            )
        self._tools = tools
        self._group = group
        self._step = step
        self._flags = flags
        self._images = images
        self._on_spooled = on_spooled
        self._cancelled = threading.Event()
        self._spool_error: SpoolError | None = None
        self._spool_lock = threading.Lock()
        self.progress = Progress(total_bytes=sum(size for _, size in images.values()))

    @property
    def group(self) -> Group:
        return self._group

    def cancel(self) -> None:
        """Give up; `run` ends with PersistCancelled soon."""
        self._cancelled.set()

    def run(self) -> Committed:
        """Do all of it.

        Raises:
            PersistCancelled, Fenced, StoreError, LogError, DeadlineExceeded: the checkpoint is not
            committed by us (after an unknown outcome it may be; `advance` settles that later).
        """
        began_at = self._tools.clock.monotonic()
        shards = [self._open_shard(rank) for rank in sorted(self._images)]
        directory = self._open_spool(shards)
        try:
            for shard in shards:
                self._begin_upload(shard)
            self._note_tokens(shards)
            flushed, uploads = self._start_chunks(shards)
            self._settle(flushed)
            spool_s = self._finish_spool(shards, directory, began_at)
            self._settle(uploads)
            for shard in shards:
                self._complete(shard)
        except PersistCancelled:
            self._abort(shards)
            raise
        except (PermanentStoreError, ChecksumMismatch):
            self._forget_uploads()  # the next try begins under new keys
            raise
        finally:
            for shard in shards:
                if shard.writer is not None:
                    shard.writer.abandon()
            if directory is not None and os.path.isdir(directory) and self._tools.spool:
                self._tools.spool.discard(directory)
        uploaded_at = self._tools.clock.monotonic()
        seq = self._commit(shards)
        ended_at = self._tools.clock.monotonic()
        return Committed(
            seq=seq,
            step=self._step,
            size_bytes=self.progress.total_bytes,
            spool_s=spool_s,
            upload_s=uploaded_at - began_at,
            commit_s=ended_at - uploaded_at,
            total_s=ended_at - began_at,
        )

    # ------------------------------------------------------------ before the bytes

    def _open_shard(self, rank: int) -> _Shard:
        buffer, size_bytes = self._images[rank]
        noted = None
        if self._tools.spool is not None:
            noted = self._tools.spool.recall_uploads(gen=self._group.gen, step=self._step)
        key, token = (noted.shards.get(f"{rank}/{SHARD_NAME}") if noted else None) or ("", "")
        if not token:
            uid = self._tools.log.new_uid()
            key = DataName(generation=self._group.gen, step=self._step, rank=rank, uid=uid).key
        return _Shard(
            rank=rank,
            buffer=buffer,
            size_bytes=size_bytes,
            chunk_bytes=chunk_size(size_bytes),
            key=key,
            token=token or None,
        )

    def _open_spool(self, shards: list[_Shard]) -> str | None:
        """Open every file of the spool; on a full disk make room once, else go on without."""
        spool = self._tools.spool
        if spool is None:
            return None
        for is_last_try in (False, True):
            directory = None
            try:
                directory = spool.begin()
                for shard in shards:
                    path = os.path.join(directory, image_name(shard.rank, SHARD_NAME))
                    shard.writer = ImageWriter(path, size_bytes=shard.size_bytes)
                return directory
            except SpoolError as error:
                self._close_writers(shards)
                if directory is not None:
                    spool.discard(directory)
                if is_last_try or error.error_id != "disk_full" or not spool.evict(keep=1):
                    self._lose_spool(error)
                    return None
        return None

    def _close_writers(self, shards: list[_Shard]) -> None:
        for shard in shards:
            if shard.writer is not None:
                shard.writer.abandon()
                shard.writer = None

    def _begin_upload(self, shard: _Shard) -> None:
        store = self._tools.log.store
        shard.upload = store.open_upload(
            self._tools.log.keys.full(shard.key),
            size_bytes=shard.size_bytes,
            chunk_bytes=shard.chunk_bytes,
            resume_token=shard.token,
            timeout_s=self._tools.chunk_timeout_s,
        )
        if shard.token:
            found = shard.upload.stored_chunks(timeout_s=self._tools.chunk_timeout_s)
            shard.stored = dict(found)

    def _note_tokens(self, shards: list[_Shard]) -> None:
        """Note before the first byte is sent, so that no crash leaves an unknown upload behind."""
        if self._tools.spool is None:
            return
        tokens = {
            shard.label: (shard.key, shard.upload.resume_token)
            for shard in shards
            if shard.upload is not None and shard.upload.resume_token
        }
        note = UploadTokens(fmt=1, gen=self._group.gen, step=self._step, shards=tokens)
        try:
            self._tools.spool.remember_uploads(note)
        except SpoolError as error:
            self._lose_spool(error)

    # ------------------------------------------------------------ the bytes

    def _start_chunks(self, shards: list[_Shard]) -> tuple[list[Future[None]], list[Future[None]]]:
        """Queue every chunk of every shard, the shards in turn so that all of them progress."""
        flushed: list[Future[None]] = []
        uploads: list[Future[None]] = []
        ranges = {s.rank: chunk_ranges(s.size_bytes, s.chunk_bytes) for s in shards}
        for shard in shards:
            shard.digests = [b""] * len(ranges[shard.rank])
        for index in range(max(len(chunks) for chunks in ranges.values())):
            for shard in shards:
                if index < len(ranges[shard.rank]):
                    start, end = ranges[shard.rank][index]
                    hashed: Future[bytes] = Future()
                    flushed.append(
                        self._tools.flushers.submit(
                            self._flush_call(shard, index, start, end, hashed)
                        )
                    )
                    uploads.append(
                        self._tools.uploaders.submit(
                            self._upload_call(shard, index, start, end, hashed)
                        )
                    )
        return flushed, uploads

    def _flush_call(
        self, shard: _Shard, index: int, start: int, end: int, hashed: Future[bytes]
    ) -> Callable[[], None]:
        def flush() -> None:
            if self._cancelled.is_set():
                hashed.cancel()
                return
            try:
                view = shard.buffer.view(round_up(shard.size_bytes))
                digest = hashlib.sha256(view[start:end]).digest()
            except BaseException as error:
                hashed.set_exception(error)  # or the upload of this chunk waits for ever
                raise
            shard.digests[index] = digest
            hashed.set_result(digest)
            self._spool_chunk(shard, view[start : start + round_up(end - start)], start)

        return flush

    def _spool_chunk(self, shard: _Shard, padded: memoryview, offset: int) -> None:
        if shard.writer is None or self._spool_error is not None:
            return
        try:
            shard.writer.write(padded, offset)
            self.progress.spooled_bytes += len(padded)
        except SpoolError as error:
            self._lose_spool(error)

    def _upload_call(
        self, shard: _Shard, index: int, start: int, end: int, hashed: Future[bytes]
    ) -> Callable[[], None]:
        def upload() -> None:
            if self._cancelled.is_set() or hashed.cancelled():
                return
            digest = hashed.result()
            if shard.stored.get(index) != digest.hex():
                assert shard.upload is not None
                shard.upload.put_chunk(
                    index,
                    shard.buffer.view(shard.size_bytes)[start:end],
                    sha256=digest,
                    timeout_s=self._tools.chunk_timeout_s,
                )
                failpoints.hit("upload.chunk.after")
            self.progress.uploaded_bytes += end - start
            self._tools.on_uploaded(end - start)

        return upload

    def _settle(self, futures: list[Future[None]]) -> None:
        """Wait for all; the first error ends the set, and so the other chunks."""
        first: BaseException | None = None
        was_cancelled = self._cancelled.is_set()
        for future in futures:
            error = future.exception()
            if error is not None and first is None:
                was_cancelled = self._cancelled.is_set()
                first = error
                self._cancelled.set()
        if was_cancelled or (first is None and self._cancelled.is_set()):
            raise PersistCancelled(f"step {self._step}: something newer counts") from first
        if first is not None:
            raise first

    def _abort(self, shards: list[_Shard]) -> None:
        """Drop what was sent, so that no store bills for it. What fails here a sweep takes."""
        for shard in shards:
            if shard.upload is not None:
                with contextlib.suppress(StoreError):
                    shard.upload.abort(timeout_s=ABORT_TIMEOUT_S)

    # ------------------------------------------------------------ after the bytes

    def _lose_spool(self, error: SpoolError) -> None:
        with self._spool_lock:
            is_first = self._spool_error is None
            self._spool_error = error
        if is_first:
            self._tools.on_spool_error(error)

    def _entries(self, shards: list[_Shard]) -> tuple[ShardEntry, ...]:
        return tuple(
            ShardEntry(
                rank=shard.rank,
                name=SHARD_NAME,
                key=shard.key,
                size_bytes=shard.size_bytes,
                sha256=shard_digest(shard.digests).hex(),
                chunk_bytes=shard.chunk_bytes,
                chunks=tuple(digest.hex() for digest in shard.digests),
            )
            for shard in shards
        )

    def _finish_spool(
        self, shards: list[_Shard], directory: str | None, began_at: float
    ) -> float | None:
        """Sync and publish; returns seconds since the beginning, None without a spooled copy."""
        spool = self._tools.spool
        if directory is None or spool is None or self._spool_error is not None:
            return None
        try:
            for shard in shards:
                if shard.writer is not None:
                    shard.writer.finish()
            record = SpoolRecord(
                fmt=1,
                gen=self._group.gen,
                group=self._group.group,
                step=self._step,
                world=self._group.world,
                shards=self._entries(shards),
            )
            spool.publish(directory, record)
        except SpoolError as error:
            self._lose_spool(error)
            return None
        self._on_spooled()
        spool.evict(keep=2)
        return self._tools.clock.monotonic() - began_at

    def _complete(self, shard: _Shard) -> None:
        if self._cancelled.is_set():
            raise PersistCancelled(f"step {self._step}: something newer counts")
        assert shard.upload is not None
        failpoints.hit("upload.complete.before")
        shard.upload.complete(shard.digests, timeout_s=self._tools.chunk_timeout_s)
        failpoints.hit("upload.complete.after")

    def _commit(self, shards: list[_Shard]) -> int:
        """The vote, then the record: everything either names is durable before it is written."""
        deadline = Deadline.after(self._tools.clock, self._tools.commit_timeout_s)
        table = PartTable(
            fmt=PART_FORMAT,
            gen=self._group.gen,
            epoch=self._group.epoch,
            step=self._step,
            node=0,
            nodes=1,
            world=self._group.world,
            layout=self._group.layout,
            base=None,
            shards=self._entries(shards),
            flags=self._flags,
        )
        part = write_part(self._tools.log, table, deadline)
        done = advance(
            self._tools.log, self._group.gen, deadline, part, retention=self._tools.retention
        )
        if done.seq is None or done.step < self._step:
            raise IncompleteSet(f"step {self._step}: the log stands at step {done.step}")
        self._forget_uploads()
        return done.seq

    def _forget_uploads(self) -> None:
        if self._tools.spool is None:
            return
        try:
            self._tools.spool.forget_uploads(gen=self._group.gen, step=self._step)
        except SpoolError as error:
            self._lose_spool(error)
