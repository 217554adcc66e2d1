"""Deadline arithmetic, by table."""

from __future__ import annotations

import pytest

from supervisor.lifecycle.decision import Choice, Measured, decide

GB = 10**9
MEASURED = Measured(step_s=2.0, staging_s=1.0, durable_bytes_per_s=1e9, commit_s=0.5)


@pytest.mark.parametrize(
    ("time_left_s", "state_bytes", "staged_remaining", "expected"),
    [
        (30.0, 10 * GB, None, Choice.FRESH),  # 2 + 1 + 10 + 0.5 fits
        (13.5, 10 * GB, 10 * GB, Choice.FRESH),  # just fits
        (13.4, 10 * GB, 10 * GB, Choice.STAGED),  # just does not
        (10.0, 10 * GB, 1 * GB, Choice.STAGED),
        (10.0, 10 * GB, None, Choice.FRESH),  # nothing staged: try what is left to try
        (1.0, 10 * GB, 0, Choice.STAGED),  # only the commit is missing
    ],
)
def test_fresh_if_it_fits_else_what_is_staged(time_left_s, state_bytes, staged_remaining, expected):
    decision = decide(
        MEASURED,
        time_left_s=time_left_s,
        state_bytes=state_bytes,
        staged_remaining_bytes=staged_remaining,
    )

    assert decision.choice is expected


def test_without_measurements_the_fresh_stop_is_tried():
    decision = decide(Measured(), time_left_s=2.0, state_bytes=GB, staged_remaining_bytes=GB)

    assert decision.choice is Choice.FRESH
    assert decision.fresh_needs_s == pytest.approx(0.5)


def test_the_numbers_of_the_decision_are_shown():
    decision = decide(MEASURED, time_left_s=9.0, state_bytes=4 * GB, staged_remaining_bytes=GB)

    assert decision.fresh_needs_s == pytest.approx(7.5)
    assert decision.staged_needs_s == pytest.approx(1.5)
    assert decision.time_left_s == 9.0
