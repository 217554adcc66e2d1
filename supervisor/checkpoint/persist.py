"""Make a complete set of images durable: hash, spool and upload in one pass, then vote and commit.

Each chunk is hashed once, from the image in memory. Its digest goes with the chunk to the store,
which refuses other bytes; into the spool's record; and into the part. Hashing, upload and flush
have threads of their own: the commit waits for the store alone, whatever the local disk does. No
byte is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from supervisor.checkpoint.flush import Flush, Flusher
from supervisor.checkpoint.notes import NOTES_FORMAT, UploadTokens
from supervisor.checkpoint.shards import StagedShard, hash_all, shard_label
from supervisor.checkpoint.spool import SPOOL_FORMAT, SpoolRecord
from supervisor.checkpoint.upload import ImageChanged, SetUpload
from supervisor.checkpoint.workers import WorkerPool
from supervisor.clock import Clock, Deadline
from supervisor.commit.advance import advance, write_part
from supervisor.commit.log import CommitLog
from supervisor.commit.rules import Retention
from supervisor.errors import ChecksumMismatch, PermanentStoreError, SupervisorError
from supervisor.ranks.slots import SlotBuffer
from trainer_sdk.protocol.manifest import PART_FORMAT, PartTable
from trainer_sdk.protocol.names import DataName


class PersistCancelled(SupervisorError):
    """Something newer counts; what was sent is dropped."""

    error_id = "persist_cancelled"
    mend = "nothing: a newer checkpoint counts"


class IncompleteSet(SupervisorError):
    """Not every rank's image is here, or the log did not count the vote: nothing is committed."""

    error_id = "set_incomplete"
    mend = "nothing: the next save is whole again; look at the rank that the log names"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What every set needs; made once. `flusher`: None without a usable local disk."""

    log: CommitLog
    flusher: Flusher | None
    clock: Clock
    hashers: WorkerPool
    uploaders: WorkerPool
    retention: Retention
    chunk_timeout_s: float
    commit_timeout_s: float
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
        on_spooled: Callable[[float], None],
        flags: tuple[str, ...] = (),
    ) -> None:
        """`on_spooled` is told the seconds since the beginning, perhaps after the commit."""
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
        self.flush: Flush | None = None
        self._is_released = False
        self.progress = Progress(total_bytes=sum(size for _, size in images.values()))

    @property
    def group(self) -> Group:
        return self._group

    def cancel(self) -> None:
        """Give up; `run` ends with PersistCancelled soon."""
        self._cancelled.set()

    def release_images(self) -> None:
        """The slot gets another use: a flush that still reads it must not count."""
        self._is_released = True
        if self.flush is not None:
            self.flush.give_up()

    def run(self) -> Committed:
        """Do all of it; the flush may outlast it.

        Raises:
            PersistCancelled, Fenced, StoreError, LogError, DeadlineExceeded: the checkpoint is not
            committed by us (after an unknown outcome it may be; `advance` settles that later).
            ImageChanged: it must not be committed at all.
        """
        began_at = self._tools.clock.monotonic()
        noted = self._recall_uploads()
        shards = self._shards(noted)
        self._start_flush(shards, began_at)
        hash_all(shards, self._tools.hashers, is_cancelled=self._cancelled.is_set)
        self._upload(shards, noted)
        uploaded_at = self._tools.clock.monotonic()
        seq = self._commit(shards)
        ended_at = self._tools.clock.monotonic()
        return Committed(
            seq=seq,
            step=self._step,
            size_bytes=self.progress.total_bytes,
            spool_s=self.flush.seconds if self.flush is not None else None,
            upload_s=uploaded_at - began_at,
            commit_s=ended_at - uploaded_at,
            total_s=ended_at - began_at,
        )

    # ------------------------------------------------------------ the set

    def _recall_uploads(self) -> dict[int, tuple[str, str]]:
        """Key and token of every shard whose upload an earlier try left unfinished."""
        if self._tools.flusher is None:
            return {}
        found = self._tools.flusher.recall_uploads(gen=self._group.gen, step=self._step)
        shards = found.shards if found is not None else {}
        labels = {rank: shard_label(rank) for rank in self._images}
        return {
            rank: shards[label]
            for rank, label in labels.items()
            if label in shards and shards[label][1]
        }

    def _shards(self, noted: dict[int, tuple[str, str]]) -> list[StagedShard]:
        return [
            StagedShard.of(
                rank, buffer, size_bytes, key=noted[rank][0] if rank in noted else self._key(rank)
            )
            for rank, (buffer, size_bytes) in sorted(self._images.items())
        ]

    def _key(self, rank: int) -> str:
        uid = self._tools.log.new_uid()
        return DataName(generation=self._group.gen, step=self._step, rank=rank, uid=uid).key

    def _start_flush(self, shards: Sequence[StagedShard], began_at: float) -> None:
        if self._tools.flusher is None:
            return

        progress = self.progress

        def wrote(done_bytes: int) -> None:
            progress.spooled_bytes = done_bytes

        # Nothing in here refers to this job: a cycle would keep the images in memory.
        self.flush = Flush(
            shards=shards,
            make_record=partial(_record, self._group, self._step, shards),
            at=(self._group.gen, self._step),
            began_at=began_at,
            on_spooled=self._on_spooled,
            on_wrote=wrote,
        )
        if self._is_released:  # looked at after `flush` is set, as `release_images` does it
            self.flush.give_up()
        self._tools.flusher.start(self.flush)

    # ------------------------------------------------------------ upload

    def _upload(self, shards: Sequence[StagedShard], noted: dict[int, tuple[str, str]]) -> None:
        """Have every shard durable and verified in the store."""

        def uploaded(num_bytes: int) -> None:
            self.progress.uploaded_bytes += num_bytes
            self._tools.on_uploaded(num_bytes)

        upload = SetUpload(
            self._tools.log.store,
            shards,
            step=self._step,
            timeout_s=self._tools.chunk_timeout_s,
            is_cancelled=self._cancelled.is_set,
            on_uploaded=uploaded,
        )
        try:
            keys = {shard.rank: self._tools.log.keys.full(shard.key) for shard in shards}
            upload.begin(keys, {rank: token for rank, (_, token) in noted.items()})
            self._note_tokens(shards, upload.resume_tokens())
            upload.send(self._tools.uploaders)
            upload.complete()
            self._check_not_cancelled()
        except (SupervisorError, OSError) as error:
            is_dead = isinstance(error, PermanentStoreError | ChecksumMismatch | ImageChanged)
            if is_dead:
                self._forget_uploads()  # the next try begins under new keys
            if self._cancelled.is_set() or isinstance(error, ImageChanged):
                self.release_images()
            if is_dead or self._cancelled.is_set():
                upload.abort()  # nobody could find it again to go on with it
            self._check_not_cancelled()
            raise

    def _check_not_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise PersistCancelled(f"step {self._step}: something newer counts")

    def _note_tokens(self, shards: Sequence[StagedShard], tokens: dict[int, str]) -> None:
        """Note before the first byte is sent, so that no crash leaves an unknown upload behind."""
        if not tokens or self._tools.flusher is None:
            return
        noted = {
            shard.label: (shard.key, tokens[shard.rank]) for shard in shards if shard.rank in tokens
        }
        self._tools.flusher.remember_uploads(
            UploadTokens(fmt=NOTES_FORMAT, gen=self._group.gen, step=self._step, shards=noted)
        )

    # ------------------------------------------------------------ commit

    def _commit(self, shards: Sequence[StagedShard]) -> int:
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
            shards=tuple(shard.entry() for shard in shards),
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
        if self._tools.flusher is not None:
            self._tools.flusher.forget_uploads(gen=self._group.gen, step=self._step)


def _record(group: Group, step: int, shards: Sequence[StagedShard]) -> SpoolRecord:
    return SpoolRecord(
        fmt=SPOOL_FORMAT,
        gen=group.gen,
        group=group.group,
        step=step,
        world=group.world,
        shards=tuple(shard.entry() for shard in shards),
    )
