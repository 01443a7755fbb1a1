"""What many items read of many states, side by side: facts, and keys to look up by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from shardwise.cost.index import Array, Things

#: In place of a fact: the sharding that a use is asked about.
ASKED: Final = -1


class Source(Protocol):
    """Whoever numbers facts, by what they are about, and says where those of a state are."""

    things: Things

    def lies(self, value: int) -> int: ...
    def stored(self, value: int) -> int: ...
    def given(self, op: int, factor: int) -> int: ...
    def crossed(self, value: int) -> int: ...
    def waits(self, value: int) -> int: ...
    def place(self, fact: int) -> tuple[int, int]: ...
    def read(self, states: States, owners: Array, places: Array) -> Array: ...


class States(NamedTuple):
    """States of a batch, one for each of some items: the outcomes so far, by item and state, and which state it is."""

    outcomes: Array
    which: Array

    def at(self, places: Array | slice) -> States:
        return States(self.outcomes, self.which[places])

    def of(self, items: Array) -> Array:
        """The outcomes of items (in the first dimension as many as states)."""
        found: Array = self.outcomes[items, self.which.reshape(-1, *[1] * (items.ndim - 1))]
        return found


class Group(NamedTuple):
    """What is looked up by some facts: ``make`` makes it from what they are, ``salt`` tells it from other groups."""

    salt: int
    facts: tuple[int, ...]
    make: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Reads:
    """Groups of many items, side by side: where their facts are, by item, group and fact. Where there is none, ``factors`` has
    a zero."""

    groups: list[list[Group]]
    owners: Array
    places: Array
    factors: Array
    salts: Array
    asked: Array

    @staticmethod
    def of(source: Source, groups: list[list[Group]]) -> Reads:
        wide = max((len(own) for own in groups), default=0)
        deep = max((len(group.facts) for own in groups for group in own), default=0)
        shape = (len(groups), wide, max(1, deep))
        owners, places, asked = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
        factors, salts = np.zeros(shape, np.uint64), np.zeros(shape[:2], np.uint64)
        own_factors = [1, *(2 * k * 0x9E3779B97F4A7C15 + 1 & 2**64 - 1 for k in range(1, shape[2]))]
        for n, own in enumerate(groups):
            for g, group in enumerate(own):
                salts[n, g] = group.salt
                for k, fact in enumerate(group.facts):
                    factors[n, g, k] = own_factors[k]
                    if fact == ASKED:
                        asked[n, g, k] = True
                    else:
                        owners[n, g, k], places[n, g, k] = source.place(fact)
        return Reads(groups, owners, places, factors, salts, asked)

    def keys(self, source: Source, states: States, n: Array, told: Array | None = None) -> tuple[Array, Array]:
        """What the facts are, by number, and keys for them, by item and group, for each of ``n``; ``told`` is what uses are
        asked about."""
        things = source.read(states, self.owners[n], self.places[n])
        if told is not None:
            things = np.where(self.asked[n], told[:, None, None], things)
        keys: Array = (source.things.random[things] * self.factors[n]).sum(axis=2) + self.salts[n]
        return things, keys
