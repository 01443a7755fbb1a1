"""``Auto``: a search over the axes that other tactics leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.cost.model import CostModel
from shardwise.errors import DecisionError
from shardwise.lowering.decisions import Decision, Shard
from shardwise.search.searcher import Searcher
from shardwise.tactics.baselines import Combinations
from shardwise.tactics.pins import stated_shards
from shardwise.tactics.tactic import Axes, Context, Listed


@dataclass(frozen=True, init=False)
class Auto(Listed):
    """Searches for the best decisions on some axes, on top of what was decided before.

    ``Auto("x", "y")`` searches these axes, ``Auto()`` all that no tactic before it has sharded anything on. What was decided
    before holds: pins, kept and replicated arguments, dimensions that have an axis already. With ``only``, a path or several,
    the search decides only about dimensions of these arguments, with all that is sharded alike.

    >>> import jax, shardwise
    >>> from shardwise.tactics.strategies import DataParallel
    >>> w, x = (jax.ShapeDtypeStruct(s, "float32") for s in [(1024, 8192), (256, 1024)])
    >>> where = {"mesh": {"data": 4, "model": 4}, "budget_evals": 100}
    >>> plan = shardwise.plan(lambda w, x: x @ w, w, x, tactics=[DataParallel("data"), Auto("model")], **where)
    >>> plan.spec("x"), plan.spec("w")
    (P('data',), P(None, 'model'))
    >>> plan = shardwise.plan(lambda w, x: x @ w, w, x, tactics=[Auto("model", only="x")], **where)
    >>> plan.spec("x"), plan.spec("w")
    (P('model',), P())
    """

    only: tuple[str, ...]

    def __init__(self, *axes: Axes, only: str | Sequence[str] = ()) -> None:
        super().__init__(*axes)
        object.__setattr__(self, "only", (only,) if isinstance(only, str) else tuple(only))

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        for axis in self.axes:
            context.mesh.index(axis)
        stated = stated_shards(context.analysis, context.mesh)
        used = {d.axis for d in taken if isinstance(d, Shard) and d not in stated}
        axes = self.axes or tuple(a for a in context.mesh.names if a not in used)
        if not axes:
            raise DecisionError(
                f"Auto(): every axis is taken by the tactics before it; Auto({', '.join(map(repr, context.mesh.names))}) "
                f"searches axes in spite of that"
            )
        searcher = context.searcher or Searcher.alone(CostModel.of(context.analysis, context.cost))
        only = [value.id for value in context.arguments(self.only)] if self.only else None
        named = replace(context, searcher=None)  # which keeps the combinations: they must not refer to it
        result = searcher.search(taken, axes, lambda: Combinations(named, axes, taken, only=only), only)
        return list(result.decisions) if result is not None else []
