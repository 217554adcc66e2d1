"""What this life has measured: step time, staging, transfer rate. Pure bookkeeping.

Deadline arithmetic plans with 95th percentiles, not means: half of all cases are worse than a mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from supervisor.lifecycle.decision import Measured

WINDOW = 128


def percentile(values: Iterable[float], share: float) -> float | None:
    """The value that `share` of the values do not exceed (nearest rank); None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Measurements:
    """Recent samples of each kind. Owned by the main thread."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._staging: deque[float] = deque(maxlen=WINDOW)
        self._rates: deque[float] = deque(maxlen=16)
        self._commits: deque[float] = deque(maxlen=16)
        self._last: tuple[float, int] | None = None

    def saw_steps(self, now: float, steps: dict[int, int]) -> None:
        """Note the ranks' progress; the time of a step is what passed between two boundaries."""
        front = max(steps.values(), default=0)
        if front == 0:
            self._last = None  # nobody trains yet: what comes next is no step's time
            return
        if self._last is None or front < self._last[1]:
            self._last = (now, front)
            return
        at, before = self._last
        if front > before:
            self._steps.append((now - at) / (front - before))
            self._last = (now, front)

    def saw_staging(self, seconds: float) -> None:
        """Note how long a rank's staging took."""
        self._staging.append(seconds)

    def saw_persist(self, *, size_bytes: int, transfer_s: float, commit_s: float) -> None:
        """Note how fast a checkpoint became durable."""
        if transfer_s > 0:
            self._rates.append(size_bytes / transfer_s)
        self._commits.append(commit_s)

    def restart(self) -> None:
        """Ranks start anew: the gap until their first step is not the time of a step."""
        self._last = None

    def summary(self) -> Measured:
        """The percentiles that plans are made with."""
        return Measured(
            step_p50_s=percentile(self._steps, 0.5),
            step_s=percentile(self._steps, 0.95),
            staging_s=percentile(self._staging, 0.95),
            # The slowest in twenty transfers: the 5th percentile of the rate.
            durable_bytes_per_s=percentile(self._rates, 0.05),
            commit_s=percentile(self._commits, 0.95) or 0.5,
        )
