"""The control page: one 4096-byte memfd a rank, read and written by both sides without a call.

Words are little-endian u64 at 8-byte boundaries, so each load and store is whole. The supervisor
writes the first sixteen words and nothing else; the rank writes the rest. A slot's `seal` word is
its commit word: zero while the slot is empty or being written, and written last.

A rank publishes its boundary (`step`) before it reads `act_at`; the supervisor writes `act_at`
before it reads `step`. So one of the two sees the other, but for what a processor may still hold in
its store buffer; the stop step therefore rises to wherever a late rank turns up, and a save that a
rank passed is dropped (FORMAT.md, "Control page").
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

from trainer_sdk.protocol.errors import ProtocolError

PAGE_BYTES = 4096
MAGIC = int.from_bytes(b"LGASP\x00\x00\x01", "little")
NEVER = (1 << 63) - 1

# Written by the supervisor.
_MAGIC = 0
ACT_AT = 1
_HOLD_AT = 2
_SAVE_AT = 3
_SAVE_SLOT = 4
_DEADLINE_NS = 5
_NOTICE = 6
# Written by the rank.
STEP = 16
BEAT_NS = 17
_STATE = 18
_PID = 19
_SLOT_BASE = 64
_SLOT_WORDS = 8
_SEAL, _SLOT_GENERATION, _SLOT_STEP, _SLOT_BYTES, _SLOT_CHECK = range(5)
_MIX = 0x9E3779B97F4A7C15
_U64 = (1 << 64) - 1


class RankState:
    """What a rank says it is doing."""

    STARTING = 0
    RESTORING = 1
    TRAINING = 2
    HOLDING = 3
    FINISHED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """What a sealed slot holds: the image of (generation, step), `image_bytes` long."""

    generation: int
    step: int
    image_bytes: int


def _check(*words: int) -> int:
    mixed = _MIX
    for word in words:
        mixed = ((mixed ^ word) * _MIX) & _U64
    return mixed | 1


class ControlPage:
    """One mapped control page.

    Invariant: a slot reads as sealed only if its commit word belongs to its other words.
    """

    def __init__(self, fd: int) -> None:
        """Map the page; the descriptor is owned by this object from now on.

        Raises:
            ProtocolError: not a control page of this version.
        """
        if os.fstat(fd).st_size != PAGE_BYTES:
            os.close(fd)
            raise ProtocolError("a control page must be 4096 bytes")
        self.fd = fd
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self.words = memoryview(self._map).cast("Q")
        if self.words[_MAGIC] != MAGIC:
            self.close()
            raise ProtocolError("not a control page of this version")

    @classmethod
    def create(cls, name: str) -> ControlPage:
        """A fresh page in a new memfd: nothing asked for, no slot sealed."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES)
        os.pwrite(fd, MAGIC.to_bytes(8, "little"), 0)
        page = cls(fd)
        page.words[ACT_AT] = page.words[_HOLD_AT] = page.words[_SAVE_AT] = NEVER
        return page

    # ------------------------------------------------------------ supervisor's side

    def ask_save(self, step: int, slot: int) -> None:
        """Have the rank stage into `slot` at exactly this boundary, without waiting for anyone."""
        self.words[_SAVE_SLOT] = slot
        self.words[_SAVE_AT] = step
        self._refresh_act_at()

    def ask_hold(self, step: int) -> None:
        """Have the rank wait for an Order at the first boundary at or past `step`."""
        self.words[_HOLD_AT] = step
        self._refresh_act_at()

    def clear_save(self) -> None:
        """No save is asked for."""
        self.words[_SAVE_AT] = NEVER
        self._refresh_act_at()

    def clear_hold(self) -> None:
        """No hold is asked for."""
        self.words[_HOLD_AT] = NEVER
        self._refresh_act_at()

    def raise_notice(self, deadline_ns: int) -> None:
        """Show the deadline of a notice, in CLOCK_MONOTONIC nanoseconds; 0 takes it back."""
        self.words[_DEADLINE_NS] = deadline_ns
        self.words[_NOTICE] = self.words[_NOTICE] + 1

    def _refresh_act_at(self) -> None:
        self.words[ACT_AT] = min(self.words[_HOLD_AT], self.words[_SAVE_AT])

    # ------------------------------------------------------------ rank's side

    @property
    def save_at(self) -> int:
        return self.words[_SAVE_AT]

    @property
    def save_slot(self) -> int:
        return self.words[_SAVE_SLOT]

    @property
    def hold_at(self) -> int:
        return self.words[_HOLD_AT]

    @property
    def deadline_ns(self) -> int:
        return self.words[_DEADLINE_NS]

    def set_rank_state(self, state: int, pid: int) -> None:
        """Say what the rank is doing."""
        self.words[_STATE] = state
        self.words[_PID] = pid

    def unseal(self, slot: int) -> None:
        """The slot is about to be written: from here on it holds nothing."""
        self.words[_SLOT_BASE + slot * _SLOT_WORDS + _SEAL] = 0

    def seal(self, slot: int, seal: Seal) -> None:
        """Write the commit word of a slot whose image is whole. Always the last write."""
        base = _SLOT_BASE + slot * _SLOT_WORDS
        self.words[base + _SLOT_GENERATION] = seal.generation
        self.words[base + _SLOT_STEP] = seal.step
        self.words[base + _SLOT_BYTES] = seal.image_bytes
        self.words[base + _SEAL] = _check(slot, seal.generation, seal.step, seal.image_bytes)

    # ------------------------------------------------------------ both

    @property
    def step(self) -> int:
        """The last boundary that the rank passed or stands at."""
        return self.words[STEP]

    @property
    def beat_ns(self) -> int:
        """CLOCK_MONOTONIC of the last sign of life, in nanoseconds."""
        return self.words[BEAT_NS]

    @property
    def rank_state(self) -> int:
        return self.words[_STATE]

    @property
    def pid(self) -> int:
        return self.words[_PID]

    def read_seal(self, slot: int) -> Seal | None:
        """What the slot holds, or None while it is empty, being written or torn."""
        base = _SLOT_BASE + slot * _SLOT_WORDS
        seal = Seal(
            generation=self.words[base + _SLOT_GENERATION],
            step=self.words[base + _SLOT_STEP],
            image_bytes=self.words[base + _SLOT_BYTES],
        )
        whole = _check(slot, seal.generation, seal.step, seal.image_bytes)
        return seal if self.words[base + _SEAL] == whole else None

    def close(self) -> None:
        """Unmap and close; the page lives on while the other side holds it."""
        self.words.release()
        self._map.close()
        os.close(self.fd)
