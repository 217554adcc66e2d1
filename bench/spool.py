"""Making an image durable on the local disk: ours, the alternatives, and raw O_DIRECT as the limit.

python -m bench.spool [--gib 1.0] [--folder DIR]

Ours is a whole PersistJob (hash, O_DIRECT, fsync, rename) whose store is on tmpfs, so that the disk
has only the spool to write; the time is what it reports as `spool_s`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from bench.common import interleave, report
from supervisor.checkpoint.persist import Group, PersistJob, Tools
from supervisor.checkpoint.spool import Spool
from supervisor.checkpoint.workers import WorkerPool
from supervisor.clock import Deadline, SystemClock
from supervisor.commit.claim import claim
from supervisor.commit.log import CommitLog
from supervisor.commit.rules import ClaimRequest, Retention
from supervisor.ranks.slots import SlotBuffer
from supervisor.store.directory import DirectoryStore

CLOCK = SystemClock()
CHUNK = 16 << 20


def our_way(folder: Path, memory: Path, size_bytes: int) -> Callable[[], float]:
    log = CommitLog(
        DirectoryStore(memory), job_id="bench", clock=CLOCK, new_uid=lambda: uuid.uuid4().hex
    )
    request = ClaimRequest(
        launch="bench", round=1, group=uuid.uuid4().hex, nodes=1, world=1, layout="l"
    )
    got = claim(log, request, Deadline.after(CLOCK, 30))
    slot = SlotBuffer.in_memory("bench", size_bytes)
    slot.view(size_bytes)[:] = os.urandom(1 << 20) * (size_bytes >> 20)
    tools = Tools(
        log=log,
        spool=Spool(str(folder), "bench"),
        clock=CLOCK,
        flushers=WorkerPool("flush", 2),
        uploaders=WorkerPool("upload", 1),
        retention=Retention(keep=3),
        chunk_timeout_s=600,
        commit_timeout_s=60,
        on_spool_error=lambda error: print(error),
        on_uploaded=lambda size: None,
    )
    steps = iter(range(1, 1000))

    def run() -> float:
        group = Group(gen=got.gen, epoch=got.epoch, group="0" * 32, world=1, layout="l")
        job = PersistJob(
            tools,
            group=group,
            step=next(steps),
            images={0: (slot, size_bytes)},
            on_spooled=lambda: None,
        )
        done = job.run()
        shutil.rmtree(memory / "jobs" / "bench" / "data", ignore_errors=True)
        assert done.spool_s is not None
        return done.spool_s

    return run


def direct_limit(path: Path, size_bytes: int) -> Callable[[], None]:
    """Sequential O_DIRECT writes of one chunk from aligned memory, then fsync."""
    chunk = mmap.mmap(-1, CHUNK)
    chunk.write(os.urandom(CHUNK))

    def run() -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        os.posix_fallocate(fd, 0, size_bytes)
        for offset in range(0, size_bytes, CHUNK):
            os.pwrite(fd, chunk, offset)
        os.fsync(fd)
        os.close(fd)
        os.unlink(path)

    return run


def fio_limit(path: Path, size_bytes: int) -> Callable[[], float]:
    command = ["fio", "--name=limit", f"--filename={path}", "--rw=write", "--bs=16M", "--direct=1"]
    command += ["--ioengine=libaio", "--iodepth=4", f"--size={size_bytes}", "--end_fsync=1"]

    def run() -> float:
        done = subprocess.run(
            [*command, "--output-format=json"], capture_output=True, text=True, check=True
        )
        os.unlink(path)
        return float(json.loads(done.stdout)["jobs"][0]["write"]["runtime"]) / 1000

    return run


def synced(path: Path, save: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        save()
        files = [path] if path.is_file() else list(path.iterdir())
        for file in files:
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--folder", default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    size_bytes = int(arguments.gib * 2**30) // CHUNK * CHUNK
    torch.set_num_threads(1)
    state = {f"t{i}": torch.rand(size_bytes // 4 // 16) for i in range(16)}
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        folder = Path(disk)
        ways: dict[str, Callable[[], float | None]] = {
            "O_DIRECT writes, the limit": direct_limit(folder / "raw", size_bytes),
            "ours (with SHA-256)": our_way(folder, Path(memory), size_bytes),
            "safetensors + fsync": synced(
                folder / "st", lambda: save_file(state, str(folder / "st"))
            ),
            "torch.save + fsync": synced(
                folder / "pt", lambda: torch.save(state, str(folder / "pt"))
            ),
            "dcp.save": synced(
                folder / "dcp", lambda: dcp.save(state, checkpoint_id=str(folder / "dcp"))
            ),
        }
        if shutil.which("fio"):
            ways["fio, 4 deep"] = fio_limit(folder / "fio", size_bytes)
        taken = interleave(ways, trials=arguments.trials)
    rates = {
        name: [size_bytes / 1e9 / seconds for seconds in values] for name, values in taken.items()
    }
    report(
        f"durable on disk, {size_bytes / 2**30:g} GiB",
        rates,
        unit="GB/s",
        reference="O_DIRECT writes, the limit",
    )


if __name__ == "__main__":
    main()
