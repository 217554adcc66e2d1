"""Copying parameters and optimizer state while the next forward and backward run.

They change in `optimizer.step` only, and a pre-step hook waits for the copy. Whatever changes them
in another way is noticed, and costs that image, never its correctness.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from trainer_sdk.capture import LiveTensor
from trainer_sdk.image import Slot, write_tensors
from trainer_sdk.plan import Place
from trainer_sdk.restoring import sample_of

# Whoever writes a tensor writes nearly always all of it, so a few elements tell.
_MAX_SAMPLE = 32


class Fingerprint:
    """What tells that tensors changed: version counters, addresses, and a sample of values.

    Writes through `.data` do not count versions, so the sample is needed.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        self._tensors = tuple(tensors)
        self._names = tuple(names)
        self._marks = [(tensor._version, tensor.data_ptr()) for tensor in tensors]
        # Views of the live tensors, read twice.
        self._views = [sample_of(tensor, max_sample=_MAX_SAMPLE) for tensor in tensors]
        self._before = self._read()

    def _read(self) -> list[torch.Tensor]:
        groups: dict[torch.dtype, list[torch.Tensor]] = {}
        for view in self._views:
            groups.setdefault(view.dtype, []).append(view)
        return [torch.cat(group) for group in groups.values()]

    def changed(self) -> str:
        """The name of a tensor that changed since, or ""."""
        for name, tensor, mark in zip(self._names, self._tensors, self._marks, strict=True):
            if (tensor._version, tensor.data_ptr()) != mark:
                return name
        for before, now in zip(self._before, self._read(), strict=True):
            if not torch.equal(before, now):
                return self._name_at(before, now)
        return ""

    def _name_at(self, before: torch.Tensor, now: torch.Tensor) -> str:
        first = int((before != now).nonzero()[0])
        for name, view in zip(self._names, self._views, strict=True):
            if view.dtype == before.dtype:
                if first < len(view):
                    return name
                first -= len(view)
        raise AssertionError("the sample is longer than its parts")


class BackgroundCopy:
    """One image's overlapped part. `wait()` returns when the tensors may change again."""

    def __init__(
        self,
        slot: Slot,
        places: Sequence[Place],
        tensors: Mapping[str, LiveTensor],
        on_done: Callable[[str, float], None],
    ) -> None:
        """Start copying on a thread.

        Args:
            on_done: called on that thread, before waiters go on, with the reason why the copy is
                no good ("" when it is) and the seconds that training waited for it.
        """
        self._slot = slot
        self._places = places
        self._tensors = tensors
        self._on_done = on_done
        self._waiting_since: float | None = None
        self._is_done = threading.Event()
        names = sorted({place.name for place in places})
        self._fingerprint = Fingerprint([tensors[name].tensor for name in names], names)
        self._thread = threading.Thread(target=self._copy, name="trainer-sdk-copy", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the copy is over, good or not."""
        if not self._is_done.is_set():
            self._waiting_since = time.perf_counter()
            self._is_done.wait()
        self._thread.join()

    def release(self) -> None:
        """The tensors are about to change."""
        self.wait()

    def _copy(self) -> None:
        try:
            fault = self._try_copy()
            since = self._waiting_since
            waited_s = time.perf_counter() - since if since is not None else 0.0
            self._on_done(fault, waited_s)
        finally:
            self._is_done.set()

    def _try_copy(self) -> str:
        try:
            write_tensors(self._slot, self._places, self._tensors)
            self._slot.flush()
        except (OSError, RuntimeError) as error:
            return f"the copy failed: {error}"
        changed = self._fingerprint.changed()
        return f"{changed} changed before the optimizer's step" if changed else ""
