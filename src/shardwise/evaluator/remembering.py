"""A lowering that looks up what was worked out under other states.

What an op or a value comes out as rests on few decisions (``shardwise.evaluator.locality``). Under a state's key for these, an
equal number for all states that agree on them, it is found by its signature.

A part has two masks. Where a use was asked what it would like (``Lowered.asked``) more decisions count, and all who read
what came of it must know: under the narrow key they find that the wide one is to be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from shardwise.cost.model import CostModel
from shardwise.evaluator.locality import Locality, Place
from shardwise.lowering.decisions import State
from shardwise.lowering.lazy import Lazy
from shardwise.lowering.lowered import Known, Lowered
from shardwise.lowering.ways import NO_WAY

T = TypeVar("T")
_ASKED: Final = object()
#: By key and signature.
Memory = dict[int, dict[int, Any]]


@dataclass(frozen=True, slots=True)
class Group:
    """What a table reads that rests on one mask."""

    mask: int
    sign: int
    ops: tuple[int, ...]
    lies: tuple[int, ...]
    stored: tuple[int, ...]


class Places:
    """What everything in a lowering rests on: numbers of masks, narrow and wide, and a signature."""

    def __init__(self, locality: Locality):
        program = locality.program
        self.masks = sorted(locality.masks())
        number = {mask: n for n, mask in enumerate(self.masks)}
        stored = {v: locality.stored(v) for v in program.definitions}
        self.stored = {v: Place(number[mask], number[mask], sign) for v, (mask, sign) in stored.items()}
        lies = {v: locality.actual(v) for v in program.definitions}
        self.actual = {v: Place(number[n], number[w], sign) for v, (n, w, sign) in lies.items()}
        self.actual |= {v: place for v, place in self.stored.items() if place == self.actual[v]}
        chosen = {op.id: locality.choice(op.id) for op in program.schedule if op.rule is not None}
        self.choice = {k: Place(number[n], number[w], sign) for k, (n, w, sign) in chosen.items()}


class Remembering(Lowered):
    """A lowering that looks up what was worked out under another state that agrees on what it rests on."""

    def __init__(
        self, model: CostModel, state: State, known: Known, places: Places, memory: Memory, keys: Sequence[int]
    ):
        super().__init__(model.structure, state, model.cost, known)
        self._places, self._memory, self._keys = places, memory, keys
        self._blocks: list[dict[int, Any] | None] = [None] * len(keys)
        self.actual = _Watched(len(self.program.values), self.lie, self)
        self.computes = _Watched(len(self.program.ops), self.choose, self)

    def read(self, groups: Sequence[Group]) -> tuple[Any, ...]:
        """How the ops of some groups compute, and how their values lie and are stored."""
        found: list[Any] = []
        for group in groups:
            block = self._block(group.mask)
            own = block.get(group.sign)
            if own is None:
                asked = self.asked
                own = [self.computes[k] for k in group.ops]
                own += [self.actual[v] for v in group.lies]
                own += [self.storage[v] for v in group.stored]
                if self.asked == asked:
                    block[group.sign] = own
            found += own
        return tuple(found)

    def _stored(self, value: int) -> Any:
        return self._remember(self._places.stored[value], super()._stored, value)

    def lie(self, value: int) -> Any:
        place = self._places.actual[value]
        if place is self._places.stored[value]:
            return self.storage[value]
        return self._remember(place, super().lie, value)

    def choose(self, number: int) -> Any:
        place = self._places.choice.get(number)
        return self._remember(place, super().choose, number) if place is not None else NO_WAY

    def _remember(self, where: Place, work_out: Callable[[int], Any], number: int) -> Any:
        narrow, wide, sign = where
        block = self._blocks[narrow]
        if block is None:
            block = self._block(narrow)
        found = block.get(sign)
        if found is _ASKED:
            self.asked += 1
            found = self._block(wide).get(sign)
        if found is not None:
            return found
        asked = self.asked
        found = work_out(number)
        if self.asked == asked:
            block[sign] = found
        else:
            block[sign] = _ASKED
            self._block(wide)[sign] = found  # the same block where the masks are the same
        return found

    def _block(self, mask: int) -> dict[int, Any]:
        """What is known of states that agree with this one on a mask, by signature."""
        block = self._blocks[mask]
        if block is None:
            block = self._blocks[mask] = self._memory.setdefault(self._keys[mask], {})
        return block


class _Watched(Lazy[T]):
    """Keeps no item for which a use was asked what it would like: whoever reads it must learn that it rests on that."""

    def __init__(self, count: int, work_out: Callable[[int], T], lowered: Lowered):
        super().__init__(count, work_out)
        self._lowered = lowered

    def __getitem__(self, index: int) -> T:  # type: ignore[override]
        item = self._items.get(index)
        if item is None:
            asked = self._lowered.asked
            item = self._work_out(index)
            if self._lowered.asked == asked:
                self._items[index] = item
        return item
