"""How much memory the job may really use: the cgroup's limit, not what the machine has.

File cache that nobody reads counts as used there, but is given back as soon as memory is asked for.

Source: Documentation/admin-guide/cgroup-v2.rst (memory.max, memory.current, memory.stat) and
cgroup-v1/memory.rst (memory.limit_in_bytes, memory.usage_in_bytes); proc(5), MemAvailable.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """What a version of cgroups calls its files, and reclaimable cache in memory.stat."""

    limit: str
    usage: str
    cache: str


_V1 = _Names(
    limit="memory.limit_in_bytes", usage="memory.usage_in_bytes", cache="total_inactive_file"
)
_V2 = _Names(limit="memory.max", usage="memory.current", cache="inactive_file")


def available_bytes(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int:
    """Bytes that can still be taken without pressing on the limit of machine or cgroup."""
    found = [_machine_available(proc)]
    for directory, names in _cgroups(proc, cgroup):
        limit = _number(os.path.join(directory, names.limit))
        usage = _number(os.path.join(directory, names.usage))
        if limit is not None and usage is not None and limit < _UNLIMITED:
            cache = _statistic(os.path.join(directory, "memory.stat"), names.cache)
            found.append(max(0, limit - max(0, usage - cache)))
    return min(found)


def _machine_available(proc: str) -> int:
    try:
        with open(os.path.join(proc, "meminfo")) as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


def _cgroups(proc: str, cgroup: str) -> list[tuple[str, _Names]]:
    """The directory of every cgroup we are in, from ours to the root."""
    found = []
    try:
        with open(os.path.join(proc, "self/cgroup")) as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = cgroup, _V2
        elif "memory" in controllers.split(","):
            base, names = os.path.join(cgroup, "memory"), _V1
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            found.append((os.path.join(base, *parts[:depth]), names))
    return found


def _statistic(path: str, name: str) -> int:
    try:
        with open(path) as file:
            for line in file:
                key, _, value = line.partition(" ")
                if key == name:
                    return int(value)
    except (OSError, ValueError):
        return 0
    return 0


def _number(path: str) -> int | None:
    try:
        with open(path) as file:
            text = file.read(64).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
