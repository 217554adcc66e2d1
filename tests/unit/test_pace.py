"""A disk is judged by what it wrote against what it must, and by whether anything moves."""

from __future__ import annotations

import pytest

from supervisor.checkpoint.pace import Pace, PaceLimits

LIMITS = PaceLimits(least_bytes_per_s=100, patience_s=5.0)


def a_pace(*, total_bytes: int = 10_000) -> Pace:
    return Pace(LIMITS, total_bytes=total_bytes, now=1000.0)


def test_a_disk_has_its_patience_before_the_first_byte() -> None:
    pace = a_pace()

    assert pace.fault(1005.0) == ""
    assert "nothing moved for 5.1 s" in pace.fault(1005.1)


def test_a_disk_that_moves_at_the_least_rate_is_never_given_up() -> None:
    pace = a_pace()

    for second in range(1, 101):
        pace.wrote(100 * second, 1000.0 + second)
        assert pace.fault(1000.0 + second) == ""


def test_a_disk_below_the_least_rate_is_given_up_though_it_moves() -> None:
    pace = a_pace()

    for second in range(1, 60):
        pace.wrote(50 * second, 1000.0 + second)
        if fault := pace.fault(1000.0 + second):
            break

    assert "are the least" in fault
    assert second == 11  # 550 bytes written, 600 due


def test_a_fast_disk_that_stalls_is_given_up_after_its_patience_and_not_later() -> None:
    pace = a_pace()
    pace.wrote(9_000, 1001.0)

    assert pace.fault(1006.0) == ""
    assert "at 9000 of 10000 bytes" in pace.fault(1006.1)


@pytest.mark.parametrize(("is_buffered", "until"), [(False, 1015.0), (True, 1115.0)])
def test_a_sync_may_take_the_time_that_the_page_cache_needs(
    is_buffered: bool, until: float
) -> None:
    pace = a_pace()
    pace.wrote(10_000, 1001.0)

    pace.begins_sync(1010.0, is_buffered=is_buffered)

    assert pace.fault(until) == ""
    assert pace.fault(until + 0.1)
