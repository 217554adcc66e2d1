"""How a life of the job ends: done, crashed, evacuated, fenced; and what comes after. Pure."""

from __future__ import annotations

from dataclasses import replace

from supervisor.lifecycle import columns, evacuation, saving
from supervisor.lifecycle.inputs import (
    FencedOff,
    FinishRecorded,
    JobExited,
    JobStopped,
    RankFinished,
    Tick,
)
from supervisor.lifecycle.outputs import (
    ClearHold,
    LaunchJob,
    RecordFail,
    RecordFinish,
    StopJob,
    TellFinished,
)
from supervisor.lifecycle.state import TERMINAL, Column, JobState, PersistState, Phase
from supervisor.lifecycle.turn import Turn

PREEMPTED_COMMITTED = 75
PREEMPTED_OLDER_STANDS = 76
FENCED = 77
# The job ended, but its end could not be made durable: not a success.
NOT_DURABLE = 70
INTERRUPTED = 130
TERMINATED = 143
HOLD_MARGIN_S = 30.0
NEVER_ATTACHED_HINT = (
    "the training script has not called trainer_sdk.attach(): no checkpoint can be taken; see the "
    "quick start in README.md"
)


def exit_code_after_notice(state: JobState) -> int:
    """What a notice makes the daemon exit with."""
    if state.notice is not None and state.notice.source == "sigint":
        return INTERRUPTED
    if state.committed_since_notice:
        return PREEMPTED_COMMITTED
    if state.notice is not None and state.notice.source == "sigterm" and not state.generation:
        return TERMINATED
    return PREEMPTED_OLDER_STANDS


def stop(turn: Turn, *, after: str, patience_s: float, code: int | None = None) -> None:
    """End every process of the job; `after` says what then: exit, fail, fenced or relaunch."""
    turn.set(phase=Phase.STOPPING, after_stop=after, exit_code=code)
    turn.do(StopJob(patience_s=patience_s))


def leave(turn: Turn, *, patience_s: float) -> None:
    """The evacuation is over: end the job, then exit or hold as configured."""
    state = turn.state
    if state.after_stop != "relaunch":
        turn.set(after_stop="leave")
    turn.report(
        "info" if state.committed_since_notice else "warning",
        "evacuation.completed",
        is_committed=state.committed_since_notice,
        last_commit_step=state.last_commit_step,
    )
    turn.set(phase=Phase.EVACUATED)
    turn.do(StopJob(patience_s=patience_s))


def crash(turn: Turn, *, code: int | None, detail: str) -> None:
    """The job ended by itself and not well: count it, wait, and start it again."""
    state = turn.state
    num_crashes = state.num_crashes + 1
    training_code = code if code is not None and code > 0 else 1
    turn.set(num_crashes=num_crashes)
    turn.report(
        "error", "job.crashed", exit_code=code, detail=detail, num_crashes=num_crashes,
        max_crashes=state.policy.max_crashes,
    )  # fmt: skip
    if state.is_claimed and not state.has_committed:
        turn.do(RecordFail(why=f"exit {code}: {detail}"[:200]))
    if num_crashes > state.policy.max_crashes:
        turn.report("error", "job.crash_loop", num_crashes=num_crashes, exit_code=training_code)
        stop(turn, after="fail", code=training_code, patience_s=0.0)
    else:
        stop(turn, after="relaunch", patience_s=0.0)


def drop_incomplete(turn: Turn) -> None:
    """What not every rank sealed can never be restored."""
    kept = []
    for column in turn.state.columns:
        is_kept = column.is_complete(turn.state.world_size)
        kept.append(replace(column, is_asked=False, is_final=False) if is_kept else Column())
    turn.set(columns=tuple(kept))


def on_job_exited(turn: Turn, event: JobExited) -> None:
    """torchrun is gone: was it meant to be?"""
    state = turn.state
    turn.set(is_job_alive=False)
    turn.report("info", "job.exited", exit_code=event.code, phase=state.phase.value)
    if state.phase is Phase.EVACUATING:
        evacuation.fall_back(turn, reason="the job ended before it reached a boundary")
    elif state.phase in (Phase.STARTING, Phase.RESTORING, Phase.TRAINING, Phase.SAVING):
        if _is_done(state, event):
            _done(turn)
        else:
            crash(turn, code=event.code, detail=event.detail)
    elif state.phase is Phase.UPLOADING and state.is_staged_fallback:
        turn.report("debug", "job.exited_during_upload")


def _is_done(state: JobState, event: JobExited) -> bool:
    has_finished = bool(state.ranks) and all(v.is_finished for v in state.ranks.values())
    return event.code == 0 or has_finished


def _done(turn: Turn) -> None:
    """Training ended well: what is staged is made durable first, then the end is recorded."""
    state = turn.state
    if not state.ranks:
        turn.report("warning", "rank.never_attached", hint=NEVER_ATTACHED_HINT)
        stop(turn, after="finished", code=0, patience_s=0.0)
        return
    if state.finish_step is None:
        # Not recorded as finished: the script may have left early, and a later start must go on.
        turn.report(
            "warning",
            "finish.missing",
            hint="call run.finish() or use the context manager, so that the last steps are saved "
            "and the end is recorded",
        )
        turn.set(has_left_early=True, finish_since=turn.now)
    drop_incomplete(turn)
    turn.set(phase=Phase.SAVING)
    record_finish_if_due(turn)


def on_rank_finished(turn: Turn, event: RankFinished) -> None:
    """Training on a rank came to its end."""
    turn.state = turn.state.with_rank(event.rank, is_finished=True, held_at=None)
    if turn.state.finish_step is None:
        turn.set(finish_step=event.step, finish_since=turn.now)
    record_finish_if_due(turn)


def record_finish_if_due(turn: Turn) -> None:
    """Record the end once all ranks ended and nothing newer waits to be committed."""
    state = turn.state
    is_ending = state.finish_step is not None or state.has_left_early
    if not is_ending or state.is_finish_recorded:
        return
    has_ended = all(view.is_finished for view in state.ranks.values()) or not state.is_job_alive
    newest = columns.newest_complete(state)
    is_open = newest is not None and state.columns[newest].persist is not PersistState.COMMITTED
    if not has_ended or is_open or columns.asked_slot(state) is not None:
        return
    turn.set(is_finish_recorded=True)
    if state.finish_step is not None:
        turn.do(RecordFinish(step=state.finish_step))
    else:
        stop(turn, after="finished", code=0, patience_s=0.0)


def on_finish_recorded(turn: Turn, event: FinishRecorded) -> None:
    """The end is durable, or could not be made so: the ranks may go."""
    turn.do(TellFinished(is_durable=event.is_durable, reason=event.reason))
    if turn.state.phase in TERMINAL:
        return
    if event.is_durable:
        turn.report("info", "job.finished", step=turn.state.finish_step)
        stop(turn, after="finished", code=0, patience_s=60.0)
    else:
        turn.report("error", "finish.not_recorded", reason=event.reason)
        stop(turn, after="fail", code=NOT_DURABLE, patience_s=60.0)


def on_fenced(turn: Turn, event: FencedOff) -> None:
    """Another launch took over: our trainers must not go on."""
    if turn.state.phase in TERMINAL or turn.state.phase is Phase.STOPPING:
        return
    if event.generation != turn.state.generation or not turn.state.is_claimed:
        return  # about an older life of ours, which our own next claim has ended
    turn.report("error", "generation.fenced", generation=event.generation)
    stop(turn, after="fenced", code=FENCED, patience_s=0.0)


def on_job_stopped(turn: Turn, event: JobStopped) -> None:
    """No process is left: what was decided when the stop began now happens."""
    state = turn.state
    turn.set(is_job_alive=False)
    if state.phase not in (Phase.STOPPING, Phase.EVACUATED):
        return
    code = state.exit_code if state.exit_code is not None else 0
    turn.report("info", "job.stopped", then=state.after_stop)
    if state.after_stop == "relaunch":
        _relaunch_at(turn, turn.now + _backoff_s(state))
    elif state.after_stop == "leave":
        _leave_or_hold(turn)
    else:
        phases = {"fenced": Phase.FENCED, "fail": Phase.FAILED, "finished": Phase.FINISHED}
        turn.exit(phases.get(state.after_stop, Phase.EVACUATED), code)


def _leave_or_hold(turn: Turn) -> None:
    """A drill relaunches at once, unless a true notice came meanwhile; `hold` waits for the end
    that was announced and relaunches if the machine outlives it."""
    notice = turn.state.notice
    if notice is None or notice.is_drill:
        _relaunch_at(turn, turn.now)
    elif turn.state.policy.after_notice == "hold" and notice.source not in ("sigterm", "sigint"):
        _relaunch_at(turn, max(turn.now, notice.deadline_at + HOLD_MARGIN_S))
    else:
        turn.exit(Phase.EVACUATED, exit_code_after_notice(turn.state))


def _backoff_s(state: JobState) -> float:
    if state.num_crashes == 0:
        return 0.0
    doubled = state.policy.backoff_base_s * 2.0 ** min(state.num_crashes - 1, 20)
    return min(state.policy.backoff_cap_s, doubled)


def _relaunch_at(turn: Turn, at: float) -> None:
    drop_incomplete(turn)
    turn.do(ClearHold())
    turn.set(
        phase=Phase.RELAUNCHING,
        relaunch_at=at,
        ranks={},
        incarnation=None,
        is_claimed=False,
        is_claiming=False,
        are_images_ready=False,
        notices=(),
        stop_step=None,
        stop_slot=None,
        evacuate_until=None,
        is_staged_fallback=False,
        exit_code=None,
        after_stop="exit",
        finish_step=None,
        finish_since=None,
        wanted_save=None,
    )
    turn.report("info", "relaunch.scheduled", wait_s=round(at - turn.now, 3))


def on_tick(turn: Turn, event: Tick) -> None:
    """Everything that happens because time passed."""
    state = turn.state
    if state.phase is Phase.RELAUNCHING and turn.now >= (state.relaunch_at or 0.0):
        turn.set(phase=Phase.STARTING, relaunch_at=None, launched_at=turn.now)
        turn.do(LaunchJob())
    elif state.phase in (Phase.STARTING, Phase.RESTORING, Phase.TRAINING, Phase.SAVING):
        _watch_progress(turn)
        _watch_training(turn)
    elif state.phase in (Phase.EVACUATING, Phase.UPLOADING):
        evacuation.on_tick(turn)


def _watch_training(turn: Turn) -> None:
    if turn.state.phase not in saving.ACTIVE:
        return
    saving.retry_due(turn)
    saving.drop_overdue_ask(turn)
    saving.schedule(turn)
    since = turn.state.finish_since
    if since is not None and turn.now - since > turn.state.policy.finish_limit_s:
        reason = "the final checkpoint could not be made durable in time"
        turn.report("error", "finish.not_recorded", reason=reason)
        turn.do(TellFinished(is_durable=False, reason=reason))
        stop(turn, after="fail", code=NOT_DURABLE, patience_s=60.0)


def _waits_for_ranks(state: JobState) -> bool:
    """Whether it is the ranks that the start waits for, and not our own claim or download."""
    is_theirs = not state.is_claiming and (state.phase is Phase.STARTING or state.are_images_ready)
    return state.is_job_alive and bool(state.ranks) and is_theirs


def _watch_progress(turn: Turn) -> None:
    state = turn.state
    waited_s = turn.now - state.launched_at
    is_silent = state.is_job_alive and not state.ranks
    if is_silent and waited_s > state.policy.attach_warning_s and not state.warned_unattached:
        turn.set(warned_unattached=True)
        turn.report("warning", "rank.never_attached", hint=NEVER_ATTACHED_HINT, waited_s=waited_s)
    limit_s = state.policy.hang_limit_s
    if limit_s is not None and state.phase in (Phase.STARTING, Phase.RESTORING):
        stuck_s = turn.now - state.waiting_since
        if _waits_for_ranks(state) and stuck_s > limit_s:
            turn.report("error", "job.hung", beat_age_s=round(stuck_s, 1), limit_s=limit_s)
            crash(turn, code=None, detail=f"not every rank came to training in {stuck_s:.0f} s")
        return
    beat_age_s = turn.moment.beat_age_s
    if limit_s is None or beat_age_s is None or state.phase not in saving.ACTIVE:
        return
    if state.is_job_alive and beat_age_s > limit_s and state.finish_step is None:
        turn.report("error", "job.hung", beat_age_s=round(beat_age_s, 1), limit_s=limit_s)
        crash(turn, code=None, detail=f"no progress for {beat_age_s:.0f} s")
