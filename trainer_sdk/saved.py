"""The images of one checkpoint as one rank sees them: proven complete before a byte is used."""

from __future__ import annotations

import json
import mmap
import os
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from trainer_sdk.capture import contiguous_stride
from trainer_sdk.dtypes import dtype_from_name, natural_dtype_name, stored_form
from trainer_sdk.errors import RestoreError
from trainer_sdk.layout import (
    METADATA_KEY,
    AliasLayout,
    Box,
    ImageLayout,
    coverage_fault,
    decode_layout,
)
from trainer_sdk.protocol.errors import ImageError
from trainer_sdk.protocol.image import STATE_KEY, ImageHeader, TensorEntry, parse_header
from trainer_sdk.rng import PREFIX as RNG_PREFIX


def _bad(message: str) -> RestoreError:
    return RestoreError(message, is_checkpoint_bad=True)


class SavedImage:
    """One image, read-only: mapped, or read in pieces where it cannot be mapped."""

    def __init__(self, fd: int, *, size_bytes: int, name: str) -> None:
        """Open an image; the descriptor belongs to this object from now on.

        Raises:
            RestoreError: not an image of our layout; the checkpoint is bad.
        """
        self._fd = fd
        self._map: mmap.mmap | None = None
        try:
            if os.fstat(fd).st_size < size_bytes:
                raise _bad(f"image {name} is shorter than its {size_bytes} bytes")
            self._map = _map(fd, size_bytes)
            self.header = self._read_header(size_bytes)
            text = self.header.metadata.get(METADATA_KEY)
            if text is None:
                raise _bad(f"image {name} has no layout")
            self.layout: ImageLayout = decode_layout(text)
            self.entries = {entry.key: entry for entry in self.header.tensors}
        except ImageError as error:
            self.close()
            raise _bad(f"image {name}: {error.message}") from error
        except BaseException:
            self.close()
            raise

    def _read_header(self, size_bytes: int) -> ImageHeader:
        head = os.pread(self._fd, 8, 0)
        length = min(8 + int.from_bytes(head, "little"), size_bytes, 8 + (16 << 20))
        return parse_header(memoryview(os.pread(self._fd, length, 0)), image_bytes=size_bytes)

    def content(self, entry: TensorEntry) -> torch.Tensor:
        """The bytes of an entry; not to be written to."""
        size = entry.size_bytes
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        start = self.header.data_offset + entry.start
        if self._map is None:
            return torch.frombuffer(_read(self._fd, start, size), dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
            return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=start)

    def close(self) -> None:
        """Close the descriptor; the mapping goes with its last tensor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._map = None


def _map(fd: int, size_bytes: int) -> mmap.mmap | None:
    try:
        return mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except (OSError, ValueError):  # an address-space limit: read piece by piece instead
        return None


def _read(fd: int, start: int, size: int) -> bytearray:
    content = bytearray(size)
    done = os.preadv(fd, [content], start)
    while done < size:
        got = os.preadv(fd, [memoryview(content)[done:]], start + done)
        if got == 0:
            raise _bad("an image ended while it was read")
        done += got
    return content


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    image: SavedImage
    entry: TensorEntry
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    scope: str
    pieces: tuple[_Piece, ...]

    @property
    def whole(self) -> _Piece | None:
        return self.pieces[0] if len(self.pieces) == 1 else None


class SavedState:
    """What one rank takes from a checkpoint.

    Invariant: the boxes of every tensor add up to it, without hole or overlap.
    """

    def __init__(self, images: Sequence[SavedImage], *, rank: int) -> None:
        """Prove that the images are one complete checkpoint.

        Args:
            images: all shards of the checkpoint, in any order.
            rank: the rank that restores; it takes per-rank state of `saved_rank`.

        Raises:
            RestoreError: a missing rank, a hole, a conflict or an unreadable state.
        """
        self.images = tuple(images)
        self.saved_world = _common_world(images)
        self.saved_rank = rank % self.saved_world
        own = [image for image in images if image.layout.rank == self.saved_rank]
        self.aliases: dict[str, AliasLayout] = {}
        for image in own:
            self.aliases |= image.layout.aliases
        self._tensors = self._collect()
        faults = [
            f"{name}: {fault}"
            for name, saved in self._tensors.items()
            if (fault := coverage_fault(saved.shape, [piece.box for piece in saved.pieces]))
        ]
        faults += self._alias_faults()
        if faults:
            raise RestoreError(
                "the images do not add up", mismatches=faults, is_checkpoint_bad=True
            )
        self.state: Mapping[str, Any] = _read_state(own)
        self.rng = {
            entry.key.removeprefix(RNG_PREFIX): image.content(entry).numpy().tobytes()
            for image in own
            for entry in image.header.tensors
            if entry.key.startswith(RNG_PREFIX)
        }

    def state_of_rank(self, rank: int) -> Mapping[str, Any]:
        """The JSON state that another rank saved.

        Raises:
            RestoreError: it is missing or unreadable.
        """
        if rank == self.saved_rank:
            return self.state
        return _read_state([image for image in self.images if image.layout.rank == rank])

    def _collect(self) -> dict[str, _SavedTensor]:
        pieces: dict[str, list[tuple[_Piece, tuple[int, ...], torch.dtype, str]]] = defaultdict(
            list
        )
        for image in self.images:
            is_own = image.layout.rank == self.saved_rank
            for key, layout in image.layout.tensors.items():
                if layout.scope == "own" and not is_own:
                    continue
                entry = image.entries.get(key)
                if entry is None:
                    raise _bad(f"{key}: in the layout, not in the image")
                dtype = _saved_dtype(key, layout.dtype, entry)
                tail = len(stored_form(dtype).tail)
                sizes = entry.shape[: len(entry.shape) - tail]
                offset = layout.offset if layout.offset is not None else (0,) * len(sizes)
                shape = layout.shape if layout.shape is not None else sizes
                piece = _Piece(image=image, entry=entry, box=(offset, sizes))
                pieces[layout.name or key].append((piece, shape, dtype, layout.scope))
        return {name: _join(name, found) for name, found in pieces.items()}

    def _alias_faults(self) -> list[str]:
        faults = []
        for name, alias in self.aliases.items():
            base = self._tensors.get(alias.of)
            last = alias.offset + sum(
                max(size - 1, 0) * stride
                for size, stride in zip(alias.shape, alias.stride, strict=False)
            )
            if base is None or len(alias.shape) != len(alias.stride) or last >= prod(base.shape):
                faults.append(f"{name}: an alias of {alias.of}, which does not hold it")
        return faults

    # ------------------------------------------------------------ SavedReader

    def names(self, prefix: str) -> list[str]:
        """Names of saved tensors and aliases under a prefix."""
        return [name for name in (*self._tensors, *self.aliases) if name.startswith(prefix)]

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Global shape and dtype."""
        alias = self.aliases.get(name)
        if alias is not None:
            return alias.shape, self._find(alias.of).dtype
        saved = self._find(name)
        return saved.shape, saved.dtype

    def is_replica(self, name: str) -> bool:
        """Whether all saved ranks held this tensor in common."""
        alias = self.aliases.get(name)
        return self._find(alias.of if alias is not None else name).scope == "replica"

    def tensor(self, name: str) -> torch.Tensor:
        """A new CPU tensor with the saved content."""
        return self.view(name).clone(memory_format=torch.contiguous_format)

    def view(self, name: str) -> torch.Tensor:
        """The saved content, only to be read; a copy where it lies in several pieces."""
        alias = self.aliases.get(name)
        if alias is not None:
            base = self.view(alias.of).reshape(-1)
            offset = base.storage_offset() + alias.offset
            return base.as_strided(alias.shape, alias.stride, offset)
        saved = self._find(name)
        if saved.whole is not None:
            return _piece_view(saved.whole, saved.dtype)
        joined = torch.empty(saved.shape, dtype=saved.dtype)
        self._copy_pieces(saved, joined)
        return joined

    def copy_into(self, name: str, live: torch.Tensor) -> None:
        """Write the saved content into a live tensor of the same shape and dtype."""
        with torch.no_grad():
            if name in self.aliases:
                _copy(live, self.view(name))
            else:
                self._copy_pieces(self._find(name), live.detach())

    def _copy_pieces(self, saved: _SavedTensor, target: torch.Tensor) -> None:
        for piece in saved.pieces:
            offset, sizes = piece.box
            index = tuple(slice(at, at + size) for at, size in zip(offset, sizes, strict=True))
            _copy(target[index] if index else target, _piece_view(piece, saved.dtype))

    def _find(self, name: str) -> _SavedTensor:
        saved = self._tensors.get(name)
        if saved is None:
            raise _bad(f"{name}: the state refers to it, but no image holds it")
        return saved

    def close(self) -> None:
        """Let go of the images."""
        for image in self.images:
            image.close()


def _common_world(images: Sequence[SavedImage]) -> int:
    worlds = {image.layout.world for image in images}
    if len(worlds) != 1:
        raise _bad(f"the images are of {sorted(worlds)} ranks, not of one checkpoint")
    (world,) = worlds
    missing = set(range(world)) - {image.layout.rank for image in images}
    if missing:
        raise _bad(f"no image of rank {', '.join(map(str, sorted(missing)))}")
    if len(images) != world:
        raise _bad(f"{len(images)} images of {world} ranks")
    return world


def _join(name: str, found: list[tuple[_Piece, tuple[int, ...], torch.dtype, str]]) -> _SavedTensor:
    kinds = {(shape, dtype, scope) for _, shape, dtype, scope in found}
    if len(kinds) != 1:
        raise _bad(f"{name}: the images contradict each other on its shape, dtype or owner")
    (shape, dtype, scope) = kinds.pop()
    return _SavedTensor(
        shape=shape, dtype=dtype, scope=scope, pieces=tuple(piece for piece, *_ in found)
    )


def _saved_dtype(key: str, name: str, entry: TensorEntry) -> torch.dtype:
    dtype = dtype_from_name(name or natural_dtype_name(entry.dtype))
    if dtype is None:
        raise RestoreError(f"{key}: this torch has no dtype {name or entry.dtype!r}")
    form = stored_form(dtype)
    if form.dtype != entry.dtype or entry.shape[len(entry.shape) - len(form.tail) :] != form.tail:
        raise _bad(f"{key}: a {name} cannot be stored as {entry.dtype} {list(entry.shape)}")
    return dtype


def _piece_view(piece: _Piece, dtype: torch.dtype) -> torch.Tensor:
    content = piece.image.content(piece.entry)
    if content.data_ptr() % dtype.itemsize:
        content = content.clone()
    typed = content.view(dtype)
    return typed.as_strided(piece.box[1], contiguous_stride(piece.box[1]), typed.storage_offset())


def _copy(live: torch.Tensor, content: torch.Tensor) -> None:
    for dim, (size, stride) in enumerate(zip(live.shape, live.stride(), strict=True)):
        if stride == 0 and size > 1:  # an expanded view: all of them are one element
            live, content = live.narrow(dim, 0, 1), content.narrow(dim, 0, 1)
    live.copy_(content)


def _read_state(own: Sequence[SavedImage]) -> Mapping[str, Any]:
    for image in own:
        entry = image.entries.get(STATE_KEY)
        if entry is not None:
            try:
                state = json.loads(image.content(entry).numpy().tobytes())
            except ValueError as error:
                raise _bad(f"the JSON state is unreadable: {error}") from error
            if not isinstance(state, dict) or state.get("format") != 1:
                raise _bad("the JSON state is not of format 1")
            return state
    raise _bad("no image holds the JSON state")
