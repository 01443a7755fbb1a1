"""A lowering that is told what is known of its state already, in numbers (``shardwise.cost.outcomes``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.cost.compute import Sizes
from shardwise.cost.decisions import State
from shardwise.cost.index import Array
from shardwise.cost.lazy import Lazy
from shardwise.cost.lowering import Lowered
from shardwise.cost.sharding import Axes, Sharding
from shardwise.cost.ways import Way
from shardwise.ir.program import Op

if TYPE_CHECKING:
    from shardwise.cost.outcomes import Outcomes


class Told(Lowered):
    """A lowering that is told the outcomes of its state, as far as they are known."""

    def __init__(self, known: Outcomes, state: State, outcomes: Array):
        super().__init__(known.model.structure, state, known.model.cost, known.known)
        self._own, self._outcomes, self.sizes = known, outcomes, Sizes(self)
        self.storage = Lazy(len(self.program.values), self._store)
        self._candidates: dict[int, tuple[Axes, ...]] = {}

    def _store(self, value: int) -> Sharding:
        item = self._own.of_value.get(value)
        found = int(self._outcomes[item]) if item is not None else 0
        return self._own.thing(found) if found else self._stored(value)[0]

    def lie(self, value: int) -> Sharding:
        known = self._own.lying_at.get(value)
        if known is not None and (found := self._outcomes[known[0]]):
            lies: Sharding = self._own.thing(found, known[1])
            return lies
        op, result = self.program.definitions[value]
        item = self._own.of_op.get(op)
        found = int(self._outcomes[item]) if item is not None else 0
        if not found:
            return super().lie(value)
        made = self.computes[op].made[result]
        return self._own.lying(found, result, made, self.storage[value], self.may_wait(value))

    def choose(self, number: int) -> Way:
        item = self._own.of_op.get(number)
        found = int(self._outcomes[item]) if item is not None else 0
        return self._own.way(item, found) if item is not None and found else super().choose(number)

    def candidates(self, op: Op) -> tuple[Axes, ...]:
        found = self._candidates.get(op.id)
        if found is None:
            found = self._candidates[op.id] = super().candidates(op)
        return found
