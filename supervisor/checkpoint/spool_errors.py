"""What a local disk can do to a checkpoint. None of it ends a save: the store gets it anyway."""

from __future__ import annotations

import errno

from supervisor.errors import ExitCode, SupervisorError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# After one of these the kernel may already have thrown away what it could not write.
# Source: fsync(2), "EIO"; Rebello et al., "Can Applications Recover from fsync Failures?"
_BROKEN = frozenset({errno.EIO, errno.ENXIO, errno.EREMOTEIO, errno.EUCLEAN, errno.EBADMSG})


class SpoolError(SupervisorError):
    """The local disk cannot take a checkpoint; the upload goes on without it.

    `is_suspect`: the device itself failed, so nothing more is written there in this life.
    """

    error_id = "disk_io_error"
    mend = "check the disk and its mount; checkpoints go to the store meanwhile"

    def __init__(self, message: str, *, hint: str = "", is_suspect: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.is_suspect = is_suspect


class SpoolFull(SpoolError):
    """No space left in the spool."""

    error_id = "disk_full"
    mend = "free space there or set [spool] path to a larger disk"


class SpoolSlow(SpoolError):
    """The local disk takes less than it must, or nothing at all."""

    error_id = "disk_slow"
    mend = "check the disk, or lower [spool] min_rate; checkpoints go to the store meanwhile"


class SpoolNotMounted(SpoolError):
    """The spool is not on the disk it should be on, or that is read-only."""

    error_id = "nvme_not_mounted"
    exit_code = ExitCode.CONFIG
    mend = "mount the disk, or mend [spool] path or require_mount"


def spool_error(error: OSError, path: str) -> SpoolError:
    """Our error for what the operating system said about a file of the spool."""
    if error.errno in _FULL:
        return SpoolFull(
            f"no space for {path}: {error.strerror}",
            hint="free space there or set [spool] path to a larger disk",
        )
    if error.errno == errno.EROFS:
        return SpoolNotMounted(
            f"the spool is read-only: {path}",
            hint="mount it for writing; checkpoints go to the store meanwhile",
        )
    return SpoolError(
        f"the spool cannot be written: {path}: {error.strerror}",
        hint="check the disk and its mount; checkpoints go to the store meanwhile",
        is_suspect=error.errno in _BROKEN,
    )
