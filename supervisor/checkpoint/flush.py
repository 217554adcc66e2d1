"""Images to the spool, beside the upload and never in its way.

A set has one flush. It writes while other threads hash, and publishes the set when all of it is on
the disk and every digest is known. A disk that is full, slow or broken costs the local copy of that
set and nothing else: nobody waits for a flush but the thread that watches over it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from supervisor.checkpoint.attempt import Attempt
from supervisor.checkpoint.image_file import ImageWriter
from supervisor.checkpoint.notes import UploadNotes, UploadTokens
from supervisor.checkpoint.pace import Pace, PaceLimits
from supervisor.checkpoint.shards import SHARD_NAME, StagedShard, in_turns
from supervisor.checkpoint.spool import Spool, SpoolRecord, image_name
from supervisor.checkpoint.spool_errors import SpoolError, SpoolFull, SpoolSlow
from supervisor.checkpoint.workers import WorkerPool
from supervisor.clock import Clock

Result = TypeVar("Result")

# How often a waiting flush looks at the pace and at whether anyone still wants it.
LOOK_S = 0.05
# Notes are small; a disk that takes longer for one is not waited for.
NOTE_LIMIT_S = 2.0
# Two or more O_DIRECT writes in flight keep a disk busy while one thread is between two of them.
NUM_WRITERS = 4
KEPT_SETS = 2


class _NotWanted(Exception):
    """Something newer counts, or the slot gets another use."""


@dataclass(slots=True, kw_only=True, eq=False)
class Flush:
    """One set on its way to the spool. `is_over` is set when it is published or given up."""

    shards: Sequence[StagedShard]
    at: tuple[int, int]  # generation and step
    make_record: Callable[[], SpoolRecord]
    began_at: float
    on_spooled: Callable[[float], None]
    on_wrote: Callable[[int], None]
    is_over: threading.Event = field(default_factory=threading.Event)
    seconds: float | None = None
    _is_unwanted: threading.Event = field(default_factory=threading.Event)

    @property
    def total_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def is_wanted(self) -> bool:
        return not self._is_unwanted.is_set()

    def give_up(self) -> None:
        """The images change, or count no more: never publish them unless all is written already."""
        self._is_unwanted.set()


class Flusher:
    """All work on the spool's disk, on threads of its own, one set at a time.

    Invariant: no method waits for the disk longer than it says.
    """

    def __init__(
        self,
        spool: Spool,
        notes: UploadNotes,
        *,
        clock: Clock,
        limits: PaceLimits,
        on_error: Callable[[SpoolError], None],
    ) -> None:
        """`on_error` is told, on some thread, of whatever the disk did; nothing here raises it."""
        self.spool = spool
        self._notes = notes
        self._clock = clock
        self._limits = limits
        self._on_error = on_error
        self._watch = WorkerPool("flush", 1)
        self._writers = WorkerPool("spool-write", NUM_WRITERS)
        self._noter = WorkerPool("spool-note", 1)
        self._late_note: Future[Any] | None = None
        self._last: Attempt | None = None

    def close(self) -> None:
        """End the threads once they are idle."""
        for pool in (self._watch, self._writers, self._noter):
            pool.close()

    def wait_idle(self, *, timeout_s: float) -> bool:
        """Whether what was noted or given up so far is through within the time."""
        left = [self._noter.submit(lambda: None)]
        if self._last is not None:
            left.append(self._last.cleaned)
        return not wait(left, timeout=timeout_s).not_done

    # ------------------------------------------------------------ notes

    def recall_uploads(self, *, gen: int, step: int) -> UploadTokens | None:
        """Where uploads of this checkpoint go on, if the disk says so in time."""
        return self._ask(lambda: self._notes.recall(gen=gen, step=step))

    def remember_uploads(self, tokens: UploadTokens) -> None:
        """Note it, if the disk takes it in time."""
        self._ask(lambda: self._notes.remember(tokens))

    def forget_uploads(self, *, gen: int, step: int) -> None:
        """Have the notes of this checkpoint and of older ones removed, some time."""
        self._note(lambda: self._notes.forget(gen=gen, step=step))

    def settle(self, *, gen: int, group: str, spare: tuple[int, int] | None) -> None:
        """A generation was claimed: remove what is of no use to it.

        Args:
            spare: (generation, step) of the set that it resumes from.
        """

        def work() -> None:
            self.spool.drop_foreign(gen=gen, group=group)
            self._notes.forget_before(gen)
            self.spool.evict(keep=KEPT_SETS, spare=spare)

        self._ask(work)

    def _ask(self, call: Callable[[], Result]) -> Result | None:
        """The answer, or None from a disk that fails, is late, or is not trusted any more."""
        future = self._note(call)
        try:
            return future.result(timeout=NOTE_LIMIT_S) if future is not None else None
        except TimeoutError:
            self._late_note = future
            self._on_error(SpoolSlow(f"the spool took no note within {NOTE_LIMIT_S:g} s"))
            return None

    def _note(self, call: Callable[[], Result]) -> Future[Result | None] | None:
        """Behind the notes before it; None where those still hang."""
        is_late = self._late_note is not None and not self._late_note.done()
        if is_late or self.spool.is_suspect:
            return None
        return self._noter.submit(lambda: self._told(call))

    def _told(self, call: Callable[[], Result]) -> Result | None:
        try:
            return call()
        except SpoolError as error:
            self._failed(error)
            return None

    def _failed(self, error: SpoolError) -> None:
        self.spool.is_suspect = self.spool.is_suspect or error.is_suspect
        self._on_error(error)

    # ------------------------------------------------------------ sets

    def start(self, flush: Flush) -> None:
        """Write a set after those that were started before it. Returns at once."""
        self._watch.submit(lambda: self._run(flush))

    def _run(self, flush: Flush) -> None:
        try:
            if not self.spool.is_suspect:
                self._flush(flush)
        except _NotWanted:
            pass
        except SpoolError as error:
            self._failed(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, only the local copy is lost
            self._failed(SpoolError(f"the flush failed: {type(error).__name__}: {error}"))
        finally:
            flush.is_over.set()

    def _flush(self, flush: Flush) -> None:
        pace = Pace(self._limits, total_bytes=flush.total_bytes, now=self._clock.monotonic())
        if self._last is not None:  # its calls may still hang in the kernel
            self._wait(flush, pace, [self._last.cleaned])
            self._last = None
        try:
            self._try(flush, pace)
        except SpoolFull:
            pace = Pace(self._limits, total_bytes=flush.total_bytes, now=self._clock.monotonic())
            self._wait(flush, pace, [self._last.cleaned] if self._last else [])
            self._last = None
            if not self._get(flush, pace, self._writers.submit(self.spool.make_room)):
                raise
            self._try(flush, pace)
        flush.seconds = self._clock.monotonic() - flush.began_at
        flush.on_spooled(flush.seconds)
        pace.begins_anew(self._clock.monotonic())
        self._get(flush, pace, self._writers.submit(lambda: self._tidy(flush.total_bytes)))

    def _tidy(self, beside_bytes: int) -> None:
        self.spool.evict(keep=KEPT_SETS)
        self.spool.keep_ballast(beside_bytes=beside_bytes)

    def _try(self, flush: Flush, pace: Pace) -> None:
        """Write and publish the set.

        Raises:
            SpoolError: it is not published, and what was written goes once the disk lets it.
        """
        attempt = Attempt(self.spool, self._writers)
        try:
            if self._is_there(flush, pace):
                return
            names = {image_name(shard.rank, SHARD_NAME): shard.size_bytes for shard in flush.shards}
            writers = self._get(flush, pace, attempt.submit(lambda: attempt.open(names)))
            self._wait(flush, pace, list(self._submit_chunks(flush, pace, attempt, writers)))
            pace.begins_sync(
                self._clock.monotonic(), is_buffered=not all(w.is_direct for w in writers)
            )
            self._wait(flush, pace, [attempt.submit(writer.finish) for writer in writers])
            record = self._record(flush)
            pace.begins_anew(self._clock.monotonic())
            self._get(
                flush,
                pace,
                attempt.submit(lambda: self.spool.publish(attempt.directory, record)),
            )
        except BaseException:
            self._last = attempt
            attempt.drop()
            raise

    def _is_there(self, flush: Flush, pace: Pace) -> bool:
        """Whether the spool has this very set already, as after an upload that failed."""
        known = [
            item.record
            for item in self._get(flush, pace, self._writers.submit(self.spool.ready))
            if (item.record.gen, item.record.step) == flush.at
        ]
        if not known:
            return False
        record = self._record(flush)
        pace.begins_anew(self._clock.monotonic())
        return known[0].group == record.group and [
            (shard.rank, shard.name, shard.size_bytes, shard.sha256) for shard in known[0].shards
        ] == [(shard.rank, shard.name, shard.size_bytes, shard.sha256) for shard in record.shards]

    def _submit_chunks(
        self, flush: Flush, pace: Pace, attempt: Attempt, writers: Sequence[ImageWriter]
    ) -> Iterator[Future[None]]:
        """Queue every chunk."""
        lock = threading.Lock()
        done_bytes = 0
        files = {shard.rank: writer for shard, writer in zip(flush.shards, writers, strict=True)}

        def write(shard: StagedShard, index: int) -> None:
            nonlocal done_bytes
            start, end = shard.ranges[index]
            files[shard.rank].write(shard.padded_chunk(index), start)
            with lock:
                done_bytes += end - start
                pace.wrote(done_bytes, self._clock.monotonic())
            flush.on_wrote(done_bytes)

        for shard, index in in_turns(flush.shards):
            yield attempt.submit(partial(write, shard, index))

    def _record(self, flush: Flush) -> SpoolRecord:
        """The set's record, once every digest is known; hashing waits for no disk."""
        for hashed in [future for shard in flush.shards for future in shard.hashed]:
            while not hashed.done():
                self._check_wanted(flush)
                wait([hashed], timeout=LOOK_S)
            if hashed.cancelled():
                raise _NotWanted
        return flush.make_record()

    # ------------------------------------------------------------ waiting

    def _check_wanted(self, flush: Flush) -> None:
        if not flush.is_wanted:
            raise _NotWanted

    def _get(self, flush: Flush, pace: Pace, future: Future[Result]) -> Result:
        """What a call on the disk gives.

        Raises:
            SpoolSlow: the disk does not keep its pace.
        """
        while True:
            self._check_wanted(flush)
            try:
                return future.result(timeout=LOOK_S)
            except TimeoutError:
                fault = pace.fault(self._clock.monotonic())
            if fault:
                raise SpoolSlow(
                    f"step {flush.at[1]}: {fault}",
                    hint="checkpoints go to the store meanwhile; look at the disk, or lower "
                    "[spool] min_rate",
                )

    def _wait(self, flush: Flush, pace: Pace, futures: Sequence[Future[Result]]) -> None:
        for future in futures:
            self._get(flush, pace, future)
