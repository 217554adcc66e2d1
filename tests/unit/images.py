"""Real image slots, a real spool and a real store for tests of checkpoints on their way."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from supervisor.checkpoint.fetch import FetchTools, Source
from supervisor.checkpoint.flush import Flusher
from supervisor.checkpoint.notes import UploadNotes
from supervisor.checkpoint.pace import PaceLimits
from supervisor.checkpoint.persist import Committed, Group, PersistJob, Tools
from supervisor.checkpoint.spool import Spool
from supervisor.checkpoint.spool_errors import SpoolError
from supervisor.checkpoint.workers import WorkerPool
from supervisor.clock import Deadline, SystemClock
from supervisor.commit.claim import claim
from supervisor.commit.log import CommitLog
from supervisor.commit.reader import read_manifest
from supervisor.commit.rules import ClaimRequest, Retention
from supervisor.ranks.slots import SlotBuffer
from supervisor.store.base import ObjectStore
from supervisor.store.directory import DirectoryStore
from tests.unit.tables import new_uid
from trainer_sdk.protocol.image import build_header
from trainer_sdk.protocol.manifest import Manifest

LAYOUT = "images-v1"
JOB_ID = "job"
PATIENT = PaceLimits(least_bytes_per_s=1, patience_s=60.0)
Images = dict[int, tuple[SlotBuffer, int]]


def an_image(rank: int, *, num_bytes: int = 10_000, seed: int = 0) -> bytes:
    """A whole safetensors image with random content."""
    header, _ = build_header([("weights", "U8", (num_bytes,))], {"rank": str(rank)})
    return header + random.Random(1000 * rank + seed).randbytes(num_bytes)


def in_slots(images: Mapping[int, bytes]) -> Images:
    """Each rank's image staged in a memfd slot with room to spare."""
    staged = {}
    for rank, image in images.items():
        slot = SlotBuffer.in_memory(f"test-{rank}", len(image) + 5000)
        slot.view(len(image))[:] = image
        staged[rank] = slot, len(image)
    return staged


def some_images(world: int = 2, **options: int) -> dict[int, bytes]:
    """One image a rank."""
    return {rank: an_image(rank, **options) for rank in range(world)}


class Workshop:
    """One node with everything that a checkpoint needs on its way, below one directory."""

    def __init__(
        self,
        root: Path,
        *,
        wrap: Callable[[ObjectStore], ObjectStore] = lambda store: store,
        with_spool: bool = True,
        ballast_bytes: int = 0,
        limits: PaceLimits = PATIENT,
    ) -> None:
        (root / "store").mkdir(exist_ok=True)
        self.root = root
        self.clock = SystemClock()
        self.directory = DirectoryStore(root / "store")
        self.store = wrap(self.directory)
        self.log = CommitLog(self.store, job_id=JOB_ID, clock=self.clock, new_uid=new_uid)
        self.spool_errors: list[SpoolError] = []
        self.spool: Spool | None = None
        self.flusher: Flusher | None = None
        if with_spool:
            self.spool = Spool(str(root / "spool"), JOB_ID, ballast_bytes=ballast_bytes)
            self.flusher = Flusher(
                self.spool,
                UploadNotes(self.spool.path),
                clock=self.clock,
                limits=limits,
                on_error=self.spool_errors.append,
            )
        self.pools = [WorkerPool("hash", 2), WorkerPool("upload", 4), WorkerPool("read", 4)]
        self.sent: list[int] = []
        self.reads: list[Source] = []
        self.spooled = threading.Event()
        self.group: Group | None = None

    def deadline(self) -> Deadline:
        return Deadline.after(self.clock, 30.0)

    def close(self) -> None:
        if self.flusher is not None:
            self.flusher.close()
        for pool in self.pools:
            pool.close()
        self.directory.close()

    def claim(self, world: int) -> Group:
        """Begin a generation."""
        group = new_uid()
        request = ClaimRequest(
            launch=new_uid(),
            round=1,
            group=group,
            nodes=1,
            world=world,
            layout=LAYOUT,
            allow_fresh=True,
        )
        got = claim(self.log, request, self.deadline())
        self.group = Group(
            gen=got.gen, epoch=got.epoch, group=group, world=got.world, layout=got.layout
        )
        return self.group

    @property
    def tools(self) -> Tools:
        return Tools(
            log=self.log,
            flusher=self.flusher,
            clock=self.clock,
            hashers=self.pools[0],
            uploaders=self.pools[1],
            retention=Retention(keep=3),
            chunk_timeout_s=10.0,
            commit_timeout_s=10.0,
            on_uploaded=self.sent.append,
        )

    @property
    def fetch_tools(self) -> FetchTools:
        return FetchTools(
            store=self.store,
            keys=self.log.keys,
            spool=self.spool,
            readers=self.pools[2],
            chunk_timeout_s=10.0,
            on_read=lambda source, size_bytes: self.reads.append(source),
        )

    def job(self, images: Images, *, step: int) -> PersistJob:
        """A set on its way; claims a generation if there is none."""
        group = self.group or self.claim(len(images))
        return PersistJob(
            self.tools,
            group=group,
            step=step,
            images=images,
            on_spooled=lambda seconds: self.spooled.set(),
        )

    def persist(self, images: Mapping[int, bytes], *, step: int = 10) -> Committed:
        """Make a set durable, and wait until the local disk is through with it, too."""
        job = self.job(in_slots(images), step=step)
        try:
            return job.run()
        finally:
            self.settle(job)

    def settle(self, job: PersistJob) -> None:
        """Wait until the flush of a job is over and what comes after it is tidied up."""
        if job.flush is not None and self.flusher is not None:
            assert job.flush.is_over.wait(20)
            assert self.flusher.wait_idle(timeout_s=20)

    def manifest(self, seq: int) -> Manifest:
        return read_manifest(self.log, seq, self.deadline())

    def shard_path(self, manifest: Manifest, rank: int) -> Path:
        """The file of a rank's shard in the store."""
        (shard,) = manifest.shards_of(rank)
        return self.root / "store" / self.log.keys.full(shard.key)

    def data_files(self) -> list[Path]:
        """Every shard in the store, committed or not."""
        folder = self.root / "store" / "jobs" / JOB_ID / "data"
        return [path for path in folder.rglob("*") if path.is_file()]

    def steps(self) -> Sequence[int]:
        """The steps of all commits."""
        return [commit.step for commit in self.log.tail(self.deadline()).state.live]


def workshops(root: Path) -> Iterator[Workshop]:
    """For a fixture."""
    workshop = Workshop(root)
    yield workshop
    workshop.close()
