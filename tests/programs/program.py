"""What a program of another package is, and what can be said about its analysis.

A :class:`Fact` is a sentence and a check. Places are written ``batch/image[0]``; a path may hold ``*``, and must then
match something.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import optax

from shardwise import Analysis
from shardwise.dims.analysis import Color

Step = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that must hold of an analysis; ``check`` raises AssertionError where it does not."""

    text: str
    check: Callable[[Analysis], None]


@dataclass(frozen=True, slots=True)
class Program:
    """A function with abstract arguments. ``build`` imports the package; ``opaque`` are the kinds of op that may have
    the safe rule, and why."""

    name: str
    package: str
    what: str
    build: Callable[[], tuple[Step, tuple[Any, ...]]]
    facts: tuple[Fact, ...]
    opaque: Mapping[str, str] = field(default_factory=dict)


# Building.


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def tokens(*sizes: int) -> jax.ShapeDtypeStruct:
    return shape(*sizes, dtype="int32")


@cache
def random_key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


def training_step(loss: Callable[[Any, Any], jax.Array], optimizer: optax.GradientTransformation) -> Step:
    """Gradients and an update: ``step(params, state, batch) -> (params, state, loss)``."""

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def training(
    loss: Callable[[Any, Any], jax.Array], optimizer: optax.GradientTransformation, params: Any, batch: Any
) -> tuple[Step, tuple[Any, ...]]:
    return training_step(loss, optimizer), (params, jax.eval_shape(optimizer.init, params), batch)


# Facts.


def _expand(analysis: Analysis, place: str) -> list[tuple[str, int]]:
    path, dim = place[:-1].rsplit("[", 1)
    arguments = [a.path for a in analysis.program.arguments]
    found = [(p, int(dim)) for p in arguments if fnmatch.fnmatchcase(p, path)] if "*" in path else [(path, int(dim))]
    assert found, f"no argument is like {place}; there are {', '.join(arguments[:20])}"
    return found


def colors_at(analysis: Analysis, *places: str) -> dict[str, Color]:
    """The colors of argument dimensions, by place."""
    found = {}
    for place in places:
        for path, dim in _expand(analysis, place):
            color = analysis.color_of(path, dim)
            assert color is not None, f"{path}[{dim}] has size one"
            found[f"{path}[{dim}]"] = color
    return found


def argument_places(analysis: Analysis, color: Color) -> set[str]:
    arguments = {a.value for a in analysis.program.arguments}
    return {str(place) for place in color.places if place.value in arguments}


def one_color(*places: str) -> Fact:
    def check(analysis: Analysis) -> None:
        found = colors_at(analysis, *places)
        ids = {place: color.id for place, color in found.items()}
        assert len(set(ids.values())) == 1, f"different colors: {ids}"

    return Fact(f"{', '.join(places)} are one color", check)


def exactly(*places: str) -> Fact:
    """Nothing that belongs to the color is missing, and nothing else is in it."""

    def check(analysis: Analysis) -> None:
        found = colors_at(analysis, *places)
        color = next(iter(found.values()))
        assert {c.id for c in found.values()} == {color.id}, f"different colors: {found}"
        others = argument_places(analysis, color) - set(found)
        assert not others, f"also in the color of {places[0]}: {sorted(others)[:10]}"
        assert color.matters, f"the color of {places[0]} does not matter"

    are = "is a color" if len(places) == 1 else "are one color"
    return Fact(f"{', '.join(places)} {are}, with no other argument, and it matters", check)


def apart(*places: str) -> Fact:
    def check(analysis: Analysis) -> None:
        ids = [(place, color.id) for place, color in colors_at(analysis, *places).items()]
        assert len({c for _, c in ids}) == len(ids), f"merged: {ids}"

    return Fact(f"{', '.join(places)} have different colors", check)


def loop(place: str) -> Fact:
    def check(analysis: Analysis) -> None:
        for where, color in colors_at(analysis, place).items():
            assert color.loop and not color.matters, f"{where} is no loop dimension"

    return Fact(f"{place} is a loop's trips", check)


def deciding_groups(count: int) -> Fact:
    """How many decision units there are; those of no argument (inner, small) are left out."""

    def check(analysis: Analysis) -> None:
        found = [g for g in analysis.groups if g.matters and g.places]
        assert len(found) == count, [(g.sizes, [str(p) for p in g.places[:3]]) for g in found]

    return Fact(f"{count} groups matter and are seen from outside", check)


def no_conflict() -> Fact:
    def check(analysis: Analysis) -> None:
        families = {analysis.program.label(analysis.program.ops[c.op].results[0]) for c in analysis.conflicts}
        assert not families, sorted(families)[:10]

    return Fact("no conflict", check)


def conflicts(sets: int, bits: int, *only_in: str) -> Fact:
    """The number of compatibility sets and of choices after grouping, and the only colors they are about."""

    def check(analysis: Analysis) -> None:
        found = analysis.compatibility_sets
        assert (len(found), analysis.bits) == (sets, bits), (len(found), analysis.bits)
        assert all(s.consistent for s in found)
        allowed = {c.id for c in colors_at(analysis, *only_in).values()}
        assert {s.color for s in found} == allowed, [(s.color, [str(p) for p in s.first[:2]]) for s in found]

    many = "compatibility set" if sets == 1 else "compatibility sets"
    return Fact(f"{sets} {many}, {bits} bit{'s' * (bits != 1)}, of {', '.join(only_in)}", check)
