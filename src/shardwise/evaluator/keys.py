"""Keys of states: for a set of decisions a number that is equal for all states that agree on them.

A key is a sum of random 64-bit numbers, one for each decision that was taken, and one for each pair of them whose order
matters, so that what is not in the set adds nothing. Keys for many sets and many states are made at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwise.evaluator.index import Array
from shardwise.evaluator.locality import Space
from shardwise.lowering.decisions import Decision


@dataclass(frozen=True, slots=True)
class Action:
    """One decision, and the atoms that it takes. ``slot`` numbers pairs of a unit and an axis; -1 for a keep."""

    decision: Decision
    unit: int
    axis: int
    slot: int
    atoms: tuple[tuple[int, int], ...]  # (atom, what is said of it)


class Mask(NamedTuple):
    """A set of atoms; with the order of decisions about different ones of them, or without."""

    atoms: int
    ordered: bool = True


class Keys:
    """The random numbers of every action, and of every pair of slots whose order matters, by mask."""

    def __init__(self, space: Space, actions: Sequence[Action], masks: Sequence[Mask], seed: int):
        rng = np.random.default_rng(seed)
        width = 2 * len(space.mesh.sizes)

        def random(count: int) -> Array:
            return rng.integers(0, 2**64, count, dtype=np.uint64)

        holds = np.array([[mask.atoms >> atom & 1 for mask in masks] for atom in range(space.atoms)], np.uint64)
        ordered = np.array([mask.ordered for mask in masks], np.uint64)
        said = random(space.atoms * width).reshape(space.atoms, width)
        self._salt = random(len(masks))
        self._single = np.zeros((len(actions) + 1, len(masks)), np.uint64)  # the last is no action
        for n, action in enumerate(actions):
            for atom, what in action.atoms:
                self._single[n] += said[atom, what] * holds[atom]
        axes = len(space.mesh.sizes)
        slots = len(space.units) * axes
        self._slot = np.array([a.slot if a.slot >= 0 else slots for a in actions] + [slots])
        self._pair = np.zeros((slots + 1, slots + 1, len(masks)), np.uint64)
        for i in range(slots):
            for j in range(slots):
                (u, a), (w, b) = divmod(i, axes), divmod(j, axes)
                if i != j and (u == w or a == b):
                    self._pair[i, j] = random(1) * holds[u] * holds[w] * (ordered if u != w else np.uint64(1))

    def __call__(self, taken: Array, masks: slice = slice(None)) -> Array:
        """By state and mask. States are rows of actions, in order, filled up with the number after the last action's."""
        single, pair = self._single[:, masks], self._pair[:, :, masks]
        keys: Array = self._salt[masks] + single[taken[:, 0]]
        slots = self._slot[taken]
        for j in range(1, taken.shape[1]):
            keys += single[taken[:, j]]
            for i in range(j):
                keys += pair[slots[:, i], slots[:, j]]
        return keys
