"""Carries out what the lifecycle asks for. Called by the main thread only; whatever blocks goes to
a worker, which posts an event when it is done."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from supervisor.checkpoint.fetch import Fetch, FetchedCheckpoint, FetchTools, Images
from supervisor.checkpoint.local import LocalSets
from supervisor.checkpoint.persist import Group, PersistCancelled, PersistJob, Tools
from supervisor.checkpoint.upload import ImageChanged
from supervisor.checkpoint.workers import WorkerPool
from supervisor.clock import Clock, Deadline
from supervisor.commit import rules
from supervisor.commit.claim import Claim, claim
from supervisor.commit.log import CommitLog
from supervisor.commit.reap import reap_uploads
from supervisor.commit.records import LocalStep
from supervisor.errors import (
    ExitCode,
    Fenced,
    ManifestInvalid,
    ShardError,
    SupervisorError,
)
from supervisor.fence import FenceWatch
from supervisor.job.keeper import JobKeeper
from supervisor.lifecycle import inputs, outputs
from supervisor.lifecycle.inputs import Event
from supervisor.lifecycle.outputs import Action
from supervisor.prefetch import Prefetch
from supervisor.ranks.board import NUM_SLOTS, RankBoard
from trainer_sdk.protocol import messages

CLAIM_LIMIT_S = 300.0
RECORD_LIMIT_S = 60.0
REAP_LIMIT_S = 300.0
LAYOUT = "images-v1"
IMAGES_PER_FRAME = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTerms:
    """What every rank is told in its Welcome."""

    job_id: str
    schedule: Literal["boundary", "overlapped"]
    hold_timeout_s: float
    plan_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The I/O objects, made by `wiring`."""

    clock: Clock
    log: CommitLog
    board: RankBoard
    keeper: JobKeeper
    persist: Tools
    fetch: FetchTools
    local: LocalSets
    terms: RankTerms


class Performer:
    """Invariant: at most one persist a slot, one claim and one fetch are under way."""

    def __init__(
        self, parts: Parts, *, post: Callable[[Event], None], on_note: Callable[..., None]
    ) -> None:
        """`on_note(kind, **facts)` is told what metrics and status need."""
        self._parts = parts
        self._post = post
        self._note = on_note
        self._recorder = WorkerPool("recorder", 1)
        # Made now, for the moment in which the system gives no more threads.
        self._standby = WorkerPool("standby", 2)
        self._prefetch = Prefetch(parts.log, parts.fetch, parts.clock)
        self._fence = FenceWatch(
            parts.log,
            parts.clock,
            on_fenced=lambda generation: post(inputs.FencedOff(generation=generation)),
        )
        # What workers bring is kept by what it was asked for, so that a late answer of an older
        # group or generation never stands in for the present one's.
        self._group = ""
        self._claims: dict[str, Claim] = {}
        self._fetches: dict[int, FetchedCheckpoint] = {}
        self.persists: dict[int, PersistJob] = {}
        self.exit_code: int | None = None
        self._handlers: dict[type[Action], Callable[[Any], None]] = {
            outputs.LaunchJob: self._launch,
            outputs.StopJob: self._stop_job,
            outputs.ClaimGeneration: self._claim_generation,
            outputs.WelcomeRank: self._welcome,
            outputs.FetchImages: self._fetch_images,
            outputs.SendImages: self._send_images,
            outputs.AllocateSlots: self._allocate,
            outputs.AskSave: self._ask_save,
            outputs.ClearSave: self._clear_save,
            outputs.AskHold: self._ask_hold,
            outputs.ClearHold: self._clear_hold,
            outputs.SendOrder: self._send_order,
            outputs.Replan: self._replan,
            outputs.Persist: self._persist,
            outputs.PersistFetched: self._persist_fetched,
            outputs.CancelPersist: self._cancel_persist,
            outputs.TellCommitted: self._tell_committed,
            outputs.RecordFail: self._record_fail,
            outputs.RecordFinish: self._record_finish,
            outputs.SetAside: self._set_aside,
            outputs.TellFinished: self._tell_finished,
            outputs.Exit: self._exit,
        }

    def perform(self, action: Action) -> None:
        """Carry out one action."""
        self._handlers[type(action)](action)

    @property
    def _claim(self) -> Claim | None:
        """The claim of the present group, once it came."""
        return self._claims.get(self._group)

    @property
    def _fetched(self) -> FetchedCheckpoint | None:
        """What the present generation restores, once it is here."""
        got = self._claim
        return self._fetches.get(got.gen) if got is not None else None

    def failed(self, action: Action, error: Exception) -> Event | None:
        """What a failure to carry out an action amounts to; None if nobody waits for it."""
        reason, error_id = _with_hint(error), error_id_of(error)
        match action:
            case outputs.LaunchJob():
                return inputs.LaunchFailed(reason=reason)
            case outputs.StopJob():
                return inputs.JobStopped()
            case outputs.ClaimGeneration(incarnation=incarnation):
                return inputs.ClaimFailed(
                    incarnation=incarnation,
                    error_id=error_id,
                    reason=reason,
                    exit_code=int(ExitCode.INTERNAL),
                )
            case outputs.FetchImages():
                generation = self._claim.gen if self._claim else 0
                return inputs.FetchFailed(
                    generation=generation,
                    error_id=error_id,
                    reason=reason,
                    is_checkpoint_bad=False,
                )
            case outputs.Persist(job=job, slot=slot, step=step):
                return _persist_failed(job, slot, step, error, is_cancelled=False)
            case outputs.RecordFinish():
                return inputs.FinishRecorded(is_durable=False, reason=reason)
            case _:
                return None

    def _in_thread(self, name: str, call: Callable[[], None]) -> None:
        try:
            threading.Thread(target=call, name=name, daemon=True).start()
        except RuntimeError as error:  # a limit on processes or threads was reached
            self._note("thread_refused", thread=name, reason=str(error))
            self._standby.submit(call)

    # ------------------------------------------------------------ job

    def _launch(self, action: outputs.LaunchJob) -> None:
        del action
        self._prefetch.start(self._parts.board.sealed_sets())
        try:
            pid = self._parts.keeper.launch(
                on_exit=lambda code: self._post(inputs.JobExited(code=code, detail=_describe(code)))
            )
        except OSError as error:
            self._post(inputs.LaunchFailed(reason=str(error)))
            return
        self._post(inputs.JobLaunched(pid=pid))

    def _stop_job(self, action: outputs.StopJob) -> None:
        def stop() -> None:
            try:
                self._parts.keeper.stop(
                    patience_s=action.patience_s,
                    on_left=lambda pids: self._note("strays", pids=pids),
                )
            finally:
                self._post(inputs.JobStopped())

        self._in_thread("stop-job", stop)

    def _exit(self, action: outputs.Exit) -> None:
        self.exit_code = action.code

    # ------------------------------------------------------------ claim and restore

    def _claim_generation(self, action: outputs.ClaimGeneration) -> None:
        in_memory = self._local_in_memory(action)
        self._fence.watch(0)  # our own next claim ends our last generation: that is no fence
        self._group = action.incarnation
        self._parts.board.drop_ranks_from(action.world_size)

        def work() -> None:
            try:
                got = self._claim_now(action, in_memory)
            except Exception as error:  # noqa: BLE001 - whatever it is, the ranks must not wait
                self._post(
                    inputs.ClaimFailed(
                        incarnation=action.incarnation,
                        error_id=error_id_of(error),
                        reason=_with_hint(error),
                        exit_code=int(getattr(error, "exit_code", ExitCode.INTERNAL)),
                        is_checkpoint_bad=isinstance(error, ManifestInvalid),
                    )
                )
                return
            self._claims[action.incarnation] = got
            self._fence.watch(got.gen)
            self._post(_claimed(got, action.incarnation))
            self._in_thread("reap", lambda: self._reap(got.gen))

        # After the records of the last generation, which the claim would fence.
        self._recorder.submit(work)

    def _reap(self, gen: int) -> None:
        deadline = Deadline.after(self._parts.clock, REAP_LIMIT_S)
        try:
            num_reaped = reap_uploads(self._parts.log, gen=gen, deadline=deadline)
        except SupervisorError as error:  # costs money, harms nothing, and is tried at each claim
            self._note("reap_failed", error_id=error.error_id, reason=_with_hint(error))
            return
        if num_reaped:
            self._note("reaped", num_uploads=num_reaped)

    def _claim_now(
        self, action: outputs.ClaimGeneration, in_memory: tuple[LocalStep, Images] | None
    ) -> Claim:
        parts = self._parts
        deadline = Deadline.after(parts.clock, CLAIM_LIMIT_S)
        local = parts.local.newest(parts.log, in_memory, world=action.world_size, deadline=deadline)
        request = rules.ClaimRequest(
            launch=parts.keeper.submission,
            round=parts.keeper.round,
            group=action.incarnation,
            nodes=1,
            world=action.world_size,
            layout=LAYOUT,
            allow_fresh=action.allow_fresh,
            local=local,
        )
        got = claim(parts.log, request, deadline, retention=parts.persist.retention)
        if parts.persist.flusher is not None:
            spare = (got.local.gen, got.local.step) if got.local is not None else None
            parts.persist.flusher.settle(gen=got.gen, group=action.incarnation, spare=spare)
        return got

    def _local_in_memory(self, action: outputs.ClaimGeneration) -> tuple[LocalStep, Images] | None:
        """The newest set of slots with the group that staged it, if that is known."""
        last = self._claim
        if action.in_memory is None or last is None:
            return None
        generation, step, slot = action.in_memory
        if generation == last.gen:
            at = LocalStep(gen=generation, step=step, group=self._group)
        elif last.local is not None and (last.local.gen, last.local.step) == (generation, step):
            at = last.local
        else:
            return None
        return at, self._parts.board.images(slot, step=step)

    def _welcome(self, action: outputs.WelcomeRank) -> None:
        seat = self._parts.board.seats.get(action.rank)
        got = self._claim
        if seat is None or got is None:
            return
        terms = self._parts.terms
        message = messages.Welcome(
            protocol=messages.PROTOCOL_VERSION,
            job_id=terms.job_id,
            generation=got.gen,
            epoch=got.epoch,
            resume=_resume_of(got),
            num_slots=NUM_SLOTS,
            schedule=terms.schedule,
            hold_timeout_s=terms.hold_timeout_s,
            plan_timeout_s=terms.plan_timeout_s,
        )
        self._parts.board.send(action.rank, message, () if seat.is_page_handed else (seat.page.fd,))

    def _fetch_images(self, action: outputs.FetchImages) -> None:
        del action
        got = self._claim
        assert got is not None
        began_at = self._parts.clock.monotonic()
        in_memory = self._parts.board.sealed_sets()

        def work() -> None:
            try:
                fetched = self._bring(got, in_memory)
            except Exception as error:  # noqa: BLE001 - whatever it is, the ranks must not wait
                is_bad = isinstance(error, ShardError | ManifestInvalid)
                self._post(
                    inputs.FetchFailed(
                        generation=got.gen,
                        error_id=error_id_of(error),
                        reason=_with_hint(error),
                        is_checkpoint_bad=is_bad,
                    )
                )
                return
            self._fetches[got.gen] = fetched
            self._note(
                "fetched",
                source=fetched.source,
                size_bytes=fetched.size_bytes,
                seconds=self._parts.clock.monotonic() - began_at,
            )
            self._post(inputs.ImagesReady(generation=got.gen))

        self._in_thread("fetch", work)

    def _bring(self, got: Claim, in_memory: list[Any]) -> FetchedCheckpoint:
        if got.local is not None:
            return self._parts.local.take(got.local, world=got.world)
        assert got.resume is not None
        prefetched = self._prefetch.take(got.resume.seq)
        if prefetched is not None:
            return prefetched
        return Fetch(self._parts.fetch, got.resume, in_memory=in_memory).run()

    def _send_images(self, action: outputs.SendImages) -> None:
        fetched = self._fetched
        if fetched is None:
            return
        images = fetched.images
        for start in range(0, len(images), IMAGES_PER_FRAME):
            batch = images[start : start + IMAGES_PER_FRAME]
            fds = tuple(image.buffer.reader() for image in batch)
            message = messages.Images(
                source=fetched.source,
                shards=tuple(
                    messages.ShardRef(rank=i.rank, name=i.name, size_bytes=i.size_bytes)
                    for i in batch
                ),
                is_last=start + IMAGES_PER_FRAME >= len(images),
            )
            self._parts.board.send(action.rank, message, fds)
            for fd in fds:
                os.close(fd)

    def forget_fetched(self) -> None:
        """Every rank has its state: the fetched copy is only memory now."""
        self._fetches.clear()
        self._prefetch.forget()
        self._parts.local.forget()

    def _set_aside(self, action: outputs.SetAside) -> None:
        got = self._claim
        if got is None:
            return
        if got.local is not None:
            self._parts.local.discard(got.local)
            return
        if got.resume_seq is not None:
            make = rules.poison(got.resume_seq, why=action.why[:500], who="supervisor")
            self._append("poison", make, gen=got.gen)

    # ------------------------------------------------------------ ranks

    def _allocate(self, action: outputs.AllocateSlots) -> None:
        try:
            self._parts.board.allocate(action.rank, action.slot_bytes)
        except OSError as error:
            self._note("slots_failed", rank=action.rank, reason=str(error))

    def _ask_save(self, action: outputs.AskSave) -> None:
        self._parts.board.forget_image(action.slot)
        self._release_images(action.slot)
        for seat in self._parts.board.seats.values():
            seat.page.ask_save(action.step, action.slot)

    def _clear_save(self, action: outputs.ClearSave) -> None:
        del action
        for seat in self._parts.board.seats.values():
            seat.page.clear_save()

    def _ask_hold(self, action: outputs.AskHold) -> None:
        for seat in self._parts.board.seats.values():
            seat.page.raise_notice(int((action.deadline_at or 0.0) * 1e9))
            seat.page.ask_hold(0)

    def _clear_hold(self, action: outputs.ClearHold) -> None:
        del action
        for seat in self._parts.board.seats.values():
            seat.page.raise_notice(0)
            seat.page.clear_hold()

    def _send_order(self, action: outputs.SendOrder) -> None:
        if action.action == "stage":
            seat = self._parts.board.seats.get(action.rank)
            if seat is not None:
                seat.seals.pop(action.slot, None)
            self._release_images(action.slot)
        message = messages.Order(action=action.action, step=action.step, slot=action.slot)
        self._parts.board.send(action.rank, message)

    def _replan(self, action: outputs.Replan) -> None:
        for rank in self._parts.board.seats:
            self._parts.board.send(rank, messages.Replan(reason=action.reason))

    def _tell_finished(self, action: outputs.TellFinished) -> None:
        message = messages.FinishRecorded(is_durable=action.is_durable, reason=action.reason)
        for rank in self._parts.board.seats:
            self._parts.board.send(rank, message)

    # ------------------------------------------------------------ durable

    def _persist(self, action: outputs.Persist) -> None:
        got = self._claim
        assert got is not None
        number, slot, step = action.job, action.slot, action.step
        job = PersistJob(
            self._parts.persist,
            group=self._group_of(got),
            step=step,
            images=self._parts.board.images(slot, step=step),
            on_spooled=self._spooled(number, slot, step),
        )
        self._release_images(slot)  # an earlier try's flush: this one flushes anew
        self.persists[slot] = job
        self._in_thread(f"persist-{step}", lambda: self._run_persist(job, number, slot, step))

    def _persist_fetched(self, action: outputs.PersistFetched) -> None:
        got, fetched, number = self._claim, self._fetched, action.job
        assert got is not None
        if fetched is None:
            return
        step = fetched.step
        job = PersistJob(
            self._parts.persist,
            group=self._group_of(got),
            step=step,
            images={image.rank: (image.buffer, image.size_bytes) for image in fetched.images},
            on_spooled=self._spooled(number, None, step),
        )
        self._in_thread(f"persist-{step}", lambda: self._run_persist(job, number, None, step))

    def _spooled(self, number: int, slot: int | None, step: int) -> Callable[[float], None]:
        def tell(seconds: float) -> None:
            self._note("spooled", step=step, seconds=seconds)
            self._post(inputs.Spooled(job=number, slot=slot, step=step))

        return tell

    def _release_images(self, slot: int) -> None:
        """The ranks are about to write this slot: what still reads it must not count any more."""
        job = self.persists.get(slot)
        if job is not None:
            job.release_images()

    def _group_of(self, got: Claim) -> Group:
        return Group(
            gen=got.gen, epoch=got.epoch, group=self._group, world=got.world, layout=got.layout
        )

    def _run_persist(self, job: PersistJob, number: int, slot: int | None, step: int) -> None:
        try:
            done = job.run()
        except Fenced as error:
            self._post(_persist_failed(number, slot, step, error, is_cancelled=True))
            self._post(inputs.FencedOff(generation=job.group.gen))
        except PersistCancelled as error:
            self._post(_persist_failed(number, slot, step, error, is_cancelled=True))
        except ImageChanged as error:
            self._drop_image(error, slot, step)
            self._post(_persist_failed(number, slot, step, error, is_cancelled=False))
        except Exception as error:  # noqa: BLE001 - the set must not count as on its way for ever
            self._post(_persist_failed(number, slot, step, error, is_cancelled=False))
        else:
            self._note("committed", done=done)
            self._post(
                inputs.CheckpointCommitted(
                    job=number, slot=slot, step=step, generation=job.group.gen, seq=done.seq
                )
            )

    def _drop_image(self, error: ImageChanged, slot: int | None, step: int) -> None:
        """Trying again would commit bytes that nobody trained: the set goes, and another is asked
        for where the ranks still train."""
        if slot is None:
            return
        reason = _with_hint(error)
        self._post(inputs.RankUnsealed(rank=error.rank, slot=slot, step=step, reason=reason))
        self._post(inputs.SaveRequested(source="damaged image"))

    def _tell_committed(self, action: outputs.TellCommitted) -> None:
        message = messages.Committed(generation=action.generation, step=action.step)
        for rank in self._parts.board.seats:
            self._parts.board.send(rank, message)

    def _cancel_persist(self, action: outputs.CancelPersist) -> None:
        job = self.persists.get(action.slot)
        if job is not None:
            job.cancel()

    def _record_fail(self, action: outputs.RecordFail) -> None:
        if self._claim is not None:
            self._append("fail", rules.fail(why=action.why, node=0), gen=self._claim.gen)

    def _append(self, what: str, make: rules.Make, *, gen: int) -> None:
        def work() -> None:
            deadline = Deadline.after(self._parts.clock, RECORD_LIMIT_S)
            try:
                self._parts.log.append(make, my_gen=gen, deadline=deadline)
            except SupervisorError as error:
                self._note("record_failed", record=what, reason=_with_hint(error))

        self._recorder.submit(work)

    def _record_finish(self, action: outputs.RecordFinish) -> None:
        got = self._claim
        if got is None:
            self._post(inputs.FinishRecorded(is_durable=False, reason="no generation was claimed"))
            return

        def work() -> None:
            deadline = Deadline.after(self._parts.clock, RECORD_LIMIT_S)
            try:
                make = rules.finish(at_step=action.step)
                self._parts.log.append(make, my_gen=got.gen, deadline=deadline)
            except SupervisorError as error:
                self._post(inputs.FinishRecorded(is_durable=False, reason=_with_hint(error)))
                return
            self._post(inputs.FinishRecorded(is_durable=True))

        self._recorder.submit(work)


def _claimed(got: Claim, incarnation: str) -> inputs.Claimed:
    resume_step = got.local.step if got.local else got.resume.step if got.resume else None
    is_from_commit = got.local is None and got.resume is not None
    return inputs.Claimed(
        incarnation=incarnation,
        resume_world=got.resume.world if is_from_commit and got.resume else None,
        generation=got.gen,
        resume_step=resume_step,
        is_local=got.local is not None,
        local_generation=got.local.gen if got.local else None,
        is_adopted=got.adopted,
    )


def _resume_of(got: Claim) -> messages.Resume | None:
    if got.local is not None:
        return messages.Resume(generation=got.local.gen, step=got.local.step, world_size=got.world)
    if got.resume is None:
        return None
    return messages.Resume(
        generation=got.resume.gen,
        step=got.resume.step,
        world_size=got.resume.world,
    )


def _persist_failed(
    job: int, slot: int | None, step: int, error: Exception, *, is_cancelled: bool
) -> inputs.PersistFailed:
    return inputs.PersistFailed(
        job=job,
        slot=slot,
        step=step,
        error_id=error_id_of(error),
        reason=_with_hint(error),
        is_cancelled=is_cancelled,
    )


def error_id_of(error: Exception) -> str:
    """The stable id of an error; `internal` for one that is not ours."""
    return error.error_id if isinstance(error, SupervisorError) else "internal"


def _with_hint(error: Exception) -> str:
    hint = getattr(error, "hint", "")
    text = str(error) if isinstance(error, SupervisorError) else f"{type(error).__name__}: {error}"
    return f"{text}; {hint}" if hint else text


def _describe(code: int | None) -> str:
    if code is None:
        return "its exit code is not known: an earlier supervisor had started it"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
