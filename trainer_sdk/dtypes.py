"""How torch dtypes stand in an image, and tensors as plain bits.

A dtype that the format lacks is stored as one it has, viewed; the layout names the original.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from trainer_sdk.errors import UnsupportedState

_DIRECT = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredForm:
    """`dtype` as the image names it; `tail` is appended to the shape."""

    dtype: str
    tail: tuple[int, ...] = ()


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype | None:
    """The torch dtype of that name, or None when this torch has none."""
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else None


def stored_form(dtype: torch.dtype) -> StoredForm:
    """How tensors of this dtype stand in an image."""
    direct = _DIRECT.get(dtype_name(dtype))
    if direct is not None:
        return StoredForm(dtype=direct)
    if dtype is torch.complex128:
        return StoredForm(dtype="F64", tail=(2,))
    if dtype is torch.complex32:
        return StoredForm(dtype="F16", tail=(2,))
    return StoredForm(dtype="U8", tail=(dtype.itemsize,))


def natural_dtype_name(stored: str) -> str:
    """The torch name of a format dtype when the layout names none."""
    for name, form in _DIRECT.items():
        if form == stored:
            return name
    return ""


def check_tensor(path: str, tensor: torch.Tensor) -> None:
    """Refuse what an image cannot hold exactly.

    Raises:
        UnsupportedState: named by its path.
    """
    if (
        type(tensor) in _PLAIN_TYPES
        and tensor.dtype in _HELD
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_nested
    ):
        return
    if is_lazy(tensor):
        raise UnsupportedState(path, "not initialised", hint="run one batch through it first")
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise UnsupportedState(path, f"layout {layout}", hint="register its dense form")
    if tensor.is_quantized:
        raise UnsupportedState(path, "a quantised tensor", hint="register its int_repr() and scale")
    if tensor.is_nested:
        raise UnsupportedState(path, "a nested tensor", hint="register its values and offsets")
    if tensor.is_meta:
        raise UnsupportedState(path, "on the meta device", hint="materialise it first")
    if type(tensor) not in _PLAIN_TYPES:
        kind = type(tensor).__qualname__
        raise UnsupportedState(path, f"a {kind}", hint="only plain tensors can be held exactly")
    if tensor.is_complex() or tensor.is_floating_point():
        return
    raise UnsupportedState(path, f"dtype {dtype_name(tensor.dtype)}", hint="register a byte view")


_HELD = frozenset(getattr(torch, name) for name in _DIRECT if hasattr(torch, name))


def flat_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order as integers of their width; a view where it can be one."""
    plain = tensor.detach()
    if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        flat = plain.view(-1)
    else:
        flat = plain.resolve_conj().resolve_neg().reshape(-1)
    if flat.dtype.itemsize == 16:
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_BITS[flat.dtype.itemsize])


def is_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two CPU tensors hold the same bits, NaN and the sign of zero included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(flat_bits(one), flat_bits(other))


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    if flat.dtype.itemsize == 16:
        flat = torch.view_as_real(flat).reshape(-1)
    content: Any = flat.view(torch.uint8).numpy()
    return memoryview(content).cast("B")
