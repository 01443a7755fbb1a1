"""What strategies ask of a program's structure: its batch, what shards all parameters, what products make and contract."""

from __future__ import annotations

import os.path
from collections.abc import Sequence

from shardwise.dims.analysis import Analysis
from shardwise.errors import DecisionError
from shardwise.ir.program import HEAVY, Op, Program, Value
from shardwise.ir.rule import Kind
from shardwise.lowering.decisions import Decision
from shardwise.lowering.sharding import Kind as Move
from shardwise.lowering.storage import views
from shardwise.tactics.tactic import Context


def batch_colors(context: Context, dim: int, tactic: str) -> list[int]:
    colors = []
    for value in context.role("batch", tactic):
        found = context.analysis.color_of(value.path, dim) if dim < len(value.shape) else None
        if found is not None:
            colors.append(found.id)
    if not colors:
        raise DecisionError(f"{tactic}: no batch argument has a dimension {dim} larger than one")
    return list(dict.fromkeys(colors))


def covering_colors(context: Context, parameters: Sequence[Value], axis: str, without: set[int]) -> list[int]:
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


def inner_colors(context: Context, parameters: Sequence[Value]) -> set[int]:
    """Colors that a product with a parameter makes and another one contracts, that no gather looks into, and into which no
    product is added as into a residual stream."""
    analysis = context.analysis
    program, names = analysis.program, analysis.names
    weights = views(program, (v.id for v in parameters))
    made: set[int] = set()
    contracted: set[int] = set()
    looked_up: set[int] = set()
    products: set[int] = set()  # results of products with parameters, also after a bias, a cast, a scale
    roots: dict[int, frozenset[int]] = {}  # by value: the products it was made from, position by position
    given = set(weights)  # parameters, constants, and what is made of them alone
    streams: set[int] = set()
    for op in program.schedule:
        if op.rule is None:
            continue
        color = names.color[names.first_node[op.id] : names.first_node[op.id + 1]].tolist()
        kinds = dict(zip(color, (f.kind for f in op.rule.factors), strict=True))
        looked_up |= {c for c, kind in kinds.items() if kind is Kind.INDEXED}
        with_weight = [t for t, v in enumerate(op.operands) if v in weights] if op.unit in HEAVY else []
        held = {color[f] for t in with_weight for dim in op.rule.operands[t] for f in dim}
        contracted |= {c for c in held if kinds[c] is Kind.REDUCTION}
        made |= {c for c in held if kinds[c] is not Kind.REDUCTION}
        inputs = [v for v in op.operands if v >= 0]
        others = [v for v in inputs if v not in given]
        summands = [v for v in others if v in products]
        if op.kind in ("add", "add_any") and len(others) == 2 and len(summands) == 1:
            (other,) = set(others) - set(summands)
            apart = not roots.get(other, frozenset()) & roots.get(summands[0], frozenset())
            if apart and _maker(program, other).kind != "broadcast_in_dim":
                streams |= {color[f] for dim in op.rule.results[0] for f in dim}
        came = frozenset({op.id}) if with_weight else frozenset().union(*(roots.get(v, frozenset()) for v in inputs))
        if with_weight or op.unit not in HEAVY:
            roots.update((v, came) for v in op.results)
        if with_weight or (len(others) == 1 and summands and op.unit not in HEAVY):
            products.update(op.results)
        elif not others and op.kind not in ("argument", "output"):
            given.update(op.results)
    return {c for c in (made & contracted) - looked_up - streams if analysis.colors[c].matters}


def _maker(program: Program, value: int) -> Op:
    return program.ops[program.definitions[value][0]]


def communication_s(context: Context, decisions: Sequence[Decision]) -> float:
    """What a list of decisions moves in a step, in seconds."""
    lowered = context.lower(decisions)
    return sum(
        context.cost.communication_s(r.steps, False) * float(lowered.program.trips[r.region]) for r in lowered.reshards
    )


def scattered_values(context: Context, decisions: Sequence[Decision], axis: str) -> list[int]:
    """Values that are reduced into shards on an axis, and what an op makes of one such value alone."""
    lowered = context.lower(decisions)
    number, program = context.mesh.index(axis), context.analysis.program
    found: dict[int, None] = {}
    for r in lowered.reshards:
        if any(step.purpose is Move.REDUCE_SCATTER and number in step.axes for step in r.steps):
            op = program.ops[r.op]
            alone = r.operand >= 0 and all(v in (r.value, -1) for v in op.operands)
            found.update(dict.fromkeys((r.value, *(op.results if alone else ()))))
    return list(found)


def meeting_colors(analysis: Analysis) -> set[tuple[int, int]]:
    """Pairs of colors that one axis cannot shard at once in some op."""
    t, color = analysis.conflict_table, analysis.names.color
    pairs = set(zip(color[t.rival_p].tolist(), color[t.rival_q].tolist(), strict=True))
    return pairs | {(b, a) for a, b in pairs}


def with_outputs(analysis: Analysis, values: Sequence[Value]) -> tuple[int, ...]:
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
