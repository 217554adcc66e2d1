"""Which rank stores what, and where in its image: pure functions of the state's structure.

A plan stays valid while the structure (names, shapes, dtypes, devices, world) does not change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from trainer_sdk.dtypes import dtype_name, natural_dtype_name, stored_form
from trainer_sdk.errors import PlanError
from trainer_sdk.layout import (
    METADATA_KEY,
    AliasLayout,
    Box,
    ImageLayout,
    TensorLayout,
    encode_layout,
    flat_boxes,
)
from trainer_sdk.protocol.errors import ImageError
from trainer_sdk.protocol.image import ALIGN_BYTES, STATE_KEY, build_header

MIN_CUT_BYTES = 64 << 10
_ROOM_STEP_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The structure of one stored tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Everything a plan depends on but the world and the proof of equality."""

    tensors: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, AliasLayout], ...]
    rng: tuple[tuple[str, int], ...]

    def digest(self, *, rank: int, world_size: int) -> str:
        """Names the structure; equal structures have equal digests."""
        text = repr((self.tensors, self.aliases, self.rng, rank, world_size))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One entry of the image: the box of `name` lies at `start`, in bytes of the image."""

    key: str
    name: str
    box: Box
    dtype: torch.dtype
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The layout of this rank's image, byte for byte except the content."""

    digest: str
    header: bytes
    places: tuple[Place, ...]
    replicated: tuple[str, ...]
    state_start: int
    state_room: int
    rng_starts: Mapping[str, int]
    image_bytes: int

    @property
    def slot_bytes(self) -> int:
        """What a slot needs: the image, rounded up so that whole blocks can be written."""
        return -(-self.image_bytes // ALIGN_BYTES) * ALIGN_BYTES


def state_room(state_bytes: int) -> int:
    """Bytes to reserve for a JSON state that is now `state_bytes` long."""
    return -(-(state_bytes + state_bytes // 2 + 4096) // _ROOM_STEP_BYTES) * _ROOM_STEP_BYTES


def share_out(
    tensors: Sequence[TensorSpec], *, world_size: int
) -> list[list[tuple[TensorSpec, int, int]]]:
    """Cut replicated tensors into contiguous flat ranges [start, stop), balanced over the ranks.

    A tensor under 64 KiB stays whole. Every rank computes the same.
    """
    shares: list[list[tuple[TensorSpec, int, int]]] = [[] for _ in range(world_size)]
    total = sum(tensor.size_bytes for tensor in tensors)
    position = 0
    for tensor in tensors:
        size = tensor.size_bytes
        if size < MIN_CUT_BYTES:
            middle = position + size // 2
            rank = min(middle * world_size // total, world_size - 1) if total else 0
            shares[rank].append((tensor, 0, prod(tensor.shape)))
        else:
            _cut(shares, tensor, position=position, total=total)
        position += size
    return shares


def _cut(
    shares: list[list[tuple[TensorSpec, int, int]]],
    tensor: TensorSpec,
    *,
    position: int,
    total: int,
) -> None:
    world_size, width = len(shares), tensor.dtype.itemsize
    count = prod(tensor.shape)
    row = prod(tensor.shape[1:])
    if row * width * 100 * world_size > total:
        row = 1  # rows too coarse to balance within a percent
    first = position * world_size // total
    start = 0
    for rank in range(first, world_size):
        border = (total * (rank + 1) // world_size - position) // width
        stop = count if rank == world_size - 1 else min(count, max(start, border // row * row))
        if stop > start:
            shares[rank].append((tensor, start, stop))
        start = stop
        if start == count:
            return


def build_plan(
    structure: Structure,
    *,
    rank: int,
    world_size: int,
    replicated: frozenset[str],
    state_bytes: int,
) -> Plan:
    """Lay out the image of one rank.

    Args:
        replicated: names proven equal on all ranks; each of their pieces is stored by one.
        state_bytes: present length of the JSON state; the plan leaves room for it to grow.

    Raises:
        PlanError: the header would be too large to be read back.
    """
    room = state_room(state_bytes)
    pieces = _pieces(structure, rank=rank, world_size=world_size, replicated=replicated)
    entries: list[tuple[str, str, tuple[int, ...]]] = [(STATE_KEY, "U8", (room,))]
    entries += [(name, "U8", (size,)) for name, size in structure.rng]
    stored = [_entry(piece) for piece in pieces]
    layout = ImageLayout(
        format=1,
        rank=rank,
        world=world_size,
        tensors={piece.key: piece.layout() for piece in pieces},
        aliases=dict(structure.aliases),
    )
    try:
        header, placed = build_header(stored + entries, {METADATA_KEY: encode_layout(layout)})
    except ImageError as error:
        raise PlanError(error.message, hint=error.hint) from error
    starts = {entry.key: placed.data_offset + entry.start for entry in placed.tensors}
    places = tuple(piece.place(starts[piece.key]) for piece in pieces)
    names = tuple(sorted(replicated))
    structure_digest = structure.digest(rank=rank, world_size=world_size)
    return Plan(
        digest=hashlib.sha256(f"{structure_digest}{names}{room}".encode()).hexdigest()[:32],
        header=header,
        places=places,
        replicated=names,
        state_start=starts[STATE_KEY],
        state_room=room,
        rng_starts={name: starts[name] for name, _ in structure.rng},
        image_bytes=placed.image_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    key: str
    spec: TensorSpec
    box: Box
    is_replica: bool

    def layout(self) -> TensorLayout:
        offset, sizes = self.box
        is_whole = sizes == self.spec.shape
        natural = natural_dtype_name(stored_form(self.spec.dtype).dtype)
        name = dtype_name(self.spec.dtype)
        return TensorLayout(
            name="" if self.key == self.spec.name else self.spec.name,
            shape=None if is_whole else self.spec.shape,
            offset=None if is_whole else offset,
            dtype="" if natural == name else name,
            scope="replica" if self.is_replica else "own",
        )

    def place(self, start: int) -> Place:
        size = prod(self.box[1]) * self.spec.dtype.itemsize
        return Place(
            key=self.key,
            name=self.spec.name,
            box=self.box,
            dtype=self.spec.dtype,
            start=start,
            end=start + size,
        )


def _entry(piece: _Piece) -> tuple[str, str, tuple[int, ...]]:
    form = stored_form(piece.spec.dtype)
    return piece.key, form.dtype, piece.box[1] + form.tail


def _pieces(
    structure: Structure, *, rank: int, world_size: int, replicated: frozenset[str]
) -> list[_Piece]:
    shared = [spec for spec in structure.tensors if spec.name in replicated]
    taken = {spec.name for spec in structure.tensors} | {STATE_KEY}
    taken |= {name for name, _ in structure.rng}
    pieces = [
        _Piece(key=spec.name, spec=spec, box=((0,) * len(spec.shape), spec.shape), is_replica=False)
        for spec in structure.tensors
        if spec.name not in replicated
    ]
    for spec, start, stop in share_out(shared, world_size=world_size)[rank]:
        is_whole = stop - start == prod(spec.shape)
        whole: Box = ((0,) * len(spec.shape), spec.shape)
        for box in [whole] if is_whole else flat_boxes(spec.shape, start, stop):
            key = spec.name if is_whole else _new_key(spec.name, box, taken)
            pieces.append(_Piece(key=key, spec=spec, box=box, is_replica=True))
    # Widest items first, so that every tensor lies aligned to its item size.
    return sorted(pieces, key=lambda piece: -piece.spec.dtype.itemsize)


def _new_key(name: str, box: Box, taken: set[str]) -> str:
    key = f"{name}@{','.join(map(str, box[0]))}"
    while key in taken:
        key += "~"
    taken.add(key)
    return key
