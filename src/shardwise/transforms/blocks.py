"""Repeated blocks that compute again: layers that are unrolled in the program (``transforms/remat``).

Found by structure alone. Outside of the backward pass, which JAX marks as transposed, every step is a letter: its primitive and
the types of what it makes; numbers and parameters are none of it, so that a layer that knows its index is like the others. The
longest stretches of this text that repeat themselves (``text[i] == text[i + period]``) are stacks of layers. They are cut where
the least goes over from one block to the next.

What a block makes and nothing but the backward pass reads is not kept. Before its first use the block is run again, as far as
that takes, from what it read. A barrier goes around these values and a cotangent that the backward pass has just come to, as
``jax.checkpoint`` does it: XLA cannot merge the second run with the first, and cannot begin it earlier. What the forward pass
reads later on is kept, and so is what is read by no backward step. Cuts say only where to begin again: wherever they are the
program computes the same.

A block is left alone where running it again would have an effect twice, and a family where its blocks would keep as much as
they leave out, or leave out next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardwise.capture import jax_internals as internals
from shardwise.transforms.flat import Flat

#: How many of the distances between equal letters are tried as periods: the most frequent.
_PERIODS: Final = 256
#: Equal letters up to so many places apart are looked at: a letter may be in a block more than once.
_NEIGHBOURS: Final = 4
#: The share of what the backward pass reads that a family must leave out.
_LEAST: Final = 0.02

_Cuts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """What is computed again before step ``at``: the ``steps``, which read ``given``, for the values ``dropped``. ``cotangent``
    is a value of the backward pass that it waits for."""

    at: int
    steps: tuple[int, ...]
    given: tuple[int, ...]
    dropped: tuple[int, ...]
    cotangent: int


def find_families(flat: Flat) -> list[_Cuts]:
    """Repeated blocks that have more to leave out than to keep instead, each family by its cuts: a block goes from one to the
    next."""
    made = {v for step in flat.steps if not step.is_backward for v in step.results}
    read = {v for step in flat.steps if step.is_backward for v in step.reads}
    least = _LEAST * sum(map(flat.nbytes, made & read))
    found: list[_Cuts] = []
    for first, end, period in sorted(_repetitions(_text(flat))):
        cuts = _cut(flat, first, end, period)
        if len(cuts) > 2 and _spared(flat, cuts) > least:
            found.append(cuts)
    return found


def find_blocks(flat: Flat, cuts: _Cuts) -> list[Block]:
    """What the blocks between cuts compute again."""
    outputs = {v for v in flat.outputs if isinstance(v, int)}
    made = (_block(flat, first, end, outputs) for first, end in pairwise(cuts))
    return [block for block in made if block is not None]


def _text(flat: Flat) -> NDArray[np.int64]:
    """A number for every step, equal for equal letters; those of the backward pass are like no other."""
    letters: dict[Any, int] = {}
    known: dict[int, tuple[Any, ...]] = {}

    def kind(value: int) -> tuple[Any, ...]:
        if value not in known:
            aval = flat.types[value]
            known[value] = internals.shape_of(aval), internals.dtype_of(aval)[0]
        return known[value]

    text = np.empty(len(flat.steps), np.int64)
    for k, step in enumerate(flat.steps):
        if step.is_backward:
            text[k] = -1 - k
            continue
        letter = step.equation.primitive.name, *map(kind, step.results)
        text[k] = letters.setdefault(letter, len(letters))
    return text


def _repetitions(text: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Stretches that repeat themselves with a period: where they begin and end, the longest first, none over another."""
    order = np.argsort(text, kind="stable")
    apart = [
        order[k:][same] - order[:-k][same] for k in range(1, _NEIGHBOURS + 1) if (same := _same(text[order], k)).any()
    ]
    if not apart:
        return []
    periods, counts = np.unique(np.concatenate(apart), return_counts=True)
    tried = sorted(periods[np.argsort(-counts, kind="stable")[:_PERIODS]].tolist())
    every = [(end - first, -period, first) for period in tried for first, end in _runs(_same(text, period), period)]
    free = np.ones(len(text), bool)
    found = []
    for length, period, first in sorted(every, key=lambda run: (-run[0], -run[1], run[2])):
        if free[first : first + length].all():
            free[first : first + length] = False
            found.append((first, first + length, -period))
    return found


def _same(text: NDArray[np.int64], apart: int) -> NDArray[np.bool_]:
    return np.equal(text[apart:], text[:-apart])


def _runs(same: NDArray[np.bool_], period: int) -> Iterator[tuple[int, int]]:
    """The stretches that repeat at least once: as long as the period where each letter is as that a period later."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    for first, last in edges.reshape(-1, 2).tolist():
        if last - first >= period:
            yield first, last + period


def _cut(flat: Flat, first: int, end: int, period: int) -> _Cuts:
    """Where the least goes over; a piece of at least half a block at either end is one, too."""
    over = np.zeros(end - first + 2)
    for k in range(first, end):
        for v in flat.steps[k].results:
            forward = [u for u in flat.users.get(v, ()) if not flat.steps[u].is_backward]
            last = min(max(forward, default=k), end)
            over[k + 1 - first] += flat.nbytes(v)
            over[last + 1 - first] -= flat.nbytes(v)
    over = np.cumsum(over)[: end - first + 1]
    phase = min(
        range(period), key=lambda f: (float(over[f + period :: period].mean()), -((end - first - f) // period), f)
    )
    cuts = list(range(first + phase, end + 1, period))
    if 2 * (cuts[0] - first) >= period:
        cuts.insert(0, first)
    if 2 * (end - cuts[-1]) >= period:
        cuts.append(end)
    return tuple(cuts)


def _block(flat: Flat, first: int, end: int, outputs: set[int]) -> Block | None:
    steps, users = flat.steps, flat.users
    dropped: list[int] = []
    saved: set[int] = set()
    for v in (v for k in range(first, end) for v in steps[k].results):
        later = [u for u in users.get(v, ()) if u >= end]
        if not any(steps[u].is_backward for u in later):
            continue
        if v in outputs or not all(steps[u].is_backward for u in later):
            saved.add(v)
        else:
            dropped.append(v)
    again: list[int] = []
    needed = set(dropped)
    for k in reversed(range(first, end)):
        if needed.intersection(steps[k].results):
            again.append(k)
            needed.update(v for v in steps[k].reads if v not in saved)
    read = {v for k in again for v in steps[k].reads}
    given = sorted(read - {v for k in again for v in steps[k].results if v not in saved})
    if not dropped or not given or any(steps[k].equation.effects for k in again):
        return None
    at = min(u for v in dropped for u in users[v] if u >= end)
    cotangent = _cotangent(flat, at)
    return None if cotangent is None else Block(at, tuple(again[::-1]), tuple(given), tuple(dropped), cotangent)


def _cotangent(flat: Flat, at: int) -> int | None:
    """A value that the backward pass has at a step, and reads there or as soon as possible after."""
    for step in map(flat.steps.__getitem__, range(at, len(flat.steps))):
        ready = [v for v in step.reads if (k := flat.maker.get(v, at)) < at and flat.steps[k].is_backward]
        if step.is_backward and ready:
            return max(ready, key=lambda v: flat.maker[v])
    return None


def _spared(flat: Flat, cuts: _Cuts) -> float:
    """Bytes that a family leaves out, less those that it keeps instead."""
    spared = 0.0
    for block in find_blocks(flat, cuts):
        spared += sum(map(flat.nbytes, block.dropped))
        made = (v for v in block.given if v in flat.maker)
        spared -= sum(flat.nbytes(v) for v in made if not any(flat.steps[u].is_backward for u in flat.users[v]))
    return spared


def blocks_by_step(flat: Flat, families: Sequence[_Cuts]) -> dict[int, list[Block]]:
    """The blocks by the step before which they are computed again."""
    found: dict[int, list[Block]] = {}
    for cuts in families:
        for block in find_blocks(flat, cuts):
            found.setdefault(block.at, []).append(block)
    return found
