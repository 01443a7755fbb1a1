"""``Auto``: a search over the axes that other tactics leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shardwise.cost.model import CostModel
from shardwise.dims.analysis import Analysis
from shardwise.errors import DecisionError
from shardwise.lowering.decisions import Decision, Pin, Shard, State
from shardwise.lowering.decisions import Keep as KeepDecision
from shardwise.search.searcher import Searcher
from shardwise.tactics.baselines import Combinations
from shardwise.tactics.pins import stated_shards
from shardwise.tactics.structure import with_outputs
from shardwise.tactics.tactic import Axes, Context, Listed

#: Why arguments are kept as they are.
_OTHERS: Final = "the search is about others only"


@dataclass(frozen=True, init=False)
class Auto(Listed):
    """Searches for the best decisions on some axes, on top of what was decided before.

    ``Auto("x", "y")`` searches these axes, ``Auto()`` all that no tactic before it has sharded anything on. What was decided
    before holds: pins, kept and replicated arguments, dimensions that have an axis already. With ``only``, a path or several,
    the search decides only about dimensions of these arguments. What the program computes from them follows, and arguments with
    the same dimensions (their moments); all other arguments stay as they are on these axes, and are cut where they are used.

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
        kept = [] if only is None else _others_kept(context, axes, taken, only)
        before = [*taken, *kept]
        named = replace(context, searcher=None)  # which keeps the combinations: they must not refer to it
        result = searcher.search(before, axes, lambda: Combinations(named, axes, before, only=only), only)
        decisions = list(result.decisions) if result is not None else []
        return [*_needed(context.analysis, kept, decisions), *decisions]


def _others_kept(
    context: Context, axes: Sequence[str], taken: Sequence[Decision], only: Sequence[int]
) -> list[KeepDecision]:
    """Returns decisions that keep all arguments but ``only`` some, and those with the same dimensions, replicated on some axes;
    other than arguments that are pinned, or sharded on the axis by what was ``taken``."""
    analysis, values = context.analysis, context.analysis.program.values
    alike = {(values[v].shape, analysis.value_colors[v]) for v in only}
    pinned = {d.value for d in taken if isinstance(d, Pin)}
    others = [values[a.value] for a in analysis.program.arguments if a.value not in pinned]
    others = [v for v in others if (v.shape, analysis.value_colors[v.id]) not in alike]
    kept = []
    for axis in axes:
        sharded = {
            color for color, number in State(context.mesh, tuple(taken)).order if number == context.mesh.index(axis)
        }
        left = [v for v in others if sharded.isdisjoint(analysis.value_colors[v.id])]
        if left:
            kept.append(KeepDecision(with_outputs(analysis, left), axis, why=_OTHERS))
    return kept


def _needed(analysis: Analysis, kept: Sequence[KeepDecision], decisions: Sequence[Decision]) -> Iterator[KeepDecision]:
    """Yields the decisions that keep arguments, for those that would be sharded otherwise."""
    for keep in kept:
        colors = {c for d in decisions if isinstance(d, Shard) and d.axis == keep.axis for c in d.colors}
        values = tuple(v for v in keep.values if not colors.isdisjoint(analysis.value_colors[v]))
        if values:
            yield replace(keep, values=values)
