"""What the lifecycle asks for: frozen actions, carried out by `daemon.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """Start torchrun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopJob:
    """Wait `patience_s` for the job to end by itself, then one SIGTERM, then the whole tree."""

    patience_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimGeneration:
    """Claim a generation for the group of this incarnation of rank 0.

    `in_memory`: (generation, step, slot) of the newest complete set of slots, which may be newer
    than any commit.
    """

    incarnation: str
    world_size: int
    allow_fresh: bool
    in_memory: tuple[int, int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WelcomeRank:
    """Tell a rank its generation and what it restores."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchImages:
    """Bring the images to be restored to this node, verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendImages:
    """Hand the verified images to a rank."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocateSlots:
    """Give a rank its image slots."""

    rank: int
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskSave:
    """Have every rank stage into `slot` at exactly boundary `step`."""

    step: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearSave:
    """No save is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskHold:
    """Have every rank wait for an order at its next boundary; show the notice's deadline."""

    deadline_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearHold:
    """No hold is asked for, no notice stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOrder:
    """Answer a rank that holds."""

    rank: int
    action: Literal["proceed", "stage", "exit", "resume"]
    step: int
    slot: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """Have every rank prove the equality of replicas anew."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Make the complete set in `slot` durable and commit it; every answer carries `job`."""

    job: int
    slot: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistFetched:
    """Make the restored local set durable under our generation; it lies in no slot."""

    job: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelPersist:
    """Give up making this set durable: something newer counts."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TellCommitted:
    """Let the ranks know that a step is restorable from the store."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFail:
    """Write FAIL: the trainers ended by themselves before the first commit of the generation."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFinish:
    """Write FINISH: the job is done for good."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """Mark what this generation was to restore as bad: the commit, or the local set."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TellFinished:
    """Let the ranks that wait in finish() go."""

    is_durable: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End the daemon."""

    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A line for the log; `level` as in STYLE section 8."""

    level: Literal["debug", "info", "warning", "error"]
    event: str
    fields: dict[str, object] = field(default_factory=dict)


Action = (
    LaunchJob
    | StopJob
    | ClaimGeneration
    | WelcomeRank
    | FetchImages
    | SendImages
    | AllocateSlots
    | AskSave
    | ClearSave
    | AskHold
    | ClearHold
    | SendOrder
    | Replan
    | Persist
    | PersistFetched
    | CancelPersist
    | TellCommitted
    | RecordFail
    | RecordFinish
    | SetAside
    | TellFinished
    | Exit
    | Report
)
