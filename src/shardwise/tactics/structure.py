"""Structural questions of strategies: the batch, colors that shard all parameters, colors that products make and contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from shardwise.dims.analysis import Analysis
from shardwise.errors import DecisionError
from shardwise.ir.program import HEAVY, Program, Value
from shardwise.ir.rule import Kind
from shardwise.ir.traits import VIEWS
from shardwise.lowering.decisions import Decision, Keep
from shardwise.lowering.sharding import Kind as Move
from shardwise.lowering.small import SHARE
from shardwise.lowering.storage import views
from shardwise.tactics.drawn import summed_rows
from shardwise.tactics.tactic import Context

#: Ops that take a part of their first operand, or give it another form: of a parameter, at a place that does not depend on the
#: batch, this is a parameter too.
_TAKEN: Final = VIEWS | {"concatenate", "dynamic_slice", "gather", "slice"}


def batch_colors(context: Context, dim: int | None, tactic: str, or_sequence: bool = True) -> list[int]:
    """Returns the colors of a dimension of the batch, without ``dim`` of the first that no loop runs over, and those of rows
    that the program makes of it (``tactics.drawn``). Of a batch of one example it is its sequence (``or_sequence``)."""
    analysis = context.analysis
    numbers: dict[int, None] = {}
    for value in context.role("batch", tactic):
        colors = analysis.value_colors[value.id]
        found = analysis.leading_colors[value.id] if dim is None else colors[dim] if dim < len(colors) else -1
        if found >= 0:
            numbers[found] = None
    if not numbers and dim is None and (sequences := _sequences_of_one(context, tactic)):
        if not or_sequence:
            raise DecisionError(
                f"{tactic}: the batch has one example; 'context' shards its sequence, and 'fsdp' does, too"
            )
        numbers = dict.fromkeys(sequences)
    if not numbers:
        which = "first dimension" if dim is None else f"dimension {dim}"
        raise DecisionError(f"{tactic}: no batch argument has a {which} larger than one")
    return [*numbers, *context.once(("rows", *numbers), lambda: summed_rows(analysis, numbers))]


def _sequences_of_one(context: Context, tactic: str) -> list[int]:
    """Returns the colors of the first sequence of each batch argument with one example."""
    colors = (context.analysis.color_of(*place) for place in context.places.sequences)
    groups = {color.group for color in colors if color is not None}
    able = [[c for _, c in context.colors_of(v)] for v in context.role("batch", tactic) if v.shape[:1] == (1,)]
    return [c for cs in able for c in [c for c in cs if context.analysis.colors[c].group in groups][:1]]


def covering_colors(context: Context, parameters: Sequence[Value], axis: str, without: set[int]) -> list[int]:
    """Returns the fewest colors that shard all parameters that can be, greedily by bytes covered. A color that would cover only
    a small share of the bytes (biases, which a plan keeps replicated) is left for other axes."""
    size = context.mesh.sizes[context.mesh.index(axis)]
    colors = context.analysis.colors
    able: dict[int, set[int]] = {}
    for k, value in enumerate(parameters):
        for d, c in context.colors_of(value):
            if c not in without and colors[c].matters and value.shape[d] % size == 0:
                able.setdefault(c, set()).add(k)
    chosen: list[int] = []
    left = set(range(len(parameters)))
    least = SHARE * sum(value.nbytes for value in parameters)
    while True:
        gains = [(sum(parameters[k].nbytes for k in covers & left), -c) for c, covers in able.items()]
        nbytes, best = max(gains, default=(0, 0))
        if nbytes <= least:
            return chosen
        chosen.append(-best)
        left -= able[-best]


def inner_colors(context: Context, parameters: Sequence[Value]) -> set[int]:
    """Returns the colors that a product with a parameter makes and another one contracts. Not among them are colors that a
    gather looks into, that a product of two activations contracts alone (the width of heads), or of residual streams, to
    which a product that is computed from them is added, as it is or normalized."""
    return context.once(("inner", *(v.id for v in parameters)), lambda: _inner_colors(context, parameters))


def _inner_colors(context: Context, parameters: Sequence[Value]) -> set[int]:
    analysis = context.analysis
    program = analysis.program
    weights, constant = _weights(context, parameters)
    kept: set[int] = set()  # colors of parameters that their products keep
    contracted: set[int] = set()
    of_weights = {c for v in parameters for _, c in context.colors_of(v)}
    left_out: set[int] = set()
    products: dict[int, int] = {}  # by result of a product with a parameter, also after a bias or a norm: the product
    position = {op.id: k for k, op in enumerate(program.schedule)}
    colors, first = analysis.names.color.tolist(), analysis.names.first_node.tolist()
    for op in program.schedule:
        if op.rule is None:
            continue
        color = colors[first[op.id] : first[op.id + 1]]
        kinds = dict(zip(color, [f.kind for f in op.rule.factors], strict=True))
        left_out |= {c for c, kind in kinds.items() if kind is Kind.INDEXED}
        with_weight = [t for t, v in enumerate(op.operands) if v in weights] if op.unit in HEAVY else []
        for c in {color[f] for t in with_weight for dim in op.rule.operands[t] for f in dim}:
            (contracted if kinds[c] is Kind.REDUCTION else kept).add(c)
        others = {v for v in op.operands if v >= 0 and v not in constant}
        summands = [v for v in others if v in products]
        if op.unit in HEAVY and not with_weight:
            sums = {c for c, kind in kinds.items() if kind is Kind.REDUCTION}
            left_out |= sums if sums <= of_weights else set()
        if op.kind in ("add", "add_any") and len(others) == 2 and summands:
            pairs = [(v, other) for v in summands for other in others - {v} if products.get(other) != products[v]]
            if any(_is_computed_from(program, position, *pair) for pair in pairs):
                left_out |= {color[f] for dim in op.rule.results[0] for f in dim}
        of_products = {products.get(v) for v in others}
        if with_weight:
            products.update((v, op.id) for v in op.results)
        elif op.unit not in HEAVY and len(of_products) == 1 and (product := of_products.pop()) is not None:
            products.update((v, product) for v in op.results)
    return {c for c in (kept & contracted) - left_out if analysis.colors[c].matters}


def weights_of(context: Context, parameters: Sequence[Value]) -> set[int]:
    """Returns parameters, and what is taken from them alone: parts, and other forms."""
    return _weights(context, parameters)[0]


def _weights(context: Context, parameters: Sequence[Value]) -> tuple[set[int], set[int]]:
    """Returns what is taken from parameters alone, and with it all constants and what is computed from both alone."""

    def weights() -> tuple[set[int], set[int]]:
        program = context.analysis.program
        taken = views(program, (v.id for v in parameters))
        constant = set(taken)
        for op in program.schedule:
            inputs = [v for v in op.operands if v >= 0]
            if op.rule is None or op.kind in ("argument", "output") or not constant.issuperset(inputs):
                continue
            if op.kind in _TAKEN and op.operands[0] in taken:
                taken.update(op.results)
            if op.unit not in HEAVY or taken.isdisjoint(inputs):
                constant.update(op.results)
        return taken, constant

    return context.once(("weights", *(v.id for v in parameters)), weights)


def _is_computed_from(program: Program, position: Mapping[int, int], value: int, source: int) -> bool:
    """Returns whether a value is computed from another one, by ops after the one that defines the other."""
    first = position[program.definitions[source][0]]
    seen, left = {value}, [value]
    while left:
        op = program.ops[program.definitions[left.pop()][0]]
        new = {v for v in op.operands if v >= 0 and position[op.id] > first} - seen
        if source in new:
            return True
        seen |= new
        left += new
    return False


def step_s(context: Context, decisions: Sequence[Decision]) -> float:
    """Returns the time of a step under some decisions, as the compute rule counts it: op by op, with nothing hidden."""
    lowered = context.lower(decisions)
    program, runs = lowered.program, lowered.program.runs
    ops = sum(lowered.computes[op.id].seconds * float(runs[op.region]) for op in program.ops if op.rule is not None)
    moves = (context.cost.communication_s(r.steps, False) * float(runs[r.region]) for r in lowered.reshards)
    return ops + sum(moves)


def scattered_values(context: Context, decisions: Sequence[Decision], axis: str) -> tuple[int, ...]:
    """Returns the values that are reduced into shards on an axis, and the results of ops on one such value alone; with those to
    which the reduction moves if these are kept replicated, until there are no more."""
    number, program = context.mesh.index(axis), context.analysis.program
    lowered = context.lower(decisions, ())
    structure = lowered.structure
    colors = {color for color, a in lowered.state.order if a == number}
    # Ops that could make partial sums on the axis, and those that could pass them on.
    ops = {
        op.id: None
        for op in program.ops
        if op.rule is not None
        and any(f.reducer and c in colors for f, c in zip(op.rule.factors, structure.factor_colors[op.id], strict=True))
    }
    scattered, new = dict[int, None](), [v for op in ops for v in program.ops[op].results if structure.waits[v]]
    while True:
        while new:
            users = dict.fromkeys(op for op, _ in program.uses[new.pop()] if op not in ops)
            ops |= users
            new += [v for op in users for v in program.ops[op].results if structure.waits[v]]
        lowered.lower_ops(ops)
        found: dict[int, None] = {}
        for r in lowered.reshards_of(program.ops[k] for k in sorted(ops, key=structure.position.__getitem__)):
            if any(step.purpose is Move.REDUCE_SCATTER and number in step.axes for step in r.steps):
                op = program.ops[r.op]
                alone = r.operand >= 0 and all(v in (r.value, -1) for v in op.operands)
                found.update(dict.fromkeys((r.value, *(op.results if alone else ()))))
        if scattered.keys() >= found.keys():
            return tuple(scattered)
        scattered |= found
        new = list(found)
        lowered = context.lower([*decisions, Keep(tuple(scattered), axis)], ())


def meeting_groups(analysis: Analysis) -> set[tuple[int, int]]:
    """Returns pairs of groups that one axis cannot shard at once in some op."""
    t, color = analysis.conflict_table, analysis.names.color
    group = np.array([c.group for c in analysis.colors])
    pairs = set(zip(group[color[t.rival_p]].tolist(), group[color[t.rival_q]].tolist(), strict=True))
    return pairs | {(b, a) for a, b in pairs}


def with_outputs(analysis: Analysis, values: Sequence[Value]) -> tuple[int, ...]:
    """Returns arguments, and the outputs that replace them."""
    replaced = analysis.replaced_by
    return (*(v.id for v in values), *(replaced[v.id] for v in values if v.id in replaced))
