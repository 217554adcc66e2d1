"""What an image says about itself under `__metadata__["lastgasp"]`, and the algebra of boxes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Annotated, Literal

import msgspec

from trainer_sdk.errors import RestoreError

LAYOUT_FORMAT = 1
METADATA_KEY = "lastgasp"

Index = Annotated[int, msgspec.Meta(ge=0)]
Shape = tuple[Index, ...]
Box = tuple[Shape, Shape]


class TensorLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where one entry of an image belongs; a default means the plain case.

    `name`: global name, "" for the entry's key. `shape`: global shape, None for the entry's own.
    `offset`: of the box in the global tensor. `dtype`: torch name, "" for the entry's natural one.
    `scope`: `own` of the saving rank, or a `replica` of which each piece is stored once.
    """

    name: str = ""
    shape: Shape | None = None
    offset: Shape | None = None
    dtype: str = ""
    scope: Literal["own", "replica"] = "own"


class AliasLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that lives in the storage of another: a view of the elements of `of`."""

    of: str
    shape: Shape
    stride: Shape
    offset: Index


class ImageLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layout metadata of one image."""

    format: Literal[1]
    rank: Index
    world: Annotated[int, msgspec.Meta(ge=1)]
    tensors: dict[str, TensorLayout]
    aliases: dict[str, AliasLayout]


_decoder = msgspec.json.Decoder(ImageLayout)


def encode_layout(layout: ImageLayout) -> str:
    """The metadata string."""
    return msgspec.json.encode(layout).decode()


def decode_layout(text: str) -> ImageLayout:
    """Read a metadata string.

    Raises:
        RestoreError: not a layout of this version; the checkpoint is bad.
    """
    try:
        return _decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise RestoreError(
            f"the image's layout is not of format {LAYOUT_FORMAT}: {error}", is_checkpoint_bad=True
        ) from error


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The row-major range [start, stop) of a tensor as (offset, sizes) boxes, in order.

    Laid one after the other, the boxes' elements are exactly the range's.
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    inner = prod(shape[1:])
    if inner == 0:
        return []
    first, last = -(-start // inner), stop // inner
    if first > last:  # inside one row
        row = start // inner
        return _in_row(row, flat_boxes(shape[1:], start - row * inner, stop - row * inner))
    boxes = _in_row(first - 1, flat_boxes(shape[1:], start - (first - 1) * inner, inner))
    if start == first * inner:
        boxes = []
    if last > first:
        zeros = (0,) * (len(shape) - 1)
        boxes.append(((first, *zeros), (last - first, *shape[1:])))
    return boxes + _in_row(last, flat_boxes(shape[1:], 0, stop - last * inner))


def _in_row(row: int, boxes: Iterable[Box]) -> list[Box]:
    return [((row, *offset), (1, *sizes)) for offset, sizes in boxes]


def coverage_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Why boxes do not add up to a tensor: outside, overlap or hole; "" when they do."""
    for offset, sizes in boxes:
        if len(offset) != len(shape) or len(sizes) != len(shape):
            return f"a piece has {len(offset)} dimensions, the tensor {len(shape)}"
        if any(at + size > end for at, size, end in zip(offset, sizes, shape, strict=True)):
            return f"a piece at {list(offset)} of {list(sizes)} lies outside {list(shape)}"
    ordered = sorted(boxes)
    for index, one in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if shape and other[0][0] >= one[0][0] + one[1][0]:
                break
            if _do_overlap(one, other):
                return f"pieces at {list(one[0])} and {list(other[0])} overlap"
    held = sum(prod(sizes) for _, sizes in boxes)
    if held != prod(shape) or not boxes:
        return f"pieces hold {held} of {prod(shape)} elements"
    return ""


def _do_overlap(one: Box, other: Box) -> bool:
    return prod(one[1]) > 0 and all(
        a < b + b_size and b < a + a_size
        for a, a_size, b, b_size in zip(one[0], one[1], other[0], other[1], strict=True)
    )
