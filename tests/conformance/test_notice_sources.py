"""Every notice source keeps the same promises, whatever its metadata service does.

A notice is told once and acted on; its end is told; nothing that the service does ends the watcher
or makes it sleep through the lead time; and what is no notice is never taken for one.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
import urllib3

from supervisor.clock import SystemClock
from supervisor.lifecycle.inputs import Notice, NoticeKind
from supervisor.notices.base import MAX_WAIT_S, NoticeWatcher, SourceFailed, SourceHealth
from supervisor.notices.ec2 import Ec2Source, is_ec2
from supervisor.notices.file import FileSource
from tests.fakes import wait_until
from tests.metadata_server import (
    ACTION_PATH,
    REBALANCE_PATH,
    TOKEN_HEADER,
    TOKEN_PATH,
    Fault,
    Imds,
    black_hole,
)

NOW = datetime(2031, 2, 3, 4, 0, 0, tzinfo=UTC).timestamp()
IN_TWO_MINUTES = "2031-02-03T04:02:00Z"
QUICK = urllib3.Timeout(connect=0.2, read=0.1)


@dataclass
class ScriptedClock:
    """Monotonic and wall time move together, when told to."""

    passed_s: float = 0.0

    def monotonic(self) -> float:
        return 1000.0 + self.passed_s

    def wall(self) -> float:
        return NOW + self.passed_s

    def sleep(self, seconds: float) -> None:
        self.passed_s += seconds


@pytest.fixture
def clock() -> ScriptedClock:
    return ScriptedClock()


@pytest.fixture
def imds(clock: ScriptedClock) -> Iterator[Imds]:
    with Imds(clock.monotonic) as server:
        assert isinstance(server, Imds)
        yield server


@pytest.fixture
def ec2(imds: Imds, clock: ScriptedClock) -> Ec2Source:
    return Ec2Source(endpoint=imds.url, clock=clock, poll_s=2.0, timeout=QUICK)


@dataclass
class Watched:
    """What a watcher told, and the waits it chose, which pass at once."""

    notices: list[Notice] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    health: list[tuple[SourceHealth, SourceFailed | None]] = field(default_factory=list)


class InstantEvent(threading.Event):
    """A stop event whose waits are noted; each lasts until the test asks for the next look."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []
        self._turn = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        self._turn.acquire(timeout=20)
        return self.is_set()

    def next(self) -> None:
        self._turn.release()


class Watching:
    """A watcher that looks exactly when told."""

    def __init__(self, source: Ec2Source | FileSource, clock: ScriptedClock) -> None:
        self.told = Watched()
        self._stop = InstantEvent()
        self._watcher = NoticeWatcher(
            source,
            clock=clock,
            on_notice=self.told.notices.append,
            on_withdrawn=self.told.withdrawn.append,
            on_health=lambda health, failure: self.told.health.append((health, failure)),
            stop=self._stop,
        )
        self._name = f"notice-{source.name}"
        self._num_looks = 0

    def start(self) -> None:
        self._watcher.start()
        self._await()

    def look(self, times: int = 1) -> None:
        """Let the watcher look, and wait until it has."""
        for _ in range(times):
            self._stop.next()
            self._await()

    def _await(self) -> None:
        self._num_looks += 1
        wait_until(lambda: len(self._stop.waits) >= self._num_looks)

    @property
    def waits(self) -> list[float]:
        """The wait after each look, in seconds."""
        return self._stop.waits

    @property
    def last_failure(self) -> SourceFailed | None:
        return self.told.health[-1][1]

    def stop(self) -> None:
        self._watcher.stop()
        self._stop.next()
        wait_until(lambda: self._name not in [thread.name for thread in threading.enumerate()])


@contextmanager
def _watching(source: Ec2Source | FileSource, clock: ScriptedClock) -> Iterator[Watching]:
    watching = Watching(source, clock)
    watching.start()
    try:
        yield watching
    finally:
        watching.stop()


# ---------------------------------------------------------------- EC2: what is a notice


def test_404_is_no_notice(ec2: Ec2Source) -> None:
    found = ec2.look()

    assert found == ()


def test_a_notice_has_the_announced_deadline_in_monotonic_seconds(
    imds: Imds, ec2: Ec2Source
) -> None:
    imds.announce(IN_TWO_MINUTES)

    (notice,) = ec2.look()

    assert (notice.source, notice.kind) == ("ec2", NoticeKind.RECLAIM)
    assert notice.deadline_at == 1000.0 + 120.0
    assert "terminate" in notice.reason


def test_a_notice_whose_time_has_passed_is_due_now(imds: Imds, ec2: Ec2Source) -> None:
    imds.announce("2031-02-03T03:59:00Z", action="stop")

    (notice,) = ec2.look()

    assert notice.deadline_at == 1000.0


def test_hibernation_begins_at_once_whatever_its_time_says(imds: Imds, ec2: Ec2Source) -> None:
    imds.announce(IN_TWO_MINUTES, action="hibernate")

    (notice,) = ec2.look()

    assert notice.deadline_at <= 1005.0


def test_a_rebalance_recommendation_is_advice(imds: Imds, ec2: Ec2Source) -> None:
    imds.recommend_rebalance()

    (notice,) = ec2.look()

    assert (notice.source, notice.kind) == ("ec2-rebalance", NoticeKind.ADVICE)


def test_rebalance_is_asked_for_less_often_than_the_interruption(
    imds: Imds, ec2: Ec2Source, clock: ScriptedClock
) -> None:
    for _ in range(15):
        ec2.look()
        clock.sleep(2.0)

    assert imds.count(ACTION_PATH) == 15
    assert imds.count(REBALANCE_PATH) == 2


def test_an_interruption_is_told_though_rebalance_fails(imds: Imds, ec2: Ec2Source) -> None:
    imds.fail(REBALANCE_PATH, Fault(status=500))
    imds.announce(IN_TWO_MINUTES)

    (notice,) = ec2.look()

    assert notice.kind is NoticeKind.RECLAIM


def test_a_failing_rebalance_does_not_slow_the_interruption_down(
    imds: Imds, ec2: Ec2Source, clock: ScriptedClock
) -> None:
    imds.fail(REBALANCE_PATH, Fault(status=500))

    with _watching(ec2, clock) as watching:
        for _ in range(20):
            clock.sleep(2.0)
            watching.look()

        assert max(watching.waits) <= 2.0


# ---------------------------------------------------------------- EC2: tokens


def test_one_token_serves_many_looks(imds: Imds, ec2: Ec2Source) -> None:
    for _ in range(5):
        ec2.look()

    assert imds.count(TOKEN_PATH, method="PUT") == 1
    assert all(TOKEN_HEADER.lower() in r.headers for r in imds.requests if r.method == "GET")


def test_a_token_is_renewed_before_it_expires(
    imds: Imds, ec2: Ec2Source, clock: ScriptedClock
) -> None:
    imds.max_ttl_s = 300
    ec2.look()

    clock.sleep(250.0)
    ec2.look()

    assert imds.count(TOKEN_PATH, method="PUT") == 2
    assert 401 not in [request.status for request in imds.requests]


def test_a_token_of_a_second_is_used_and_renewed(
    imds: Imds, ec2: Ec2Source, clock: ScriptedClock
) -> None:
    imds.max_ttl_s = 1
    imds.announce(IN_TWO_MINUTES)

    for _ in range(3):
        clock.sleep(2.0)
        assert len(ec2.look()) == 1

    assert imds.count(TOKEN_PATH, method="PUT") == 3


def test_a_token_that_expired_early_is_renewed_within_the_same_look(
    imds: Imds, ec2: Ec2Source
) -> None:
    ec2.look()
    imds.expire_tokens()
    imds.announce(IN_TWO_MINUTES)

    found = ec2.look()

    assert len(found) == 1


def test_a_service_that_refuses_every_token_is_asked_twice_a_look_and_no_more(
    imds: Imds, ec2: Ec2Source
) -> None:
    imds.fail(ACTION_PATH, Fault(status=401))

    with pytest.raises(SourceFailed, match="401"):
        ec2.look()

    assert imds.count(ACTION_PATH) == 2
    assert imds.count(TOKEN_PATH, method="PUT") == 2


# ---------------------------------------------------------------- EC2: an unwell service


def test_a_notice_after_ten_refused_looks_is_acted_on(
    imds: Imds, ec2: Ec2Source, clock: ScriptedClock
) -> None:
    """The watcher of another project ended after the same error four times in a row."""
    imds.fail(ACTION_PATH, Fault(status=401, times=20))

    with _watching(ec2, clock) as watching:
        watching.look(9)
        assert watching.told.health[-1][0].num_failures == 10
        imds.announce(IN_TWO_MINUTES)
        watching.look()

        assert [notice.source for notice in watching.told.notices] == ["ec2"]
        assert watching.last_failure is None
        assert watching.told.health[-1][0].last_error == ""


@pytest.mark.parametrize("path", [ACTION_PATH, TOKEN_PATH])
@pytest.mark.parametrize(("header", "wait_s"), [({"Retry-After": "7"}, 7.0), ({}, 5.0)])
def test_a_throttled_look_waits_as_long_as_it_is_told(
    imds: Imds,
    ec2: Ec2Source,
    clock: ScriptedClock,
    path: str,
    header: dict[str, str],
    wait_s: float,
) -> None:
    method = "PUT" if path == TOKEN_PATH else "GET"
    imds.fail(path, Fault(status=429, headers=header, times=1), method=method)

    with _watching(ec2, clock) as watching:
        watching.look()

        assert watching.waits == [wait_s, 2.0]


@pytest.mark.parametrize("text", ["86400", "Wed, 05 Feb 2031 04:00:00 GMT", "-1", "²", ""])
def test_no_retry_after_makes_the_watcher_sleep_through_a_lead_time(
    imds: Imds, ec2: Ec2Source, clock: ScriptedClock, text: str
) -> None:
    imds.fail(ACTION_PATH, Fault(status=429, headers={"Retry-After": text}))

    with _watching(ec2, clock) as watching:
        watching.look(3)

        assert all(0 < wait_s <= MAX_WAIT_S for wait_s in watching.waits)


def test_waits_grow_while_the_service_fails_and_are_short_again_afterwards(
    imds: Imds, ec2: Ec2Source, clock: ScriptedClock
) -> None:
    imds.fail(ACTION_PATH, Fault(status=503, times=6))

    with _watching(ec2, clock) as watching:
        watching.look(6)

        assert watching.waits == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 2.0]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"null",
        b"[]",
        b'"terminate"',
        b"{}",
        b'{"action":"terminate"}',
        b'{"action":"terminate","time":null}',
        b'{"action":"terminate","time":12}',
        b'{"action":"terminate","time":"soon"}',
        b'{"action":"terminate","time":"2031-02-03 04:02:00"}',
        b"\xff\xfe\x00",
        b"[" * 60_000,
        b"<html>captive portal</html>",
    ],
    ids=lambda body: repr(body[:30]),
)
def test_a_body_that_is_no_notice_is_a_failure_and_no_notice(
    imds: Imds, ec2: Ec2Source, body: bytes
) -> None:
    imds.put(ACTION_PATH, body)

    with pytest.raises(SourceFailed, match="not an instance action"):
        ec2.look()


@pytest.mark.parametrize(
    "fault",
    [Fault(drops=True), Fault(cuts=True), Fault(delay_s=0.2), Fault(status=500), Fault(status=302)],
    ids=["dropped", "cut short", "too slow", "500", "redirect"],
)
@pytest.mark.parametrize("path", [ACTION_PATH, TOKEN_PATH])
def test_a_broken_answer_is_a_failure_and_the_next_look_is_good(
    imds: Imds, ec2: Ec2Source, path: str, fault: Fault
) -> None:
    method = "PUT" if path == TOKEN_PATH else "GET"
    imds.announce(IN_TWO_MINUTES)
    imds.fail(path, fault, method=method)
    with pytest.raises(SourceFailed, match="EC2 metadata"):
        ec2.look()

    imds.mend()

    assert len(ec2.look()) == 1


def test_a_look_into_a_black_hole_ends(clock: ScriptedClock) -> None:
    with black_hole() as url:
        source = Ec2Source(endpoint=url, clock=clock, poll_s=2.0, timeout=QUICK)

        with pytest.raises(SourceFailed, match="does not answer PUT") as caught:
            source.look()

    assert caught.value.hint == SourceFailed.mend


def test_an_address_where_nothing_listens_is_a_failure_without_the_hop_limit_hint(
    clock: ScriptedClock,
) -> None:
    with black_hole() as url:
        pass
    source = Ec2Source(endpoint=url, clock=clock, poll_s=2.0, timeout=QUICK)

    with pytest.raises(SourceFailed) as caught:
        source.look()

    assert caught.value.hint == SourceFailed.mend


def test_a_token_request_that_hangs_beside_a_quick_401_names_the_hop_limit(
    imds: Imds, ec2: Ec2Source
) -> None:
    imds.fail(TOKEN_PATH, Fault(hangs=True), method="PUT")

    with pytest.raises(SourceFailed) as caught:
        ec2.look()

    assert "HttpPutResponseHopLimit to 2" in caught.value.hint


# ---------------------------------------------------------------- EC2: watched


def test_a_notice_set_before_the_start_is_told_at_the_first_look(
    imds: Imds, ec2: Ec2Source, clock: ScriptedClock
) -> None:
    imds.announce(IN_TWO_MINUTES)

    with _watching(ec2, clock) as watching:
        assert len(watching.told.notices) == 1


def test_a_standing_notice_is_told_once(imds: Imds, ec2: Ec2Source, clock: ScriptedClock) -> None:
    imds.announce(IN_TWO_MINUTES)

    with _watching(ec2, clock) as watching:
        watching.look(5)

        assert len(watching.told.notices) == 1
        assert watching.told.withdrawn == []


def test_a_notice_that_goes_is_withdrawn_once(
    imds: Imds, ec2: Ec2Source, clock: ScriptedClock
) -> None:
    imds.announce(IN_TWO_MINUTES)

    with _watching(ec2, clock) as watching:
        imds.withdraw()
        watching.look(3)

        assert watching.told.withdrawn == ["ec2"]


def test_a_failed_look_withdraws_nothing_and_tells_nothing_twice(
    imds: Imds, ec2: Ec2Source, clock: ScriptedClock
) -> None:
    imds.announce(IN_TWO_MINUTES)

    with _watching(ec2, clock) as watching:
        imds.fail(ACTION_PATH, Fault(status=503, times=3))
        watching.look(5)

        assert len(watching.told.notices) == 1
        assert watching.told.withdrawn == []


def test_a_notice_that_comes_back_is_told_again(
    imds: Imds, ec2: Ec2Source, clock: ScriptedClock
) -> None:
    imds.announce(IN_TWO_MINUTES)

    with _watching(ec2, clock) as watching:
        imds.withdraw()
        watching.look()
        imds.announce(IN_TWO_MINUTES)
        watching.look()

        assert len(watching.told.notices) == 2


def test_advice_and_interruption_are_two_notices(
    imds: Imds, ec2: Ec2Source, clock: ScriptedClock
) -> None:
    imds.recommend_rebalance()

    with _watching(ec2, clock) as watching:
        imds.announce(IN_TWO_MINUTES)
        watching.look(2)

        kinds = [notice.kind for notice in watching.told.notices]
        assert kinds == [NoticeKind.ADVICE, NoticeKind.RECLAIM]
        assert watching.told.withdrawn == []


def test_an_error_that_nobody_thought_of_does_not_end_the_watcher(
    imds: Imds, clock: ScriptedClock
) -> None:
    class Broken(Ec2Source):
        is_broken = True

        def look(self) -> tuple[Notice, ...]:
            if self.is_broken:
                raise ZeroDivisionError("a bug")
            return super().look()

    source = Broken(endpoint=imds.url, clock=clock, poll_s=2.0, timeout=QUICK)
    imds.announce(IN_TWO_MINUTES)

    with _watching(source, clock) as watching:
        assert watching.last_failure is not None
        assert "ZeroDivisionError" in watching.last_failure.message
        source.is_broken = False
        watching.look()

        assert len(watching.told.notices) == 1


@pytest.mark.parametrize(
    ("vendor", "expected"), [("Amazon EC2\n", True), ("Google\n", False), (None, False)]
)
def test_the_machine_is_known_by_its_vendor(
    tmp_path: Path, vendor: str | None, expected: bool
) -> None:
    if vendor is not None:
        (tmp_path / "sys_vendor").write_text(vendor)

    assert is_ec2(str(tmp_path)) is expected


# ---------------------------------------------------------------- a watched file


@pytest.fixture
def notice_path(tmp_path: Path) -> Path:
    return tmp_path / "notice"


@pytest.fixture
def file_source(notice_path: Path, clock: ScriptedClock) -> FileSource:
    return FileSource(path=str(notice_path), lead_s=60.0, clock=clock, poll_s=2.0)


def test_no_file_is_no_notice(file_source: FileSource) -> None:
    assert file_source.look() == ()


def test_an_empty_file_is_a_notice_with_the_configured_lead(
    file_source: FileSource, notice_path: Path
) -> None:
    notice_path.touch()

    (notice,) = file_source.look()

    assert (notice.source, notice.kind) == ("file", NoticeKind.RECLAIM)
    assert notice.deadline_at == 1060.0


def test_a_file_may_say_its_lead_and_reason(file_source: FileSource, notice_path: Path) -> None:
    notice_path.write_text(json.dumps({"lead_time_s": 30, "reason": "drain"}))

    (notice,) = file_source.look()

    assert (notice.deadline_at, notice.reason) == (1030.0, "drain")


@pytest.mark.parametrize(
    "text",
    [
        '{"lead_time_s": -1}',
        '{"lead_time_s": true}',
        '{"lead_time_s": "30"}',
        '{"lead_time_s": NaN}',
        '{"lead_time_s": Infinity}',
        "[1, 2]",
        "[" * 4000,
        "maintenance at noon",
        "\x00\x01",
    ],
)
def test_a_file_with_anything_else_in_it_is_a_notice_with_the_configured_lead(
    file_source: FileSource, notice_path: Path, text: str
) -> None:
    """Whoever wrote it meant something: a notice is never lost to its wording."""
    notice_path.write_text(text)

    (notice,) = file_source.look()

    assert notice.deadline_at == 1060.0


def test_the_deadline_of_a_file_does_not_move_with_each_look(
    file_source: FileSource, notice_path: Path, clock: ScriptedClock
) -> None:
    notice_path.touch()
    (first,) = file_source.look()

    clock.sleep(10.0)

    assert file_source.look() == (first,)


def test_a_file_is_told_once_and_withdrawn_when_it_goes(
    file_source: FileSource, notice_path: Path, clock: ScriptedClock
) -> None:
    with _watching(file_source, clock) as watching:
        notice_path.touch()
        watching.look(2)
        notice_path.unlink()
        watching.look(2)

        assert len(watching.told.notices) == 1
        assert watching.told.withdrawn == ["file"]


def test_a_folder_in_place_of_the_file_is_a_failure_that_the_watcher_survives(
    file_source: FileSource, notice_path: Path, clock: ScriptedClock
) -> None:
    notice_path.mkdir()

    with _watching(file_source, clock) as watching:
        assert watching.last_failure is not None
        assert str(notice_path) in watching.last_failure.message
        notice_path.rmdir()
        notice_path.touch()
        watching.look()

        assert len(watching.told.notices) == 1


def test_a_file_whose_folder_is_a_file_is_a_failure(tmp_path: Path, clock: ScriptedClock) -> None:
    (tmp_path / "plain").touch()
    path = str(tmp_path / "plain" / "notice")
    source = FileSource(path=path, lead_s=60.0, clock=clock, poll_s=2.0)

    with pytest.raises(SourceFailed, match="cannot be read") as caught:
        source.look()

    assert caught.value.hint


def test_a_pipe_in_place_of_the_file_does_not_hang_the_watcher(
    file_source: FileSource, notice_path: Path
) -> None:
    os.mkfifo(notice_path)

    found = file_source.look()

    assert len(found) == 1


def test_a_deadline_that_comes_nearer_is_told_again_and_one_that_wanders_is_not():
    """The earliest deadline wins, also when one source corrects itself."""

    class Correcting:
        name = "correcting"
        poll_s = 0.01

        def __init__(self) -> None:
            self.deadlines = [100.0, 100.4, 99.2, 60.0, 60.1]

        def look(self) -> tuple[Notice, ...]:
            if len(self.deadlines) == 1:
                stop.set()
            deadline_at = self.deadlines.pop(0)
            return (Notice(source="x", kind=NoticeKind.RECLAIM, deadline_at=deadline_at),)

    stop = threading.Event()
    told: list[float] = []
    watcher = NoticeWatcher(
        Correcting(),
        clock=SystemClock(),
        on_notice=lambda notice: told.append(notice.deadline_at),
        on_withdrawn=lambda name: None,
        on_health=lambda health, failure: None,
        stop=stop,
    )

    watcher.start()
    stop.wait(5)
    time.sleep(0.05)

    assert told == [100.0, 60.0]
