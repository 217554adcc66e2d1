"""Launch, hello, claim and restore: from nothing to every rank training. Pure."""

from __future__ import annotations

from dataclasses import replace

from supervisor.lifecycle import columns, ending, evacuation, saving
from supervisor.lifecycle.inputs import (
    Claimed,
    ClaimFailed,
    FetchFailed,
    ImagesReady,
    JobLaunched,
    LaunchFailed,
    RankJoined,
    RankLost,
    RankPlanned,
    RankRestored,
    RankRestoreFailed,
    Started,
)
from supervisor.lifecycle.outputs import (
    AllocateSlots,
    CancelPersist,
    ClaimGeneration,
    FetchImages,
    LaunchJob,
    PersistFetched,
    SendImages,
    SetAside,
    StopJob,
    WelcomeRank,
)
from supervisor.lifecycle.state import Column, PersistState, Phase, RankView
from supervisor.lifecycle.turn import Turn

# A rank that turns up in one of these phases belongs to a group that is being ended.
DEPARTING = frozenset(
    {
        Phase.EVACUATED,
        Phase.STOPPING,
        Phase.RELAUNCHING,
        Phase.FINISHED,
        Phase.FAILED,
        Phase.FENCED,
    }
)


def on_started(turn: Turn, event: Started) -> None:
    """Launch the job, or wait for the ranks of the one that already runs."""
    turn.set(launched_at=turn.now, waiting_since=turn.now)
    if event.is_taken_up:
        turn.set(is_job_alive=True)
        turn.report("info", "job.taken_up")
    else:
        turn.do(LaunchJob())


def on_job_launched(turn: Turn, event: JobLaunched) -> None:
    """A new group is on its way; a notice may have come between the order and the launch."""
    turn.set(is_job_alive=True, launched_at=turn.now, waiting_since=turn.now)
    turn.report("info", "job.launched", pid=event.pid)
    if turn.state.phase is not Phase.STARTING:
        turn.do(StopJob(patience_s=0.0))


def on_launch_failed(turn: Turn, event: LaunchFailed) -> None:
    """The command itself does not run: counts as a crash."""
    turn.report("error", "job.launch_failed", reason=event.reason)
    turn.set(is_job_alive=False)
    if turn.state.phase is Phase.STARTING:
        ending.crash(turn, code=127, detail=event.reason)


def on_rank_joined(turn: Turn, event: RankJoined) -> None:
    """Enter a rank; rank 0 brings the identity of the group, under which we claim."""
    state = turn.state
    if state.phase in DEPARTING:
        turn.report("debug", "rank.ignored", rank=event.rank, phase=state.phase.value)
        return
    if _is_new_life(turn, event):
        if state.phase in (Phase.EVACUATING, Phase.UPLOADING):
            # torchrun replaced its workers in the middle of an evacuation: what is staged counts.
            if state.phase is Phase.EVACUATING:
                evacuation.fall_back(turn, reason="torchrun restarted its workers")
            return
        _begin_group(turn)
    view = RankView(
        incarnation=event.incarnation,
        has_restored=event.has_restored,
        has_slots=event.has_slots,
    )
    turn.set(
        ranks={**turn.state.ranks, event.rank: view},
        world_size=event.world_size,
    )
    _enter_seals(turn, event)
    turn.report("info", "rank.joined", rank=event.rank, generation=event.generation)
    if event.rank == 0 and not turn.state.is_claimed and not turn.state.is_claiming:
        _claim(turn, event.incarnation)
    elif turn.state.is_claimed:
        _welcome(turn, event.rank)
        _training_if_whole(turn)


def _is_new_life(turn: Turn, event: RankJoined) -> bool:
    """Whether this rank belongs to another process group than the one we know."""
    known = turn.state.ranks.get(event.rank)
    return known is not None and known.incarnation != event.incarnation


def _begin_group(turn: Turn) -> None:
    """torchrun started its workers anew by itself: everything told to the old group is void."""
    turn.report("info", "group.restarted", generation=turn.state.generation)
    turn.set(
        phase=Phase.STARTING,
        ranks={},
        incarnation=None,
        is_claimed=False,
        is_claiming=False,
        are_images_ready=False,
    )
    ending.drop_incomplete(turn)


def _enter_seals(turn: Turn, event: RankJoined) -> None:
    for slot, generation, step, size_bytes in event.seals:
        if turn.state.is_claimed and not turn.state.may_commit(generation, step):
            continue
        column = turn.state.columns[slot]
        if (column.generation, column.step) < (generation, step) or column.step is None:
            column = Column(step=step, generation=generation)
        if (column.generation, column.step) == (generation, step):
            turn.state = turn.state.with_column(
                slot,
                replace(
                    column,
                    sealed=column.sealed | {event.rank},
                    size_bytes=column.size_bytes
                    + (0 if event.rank in column.sealed else size_bytes),
                ),
            )


def _claim(turn: Turn, incarnation: str) -> None:
    state = turn.state
    turn.set(incarnation=incarnation, is_claiming=True)
    slot = columns.newest_complete(state)
    column = state.columns[slot] if slot is not None else None
    turn.do(
        ClaimGeneration(
            incarnation=incarnation,
            world_size=state.world_size,
            allow_fresh=state.policy.allow_fresh or state.started_fresh,
            in_memory=(column.generation, column.step, slot)
            if column is not None and column.step is not None and slot is not None
            else None,
        )
    )


def on_claimed(turn: Turn, event: Claimed) -> None:
    """The log gave us a generation: whatever was uploading for an older one is void."""
    if turn.state.phase is not Phase.STARTING or event.incarnation != turn.state.incarnation:
        turn.report("debug", "claim.late", generation=event.generation)
        return
    if not event.is_adopted:
        _cancel_older(turn)
    turn.set(
        generation=event.generation,
        is_claimed=True,
        is_claiming=False,
        resume_step=event.resume_step,
        is_local_resume=event.is_local,
        local_generation=event.local_generation,
        started_fresh=turn.state.started_fresh or event.resume_step is None,
        has_committed=False,
        phase=Phase.RESTORING,
        waiting_since=turn.now,
        are_images_ready=event.resume_step is None,
    )
    _drop_foreign_columns(turn)
    turn.report(
        "info",
        "generation.claimed",
        generation=event.generation,
        resume_step=event.resume_step,
        is_local=event.is_local,
        is_adopted=event.is_adopted,
    )
    if event.resume_world not in (None, turn.state.world_size):
        turn.report(
            "warning",
            "world.changed",
            saved_world_size=event.resume_world,
            world_size=turn.state.world_size,
            hint="what is not exact is listed in the receipts of `lastgasp status --json`",
        )
    if event.resume_step is not None and not turn.state.is_training:
        turn.do(FetchImages())
    for rank in sorted(turn.state.ranks):
        _welcome(turn, rank)
    _training_if_whole(turn)


def _cancel_older(turn: Turn) -> None:
    for slot, column in enumerate(turn.state.columns):
        if column.persist is PersistState.RUNNING:
            turn.do(CancelPersist(slot=slot))


def _drop_foreign_columns(turn: Turn) -> None:
    """What the claim does not name must never be committed under it; as a source of bytes for the
    restore the slots still serve, by their digests."""
    kept = tuple(
        column if turn.state.may_commit(column.generation, column.step) else Column()
        for column in turn.state.columns
    )
    turn.set(columns=kept)


def _welcome(turn: Turn, rank: int) -> None:
    turn.state = turn.state.with_rank(rank, is_welcomed=True)
    turn.do(WelcomeRank(rank=rank))
    view = turn.state.ranks[rank]
    if not view.has_restored and turn.state.are_images_ready and turn.state.resume_step is not None:
        turn.do(SendImages(rank=rank))


def on_claim_failed(turn: Turn, event: ClaimFailed) -> None:
    """No generation, no training: end the job and say why. A bad checkpoint costs a launch."""
    if turn.state.phase is not Phase.STARTING or event.incarnation != turn.state.incarnation:
        return
    turn.report("error", "claim.failed", error_id=event.error_id, reason=event.reason)
    turn.set(is_claiming=False)
    if event.is_checkpoint_bad:
        ending.stop(turn, after="relaunch", patience_s=0.0)
        return
    phase_after = "fenced" if event.error_id == "fenced" else "fail"
    ending.stop(turn, after=phase_after, code=event.exit_code, patience_s=0.0)


def on_images_ready(turn: Turn, event: ImagesReady) -> None:
    """Hand the images to every rank that waits for them."""
    if turn.state.phase is not Phase.RESTORING or event.generation != turn.state.generation:
        return
    turn.set(are_images_ready=True, waiting_since=turn.now)
    for rank, view in sorted(turn.state.ranks.items()):
        if view.is_welcomed and not view.has_restored:
            turn.do(SendImages(rank=rank))


def on_fetch_failed(turn: Turn, event: FetchFailed) -> None:
    """A bad checkpoint is set aside and the next launch takes an older one."""
    if turn.state.phase is not Phase.RESTORING or event.generation != turn.state.generation:
        return
    turn.report(
        "error",
        "fetch.failed",
        error_id=event.error_id,
        reason=event.reason,
        is_checkpoint_bad=event.is_checkpoint_bad,
    )
    if event.is_checkpoint_bad:
        _set_aside(turn, event.reason)
    else:
        ending.stop(turn, after="fail", code=69, patience_s=0.0)


def _set_aside(turn: Turn, why: str) -> None:
    turn.do(SetAside(why=why))
    if turn.state.is_local_resume:
        turn.set(columns=tuple(Column() for _ in turn.state.columns))
    ending.stop(turn, after="relaunch", patience_s=0.0)


def on_rank_restored(turn: Turn, event: RankRestored) -> None:
    """A rank trains; when all do, the job does."""
    turn.state = turn.state.with_rank(event.rank, has_restored=True)
    turn.report("info", "rank.restored", rank=event.rank, step=event.step)
    _training_if_whole(turn)


def _training_if_whole(turn: Turn) -> None:
    if turn.state.phase is not Phase.RESTORING or not turn.state.is_training:
        return
    turn.set(phase=Phase.TRAINING)
    turn.report("info", "restore.completed", step=turn.state.resume_step)
    _persist_what_is_only_here(turn)
    saving.schedule(turn)


def _persist_what_is_only_here(turn: Turn) -> None:
    """A set restored from memory, or found by a new supervisor, is flushed under our generation."""
    slot = columns.newest_complete(turn.state)
    if slot is None:
        if turn.state.is_local_resume:
            turn.do(
                PersistFetched(job=saving.next_job(turn))
            )  # it came from the spool: no slot holds it
        return
    if turn.state.columns[slot].persist is not PersistState.COMMITTED:
        saving.persist(turn, slot)


def on_rank_restore_failed(turn: Turn, event: RankRestoreFailed) -> None:
    """Either the checkpoint is bad, or the script does not fit it: only the first can be helped."""
    turn.report(
        "error",
        "rank.restore_failed",
        rank=event.rank,
        error_id="shard_invalid" if event.is_checkpoint_bad else "state_mismatch",
        reason=event.reason,
        is_checkpoint_bad=event.is_checkpoint_bad,
    )
    if event.is_checkpoint_bad:
        if turn.state.phase is Phase.RESTORING:
            _set_aside(turn, event.reason)
    elif turn.state.phase in (Phase.RESTORING, Phase.TRAINING, Phase.SAVING):
        ending.stop(turn, after="fail", code=1, patience_s=5.0)


def on_rank_planned(turn: Turn, event: RankPlanned) -> None:
    """Give a rank its slots. Slots of another size void what the old ones of this rank held."""
    if not event.keeps_slots:
        for slot, column in enumerate(turn.state.columns):
            if event.rank in column.sealed and column.persist is not PersistState.RUNNING:
                turn.state = turn.state.with_column(slot, Column())
    turn.state = turn.state.with_rank(event.rank, has_slots=True)
    turn.do(AllocateSlots(rank=event.rank, slot_bytes=event.slot_bytes))
    saving.schedule(turn)


def on_rank_lost(turn: Turn, event: RankLost) -> None:
    """A broken connection is not a death: torchrun tells of those."""
    if event.rank in turn.state.ranks:
        turn.state = turn.state.with_rank(event.rank, is_connected=False, held_at=None)
