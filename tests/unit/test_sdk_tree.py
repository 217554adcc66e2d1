"""Trees of plain values come back equal in structure and type."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from enum import Enum, Flag
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_sdk.dtypes import is_same_bits
from trainer_sdk.errors import UnsupportedState
from trainer_sdk.tree import TreeError, decode_tree, dump_json, encode_tree

keys = st.one_of(
    st.integers(),
    st.text(max_size=8),
    st.booleans(),
    st.none(),
    st.tuples(st.integers(), st.text()),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=1 << 70, max_value=1 << 20_000),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=()), max_size=12),
    st.binary(max_size=20),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 1)]),
    st.builds(torch.Size, st.lists(st.integers(0, 9), max_size=3)),
    st.sampled_from([numpy.float32(1.5), numpy.int64(-3), numpy.bool_(True), numpy.float64("nan")]),
    st.builds(lambda n: numpy.arange(n, dtype=numpy.int16).reshape(1, n), st.integers(0, 5)),
    st.builds(lambda n: torch.arange(n, dtype=torch.float16), st.integers(0, 5)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(lambda d: defaultdict(None, d)),
        st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
    ),
    max_leaves=12,
)


def round_trip(tree: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}

    def put(path: str, tensor: torch.Tensor) -> str:
        while path in tensors:
            path += "~"
        tensors[path] = tensor
        return path

    text = dump_json(encode_tree(tree, "root", put))
    return decode_tree(json.loads(text), "root", lambda name: tensors[name].clone())


def is_equal(one: Any, other: Any) -> bool:
    """Equal in value, type and order, NaN and the sign of zero included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return is_same_bits(one, other)
    if isinstance(one, numpy.ndarray | numpy.generic):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and (one.tobytes() == other.tobytes())
        )
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or struct.pack("d", one) == struct.pack(
            "d", other
        )
    if isinstance(one, complex):
        return is_equal(one.real, other.real) and is_equal(one.imag, other.imag)
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            is_equal(a, b) and is_equal(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other)


@settings(max_examples=300, deadline=None)
@given(trees)
def test_any_tree_comes_back_equal(tree: Any) -> None:
    assert is_equal(tree, round_trip(tree))


@pytest.mark.parametrize(
    "value",
    [
        {"a.b/c": {1: None, "1": (2, [3])}, "$": "tag", "": [], "e": {}},
        {"a/b": torch.ones(1), "a": {"b": torch.zeros(2)}},
        {1: torch.ones(1), "1": torch.zeros(1)},
        [float("nan"), float("inf"), -0.0, 5e-324],
        {True: 1, 2: "x"},
        "\ud83d\ude00 lone \udc00",
        bytearray(b"\0\xff"),
        numpy.zeros((0, 3), dtype=">i4"),
        numpy.arange(5000.0).reshape(50, 100),
        numpy.datetime64("2020-01-01"),
    ],
    ids=repr,
)
def test_awkward_values_come_back(value: Any) -> None:
    """C16: keys with dots and slashes, integer keys, empty containers, colliding paths."""
    assert is_equal(value, round_trip(value))


class Custom:
    pass


class Mood(Enum):
    GOOD = (1, "a")


class Access(Flag):
    READ = 1
    WRITE = 2


class Pair(NamedTuple):
    one: Any
    two: Any


class Longer(Pair):
    def sum(self) -> Any:
        return self.one + self.two


@dataclass(frozen=True, slots=True)
class Slotted:
    value: Any


@dataclass
class Loaded:
    value: Any

    def __post_init__(self) -> None:
        self.extra = 1


@dataclass
class ListWithFields(list):  # type: ignore[type-arg]
    value: int = 0


@pytest.mark.parametrize(
    "value",
    [
        deque([1, deque([torch.ones(1)], maxlen=2)]),
        Longer(1, 2),
        Pair(1, Pair(two=[torch.zeros(1)], one=None)),
        [Mood.GOOD, Access.READ | Access.WRITE, {Mood.GOOD: Access(0)}, {Mood.GOOD}],
        Slotted([Slotted(None)]),
        range(1, 9, 2),
        slice(None, 3),
        Path("a/b"),
        defaultdict(list, {1: [2]}),
    ],
    ids=repr,
)
def test_values_of_the_scripts_own_types_come_back(value: Any) -> None:
    back = round_trip(value)

    assert repr(back) == repr(value)
    assert type(back) is type(value)


def test_a_default_dictionary_keeps_its_factory_and_a_deque_its_length() -> None:
    assert round_trip(defaultdict(list))[3] == []
    assert round_trip(deque([1, 2], maxlen=2)).maxlen == 2


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({"$": "enum", "c": "os:environ", "v": "HOME"}, "has no environ"),
        ({"$": "named", "c": "nowhere:Pair", "v": [1, 2]}, "has no Pair"),
        ({"$": "record", "c": "subprocess:Popen", "v": {"args": ["true"]}}, "has no Popen"),
        ({"$": "enum", "c": f"{__name__}:Pair", "v": "GOOD"}, "has no Pair"),
        ({"$": "enum", "c": f"{__name__}:Mood", "v": "BAD"}, "no member 'BAD'"),
        ({"$": "named", "c": f"{__name__}:Pair", "v": [1]}, "has 2 fields, saved 1"),
        ({"$": "record", "c": f"{__name__}:Slotted", "v": {"other": 1}}, "saved .'other'."),
        ({"$": "record", "c": f"{__name__}:ListWithFields", "v": {"value": 1}}, "has no List"),
        ({"$": "defaultdict", "v": [], "f": "eval"}, "not a saved tree"),
    ],
)
def test_a_class_that_is_not_here_as_it_was_is_refused(tree: Any, reason: str) -> None:
    """A checkpoint names classes; it never has anything imported or called."""
    with pytest.raises(TreeError, match=reason):
        decode_tree(tree, "root", lambda name: torch.zeros(1))


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [Custom()]}, "root/a/0: cannot hold a Custom"),
        ({"f": len}, "root/f: cannot hold a builtin_function"),
        (defaultdict(lambda: 1), "root: cannot hold a defaultdict whose factory is <lambda>"),
        ({"a": Enum("Hidden", "A").A}, "root/a: cannot hold a Hidden, which could not be found"),
        (Loaded(1), "root: cannot hold a Loaded with other attributes"),
        (numpy.array([None]), "root: cannot hold a numpy array of object"),
    ],
)
def test_unknown_value_is_refused_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(UnsupportedState, match=path):
        round_trip(value)


def test_tree_that_contains_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)

    with pytest.raises(UnsupportedState, match="nested too deeply"):
        round_trip(tree)


@pytest.mark.parametrize(
    "tree", [{"$": "pickle"}, {"$": "float", "v": "zz"}, {"$": "dict", "v": 3}, {"$": "int"}]
)
def test_foreign_json_is_refused(tree: Any) -> None:
    with pytest.raises(TreeError):
        decode_tree(tree, "root", lambda name: torch.zeros(1))
