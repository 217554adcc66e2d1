"""Any store, with retries of what may be repeated: the only place that retries store calls.

Waits are drawn between zero and a limit that doubles (full jitter), and never outlast the time the
caller gave; while the store asks to slow down, fewer calls are under way at once. Two calls are
passed through in one attempt: `put_if_absent`, whose unknown outcome the commit log settles by
reading back, and `put_bytes`, whose caller takes a new name for each attempt.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from supervisor.clock import Clock, Deadline
from supervisor.errors import ChecksumMismatch, StoreThrottled, TransientStoreError
from supervisor.store.base import ObjectInfo, ObjectStore, OpenUpload, ShardUpload

Result = TypeVar("Result")

_FIRST_LIMIT_S: Final = 0.2
_LAST_LIMIT_S: Final = 10.0
# Bytes that differ again and again differ at the source: then a third try only costs time.
_MAX_MISMATCHES: Final = 2


class ConcurrencyGate:
    """How many calls may be under way at once, found out by asking too much.

    A store that says "slow down" halves what was under way at that moment, at least to one; what
    began before that and is refused too says nothing new. As many successes as are allowed at once
    allow one more. Until the first such answer nothing is limited.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._limit: int | None = None
        self._num_inside = 0
        self._num_successes = 0
        self._num_decreases = 0

    @property
    def limit(self) -> int | None:
        """Calls allowed at once; None: no limit."""
        return self._limit

    def enter(self, timeout_s: float) -> int | None:
        """Wait for a place; what to `leave` with, None if there was none in time."""
        with self._changed:
            if not self._changed.wait_for(self._has_place, timeout_s):
                return None
            self._num_inside += 1
            return self._num_decreases

    def leave(self, entered: int, *, was_throttled: bool) -> None:
        """Give the place back, and say how the call ended."""
        with self._changed:
            if was_throttled and entered == self._num_decreases:
                self._limit = max(1, self._num_inside // 2)
                self._num_successes = 0
                self._num_decreases += 1
            elif was_throttled:
                self._num_successes = 0
            elif self._limit is not None:
                self._num_successes += 1
                if self._num_successes >= self._limit:
                    self._limit, self._num_successes = self._limit + 1, 0
            self._num_inside -= 1
            self._changed.notify_all()

    def _has_place(self) -> bool:
        return self._limit is None or self._num_inside < self._limit


@dataclass(frozen=True, slots=True)
class Retrier:
    """Repeats a call while it fails transiently and time is left.

    Args:
        attempt_s: the most that one attempt may take, so that a hanging one leaves time for others.
        draw: draws a number in [0, 1).
        on_retry: told of each failed attempt (for a metric); must not raise.
    """

    clock: Clock
    attempt_s: float = 30.0
    draw: Callable[[], float] = random.random
    on_retry: Callable[[TransientStoreError], None] = lambda error: None
    gate: ConcurrencyGate = field(default_factory=ConcurrencyGate)

    def run(self, call: Callable[[float], Result], timeout_s: float) -> Result:
        """Call with the seconds this attempt may take.

        Raises:
            TransientStoreError: the last attempt's, once the time is up.
            StoreError: what no retry helps against, at once.
        """
        deadline = Deadline.after(self.clock, timeout_s)
        limit_s = _FIRST_LIMIT_S
        mismatches = 0
        while True:
            try:
                return self._attempt(call, deadline)
            except TransientStoreError as error:
                mismatches += isinstance(error, ChecksumMismatch)
                pause_s = limit_s * self.draw()
                if mismatches >= _MAX_MISMATCHES or pause_s >= deadline.remaining_s():
                    raise
                self.on_retry(error)
            self.clock.sleep(pause_s)
            limit_s = min(_LAST_LIMIT_S, 2 * limit_s)

    def _attempt(self, call: Callable[[float], Result], deadline: Deadline) -> Result:
        entered = self.gate.enter(deadline.remaining_s())
        if entered is None:
            raise StoreThrottled(
                "the store asked to slow down, and no call's turn came in time",
                hint="lower [store] upload_threads, or ask for a higher request rate",
            )
        was_throttled = False
        try:
            return call(deadline.sooner(self.attempt_s))
        except StoreThrottled:
            was_throttled = True
            raise
        finally:
            self.gate.leave(entered, was_throttled=was_throttled)


class RetryingUpload:
    """Implements `ShardUpload` around another one."""

    def __init__(self, upload: ShardUpload, retrier: Retrier) -> None:
        self._upload = upload
        self._retrier = retrier

    @property
    def resume_token(self) -> str:
        return self._upload.resume_token

    def stored_chunks(self, *, timeout_s: float) -> Mapping[int, str]:
        return self._retrier.run(
            lambda left_s: self._upload.stored_chunks(timeout_s=left_s), timeout_s
        )

    def put_chunk(self, index: int, data: memoryview, *, sha256: bytes, timeout_s: float) -> None:
        self._retrier.run(
            lambda left_s: self._upload.put_chunk(index, data, sha256=sha256, timeout_s=left_s),
            timeout_s,
        )

    def complete(self, chunk_digests: Sequence[bytes], *, timeout_s: float) -> None:
        self._retrier.run(
            lambda left_s: self._upload.complete(chunk_digests, timeout_s=left_s), timeout_s
        )

    def abort(self, *, timeout_s: float) -> None:
        self._retrier.run(lambda left_s: self._upload.abort(timeout_s=left_s), timeout_s)


class RetryingStore:
    """Implements `ObjectStore` around another one."""

    def __init__(self, store: ObjectStore, retrier: Retrier) -> None:
        self._store = store
        self._retrier = retrier

    @property
    def url(self) -> str:
        return self._store.url

    def put_if_absent(self, key: str, data: bytes, *, timeout_s: float) -> bool:
        return self._store.put_if_absent(key, data, timeout_s=timeout_s)

    def put_bytes(self, key: str, data: bytes, *, timeout_s: float) -> None:
        self._store.put_bytes(key, data, timeout_s=timeout_s)

    def get_bytes(self, key: str, *, max_bytes: int, timeout_s: float) -> bytes:
        return self._retrier.run(
            lambda left_s: self._store.get_bytes(key, max_bytes=max_bytes, timeout_s=left_s),
            timeout_s,
        )

    def read_into(self, key: str, *, offset: int, target: memoryview, timeout_s: float) -> None:
        self._retrier.run(
            lambda left_s: self._store.read_into(
                key, offset=offset, target=target, timeout_s=left_s
            ),
            timeout_s,
        )

    def head(self, key: str, *, timeout_s: float) -> ObjectInfo:
        return self._retrier.run(lambda left_s: self._store.head(key, timeout_s=left_s), timeout_s)

    def list_keys(
        self, prefix: str, *, timeout_s: float, start_after: str = ""
    ) -> Iterator[ObjectInfo]:
        """After a failure the listing begins anew and skips what was yielded."""
        seen: set[str] = set()
        listing = self._store.list_keys(prefix, timeout_s=timeout_s, start_after=start_after)

        def following(left_s: float) -> ObjectInfo | None:
            nonlocal listing
            try:
                return next((info for info in listing if info.key not in seen), None)
            except TransientStoreError:
                listing = self._store.list_keys(prefix, timeout_s=left_s, start_after=start_after)
                raise

        while (info := self._retrier.run(following, timeout_s)) is not None:
            seen.add(info.key)
            yield info

    def delete(self, key: str, *, timeout_s: float) -> None:
        self._retrier.run(lambda left_s: self._store.delete(key, timeout_s=left_s), timeout_s)

    def open_upload(
        self,
        key: str,
        *,
        size_bytes: int,
        chunk_bytes: int,
        resume_token: str | None,
        timeout_s: float,
    ) -> ShardUpload:
        upload = self._retrier.run(
            lambda left_s: self._store.open_upload(
                key,
                size_bytes=size_bytes,
                chunk_bytes=chunk_bytes,
                resume_token=resume_token,
                timeout_s=left_s,
            ),
            timeout_s,
        )
        return RetryingUpload(upload, self._retrier)

    def settle_log(self, *, timeout_s: float) -> None:
        self._store.settle_log(timeout_s=timeout_s)  # a failed fsync is never repeated

    def open_uploads(self, prefix: str, *, timeout_s: float) -> Iterator[OpenUpload]:
        """Not retried: what is left behind is found at the next start too."""
        return self._store.open_uploads(prefix, timeout_s=timeout_s)

    def drop_upload(self, upload: OpenUpload, *, timeout_s: float) -> None:
        self._store.drop_upload(upload, timeout_s=timeout_s)

    def probe(self, prefix: str, *, timeout_s: float) -> Sequence[str]:
        return self._retrier.run(
            lambda left_s: self._store.probe(prefix, timeout_s=left_s), timeout_s
        )

    def server_time(self, *, timeout_s: float) -> float:
        return self._retrier.run(
            lambda left_s: self._store.server_time(timeout_s=left_s), timeout_s
        )
