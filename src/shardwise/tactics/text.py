"""Tactics as text.

``dp:data,megatron:model`` are tactics in order, each a name and the axes it is applied to: ``fsdp:data+model`` has two axes,
``fsdp`` all of the mesh, and ``megatron+sequence:model`` is two tactics on one axis.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Final, NamedTuple

from shardwise.errors import DecisionError
from shardwise.tactics.auto import Auto
from shardwise.tactics.named import PARTS, named
from shardwise.tactics.tactic import Tactic

#: All names of tactics.
NAMES: Final = (*PARTS, "auto")
#: Tactics as users write them.
TacticsLike = str | Tactic | Sequence["str | Tactic"]


def check_names(names: Sequence[str], known: Sequence[str]) -> None:
    """Raises one error for all names that are no tactic."""
    unknown = []
    for name in dict.fromkeys(n for n in names if n not in known):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        unknown.append(f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if unknown:
        raise DecisionError(f"no tactic is called {' or '.join(unknown)}; there are {', '.join(known)}")


class Words(NamedTuple):
    """A part of a text between commas: the names of tactics, and of the axes that they share."""

    names: tuple[str, ...]
    axes: tuple[str, ...]


def read_words(text: str, known: Sequence[str] = NAMES) -> list[Words]:
    """Returns the parts of a text.

    >>> read_words("dp:data, megatron+sequence:model")
    [Words(names=('dp',), axes=('data',)), Words(names=('megatron', 'sequence'), axes=('model',))]
    """
    parts = []
    for part in text.split(","):
        before, colon, after = part.partition(":")
        names, axes = ([word.strip() for word in side.split("+")] for side in (before, after))
        if not all(names) or (colon and not all(axes)):
            raise DecisionError(
                f"{text!r} is no list of tactics: write names and axes, such as dp:data,megatron:model or fsdp:data+model"
            )
        parts.append(Words(tuple(names), tuple(axes) if colon else ()))
    check_names([name for words in parts for name in words.names], known)
    return parts


def as_tactics(tactics: TacticsLike) -> tuple[Tactic, ...]:
    """Returns tactics from text, objects, or a list of both.

    >>> from shardwise.tactics.strategies import Megatron
    >>> as_tactics("fsdp:data+model,auto")
    (FSDP(axes=('data', 'model'), dim=0), Auto(axes=()))
    >>> as_tactics([Megatron("model"), "dp:data"])
    (Megatron(axes=('model',)), DataParallel(axes=('data',), dim=0))
    """
    objects: list[Tactic] = []
    for one in [tactics] if isinstance(tactics, str) or hasattr(tactics, "decide") else tactics:
        if isinstance(one, str):
            parts = [(name, words.axes) for words in read_words(one) for name in words.names]
            objects += [Auto(axes) if name == "auto" else named(name, axes) for name, axes in parts]
        elif hasattr(one, "decide") and not isinstance(one, type):
            objects.append(one)
        else:
            shown = getattr(one, "__name__", type(one).__name__)
            raise DecisionError(f"a tactic is text such as 'fsdp:data', or an object such as FSDP('data'), not {shown}")
    return tuple(objects)
