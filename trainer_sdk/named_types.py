"""Enums, named tuples and dataclasses of the script, as plain values and back.

A checkpoint only names such a class. It is looked up among what the process has imported, and must
be of its kind there: nothing is imported, and no constructor runs, on the word of a file.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from enum import Enum, Flag
from typing import Any


def class_path(kind: type) -> str:
    """`module:Qualified.Name` under which `find_class` finds it again; "" when it would not."""
    path = f"{kind.__module__}:{kind.__qualname__}"
    return path if find_class(path) is kind else ""


def find_class(path: str) -> type | None:
    """The class of that path, if this process has it."""
    module, _, qualname = path.partition(":")
    holder: Any = sys.modules.get(module)
    if holder is None:
        return None
    for part in qualname.split("."):
        holder = vars(holder).get(part)  # never getattr, which may run code
        if not isinstance(holder, type):
            return None
    assert isinstance(holder, type)
    return holder


def is_named_tuple(kind: type) -> bool:
    """Whether its instances are tuples with names for their elements."""
    return issubclass(kind, tuple) and isinstance(_fields_of(kind), tuple)


def _fields_of(kind: type) -> Any:
    return next((vars(base)["_fields"] for base in kind.__mro__ if "_fields" in vars(base)), None)


def is_plain_dataclass(kind: type) -> bool:
    """Whether its instances are their fields and nothing else."""
    return (
        dataclasses.is_dataclass(kind)
        and kind.__new__ is object.__new__
        and kind.__flags__ & _IS_EXTENSION == 0
    )


# A dataclass that derives from dict, list or the like has content besides its fields.
# Source: CPython, Include/object.h, Py_TPFLAGS_LONG_SUBCLASS to Py_TPFLAGS_BASE_EXC_SUBCLASS.
_IS_EXTENSION = 0b1111111 << 24


def field_values(value: Any) -> dict[str, Any] | None:
    """The fields of a dataclass instance; None when it has others or lacks one."""
    names = [field.name for field in dataclasses.fields(value)]
    if set(getattr(value, "__dict__", ())) - set(names):
        return None
    missing = [name for name in names if not hasattr(value, name)]
    return None if missing else {name: getattr(value, name) for name in names}


def make_dataclass(kind: type, values: Mapping[str, Any]) -> Any:
    """An instance with exactly these fields.

    Raises:
        ValueError: the class has other fields by now.
    """
    names = {field.name for field in dataclasses.fields(kind)}
    if names != set(values):
        raise ValueError(f"{kind.__qualname__} has fields {sorted(names)}, saved {sorted(values)}")
    made: Any = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def make_named_tuple(kind: type, items: Iterable[Any]) -> Any:
    """An instance with these elements.

    Raises:
        ValueError: the class has another number of elements by now.
    """
    values = tuple(items)
    wanted = len(_fields_of(kind))
    if len(values) != wanted:
        raise ValueError(f"{kind.__qualname__} has {wanted} fields, saved {len(values)}")
    return tuple.__new__(kind, values)


def enum_key(value: Enum) -> Any:
    """What names a member: its name, or the number of a combination of flags."""
    return value.value if isinstance(value, Flag) else value.name


def enum_member(kind: type, key: Any) -> Any:
    """The member of that key.

    Raises:
        ValueError: there is none by now.
    """
    if issubclass(kind, Flag):
        return kind(key)
    assert issubclass(kind, Enum)
    if key not in kind.__members__:
        raise ValueError(f"{kind.__qualname__} has no member {key!r}")
    return kind.__members__[key]
