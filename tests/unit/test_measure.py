"""What was measured, and the percentiles that plans are made with."""

from __future__ import annotations

import pytest

from supervisor.measure import WINDOW, Measurements, percentile


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([3.0], 0.05, 3.0), ([3.0], 0.95, 3.0), ([3, 1, 2], 0.5, 2),
     (list(range(10)), 0.95, 9), (list(range(100)), 0.05, 5)],
)  # fmt: skip
def test_a_percentile_is_one_of_the_values(
    values: list[float], share: float, expected: float | None
) -> None:
    assert percentile(values, share) == expected


def test_nothing_measured_gives_no_plan_but_a_guess_for_the_commit() -> None:
    summary = Measurements().summary()

    assert summary.step_s is None
    assert summary.staging_s is None
    assert summary.durable_bytes_per_s is None
    assert summary.commit_s > 0


def test_the_time_of_a_step_is_what_passed_between_boundaries() -> None:
    measurements = Measurements()
    measurements.saw_steps(10.0, {0: 5, 1: 4})
    measurements.saw_steps(12.0, {0: 6, 1: 5})
    measurements.saw_steps(20.0, {0: 10, 1: 10})

    summary = measurements.summary()

    assert summary.step_s == 2.0
    assert summary.step_p50_s == 2.0


def test_looks_without_progress_do_not_shorten_a_step() -> None:
    measurements = Measurements()
    for now in (10.0, 10.5, 11.0, 11.5):
        measurements.saw_steps(now, {0: 5})
    measurements.saw_steps(13.0, {0: 6})

    assert measurements.summary().step_s == 3.0


def test_the_jump_from_nothing_to_the_resumed_step_is_no_step() -> None:
    """It would look like steps of a thousandth of their time, and every deadline like easy."""
    measurements = Measurements()
    measurements.saw_steps(10.0, {})
    measurements.saw_steps(10.5, {0: 0})
    measurements.saw_steps(12.0, {0: 5001})
    assert measurements.summary().step_s is None

    measurements.saw_steps(14.0, {0: 5002})

    assert measurements.summary().step_s == 2.0


def test_ranks_that_were_gone_for_a_moment_leave_no_trace() -> None:
    measurements = Measurements()
    measurements.saw_steps(10.0, {0: 5000})
    measurements.saw_steps(10.5, {})
    measurements.saw_steps(11.0, {0: 5000})
    measurements.saw_steps(13.0, {0: 5001})

    assert measurements.summary().step_p50_s == 2.0


def test_a_step_back_is_a_new_beginning() -> None:
    measurements = Measurements()
    measurements.saw_steps(10.0, {0: 50})
    measurements.saw_steps(11.0, {0: 40})
    measurements.saw_steps(14.0, {0: 41})

    assert measurements.summary().step_s == 3.0


def test_a_restart_forgets_the_gap_and_keeps_what_was_measured() -> None:
    measurements = Measurements()
    measurements.saw_steps(10.0, {0: 50})
    measurements.saw_steps(11.0, {0: 51})
    measurements.restart()
    measurements.saw_steps(100.0, {0: 60})

    assert measurements.summary().step_s == 1.0


def test_plans_are_made_with_bad_cases_and_not_with_means() -> None:
    measurements = Measurements()
    for staged_s in [0.1] * 18 + [5.0] * 2:
        measurements.saw_staging(staged_s)
    for transfer_s in (1.0, 1.0, 10.0):
        measurements.saw_persist(size_bytes=100, transfer_s=transfer_s, commit_s=transfer_s / 10)

    summary = measurements.summary()

    assert summary.staging_s == 5.0
    assert summary.durable_bytes_per_s == 10.0
    assert summary.commit_s == 1.0


def test_old_samples_are_forgotten() -> None:
    measurements = Measurements()
    measurements.saw_staging(100.0)
    for _ in range(WINDOW):
        measurements.saw_staging(1.0)

    assert measurements.summary().staging_s == 1.0


def test_a_transfer_that_took_no_time_is_no_rate() -> None:
    measurements = Measurements()
    measurements.saw_persist(size_bytes=100, transfer_s=0.0, commit_s=0.1)

    assert measurements.summary().durable_bytes_per_s is None
