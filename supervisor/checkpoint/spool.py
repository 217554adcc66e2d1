"""The spool: checkpoints on this node's own disk.

`<root>/<job>/checkpoints/<generation>-<step>/` holds the images and `READY.json`, which names them
with their digests. A directory gets that name only when all of it is on the disk: it is written
under another name, synced, and renamed. What has no such name is rubbish of a crash and is removed
at the next start; nothing outside our own names is ever touched.

The spool is a help, not a promise: a checkpoint counts once the store has it. So a full, slow or
broken disk is reported and the upload goes on from memory; see `flush`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from supervisor import failpoints
from supervisor.checkpoint.files import MAX_JSON_BYTES, NOT_JSON, sync_directory, write_synced
from supervisor.checkpoint.spool_errors import SpoolNotMounted, spool_error
from supervisor.private_dirs import make_private
from trainer_sdk.protocol.manifest import ShardEntry

READY = "READY.json"
BALLAST = "ballast"
SPOOL_FORMAT = 1
_FINAL = re.compile(r"^(\d{10})-(\d{12})\Z")
_TEMPORARY = re.compile(r"^tmp-[0-9a-f]{32}\Z")
_NAMED_SLOT = re.compile(r"^slot-[a-z0-9_]{8}\Z")  # of a crash between its making and unlinking
REMAKE_ROOM = 2  # ballast is made again where this many times its size is free


class SpoolRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What READY.json says: one checkpoint's shards of this node. `key` is where each was to go."""

    fmt: int
    gen: int
    group: str
    step: int
    world: int
    shards: tuple[ShardEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpooledCheckpoint:
    """A checkpoint in the spool whose READY.json was read; its bytes are not verified yet."""

    record: SpoolRecord
    directory: str

    def path(self, shard: ShardEntry) -> str:
        """The file of a shard; the name is ours, nothing in it comes from outside."""
        return os.path.join(self.directory, image_name(shard.rank, shard.name))


def image_name(rank: int, name: str) -> str:
    """The file name of an image."""
    return f"{rank:06d}-{name}.safetensors"


class Spool:
    """The spool folder of one job.

    Invariant: a directory with a final name is whole on the disk.
    """

    def __init__(
        self,
        root: str,
        job_id: str,
        *,
        ballast_bytes: int = 0,
        require_mount: bool = False,
        on_rejected: Callable[[int, int, str], None] = lambda gen, step, reason: None,
    ) -> None:
        """Make the folder ready and remove what a crash left.

        Args:
            ballast_bytes: kept reserved, to be given up for a checkpoint when the disk is full.
            require_mount: `root` must be a mount point.
            on_rejected: told, once each, of a set that is not used, with the reason.

        Raises:
            SpoolError, SpoolFull, SpoolNotMounted
        """
        if require_mount and not os.path.ismount(root):
            raise SpoolNotMounted(
                f"[spool] path {root} is not a mount point",
                hint="mount the disk there, set [spool] path to its mount point, or "
                "require_mount = false",
            )
        self.path = os.path.join(root, job_id)
        self._checkpoints = os.path.join(self.path, "checkpoints")
        self._ballast_bytes = ballast_bytes
        self._on_rejected = on_rejected
        self._told: set[str] = set()
        self.is_suspect = False
        try:
            make_private(self._checkpoints)
            if os.statvfs(self._checkpoints).f_flag & os.ST_RDONLY:
                raise SpoolNotMounted(
                    f"the spool is read-only: {self.path}", hint="mount it for writing"
                )
            self._clean()
            self._device = os.stat(self._checkpoints).st_dev
        except OSError as error:
            raise spool_error(error, self.path) from error
        self.keep_ballast()

    def _clean(self) -> None:
        for folder, pattern in ((self._checkpoints, _TEMPORARY), (self.path, _NAMED_SLOT)):
            for name in os.listdir(folder):
                path = os.path.join(folder, name)
                if pattern.match(name) and os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path)
                elif pattern.match(name):
                    os.unlink(path)

    # ------------------------------------------------------------ writing

    def begin(self) -> str:
        """A new directory for images that are about to be written.

        Raises:
            SpoolNotMounted: the path leads to another disk than at the start.
            SpoolError, SpoolFull
        """
        path = os.path.join(self._checkpoints, f"tmp-{uuid.uuid4().hex}")
        try:
            if os.stat(self._checkpoints).st_dev != self._device:
                raise SpoolNotMounted(
                    f"{self._checkpoints} is on another disk than when the supervisor started",
                    hint="mount the spool's disk again",
                )
            os.mkdir(path, 0o700)
        except FileNotFoundError as error:
            raise SpoolNotMounted(
                f"{self._checkpoints} is gone", hint="mount the spool's disk again"
            ) from error
        except OSError as error:
            raise spool_error(error, path) from error
        return path

    def publish(self, directory: str, record: SpoolRecord) -> SpooledCheckpoint:
        """Give a directory whose images are all synced its final name.

        Raises:
            SpoolError, SpoolFull: the checkpoint is not in the spool.
        """
        final = os.path.join(self._checkpoints, f"{record.gen:010d}-{record.step:012d}")
        try:
            write_synced(os.path.join(directory, READY), msgspec.json.encode(record))
            sync_directory(directory)
            failpoints.hit("spool.publish.before")
            if os.path.isdir(final):
                shutil.rmtree(final)
            os.rename(directory, final)
            failpoints.hit("spool.publish.after")
            sync_directory(self._checkpoints)
        except OSError as error:
            raise spool_error(error, final) from error
        return SpooledCheckpoint(record=record, directory=final)

    def discard(self, directory: str) -> None:
        """Remove a directory that will not be published."""
        shutil.rmtree(directory, ignore_errors=True)

    # ------------------------------------------------------------ what is there

    def ready(self) -> list[SpooledCheckpoint]:
        """Every whole checkpoint, newest first by (generation, step) as numbers.

        A READY.json that cannot be read or contradicts its directory is passed over and told of,
        but left: a newer version may have written it. Of a disk that is gone there are none.
        """
        found = []
        try:
            names = os.listdir(self._checkpoints)
        except OSError:
            return []
        for name in names:
            match = _FINAL.match(name)
            if match is None:
                continue
            directory = os.path.join(self._checkpoints, name)
            gen, step = int(match[1]), int(match[2])
            record = _read_record(os.path.join(directory, READY))
            if record is None:
                self._tell(name, gen, step, f"{directory} has no {READY} that can be read")
            elif (record.gen, record.step) != (gen, step):
                other = f"generation {record.gen}, step {record.step}"
                self._tell(name, gen, step, f"the {READY} in {directory} is that of {other}")
            else:
                found.append(SpooledCheckpoint(record=record, directory=directory))
        return sorted(found, key=lambda item: (item.record.gen, item.record.step), reverse=True)

    def reject(self, item: SpooledCheckpoint, reason: str) -> None:
        """Remove a set that nothing may use again, such as one whose bytes are not its record's."""
        shutil.rmtree(item.directory, ignore_errors=True)
        self._on_rejected(item.record.gen, item.record.step, f"{reason}; it was removed")

    def pass_over(self, item: SpooledCheckpoint, reason: str) -> None:
        """Tell why a set is not used now; it stays."""
        name = os.path.basename(item.directory)
        self._tell(name, item.record.gen, item.record.step, reason)

    def _tell(self, name: str, gen: int, step: int, reason: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self._on_rejected(gen, step, reason)

    def drop_foreign(self, *, gen: int, group: str) -> None:
        """Remove what another life of a job of this name left: sets of a generation that the log
        had not reached when `gen` was claimed, or of this very number by another group."""
        for item in self.ready():
            record = item.record
            if record.gen > gen or (record.gen == gen and record.group != group):
                self.reject(item, "it is of another life of a job of this name")

    # ------------------------------------------------------------ space

    def evict(self, *, keep: int, spare: tuple[int, int] | None = None) -> int:
        """Remove all but the newest `keep` checkpoints (at least one stays).

        Args:
            spare: (generation, step) of one that stays in any case.

        Returns:
            How many were removed.
        """
        old = [
            item
            for item in self.ready()[max(1, keep) :]
            if (item.record.gen, item.record.step) != spare
        ]
        for item in old:
            shutil.rmtree(item.directory, ignore_errors=True)
        return len(old)

    def make_room(self) -> bool:
        """Give up the ballast and all checkpoints but the newest; False if there was nothing."""
        is_freed = False
        with contextlib.suppress(OSError):
            os.unlink(self._ballast_path)
            is_freed = True
        return self.evict(keep=1) > 0 or is_freed

    def keep_ballast(self, *, beside_bytes: int = 0) -> None:
        """Reserve the ballast unless it is there, or too little is free; a help, so never fails.

        Args:
            beside_bytes: what the next checkpoint needs; it goes first.
        """
        if self._ballast_bytes == 0 or self.is_suspect:
            return
        with contextlib.suppress(OSError):
            if os.path.exists(self._ballast_path):
                return
            free = os.statvfs(self.path)
            wanted = beside_bytes + REMAKE_ROOM * self._ballast_bytes
            if free.f_bavail * free.f_frsize >= wanted:
                self._make_ballast()

    def _make_ballast(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._ballast_path, flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, self._ballast_bytes)
        except OSError:
            os.unlink(self._ballast_path)
            raise
        finally:
            os.close(fd)

    @property
    def _ballast_path(self) -> str:
        return os.path.join(self.path, BALLAST)


def _read_record(path: str) -> SpoolRecord | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        with open(fd, "rb") as file:
            record = msgspec.json.decode(file.read(MAX_JSON_BYTES), type=SpoolRecord)
    except (OSError, *NOT_JSON):
        return None
    return record if record.fmt == SPOOL_FORMAT else None
