"""What can happen to a job: frozen events, posted by the threads that wait.

`Moment` is the time and the ranks' progress at which the main thread handles an event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from supervisor.lifecycle.decision import Measured


class NoticeKind(StrEnum):
    """What a notice means (ARCHITECTURE: a message with a deadline)."""

    RECLAIM = "reclaim"
    ADVICE = "advice"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A preemption notice. `deadline_at` is in monotonic seconds; `source` names who said it."""

    source: str
    kind: NoticeKind
    deadline_at: float
    reason: str = ""
    is_drill: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When an event is handled.

    `steps` is each connected rank's last published boundary; `beat_age_s` the age of the freshest
    sign of life of any rank, or None without ranks; `measured` what this life has measured so far.
    """

    now: float
    steps: dict[int, int]
    beat_age_s: float | None = None
    measured: Measured = field(default_factory=Measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The daemon holds the job's lock. `is_taken_up`: a job of an earlier supervisor still runs."""

    is_taken_up: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLaunched:
    """torchrun runs."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobExited:
    """torchrun is gone. `code` is None when a supervisor that is not its parent saw it go."""

    code: int | None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStopped:
    """No process of the job is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFailed:
    """torchrun could not be started at all."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJoined:
    """A rank said hello. `generation` is 0 for a new life, else the one it is living in.

    `seals` are (slot, generation, step, image bytes) that its control page vouches for.
    """

    rank: int
    world_size: int
    incarnation: str
    generation: int
    has_restored: bool
    has_slots: bool = False
    seals: tuple[tuple[int, int, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLost:
    """A rank's connection ended; its process may live on and come back."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """The generation is ours.

    `resume_step` is None for a fresh start; with `is_local` it is that of a set on this node that
    was staged in `local_generation`. `is_adopted`: an earlier self had claimed it for this group.
    `resume_world` is the world size of the commit. `incarnation` is that of the ClaimGeneration
    which this answers: torchrun may have replaced the group meanwhile."""

    incarnation: str
    generation: int
    resume_step: int | None
    is_local: bool
    is_adopted: bool
    local_generation: int | None = None
    resume_world: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimFailed:
    """The log or the store refused, or could not be reached in time.

    `is_checkpoint_bad`: what the generation should resume from cannot be read; it is marked bad
    now, and the next claim names an older one.
    """

    incarnation: str
    error_id: str
    reason: str
    exit_code: int
    is_checkpoint_bad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesReady:
    """Every byte that the ranks of this node need was fetched and verified."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFailed:
    """`is_checkpoint_bad`: it was set aside and an older one may do."""

    generation: int
    reason: str
    is_checkpoint_bad: bool
    error_id: str = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRestored:
    """A rank has its state and begins to train at `step`."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRestoreFailed:
    """A rank could not take its state."""

    rank: int
    reason: str
    is_checkpoint_bad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlanned:
    """A rank knows the size of its image and needs slots. `keeps_slots`: those it has will do."""

    rank: int
    slot_bytes: int
    keeps_slots: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAtBoundary:
    """A rank holds at a boundary and waits for an order. `is_ending`: it has no step after it."""

    rank: int
    step: int
    is_ending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSealed:
    """A rank's slot holds its whole image of `step`."""

    rank: int
    slot: int
    step: int
    image_bytes: int
    replicas: str
    is_final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUnsealed:
    """A rank did not stage what it was asked to."""

    rank: int
    slot: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFinished:
    """Training on this rank ended by itself."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequested:
    """Someone asks for a checkpoint: training code, the command line, an advice."""

    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeReceived:
    """A source announces the end of the machine, or may be repeating it."""

    notice: Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeWithdrawn:
    """A source took its notice back."""

    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spooled:
    """All images of a checkpoint are on the local disk, with their digests.

    Here and below `job` is the number of the Persist that this answers, and `slot` is None for a
    set that came from the spool and lies in no slot."""

    job: int
    slot: int | None
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    """The log names this checkpoint: it is restorable from the store."""

    job: int
    slot: int | None
    step: int
    generation: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistFailed:
    """A checkpoint did not become durable. `is_cancelled`: we ourselves gave it up."""

    job: int
    slot: int | None
    step: int
    error_id: str
    reason: str
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRecorded:
    """The log says that the job is finished, or could not be told so."""

    is_durable: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedOff:
    """Our generation is over: a newer one was claimed."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed."""


Event = (
    Started
    | JobLaunched
    | JobExited
    | JobStopped
    | LaunchFailed
    | RankJoined
    | RankLost
    | Claimed
    | ClaimFailed
    | ImagesReady
    | FetchFailed
    | RankRestored
    | RankRestoreFailed
    | RankPlanned
    | RankAtBoundary
    | RankSealed
    | RankUnsealed
    | RankFinished
    | SaveRequested
    | NoticeReceived
    | NoticeWithdrawn
    | Spooled
    | CheckpointCommitted
    | PersistFailed
    | FinishRecorded
    | FencedOff
    | Tick
)
