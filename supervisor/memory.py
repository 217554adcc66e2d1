"""How much memory the job may really use: the cgroup's limit, not what the machine has.

Source: Documentation/admin-guide/cgroup-v2.rst (memory.max, memory.current) and
cgroup-v1/memory.rst (memory.limit_in_bytes, memory.usage_in_bytes); proc(5), MemAvailable.
"""

from __future__ import annotations

import os

_UNLIMITED = 1 << 60


def available_bytes(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int:
    """Bytes that can still be taken without pressing on the limit of machine or cgroup."""
    found = [_machine_available(proc)]
    for limit_file, usage_file in _limit_files(proc, cgroup):
        limit, usage = _number(limit_file), _number(usage_file)
        if limit is not None and usage is not None and limit < _UNLIMITED:
            found.append(max(0, limit - usage))
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


def _limit_files(proc: str, cgroup: str) -> list[tuple[str, str]]:
    """Limit and usage file of every cgroup we are in, from ours to the root."""
    files = []
    try:
        with open(os.path.join(proc, "self/cgroup")) as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = cgroup, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base = os.path.join(cgroup, "memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            directory = os.path.join(base, *parts[:depth])
            files.append((os.path.join(directory, names[0]), os.path.join(directory, names[1])))
    return files


def _number(path: str) -> int | None:
    try:
        with open(path) as file:
            text = file.read(64).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
