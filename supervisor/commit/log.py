"""The commit log of one job: read its tail, append to it. Section 4 of the commit protocol.

A log slot is created once and never changed. Whoever creates slot n+1 proves that slot n was still
the tail, so `append` is one atomic read, check and write of the whole log, whatever the network
does. Nothing else in the project writes below `log/`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from supervisor import failpoints
from supervisor.clock import Clock, Deadline
from supervisor.commit.records import (
    MAX_RECORD_BYTES,
    START,
    Body,
    Epoch,
    LogState,
    Record,
    build_record,
    check_successor,
    decode_record,
)
from supervisor.commit.rules import Done, Make, Refuse
from supervisor.errors import (
    AppendRefused,
    DeadlineExceeded,
    Fenced,
    LogCorrupt,
    ObjectMissing,
    OutcomeUnknown,
    StoreError,
    TransientStoreError,
)
from supervisor.store.base import ObjectStore
from trainer_sdk.protocol.manifest import encode_canonical
from trainer_sdk.protocol.names import MAX_SEQ, JobKeys

CALL_TIMEOUT_S: Final = 10.0
HINT_TIMEOUT_S: Final = 2.0
_FIRST_WAIT_S: Final = 0.1
_LONGEST_WAIT_S: Final = 3.0
_MAX_HINT_BYTES: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The newest slot this process has seen; seq 0 and the start state in an empty log."""

    seq: int
    record: Record | None
    state: LogState


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """What an append came to.

    `seq` is the slot of the new record, or, if `is_new` is false, of the record that had reached
    the goal before (0: none in particular); `state` is the state this was decided on or led to.
    """

    seq: int
    state: LogState
    is_new: bool
    record: Record | None


class _Hint(msgspec.Struct, frozen=True):
    seq: int


class CommitLog:
    """One job's log in one store. May be used by several threads.

    Invariant: the floor, the highest slot this process has seen, never falls, so a stale read never
    takes back what was known.

    Args:
        new_uid: draws 32 hex digits; each record gets its own.
        draw: draws a number in [0, 1) for the jitter of waits.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        job_id: str,
        clock: Clock,
        new_uid: Callable[[], str],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.store = store
        self.keys = JobKeys(job_id)
        self.clock = clock
        self.new_uid = new_uid
        self._draw = draw
        self._lock = threading.Lock()
        self._floor: Record | None = None
        self._last_epoch: Record | None = None

    def tail(self, deadline: Deadline) -> Tail:
        """The newest slot, at least as new as any that existed when the call began.

        Raises:
            LogCorrupt, LogTooNew: fail closed.
            StoreError, DeadlineExceeded
        """
        floor = self._floor
        record = self._jump(floor, deadline)
        while True:
            following = self._read(record.seq + 1 if record else 1, deadline)
            if following is None:
                break
            check_successor(record, following)
            record = following
            if floor and record.seq == floor.seq + 1:
                record = self._jump(record, deadline) or record
        return self._raise_floor(record)

    def read(self, seq: int, deadline: Deadline) -> Record:
        """One slot.

        Raises:
            ObjectMissing: there is none, as far as this process knows.
            LogCorrupt, LogTooNew, StoreError, DeadlineExceeded
        """
        floor = self._floor
        for known in (floor, self._last_epoch):
            if known and known.seq == seq:
                return known
        record = self._read(seq, deadline)
        if record is None:
            if floor and seq <= floor.seq:  # slots are contiguous, so it is there
                raise TransientStoreError(f"log slot {seq} is hidden by a stale read")
            raise ObjectMissing(self.keys.log(seq))
        if isinstance(record.body, Epoch):  # asked for again and again by `advance`
            self._last_epoch = record
        return record

    def join(self, epoch: int, deadline: Deadline) -> Record:
        """Take up the slot that began a generation as the floor (every node but node 0).

        Raises:
            ObjectMissing: not visible yet.
            LogCorrupt, LogTooNew, StoreError, DeadlineExceeded
        """
        record = self.read(epoch, deadline)
        self._raise_floor(record)
        return record

    def append(self, make: Make, *, my_gen: int | None = None, deadline: Deadline) -> Appended:
        """Append what `make` decides on the exact predecessor; the only way to write the log.

        Args:
            my_gen: append only while this generation is the newest.

        Raises:
            Fenced: a newer generation has begun; nothing was appended.
            OutcomeUnknown: the time is up and the record may still land.
            DeadlineExceeded: the time is up and nothing was appended.
            LogError: what `make` refused with.
            LogCorrupt, LogTooNew, StoreError
        """
        waits = self.waits(deadline)
        last_error: StoreError | None = None
        while not deadline.is_over:
            try:
                tail = self.tail(deadline)
                self._settle(deadline)
            except TransientStoreError as error:
                last_error = error
                waits()
                continue
            if my_gen is not None:
                if tail.state.gen > my_gen:
                    raise _fenced(my_gen, tail.state)
                if tail.state.gen < my_gen:  # a stale read, not a fence
                    waits()
                    continue
            decision = make(tail.state, tail.seq + 1)
            if isinstance(decision, Done):
                return Appended(seq=decision.seq, state=tail.state, is_new=False, record=None)
            if isinstance(decision, Refuse):
                raise decision.error
            record = self._build(tail, decision)
            if self._write(record, deadline):
                return Appended(seq=record.seq, state=record.state, is_new=True, record=record)
        raise DeadlineExceeded(
            "the time for an append to the log is up; nothing was appended"
        ) from last_error

    def check_not_fenced(self, my_gen: int, deadline: Deadline) -> Tail:
        """The tail, if no newer generation has begun.

        Raises:
            Fenced, LogCorrupt, LogTooNew, StoreError, DeadlineExceeded
        """
        tail = self.tail(deadline)
        if tail.state.gen > my_gen:
            raise _fenced(my_gen, tail.state)
        return tail

    def waits(self, deadline: Deadline) -> Callable[[], None]:
        """A function that waits a little longer each time, with jitter, never past the deadline."""
        longest = _FIRST_WAIT_S

        def wait() -> None:
            nonlocal longest
            pause = longest * (0.5 + 0.5 * self._draw())
            longest = min(_LONGEST_WAIT_S, 2 * longest)
            self.clock.sleep(deadline.sooner(pause))

        return wait

    def _build(self, tail: Tail, body: Body) -> Record:
        try:
            return build_record(tail.record, body, uid=self.new_uid())
        except ValueError as error:
            raise AppendRefused(
                f"log slot {tail.seq + 1}: {error}",
                hint="too many commits are kept: retire or unpin some",
            ) from error

    def _write(self, record: Record, deadline: Deadline) -> bool:
        """Put a record into its slot; False if another record has the slot.

        The same bytes are sent again after each unknown outcome: a late arrival of an earlier
        attempt then is this very record.
        """
        key = self.keys.log(record.seq)
        waits = self.waits(deadline)
        is_sent = False
        while not deadline.is_over:
            try:
                failpoints.hit("log.put.before")
                is_sent = True
                is_created = self.store.put_if_absent(
                    key, record.data, timeout_s=deadline.sooner(CALL_TIMEOUT_S)
                )
                failpoints.hit("log.put.after")
            except TransientStoreError:
                is_created = False
            if is_created:
                self._acknowledge(record, deadline)
                return True
            # Neither "exists" nor silence says whose record it is: only the slot does.
            stored = self._read_back(record, deadline)
            if stored is not None:
                return stored.uid == record.uid
            waits()
        if not is_sent:
            raise DeadlineExceeded("the time for an append to the log is up; nothing was sent")
        raise OutcomeUnknown(
            f"log slot {record.seq}: no answer in time; the record may still land",
            hint="read the log again before deciding anything",
        )

    def _read_back(self, record: Record, deadline: Deadline) -> Record | None:
        """What the slot holds; None while that cannot be said."""
        try:
            stored = self._read(record.seq, deadline)
            if stored is not None and stored.uid == record.uid:
                self._settle(deadline)
                self._acknowledge(record, deadline)
        except (TransientStoreError, DeadlineExceeded):
            return None
        return stored

    def _acknowledge(self, record: Record, deadline: Deadline) -> None:
        self._raise_floor(record)
        try:
            failpoints.hit("hint.put.before")
            self.store.put_bytes(
                self.keys.hint,
                encode_canonical(_Hint(record.seq)),
                timeout_s=deadline.sooner(HINT_TIMEOUT_S),
            )
            failpoints.hit("hint.put.after")
        except StoreError:
            return  # readers find the tail without it, in a few more requests

    def _settle(self, deadline: Deadline) -> None:
        self.store.settle_log(timeout_s=deadline.sooner(CALL_TIMEOUT_S))

    def _raise_floor(self, record: Record | None) -> Tail:
        with self._lock:
            if record and (self._floor is None or record.seq > self._floor.seq):
                self._floor = record
            floor = self._floor
        if floor is None:
            return Tail(seq=0, record=None, state=START)
        return Tail(seq=floor.seq, record=floor, state=floor.state)

    def _jump(self, floor: Record | None, deadline: Deadline) -> Record | None:
        """The slot of the hint if it is there, else the last one below it, never below `floor`.

        A process that holds the floor looks at the next slot first: without news that is all.
        """
        if floor is not None and floor is self._floor:
            return floor
        hint = self._read_hint(deadline)
        low = floor.seq if floor else 0
        if hint <= low:
            return floor
        record = self._read(hint, deadline)
        if record is not None:
            return record
        best, high = floor, hint
        while high - low > 1:  # slots are contiguous: low is there (or 0), high is not
            middle = (low + high) // 2
            record = self._read(middle, deadline)
            if record is None:
                high = middle
            else:
                low, best = middle, record
        return best

    def _read_hint(self, deadline: Deadline) -> int:
        try:
            data = self.store.get_bytes(
                self.keys.hint, max_bytes=_MAX_HINT_BYTES, timeout_s=self._timeout(deadline)
            )
            seq = msgspec.json.decode(data, type=_Hint).seq
        except (StoreError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return 0  # never trusted: without it the log is walked
        return seq if 0 <= seq <= MAX_SEQ else 0

    def _read(self, seq: int, deadline: Deadline) -> Record | None:
        try:
            data = self.store.get_bytes(
                self.keys.log(seq), max_bytes=MAX_RECORD_BYTES, timeout_s=self._timeout(deadline)
            )
        except ObjectMissing:
            return None
        if not data:
            raise LogCorrupt(
                f"log slot {seq} is empty", hint="this store does not keep what it was given"
            )
        return decode_record(data, seq=seq)

    def _timeout(self, deadline: Deadline) -> float:
        if deadline.is_over:
            raise DeadlineExceeded("the time for reading the log is up")
        return deadline.sooner(CALL_TIMEOUT_S)


def _fenced(my_gen: int, state: LogState) -> Fenced:
    owner = state.token.launch if state.token else "?"
    return Fenced(
        f"generation {my_gen} is over: launch {owner} runs generation {state.gen}",
        hint="another group took this job over; let it run, or stop it first",
    )
