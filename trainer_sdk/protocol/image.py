"""The header of a shard image: a safetensors file whose data section starts on a page boundary.

The header is padded with spaces, which the format allows, so that stock safetensors opens every
image while O_DIRECT, mmap and multipart chunks stay aligned. This module knows bytes only.

Source: safetensors format description, README.md "Format": u64 header length, JSON header that
starts with '{' and may be padded with 0x20, data without holes, `__metadata__` of strings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated

import msgspec

from trainer_sdk.protocol.errors import ImageError

ALIGN_BYTES = 4096
MAX_HEADER_BYTES = 16 << 20
STATE_KEY = "lastgasp/state"

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of an image: `start` and `end` count from the first byte of the data section."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHeader:
    """A decoded header. `data_offset` is the file offset of the data section's first byte."""

    tensors: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    data_offset: int

    @property
    def image_bytes(self) -> int:
        """Size of the whole image in bytes."""
        return self.data_offset + (self.tensors[-1].end if self.tensors else 0)


class _RawTensor(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


def build_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, ImageHeader]:
    """Lay tensors (key, dtype, shape) out without holes, in the order given.

    Returns:
        The padded header bytes (a multiple of 4096 with its length word), and the decoded header.

    Raises:
        ImageError: an unknown dtype, a key used twice, or a header over 16 MiB.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    placed: list[TensorEntry] = []
    offset = 0
    for key, dtype, shape in tensors:
        if dtype not in DTYPE_BYTES:
            raise ImageError(f"tensor {key!r}: the image format has no dtype {dtype!r}")
        if key in entries:
            raise ImageError(f"tensor {key!r} appears twice in one image")
        end = offset + prod(shape) * DTYPE_BYTES[dtype]
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        placed.append(TensorEntry(key=key, dtype=dtype, shape=shape, start=offset, end=end))
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    size = -(-(8 + len(text)) // ALIGN_BYTES) * ALIGN_BYTES - 8
    if size > MAX_HEADER_BYTES:
        raise ImageError(
            f"a header of {size} bytes for {len(placed)} tensors is over the limit of "
            f"{MAX_HEADER_BYTES}",
            hint="register fewer, larger tensors, or shorter names",
        )
    header = size.to_bytes(8, "little") + text.ljust(size)
    return header, ImageHeader(
        tensors=tuple(placed), metadata=dict(metadata), data_offset=len(header)
    )


def parse_header(image: memoryview, *, image_bytes: int) -> ImageHeader:
    """Decode and check the header of an image of `image_bytes` whose first bytes are given.

    Raises:
        ImageError: too long, not JSON, a key twice, an unknown dtype, sizes that do not fit the
            shapes, holes or overlaps, or a data section that does not end where the image ends.
    """
    if len(image) < 8:
        raise ImageError(f"an image of {len(image)} bytes has no header")
    size = int.from_bytes(image[:8], "little")
    if size > MAX_HEADER_BYTES or 8 + size > image_bytes or 8 + size > len(image):
        raise ImageError(f"a header length of {size} does not fit an image of {image_bytes} bytes")
    _refuse_duplicates(bytes(image[8 : 8 + size]))
    try:
        raw = msgspec.json.decode(image[8 : 8 + size], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
        decoded = [(key, msgspec.json.decode(value, type=_RawTensor)) for key, value in raw.items()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ImageError(f"the header is not a safetensors header: {error}") from error
    decoded.sort(key=lambda item: item[1].data_offsets)
    tensors = _check_layout(decoded)
    header = ImageHeader(tensors=tensors, metadata=metadata, data_offset=8 + size)
    if header.image_bytes != image_bytes:
        raise ImageError(
            f"the header describes {header.image_bytes} bytes, the image has {image_bytes}"
        )
    return header


def _refuse_duplicates(text: bytes) -> None:
    """A key that appears twice means one thing to one reader and another to the next."""

    def check(pairs: list[tuple[str, object]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ImageError(f"the header has the key {key!r} twice")
            seen.add(key)

    try:
        json.loads(text, object_pairs_hook=check)
    except (ValueError, RecursionError) as error:
        raise ImageError(f"the header is not a safetensors header: {error}") from error


def _check_layout(decoded: list[tuple[str, _RawTensor]]) -> tuple[TensorEntry, ...]:
    offset = 0
    tensors = []
    for key, raw in decoded:
        start, end = raw.data_offsets
        width = DTYPE_BYTES.get(raw.dtype)
        if width is None:
            raise ImageError(f"tensor {key!r}: unknown dtype {raw.dtype!r}")
        if start != offset or end - start != prod(raw.shape) * width:
            raise ImageError(
                f"tensor {key!r}: bytes {start} to {end} leave a hole, overlap, or do not fit "
                f"shape {list(raw.shape)} of {raw.dtype}"
            )
        tensors.append(TensorEntry(key=key, dtype=raw.dtype, shape=raw.shape, start=start, end=end))
        offset = end
    return tuple(tensors)
