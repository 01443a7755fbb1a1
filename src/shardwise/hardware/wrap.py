"""Which axes of a torus wrap around into rings: a rule in the profile of the link.

| rule | an axis wraps when |
|---|---|
| ``never`` | never |
| ``always`` | it has more than two members |
| ``at least N`` | it has N members or more (TPU v5e and v6e: 16) |
| ``cubes of N`` | every axis is a multiple of N: optical switches close whole cubes only (TPU v4 and v5p: 4) |
| ``whole`` | it is as long as the largest torus there is (TPU v2 and v3) |

Two members are neighbours already: an axis of two is never a ring.
"""

from __future__ import annotations

import re
from typing import Any, Final

WRAP_RULES: Final = ("never", "always", "whole", "at least N", "cubes of N")


def wrap_problem(rule: Any) -> str | None:
    """Returns what is wrong with a rule, or None."""
    if not isinstance(rule, str):
        return "a rule is a text"
    return None if rule in WRAP_RULES[:3] or _counted(rule) else "no such rule"


def wraps(rule: str, shape: tuple[int, ...], largest: tuple[int, ...]) -> tuple[bool, ...]:
    """Returns which axes of a torus of a shape are rings.

    >>> wraps("at least 16", (8, 16), (16, 16)), wraps("cubes of 4", (2, 4, 4), ())
    ((False, True), (False, False, False))
    """
    counted = _counted(rule)
    if rule == "whole":
        closed = [size == most for size, most in zip(shape, largest, strict=True)]
    elif counted and counted[0] == "at least":
        closed = [size >= counted[1] for size in shape]
    elif counted:
        closed = [all(size % counted[1] == 0 for size in shape)] * len(shape)
    else:
        closed = [rule == "always"] * len(shape)
    return tuple(ring and size > 2 for ring, size in zip(closed, shape, strict=True))


def _counted(rule: str) -> tuple[str, int] | None:
    match = re.fullmatch(r"(at least|cubes of) ([1-9]\d*)", rule)
    return (match[1], int(match[2])) if match else None
