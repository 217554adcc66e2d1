"""Which slot holds what, and which one may be written next. Pure.

The newest complete set is never given away, and neither is one that is being made durable, unless
the caller says that it counts less than what comes.
"""

from __future__ import annotations

from dataclasses import replace

from supervisor.lifecycle.inputs import RankSealed
from supervisor.lifecycle.state import Column, JobState, PersistState


def newest_complete(state: JobState) -> int | None:
    """The slot of the newest complete set, by (generation, step) as numbers."""
    complete = [
        (column.generation, column.step, slot)
        for slot, column in enumerate(state.columns)
        if column.step is not None and column.is_complete(state.world_size)
    ]
    return max(complete)[2] if complete else None


def writable_slot(state: JobState, *, may_cancel: bool = False) -> int | None:
    """A slot that may be written without losing the newest complete set.

    Args:
        may_cancel: a set whose upload is under way may be given up.
    """
    keep = newest_complete(state)
    candidates = [
        (column.persist is PersistState.RUNNING, slot)
        for slot, column in enumerate(state.columns)
        if slot != keep
        and not column.is_asked
        and (may_cancel or column.persist is not PersistState.RUNNING)
    ]
    return min(candidates)[1] if candidates else None


def asked_slot(state: JobState) -> int | None:
    """The slot that ranks were asked to fill and have not all answered for."""
    for slot, column in enumerate(state.columns):
        if column.is_asked:
            return slot
    return None


def ask(state: JobState, slot: int, *, step: int, now: float) -> JobState:
    """Mark a slot as asked for; whatever it held is gone."""
    column = Column(step=step, generation=state.generation, is_asked=True, asked_at=now)
    return state.with_column(slot, column)


def sealed(state: JobState, event: RankSealed) -> JobState:
    """Enter one rank's sealed image. A first seal of another step starts the set anew."""
    column = state.columns[event.slot]
    if column.step != event.step or column.generation != state.generation:
        column = Column(step=event.step, generation=state.generation, is_asked=column.is_asked)
    ranks = column.sealed | {event.rank}
    return state.with_column(
        event.slot,
        replace(
            column,
            sealed=ranks,
            replicas=column.replicas | {event.replicas},
            size_bytes=column.size_bytes
            + (0 if event.rank in column.sealed else event.image_bytes),
            is_final=column.is_final or event.is_final,
            is_asked=column.is_asked and len(ranks) < state.world_size,
        ),
    )
