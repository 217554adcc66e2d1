"""Periodic and requested saves: when, into which slot, and what becomes of them. Pure."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from supervisor.lifecycle import columns, ending, evacuation
from supervisor.lifecycle.inputs import (
    CheckpointCommitted,
    PersistFailed,
    RankSealed,
    RankUnsealed,
    SaveRequested,
    Spooled,
)
from supervisor.lifecycle.outputs import (
    AskSave,
    CancelPersist,
    ClearSave,
    Persist,
    Replan,
    TellCommitted,
)
from supervisor.lifecycle.state import Column, JobState, PersistState, Phase
from supervisor.lifecycle.turn import Turn

ACTIVE = frozenset({Phase.TRAINING, Phase.SAVING})
# A control page is seen by a rank within microseconds, but a rank that is descheduled between
# publishing its boundary and looking at the page may be this late.
VISIBILITY_S = 0.02
ASK_LIMIT_S = 120.0


def schedule(turn: Turn) -> None:
    """Ask for the next save if one is due and a slot is free."""
    state = turn.state
    if not _may_ask(state):
        return
    step = _next_step(turn)
    slot = columns.writable_slot(state)
    if step is None or slot is None:
        return
    turn.state = columns.ask(state, slot, step=step, now=turn.now)
    turn.do(AskSave(step=step, slot=slot))


def _may_ask(state: JobState) -> bool:
    return (
        state.phase in ACTIVE
        and state.is_training
        and all(view.has_slots and not view.is_finished for view in state.ranks.values())
        and all(view.held_at is None for view in state.ranks.values())
        and columns.asked_slot(state) is None
        and state.finish_step is None
    )


def _next_step(turn: Turn) -> int | None:
    """The next boundary to save at that every rank can still reach, or None if nothing is due."""
    policy = turn.state.policy
    front = max(turn.moment.steps.values(), default=turn.state.resume_step or 0)
    step_s = turn.moment.measured.step_p50_s
    earliest = front + 1 + (ceil(VISIBILITY_S / step_s) if step_s else 0)
    if turn.state.wanted_save is not None:
        return earliest
    if policy.every_s is not None:
        if turn.state.next_save_at is None:
            turn.set(next_save_at=turn.now + policy.every_s)
        elif turn.now >= turn.state.next_save_at:
            return earliest
    if policy.every_steps is not None:
        return -(-earliest // policy.every_steps) * policy.every_steps
    return None


def on_save_requested(turn: Turn, event: SaveRequested) -> None:
    """Save at the next boundary that all ranks can reach; several requests make one save."""
    turn.set(wanted_save=turn.state.wanted_save or event.source)
    slot = columns.asked_slot(turn.state)
    if slot is not None and turn.state.phase in ACTIVE and _is_far(turn, slot):
        # A periodic save that is still far away gives its slot to the one wanted now.
        turn.state = turn.state.with_column(slot, Column())
        turn.do(ClearSave())
    schedule(turn)


def _is_far(turn: Turn, slot: int) -> bool:
    column = turn.state.columns[slot]
    front = max(turn.moment.steps.values(), default=0)
    return not column.sealed and column.step is not None and column.step > front + 2


def on_rank_sealed(turn: Turn, event: RankSealed) -> None:
    """Enter one rank's image; the last one makes the set whole."""
    was_sealed = event.rank in turn.state.columns[event.slot].sealed
    turn.state = columns.sealed(turn.state, event)
    column = turn.state.columns[event.slot]
    if was_sealed or not column.is_complete(turn.state.world_size):
        return
    if len(column.replicas) > 1:
        _drop_unequal(turn, event.slot)
        return
    turn.report("info", "checkpoint.staged", step=event.step, size_bytes=column.size_bytes)
    if turn.state.phase is Phase.EVACUATING:
        evacuation.on_set_complete(turn, event.slot)
        return
    if turn.state.wanted_save is not None:
        turn.set(wanted_save=None)
    if turn.state.policy.every_s is not None:
        turn.set(next_save_at=turn.now + turn.state.policy.every_s)
    if turn.state.phase in ACTIVE or turn.state.phase is Phase.UPLOADING:
        persist(turn, event.slot)
    schedule(turn)


def _drop_unequal(turn: Turn, slot: int) -> None:
    step = turn.state.columns[slot].step
    turn.state = turn.state.with_column(slot, Column())
    reason = "tensors stored once for all ranks differ between ranks"
    turn.report("warning", "checkpoint.abandoned", step=step, reason=reason)
    turn.do(Replan(reason=reason))
    if turn.state.phase is Phase.EVACUATING:
        evacuation.stage_again(turn)


def on_rank_unsealed(turn: Turn, event: RankUnsealed) -> None:
    """One rank without an image: this set can never be whole."""
    column = turn.state.columns[event.slot]
    if column.step != event.step:
        return
    turn.report(
        "warning",
        "checkpoint.abandoned",
        step=event.step,
        rank=event.rank,
        reason=event.reason,
    )
    turn.state = turn.state.with_column(event.slot, Column())
    if turn.state.phase is Phase.EVACUATING:
        evacuation.fall_back(turn, reason=f"rank {event.rank}: {event.reason}")
        return
    if turn.state.finish_step is not None:
        evacuation.end_without_image(turn, reason=f"rank {event.rank}: {event.reason}")
        return
    if turn.state.phase is Phase.UPLOADING:
        evacuation.fall_back(turn, reason=f"rank {event.rank}: {event.reason}")
        return
    turn.do(ClearSave())
    schedule(turn)


def persist(turn: Turn, slot: int) -> None:
    """Make the complete set in `slot` durable and commit it, under the present generation.

    One at a time: two uploads would only halve each other's rate. In an emergency the newer set
    counts, and an older one that is still on its way is given up.
    """
    column = turn.state.columns[slot]
    step = column.step
    assert step is not None
    assert turn.state.may_commit(column.generation, step)
    assert column.is_complete(turn.state.world_size)
    column = replace(column, generation=turn.state.generation, retry_at=None)
    notice = turn.state.notice
    others = [
        other
        for other, found in enumerate(turn.state.columns)
        if other != slot and found.persist is PersistState.RUNNING
    ]
    if others and notice is None:
        waiting = replace(column, persist=PersistState.WAITING)
        turn.state = turn.state.with_column(slot, waiting)
        return
    turn.do(*(CancelPersist(slot=other) for other in others))
    job = next_job(turn)
    turn.state = turn.state.with_column(
        slot, replace(column, persist=PersistState.RUNNING, job=job)
    )
    turn.do(Persist(job=job, slot=slot, step=step))
    if turn.state.phase is Phase.TRAINING:
        turn.set(phase=Phase.SAVING)


def next_job(turn: Turn) -> int:
    """A number for a Persist: its answers may come after its slot has got another use."""
    turn.set(num_jobs=turn.state.num_jobs + 1)
    return turn.state.num_jobs


def on_spooled(turn: Turn, event: Spooled) -> None:
    """On the local disk: a reboot no longer loses it."""
    turn.report("info", "checkpoint.spooled", step=event.step)


def on_committed(turn: Turn, event: CheckpointCommitted) -> None:
    """The promise of this step is made."""
    state = turn.state
    if event.slot is not None and _is_on_its_way(state, event.slot, event.job):
        column = replace(state.columns[event.slot], persist=PersistState.COMMITTED)
        turn.state = state.with_column(event.slot, column)
    turn.set(
        has_committed=True,
        last_commit_step=max(event.step, state.last_commit_step or 0),
        num_crashes=0,
        committed_since_notice=state.committed_since_notice or _ends_evacuation(state, event),
    )
    turn.do(TellCommitted(generation=event.generation, step=event.step))
    _settle(turn)
    if turn.state.phase is Phase.UPLOADING:
        evacuation.on_upload_settled(turn, event.step)
        return
    ending.record_finish_if_due(turn)
    evacuation.stage_final_if_due(turn)
    schedule(turn)


def _ends_evacuation(state: JobState, event: CheckpointCommitted) -> bool:
    """Whether this commit is what a notice was to bring: nothing newer is held here."""
    newest = columns.newest_complete(state)
    held = -1 if newest is None else state.columns[newest].step or 0
    return state.notice is not None and event.step >= held


def on_persist_failed(turn: Turn, event: PersistFailed) -> None:
    """Training goes on; the set is retried unless something newer replaced it."""
    if event.slot is not None and _is_on_its_way(turn.state, event.slot, event.job):
        column = turn.state.columns[event.slot]
        wait_s = 1.0 if turn.state.phase is Phase.UPLOADING else turn.state.policy.persist_retry_s
        changed = replace(
            column,
            persist=PersistState.NONE if event.is_cancelled else PersistState.FAILED,
            retry_at=None if event.is_cancelled else turn.now + wait_s,
        )
        turn.state = turn.state.with_column(event.slot, changed)
    if not event.is_cancelled:
        turn.report(
            "warning",
            "checkpoint.persist_failed",
            step=event.step,
            error_id=event.error_id,
            reason=event.reason,
        )
    _settle(turn)
    schedule(turn)


def _is_on_its_way(state: JobState, slot: int, job: int) -> bool:
    """Whether the answer is about what the slot holds now."""
    column = state.columns[slot]
    return column.job == job and column.persist is PersistState.RUNNING


def _settle(turn: Turn) -> None:
    """Begin what waited; SAVING lasts as long as a set is on its way to the store."""
    for slot, column in enumerate(turn.state.columns):
        is_whole = column.is_complete(turn.state.world_size)
        if column.persist is PersistState.WAITING and is_whole and turn.state.phase in ACTIVE:
            persist(turn, slot)
    is_busy = any(column.persist is PersistState.RUNNING for column in turn.state.columns)
    if turn.state.phase is Phase.SAVING and not is_busy:
        turn.set(phase=Phase.TRAINING)


def retry_due(turn: Turn) -> None:
    """Try again what failed, newest first; a set that something newer replaced is dropped."""
    newest = columns.newest_complete(turn.state)
    for slot, column in enumerate(turn.state.columns):
        if column.persist is not PersistState.FAILED or column.retry_at is None:
            continue
        kept = turn.state.columns[newest] if newest is not None else column
        if (column.generation, column.step or 0) < (kept.generation, kept.step or 0):
            turn.state = turn.state.with_column(slot, Column())
            turn.report("warning", "checkpoint.abandoned", step=column.step, reason="superseded")
        elif turn.now >= column.retry_at:
            persist(turn, slot)


def drop_overdue_ask(turn: Turn) -> None:
    """A save that some rank never answered for holds its slot no longer than this."""
    slot = columns.asked_slot(turn.state)
    if slot is None:
        return
    column = turn.state.columns[slot]
    behind = min(turn.moment.steps.values(), default=0)
    if column.step is None or behind <= column.step or turn.now - column.asked_at < ASK_LIMIT_S:
        return
    turn.report("warning", "checkpoint.abandoned", step=column.step, reason="not every rank staged")
    turn.state = turn.state.with_column(slot, Column())
    turn.do(ClearSave())
