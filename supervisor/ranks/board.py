"""Every rank of this node with its link, control page and slots, and what it says as events.

Owned by the main thread: link threads only post. Slots stay when a rank dies, since the newest
whole set of images is what the next life restores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from supervisor.clock import Clock
from supervisor.lifecycle import inputs
from supervisor.lifecycle.inputs import Event
from supervisor.ranks.link import Incoming, Link
from supervisor.ranks.slots import SlotBuffer, round_up
from trainer_sdk.protocol import messages
from trainer_sdk.protocol.control_page import ControlPage, RankState, Seal
from trainer_sdk.protocol.errors import ProtocolError
from trainer_sdk.protocol.framing import close_all

NUM_SLOTS = 2


@dataclass(slots=True)
class Seat:
    """One rank of this node. `page` is of its present life; `slots` may be of an earlier one.

    `is_page_handed`: the rank already has its page. `seals` says which image each slot holds; it
    outlives the page that said so first.
    """

    rank: int
    page: ControlPage
    link: Link | None = None
    incarnation: str = ""
    hello: messages.Hello | None = None
    is_page_handed: bool = False
    slots: list[SlotBuffer] = field(default_factory=list)
    slot_bytes: int = 0
    seals: dict[int, Seal] = field(default_factory=dict)
    receipt: str = ""


class RankBoard:
    """The seats of all ranks, and the translation of their messages into lifecycle events."""

    def __init__(
        self,
        *,
        clock: Clock,
        launch: Callable[[], str],
        make_slot: Callable[[int, int, int, int], SlotBuffer],
    ) -> None:
        """`make_slot(rank, slot, size_bytes, num_ranks)` gives a buffer, in memory or on disk."""
        self.seats: dict[int, Seat] = {}
        self._clock = clock
        self._launch = launch
        self._make_slot = make_slot

    # ------------------------------------------------------------ from the ranks

    def receive(self, incoming: Incoming) -> list[Event]:
        """Events of one message.

        Raises:
            ProtocolError: the peer broke the protocol; the caller drops its link.
        """
        message = incoming.message
        if isinstance(message, messages.Hello):
            return self._hello(incoming, message)
        close_all(incoming.fds)
        rank = incoming.link.rank
        if rank is None:
            raise ProtocolError(f"{type(message).__name__} before Hello")
        seat = self.seats.get(rank)
        if seat is None or seat.link is not incoming.link:
            return []  # a link that was replaced by a newer one of the same rank
        return self._translate(seat, message)

    def _hello(self, incoming: Incoming, hello: messages.Hello) -> list[Event]:
        link, fds = incoming.link, list(incoming.fds)
        if hello.protocol != messages.PROTOCOL_VERSION or hello.launch != self._launch():
            close_all(fds)
            self._reject(link, hello)
            return []
        seat = self.seats.get(hello.rank)
        if seat is not None and _is_held_by_another(seat, hello):
            close_all(fds)
            self._refuse_second(link, seat, hello)
            return []
        if seat is not None and seat.incarnation == hello.incarnation:
            close_all(fds)  # only the connection broke; the page and the slots are ours already
        else:
            seat = self._seat_new_life(hello, fds, old=seat)
        if seat.link is not None and seat.link is not link:
            seat.link.close()
        link.rank = hello.rank
        seat.link, seat.hello, seat.incarnation = link, hello, hello.incarnation
        seat.is_page_handed = bool(incoming.fds)
        self.seats[hello.rank] = seat
        return [
            inputs.RankJoined(
                rank=hello.rank,
                world_size=hello.world_size,
                incarnation=hello.incarnation,
                generation=hello.generation,
                has_restored=hello.has_restored,
                has_slots=hello.num_slots >= NUM_SLOTS,
                seals=tuple(
                    (slot, seal.generation, seal.step, seal.image_bytes)
                    for slot, seal in sorted(seat.seals.items())
                ),
            )
        ]

    def _reject(self, link: Link, hello: messages.Hello) -> None:
        if hello.protocol != messages.PROTOCOL_VERSION:
            error_id = "version_mismatch"
            reason = (
                f"this supervisor speaks protocol {messages.PROTOCOL_VERSION}, the SDK "
                f"{hello.protocol}: install the same lastgasp version for both"
            )
        else:
            error_id, reason = "launch_unknown", "this process belongs to an earlier launch"
        link.send(messages.Rejected(error_id=error_id, reason=reason))

    def _refuse_second(self, link: Link, seat: Seat, hello: messages.Hello) -> None:
        assert seat.hello is not None
        reason = (
            f"process {seat.hello.pid} is rank {hello.rank} of this job, so process {hello.pid} "
            "cannot be: call attach() in the process that trains, and only there"
        )
        link.send(messages.Rejected(error_id="duplicate_rank", reason=reason))

    def _seat_new_life(self, hello: messages.Hello, fds: list[int], *, old: Seat | None) -> Seat:
        if fds:
            if len(fds) != 1 + hello.num_slots:
                close_all(fds)
                raise ProtocolError(f"{len(fds)} descriptors for {hello.num_slots} slots")
            page = _page_from(fds)
            slots = [SlotBuffer.handed_back(fd) for fd in fds[1:]]
            seat = Seat(
                rank=hello.rank,
                page=page,
                slots=slots,
                slot_bytes=min((slot.size_bytes for slot in slots), default=0),
            )
            self._read_seals(seat)
            # What an earlier supervisor asked for is void: nobody would answer.
            page.clear_save()
            page.clear_hold()
            page.raise_notice(0)
            return seat
        page = ControlPage.create(f"lastgasp-page-{hello.rank}")
        if old is None:
            return Seat(rank=hello.rank, page=page)
        old.page.close()
        return Seat(
            rank=hello.rank,
            page=page,
            slots=old.slots,
            slot_bytes=old.slot_bytes,
            seals=old.seals,
        )

    def _read_seals(self, seat: Seat) -> None:
        for slot, buffer in enumerate(seat.slots):
            seal = seat.page.read_seal(slot)
            if seal is not None and seal.image_bytes <= buffer.size_bytes:
                seat.seals[slot] = seal

    def _translate(self, seat: Seat, message: messages.ClientMessage) -> list[Event]:
        rank = seat.rank
        match message:
            case messages.Planned(slot_bytes=size):
                keeps = bool(seat.slots) and round_up(size) == seat.slot_bytes
                return [inputs.RankPlanned(rank=rank, slot_bytes=size, keeps_slots=keeps)]
            case messages.Sealed():
                return [self._sealed(seat, message)]
            case messages.Unsealed(slot=slot, step=step, reason=reason):
                if slot >= NUM_SLOTS:
                    raise ProtocolError(f"slot {slot} does not exist")
                return [inputs.RankUnsealed(rank=rank, slot=slot, step=step, reason=reason)]
            case messages.Boundary(step=step):
                is_ending = seat.page.rank_state == RankState.FINISHED
                return [inputs.RankAtBoundary(rank=rank, step=step, is_ending=is_ending)]
            case messages.Restored(step=step, receipt=receipt):
                seat.receipt = receipt
                return [inputs.RankRestored(rank=rank, step=step)]
            case messages.RestoreFailed(reason=reason, is_checkpoint_bad=is_bad):
                return [
                    inputs.RankRestoreFailed(rank=rank, reason=reason, is_checkpoint_bad=is_bad)
                ]
            case messages.SaveRequested():
                return [inputs.SaveRequested(source="sdk")]
            case messages.Finished(step=step):
                return [inputs.RankFinished(rank=rank, step=step)]
            case _:
                return []

    def _sealed(self, seat: Seat, message: messages.Sealed) -> Event:
        """The commit word is believed, not the message: both must say the same."""
        seal = seat.page.read_seal(message.slot) if message.slot < len(seat.slots) else None
        if seal is None or (seal.step, seal.image_bytes) != (message.step, message.image_bytes):
            raise ProtocolError(
                f"rank {seat.rank} says slot {message.slot} holds step {message.step}, its commit "
                f"word says {seal}"
            )
        if seal.image_bytes > seat.slots[message.slot].size_bytes:
            raise ProtocolError(f"an image of {seal.image_bytes} bytes does not fit its slot")
        seat.seals[message.slot] = seal
        return inputs.RankSealed(
            rank=seat.rank,
            slot=message.slot,
            step=message.step,
            image_bytes=message.image_bytes,
            replicas=message.replicas,
            is_final=message.is_final,
        )

    def lost(self, link: Link) -> list[Event]:
        """Events of a connection that ended."""
        seat = self.seats.get(link.rank) if link.rank is not None else None
        if seat is None or seat.link is not link:
            return []
        seat.link = None
        return [inputs.RankLost(rank=seat.rank)]

    # ------------------------------------------------------------ to the ranks

    def send(
        self, rank: int, message: messages.SupervisorMessage, fds: tuple[int, ...] = ()
    ) -> bool:
        """Send to a rank; False if it is not connected (it asks again when it comes back)."""
        seat = self.seats.get(rank)
        return seat is not None and seat.link is not None and seat.link.send(message, fds)

    def allocate(self, rank: int, slot_bytes: int) -> None:
        """Give a rank slots of at least `slot_bytes`; those it has are kept if they are as large.

        Raises:
            OSError: no memory or space; the rank keeps what it had.
        """
        seat = self.seats[rank]
        size_bytes = round_up(slot_bytes)
        if not seat.slots or seat.slot_bytes != size_bytes:
            seat.slots = [
                self._make_slot(rank, slot, size_bytes, len(self.seats))
                for slot in range(NUM_SLOTS)
            ]
            seat.slot_bytes = size_bytes
            seat.seals.clear()
        is_on_disk = any(slot.is_on_disk for slot in seat.slots)
        message = messages.Slots(
            slot_bytes=size_bytes,
            num_slots=NUM_SLOTS,
            staging="disk" if is_on_disk else "memory",
        )
        self.send(rank, message, tuple(slot.fd for slot in seat.slots))

    def drop_ranks_from(self, world_size: int) -> None:
        """Forget ranks that a smaller group does not have."""
        for rank in [rank for rank in self.seats if rank >= world_size]:
            del self.seats[rank]

    # ------------------------------------------------------------ what the pages say

    def steps(self) -> dict[int, int]:
        """Each connected rank's last published boundary."""
        return {rank: seat.page.step for rank, seat in self.seats.items() if seat.link is not None}

    def beat_age_s(self) -> float | None:
        """Seconds since the freshest sign of progress of any rank."""
        beats = [seat.page.beat_ns for seat in self.seats.values() if seat.page.beat_ns]
        return self._clock.monotonic() - max(beats) / 1e9 if beats else None

    def sealed_sets(self) -> list[dict[int, tuple[SlotBuffer, int]]]:
        """What each slot index holds over the ranks, whatever step it is of."""
        return [
            {
                rank: (seat.slots[slot], seat.seals[slot].image_bytes)
                for rank, seat in self.seats.items()
                if slot in seat.seals
            }
            for slot in range(NUM_SLOTS)
        ]

    def forget_image(self, slot: int) -> None:
        """The slot is about to be written on every rank."""
        for seat in self.seats.values():
            seat.seals.pop(slot, None)

    def images(self, slot: int, *, step: int) -> dict[int, tuple[SlotBuffer, int]]:
        """Each rank's sealed image of `step` in this slot, with its size in bytes."""
        return {
            rank: (seat.slots[slot], seat.seals[slot].image_bytes)
            for rank, seat in self.seats.items()
            if slot in seat.seals and seat.seals[slot].step == step
        }


def _is_held_by_another(seat: Seat, hello: messages.Hello) -> bool:
    """Whether another process is this rank and still there: a rank that died has lost its link."""
    is_other = seat.hello is not None and seat.hello.pid != hello.pid
    return is_other and seat.link is not None and not seat.link.is_closed


def _page_from(fds: list[int]) -> ControlPage:
    """The control page that a rank hands back; on an error every descriptor is closed.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return ControlPage(fds[0])
    except ProtocolError:
        close_all(fds[1:])
        raise
    except (OSError, ValueError) as error:  # not mappable: a pipe, or opened for reading only
        close_all(fds)
        raise ProtocolError(f"not a control page: {error}") from error
