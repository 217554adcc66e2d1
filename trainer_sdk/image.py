"""Writing an image into a slot: through a mapping, or through a bounce buffer into a file."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from trainer_sdk import failpoints
from trainer_sdk.capture import LiveTensor
from trainer_sdk.dtypes import byte_view
from trainer_sdk.errors import StagingError
from trainer_sdk.plan import Place, Plan
from trainer_sdk.protocol.image import ALIGN_BYTES

_MADV_POPULATE_WRITE = 23  # linux/mman-common.h, since 5.14
_BOUNCE_BYTES = 4 << 20
_POPULATE_STEP_BYTES = 64 << 20


class Slot(Protocol):
    """A place for one image."""

    def write_bytes(self, start: int, content: bytes) -> None:
        """Put plain bytes at an offset of the image."""

    def write_tensor(self, place: Place, live: torch.Tensor) -> None:
        """Put the box of a live tensor at its place; on CUDA this may still be under way."""

    def flush(self) -> None:
        """After this everything written is in the slot (device copies excepted)."""


def boxed(live: torch.Tensor, place: Place) -> torch.Tensor:
    """The part of a live tensor that lies at a place."""
    index = tuple(slice(at, at + size) for at, size in zip(place.box[0], place.box[1], strict=True))
    return live[index] if index else live


class MappedSlot:
    """A slot in memory. Its pages are faulted in ahead of time, off the training thread."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map the slot; the descriptor belongs to this object from now on.

        Raises:
            StagingError: it cannot be mapped.
        """
        try:
            self._map = mmap.mmap(fd, size_bytes)
        except (OSError, ValueError) as error:
            raise StagingError(f"cannot map a slot of {size_bytes} bytes: {error}") from error
        finally:
            os.close(fd)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._is_registered = False
        self._targets: dict[str, tuple[Place, torch.Tensor]] = {}

    def populate(self, stop: threading.Event) -> None:
        """Fault all pages in; an old kernel that cannot only makes the first image slower."""
        libc = ctypes.CDLL(None, use_errno=True)
        start = self.bytes.data_ptr()
        for offset in range(0, len(self.bytes), _POPULATE_STEP_BYTES):
            size = min(_POPULATE_STEP_BYTES, len(self.bytes) - offset)
            at, length = ctypes.c_void_p(start + offset), ctypes.c_size_t(size)
            if stop.is_set() or libc.madvise(at, length, _MADV_POPULATE_WRITE) != 0:
                return

    def register_cuda(self) -> None:
        """Make copies from the device go straight and asynchronously into the mapping."""
        if not self._is_registered:
            result = _cudart().cudaHostRegister(self.bytes.data_ptr(), len(self.bytes), 0)
            # Copies also work from memory that is not registered, only slower.
            self._is_registered = int(result) == 0
            if not self._is_registered:
                # The runtime keeps the error for the next launch check, which would be the user's.
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device="cuda")

    def release(self) -> None:
        """Let go of the memory; what the slot holds stays."""
        if self._is_registered:
            _cudart().cudaHostUnregister(self.bytes.data_ptr())
            self._is_registered = False
        self._targets.clear()

    def write_bytes(self, start: int, content: bytes) -> None:
        self._map[start : start + len(content)] = content

    def write_tensor(self, place: Place, live: torch.Tensor) -> None:
        if place.end > place.start:
            source = boxed(live, place).resolve_conj().resolve_neg()
            self._target(place).copy_(source, non_blocking=True)

    def _target(self, place: Place) -> torch.Tensor:
        held = self._targets.get(place.key)
        if held is None or held[0] != place:
            target = self.bytes[place.start : place.end].view(place.dtype).view(place.box[1])
            held = self._targets[place.key] = (place, target)
        return held[1]

    def flush(self) -> None:
        pass


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class FileSlot:
    """A slot that is a file: written in order through one small aligned buffer.

    Offsets and lengths of every write are whole blocks, so the file may be open for O_DIRECT.
    """

    def __init__(self, fd: int) -> None:
        """Write to a file; the descriptor belongs to this object from now on."""
        self._fd = fd
        self._buffer = mmap.mmap(-1, _BOUNCE_BYTES)
        self._start = 0
        self._fill = 0

    def write_bytes(self, start: int, content: bytes) -> None:
        self._append(start, memoryview(content))

    def write_tensor(self, place: Place, live: torch.Tensor) -> None:
        source = boxed(live, place).resolve_conj().resolve_neg()
        flat = source.reshape(-1)
        step = max(_BOUNCE_BYTES // place.dtype.itemsize, 1)
        at = place.start
        for first in range(0, flat.numel(), step):
            content = byte_view(flat[first : first + step].cpu().contiguous())
            self._append(at, content)
            at += len(content)

    def _append(self, start: int, content: memoryview) -> None:
        if start == 0:
            self._start = self._fill = 0
        if start != self._start + self._fill:
            raise StagingError(f"image bytes out of order: {start}, not {self._start + self._fill}")
        done = 0
        while done < len(content):
            size = min(len(content) - done, _BOUNCE_BYTES - self._fill)
            self._buffer[self._fill : self._fill + size] = content[done : done + size]
            self._fill += size
            done += size
            if self._fill == _BOUNCE_BYTES:
                self._write_out(_BOUNCE_BYTES)

    def _write_out(self, size: int) -> None:
        view = memoryview(self._buffer)[:size]
        done = 0
        try:
            while done < size:
                done += os.pwrite(self._fd, view[done:], self._start + done)
        except OSError as error:
            raise StagingError(f"cannot write the image: {error}") from error
        self._start += size
        self._fill = 0

    def release(self) -> None:
        """Close the file; what it holds stays."""
        os.close(self._fd)

    def flush(self) -> None:
        size = -(-self._fill // ALIGN_BYTES) * ALIGN_BYTES
        self._buffer[self._fill : size] = bytes(size - self._fill)
        self._write_out(size)


def write_small(slot: Slot, plan: Plan, *, state: bytes, rng: Mapping[str, bytes]) -> None:
    """Write header, JSON state and generator states, each at its place."""
    slot.write_bytes(0, plan.header)
    slot.write_bytes(plan.state_start, state.ljust(plan.state_room))
    for name, content in rng.items():
        slot.write_bytes(plan.rng_starts[name], content)


def write_tensors(slot: Slot, places: Iterable[Place], tensors: Mapping[str, LiveTensor]) -> None:
    """Copy the tensors of these places into the slot."""
    failpoints.hit("stage.copy.before")
    with torch.no_grad():
        for place in places:
            slot.write_tensor(place, tensors[place.name].tensor)
    failpoints.hit("stage.copy.after")


def write_in_order(
    slot: Slot,
    plan: Plan,
    tensors: Mapping[str, LiveTensor],
    *,
    state: bytes,
    rng: Mapping[str, bytes],
) -> None:
    """Write a whole image from its first byte to its last."""
    slot.write_bytes(0, plan.header)
    write_tensors(slot, plan.places, tensors)
    slot.write_bytes(plan.state_start, state.ljust(plan.state_room))
    for name, content in rng.items():
        slot.write_bytes(plan.rng_starts[name], content)
    slot.flush()
