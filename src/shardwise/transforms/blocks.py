"""Rematerialization of repeated blocks, such as unrolled layers (``transforms/remat``).

Blocks are found by structure alone. Outside of the backward pass, which JAX marks as transposed, every step is a letter: its
primitive and the types of its results. The longest stretches of this text that repeat (``text[i] == text[i + period]``) are
stacks of layers. They are cut where the fewest bytes pass from one block to the next.

A result that only the backward pass reads is dropped. Before its first use the block is run again from its inputs, as far as
needed. The backward pass reads the same inputs. A barrier around these inputs and a cotangent that is ready at that point, as
in ``jax.checkpoint``, keeps XLA from merging the second run with the first and from beginning it earlier. Results that the
forward pass reads later are kept. Cuts only determine where to begin again: the program computes the same wherever they are.

A block is not changed where running it again would have an effect twice, and a family where its blocks would keep as many bytes
as they drop, or drop very few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardwise.capture import jax_internals as internals
from shardwise.capture.leaves import dtype_of
from shardwise.transforms.flat import Flat, Step, values_of

#: The number of distances between equal letters that are tried as periods, the most frequent first.
_MAX_PERIODS: Final = 256
#: The occurrences of a letter whose distances count: a letter may be in a block more than once.
_OCCURRENCES: Final = 4
#: The least fraction of the bytes read by the backward pass that a family must drop.
_MIN_DROPPED: Final = 0.02

PRODUCTS: Final = ("dot_general", "conv_general_dilated")

_Cuts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """The ``steps`` that are computed again before step ``at``, from ``inputs`` and behind ``cotangent``, for ``dropped``."""

    at: int
    steps: tuple[int, ...]
    inputs: tuple[int, ...]
    dropped: tuple[int, ...]
    cotangent: int


def find_families(flat: Flat) -> list[_Cuts]:
    """Returns families of repeated blocks that drop more bytes than they keep instead, by their cuts."""
    computed = {v for step in flat.steps if not step.is_backward for v in step.results}
    read = {v for step in flat.steps if step.is_backward for v in step.reads}
    least = _MIN_DROPPED * sum(map(flat.nbytes, computed & read))
    families: list[_Cuts] = []
    for first, end, period in sorted(repetitions(text_of(flat))):
        cuts = _cut(flat, first, end, period)
        if len(cuts) > 2 and _saved_bytes(flat, cuts) > least:
            families.append(cuts)
    return families


def repeated_product(flat: Flat) -> Any:
    """Returns the equation of the first product in the longest stretch of the forward pass that repeats, None without one."""
    for first, _, period in repetitions(text_of(flat)):
        products = [step.equation for step in flat.steps[first : first + period] if step.name in PRODUCTS]
        if products:
            return products[0]
    return None


def find_blocks(flat: Flat, cuts: _Cuts) -> list[Block]:
    """Returns the blocks between cuts that can be computed again."""
    outputs = set(values_of(flat.outputs))
    blocks = (_block(flat, first, end, outputs) for first, end in pairwise(cuts))
    return [block for block in blocks if block is not None]


def text_of(flat: Flat, backward: bool = False) -> NDArray[np.int64]:
    """Returns a number for every step, equal for equal letters; those that are not of one pass are unique."""
    letters: dict[Any, int] = {}

    def letter(k: int, step: Step) -> int:
        types = [flat.types[v] for v in step.results]
        kinds = ((internals.shape_of(aval), dtype_of(aval)[0]) for aval in types)
        return -1 - k if step.is_backward != backward else letters.setdefault((step.name, *kinds), len(letters))

    return np.array([letter(k, step) for k, step in enumerate(flat.steps)], np.int64)


def repetitions(text: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Returns begin, end and period of the stretches that repeat, the longest first, without overlaps.

    >>> repetitions(np.array([9, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 7]))
    [(1, 13, 4)]
    """
    order = np.argsort(text, kind="stable")
    apart = [
        order[k:][same] - order[:-k][same] for k in range(1, _OCCURRENCES + 1) if (same := _same(text[order], k)).any()
    ]
    if not apart:
        return []
    periods, counts = np.unique(np.concatenate(apart), return_counts=True)
    tried = sorted(periods[np.argsort(-counts, kind="stable")[:_MAX_PERIODS]].tolist())
    every = [(end - first, -period, first) for period in tried for first, end in _runs(_same(text, period), period)]
    free = np.ones(len(text), bool)
    stretches = []
    for length, period, first in sorted(every, key=lambda run: (-run[0], -run[1], run[2])):
        if free[first : first + length].all():
            free[first : first + length] = False
            stretches.append((first, first + length, -period))
    return stretches


def _same(text: NDArray[np.int64], apart: int) -> NDArray[np.bool_]:
    return np.equal(text[apart:], text[:-apart])


def _runs(same: NDArray[np.bool_], period: int) -> Iterator[tuple[int, int]]:
    """Yields begin and end of the stretches in which each letter equals that a period later, at least a period long."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    for first, last in edges.reshape(-1, 2).tolist():
        if last - first >= period:
            yield first, last + period


def _cut(flat: Flat, first: int, end: int, period: int) -> _Cuts:
    """Returns the cuts with the fewest bytes across; a piece of at least half a block at either end is a block, too."""
    across = np.zeros(end - first + 2)
    for k in range(first, end):
        for v in flat.steps[k].results:
            forward = [u for u in flat.users.get(v, ()) if not flat.steps[u].is_backward]
            last = min(max(forward, default=k), end)
            across[k + 1 - first] += flat.nbytes(v)
            across[last + 1 - first] -= flat.nbytes(v)
    across = np.cumsum(across)[: end - first + 1]
    phase = min(
        range(period), key=lambda f: (float(across[f + period :: period].mean()), -((end - first - f) // period), f)
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
    made = {v for k in range(first, end) for v in steps[k].results}
    # With what the backward pass reads besides, such as a weight: a gathered copy need not be kept for it.
    shared = {v for k in range(first, end) for v in steps[k].reads if any(steps[u].is_backward for u in users[v])}
    inputs = sorted(read - {v for k in again for v in steps[k].results if v not in saved} | shared - made)
    if not dropped or not inputs or any(steps[k].equation.effects for k in again):
        return None
    at = min(u for v in dropped for u in users[v] if u >= end)
    cotangent = cotangent_at(flat, at)
    return None if cotangent is None else Block(at, tuple(again[::-1]), tuple(inputs), tuple(dropped), cotangent)


def cotangent_at(flat: Flat, at: int) -> int | None:
    """Returns a value of the backward pass that is ready at a step, and read there or as soon as possible after."""
    for step in map(flat.steps.__getitem__, range(at, len(flat.steps))):
        ready = [v for v in step.reads if (k := flat.producer.get(v, at)) < at and flat.steps[k].is_backward]
        if step.is_backward and ready:
            return max(ready, key=lambda v: flat.producer[v])
    return None


def _saved_bytes(flat: Flat, cuts: _Cuts) -> float:
    """Returns the bytes that a family drops, minus those that it keeps instead."""
    saved = 0.0
    for block in find_blocks(flat, cuts):
        saved += sum(map(flat.nbytes, block.dropped))
        computed = (v for v in block.inputs if v in flat.producer)
        saved -= sum(flat.nbytes(v) for v in computed if not any(flat.steps[u].is_backward for u in flat.users[v]))
    return saved


def blocks_by_step(flat: Flat, families: Sequence[_Cuts]) -> dict[int, list[Block]]:
    """Returns the blocks by the step before which they are computed again."""
    by_step: dict[int, list[Block]] = {}
    for cuts in families:
        for block in find_blocks(flat, cuts):
            by_step.setdefault(block.at, []).append(block)
    return by_step
