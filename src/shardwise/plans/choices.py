"""Decisions as they are kept with a plan: numbers of the analysis of the same program, which the fingerprint tells."""

from __future__ import annotations

from typing import Any

from shardwise.lowering.decisions import Decision, Keep, Pin, Shard


def choice_json(decision: Decision) -> dict[str, Any]:
    """Plain data.

    >>> choice_json(Shard((3, 5), "data", ((0, 1),), "x[0]"))
    {'shard': [3, 5], 'axis': 'data', 'sides': [[0, 1]], 'what': 'x[0]'}
    """
    if isinstance(decision, Pin):
        spec = [None if axes is None else list(axes) for axes in decision.spec]
        return {"pin": decision.value, "spec": spec, "colors": list(decision.colors), "what": decision.what}
    if isinstance(decision, Keep):
        return {"keep": list(decision.values), "axis": decision.axis, "what": decision.what, "why": decision.why}
    sides = [list(side) for side in decision.sides]
    return {"shard": list(decision.colors), "axis": decision.axis, "sides": sides, "what": decision.what}


def read_choices(data: Any, axes: tuple[str, ...]) -> tuple[Decision, ...]:
    """From plain data; raises KeyError, TypeError or ValueError where that is no list of decisions on these axes."""
    if not isinstance(data, list):
        raise TypeError(f"expected a list, not {type(data).__name__}")
    return tuple(_read(row, axes) for row in data)


def _read(row: Any, axes: tuple[str, ...]) -> Decision:
    what = _text(row["what"])
    if "pin" in row:
        spec = tuple(None if own is None else tuple(_axis(a, axes) for a in own) for own in row["spec"])
        return Pin(_number(row["pin"]), spec, tuple(_number(c, -1) for c in row["colors"]), what)
    axis = _axis(row["axis"], axes)
    if "keep" in row:
        return Keep(tuple(_number(v) for v in row["keep"]), axis, what, _text(row["why"]))
    sides = tuple((_number(b), _side(s)) for b, s in row["sides"])
    return Shard(tuple(_number(c) for c in row["shard"]), axis, sides, what)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, not {value!r}")
    return value


def _axis(name: Any, axes: tuple[str, ...]) -> str:
    if name not in axes:
        raise ValueError(f"the mesh has no axis {name!r}")
    return str(name)


def _number(value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"expected a number from {least}, not {value!r}")
    return value


def _side(value: Any) -> int:
    if value not in (0, 1) or isinstance(value, bool):
        raise ValueError(f"a side is 0 or 1, not {value!r}")
    return int(value)
