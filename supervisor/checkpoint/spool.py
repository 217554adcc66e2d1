"""The spool: checkpoints on this node's own disk.

`<root>/<job>/checkpoints/<generation>-<step>/` holds the images and `READY.json`, which names them
with their digests. A directory gets that name only when all of it is on the disk: it is written
under another name, synced, and renamed. What has no such name is rubbish of a crash and is removed
at the next start; nothing outside our own names is ever touched.

The spool is a help, not a promise: a checkpoint counts once the store has it. So a full or broken
disk is reported and the upload goes on from memory.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from dataclasses import dataclass

import msgspec

from supervisor import failpoints
from supervisor.errors import SupervisorError
from trainer_sdk.protocol.manifest import ShardEntry

READY = "READY.json"
UPLOADS = "uploads"
SPOOL_FORMAT = 1
MAX_READY_BYTES = 64 << 20
# A nesting bomb ends in RecursionError, bytes that are not UTF-8 in UnicodeDecodeError.
_NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_FINAL = re.compile(r"^(\d{10})-(\d{12})\Z")
_TEMPORARY = re.compile(r"^tmp-[0-9a-f]{32}\Z")
_NOTE = re.compile(r"^(\d{10})-(\d{12})\.json(\.tmp)?\Z")
PAGE_BYTES = 4096


class SpoolError(SupervisorError):
    """The local disk cannot take a checkpoint; the upload goes on without it."""

    error_id = "disk_io_error"


class SpoolFull(SpoolError):
    """No space left in the spool."""

    error_id = "disk_full"


class SpoolRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What READY.json says: one checkpoint's shards of this node. `key` is where each was to go."""

    fmt: int
    gen: int
    group: str
    step: int
    world: int
    shards: tuple[ShardEntry, ...]


class UploadTokens(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an upload under way can be resumed: shard "rank/name" to (key, token)."""

    fmt: int
    gen: int
    step: int
    shards: dict[str, tuple[str, str]]


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


class ImageWriter:
    """One image file, written chunk by chunk in any order by several threads, then synced.

    With O_DIRECT where the file system has it, which spares the page cache and is faster for large
    files; without it the data goes through the page cache and fsync.
    """

    def __init__(self, path: str, *, size_bytes: int) -> None:
        """Create the file and reserve its space.

        Raises:
            SpoolFull, SpoolError: nothing of use is left behind.
        """
        self._path = path
        self._size_bytes = size_bytes
        self.is_direct = True
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            try:
                self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.is_direct = False
                self._fd = os.open(path, flags, 0o600)
            padded = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
            try:
                os.posix_fallocate(self._fd, 0, padded)
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as error:
            raise spool_error(error, path) from error

    def write(self, padded: memoryview, offset: int) -> None:
        """Write a chunk. `padded` is page aligned and a multiple of the page size.

        Raises:
            SpoolFull, SpoolError: the file must be abandoned.
        """
        try:
            failpoints.hit("spool.write.before")
            done = 0
            while done < len(padded):
                done += os.pwrite(self._fd, padded[done:], offset + done)
            failpoints.hit("spool.write.after")
        except OSError as error:
            raise spool_error(error, self._path) from error

    def finish(self) -> None:
        """Cut to the image's size, sync, close. After an error the file must be abandoned."""
        try:
            os.ftruncate(self._fd, self._size_bytes)
            failpoints.hit("spool.fsync.before")
            os.fsync(self._fd)
            failpoints.hit("spool.fsync.after")
        except OSError as error:
            raise spool_error(error, self._path) from error
        finally:
            os.close(self._fd)
            self._fd = -1

    def abandon(self) -> None:
        """Close without a claim on what was written."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def spool_error(error: OSError, path: str) -> SpoolError:
    """Our error for what the operating system said about a file of the spool."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SpoolFull(
            f"no space for {path}: {error.strerror}",
            hint="free space there or set [spool] path to a larger disk",
        )
    return SpoolError(
        f"the spool cannot be written: {path}: {error.strerror}",
        hint="check the disk and its mount; checkpoints go to the store meanwhile",
    )


class Spool:
    """The spool folder of one job.

    Invariant: a directory with a final name is whole on the disk.
    """

    def __init__(self, root: str, job_id: str) -> None:
        """Make the folder ready and remove what a crash left.

        Raises:
            SpoolError, SpoolFull
        """
        self.path = os.path.join(root, job_id)
        self._checkpoints = os.path.join(self.path, "checkpoints")
        self._uploads = os.path.join(self.path, UPLOADS)
        try:
            for directory in (self._checkpoints, self._uploads):
                os.makedirs(directory, mode=0o700, exist_ok=True)
            for name in os.listdir(self._checkpoints):
                if _TEMPORARY.match(name):
                    shutil.rmtree(os.path.join(self._checkpoints, name))
        except OSError as error:
            raise spool_error(error, self.path) from error

    def begin(self) -> str:
        """A new directory for images that are about to be written."""
        path = os.path.join(self._checkpoints, f"tmp-{uuid.uuid4().hex}")
        try:
            os.mkdir(path, 0o700)
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
            _write_synced(os.path.join(directory, READY), msgspec.json.encode(record))
            _sync_directory(directory)
            failpoints.hit("spool.publish.before")
            if os.path.isdir(final):
                shutil.rmtree(final)
            os.rename(directory, final)
            failpoints.hit("spool.publish.after")
            _sync_directory(self._checkpoints)
        except OSError as error:
            raise spool_error(error, final) from error
        return SpooledCheckpoint(record=record, directory=final)

    def discard(self, directory: str) -> None:
        """Remove a directory that will not be published."""
        shutil.rmtree(directory, ignore_errors=True)

    def ready(self) -> list[SpooledCheckpoint]:
        """Every whole checkpoint, newest first by (generation, step) as numbers.

        A READY.json that cannot be read or contradicts its directory is passed over; of a disk that
        is gone there are none.
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
            record = _read_record(os.path.join(directory, READY))
            if record and (record.gen, record.step) == (int(match[1]), int(match[2])):
                found.append(SpooledCheckpoint(record=record, directory=directory))
        return sorted(found, key=lambda item: (item.record.gen, item.record.step), reverse=True)

    def evict(self, *, keep: int) -> int:
        """Remove all but the newest `keep` checkpoints (at least one stays).

        Returns:
            How many were removed.
        """
        old = self.ready()[max(1, keep) :]
        for item in old:
            shutil.rmtree(item.directory, ignore_errors=True)
        return len(old)

    def drop_foreign(self, *, gen: int, group: str) -> None:
        """Remove what another life of a job of this name left: sets of a generation that the log
        had not reached when `gen` was claimed, or of this very number by another group."""
        for item in self.ready():
            record = item.record
            if record.gen > gen or (record.gen == gen and record.group != group):
                shutil.rmtree(item.directory, ignore_errors=True)

    def remember_uploads(self, tokens: UploadTokens) -> None:
        """Note where uploads can be resumed; losing the note only costs sending again."""
        path = self._tokens_path(tokens.gen, tokens.step)
        try:
            failpoints.hit("spool.note.before")
            _write_synced(path + ".tmp", msgspec.json.encode(tokens))
            os.rename(path + ".tmp", path)
            failpoints.hit("spool.note.after")
        except OSError as error:
            raise spool_error(error, path) from error

    def recall_uploads(self, *, gen: int, step: int) -> UploadTokens | None:
        """What was noted of this checkpoint's uploads."""
        try:
            with open(self._tokens_path(gen, step), "rb") as file:
                tokens = msgspec.json.decode(file.read(MAX_READY_BYTES), type=UploadTokens)
        except (OSError, *_NOT_JSON):
            return None
        return tokens if tokens.fmt == SPOOL_FORMAT else None

    def forget_uploads(self, *, gen: int, step: int) -> None:
        """Remove the notes of this checkpoint and of older ones: they are settled.

        Raises:
            SpoolError: some are left, which costs nothing but their space.
        """
        try:
            for name in os.listdir(self._uploads):
                match = _NOTE.match(name)
                if match is not None and (int(match[1]), int(match[2])) <= (gen, step):
                    os.unlink(os.path.join(self._uploads, name))
        except OSError as error:
            raise spool_error(error, self._uploads) from error

    def _tokens_path(self, gen: int, step: int) -> str:
        return os.path.join(self._uploads, f"{gen:010d}-{step:012d}.json")


def _read_record(path: str) -> SpoolRecord | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        with open(fd, "rb") as file:
            record = msgspec.json.decode(file.read(MAX_READY_BYTES), type=SpoolRecord)
    except (OSError, *_NOT_JSON):
        return None
    return record if record.fmt == SPOOL_FORMAT else None


def _write_synced(path: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
