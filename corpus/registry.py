"""The list of programs. An adapter is a function of sizes that returns a :class:`Case`; it imports its package when called, so
that the list can be read where no package is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
import optax

KINDS: Final = ("train", "infer")
#: ``fit`` may be used to fit or tune constants of the planner; ``test`` is never used for that.
SPLITS: Final = ("fit", "test")


@dataclass(frozen=True)
class Case:
    """A function, and a function that makes its arguments: it is run for arrays, and evaluated abstractly for shapes. ``jit``:
    the package's own ``jax.jit``."""

    fn: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]
    donate: tuple[int, ...] = ()
    jit: Callable[..., Any] = jax.jit


@dataclass(frozen=True)
class Program:
    """A program of a package: ``small`` sizes are run on host devices, ``full`` sizes are compiled for TPUs."""

    name: str
    package: str
    kind: str
    split: str
    what: str
    build: Callable[..., Case]
    small: Mapping[str, Any]
    full: Mapping[str, Any]


_PROGRAMS: Final[dict[str, Program]] = {}


def program(
    package: str, kind: str, split: str, small: Mapping[str, Any], full: Mapping[str, Any]
) -> Callable[[Callable[..., Case]], Callable[..., Case]]:
    """Registers an adapter under the name of its function; the first line of its docstring says what the program is."""

    def register(build: Callable[..., Case]) -> Callable[..., Case]:
        name = build.__name__.replace("_", "-")
        if name in _PROGRAMS:
            raise ValueError(f"two programs have the name {name!r}")
        if kind not in KINDS or split not in SPLITS:
            raise ValueError(f"{name}: kind {kind!r} must be one of {KINDS}, split {split!r} one of {SPLITS}")
        what = (build.__doc__ or "").splitlines()[0].rstrip(".")
        _PROGRAMS[name] = Program(name, package, kind, split, what, build, small, full)
        return build

    return register


def programs() -> tuple[Program, ...]:
    """Returns all programs, by package and name."""
    for path in sorted(Path(__file__).parent.glob("*_programs.py")):
        importlib.import_module(f"corpus.{path.stem}")
    return tuple(sorted(_PROGRAMS.values(), key=lambda p: (p.package, p.name)))


def training(
    loss: Callable[..., jax.Array],
    optimizer: optax.GradientTransformation,
    params: Callable[[], Any],
    *batch: Callable[[], Any],
) -> Case:
    """Returns a step of ``(params, state, *batch)`` with gradients and an update; ``loss(params, *batch)`` is a scalar."""

    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    def make() -> tuple[Any, ...]:
        weights = params()
        return weights, optimizer.init(weights), *(b() for b in batch)

    return Case(step, make, donate=(0, 1))


def normal(*shape: int, seed: int = 1, dtype: str = "float32") -> Callable[[], jax.Array]:
    return lambda: jax.random.normal(jax.random.key(seed), shape, dtype)


def tokens(*shape: int, below: int, seed: int = 2) -> Callable[[], jax.Array]:
    return lambda: jax.random.randint(jax.random.key(seed), shape, 0, below)
