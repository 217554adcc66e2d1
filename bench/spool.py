"""Making a state durable on the local disk: ours, the alternatives, and the limit: fio, O_DIRECT.

python -m bench.spool [--gib 2.0] [--ranks 2] [--folder DIR]

Ours is a whole PersistJob (SHA-256, O_DIRECT, fsync, rename) of one image a rank; its time is until
the set is published. Once with a store that waits until then, so that the disk and the CPU are the
spool's alone as they are the others', and once while the same bytes go into a store in memory,
which hashes and copies them again on the same cores.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from bench.common import Goal, figure, interleave, report
from supervisor.checkpoint.flush import Flusher
from supervisor.checkpoint.notes import UploadNotes
from supervisor.checkpoint.pace import PaceLimits
from supervisor.checkpoint.persist import Group, PersistJob, Tools
from supervisor.checkpoint.spool import Spool
from supervisor.checkpoint.workers import WorkerPool
from supervisor.clock import Deadline, SystemClock
from supervisor.commit.claim import claim
from supervisor.commit.log import CommitLog
from supervisor.commit.rules import ClaimRequest, Retention
from supervisor.ranks.slots import SlotBuffer
from supervisor.store.directory import DirectoryStore
from supervisor.wiring import NUM_HASHERS

CLOCK = SystemClock()
CHUNK = 16 << 20
OURS = "ours (with SHA-256)"
LIMIT = "fio, O_DIRECT, 4 deep"


class WaitingStore:
    """A store whose uploads do not begin before they are let."""

    def __init__(self, store: DirectoryStore, may_begin: threading.Event) -> None:
        self._store = store
        self._may_begin = may_begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open_upload(self, key: str, **options: Any) -> Any:
        self._may_begin.wait()
        return self._store.open_upload(key, **options)


class OurSpool:
    """The supervisor's own parts on a disk and a store in memory."""

    def __init__(self, disk: Path, memory: Path, *, size_bytes: int, ranks: int) -> None:
        self.memory = memory
        self.may_upload = threading.Event()
        store: Any = WaitingStore(DirectoryStore(memory), self.may_upload)
        log = CommitLog(store, job_id="bench", clock=CLOCK, new_uid=lambda: uuid.uuid4().hex)
        request = ClaimRequest(
            launch="bench", round=1, group=uuid.uuid4().hex, nodes=1, world=ranks, layout="l"
        )
        got = claim(log, request, Deadline.after(CLOCK, 30))
        self.group = Group(gen=got.gen, epoch=got.epoch, group="0" * 32, world=ranks, layout="l")
        self.images = {rank: an_image(size_bytes // ranks) for rank in range(ranks)}
        spool = Spool(str(disk), "bench")
        self.tools = Tools(
            log=log,
            flusher=Flusher(
                spool,
                UploadNotes(spool.path),
                clock=CLOCK,
                limits=PaceLimits(least_bytes_per_s=1 << 20, patience_s=60),
                on_error=print,
            ),
            clock=CLOCK,
            hashers=WorkerPool("hash", NUM_HASHERS),
            uploaders=WorkerPool("upload", 1),
            retention=Retention(keep=3),
            chunk_timeout_s=600,
            commit_timeout_s=60,
            on_uploaded=lambda size: None,
        )
        self.step = 0

    def run(self, *, beside_upload: bool) -> float:
        """Seconds from the begin until the set is published."""
        self.step += 1
        self.may_upload.clear()
        if beside_upload:
            self.may_upload.set()
        job = PersistJob(
            self.tools,
            group=self.group,
            step=self.step,
            images=self.images,
            on_spooled=lambda seconds: self.may_upload.set(),
        )
        job.run()
        assert job.flush is not None
        job.flush.is_over.wait()
        assert job.flush.seconds is not None
        shutil.rmtree(self.memory / "jobs" / "bench" / "data", ignore_errors=True)
        for item in self.tools.flusher.spool.ready() if self.tools.flusher else ():
            shutil.rmtree(item.directory)
        return job.flush.seconds


def an_image(size_bytes: int) -> tuple[SlotBuffer, int]:
    slot = SlotBuffer.in_memory("bench", size_bytes)
    view = slot.view(size_bytes)
    for at in range(0, size_bytes, 1 << 20):
        view[at : at + (1 << 20)] = os.urandom(1 << 20)
    return slot, size_bytes


def one_thread_limit(path: Path, size_bytes: int) -> Callable[[], None]:
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
    """fio's own time, without its start and the laying out of the file."""
    command = ["fio", "--name=limit", f"--filename={path}", "--rw=write", "--bs=16M", "--direct=1"]
    command += ["--ioengine=libaio", "--iodepth=4", f"--size={size_bytes}", "--end_fsync=1"]

    def run() -> float:
        done = subprocess.run(
            [*command, "--output-format=json"], capture_output=True, text=True, check=True
        )
        os.unlink(path)
        return float(json.loads(done.stdout)["jobs"][0]["write"]["runtime"]) / 1000

    return run


def synced(path: Path, save: Callable[[], object]) -> Callable[[], float]:
    """Seconds of a save and an fsync of what it wrote; of one that syncs itself that costs none."""

    def run() -> float:
        began_at = CLOCK.monotonic()
        save()
        for file in [path] if path.is_file() else list(path.iterdir()):
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        seconds = CLOCK.monotonic() - began_at
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return seconds

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--folder", default=None, help="on the disk to measure")
    parser.add_argument("--ours", action="store_true", help="without the alternatives")
    arguments = parser.parse_args()
    unit_bytes = CHUNK * arguments.ranks
    size_bytes = int(arguments.gib * 2**30) // unit_bytes * unit_bytes
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        folder = Path(disk)
        ours = OurSpool(folder, Path(memory), size_bytes=size_bytes, ranks=arguments.ranks)
        ways: dict[str, Callable[[], float | None]] = {
            LIMIT: fio_limit(folder / "fio", size_bytes),
            OURS: lambda: ours.run(beside_upload=False),
            "ours, beside an upload on the same cores": lambda: ours.run(beside_upload=True),
        }
        if not arguments.ours:
            ways |= alternatives(folder, size_bytes)
        taken = interleave(ways, trials=arguments.trials)
    rates = {
        name: [size_bytes / 1e9 / seconds for seconds in values] for name, values in taken.items()
    }
    title = f"durable on disk, {size_bytes / 2**30:g} GiB, ours in {arguments.ranks} images"
    report(title, rates, unit="GB/s", reference=LIMIT)
    rate = {name: statistics.median(values) for name, values in rates.items()}
    for name in rate:
        if name not in (LIMIT, OURS):
            figure(f"spool, {name}", rate[name] / rate[LIMIT], "x fio O_DIRECT")
    figure("spool, ours", rate[OURS] / rate[LIMIT], "x fio O_DIRECT", Goal(least=0.9))
    if "dcp.save" in rate:
        figure("spool, ours", rate[OURS] / rate["dcp.save"], "x dcp.save", Goal(least=2.5))


def alternatives(folder: Path, size_bytes: int) -> dict[str, Callable[[], float | None]]:
    """DCP syncs its files by default (FileSystemWriter, sync_files=True); the others do not."""
    state = {f"t{i}": torch.rand(size_bytes // 4 // 16) for i in range(16)}
    return {
        "O_DIRECT, one thread": one_thread_limit(folder / "raw", size_bytes),
        "safetensors + fsync": synced(folder / "st", lambda: save_file(state, str(folder / "st"))),
        "torch.save + fsync": synced(folder / "pt", lambda: torch.save(state, str(folder / "pt"))),
        "dcp.save": synced(
            folder / "dcp", lambda: dcp.save(state, checkpoint_id=str(folder / "dcp"))
        ),
        "dcp.save, 4 threads": synced(
            folder / "dcp4",
            lambda: dcp.save(
                state,
                storage_writer=dcp.FileSystemWriter(str(folder / "dcp4"), thread_count=4),
            ),
        ),
    }


if __name__ == "__main__":
    main()
