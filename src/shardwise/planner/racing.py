"""A race between meshes: which one is worth the budget.

The problem: every mesh needs a search, and the budget is not enough for all of them.

The idea: successive halving (Karnin, Koren and Somekh, 2013; Jamieson and Talwalkar, 2016). All meshes are searched for a
little, the better half for longer, and so on, until one has what is left. A mesh keeps its problem, so that the next round
continues where the last one ended.

Where we deviate: the first round has half of the budget, since building a problem takes time, and is searched greedily, since
that ends soon. The budget that a converged search leaves over goes to the meshes after it and to later rounds.

Weak: a mesh that pays only after a long search is dropped early.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from shardwise.cost.model import Cost
from shardwise.errors import ShardwiseError
from shardwise.lowering.decisions import Decision
from shardwise.planner.inquiry import Inquiry
from shardwise.search.budget import Budget
from shardwise.search.result import Ended
from shardwise.search.searcher import SETTLED, Purse

#: Seconds for a race where no budget is given.
RACE_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Decided:
    """The decisions for a program on one mesh. ``ended``: why each search among the tactics did; ``quick``: whether this was
    only a first look; ``total`` is None where no search computed it and no mesh is compared."""

    inquiry: Inquiry
    decisions: tuple[Decision, ...]
    total: Cost | None
    fits: bool
    evaluations: int
    ended: tuple[Ended, ...]
    quick: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is better."""
        assert self.total is not None
        return (0, self.total.time_ps) if self.fits else (1, self.total.peak_blocks)

    @property
    def settled(self) -> bool:
        """Whether a longer search would find the same."""
        return not self.ended or (not self.quick and all(why in SETTLED for why in self.ended))


@dataclass
class Race:
    """By number of the mesh: the best result, and the error of those that cannot be used."""

    results: dict[int, Decided] = field(default_factory=dict)
    failed: dict[int, ShardwiseError] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def order(self) -> list[int]:
        """The meshes that were searched, the best first; of equals the one that lies better."""
        return sorted(self.results, key=lambda k: (self.results[k].rank, k))


def race(count: int, run: Callable[[int, int, Budget], Decided], drop: Callable[[int], object], purse: Purse) -> Race:
    """Successive halving: ``run`` searches a mesh, by number, in a round, by number, within a budget; ``drop`` is called for
    meshes that will not be searched again. A mesh on which ``run`` raises one of our errors drops out."""
    state = Race()
    alive = list(range(count))
    rounds = math.ceil(math.log2(count)) + 1
    for n in range(rounds):
        round_purse = Purse(purse.part(min(2, rounds) if n == 0 else rounds - n))
        for k, number in enumerate(alive):
            before = state.results.get(number)
            if (before is not None and before.settled) or (state.results and purse.empty):
                continue
            try:
                result = run(number, n, round_purse.part(len(alive) - k))
            except ShardwiseError as error:
                state.failed[number] = error
                continue
            except KeyboardInterrupt:
                if not state.results:
                    raise
                state.interrupted = True
                return state
            round_purse.spend(result.evaluations)
            if before is None or result.rank <= before.rank:
                state.results[number] = result
            if Ended.INTERRUPTED in result.ended:
                state.interrupted = True
                return state
        best = state.order[: -(-len(alive) // 2)]
        for number in alive:
            if number in state.results and number not in best:
                drop(number)
        alive = best
    return state
