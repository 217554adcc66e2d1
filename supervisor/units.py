"""Durations and sizes as people write them: "90s", "10m", "2GiB"; and back. Pure."""

from __future__ import annotations

import re

_DURATIONS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
# An integer of TOML may be too large for a float; this is beyond every limit, too.
_LARGEST = 1e18
_NUMBER = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)?\s*\Z")


def parse_duration(value: object) -> float:
    """Seconds of "90s", "1.5h" or a bare number of seconds.

    Raises:
        ValueError: not a duration; the text says what one looks like.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) < _LARGEST else _LARGEST
    match = _NUMBER.match(value) if isinstance(value, str) else None
    if match is None or (match[2] is not None and match[2] not in _DURATIONS):
        raise ValueError('a duration such as "90s", "10m" or "2h"')
    return float(match[1]) * _DURATIONS[match[2] or "s"]


def parse_size(value: object) -> int:
    """Bytes of "2GiB", "500MB" or a bare number of bytes.

    Raises:
        ValueError: not a size; the text says what one looks like.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _NUMBER.match(value) if isinstance(value, str) else None
    if match is None or (match[2] is not None and match[2] not in _SIZES):
        raise ValueError('a size such as "512MiB" or "2GiB"')
    return int(float(match[1]) * _SIZES[match[2] or "B"])


def show_duration(seconds: float | None) -> str:
    """A duration for people: the largest unit that gives a whole number, else seconds."""
    if seconds is None:
        return "-"
    for unit in ("d", "h", "m"):
        if seconds >= _DURATIONS[unit] and seconds % _DURATIONS[unit] == 0:
            return f"{int(seconds / _DURATIONS[unit])}{unit}"
    return f"{round(seconds, 3):.15g}s" if seconds >= 1 else f"{seconds * 1000:g}ms"


def show_size(size_bytes: int | None) -> str:
    """A size for people, in binary units."""
    if size_bytes is None:
        return "-"
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= _SIZES[unit]:
            return f"{size_bytes / _SIZES[unit]:.1f} {unit}"
    return f"{size_bytes} B"
