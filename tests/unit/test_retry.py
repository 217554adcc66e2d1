"""Retries: what may be repeated is, in time, with jitter; the rest is not."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.errors import (
    ChecksumMismatch,
    ObjectMissing,
    StoreThrottled,
    TransientStoreError,
)
from supervisor.store.base import ObjectInfo
from supervisor.store.directory import DirectoryStore
from supervisor.store.faults import Fault, FaultKind, FaultyStore
from supervisor.store.retry import ConcurrencyGate, Retrier, RetryingStore
from tests.unit.test_commit_log import FakeClock

KEY = "jobs/j/part/x"


class Bench:
    """A directory behind faults behind retries."""

    def __init__(self, root: Path, *faults: Fault) -> None:
        self.clock = FakeClock()
        self.faulty = FaultyStore(DirectoryStore(root), clock=self.clock, faults=faults)
        self.errors: list[TransientStoreError] = []
        draw = random.Random(1).random
        retrier = Retrier(self.clock, attempt_s=5.0, draw=draw, on_retry=self.errors.append)
        self.store = RetryingStore(self.faulty, retrier)
        self.store.put_bytes(KEY, b"content", timeout_s=9)
        self.faulty.calls.clear()


def drops(method: str, *calls: int, kind: FaultKind = FaultKind.DROP) -> list[Fault]:
    return [Fault(kind=kind, method=method, at_call=call) for call in calls]


def test_read_is_repeated_until_it_succeeds(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *drops("get_bytes", 1, 2, 3))

    assert bench.store.get_bytes(KEY, max_bytes=9, timeout_s=60) == b"content"

    assert len(bench.errors) == 3


def test_no_retry_outlasts_its_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *drops("head", *range(1, 999), kind=FaultKind.THROTTLE))
    started_at = bench.clock.now

    with pytest.raises(StoreThrottled):
        bench.store.head(KEY, timeout_s=20)

    assert bench.clock.now - started_at <= 20
    assert len(bench.errors) > 3


def test_slow_attempt_leaves_time_for_others(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    limits: list[float] = []

    def call(limit_s: float) -> str:
        limits.append(limit_s)
        bench.clock.sleep(limit_s)
        if len(limits) < 3:
            raise TransientStoreError("timed out")
        return "done"

    retrier = Retrier(bench.clock, attempt_s=5.0, draw=lambda: 0.0)

    assert retrier.run(call, 12.0) == "done"
    assert limits[:2] == [5.0, 5.0]
    assert limits[2] < 2.1


@pytest.mark.parametrize("method", ["put_if_absent", "put_bytes"])
def test_creation_is_tried_once(tmp_path: Path, method: str) -> None:
    bench = Bench(tmp_path)
    bench.faulty.add(Fault(kind=FaultKind.LOST_REPLY, method=method))

    with pytest.raises(TransientStoreError):
        getattr(bench.store, method)("jobs/j/log/1", b"x", timeout_s=60)

    assert [call for call, _ in bench.faulty.calls] == [method]


def test_permanent_errors_are_not_repeated(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    with pytest.raises(ObjectMissing):
        bench.store.head("jobs/j/part/absent", timeout_s=60)

    assert len(bench.faulty.calls) == 1


def test_bytes_that_stay_different_are_given_up_soon(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    upload = bench.store.open_upload(
        "jobs/j/data/x", size_bytes=3, chunk_bytes=3, resume_token=None, timeout_s=9
    )

    with pytest.raises(ChecksumMismatch):
        upload.put_chunk(0, memoryview(b"abc"), sha256=bytes(32), timeout_s=600)

    assert len(bench.errors) == 1


def test_upload_gets_through_every_fault(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path,
        *drops("open_upload", 1),
        *drops("put_chunk", 1, 3),
        *drops("put_chunk", 2, kind=FaultKind.LOST_REPLY),
        *drops("complete", 1, kind=FaultKind.LOST_REPLY),
        *drops("read_into", 1),
    )
    digests = [hashlib.sha256(piece).digest() for piece in (b"abc", b"d")]

    upload = bench.store.open_upload(
        "jobs/j/data/x", size_bytes=4, chunk_bytes=3, resume_token=None, timeout_s=60
    )
    upload.put_chunk(0, memoryview(b"abc"), sha256=digests[0], timeout_s=60)
    upload.put_chunk(1, memoryview(b"d"), sha256=digests[1], timeout_s=60)
    upload.complete(digests, timeout_s=60)

    target = bytearray(4)
    bench.store.read_into("jobs/j/data/x", offset=0, target=memoryview(target), timeout_s=60)
    assert target == b"abcd"


def test_listing_that_breaks_in_the_middle_goes_on_without_repeats(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    keys = [f"jobs/j/part/{n}" for n in range(5)] + [KEY]
    for key in keys:
        bench.faulty.put_bytes(key, b"", timeout_s=9)

    breaks_after = [2, 0, 4]

    class Breaking(FaultyStore):
        def list_keys(
            self, prefix: str, *, timeout_s: float, start_after: str = ""
        ) -> Iterator[ObjectInfo]:
            limit = breaks_after.pop(0) if breaks_after else 99
            for count, info in enumerate(super().list_keys(prefix, timeout_s=timeout_s)):
                if count == limit:
                    raise TransientStoreError("page lost")
                yield info

    store = RetryingStore(
        Breaking(bench.faulty, clock=bench.clock), Retrier(bench.clock, draw=lambda: 0.5)
    )

    assert sorted(info.key for info in store.list_keys("jobs/j/", timeout_s=60)) == sorted(keys)


def test_corrupt_read_is_a_fault_that_shows(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for method in ("get_bytes", "read_into"):
        bench.faulty.add(Fault(kind=FaultKind.CORRUPT_READ, method=method))

    assert bench.faulty.get_bytes(KEY, max_bytes=9, timeout_s=9) != b"content"
    target = bytearray(7)
    bench.faulty.read_into(KEY, offset=0, target=memoryview(target), timeout_s=9)
    assert target != b"content"
    assert bench.faulty.get_bytes(KEY, max_bytes=9, timeout_s=9) == b"content"


def test_c84_a_burst_of_refusals_halves_what_is_under_way_once() -> None:
    """Eight calls refused at once say one thing; a ninth that began after them says another."""
    gate = ConcurrencyGate()
    burst = [gate.enter(1.0) for _ in range(8)]

    for entered in burst:
        assert entered is not None
        gate.leave(entered, was_throttled=True)
    after_burst = gate.limit
    later = [gate.enter(1.0) for _ in range(4)]
    is_full = gate.enter(0.0) is None
    assert later[0] is not None
    gate.leave(later[0], was_throttled=True)

    assert after_burst == 4
    assert is_full
    assert gate.limit == 2


def test_c84_successes_allow_more_calls_again() -> None:
    gate = ConcurrencyGate()
    first = [gate.enter(1.0) for _ in range(4)]
    assert first[0] is not None
    gate.leave(first[0], was_throttled=True)
    for entered in first[1:]:
        assert entered is not None
        gate.leave(entered, was_throttled=False)

    assert gate.limit == 3  # 4 // 2, and two successes more


def test_a_call_whose_turn_never_comes_is_refused_in_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    gate = ConcurrencyGate()
    held = [gate.enter(1.0) for _ in range(2)]
    assert held[0] is not None
    gate.leave(held[0], was_throttled=True)
    store = RetryingStore(bench.faulty, Retrier(bench.clock, gate=gate))

    with pytest.raises(StoreThrottled, match="no call's turn came"):
        store.head(KEY, timeout_s=0.05)
