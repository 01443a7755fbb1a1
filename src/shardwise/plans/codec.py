"""The JSON of a plan: dataclasses as plain data, and back, checked against the types of their fields.

Fields that do not count in comparisons are not written, except those of decisions: a decision is ``{"shard": colors, ...}``,
``{"keep": values, ...}`` or ``{"pin": value, ...}``. A mesh is a mapping of sizes, an enum its name in lower case.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.decisions import Keep, Pin, Shard

_TAGS: Final[dict[Any, str]] = {Shard: "shard", Keep: "keep", Pin: "pin"}
#: Every number in a plan is smaller: those of bytes and seconds, and of values and colors.
_LARGEST: Final = 10**30
_NAMES: Final[dict[Any, str]] = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    NoneType: "null",
}


def encode(value: Any) -> Any:
    """Returns plain data.

    >>> encode(Shard((3, 5), "data", ((0, 1),), "x[0]"))
    {'shard': [3, 5], 'axis': 'data', 'sides': [[0, 1]], 'what': 'x[0]', 'padded': False}
    """
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, MeshAxes):
        return value.shape
    if isinstance(value, Enum):
        return value.name.lower()
    if is_dataclass(value):
        return {key: encode(getattr(value, name)) for name, (key, _) in saved_fields(value.__class__).items()}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    return [encode(item) for item in value] if isinstance(value, tuple) else value


def digest(data: Mapping[str, Any]) -> str:
    """Returns a digest of plain data; raises ValueError where that cannot be written as JSON in UTF-8.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 2, "b": 1})
    True
    """
    text = json.dumps(data, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def parse_json(text: str) -> Any:
    """Returns plain data from JSON; raises ValueError for repeated keys, for ``NaN`` and ``Infinity``, and for deep nesting.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the key 'a' is there twice
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_not_a_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"the key {key!r} is there twice")
        data[key] = value
    return data


def _not_a_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


@cache
def saved_fields(cls: Any) -> dict[str, tuple[str, Any]]:
    """Returns by name the fields that are written, each with its key and its type."""
    hints = get_type_hints(cls, localns={"Call": Any})  # no saved field has a call
    tag = _TAGS.get(cls)
    saved = {f.name: (f.name, hints[f.name]) for f in fields(cls) if f.compare or tag}
    if tag:
        first = next(iter(saved))
        saved[first] = tag, hints[first]
    return saved


def decode(kind: Any, data: Any, where: str) -> Any:
    """Returns a value of a type from plain data; raises ValueError that names the place where the data is wrong.

    >>> decode(tuple[float, ...], [1, "x"], "times")
    Traceback (most recent call last):
    ValueError: times[1]: expected a number, not 'x'
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is MeshAxes:
        return MeshAxes.of(data)
    if origin is UnionType:
        return decode(next((k for k in arguments if _looks_like(k, data)), arguments[0]), data, where)
    if origin is tuple:
        return _decode_tuple(arguments, data, where)
    if origin is dict or origin is Mapping:
        _expect(isinstance(data, dict), "a mapping", data, where)
        return {key: decode(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if is_dataclass(kind):
        return _decode_fields(kind, data, where)
    if issubclass(kind, Enum):
        members = {member.name.lower(): member for member in kind}
        _expect(data in members, f"one of {', '.join(members)}", data, where)
        return members[data]
    if isinstance(data, int | float):
        _expect(abs(data) < _LARGEST, f"a number below {_LARGEST:.0e}", data, where)
    if kind is float and type(data) is int:
        data = float(data)
    _expect(type(data) is kind, _NAMES[kind], data, where)
    return data


def _decode_fields(cls: Any, data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), "a mapping", data, where)
    saved = saved_fields(cls)
    for key, _ in saved.values():
        if key not in data:
            raise ValueError(f"{where}: {key} is missing")
    return cls(**{name: decode(hint, data[key], f"{where}.{key}") for name, (key, hint) in saved.items()})


def _decode_tuple(arguments: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    _expect(isinstance(data, list), "a list", data, where)
    kinds = arguments[:1] * len(data) if arguments[-1] is ... else arguments
    _expect(len(kinds) == len(data), f"{len(kinds)} items", data, where)
    return tuple(decode(kind, item, f"{where}[{k}]") for k, (kind, item) in enumerate(zip(kinds, data, strict=True)))


def _looks_like(kind: Any, data: Any) -> bool:
    if kind in _TAGS:
        return isinstance(data, dict) and _TAGS[kind] in data
    return type(data) is kind


def _expect(right: bool, what: str, data: Any, where: str) -> None:
    if not right:
        raise ValueError(f"{where}: expected {what}, not {reprlib.repr(data)}")
