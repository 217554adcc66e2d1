"""Everything with a state of its own that is neither module, optimizer nor loader."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch.optim import Optimizer

from trainer_sdk.capture import SavedReader, Sink
from trainer_sdk.errors import UnsupportedState
from trainer_sdk.modules import describe_difference
from trainer_sdk.tree import decode_tree, encode_tree


class StatefulObject:
    """An object with `state_dict()` and `load_state_dict()` of plain values and tensors."""

    kind = "stateful"

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value
        self.class_name = type(value).__qualname__

    def read(self) -> Any:
        """The object's own state."""
        return self.value.state_dict()

    def write(self, state: Any) -> None:
        """Give the object its state back."""
        self.value.load_state_dict(state)

    def capture(self, sink: Sink) -> Any:
        return encode_tree(self.read(), self.name, sink.put_other)

    def mismatches(self, state: Any, saved: SavedReader) -> list[str]:
        return []

    def goes_by_groups_of(self, optimizer: Optimizer) -> bool:
        """Whether it is a scheduler of this optimizer, so that it may keep values by the position
        of the parameter groups."""
        return getattr(self.value, "optimizer", None) is optimizer

    def apply(self, state: Any, saved: SavedReader) -> None:
        self.write(decode_tree(state, self.name, saved.tensor))


class TorchGeneratorObject(StatefulObject):
    """A torch.Generator of the user's own."""

    kind = "torch-generator"

    def read(self) -> Any:
        return self.value.get_state()

    def write(self, state: Any) -> None:
        self.value.set_state(state)


class PythonGeneratorObject(StatefulObject):
    """A random.Random of the user's own."""

    kind = "python-generator"

    def read(self) -> Any:
        return self.value.getstate()

    def write(self, state: Any) -> None:
        self.value.setstate(state)


class NumpyGeneratorObject(StatefulObject):
    """A numpy.random.Generator, BitGenerator or RandomState of the user's own."""

    kind = "numpy-generator"

    def read(self) -> Any:
        if hasattr(self.value, "get_state"):
            return self.value.get_state(legacy=False)
        return self._bits.state

    def write(self, state: Any) -> None:
        if hasattr(self.value, "set_state"):
            self.value.set_state(state)
        else:
            self._bits.state = state

    @property
    def _bits(self) -> Any:
        return getattr(self.value, "bit_generator", self.value)


class TensorObject:
    """One tensor, restored in place."""

    kind = "tensor"
    class_name = ""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor

    def capture(self, sink: Sink) -> Any:
        return sink.put_other(f"{self.name}/tensor", self.tensor)

    def mismatches(self, state: Any, saved: SavedReader) -> list[str]:
        fault = describe_difference(self.tensor, saved.spec(state))
        return [f"{self.name}: {fault}"] if fault else []

    def apply(self, state: Any, saved: SavedReader) -> None:
        saved.copy_into(state, self.tensor)


def stateful_object(name: str, value: Any) -> StatefulObject | TensorObject:
    """Wrap an object of any of these kinds.

    Raises:
        UnsupportedState: it has no state that could be read.
    """
    if isinstance(value, torch.Tensor):
        return TensorObject(name, value)
    if isinstance(value, torch.Generator):
        return TorchGeneratorObject(name, value)
    if isinstance(value, random.SystemRandom):
        raise UnsupportedState(name, "draws from the machine's entropy, which has no state")
    if isinstance(value, random.Random):
        return PythonGeneratorObject(name, value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(
        value,
        numpy.random.Generator | numpy.random.BitGenerator | numpy.random.RandomState,
    ):
        return NumpyGeneratorObject(name, value)
    if callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    ):
        return StatefulObject(name, value)
    raise UnsupportedState(
        name,
        f"a {type(value).__qualname__} has no state_dict() and load_state_dict()",
        hint="keep plain values in run.user",
    )
