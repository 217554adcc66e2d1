"""The act of staging: plan, slots, and one image at a time into them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed.distributed_c10d import PrefixStore

from trainer_sdk import failpoints
from trainer_sdk.capture import Snapshot
from trainer_sdk.cuda_copy import DeviceCopy
from trainer_sdk.errors import PlanError, StagingError
from trainer_sdk.image import FileSlot, MappedSlot, write_in_order, write_small, write_tensors
from trainer_sdk.overlap import BackgroundCopy
from trainer_sdk.plan import Plan, build_plan
from trainer_sdk.protocol.control_page import ControlPage, Seal
from trainer_sdk.protocol.messages import Slots
from trainer_sdk.replicas import content_digest, default_store, prove_replicas, replica_digest

log = logging.getLogger("trainer_sdk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What one image is to hold, and where it goes."""

    snapshot: Snapshot
    state: bytes
    step: int
    generation: int
    slot: int
    page: ControlPage


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedImage:
    """The outcome: a sealed slot, or the `fault` for which it stays unsealed."""

    slot: int
    step: int
    image_bytes: int
    staged_s: float
    blocked_s: float
    replicas: str
    fault: str = ""


class Planner:
    """Keeps the plan of this rank and the names that ever differed between ranks."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.plan: Plan | None = None
        self._signature: tuple[object, ...] = ()
        self._own: set[str] = set()
        self._equal: frozenset[str] = frozenset()

    def is_current(self, snapshot: Snapshot, *, state_bytes: int) -> bool:
        """Whether the plan still fits."""
        return (
            self.plan is not None
            and state_bytes <= self.plan.state_room
            and self._signature == snapshot.signature()
        )

    def make(
        self,
        snapshot: Snapshot,
        *,
        state_bytes: int,
        occasion: str,
        timeout_s: float,
        is_doubted: bool = False,
    ) -> Plan:
        """A new plan; all ranks that plan on the same occasion compare their tensors.

        Where only the JSON state has outgrown its room, which may be so on one rank alone, what was
        proven still holds and nobody is asked, unless `is_doubted`.

        Raises:
            PlanError: the state does not fit into an image.
        """
        if is_doubted or self.plan is None or self._signature != snapshot.signature():
            self._equal = self._replicated(snapshot, occasion=occasion, timeout_s=timeout_s)
        self.plan = build_plan(
            snapshot.structure(),
            rank=self.rank,
            world_size=self.world_size,
            replicated=self._equal,
            state_bytes=state_bytes,
        )
        self._signature = snapshot.signature()
        return self.plan

    def _replicated(self, snapshot: Snapshot, *, occasion: str, timeout_s: float) -> frozenset[str]:
        store = default_store() if self.world_size > 1 else None
        if store is None:
            return frozenset()
        digests = {
            live.name: content_digest(live.tensor)
            for live in snapshot.tensors.values()
            if live.may_be_replica and live.name not in self._own
        }
        try:
            equal, differing = prove_replicas(
                PrefixStore(f"lastgasp/{occasion}", store),
                digests,
                rank=self.rank,
                world_size=self.world_size,
                timeout_s=timeout_s,
            )
        except (TimeoutError, RuntimeError, ValueError) as error:
            log.warning("each rank stores its whole state: equality is not proven: %s", error)
            return frozenset()
        self._own |= differing
        return equal


class Stager:
    """Stages images into the slots of this rank. At most one is under way."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self.planner = Planner(rank=rank, world_size=world_size)
        self.slots: list[MappedSlot | FileSlot] = []
        self.slot_bytes = 0
        self._under_way: BackgroundCopy | DeviceCopy | None = None
        self._stop = threading.Event()
        self._populating: threading.Thread | None = None

    def adopt(self, grant: Slots, fds: Sequence[int]) -> None:
        """Use slots that the supervisor granted instead of those before.

        Raises:
            StagingError: they cannot be mapped; there are no slots then.
        """
        self.wait()
        self.release()
        is_file = grant.staging == "disk"
        self.slots = [FileSlot(fd) if is_file else MappedSlot(fd, grant.slot_bytes) for fd in fds]
        self.slot_bytes = grant.slot_bytes
        mapped = [slot for slot in self.slots if isinstance(slot, MappedSlot)]
        if mapped:
            self._stop = threading.Event()
            self._populating = threading.Thread(
                target=_populate, args=(mapped, self._stop), name="trainer-sdk-pages", daemon=True
            )
            self._populating.start()

    def release(self) -> None:
        """Let go of the slots' memory; sealed images stay."""
        self._stop.set()
        if self._populating is not None:
            self._populating.join()
            self._populating = None
        for slot in self.slots:
            slot.release()
        self.slots = []
        self.slot_bytes = 0

    def wait(self) -> None:
        """Wait until an overlapped copy is over; tensors may change afterwards."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None

    def release_tensors(self) -> None:
        """An optimizer is about to change the tensors."""
        if self._under_way is not None:
            self._under_way.release()

    def stage(
        self, image: Image, *, is_overlapped: bool, on_staged: Callable[[StagedImage], None]
    ) -> None:
        """Write an image and seal its slot; `on_staged` hears of it, perhaps later on a thread.

        Raises:
            StagingError, PlanError: nothing is sealed.
        """
        started = time.perf_counter()
        self.wait()
        plan = self.planner.plan
        if plan is None or not self.slots:
            raise StagingError("the supervisor has given no slots yet")
        if image.slot >= len(self.slots) or plan.image_bytes > self.slot_bytes:
            raise StagingError(f"slot {image.slot} of {self.slot_bytes} bytes is too small")
        if len(image.state) > plan.state_room:
            raise PlanError("the JSON state outgrew its room")
        image.page.unseal(image.slot)
        tensors = image.snapshot.tensors
        replicas = ""
        if self.planner.world_size > 1:
            shared = [tensors[name] for name in plan.replicated]
            replicas = replica_digest(shared, step=image.step, names=plan.replicated)
        act = _Staging(image, plan, replicas, started, on_staged)
        slot = self.slots[image.slot]
        if isinstance(slot, FileSlot):
            write_in_order(slot, plan, tensors, state=image.state, rng=image.snapshot.rng)
            act.finish("", 0.0)
        else:
            self._stage_mapped(slot, act, is_overlapped=is_overlapped)

    def _stage_mapped(self, slot: MappedSlot, act: _Staging, *, is_overlapped: bool) -> None:
        image, plan, tensors = act.image, act.plan, act.image.snapshot.tensors
        write_small(slot, plan, state=image.state, rng=image.snapshot.rng)
        later = [
            place
            for place in plan.places
            if is_overlapped and tensors[place.name].may_be_overlapped
        ]
        names = {place.name for place in later}
        now = [place for place in plan.places if place.name not in names]
        if any(live.tensor.is_cuda for live in tensors.values()):
            slot.register_cuda()
            copy = DeviceCopy(slot, now, later, tensors, act.finish)
            act.pause()
            self._under_way = copy
            if not is_overlapped:
                self.wait()
            return
        write_tensors(slot, now, tensors)
        if not later:
            act.finish("", 0.0)
            return
        self._under_way = BackgroundCopy(slot, later, tensors, act.finish)
        act.pause()


class _Staging:
    """Bookkeeping of one image until its seal."""

    def __init__(
        self,
        image: Image,
        plan: Plan,
        replicas: str,
        started: float,
        on_staged: Callable[[StagedImage], None],
    ) -> None:
        self.image = image
        self.plan = plan
        self._replicas = replicas
        self._started = started
        self._paused_at: float | None = None
        self._on_staged = on_staged

    def pause(self) -> None:
        """Training goes on from here."""
        self._paused_at = time.perf_counter()

    def finish(self, fault: str, waited_s: float) -> None:
        """Seal, unless there is a fault."""
        image, now = self.image, time.perf_counter()
        if not fault:
            failpoints.hit("stage.seal.before")
            image.page.seal(
                image.slot,
                Seal(
                    generation=image.generation,
                    step=image.step,
                    image_bytes=self.plan.image_bytes,
                ),
            )
            failpoints.hit("stage.seal.after")
        blocked_until = self._paused_at if self._paused_at is not None else now
        self._on_staged(
            StagedImage(
                slot=image.slot,
                step=image.step,
                image_bytes=self.plan.image_bytes,
                staged_s=now - self._started,
                blocked_s=min(blocked_until - self._started + waited_s, now - self._started),
                replicas=self._replicas,
                fault=fault,
            )
        )


def _populate(slots: Sequence[MappedSlot], stop: threading.Event) -> None:
    for slot in slots:
        slot.populate(stop)
