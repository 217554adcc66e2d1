"""The supervisor's error tree and the one table of exit codes.

Every error an operator can meet carries a stable `error_id` (listed in docs/errors.md), the
facts as attributes, and a `hint` that says what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import ClassVar, Final


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
        hint: what the operator does next; the class's `mend` where there is nothing better to say.
    """

    error_id: ClassVar[str] = "internal"
    mend: ClassVar[str] = "report it with the log around it; start again"
    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL
    is_retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.mend


class ConfigError(SupervisorError):
    """The configuration is wrong; the message lists every problem at once."""

    error_id = "config_invalid"
    mend = "mend every line that the message names; `lastgasp config schema` lists all settings"
    exit_code = ExitCode.CONFIG


class UsageError(SupervisorError):
    """The command line asks for something that cannot be done."""

    error_id = "usage"
    mend = "see `lastgasp VERB --help`"
    exit_code = ExitCode.USAGE


class AlreadyRunningError(SupervisorError):
    """Another supervisor holds this job on this node."""

    error_id = "already_running"
    mend = (
        "leave it to the one that runs (`lastgasp status`), or give the other job another [job] id"
    )
    exit_code = ExitCode.ALREADY_RUNNING


class DeadlineExceeded(SupervisorError):
    """An activity did not end before its deadline; what it left behind is said in the message."""

    error_id = "deadline_exceeded"
    mend = "try again; if it goes on, look at the store's and the network's speed"
    is_retryable = True


class StoreError(SupervisorError):
    """Root of everything an object store answers."""

    error_id = "store_error"
    mend = "check the store named in the message"
    exit_code = ExitCode.STORE_UNREACHABLE


class TransientStoreError(StoreError):
    """A retry may help; for a write the outcome is unknown until it is read back."""

    error_id = "store_unreachable"
    mend = "check the endpoint, the network and the proxy settings; `lastgasp doctor` tries them"
    is_retryable = True


class StoreThrottled(TransientStoreError):
    """The store asks to slow down (503 SlowDown, 429)."""

    error_id = "s3_throttled"
    mend = "try again in a while; lower [store] upload_threads or spread the prefixes"


class CredentialsExpired(TransientStoreError):
    """Credentials ran out; fresh ones may already be there."""

    error_id = "s3_credentials_expired"
    mend = "renew the credentials of this node; they are looked for again by themselves"


class PermanentStoreError(StoreError):
    """No retry helps: a person has to change something."""

    error_id = "store_refused"
    mend = "change what the message names, then start again"


class StoreAccessDenied(PermanentStoreError):
    """The store refuses this action for this key."""

    error_id = "s3_access_denied"
    mend = "give this node's role the permission that the message names"


class BucketMissing(PermanentStoreError):
    """The bucket or the directory of the store does not exist."""

    error_id = "store_not_found"
    mend = "create the bucket or directory, or mend [store] url"


class ObjectMissing(PermanentStoreError):
    """No object under this key."""

    error_id = "object_missing"
    mend = "`lastgasp verify` tells which checkpoint lacks it; look for lifecycle rules"

    def __init__(self, key: str, *, hint: str = "") -> None:
        super().__init__(f"no object {key!r} in the store", hint=hint)
        self.key = key


class ForeignObject(PermanentStoreError):
    """What stands under a key is nothing that was stored there, such as a link or a directory."""

    error_id = "store_foreign_object"
    mend = "remove what does not belong into the store; `lastgasp verify` lists what it hides"


class ChecksumMismatch(TransientStoreError):
    """Bytes that arrived differ from the bytes that were sent; sending again may help."""

    error_id = "store_checksum_mismatch"
    mend = (
        "if it goes on, something between here and the store changes bytes: test the "
        "memory and the network"
    )


class UploadAbandoned(PermanentStoreError):
    """This upload cannot go on (failed fsync, upload id gone): begin another under a new key."""

    error_id = "store_upload_abandoned"
    mend = "nothing: the next try begins anew; look for lifecycle rules if it happens often"


class StoreFull(PermanentStoreError):
    """No space or quota left in the store."""

    error_id = "store_full"
    mend = (
        "free space or raise the quota of the store; `lastgasp gc --delete` removes old checkpoints"
    )


class StoreClockSkew(PermanentStoreError):
    """This machine's clock differs too much from the store's for signed requests."""

    error_id = "s3_clock_skew"
    mend = "set this machine's clock (chrony, NTP)"


class StoreLacksConditionalPut(PermanentStoreError):
    """The store ignores create-if-absent, on which every safety rule rests."""

    error_id = "store_lacks_conditional_put"
    mend = "use a store with `If-None-Match: *`, or a file:// store"


class LogError(SupervisorError):
    """Root of what the commit log answers."""

    error_id = "log_error"
    mend = "see the message; `lastgasp ls` shows what the log holds"


class LogCorrupt(LogError):
    """A log record does not follow from its predecessor; nothing is guessed."""

    error_id = "log_corrupt"
    mend = "do not delete anything; compare the named slot with a backup or a bucket version"


class LogTooNew(LogError):
    """A record or part of a newer format; this version never skips what it cannot read."""

    error_id = "log_too_new"
    mend = "update lastgasp on this node"


class Fenced(LogError):
    """A newer generation took over; this group may not write any more."""

    error_id = "fenced"
    mend = "nothing: the job goes on elsewhere; stop whatever started it here"
    exit_code = ExitCode.FENCED


class OutcomeUnknown(LogError):
    """An append may or may not land; it must not be taken for either."""

    error_id = "commit_outcome_unknown"
    mend = "nothing: the next start finds out"
    is_retryable = True


class AppendRefused(LogError):
    """A rule of the log forbids this record on the present state."""

    error_id = "log_append_refused"
    mend = "see the rule in the message; `lastgasp ls` shows the present state"


class JobFinished(LogError):
    """The job is marked as finished; running it again does nothing."""

    error_id = "job_finished"
    mend = "to train on, give the job another [job] id"
    exit_code = ExitCode.DONE

    def __init__(self, step: int, *, hint: str = "") -> None:
        super().__init__(f"the job finished at step {step}", hint=hint)
        self.step = step


class NoCheckpointFound(LogError):
    """A job that was expected to resume has nothing to resume from."""

    error_id = "no_checkpoint_found"
    mend = "find out where the checkpoints went; `--allow-fresh` begins at step 0"
    exit_code = ExitCode.NO_CHECKPOINT


class NoGoodCheckpoint(LogError):
    """There are commits, but every one of them is marked bad: a person decides."""

    error_id = "no_good_checkpoint"
    mend = "look at `lastgasp ls` and `verify`; `lastgasp unpoison ID` takes a mark back"
    exit_code = ExitCode.NO_CHECKPOINT


class ManifestInvalid(LogError):
    """A part or commit that does not describe a whole checkpoint, or names what it may not."""

    error_id = "manifest_invalid"
    mend = "nothing: the next older checkpoint is used; find out who writes below the prefix"


class PartMissing(ManifestInvalid):
    """A part that a commit names is not there, or not visible yet."""

    error_id = "manifest_part_missing"
    mend = "nothing: the next older checkpoint is used; find out who deletes below the prefix"


class ShardError(SupervisorError):
    """A shard of a checkpoint cannot be used."""

    error_id = "shard_error"
    mend = "nothing: the next older checkpoint is used"


class ShardMissing(ShardError):
    """A shard that the manifest names is not there."""

    error_id = "shard_missing"
    mend = (
        "nothing: the next older checkpoint is used; look for lifecycle rules or people that delete"
    )


class ShardCorrupt(ShardError):
    """A shard's bytes differ from its digest, also after a second read."""

    error_id = "shard_corrupt"
    mend = "nothing: the next older checkpoint is used; test the disk or ask the store's provider"


# Ids that only appear in the log, in status and in metrics: (meaning, mend).
REPORTED: Final[Mapping[str, tuple[str, str]]] = {
    "duplicate_rank": (
        "A second process says that it is a rank which is connected already",
        "call attach() in the process that trains, and only there",
    ),
    "launch_unknown": (
        "A process of an earlier launch wants to join",
        "nothing: it is told to leave",
    ),
    "peer_denied": (
        "Another user, or one connection too many, tried to talk to the socket",
        "run the job and the supervisor as one user; look for processes that keep connections",
    ),
    "protocol_error": (
        "A peer on the socket broke the protocol and was dropped; the others go on",
        "find the process by the pid in the log line",
    ),
    "shard_invalid": (
        "An image whose digest is right is not an image of a state; it was set aside",
        "nothing: the next older checkpoint is used; find out who writes below the prefix",
    ),
    "state_mismatch": (
        "The script's state does not fit the checkpoint; the message names each difference",
        "put the script back as it was, or give the changed job another [job] id",
    ),
    "version_mismatch": (
        "Supervisor and SDK are of versions that do not understand each other",
        "install the same lastgasp version for both",
    ),
}
