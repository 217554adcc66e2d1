"""Trees of plain values as JSON that come back equal in structure and type.

Tensors leave the tree through a callback and are found again by their path. What has no tag here
is refused by its path; nothing is ever pickled.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from trainer_sdk import named_types
from trainer_sdk.errors import TrainerSdkError, UnsupportedState

Json = Any
PutTensor = Callable[[str, torch.Tensor], str]
GetTensor = Callable[[str], torch.Tensor]

_TAG = "$"
_MAX_DEPTH = 200
_MAX_INLINE_ARRAY_BYTES = 4096
_JSON_INT_LIMIT = 1 << 63
_HINT = "give the object a state_dict() of plain values and tensors"
_PATHS: tuple[type[PurePath], ...] = (PosixPath, PurePosixPath, PureWindowsPath)
_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, set, dict)
}


class TreeError(TrainerSdkError):
    """JSON that this codec did not write."""


def encode_tree(value: Any, path: str, put_tensor: PutTensor) -> Json:
    """The JSON form of a tree; tensors go to `put_tensor(path, tensor)`, which names them.

    Raises:
        UnsupportedState: a value without a tag, named by its path.
    """
    return _Encoder(put_tensor).encode(value, path, 0)


def decode_tree(value: Json, path: str, get_tensor: GetTensor) -> Any:
    """The tree that was encoded under the same path.

    Raises:
        TreeError: not the JSON form of a tree.
    """
    try:
        return _Decoder(get_tensor).decode(value, path)
    except (KeyError, TypeError, ValueError, struct.error, RecursionError) as error:
        raise TreeError(f"{path}: not a saved tree: {error!r}") from error


def refuse_tensor(path: str, _: torch.Tensor) -> str:
    """A `put_tensor` for places where only plain values may stand."""
    raise UnsupportedState(path, "a tensor cannot stand here", hint="register it as an object")


def dump_json(value: Json) -> bytes:
    """Canonical bytes: no blanks, the order of the tree, ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def child_path(path: str, key: object) -> str:
    """The path of an element; two keys may share one, `put_tensor` then renames."""
    return f"{path}/{key}"


def _is_clean(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text) if not text.isascii() else True


def _has_json_keys(value: dict[Any, Any]) -> bool:
    return _TAG not in value and all(type(key) is str and _is_clean(key) for key in value)


class _Encoder:
    def __init__(self, put_tensor: PutTensor) -> None:
        self.put_tensor = put_tensor

    def encode(self, value: Any, path: str, depth: int) -> Json:
        if depth > _MAX_DEPTH:
            raise UnsupportedState(path, "nested too deeply, or containing itself")
        encode = _ENCODERS.get(type(value)) or _encoder_by_base(type(value))
        if encode is not None:
            return encode(self, value, path, depth + 1)
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path, depth)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            return self.array(value, path)
        if numpy is not None and isinstance(value, numpy.generic):
            return self.array_scalar(value, path)
        raise UnsupportedState(path, f"cannot hold a {type(value).__qualname__}", hint=_HINT)

    def plain(self, value: Any, path: str, depth: int) -> Json:
        return value

    def integer(self, value: int, path: str, depth: int) -> Json:
        if -_JSON_INT_LIMIT <= value < _JSON_INT_LIMIT:
            return value
        return {_TAG: "int", "v": hex(value)}

    def real(self, value: float, path: str, depth: int) -> Json:
        return value if math.isfinite(value) else {_TAG: "float", "v": _float_hex(value)}

    def text(self, value: str, path: str, depth: int) -> Json:
        if _is_clean(value):
            return value
        return {_TAG: "str", "v": value.encode("utf-8", "surrogatepass").hex()}

    def binary(self, value: bytes | bytearray, path: str, depth: int) -> Json:
        return {_TAG: type(value).__name__, "v": base64.b64encode(value).decode()}

    def compound(self, value: complex, path: str, depth: int) -> Json:
        return {_TAG: "complex", "v": [_float_hex(value.real), _float_hex(value.imag)]}

    def sequence(self, value: Any, path: str, depth: int) -> Json:
        items = [
            self.encode(item, child_path(path, index), depth) for index, item in enumerate(value)
        ]
        return items if type(value) is list else {_TAG: "tuple", "v": items}

    def unordered(self, value: Any, path: str, depth: int) -> Json:
        items = [_key_encoder.encode(item, child_path(path, "{}"), depth) for item in value]
        return {_TAG: type(value).__name__, "v": sorted(items, key=dump_json)}

    def mapping(self, value: Any, path: str, depth: int) -> Json:
        if type(value) is dict and _has_json_keys(value):
            return {
                key: self.encode(item, child_path(path, key), depth) for key, item in value.items()
            }
        pairs = [
            [_key_encoder.encode(key, path, depth), self.encode(item, child_path(path, key), depth)]
            for key, item in value.items()
        ]
        return {_TAG: type(value).__name__, "v": pairs}

    def with_default(self, value: defaultdict[Any, Any], path: str, depth: int) -> Json:
        encoded = self.mapping(value, path, depth)
        factory = value.default_factory
        if factory is None:
            return encoded
        name = getattr(factory, "__name__", repr(factory))
        if _FACTORIES.get(name) is not factory:
            raise UnsupportedState(
                path, f"cannot hold a defaultdict whose factory is {name}", hint=_HINT
            )
        return encoded | {"f": name}

    def queue(self, value: deque[Any], path: str, depth: int) -> Json:
        items = [
            self.encode(item, child_path(path, index), depth) for index, item in enumerate(value)
        ]
        return {_TAG: "deque", "v": items, "m": value.maxlen}

    def span(self, value: range | slice, path: str, depth: int) -> Json:
        ends = [value.start, value.stop, value.step]
        return {_TAG: type(value).__name__, "v": [self.encode(end, path, depth) for end in ends]}

    def file_path(self, value: PurePath, path: str, depth: int) -> Json:
        return {_TAG: type(value).__name__, "v": self.text(str(value), path, depth)}

    def member(self, value: Enum, path: str, depth: int) -> Json:
        key = self.encode(named_types.enum_key(value), path, depth)
        return {_TAG: "enum", "c": self.class_name(value, path), "v": key}

    def named_tuple(self, value: Any, path: str, depth: int) -> Json:
        if getattr(value, "__dict__", None):
            name = type(value).__qualname__
            raise UnsupportedState(path, f"cannot hold a {name} with other attributes", hint=_HINT)
        items = [
            self.encode(item, child_path(path, index), depth) for index, item in enumerate(value)
        ]
        return {_TAG: "named", "c": self.class_name(value, path), "v": items}

    def record(self, value: Any, path: str, depth: int) -> Json:
        fields = named_types.field_values(value)
        if fields is None:
            name = type(value).__qualname__
            raise UnsupportedState(path, f"cannot hold a {name} with other attributes", hint=_HINT)
        encoded = {
            name: self.encode(item, child_path(path, name), depth) for name, item in fields.items()
        }
        return {_TAG: "record", "c": self.class_name(value, path), "v": encoded}

    def class_name(self, value: Any, path: str) -> str:
        kind = type(value)
        name = named_types.class_path(kind)
        if not name:
            raise UnsupportedState(
                path,
                f"cannot hold a {kind.__qualname__}, which could not be found again",
                hint="define the class at the top level of its module",
            )
        return name

    def size(self, value: torch.Size, path: str, depth: int) -> Json:
        return {_TAG: "size", "v": list(value)}

    def dtype(self, value: torch.dtype, path: str, depth: int) -> Json:
        return {_TAG: "dtype", "v": str(value).removeprefix("torch.")}

    def device(self, value: torch.device, path: str, depth: int) -> Json:
        return {_TAG: "device", "v": str(value)}

    def tensor(self, value: torch.Tensor, path: str, depth: int) -> Json:
        name = self.put_tensor(path, value)
        return {_TAG: "t"} if name == path else {_TAG: "t", "n": name}

    def array(self, value: Any, path: str) -> Json:
        numpy = sys.modules["numpy"]
        if value.dtype.hasobject or value.dtype.names or type(value) is not numpy.ndarray:
            raise UnsupportedState(path, f"cannot hold a numpy array of {value.dtype}", hint=_HINT)
        tag = {_TAG: "array", "d": value.dtype.str, "s": list(value.shape)}
        if value.nbytes <= _MAX_INLINE_ARRAY_BYTES:
            return tag | {"v": base64.b64encode(value.tobytes()).decode()}
        content = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
        return tag | {"n": self.put_tensor(path, content)}

    def array_scalar(self, value: Any, path: str) -> Json:
        if value.dtype.hasobject or value.dtype.names:
            raise UnsupportedState(path, f"cannot hold a numpy value of {value.dtype}", hint=_HINT)
        content = base64.b64encode(value.tobytes()).decode()
        return {_TAG: "numpy", "d": value.dtype.str, "v": content}


_ENCODERS: dict[type, Callable[[_Encoder, Any, str, int], Json]] = {
    type(None): _Encoder.plain,
    bool: _Encoder.plain,
    int: _Encoder.integer,
    float: _Encoder.real,
    complex: _Encoder.compound,
    str: _Encoder.text,
    bytes: _Encoder.binary,
    bytearray: _Encoder.binary,
    list: _Encoder.sequence,
    tuple: _Encoder.sequence,
    set: _Encoder.unordered,
    frozenset: _Encoder.unordered,
    dict: _Encoder.mapping,
    OrderedDict: _Encoder.mapping,
    Counter: _Encoder.mapping,
    defaultdict: _Encoder.with_default,
    deque: _Encoder.queue,
    range: _Encoder.span,
    slice: _Encoder.span,
    **dict.fromkeys(_PATHS, _Encoder.file_path),
    torch.Size: _Encoder.size,
    torch.dtype: _Encoder.dtype,
    torch.device: _Encoder.device,
}
_key_encoder = _Encoder(refuse_tensor)


def _encoder_by_base(kind: type) -> Callable[[_Encoder, Any, str, int], Json] | None:
    if issubclass(kind, Enum):
        return _Encoder.member
    if named_types.is_named_tuple(kind):
        return _Encoder.named_tuple
    if named_types.is_plain_dataclass(kind):
        return _Encoder.record
    return None


def _float_hex(value: float) -> str:
    return struct.pack("<d", value).hex()


def _float_from_hex(text: str) -> float:
    (value,) = struct.unpack("<d", bytes.fromhex(text))
    assert isinstance(value, float)
    return value


class _Decoder:
    def __init__(self, get_tensor: GetTensor) -> None:
        self.get_tensor = get_tensor

    def decode(self, value: Json, path: str) -> Any:
        if isinstance(value, list):
            return self.items(value, path)
        if not isinstance(value, dict):
            return value
        if _TAG not in value:
            return {key: self.decode(item, child_path(path, key)) for key, item in value.items()}
        decode = _DECODERS.get(value[_TAG])
        if decode is None:
            raise TreeError(f"{path}: unknown tag {value[_TAG]!r}")
        return decode(self, value, path)

    def items(self, values: list[Json], path: str) -> list[Any]:
        return [self.decode(item, child_path(path, index)) for index, item in enumerate(values)]

    def members(self, value: Json, path: str) -> list[Any]:
        return [self.decode(item, child_path(path, "{}")) for item in value["v"]]

    def pairs(self, value: Json, path: str) -> list[tuple[Any, Any]]:
        pairs = []
        for encoded, item in value["v"]:
            key = self.decode(encoded, path)
            pairs.append((key, self.decode(item, child_path(path, key))))
        return pairs

    def tensor(self, value: Json, path: str) -> torch.Tensor:
        return self.get_tensor(value.get("n", path))

    def array(self, value: Json, path: str) -> Any:
        import numpy  # only a tree that holds numpy values needs it

        if "n" in value:
            content = self.get_tensor(value["n"]).numpy().tobytes()
        else:
            content = base64.b64decode(value["v"])
        array = numpy.frombuffer(bytearray(content), dtype=numpy.dtype(value["d"]))
        return array.reshape(value["s"])

    def array_scalar(self, value: Json, path: str) -> Any:
        import numpy  # only a tree that holds numpy values needs it

        return numpy.frombuffer(base64.b64decode(value["v"]), dtype=numpy.dtype(value["d"]))[0]

    def dtype(self, value: Json, path: str) -> torch.dtype:
        dtype = getattr(torch, value["v"], None)
        if not isinstance(dtype, torch.dtype):
            raise TreeError(f"{path}: this torch has no dtype {value['v']!r}")
        return dtype

    def file_path(self, value: Json, path: str) -> PurePath:
        kinds = {kind.__name__: kind for kind in _PATHS}
        return kinds[value[_TAG]](self.decode(value["v"], path))

    def kind_of(self, value: Json, path: str, is_kind: Callable[[type], bool]) -> type:
        """The class that a value names; only one that this process already has."""
        kind = named_types.find_class(value["c"])
        if kind is None or not is_kind(kind):
            raise TreeError(
                f"{path}: this process has no {value['c'].rpartition(':')[2]} as it was saved",
                hint=f"have {value['c'].partition(':')[0]} imported before restore()",
            )
        return kind

    def member(self, value: Json, path: str) -> Any:
        kind = self.kind_of(value, path, lambda kind: issubclass(kind, Enum))
        return named_types.enum_member(kind, self.decode(value["v"], path))

    def named_tuple(self, value: Json, path: str) -> Any:
        kind = self.kind_of(value, path, named_types.is_named_tuple)
        return named_types.make_named_tuple(kind, self.items(value["v"], path))

    def record(self, value: Json, path: str) -> Any:
        kind = self.kind_of(value, path, named_types.is_plain_dataclass)
        fields = {key: self.decode(item, child_path(path, key)) for key, item in value["v"].items()}
        return named_types.make_dataclass(kind, fields)

    def with_default(self, value: Json, path: str) -> Any:
        factory = _FACTORIES[value["f"]] if "f" in value else None
        return defaultdict(factory, self.pairs(value, path))


def _counter(pairs: list[tuple[Any, Any]]) -> Counter[Any]:
    return Counter(dict(pairs))


_DECODERS: dict[str, Callable[[_Decoder, Json, str], Any]] = {
    "int": lambda _, value, __: int(value["v"], 16),
    "float": lambda _, value, __: _float_from_hex(value["v"]),
    "complex": lambda _, value, __: complex(*map(_float_from_hex, value["v"])),
    "str": lambda _, value, __: bytes.fromhex(value["v"]).decode("utf-8", "surrogatepass"),
    "bytes": lambda _, value, __: base64.b64decode(value["v"]),
    "bytearray": lambda _, value, __: bytearray(base64.b64decode(value["v"])),
    "tuple": lambda self, value, path: tuple(self.items(value["v"], path)),
    "set": lambda self, value, path: set(self.members(value, path)),
    "frozenset": lambda self, value, path: frozenset(self.members(value, path)),
    "dict": lambda self, value, path: dict(self.pairs(value, path)),
    "OrderedDict": lambda self, value, path: OrderedDict(self.pairs(value, path)),
    "Counter": lambda self, value, path: _counter(self.pairs(value, path)),
    "defaultdict": _Decoder.with_default,
    "deque": lambda self, value, path: deque(self.items(value["v"], path), value["m"]),
    "range": lambda self, value, path: range(*self.items(value["v"], path)),
    "slice": lambda self, value, path: slice(*self.items(value["v"], path)),
    **dict.fromkeys((kind.__name__ for kind in _PATHS), _Decoder.file_path),
    "enum": _Decoder.member,
    "named": _Decoder.named_tuple,
    "record": _Decoder.record,
    "size": lambda _, value, __: torch.Size(value["v"]),
    "dtype": _Decoder.dtype,
    "device": lambda _, value, __: torch.device(value["v"]),
    "t": _Decoder.tensor,
    "array": _Decoder.array,
    "numpy": _Decoder.array_scalar,
}
