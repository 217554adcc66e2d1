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


class Fingerprint:
    """What tells that tensors changed: version counters, addresses, and a sample of values.

    Writes through `.data` do not count versions, so the sample is needed.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        self._tensors = tuple(tensors)
        self._names = tuple(names)
        self._marks = [(tensor._version, tensor.data_ptr()) for tensor in tensors]
        self._samples = [sample_of(tensor).clone() for tensor in tensors]

    def changed(self) -> str:
        """The name of a tensor that changed since, or ""."""
        for name, tensor, mark, sample in zip(
            self._names, self._tensors, self._marks, self._samples, strict=True
        ):
            if (tensor._version, tensor.data_ptr()) != mark:
                return name
            if not torch.equal(sample_of(tensor), sample):
                return name
        return ""


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
