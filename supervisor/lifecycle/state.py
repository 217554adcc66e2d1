"""The state of one job on this node, and the policy that does not change while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from supervisor.lifecycle.inputs import Notice


class Phase(StrEnum):
    """Where the job stands (ARCHITECTURE section 4)."""

    STARTING = "starting"
    RESTORING = "restoring"
    TRAINING = "training"
    SAVING = "saving"
    EVACUATING = "evacuating"
    UPLOADING = "uploading"
    EVACUATED = "evacuated"
    STOPPING = "stopping"
    RELAUNCHING = "relaunching"
    FINISHED = "finished"
    FAILED = "failed"
    FENCED = "fenced"


TERMINAL = frozenset({Phase.FINISHED, Phase.FAILED, Phase.FENCED})


class PersistState(StrEnum):
    """How far a complete set has come."""

    NONE = "none"
    WAITING = "waiting"
    RUNNING = "running"
    FAILED = "failed"
    COMMITTED = "committed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Fixed for the daemon's life; from the configuration."""

    every_steps: int | None = None
    every_s: float | None = None
    max_crashes: int = 10
    backoff_base_s: float = 1.0
    backoff_cap_s: float = 60.0
    hang_limit_s: float | None = 1800.0
    attach_warning_s: float = 120.0
    persist_retry_s: float = 5.0
    finish_limit_s: float = 1800.0
    stop_patience_s: float = 20.0
    after_notice: str = "exit"
    save_on_advice: bool = True
    allow_fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One slot index over all ranks: it holds one checkpoint of the whole node, or nothing.

    Invariant: `sealed` names the ranks whose slot holds the image of (generation, step).
    """

    step: int | None = None
    generation: int = 0
    is_asked: bool = False
    asked_at: float = 0.0
    sealed: frozenset[int] = frozenset()
    replicas: frozenset[str] = frozenset()
    size_bytes: int = 0
    is_final: bool = False
    persist: PersistState = PersistState.NONE
    job: int = 0
    retry_at: float | None = None

    def is_complete(self, world_size: int) -> bool:
        """Whether every rank of the job sealed its image."""
        return self.step is not None and len(self.sealed) == world_size and world_size > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """What is known of a rank of the present generation."""

    incarnation: str = ""
    is_connected: bool = True
    is_welcomed: bool = False
    has_restored: bool = False
    has_slots: bool = False
    held_at: int | None = None
    is_ending: bool = False
    is_finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """Everything the lifecycle knows. `stop_step` is set while ranks are being brought to one."""

    policy: Policy
    phase: Phase = Phase.STARTING
    is_job_alive: bool = False
    launched_at: float = 0.0
    waiting_since: float = 0.0
    world_size: int = 0
    incarnation: str | None = None
    generation: int = 0
    is_claimed: bool = False
    is_claiming: bool = False
    are_images_ready: bool = False
    resume_step: int | None = None
    is_local_resume: bool = False
    local_generation: int | None = None
    started_fresh: bool = False
    ranks: dict[int, RankView] = field(default_factory=dict)
    columns: tuple[Column, ...] = (Column(), Column())
    num_jobs: int = 0
    next_save_at: float | None = None
    wanted_save: str | None = None
    has_committed: bool = False
    last_commit_step: int | None = None
    notices: tuple[Notice, ...] = ()
    stop_step: int | None = None
    stop_slot: int | None = None
    agree_at: float | None = None
    evacuate_until: float | None = None
    committed_since_notice: bool = False
    is_staged_fallback: bool = False
    num_crashes: int = 0
    relaunch_at: float | None = None
    exit_code: int | None = None
    after_stop: str = "exit"
    finish_step: int | None = None
    finish_since: float | None = None
    is_finish_recorded: bool = False
    has_left_early: bool = False
    warned_unattached: bool = False

    def with_rank(self, rank: int, **changes: object) -> JobState:
        """The state with one rank's view changed."""
        view = replace(self.ranks.get(rank, RankView()), **changes)  # type: ignore[arg-type]
        return replace(self, ranks={**self.ranks, rank: view})

    def with_column(self, slot: int, column: Column) -> JobState:
        """The state with one column replaced."""
        columns = list(self.columns)
        columns[slot] = column
        return replace(self, columns=tuple(columns))

    @property
    def notice(self) -> Notice | None:
        """The notice that counts: the earliest deadline of those that stand, a drill only if it
        stands alone."""
        return min(self.notices, key=lambda n: (n.is_drill, n.deadline_at), default=None)

    def may_commit(self, generation: int, step: int | None) -> bool:
        """Whether a set may be committed under our generation: it was staged in it, or is the very
        set that the claim named. Anything else may stem from what was marked bad."""
        is_claimed_set = self.is_local_resume and (generation, step) == (
            self.local_generation,
            self.resume_step,
        )
        return generation == self.generation or is_claimed_set

    @property
    def is_training(self) -> bool:
        """Whether every rank has its state and trains."""
        return (
            self.world_size > 0
            and len(self.ranks) == self.world_size
            and all(view.has_restored for view in self.ranks.values())
        )
