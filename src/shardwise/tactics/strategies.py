"""The named strategies. Each is defined by structure: what is contracted, what is looked up, what is shared."""

from __future__ import annotations

import os.path
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.cost.decisions import Decision
from shardwise.cost.decisions import Keep as KeepDecision
from shardwise.cost.storage import views
from shardwise.dims.analysis import Analysis
from shardwise.errors import DecisionError
from shardwise.ir.program import Unit, Value
from shardwise.ir.rule import Kind
from shardwise.tactics.tactic import Context, PathDim, shard_groups


@dataclass(frozen=True, slots=True)
class Shard:
    """One dimension of an argument or output, with everything of its color (and of its group), on a mesh axis.

    ``side`` resolves conflicts of that color: 0 or 1.
    """

    path: str
    dim: int
    axis: str
    side: int = 0

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        color = context.color((self.path, self.dim), f"Shard({self.path!r}, {self.dim}, {self.axis!r})")
        return shard_groups(context, [color], self.axis, taken, self.side)


@dataclass(frozen=True, slots=True)
class DataParallel:
    """The batch on an axis. ``dim`` is the batch dimension of every batch argument."""

    axis: str
    dim: int = 0

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        return shard_groups(context, _batch_colors(context, self.dim, "DataParallel"), self.axis, taken)


@dataclass(frozen=True, slots=True)
class FSDP:
    """Data parallel, and parameters, gradients and moments sharded on the same axis (ZeRO-3).

    The parameter dimensions are the fewest colors that shard every parameter, those that cover most bytes first.
    """

    axis: str
    dim: int = 0

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        batch = _batch_colors(context, self.dim, "FSDP")
        made = shard_groups(context, batch, self.axis, taken)
        cover = _cover(context, context.role("params", "FSDP"), self.axis, set(batch))
        return made + shard_groups(context, cover, self.axis, [*taken, *made])


ZeRO3 = FSDP


@dataclass(frozen=True, slots=True)
class ZeRO2:
    """As FSDP, but parameters stay whole: gradients are reduced into shards, moments are sharded, and the updated parameters
    are gathered once. (ZeRO-1 differs only in not scattering the gradients, which costs more and saves nothing here.)"""

    axis: str
    dim: int = 0

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        made = FSDP(self.axis, self.dim).decide(context, taken)
        return [*made, KeepDecision(_with_outputs(context.analysis, context.role("params", "ZeRO2")), self.axis)]


@dataclass(frozen=True, slots=True)
class Megatron:
    """Hidden dimensions and heads on an axis.

    By structure: colors of parameters that are made by one product with a parameter and contracted by another; that the
    first product of two activations does not contract (as it does a head dimension); that are not looked into by a gather
    (as a vocabulary is); and that are not the color that most parameters share (the residual stream). Of those the ones that
    cover most bytes, as long as no two of them meet in one op.
    """

    axis: str

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        parameters = context.role("params", "Megatron")
        inner = _inner_colors(context, parameters)
        if not inner:
            raise DecisionError("Megatron: no dimension is made by one parameter's product and contracted by another's")
        meeting = _meeting(context.analysis)
        chosen: list[int] = []
        covered: set[int] = set()
        weight: Counter[int] = Counter()
        for value in parameters:
            weight.update({c: value.nbytes for _, c in context.colors_of(value) if c in inner})
        for color, _ in sorted(weight.items(), key=lambda item: (-item[1], item[0])):
            own = {v.id for v in parameters if any(c == color for _, c in context.colors_of(v))}
            if not own <= covered and not any((color, other) in meeting for other in chosen):
                chosen.append(color)
                covered |= own
        return shard_groups(context, chosen, self.axis, taken)


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """After Megatron on the same axis: the sequence, given by one of its places, wherever the axis is not taken."""

    axis: str
    sequence: PathDim

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        return shard_groups(context, [context.color(self.sequence, "SequenceParallel")], self.axis, taken)


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """The sequence on an axis; in attention the queries keep it (``side`` 0) or the keys (``side`` 1)."""

    axis: str
    sequence: PathDim
    side: int = 0

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        return shard_groups(context, [context.color(self.sequence, "ContextParallel")], self.axis, taken, self.side)


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """Experts on an axis, then the batch on the same: tokens go to their experts and back."""

    axis: str
    experts: PathDim
    dim: int = 0

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        made = shard_groups(context, [context.color(self.experts, "ExpertParallel")], self.axis, taken)
        batch = _batch_colors(context, self.dim, "ExpertParallel")
        return made + shard_groups(context, batch, self.axis, [*taken, *made])


@dataclass(frozen=True, slots=True)
class EdgeSharding:
    """The edges of a graph on an axis: only sums over nodes are reduced."""

    axis: str
    edges: PathDim

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        return shard_groups(context, [context.color(self.edges, "EdgeSharding")], self.axis, taken)


@dataclass(frozen=True, slots=True)
class Keep:
    """Arguments under a path, and the outputs that replace them, stay whole on an axis at rest."""

    path: str
    axis: str

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        context.mesh.index(self.axis)
        values = context.arguments([self.path], f"Keep({self.path!r}, {self.axis!r})")
        return [KeepDecision(_with_outputs(context.analysis, values), self.axis)]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Arguments under a path stay whole on every axis at rest."""

    path: str

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        return [d for axis in context.mesh.names for d in Keep(self.path, axis).decide(context, taken)]


def _batch_colors(context: Context, dim: int, tactic: str) -> list[int]:
    colors = []
    for value in context.role("batch", tactic):
        found = context.analysis.color_of(value.path, dim) if dim < len(value.shape) else None
        if found is not None:
            colors.append(found.id)
    if not colors:
        raise DecisionError(f"{tactic}: no batch argument has a dimension {dim} larger than one")
    return list(dict.fromkeys(colors))


def _cover(context: Context, parameters: Sequence[Value], axis: str, without: set[int]) -> list[int]:
    """The fewest colors that shard all parameters that can be, greedily by bytes covered."""
    size = context.mesh.sizes[context.mesh.index(axis)]
    colors = context.analysis.colors
    able: dict[int, set[int]] = {}
    for k, value in enumerate(parameters):
        for d, c in context.colors_of(value):
            if c not in without and colors[c].matters and value.shape[d] % size == 0:
                able.setdefault(c, set()).add(k)
    chosen: list[int] = []
    left = set(range(len(parameters)))
    while True:
        gains = [(sum(parameters[k].nbytes for k in covers & left), -c) for c, covers in able.items()]
        best = max(gains, default=(0, 0))
        if best[0] <= 0:
            return chosen
        chosen.append(-best[1])
        left -= able[-best[1]]


def _inner_colors(context: Context, parameters: Sequence[Value]) -> set[int]:
    analysis = context.analysis
    program, names = analysis.program, analysis.names
    mine = {v.id for v in parameters}
    weights = views(program, mine)
    made: set[int] = set()
    contracted: set[int] = set()
    ruled_out: set[int] = set()
    seen: set[int] = set()
    for op in program.schedule:
        if op.rule is None:
            continue
        start = int(names.first_node[op.id])
        color = [int(names.color[start + f]) for f in range(len(op.rule.factors))]
        kinds = [f.kind for f in op.rule.factors]
        ruled_out |= {c for c, k in zip(color, kinds, strict=True) if k is Kind.INDEXED}
        if op.unit is not Unit.MATRIX:
            continue
        with_weight = [t for t, v in enumerate(op.operands) if v in weights]
        summed = {c for c, k in zip(color, kinds, strict=True) if k is Kind.REDUCTION}
        if not with_weight:
            ruled_out |= summed - seen
            seen |= set(color)
            continue
        held = {color[f] for t in with_weight for dim in op.rule.operands[t] for f in dim}
        contracted |= held & summed
        made |= held - summed
    loops = {c.id for c in analysis.colors if c.loop}
    shared = Counter(c for v in parameters for _, c in context.colors_of(v) if c not in loops)
    stream = {c for c, n in shared.items() if n == max(shared.values())}
    return (made & contracted) - ruled_out - stream - loops


def _meeting(analysis: Analysis) -> set[tuple[int, int]]:
    """Pairs of colors that one axis cannot shard at once in some op."""
    t, color = analysis.conflict_table, analysis.names.color
    pairs = set(zip(color[t.rival_p].tolist(), color[t.rival_q].tolist(), strict=True))
    return pairs | {(b, a) for a, b in pairs}


def _with_outputs(analysis: Analysis, values: Sequence[Value]) -> tuple[int, ...]:
    """Arguments, and the outputs that replace them: the first subtree of the outputs with the same structure and shapes."""
    program = analysis.program
    outputs = {program.values[v].path: program.values[v] for v in program.outputs}
    prefix = os.path.commonpath([v.path for v in values])
    tails = {v.path.removeprefix(prefix).lstrip("/"): v for v in values}
    first = next(iter(tails))
    for path in outputs:
        if not path.endswith(first):
            continue
        root = path.removesuffix(first).rstrip("/")
        twins = {v.id: outputs.get(f"{root}/{tail}" if tail else root) for tail, v in tails.items()}
        if all(t is not None and t.shape == program.values[v].shape for v, t in twins.items()):
            return (*(v.id for v in values), *(t.id for t in twins.values() if t is not None))
    return tuple(v.id for v in values)
