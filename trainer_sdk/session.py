"""A run's dealings with its supervisor: restore, save, hold, finish."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed

from trainer_sdk.capture import Snapshot
from trainer_sdk.errors import (
    Preempted,
    RejectedBySupervisor,
    RestoreError,
    TrainerSdkError,
)
from trainer_sdk.link import Inbox, Link
from trainer_sdk.protocol import environment
from trainer_sdk.protocol.control_page import BEAT_NS, STEP, ControlPage, RankState
from trainer_sdk.protocol.messages import (
    PROTOCOL_VERSION,
    Boundary,
    Finished,
    Hello,
    Note,
    Order,
    Planned,
    Restored,
    RestoreFailed,
    SaveRequested,
    Sealed,
    Unsealed,
    Welcome,
)
from trainer_sdk.receipt import Receipt
from trainer_sdk.refusal import HEARD_WITHIN_S, MAX_REASON, PATIENCE_S
from trainer_sdk.registry import Registry
from trainer_sdk.resuming import restore_from_images
from trainer_sdk.staging import Image, StagedImage, Stager
from trainer_sdk.termination import guard_rank
from trainer_sdk.tree import dump_json

log = logging.getLogger("trainer_sdk")

_RESTORE_LIMIT_S = 1800.0
_BEAT_S = 0.5
_GROWTH_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where the loop stands."""

    step: int
    epoch: int
    is_polling: bool = False


def open_session(registry: Registry, on_attention: Callable[[], None]) -> Session | None:
    """Reach the supervisor named in the environment; None when there is none."""
    path = os.environ.get(environment.SOCKET)
    if not path:
        return None
    return Session(path, new_hello(), registry, on_attention)


def new_hello() -> Hello:
    """How this process introduces itself."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return Hello(
        protocol=PROTOCOL_VERSION,
        launch=os.environ.get(environment.LAUNCH, ""),
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=world_size,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        pid=os.getpid(),
        incarnation=secrets.token_hex(16),
        restart_count=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


class Session:
    """One rank's conversation with its supervisor. All methods belong to the training thread."""

    def __init__(
        self, path: str, hello: Hello, registry: Registry, on_attention: Callable[[], None]
    ) -> None:
        self.hello = hello
        self._is_closed = False
        self.rank = hello.rank
        self.world_size = hello.world_size
        self.stager = Stager(rank=hello.rank, world_size=hello.world_size)
        self._registry = registry
        self._link = Link(path, hello, on_attention)
        self._guard = guard_rank(self._has_notice)
        self._page: ControlPage | None = None
        self._num_grants = 0
        self._handled_save = -1
        self._proceed_to = 0
        self._ignored_hold: tuple[int, int] | None = None
        self._last_occasion = (-1, 0)
        self._may_overlap = True
        self._replan_reason = ""
        # Connection and plan of the last Planned: one that was lost is said again.
        self._planned: tuple[int, str] = (0, "")

    # ------------------------------------------------------------ page

    @property
    def page(self) -> ControlPage:
        """The newest control page; there is one once a Welcome came."""
        page = self._link.inbox.page
        assert page is not None
        if page is not self._page:
            if self._page is not None:
                page.words[STEP] = self._page.words[STEP]
            self._page = page
            page.set_rank_state(RankState.TRAINING, os.getpid())
        return page

    def page_words(self) -> Any:
        """The words of the page for the fast path."""
        return self.page.words

    @property
    def _welcome(self) -> Welcome:
        welcome = self._link.inbox.welcome
        assert welcome is not None
        return welcome

    def _has_notice(self) -> bool:
        """Asked from another thread."""
        page = self._link.inbox.page
        return page is not None and not self._is_closed and page.deadline_ns != 0

    def _set_state(self, state: int) -> None:
        self.page.set_rank_state(state, os.getpid())

    # ------------------------------------------------------------ restore

    def restore(self) -> Receipt:
        """Restore what the supervisor says; see `Run.restore`."""
        started = time.monotonic()
        if not self._wait(lambda inbox: inbox.welcome is not None, _RESTORE_LIMIT_S):
            raise RestoreError(
                f"the supervisor did not answer within {_RESTORE_LIMIT_S:.0f} s",
                hint="see its log; a run must not start afresh while a checkpoint may exist",
            )
        self._set_state(RankState.RESTORING)
        resume = self._welcome.resume
        if resume is None:
            return Receipt()
        if not self._wait(lambda inbox: inbox.are_images_complete, _RESTORE_LIMIT_S):
            raise RestoreError(f"the images did not arrive within {_RESTORE_LIMIT_S:.0f} s")
        try:
            with self._link.changed:
                shards, self._link.inbox.shards = self._link.inbox.shards, []
            return restore_from_images(
                self._registry,
                shards,
                step=resume.step,
                rank=self.rank,
                world_size=self.world_size,
                source=self._link.inbox.images_source,
                started_at=started,
            )
        except TrainerSdkError as error:
            is_bad = isinstance(error, RestoreError) and error.is_checkpoint_bad
            self._link.post(RestoreFailed(reason=str(error)[:MAX_REASON], is_checkpoint_bad=is_bad))
            if isinstance(error, RestoreError):
                raise
            raise RestoreError(error.message, hint=error.hint) from error

    def report_restored(self, receipt: Receipt) -> None:
        """Tell the supervisor that training begins, and what a resume will not bring back."""
        for loader in self._registry.loaders:
            if loader.approximate_reason:
                text = f"{loader.name} is not exactly resumable: {loader.approximate_reason}"
                self._link.post(Note(event="loader.approximate", text=text))
        self._link.update_hello(has_restored=True)
        self._set_state(RankState.TRAINING)
        self._link.post(
            Restored(step=receipt.step, seconds=receipt.seconds, receipt=receipt.to_json())
        )

    # ------------------------------------------------------------ boundary

    def at_boundary(self, moment: Moment, is_due: bool) -> None:
        """Do what is asked for at this boundary.

        Raises:
            Preempted: an order to leave.
        """
        self.stager.wait()
        self._adopt_slots()
        if is_due or self.stager.planner.plan is None:
            self._plan(moment, self._registry.snapshot())
        self._ask_for_slots()
        self._save_if_due(moment)
        self._hold_if_due(moment)

    def _adopt_slots(self) -> None:
        inbox = self._link.inbox
        with self._link.changed:
            self._replan_reason = self._replan_reason or inbox.replan_reason
            inbox.replan_reason = ""
            if inbox.num_slot_grants == self._num_grants or inbox.slots is None:
                return
            self._num_grants = inbox.num_slot_grants
            grant, fds = inbox.slots, [os.dup(fd) for fd in inbox.slot_fds]
        self.stager.adopt(grant, fds)

    def _plan(self, moment: Moment, snapshot: Snapshot) -> bytes:
        """Make the plan fit the state; returns the JSON state. Tells the supervisor of growth."""
        planner = self.stager.planner
        state = self._state_json(moment, snapshot)
        if self._replan_reason or not planner.is_current(snapshot, state_bytes=len(state)):
            planner.make(
                snapshot,
                state_bytes=len(state),
                occasion=self._occasion(moment.step),
                is_doubted=bool(self._replan_reason),
                timeout_s=self._welcome.plan_timeout_s,
            )
            self._replan_reason = ""
        self._ask_for_slots()
        return state

    def _ask_for_slots(self) -> None:
        plan = self.stager.planner.plan
        if plan is None or plan.slot_bytes <= self.stager.slot_bytes:
            return
        occasion = (self._link.inbox.num_connections, plan.digest)
        if occasion != self._planned:
            self._planned = occasion
            self._link.post(Planned(slot_bytes=plan.slot_bytes, plan=plan.digest))

    def _occasion(self, step: int) -> str:
        """What all ranks that prove equality at this boundary call it; a second proof at the same
        boundary must not meet the first one's answers."""
        last_step, count = self._last_occasion
        self._last_occasion = (step, count + 1 if step == last_step else 0)
        return f"{self._welcome.generation}/{step}/{self._last_occasion[1]}"

    def _state_json(self, moment: Moment, snapshot: Snapshot) -> bytes:
        return dump_json(
            {
                "format": 1,
                "step": moment.step,
                "epoch": moment.epoch,
                "is_polling": moment.is_polling,
                "rank": self.rank,
                "world": self.world_size,
                "user": self._registry.user.to_json(),
                "gradient_order": {
                    module.name: module.gradient_order.names
                    for module in self._registry.modules
                    if module.gradient_order is not None
                },
                "objects": snapshot.objects,
            }
        )

    def _save_if_due(self, moment: Moment) -> None:
        page = self.page
        save_at, slot = page.save_at, page.save_slot
        if save_at > moment.step or save_at == self._handled_save:
            return
        self._handled_save = save_at
        if save_at < moment.step:
            reason = f"boundary {save_at} was passed; the rank stands at {moment.step}"
            self._link.post(Unsealed(slot=slot, step=save_at, reason=reason))
            return
        can_overlap = (
            self._may_overlap
            and self._welcome.schedule == "overlapped"
            and bool(self._registry.optimizers)
        )
        self._stage(moment, slot, is_overlapped=can_overlap)

    def _stage(
        self, moment: Moment, slot: int, *, is_overlapped: bool = False, is_final: bool = False
    ) -> bool:
        """Stage and seal; says so, or why not. True if an image is sealed or on its way."""

        def report(staged: StagedImage) -> None:
            self._report(staged, is_final=is_final)

        try:
            snapshot = self._registry.snapshot()
            state = self._plan(moment, snapshot)
            self._await_larger_slots(time.monotonic() + _GROWTH_LIMIT_S)
            image = Image(
                snapshot=snapshot,
                state=state,
                step=moment.step,
                generation=self._welcome.generation,
                slot=slot,
                page=self.page,
            )
            self.stager.stage(image, is_overlapped=is_overlapped, on_staged=report)
        except Exception as error:  # noqa: BLE001 - a user's state_dict() may raise anything
            log.warning("step %d was not saved: %s", moment.step, error)
            reason = f"{type(error).__name__}: {error}"[:MAX_REASON]
            self._link.post(Unsealed(slot=slot, step=moment.step, reason=reason))
            return False
        return True

    def _report(self, staged: StagedImage, *, is_final: bool) -> None:
        if staged.fault:
            self._may_overlap = False
            text = f"step {staged.step} is not saved: {staged.fault}; from now on training waits"
            log.warning("an overlapped save was given up: %s", text)
            self._link.post(Unsealed(slot=staged.slot, step=staged.step, reason=staged.fault))
            self._link.post(Note(event="overlap.abandoned", text=text))
            return
        self._link.post(
            Sealed(
                slot=staged.slot,
                step=staged.step,
                image_bytes=staged.image_bytes,
                staged_s=staged.staged_s,
                blocked_s=staged.blocked_s,
                replicas=staged.replicas,
                is_final=is_final,
            )
        )

    # ------------------------------------------------------------ hold

    def _hold_if_due(self, moment: Moment) -> None:
        inbox = self._link.inbox
        hold_at = self.page.hold_at
        if hold_at > moment.step or moment.step < self._proceed_to or not inbox.is_connected:
            return
        if self._ignored_hold == (hold_at, inbox.num_connections):
            return
        self._hold(moment, hold_at)

    def hold_at_poll(self, moment: Moment) -> None:
        """Stop between steps, if a hold is asked for; the state is still the last boundary's."""
        self.stager.wait()
        self._adopt_slots()
        if self.stager.planner.plan is None:
            self._plan(moment, self._registry.snapshot())
        self._hold_if_due(moment)

    def _hold(self, moment: Moment, hold_at: int) -> None:
        limit = time.monotonic() + self._welcome.hold_timeout_s
        self._set_state(RankState.HOLDING)
        self._link.inbox.orders.clear()
        self._link.post(Boundary(step=moment.step))
        try:
            while (order := self._next_order(limit)) is not None:
                if order.action == "exit":
                    raise Preempted(moment.step)
                if order.action == "proceed":
                    self._proceed_to = order.step
                    return
                if order.action == "resume":
                    return
                self._stage_when_possible(moment, order.slot, limit)
                limit = time.monotonic() + self._welcome.hold_timeout_s
            log.warning("no order at the boundary of step %d; training goes on", moment.step)
            self._ignored_hold = (hold_at, self._link.inbox.num_connections)
        finally:
            self._set_state(RankState.TRAINING)

    def _next_order(self, limit: float) -> Order | None:
        """The next order, or None when the time is up or the link is lost."""
        try:
            self._wait(
                lambda inbox: bool(inbox.orders) or not inbox.is_connected,
                limit - time.monotonic(),
            )
        except RejectedBySupervisor as error:
            log.warning("%s; training goes on without it", error)
            return None
        with self._link.changed:
            orders = self._link.inbox.orders
            return orders.popleft() if orders else None

    def _stage_when_possible(
        self, moment: Moment, slot: int, limit: float, *, is_final: bool = False
    ) -> bool:
        """Stage at a hold: there is time to wait for slots that were just asked for."""
        self._adopt_slots()  # also takes up an order to prove the equality of replicas anew
        plan = self.stager.planner.plan
        if plan is None or plan.slot_bytes > self.stager.slot_bytes:
            self._plan(moment, self._registry.snapshot())
            self._await_larger_slots(limit)
        return self._stage(moment, slot, is_final=is_final)

    def _await_larger_slots(self, limit: float) -> None:
        """A state that has outgrown its slots waits for new ones: rare, and better than no save."""
        plan = self.stager.planner.plan
        if plan is None or plan.slot_bytes <= self.stager.slot_bytes:
            return
        self._wait(
            lambda inbox: inbox.num_slot_grants != self._num_grants or not inbox.is_connected,
            limit - time.monotonic(),
        )
        self._adopt_slots()

    def request_save(self) -> None:
        """Pass the wish on; lost if the supervisor is away."""
        self._link.post(SaveRequested())

    # ------------------------------------------------------------ finish

    def finish(self, moment: Moment) -> None:
        """Stage the final image, say that training is over, and wait until that is durable.

        Raises:
            Preempted: the order was to leave.
        """
        self.stager.wait()
        self._adopt_slots()
        if self.stager.planner.plan is None:
            self._plan(moment, self._registry.snapshot())
        self._set_state(RankState.FINISHED)
        if not self._stage_final(moment):
            log.warning("the supervisor is away: the end of training is not recorded")
            return
        self._link.post(Finished(step=moment.step))
        is_told = self._wait(
            lambda inbox: inbox.finish is not None or not inbox.is_connected,
            self._welcome.hold_timeout_s,
        )
        finish = self._link.inbox.finish
        if not is_told or finish is None:
            log.warning("the supervisor did not confirm the end of training")
        elif not finish.is_durable:
            log.warning("the end of training is not durable: %s", finish.reason)

    def _stage_final(self, moment: Moment) -> bool:
        limit = time.monotonic() + self._welcome.hold_timeout_s
        self._link.inbox.orders.clear()
        self._link.post(Boundary(step=moment.step))
        while (order := self._next_order(limit)) is not None:
            if order.action == "exit":
                raise Preempted(moment.step)
            if order.action == "stage" and self._stage_when_possible(
                moment, order.slot, limit, is_final=True
            ):
                return True
            if order.action == "proceed":  # the end is recorded without a final image
                return True
            if order.action == "resume":  # a notice was withdrawn meanwhile: ask again
                self._link.post(Boundary(step=moment.step))
        return False

    # ------------------------------------------------------------ waiting

    def _wait(self, is_ready: Callable[[Inbox], bool], timeout_s: float) -> bool:
        """Wait, showing life meanwhile."""
        limit = time.monotonic() + timeout_s
        while (left_s := limit - time.monotonic()) > 0:
            if self._link.wait(is_ready, min(left_s, _BEAT_S)):
                return True
            page = self._link.inbox.page
            if page is not None:
                page.words[BEAT_NS] = time.monotonic_ns()
        return self._link.wait(is_ready, 0)

    def refuse(self, reason: str) -> bool:
        """Say that the script cannot go on, and stay until that is heard; False if closed."""
        if self._is_closed:
            return False
        if self._link.wait(lambda inbox: inbox.welcome is not None, PATIENCE_S):
            self._link.post(RestoreFailed(reason=reason, is_checkpoint_bad=False))
            self._link.wait(lambda inbox: not inbox.is_connected, HEARD_WITHIN_S)
        return True

    def close(self) -> None:
        """Leave; what was sealed stays the supervisor's."""
        self._is_closed = True
        if self._guard is not None:
            self._guard.close()
        self.stager.wait()
        self._link.close()
        self.stager.release()
