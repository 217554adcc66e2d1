"""Kind i of the given cases: what many saves leave behind, and one huge tensor."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from supervisor.errors import ExitCode
from tests.e2e.harness import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
BIG = [sys.executable, str(ROOT / "tests" / "jobs" / "big.py")]
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Usage:
    """What one process holds."""

    resident_bytes: int
    private_bytes: int
    memfd_bytes: int
    num_fds: int
    num_threads: int


def usage_of(process: psutil.Process) -> Usage:
    memory = process.memory_full_info()
    memfds: dict[int, int] = {}
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            if os.readlink(entry).startswith("/memfd:"):
                found = entry.stat()
                memfds[found.st_ino] = found.st_blocks * 512
        except FileNotFoundError:
            continue
    return Usage(
        resident_bytes=memory.rss,
        private_bytes=memory.uss,
        memfd_bytes=sum(memfds.values()),
        num_fds=process.num_fds(),
        num_threads=process.num_threads(),
    )


def settled_usage(process: psutil.Process) -> Usage:
    """The least of some looks: threads and descriptors come and go with each checkpoint."""
    looks = []
    for _ in range(10):
        looks.append(usage_of(process))
        time.sleep(0.02)
    return Usage(
        **{name: min(getattr(look, name) for look in looks) for name in Usage.__dataclass_fields__}
    )


def test_c127_a_hundred_saves_of_100_mb_leave_nothing_behind(make_cluster):
    """Memory, descriptors and threads of trainer and supervisor after save 100 are within 10 % of
    those after save 5."""
    cluster = make_cluster(world=1, command=BIG)
    node = cluster.node("a")
    cluster.start(
        node,
        BIG_BYTES=str(100 * 1000 * 1000),
        BIG_PAUSE_S="0.3",
        LASTGASP_CHECKPOINT__EVERY_STEPS="1",
    )
    supervisor = psutil.Process(node.process.pid)
    usages: dict[tuple[str, int], Usage] = {}
    for count in (5, 100):
        wait_for_commits(cluster, node, count)
        (rank,) = cluster.ranks()
        usages["trainer", count] = settled_usage(rank)
        usages["supervisor", count] = settled_usage(supervisor)
    (cluster.log / "enough").touch()

    assert cluster.finish(node) == ExitCode.DONE
    for who in ("trainer", "supervisor"):
        early, late = usages[who, 5], usages[who, 100]
        for name in Usage.__dataclass_fields__:
            assert getattr(late, name) <= getattr(early, name) * 1.1, (who, name, early, late)


def wait_for_commits(cluster, node, count: int) -> None:
    """Until that many checkpoints were committed; of old ones only the names are kept."""

    def has_committed() -> bool:
        assert node.process.poll() is None, node.stderr[-3000:]
        steps = [e["step"] for e in node.events() if e["event"] == "checkpoint.committed"]
        for step in steps[:-8]:
            forget_data(cluster, step)
        time.sleep(0.1)
        return len(steps) >= count

    cluster.wait(has_committed, f"{count} commits", timeout_s=240)


def forget_data(cluster, step: int) -> None:
    """As a sweep would: the data of a checkpoint that retention took off the list long ago."""
    for path in (cluster.folder / "store").rglob(f"{step:012d}/*"):
        if path.is_file() and "/data/" in str(path):
            path.unlink()


# ---------------------------------------------------------------- one huge tensor


@pytest.fixture
def small_cgroup(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A memory cgroup of 4 GiB, made by hand."""
    group = Path(f"/sys/fs/cgroup/memory/lastgasp-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(4 * GIB))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here (v1 and root are needed): {error}")
    yield group
    give_up_at = time.monotonic() + 30
    while (group / "cgroup.procs").read_text().strip() and time.monotonic() < give_up_at:
        for pid in (group / "cgroup.procs").read_text().split():
            os.kill(int(pid), 9)
        time.sleep(0.1)
    group.rmdir()


class PeakMeter:
    """The highest private memory of every process of a cgroup, by kind, looked at all the time."""

    def __init__(self, group: Path) -> None:
        self.peaks = {"trainer": 0, "supervisor": 0}
        self._group = group
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, int]:
        self._stop.set()
        self._thread.join()
        return self.peaks

    def _measure(self) -> None:
        while not self._stop.wait(0.02):
            for pid in (self._group / "cgroup.procs").read_text().split():
                try:
                    command = Path(f"/proc/{pid}/cmdline").read_text()
                    status = Path(f"/proc/{pid}/status").read_text()
                except OSError:
                    continue
                kind = "trainer" if "big.py" in command and "lastgasp" not in command else None
                kind = "supervisor" if "lastgasp" in command else kind
                fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
                if kind is not None and "RssAnon" in fields:
                    size = sum(
                        int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem")
                    )
                    self.peaks[kind] = max(self.peaks[kind], size)


def test_c128_a_tensor_of_2_5_gb_is_saved_and_restored_in_a_cgroup_of_4_gb(
    make_cluster, small_cgroup
):
    """Neither saving nor restoring builds a second copy in memory."""
    size = int(2.5 * 1000**3) // 4 * 4
    cluster = make_cluster(world=1, command=BIG)
    cluster.wrapper = ["sh", "-c", f'echo $$ > {small_cgroup}/cgroup.procs; exec "$@"', "sh"]
    node = cluster.node("a")
    env = {"BIG_BYTES": str(size), "LASTGASP_NOTICE__FILE_LEAD": "280s"}

    meter = PeakMeter(small_cgroup)
    cluster.start(node, BIG_PAUSE_S="0.1", LASTGASP_CHECKPOINT__EVERY_STEPS="1000", **env)
    cluster.wait_for_step(3)
    node.notice_file.touch()
    code = cluster.finish(node, timeout_s=250)
    saving = meter.stop()
    node.notice_file.unlink()
    meter = PeakMeter(small_cgroup)
    cluster.start(node, BIG_LEAVE="1", **env)
    left = cluster.finish(node, timeout_s=250)
    restoring = meter.stop()

    assert (code, left) == (ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE)
    *_, last, restored = cluster.lines(0)
    assert restored == last
    assert restored["step"] >= 3
    # torch itself takes about 200 MiB; the tensor is there once.
    for peaks in (saving, restoring):
        assert size < peaks["trainer"] < size + 400 * MIB, peaks
        assert 0 < peaks["supervisor"] < 400 * MIB, peaks
    failures = int((small_cgroup / "memory.oom_control").read_text().split("oom_kill ")[1])
    assert failures == 0
