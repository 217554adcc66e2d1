"""A notice: bring the ranks to one boundary, stage, upload, leave. Pure.

Also the end of training, which stages its final image in the same way: every rank waits at the
same boundary and is told what to do.
"""

from __future__ import annotations

from supervisor.lifecycle import agreement, columns, ending, saving
from supervisor.lifecycle.decision import Choice, Decision, decide
from supervisor.lifecycle.inputs import (
    Notice,
    NoticeKind,
    NoticeReceived,
    NoticeWithdrawn,
    RankAtBoundary,
    SaveRequested,
)
from supervisor.lifecycle.outputs import (
    AskHold,
    CancelPersist,
    ClearHold,
    ClearSave,
    SendOrder,
    TellFinished,
)
from supervisor.lifecycle.state import Column, PersistState, Phase
from supervisor.lifecycle.turn import Turn

# A rank publishes its boundary moments before it says that it holds there. Waiting so long for the
# word of a rank at the very boundary where others hold saves everyone a step.
AGREE_GRACE_S = 0.05
# What is left of the lead time after the images are staged must do for upload and commit; without
# a measured rate this share of it is kept.
UNMEASURED_RESERVE = 0.25
# Deadlines are computed anew at each look, so a repeated notice's wanders a little.
SAME_DEADLINE_S = 0.5
# A machine that is still there after its deadline goes on uploading for so long.
OVERTIME_S = 30.0
# Advice that comes before the first step is heeded at the first step.
_HEEDS_ADVICE = frozenset({Phase.STARTING, Phase.RESTORING, Phase.TRAINING, Phase.SAVING})


def on_notice(turn: Turn, event: NoticeReceived) -> None:
    """Act on a notice: an advice asks for a save, everything else ends this machine's part."""
    notice = event.notice
    state = turn.state
    if notice.kind is NoticeKind.ADVICE:
        turn.report("info", "notice.received", source=notice.source, kind=notice.kind.value)
        if state.policy.save_on_advice and state.phase in _HEEDS_ADVICE:
            saving.on_save_requested(turn, SaveRequested(source=notice.source))
        return
    before = state.notice
    _enter(turn, notice)
    standing = turn.state.notice
    if standing is before or standing is None:
        return
    facts = {
        "source": standing.source,
        "kind": standing.kind.value,
        "lead_time_s": round(standing.deadline_at - turn.now, 3),
        "reason": standing.reason,
    }
    if before is None:
        turn.report("warning", "notice.received", **facts)
        turn.set(committed_since_notice=False)
        _begin(turn, standing)
        return
    turn.report("warning", "notice.sooner", **facts)
    if turn.state.phase is Phase.EVACUATING:
        turn.set(evacuate_until=_evacuate_until(turn, standing))
        turn.do(AskHold(deadline_at=standing.deadline_at))


def _enter(turn: Turn, notice: Notice) -> None:
    """One notice stands for each source: its earliest. A repetition changes nothing."""
    others = tuple(n for n in turn.state.notices if n.source != notice.source)
    same = [n for n in turn.state.notices if n.source == notice.source]
    if same and notice.deadline_at >= same[0].deadline_at - SAME_DEADLINE_S:
        return
    turn.set(notices=(*others, notice))


def _begin(turn: Turn, notice: Notice) -> None:
    phase = turn.state.phase
    if phase in saving.ACTIVE and turn.state.is_job_alive:
        if turn.state.finish_step is None:
            _choose(turn, notice)
    elif phase in (Phase.STARTING, Phase.RESTORING):
        # Nothing was trained in this life: the checkpoint it was to resume from stands.
        turn.report("warning", "evacuation.nothing_to_save", resume_step=turn.state.resume_step)
        is_durable = turn.state.resume_step is not None and not turn.state.is_local_resume
        turn.set(committed_since_notice=is_durable)
        if turn.state.is_job_alive:
            ending.leave(turn, patience_s=0.0)
        else:
            turn.exit(Phase.EVACUATED, ending.exit_code_after_notice(turn.state))
    elif phase is Phase.RELAUNCHING:
        turn.set(committed_since_notice=turn.state.last_commit_step is not None)
        turn.exit(Phase.EVACUATED, ending.exit_code_after_notice(turn.state))
    elif phase is Phase.STOPPING and turn.state.after_stop == "relaunch":
        turn.set(committed_since_notice=turn.state.last_commit_step is not None)
        turn.set(after_stop="leave")


def _choose(turn: Turn, notice: Notice) -> None:
    state = turn.state
    newest = columns.newest_complete(state)
    column = state.columns[newest] if newest is not None else None
    is_open = column is not None and column.persist is not PersistState.COMMITTED
    decision = decide(
        turn.moment.measured,
        time_left_s=notice.deadline_at - turn.now,
        state_bytes=max((c.size_bytes for c in state.columns), default=0),
        staged_remaining_bytes=column.size_bytes if column is not None and is_open else None,
    )
    _report_decision(turn, decision)
    if decision.choice is Choice.STAGED and newest is not None:
        turn.set(phase=Phase.UPLOADING, is_staged_fallback=True)
        if column is not None and column.persist is not PersistState.RUNNING:
            saving.persist(turn, newest)
        return
    _withdraw_ask(turn)
    turn.set(
        phase=Phase.EVACUATING,
        stop_step=None,
        stop_slot=None,
        agree_at=None,
        evacuate_until=_evacuate_until(turn, notice),
    )
    turn.do(AskHold(deadline_at=notice.deadline_at))
    _agree(turn)


def _report_decision(turn: Turn, decision: Decision) -> None:
    turn.report(
        "info",
        "evacuation.decided",
        choice=decision.choice.value,
        time_left_s=round(decision.time_left_s, 3),
        fresh_needs_s=round(decision.fresh_needs_s, 3),
        staged_needs_s=decision.staged_needs_s and round(decision.staged_needs_s, 3),
    )


def _evacuate_until(turn: Turn, notice: Notice) -> float:
    """The instant after which a fresh image could no longer be uploaded."""
    left_s = max(0.0, notice.deadline_at - turn.now)
    rate = turn.moment.measured.durable_bytes_per_s
    size_bytes = max((column.size_bytes for column in turn.state.columns), default=0)
    reserve_s = left_s * UNMEASURED_RESERVE
    if rate and size_bytes:
        reserve_s = min(left_s, size_bytes / rate + turn.moment.measured.commit_s)
    return notice.deadline_at - reserve_s


def _withdraw_ask(turn: Turn) -> None:
    """A periodic save that no rank has begun gives its slot back; one half staged is let go."""
    slot = columns.asked_slot(turn.state)
    if slot is not None:
        turn.state = turn.state.with_column(slot, Column())
        turn.do(ClearSave())


def on_rank_at_boundary(turn: Turn, event: RankAtBoundary) -> None:
    """A rank waits: on the way to the stop step, or at the end of its training."""
    turn.state = turn.state.with_rank(event.rank, held_at=event.step, is_ending=event.is_ending)
    if turn.state.phase is Phase.EVACUATING:
        _agree(turn)
    elif turn.state.phase is Phase.UPLOADING:
        # The newest staged image is being committed; there is no time for another.
        pass
    elif turn.state.phase in (*saving.ACTIVE, Phase.STARTING, Phase.RESTORING):
        if event.is_ending:
            stage_final_if_due(turn)
        else:  # it saw the hold of a notice that is gone
            turn.state = turn.state.with_rank(event.rank, held_at=None)
            turn.do(SendOrder(rank=event.rank, action="resume", step=event.step))
    else:
        turn.do(SendOrder(rank=event.rank, action="exit", step=event.step))


def _held(turn: Turn) -> dict[int, int]:
    return {
        rank: view.held_at for rank, view in turn.state.ranks.items() if view.held_at is not None
    }


def _agree(turn: Turn) -> None:
    held = _held(turn)
    passed = {rank: turn.moment.steps.get(rank, 0) for rank in turn.state.ranks if rank not in held}
    ending_at = [step for rank, step in held.items() if turn.state.ranks[rank].is_ending]
    # A rank that came to the end of its training has no step after this one.
    target = max(ending_at) if ending_at else agreement.stop_step(held, passed)
    if target is None:
        return
    if target > max(held.values()):
        if turn.state.agree_at is None:
            turn.set(agree_at=turn.now + AGREE_GRACE_S)
        if turn.now < (turn.state.agree_at or 0.0):
            return
    if turn.state.stop_step is not None and turn.state.stop_step != target:
        turn.set(stop_slot=None)
    turn.set(stop_step=target)
    for rank in agreement.to_release(held, target):
        turn.state = turn.state.with_rank(rank, held_at=None)
        turn.do(SendOrder(rank=rank, action="proceed", step=target))
    if turn.state.stop_slot is None and agreement.is_reached(
        _held(turn), world_size=turn.state.world_size, target=target
    ):
        _stage_all(turn, target)


def _stage_all(turn: Turn, step: int) -> None:
    newest = columns.newest_complete(turn.state)
    if newest is not None and turn.state.columns[newest].step == step:
        on_set_complete(turn, newest)  # a periodic save took this very boundary
        return
    slot = columns.writable_slot(turn.state, may_cancel=True)
    if slot is None or not all(view.has_slots for view in turn.state.ranks.values()):
        fall_back(turn, reason="the ranks have no image slots yet")
        return
    if turn.state.columns[slot].persist is PersistState.RUNNING:
        turn.do(CancelPersist(slot=slot))
    turn.state = columns.ask(turn.state, slot, step=step, now=turn.now)
    turn.set(stop_slot=slot)
    for rank in sorted(turn.state.ranks):
        turn.do(SendOrder(rank=rank, action="stage", step=step, slot=slot))


def stage_again(turn: Turn) -> None:
    """The set at the stop step was not sound; the ranks still stand there."""
    if turn.state.stop_step is not None and turn.state.phase is Phase.EVACUATING:
        turn.set(stop_slot=None)
        _stage_all(turn, turn.state.stop_step)


def on_set_complete(turn: Turn, slot: int) -> None:
    """Every rank's image of the stop step is ours: the ranks may go, the upload begins."""
    column = turn.state.columns[slot]
    if column.step != turn.state.stop_step:
        return
    turn.set(phase=Phase.UPLOADING)
    for rank in sorted(turn.state.ranks):
        turn.do(SendOrder(rank=rank, action="exit", step=column.step or 0))
    if column.persist is PersistState.COMMITTED:
        turn.set(committed_since_notice=True)
        on_upload_settled(turn, column.step or 0)
    elif column.persist is not PersistState.RUNNING:
        saving.persist(turn, slot)


def fall_back(turn: Turn, *, reason: str) -> None:
    """No fresh image in time: commit the newest staged one, or leave with what is committed."""
    newest = columns.newest_complete(turn.state)
    turn.report("warning", "deadline.missed", reason=reason)
    if newest is None or turn.state.columns[newest].persist is PersistState.COMMITTED:
        ending.leave(turn, patience_s=0.0)  # nobody was told to leave, so nobody will by himself
        return
    turn.set(phase=Phase.UPLOADING, is_staged_fallback=True)
    if turn.state.columns[newest].persist is not PersistState.RUNNING:
        saving.persist(turn, newest)


def on_upload_settled(turn: Turn, step: int) -> None:
    """A commit landed during the evacuation: if it is the newest we hold, leave."""
    newest = columns.newest_complete(turn.state)
    if newest is not None and (turn.state.columns[newest].step or 0) > step:
        return
    is_told = not turn.state.is_staged_fallback
    ending.leave(turn, patience_s=turn.state.policy.stop_patience_s if is_told else 0.0)


def stage_final_if_due(turn: Turn) -> None:
    """All ranks came to the end of training: stage the final image, or let them end without."""
    state = turn.state
    held = _held(turn)
    is_end = all(state.ranks[rank].is_ending for rank in held)
    if state.phase not in saving.ACTIVE or len(held) < state.world_size or not held or not is_end:
        return
    if columns.asked_slot(state) is not None and state.finish_step is not None:
        return
    steps = set(held.values())
    if len(steps) > 1:
        end_without_image(turn, reason=f"the ranks ended at different steps: {sorted(steps)}")
        return
    if not all(view.has_slots for view in state.ranks.values()):
        end_without_image(turn, reason="the ranks have no image slots")
        return
    step = steps.pop()
    newest = columns.newest_complete(state)
    if newest is not None and state.columns[newest].is_final:
        return
    _withdraw_ask(turn)
    slot = columns.writable_slot(turn.state)
    if slot is None:
        return  # an upload is under way; its end brings us here again
    turn.state = columns.ask(turn.state, slot, step=step, now=turn.now)
    turn.set(finish_step=step, finish_since=turn.now)
    for rank in sorted(turn.state.ranks):
        turn.do(SendOrder(rank=rank, action="stage", step=step, slot=slot))


def end_without_image(turn: Turn, *, reason: str) -> None:
    """The final image cannot be had: the end is not durable, and the ranks are told so."""
    turn.report("error", "finish.not_recorded", reason=reason)
    held = _held(turn)
    for rank, step in sorted(held.items()):
        turn.do(SendOrder(rank=rank, action="proceed", step=step))
    turn.set(finish_step=max(held.values(), default=0), is_finish_recorded=True)
    turn.do(TellFinished(is_durable=False, reason=reason))
    ending.stop(turn, after="fail", code=ending.NOT_DURABLE, patience_s=60.0)


def on_notice_withdrawn(turn: Turn, event: NoticeWithdrawn) -> None:
    """Back to training where that is still possible, else relaunch after the stop."""
    left = tuple(notice for notice in turn.state.notices if notice.source != event.source)
    if len(left) == len(turn.state.notices):
        return
    turn.report("info", "notice.withdrawn", source=event.source, phase=turn.state.phase.value)
    turn.set(notices=left)
    if left:
        return  # others stand: the machine still goes
    is_training_on = turn.state.phase is Phase.UPLOADING and turn.state.is_staged_fallback
    if turn.state.phase is Phase.EVACUATING or is_training_on:
        turn.do(ClearHold())
        for rank, step in sorted(_held(turn).items()):
            turn.state = turn.state.with_rank(rank, held_at=None)
            turn.do(SendOrder(rank=rank, action="resume", step=step))
        turn.set(
            phase=Phase.SAVING,
            stop_step=None,
            stop_slot=None,
            evacuate_until=None,
            is_staged_fallback=False,
        )
    elif turn.state.phase in (Phase.UPLOADING, Phase.EVACUATED, Phase.STOPPING):
        turn.set(after_stop="relaunch", exit_code=None)


def on_tick(turn: Turn) -> None:
    """Keep an evacuation inside its time."""
    state = turn.state
    if state.phase is Phase.EVACUATING and state.evacuate_until is not None:
        if turn.now >= state.evacuate_until:
            late = sorted(r for r, view in state.ranks.items() if view.held_at is None)
            fall_back(turn, reason=f"ranks {late} did not reach a boundary in time")
        else:
            _agree(turn)
    elif state.phase is Phase.UPLOADING:
        if state.notice is not None and turn.now >= state.notice.deadline_at + OVERTIME_S:
            turn.report("error", "deadline.missed", reason="the upload did not end in time")
            ending.leave(turn, patience_s=0.0)
        else:
            saving.retry_due(turn)
