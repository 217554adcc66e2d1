"""The table from events to handlers, and the pairs that cannot happen. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from supervisor.lifecycle import ending, evacuation, inputs, joining, saving
from supervisor.lifecycle.inputs import Event, Moment
from supervisor.lifecycle.outputs import Action
from supervisor.lifecycle.state import TERMINAL, JobState, Phase
from supervisor.lifecycle.turn import Turn

HANDLERS: dict[type[Event], Callable[[Turn, Any], None]] = {
    inputs.Started: joining.on_started,
    inputs.JobLaunched: joining.on_job_launched,
    inputs.LaunchFailed: joining.on_launch_failed,
    inputs.JobExited: ending.on_job_exited,
    inputs.JobStopped: ending.on_job_stopped,
    inputs.RankJoined: joining.on_rank_joined,
    inputs.RankLost: joining.on_rank_lost,
    inputs.Claimed: joining.on_claimed,
    inputs.ClaimFailed: joining.on_claim_failed,
    inputs.ImagesReady: joining.on_images_ready,
    inputs.FetchFailed: joining.on_fetch_failed,
    inputs.RankRestored: joining.on_rank_restored,
    inputs.RankRestoreFailed: joining.on_rank_restore_failed,
    inputs.RankPlanned: joining.on_rank_planned,
    inputs.RankAtBoundary: evacuation.on_rank_at_boundary,
    inputs.RankSealed: saving.on_rank_sealed,
    inputs.RankUnsealed: saving.on_rank_unsealed,
    inputs.RankFinished: ending.on_rank_finished,
    inputs.SaveRequested: saving.on_save_requested,
    inputs.NoticeReceived: evacuation.on_notice,
    inputs.NoticeWithdrawn: evacuation.on_notice_withdrawn,
    inputs.Spooled: saving.on_spooled,
    inputs.CheckpointCommitted: saving.on_committed,
    inputs.PersistFailed: saving.on_persist_failed,
    inputs.FinishRecorded: ending.on_finish_recorded,
    inputs.FencedOff: ending.on_fenced,
    inputs.Tick: ending.on_tick,
}

# The daemon starts once, and only this posts Started. Everything else comes from threads and
# processes that may be late, so it is answered in every phase.
ILLEGAL: frozenset[tuple[Phase, type[Event]]] = frozenset(
    (phase, inputs.Started) for phase in Phase if phase is not Phase.STARTING
)


class IllegalTransition(AssertionError):
    """An event in a phase in which it cannot happen: a defect of the daemon."""


def step(state: JobState, event: Event, moment: Moment) -> tuple[JobState, list[Action]]:
    """What an event changes, and what is to be done about it.

    Raises:
        IllegalTransition: the pair is listed in `ILLEGAL`.
    """
    if (state.phase, type(event)) in ILLEGAL:
        raise IllegalTransition(f"{type(event).__name__} in phase {state.phase.value}")
    turn = Turn(state, moment)
    if state.phase in TERMINAL:
        return state, []
    HANDLERS[type(event)](turn, event)
    return turn.state, turn.actions
