"""Whether a disk keeps up: bytes written against the rate it must have. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceLimits:
    """What the local disk must do for a set.

    Args:
        least_bytes_per_s: the slowest disk that is still of use.
        patience_s: how long it may do nothing, and how far it may fall behind that rate.
    """

    least_bytes_per_s: int
    patience_s: float


class Pace:
    """The progress of one set onto the disk. One thread looks, many note bytes."""

    def __init__(self, limits: PaceLimits, *, total_bytes: int, now: float) -> None:
        self._limits = limits
        self._total_bytes = total_bytes
        self._began_at = now
        self._moved_at = now
        self._done_bytes = 0
        self._extra_s = 0.0

    def wrote(self, done_bytes: int, now: float) -> None:
        """So many bytes are written in all; something moved."""
        self._done_bytes = done_bytes
        self._moved_at = now

    def begins_anew(self, now: float) -> None:
        """It was waited for something else than the disk: that time does not count."""
        self._moved_at = now

    def begins_sync(self, now: float, *, is_buffered: bool) -> None:
        """All bytes are handed over. What sits in the page cache may take its time from here."""
        self._moved_at = now
        if is_buffered:
            self._extra_s = self._total_bytes / self._limits.least_bytes_per_s

    def fault(self, now: float) -> str:
        """Why this disk is given up, or ""."""
        limits = self._limits
        still_s = now - self._moved_at - self._extra_s
        if still_s > limits.patience_s:
            return (
                f"nothing moved for {still_s:.1f} s at {self._done_bytes} of "
                f"{self._total_bytes} bytes"
            )
        due_bytes = limits.least_bytes_per_s * (now - self._began_at - limits.patience_s)
        if self._done_bytes < min(due_bytes, self._total_bytes):
            rate = self._done_bytes / max(now - self._began_at, 1e-6)
            return (
                f"{self._done_bytes} of {self._total_bytes} bytes at {rate / 1e6:.1f} MB/s, where "
                f"{limits.least_bytes_per_s / 1e6:.1f} MB/s are the least"
            )
        return ""
