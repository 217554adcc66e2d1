"""The only place that reads a clock.

Deadlines are instants in monotonic seconds. Wall time is converted once, on arrival. Everything
that needs the time receives a `Clock` as an argument; the pure modules receive the instant itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Where the time comes from; tests pass a scripted one."""

    def monotonic(self) -> float:
        """Seconds that only rise; the base of every deadline."""
        ...

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC; for people and for notices, never for safety."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait; returns early never, late possibly."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Deadline:
    """The instant by which an activity must be over.

    `remaining_s` never goes below a small floor's worth of zero: callers that pass it to a blocking
    call check `is_over` first.
    """

    clock: Clock
    at_s: float

    @classmethod
    def after(cls, clock: Clock, seconds: float) -> Deadline:
        """The deadline `seconds` from now."""
        return cls(clock, clock.monotonic() + seconds)

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - self.clock.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.clock.monotonic() >= self.at_s

    def sooner(self, seconds: float) -> float:
        """The smaller of `seconds` and what is left: a timeout for one call."""
        return min(seconds, self.remaining_s())
