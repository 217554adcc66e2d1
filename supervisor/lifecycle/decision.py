"""Deadline arithmetic: what is worth committing in the time that is left. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Choice(StrEnum):
    """What an evacuation commits."""

    FRESH = "fresh"
    STAGED = "staged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """95th percentiles of what was measured in this life, in seconds, and rates in bytes/s.

    None where nothing was measured yet: the fresh stop is then tried, since it may fit.
    """

    step_p50_s: float | None = None
    step_s: float | None = None
    staging_s: float | None = None
    durable_bytes_per_s: float | None = None
    commit_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The choice with its numbers, for the log and the status."""

    choice: Choice
    time_left_s: float
    fresh_needs_s: float
    staged_needs_s: float | None


def decide(
    measured: Measured,
    *,
    time_left_s: float,
    state_bytes: int,
    staged_remaining_bytes: int | None,
) -> Decision:
    """Choose between a stop at the next boundary and the newest staged image.

    Args:
        state_bytes: bytes of a whole checkpoint of this node, 0 if not known.
        staged_remaining_bytes: what is still to be made durable of the newest complete set that is
            not committed; None if there is none.
    """
    rate = measured.durable_bytes_per_s

    def transfer_s(size_bytes: int) -> float:
        return size_bytes / rate if rate else 0.0

    fresh = (
        (measured.step_s or 0.0)
        + (measured.staging_s or 0.0)
        + transfer_s(state_bytes)
        + measured.commit_s
    )
    staged = None
    if staged_remaining_bytes is not None:
        staged = transfer_s(staged_remaining_bytes) + measured.commit_s
    # Nothing staged and too little time by p95: a fresh stop costs no more than losing the state.
    # Staged but too little time even for that: by p95 it is still the likelier of the two.
    is_staged_better = staged is not None and fresh > time_left_s
    choice = Choice.STAGED if is_staged_better else Choice.FRESH
    return Decision(
        choice=choice, time_left_s=time_left_s, fresh_needs_s=fresh, staged_needs_s=staged
    )
