"""Any store, with faults on demand: for tests and the simulator.

Faults are scripted (`Fault`: this kind at the nth matching call) or drawn from a seeded generator
(`rates`). A fault of a write answers the question "was it applied?" in every way there is: not at
all, at once with the reply lost, or later, when `land_late` is called.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from supervisor.clock import Clock
from supervisor.errors import StoreError, StoreThrottled, TransientStoreError
from supervisor.store.base import ObjectInfo, ObjectStore, OpenUpload, ShardUpload

Result = TypeVar("Result")


class FaultKind(StrEnum):
    """What goes wrong with a call."""

    DELAY = "delay"  # it takes `delay_s` longer
    DROP = "drop"  # not applied, no reply
    LOST_REPLY = "lost_reply"  # applied, no reply
    LATE = "late"  # no reply; applied when `land_late` is called
    THROTTLE = "throttle"  # refused: slow down
    CORRUPT_READ = "corrupt_read"  # one bit of what was read is turned


_WRITES: Final = frozenset(
    {"put_if_absent", "put_bytes", "delete", "put_chunk", "complete", "abort"}
)
_READS: Final = frozenset({"get_bytes", "read_into"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One scripted fault: at the `at_call`th call (from 1) of `method` on a key with `key_part`."""

    kind: FaultKind
    method: str
    key_part: str = ""
    at_call: int = 1
    delay_s: float = 0.0


class FaultyStore:
    """Implements `ObjectStore` around another one. One thread at a time if faults are drawn.

    Args:
        rates: probability of each kind, for calls it can befall; needs `rng`.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        clock: Clock,
        faults: Sequence[Fault] = (),
        rates: Mapping[FaultKind, float] | None = None,
        rng: random.Random | None = None,
        delay_s: float = 1.0,
    ) -> None:
        self._store = store
        self._clock = clock
        self._faults = list(faults)
        self._rates = dict(rates or {})
        self._rng = rng or random.Random(0)
        self._delay_s = delay_s
        self._counts = [0] * len(self._faults)
        self._late: list[Callable[[], object]] = []
        self.calls: list[tuple[str, str]] = []  # (method, key), in order

    @property
    def url(self) -> str:
        return self._store.url

    def add(self, fault: Fault) -> None:
        """Script one more fault; its count begins now."""
        self._faults.append(fault)
        self._counts.append(0)

    def land_late(self) -> int:
        """Apply the writes that are under way; returns how many there were."""
        late, self._late = self._late, []
        for apply in late:
            try:
                apply()
            except StoreError:
                continue  # nobody waits for the reply
        return len(late)

    def put_if_absent(self, key: str, data: bytes, *, timeout_s: float) -> bool:
        return self._write(
            "put_if_absent",
            key,
            lambda: self._store.put_if_absent(key, data, timeout_s=timeout_s),
        )

    def put_bytes(self, key: str, data: bytes, *, timeout_s: float) -> None:
        self._write("put_bytes", key, lambda: self._store.put_bytes(key, data, timeout_s=timeout_s))

    def get_bytes(self, key: str, *, max_bytes: int, timeout_s: float) -> bytes:
        kind = self._begin("get_bytes", key)
        data = self._store.get_bytes(key, max_bytes=max_bytes, timeout_s=timeout_s)
        if kind is FaultKind.CORRUPT_READ and data:
            copy = bytearray(data)
            _turn_bit(memoryview(copy), self._rng)
            return bytes(copy)
        return data

    def read_into(self, key: str, *, offset: int, target: memoryview, timeout_s: float) -> None:
        kind = self._begin("read_into", key)
        self._store.read_into(key, offset=offset, target=target, timeout_s=timeout_s)
        if kind is FaultKind.CORRUPT_READ and len(target):
            _turn_bit(target.cast("B"), self._rng)

    def head(self, key: str, *, timeout_s: float) -> ObjectInfo:
        self._begin("head", key)
        return self._store.head(key, timeout_s=timeout_s)

    def list_keys(
        self, prefix: str, *, timeout_s: float, start_after: str = ""
    ) -> Iterator[ObjectInfo]:
        self._begin("list_keys", prefix)
        yield from self._store.list_keys(prefix, timeout_s=timeout_s, start_after=start_after)

    def delete(self, key: str, *, timeout_s: float) -> None:
        self._write("delete", key, lambda: self._store.delete(key, timeout_s=timeout_s))

    def open_upload(
        self,
        key: str,
        *,
        size_bytes: int,
        chunk_bytes: int,
        resume_token: str | None,
        timeout_s: float,
    ) -> ShardUpload:
        self._begin("open_upload", key)
        upload = self._store.open_upload(
            key,
            size_bytes=size_bytes,
            chunk_bytes=chunk_bytes,
            resume_token=resume_token,
            timeout_s=timeout_s,
        )
        return _FaultyUpload(self, upload, key)

    def settle_log(self, *, timeout_s: float) -> None:
        self._begin("settle_log", "")
        self._store.settle_log(timeout_s=timeout_s)

    def open_uploads(self, prefix: str, *, timeout_s: float) -> Iterator[OpenUpload]:
        self._begin("open_uploads", prefix)
        yield from self._store.open_uploads(prefix, timeout_s=timeout_s)

    def drop_upload(self, upload: OpenUpload, *, timeout_s: float) -> None:
        self._begin("drop_upload", upload.key)
        self._store.drop_upload(upload, timeout_s=timeout_s)

    def probe(self, prefix: str, *, timeout_s: float) -> Sequence[str]:
        self._begin("probe", prefix)
        return self._store.probe(prefix, timeout_s=timeout_s)

    def server_time(self, *, timeout_s: float) -> float:
        self._begin("server_time", "")
        return self._store.server_time(timeout_s=timeout_s)

    def _write(self, method: str, key: str, apply: Callable[[], Result]) -> Result:
        kind = self._begin(method, key)
        if kind is FaultKind.LATE:
            self._late.append(apply)
            raise TransientStoreError(f"{method} {key!r}: no reply (fault, may land later)")
        result = apply()
        if kind is FaultKind.LOST_REPLY:
            raise TransientStoreError(f"{method} {key!r}: no reply (fault, was applied)")
        return result

    def _begin(self, method: str, key: str) -> FaultKind | None:
        self.calls.append((method, key))
        fault = self._choose(method, key)
        if fault is None:
            return None
        if fault.kind is FaultKind.DELAY:
            self._clock.sleep(fault.delay_s)
        if fault.kind is FaultKind.DROP:
            raise TransientStoreError(f"{method} {key!r}: no reply (fault, not applied)")
        if fault.kind is FaultKind.THROTTLE:
            raise StoreThrottled(f"{method} {key!r}: slow down (fault)")
        return fault.kind

    def _choose(self, method: str, key: str) -> Fault | None:
        chosen: Fault | None = None
        for place, fault in enumerate(self._faults):
            if fault.method in (method, "*") and fault.key_part in key:
                self._counts[place] += 1
                if self._counts[place] == fault.at_call:
                    chosen = chosen or fault
        return chosen or self._draw(method)

    def _draw(self, method: str) -> Fault | None:
        for kind, rate in self._rates.items():
            if kind in (FaultKind.LOST_REPLY, FaultKind.LATE) and method not in _WRITES:
                continue
            if kind is FaultKind.CORRUPT_READ and method not in _READS:
                continue
            if self._rng.random() < rate:
                return Fault(kind=kind, method=method, delay_s=self._delay_s)
        return None


class _FaultyUpload:
    def __init__(self, store: FaultyStore, upload: ShardUpload, key: str) -> None:
        self._faulty = store
        self._upload = upload
        self._key = key

    @property
    def resume_token(self) -> str:
        return self._upload.resume_token

    def stored_chunks(self, *, timeout_s: float) -> Mapping[int, str]:
        self._faulty._begin("stored_chunks", self._key)
        return self._upload.stored_chunks(timeout_s=timeout_s)

    def put_chunk(self, index: int, data: memoryview, *, sha256: bytes, timeout_s: float) -> None:
        self._faulty._write(
            "put_chunk",
            self._key,
            lambda: self._upload.put_chunk(index, data, sha256=sha256, timeout_s=timeout_s),
        )

    def complete(self, chunk_digests: Sequence[bytes], *, timeout_s: float) -> None:
        self._faulty._write(
            "complete",
            self._key,
            lambda: self._upload.complete(chunk_digests, timeout_s=timeout_s),
        )

    def abort(self, *, timeout_s: float) -> None:
        self._faulty._write("abort", self._key, lambda: self._upload.abort(timeout_s=timeout_s))


def _turn_bit(data: memoryview, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
