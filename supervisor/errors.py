"""The supervisor's error tree and the one table of exit codes.

Every error an operator can meet carries a stable `error_id` (listed in docs/errors.md), the
facts as attributes, and a `hint` that says what to do next.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """What `lastgasp run` exits with; schedulers act on these (docs/exit-codes.md)."""

    DONE = 0
    USAGE = 64
    STORE_UNREACHABLE = 69
    INTERNAL = 70
    PREEMPTED_COMMITTED = 75
    PREEMPTED_OLDER_STANDS = 76
    FENCED = 77
    CONFIG = 78
    ALREADY_RUNNING = 79
    NO_CHECKPOINT = 81
    INTERRUPTED = 130
    TERMINATED = 143


class SupervisorError(Exception):
    """Root of everything the supervisor raises on purpose.

    Args:
        message: what went wrong, where, and what was got.
        hint: what the operator does next; empty only where nothing can be done.
    """

    error_id: ClassVar[str] = "internal"
    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL
    is_retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(SupervisorError):
    """The configuration is wrong; the message lists every problem at once."""

    error_id = "config_invalid"
    exit_code = ExitCode.CONFIG


class UsageError(SupervisorError):
    """The command line asks for something that cannot be done."""

    error_id = "usage"
    exit_code = ExitCode.USAGE


class AlreadyRunningError(SupervisorError):
    """Another supervisor holds this job on this node."""

    error_id = "already_running"
    exit_code = ExitCode.ALREADY_RUNNING


class DeadlineExceeded(SupervisorError):
    """An activity did not end before its deadline; what it left behind is said in the message."""

    error_id = "deadline_exceeded"
    is_retryable = True


class StoreError(SupervisorError):
    """Root of everything an object store answers."""

    error_id = "store_error"
    exit_code = ExitCode.STORE_UNREACHABLE


class TransientStoreError(StoreError):
    """A retry may help; for a write the outcome is unknown until it is read back."""

    error_id = "store_unreachable"
    is_retryable = True


class StoreThrottled(TransientStoreError):
    """The store asks to slow down (503 SlowDown, 429)."""

    error_id = "s3_throttled"


class CredentialsExpired(TransientStoreError):
    """Credentials ran out; fresh ones may already be there."""

    error_id = "s3_credentials_expired"


class PermanentStoreError(StoreError):
    """No retry helps: a person has to change something."""

    error_id = "store_refused"


class StoreAccessDenied(PermanentStoreError):
    """The store refuses this action for this key."""

    error_id = "s3_access_denied"


class BucketMissing(PermanentStoreError):
    """The bucket or the directory of the store does not exist."""

    error_id = "store_not_found"


class ObjectMissing(PermanentStoreError):
    """No object under this key."""

    error_id = "object_missing"

    def __init__(self, key: str, *, hint: str = "") -> None:
        super().__init__(f"no object {key!r} in the store", hint=hint)
        self.key = key


class ForeignObject(PermanentStoreError):
    """What stands under a key is nothing that was stored there, such as a link or a directory."""

    error_id = "store_foreign_object"


class ChecksumMismatch(TransientStoreError):
    """Bytes that arrived differ from the bytes that were sent; sending again may help."""

    error_id = "store_checksum_mismatch"


class UploadAbandoned(PermanentStoreError):
    """This upload cannot go on (failed fsync, upload id gone): begin another under a new key."""

    error_id = "store_upload_abandoned"


class StoreFull(PermanentStoreError):
    """No space or quota left in the store."""

    error_id = "store_full"


class StoreClockSkew(PermanentStoreError):
    """This machine's clock differs too much from the store's for signed requests."""

    error_id = "s3_clock_skew"


class StoreLacksConditionalPut(PermanentStoreError):
    """The store ignores create-if-absent, on which every safety rule rests."""

    error_id = "store_lacks_conditional_put"


class LogError(SupervisorError):
    """Root of what the commit log answers."""

    error_id = "log_error"


class LogCorrupt(LogError):
    """A log record does not follow from its predecessor; nothing is guessed."""

    error_id = "log_corrupt"


class LogTooNew(LogError):
    """A record or part of a newer format; this version never skips what it cannot read."""

    error_id = "log_too_new"


class Fenced(LogError):
    """A newer generation took over; this group may not write any more."""

    error_id = "fenced"
    exit_code = ExitCode.FENCED


class OutcomeUnknown(LogError):
    """An append may or may not land; it must not be taken for either."""

    error_id = "commit_outcome_unknown"
    is_retryable = True


class AppendRefused(LogError):
    """A rule of the log forbids this record on the present state."""

    error_id = "log_append_refused"


class JobFinished(LogError):
    """The job is marked as finished; running it again does nothing."""

    error_id = "job_finished"
    exit_code = ExitCode.DONE

    def __init__(self, step: int, *, hint: str = "") -> None:
        super().__init__(f"the job finished at step {step}", hint=hint)
        self.step = step


class NoCheckpointFound(LogError):
    """A job that was expected to resume has nothing to resume from."""

    error_id = "no_checkpoint_found"
    exit_code = ExitCode.NO_CHECKPOINT


class NoGoodCheckpoint(LogError):
    """There are commits, but every one of them is marked bad: a person decides."""

    error_id = "no_good_checkpoint"
    exit_code = ExitCode.NO_CHECKPOINT


class ManifestInvalid(LogError):
    """A part or commit that does not describe a whole checkpoint, or names what it may not."""

    error_id = "manifest_invalid"


class PartMissing(ManifestInvalid):
    """A part that a commit names is not there, or not visible yet."""

    error_id = "manifest_part_missing"


class ShardError(SupervisorError):
    """A shard of a checkpoint cannot be used."""

    error_id = "shard_error"


class ShardMissing(ShardError):
    """A shard that the manifest names is not there."""

    error_id = "shard_missing"


class ShardCorrupt(ShardError):
    """A shard's bytes differ from its digest, also after a second read."""

    error_id = "shard_corrupt"
