"""Live state as named tensors and JSON: what every kind of object hands to a plan.

Nothing is copied here: a snapshot refers to the live tensors, and is good until training goes on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch

from trainer_sdk.dtypes import check_tensor
from trainer_sdk.layout import AliasLayout
from trainer_sdk.plan import Structure, TensorSpec

# A buffer up to this size is covered whole by the replicas' sample, so a later difference shows.
MAX_SAMPLE = 256


class Role(StrEnum):
    """What a tensor is to training: decides who stores it and when it may be copied."""

    PARAMETER = "parameter"
    OPTIMIZER = "optimizer"
    BUFFER = "buffer"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A live tensor under its global name."""

    name: str
    tensor: torch.Tensor
    role: Role

    @property
    def may_be_replica(self) -> bool:
        """Whether ranks may hold it in common and a later difference would be seen."""
        if self.role in (Role.PARAMETER, Role.OPTIMIZER):
            return True
        return self.role is Role.BUFFER and self.tensor.numel() <= MAX_SAMPLE

    @property
    def may_be_overlapped(self) -> bool:
        """Whether it changes in optimizer steps only, and a sample of it is cheap."""
        return self.role in (Role.PARAMETER, Role.OPTIMIZER) and self.tensor.is_contiguous()


class SavedReader(Protocol):
    """What a checkpoint holds, as one rank sees it."""

    def names(self, prefix: str) -> list[str]:
        """Names of saved tensors and aliases under a prefix."""

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Global shape and dtype."""

    def tensor(self, name: str) -> torch.Tensor:
        """A new CPU tensor with the saved content."""

    def copy_into(self, name: str, live: torch.Tensor) -> None:
        """Write the saved content into a live tensor of the same shape and dtype."""


class Sink:
    """Collects the tensors of one snapshot under unique names."""

    def __init__(self) -> None:
        self.tensors: dict[str, LiveTensor] = {}

    def put(self, path: str, tensor: torch.Tensor, role: Role) -> str:
        """Take a tensor; returns its name, which is the path unless that is taken.

        Raises:
            UnsupportedState: the tensor cannot be held.
        """
        check_tensor(path, tensor)
        name = path
        while name in self.tensors:
            name += "~"
        self.tensors[name] = LiveTensor(name, tensor.detach(), role)
        return name

    def put_other(self, path: str, tensor: torch.Tensor) -> str:
        """Take a tensor of an object that is neither module nor optimizer."""
        return self.put(path, tensor, Role.OTHER)


class StateObject(Protocol):
    """One registered object."""

    name: str
    kind: str
    # Whose state it is, where a state says nothing to an object of another class; "" elsewhere.
    class_name: str

    def capture(self, sink: Sink) -> Any:
        """Put the tensors into the sink and return the rest as JSON.

        Raises:
            UnsupportedState: something in it cannot be held.
        """

    def mismatches(self, state: Any, saved: SavedReader) -> list[str]:
        """Why the saved state does not fit; empty when it does. Writes nothing."""

    def apply(self, state: Any, saved: SavedReader) -> None:
        """Restore in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """References to the live state at one instant."""

    tensors: Mapping[str, LiveTensor]
    aliases: Mapping[str, AliasLayout]
    objects: Mapping[str, Any]
    rng: Mapping[str, bytes]

    def signature(self) -> tuple[object, ...]:
        """Equal for snapshots of equal structure; much cheaper than the structure itself."""
        tensors = tuple(
            (name, live.tensor.shape, live.tensor.dtype, live.tensor.device.type)
            for name, live in self.tensors.items()
        )
        rng = tuple((name, len(state)) for name, state in self.rng.items())
        return tensors, tuple(self.aliases.items()), rng

    def structure(self) -> Structure:
        """What a plan depends on."""
        specs = tuple(
            TensorSpec(
                name=live.name,
                shape=tuple(live.tensor.shape),
                dtype=live.tensor.dtype,
                device=live.tensor.device.type,
            )
            for live in self.tensors.values()
        )
        return Structure(
            tensors=specs,
            aliases=tuple(self.aliases.items()),
            rng=tuple((name, len(state)) for name, state in self.rng.items()),
        )


def split_aliases(
    tensors: Iterable[LiveTensor],
) -> tuple[dict[str, LiveTensor], dict[str, AliasLayout]]:
    """Separate tensors to store from those that live in a stored tensor's storage."""
    ordered = list(tensors)
    groups: dict[tuple[object, ...], list[LiveTensor]] = defaultdict(list)
    for live in ordered:
        tensor = live.tensor
        if tensor.numel() and not tensor.is_conj() and not tensor.is_neg():
            key = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.dtype)
            groups[key].append(live)
    aliases: dict[str, AliasLayout] = {}
    for group in groups.values():
        if len(group) > 1:
            aliases |= _aliases_of(group)
    return {live.name: live for live in ordered if live.name not in aliases}, aliases


def _aliases_of(group: list[LiveTensor]) -> dict[str, AliasLayout]:
    aliases: dict[str, AliasLayout] = {}
    bases: list[LiveTensor] = []
    by_size = sorted(
        group, key=lambda live: (not live.tensor.is_contiguous(), -live.tensor.numel())
    )
    for live in by_size:
        found = next(
            (alias for base in bases if (alias := _view_of(base, live.tensor)) is not None), None
        )
        if found is None:
            bases.append(live)
        else:
            aliases[live.name] = found
    return aliases


def _view_of(base: LiveTensor, tensor: torch.Tensor) -> AliasLayout | None:
    held = base.tensor
    geometry = (tensor.storage_offset(), tensor.shape, tensor.stride())
    if geometry == (held.storage_offset(), held.shape, held.stride()):
        return _alias(base, tensor, contiguous_stride(tensor.shape), 0)
    if not held.is_contiguous():
        return None
    first = int(tensor.storage_offset() - held.storage_offset())
    last = first + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if first < 0 or last >= held.numel():
        return None
    return _alias(base, tensor, tensor.stride(), first)


def _alias(
    base: LiveTensor, tensor: torch.Tensor, stride: tuple[int, ...], offset: int
) -> AliasLayout:
    return AliasLayout(of=base.name, shape=tuple(tensor.shape), stride=tuple(stride), offset=offset)


def contiguous_stride(shape: Iterable[int]) -> tuple[int, ...]:
    """The stride, in elements, of a row-major tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(list(shape)):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
