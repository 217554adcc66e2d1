"""Copies from CUDA devices into a slot: on a side stream, with one wait an image.

All device work is started by the training thread; a background thread only waits for an event.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from trainer_sdk.capture import LiveTensor
from trainer_sdk.image import MappedSlot, write_tensors
from trainer_sdk.plan import Place
from trainer_sdk.restoring import sample_of


class DeviceCopy:
    """One image on its way from the device. `release()` orders later device work after it."""

    def __init__(
        self,
        slot: MappedSlot,
        now: Sequence[Place],
        later: Sequence[Place],
        tensors: Mapping[str, LiveTensor],
        on_done: Callable[[str, float], None],
    ) -> None:
        """Start all copies; those of `now` are over when this returns.

        Args:
            on_done: as for BackgroundCopy.
        """
        self._on_done = on_done
        self._tensors = [tensors[name].tensor for name in sorted({place.name for place in later})]
        self._names = sorted({place.name for place in later})
        self._marks = [(tensor._version, tensor.data_ptr()) for tensor in self._tensors]
        self._waiting_since: float | None = None
        self._fault = ""
        self._is_checked = threading.Event()
        self._devices = sorted(
            {live.tensor.device.index for live in tensors.values() if live.tensor.is_cuda}
        )
        self._before = [sample_of(tensor).clone() for tensor in self._tensors]
        self._streams = {index: _new_stream(index) for index in self._devices}
        for index, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(index))
        self._write(slot, now, tensors)
        first = self._record()
        self._write(slot, later, tensors)
        self._copied = self._record()
        for event in first:
            event.synchronize()
        self._thread: threading.Thread | None = None
        if later:
            self._thread = threading.Thread(
                target=self._finish, name="trainer-sdk-device-copy", daemon=True
            )
            self._thread.start()
        else:
            self._is_checked.set()
            self._finish()

    def _write(
        self, slot: MappedSlot, places: Sequence[Place], tensors: Mapping[str, LiveTensor]
    ) -> None:
        for place in places:
            live = tensors[place.name].tensor
            stream = self._streams[live.device.index] if live.is_cuda else None
            with torch.cuda.stream(stream):
                write_tensors(slot, [place], tensors)

    def _record(self) -> list[torch.cuda.Event]:
        return [stream.record_event() for stream in self._streams.values()]

    def wait(self) -> None:
        """Wait until the image is sealed or given up."""
        self.release()
        if self._thread is not None:
            self._thread.join()

    def release(self) -> None:
        """Check that nothing changed so far, and order the current streams after the copy.

        The host waits for the check, so for what is queued before the optimizer's step, but not for
        the copy. Never raises: this runs inside the user's optimizer.
        """
        if self._is_checked.is_set():
            return
        self._waiting_since = time.perf_counter()
        try:
            self._fault = self._changed()
            for event, index in zip(self._copied, self._devices, strict=True):
                torch.cuda.current_stream(index).wait_event(event)
        except RuntimeError as error:
            self._fault = f"the copy could not be ordered before the optimizer's step: {error}"
        finally:
            self._is_checked.set()

    def _changed(self) -> str:
        for name, tensor, mark in zip(self._names, self._tensors, self._marks, strict=True):
            if (tensor._version, tensor.data_ptr()) != mark:
                return f"{name} changed before the optimizer's step"
        differing = [
            (sample_of(tensor) != before).any()
            for tensor, before in zip(self._tensors, self._before, strict=True)
        ]
        if differing and bool(torch.stack([each.cpu() for each in differing]).any()):
            return "a parameter's values changed before the optimizer's step"
        return ""

    def _finish(self) -> None:
        failed = ""
        try:
            for event in self._copied:
                event.synchronize()
        except RuntimeError as error:
            failed = f"the copy failed: {error}"
        self._is_checked.wait()
        waited_s = time.perf_counter() - self._waiting_since if self._waiting_since else 0.0
        self._on_done(failed or self._fault, waited_s)


def _new_stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
