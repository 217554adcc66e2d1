"""What memory is to be had, over trees of /proc and of both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.memory import available_bytes

GIB = 1 << 30
V1_UNLIMITED = 9223372036854771712


class Machine:
    """A fake /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path, *, available_bytes: int = 100 * GIB, groups: str = "") -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()
        (self.proc / "meminfo").write_text(
            f"MemTotal:  999999999 kB\nMemFree:  1 kB\nMemAvailable:  {available_bytes >> 10} kB\n"
        )
        (self.proc / "self" / "cgroup").write_text(groups)

    def v2(self, path: str, *, limit: int | str, usage: int, stat: str = "") -> None:
        folder = self.cgroup / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{usage}\n")
        if stat:
            (folder / "memory.stat").write_text(stat)

    def v1(self, path: str, *, limit: int, usage: int, stat: str = "") -> None:
        folder = self.cgroup / "memory" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
        if stat:
            (folder / "memory.stat").write_text(stat)

    def available(self) -> int:
        return available_bytes(str(self.proc), str(self.cgroup))


def test_without_cgroups_it_is_what_the_kernel_says(tmp_path: Path) -> None:
    machine = Machine(tmp_path)

    assert machine.available() == 100 * GIB


def test_a_limit_of_our_cgroup_counts_and_not_what_the_machine_has(tmp_path: Path) -> None:
    machine = Machine(tmp_path, groups="0::/pod/container\n")
    machine.v2("pod/container", limit=8 * GIB, usage=3 * GIB)

    assert machine.available() == 5 * GIB


def test_the_tightest_of_all_cgroups_above_us_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, groups="0::/pod/container\n")
    machine.v2("pod/container", limit="max", usage=GIB)
    machine.v2("pod", limit=4 * GIB, usage=3 * GIB)

    assert machine.available() == GIB


def test_a_namespace_that_shows_our_own_cgroup_as_the_root_is_seen(tmp_path: Path) -> None:
    """Inside a container /proc names the host's path, and the mount shows only ours."""
    machine = Machine(tmp_path, groups="0::/kubepods/burstable/pod1\n")
    machine.v2("", limit=2 * GIB, usage=GIB)

    assert machine.available() == GIB


def test_cgroups_of_version_1_are_understood(tmp_path: Path) -> None:
    machine = Machine(tmp_path, groups="5:cpu,cpuacct:/x\n4:memory:/docker/x\n0::/\n")
    machine.v1("docker/x", limit=6 * GIB, usage=GIB)
    machine.v1("", limit=V1_UNLIMITED, usage=50 * GIB)

    assert machine.available() == 5 * GIB


def test_unlimited_is_no_limit(tmp_path: Path) -> None:
    machine = Machine(tmp_path, groups="4:memory:/x\n0::/x\n")
    machine.v1("x", limit=V1_UNLIMITED, usage=200 * GIB)
    machine.v2("x", limit="max", usage=200 * GIB)

    assert machine.available() == 100 * GIB


def test_usage_above_the_limit_leaves_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, groups="0::/x\n")
    machine.v2("x", limit=GIB, usage=2 * GIB)

    assert machine.available() == 0


@pytest.mark.parametrize("version", [1, 2])
def test_file_cache_that_nobody_reads_is_to_be_had(tmp_path: Path, version: int) -> None:
    """A job that reads its data set fills the cgroup with cache up to its limit."""
    machine = Machine(tmp_path, groups="4:memory:/x\n" if version == 1 else "0::/x\n")
    cache = 6 * GIB
    if version == 1:
        stat = f"inactive_file 1\ntotal_inactive_file {cache}\n"
        machine.v1("x", limit=8 * GIB, usage=8 * GIB, stat=stat)
    else:
        stat = f"anon 5\nfile {7 * GIB}\ninactive_file {cache}\nactive_file {GIB}\n"
        machine.v2("x", limit=8 * GIB, usage=8 * GIB, stat=stat)

    assert machine.available() == cache


@pytest.mark.parametrize("stat", ["inactive_file\n", "inactive_file many\n", "\n"])
def test_a_statistic_that_cannot_be_read_counts_as_no_cache(tmp_path: Path, stat: str) -> None:
    machine = Machine(tmp_path, groups="0::/x\n")
    machine.v2("x", limit=8 * GIB, usage=3 * GIB, stat=stat)

    assert machine.available() == 5 * GIB


def test_nothing_to_read_is_nothing_to_be_had(tmp_path: Path) -> None:
    """Staging then goes to disk, which is slow but safe."""
    assert available_bytes(str(tmp_path), str(tmp_path)) == 0
