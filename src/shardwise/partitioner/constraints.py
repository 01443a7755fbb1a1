"""The constraints that a plan needs under XLA's partitioner: only where Shardy's propagation differs from the plan.

Shardy propagates the shardings of inputs and outputs. The largest value that differs from the plan (size times number of runs;
the first of equals) is constrained, and Shardy propagates again, until nothing differs. Fewer constraints are faster programs:
each leaves the partitioner less room. After the first few rounds the number of new constraints doubles, so that a plan that
differs everywhere takes a dozen rounds. Partial sums are not constrained. What the plan pads is stated replicated, since a
stated sharding must divide its array.
"""

from __future__ import annotations

from typing import Any, Final

from shardwise.ir.program import Op, Program, Unit
from shardwise.ir.traits import REMATERIALIZED
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.sharding import Sharding, is_moved, reshard, result_sharding, tensor_sharding
from shardwise.partitioner.propagation import Constraints, Dims, Propagation
from shardwise.partitioner.quirks import CONVOLUTION, PAD, UNEVEN_FAILS, failing_pads, scattered_product
from shardwise.partitioner.whole import Place
from shardwise.plans.parts import StatedConstraint

#: Rounds that add a single constraint, and the most rounds.
SINGLE_ROUNDS: Final = 6
MAX_ROUNDS: Final = 20


def choose_constraints(lowered: Lowered, jaxpr: Any) -> Constraints:
    """Returns the constraints under which Shardy propagates the plan's shardings, as far as it can be brought to."""
    program = lowered.program
    ends = {*(a.value for a in program.arguments), *program.outputs}
    stated = {Place("stored", v): lowered.actual[v] for v in lowered.state.pinned if v not in ends}
    stated |= _stated_computations(lowered)
    # A result that is stated as computed is stated as stored, too, and not compared.
    twice = {program.ops[p.number].results[p.index] for p in stated if p.place == "computed"}
    stated |= {Place("stored", v): lowered.actual[v] for v in twice}
    others = {p for p in stated if p.place != "stored"}
    others |= {Place("computed", op.id) for op in program.ops if op.kind == PAD}
    propagation = Propagation(lowered, jaxpr, others)
    for rounds in range(1, MAX_ROUNDS + 1):
        shardings = propagation.shardings(stated)
        differing = [v for v in _differing(lowered, shardings) if v not in twice and Place("stored", v) not in stated]
        if differing and rounds < MAX_ROUNDS:
            differing.sort(key=lambda v: (-_weight(lowered, v), v))
            chosen = differing[: 2 ** max(0, rounds - SINGLE_ROUNDS)]
            stated |= {Place("stored", v): lowered.actual[v] for v in chosen}
            continue
        padded = _pad_results(lowered, shardings, stated)
        if not padded:
            break
        values = [program.ops[place.number].results[0] for place in padded]
        stated |= padded | {Place("stored", v): lowered.actual[v] for v in values}
        twice.update(values)
    return {place: _even(lowered, _place_value(program, place), sharding) for place, sharding in stated.items()}


def _place_value(program: Program, place: Place) -> int:
    if place.place == "stored":
        return place.number
    op = program.ops[place.number]
    return (op.operands if place.place == "used" else op.results)[place.index]


def _even(lowered: Lowered, value: int, sharding: Sharding) -> Sharding:
    """Returns the sharding without axes that do not divide their dimension."""
    pieces, shape = lowered.mesh.pieces, lowered.program.values[value].shape
    dims = (() if size % pieces(axes) else axes for size, axes in zip(shape, sharding.dims, strict=True))
    return Sharding(tuple(dims), sharding.partial)


def _pad_results(lowered: Lowered, shardings: dict[int, Dims], stated: Constraints) -> dict[Place, Sharding]:
    """Returns the results of pads that fail as Shardy shards them, as the plan computes them."""
    added: dict[Place, Sharding] = {}
    for op in lowered.program.ops:
        if op.kind != PAD:
            continue
        operand, result, place = op.operands[0], op.results[0], Place("computed", op.id)
        constraint = stated.get(Place("stored", operand))
        source = constraint.dims if constraint else shardings.get(operand, lowered.actual[operand].dims)
        if not failing_pads(op, source, shardings.get(result, lowered.actual[result].dims)):
            continue
        computed = result_sharding(op.factor_rule, 0, lowered.computes[op.id].assigned, ()).dims
        failing = failing_pads(op, source, computed)
        sharding = Sharding(tuple(() if d in failing else axes for d, axes in enumerate(computed)))
        if stated.get(place) != sharding:
            added[place] = sharding
    return added


def _weight(lowered: Lowered, value: int) -> float:
    program = lowered.program
    op = program.ops[program.definitions[value][0]]
    return program.values[value].nbytes * float(program.trips[op.region])


def _differing(lowered: Lowered, shardings: dict[int, Dims]) -> list[int]:
    """Returns the values that Shardy shards otherwise than the plan. It may shard a dimension unevenly, except around scatters
    and convolutions."""
    program, actual = lowered.program, lowered.actual
    strict = [op for op in program.ops if op.kind.startswith(UNEVEN_FAILS)]
    never_uneven = {v for op in strict for v in (*op.operands, *op.results)}

    def is_uneven(value: int, dims: Dims) -> bool:
        pieces = map(lowered.mesh.pieces, dims)
        return any(size % n for size, n in zip(program.values[value].shape, pieces, strict=True))

    return [
        v
        for v, dims in sorted(shardings.items())
        if not actual[v].partial
        and dims != _even(lowered, v, actual[v]).dims
        and (v in never_uneven or not is_uneven(v, dims))
    ]


def stated_constraints(lowered: Lowered, jaxpr: Any) -> tuple[StatedConstraint, ...]:
    """Returns the constraints that a lowered state needs under XLA's partitioner, with their source lines."""
    program, mesh = lowered.program, lowered.mesh
    stated = []
    for place, sharding in sorted(choose_constraints(lowered, jaxpr).items()):
        op = program.ops[program.definitions[place.number][0] if place.place == "stored" else place.number]
        value = _place_value(program, place)
        source = program.source_of(op)
        backward = " (backward)" if "transpose(" in source.names or REMATERIALIZED in source.names else ""
        where = f"{source}{backward}", program.values[value].shape
        spec = sharding.spec(mesh)
        stated.append(StatedConstraint(place.place, place.number, place.index, op.kind, *where, spec))
    return tuple(stated)


def _stated_computations(lowered: Lowered) -> dict[Place, Sharding]:
    """Returns operands and results that must be stated as the op computes on them. Where the operands as stored agree on an
    axis the partitioner computes on them as they are; where they disagree it follows the result's sharding or moves shards to
    an idle axis. If the plan computes otherwise, or runs into a quirk (``quirks.py``), that is stated."""
    stated: dict[Place, Sharding] = {}
    for op in lowered.program.ops:
        busy = any(lowered.computes[op.id].assigned) or any(lowered.actual[v].axes() for v in op.operands if v >= 0)
        if busy and (op.unit is Unit.MATRIX or op.kind.startswith(("gather", "scatter"))):
            stated |= _stated(lowered, op)
        if op.unit is Unit.MATRIX:
            stated |= _reduced_by_consumer(lowered, op)
    return stated


def _reduced_by_consumer(lowered: Lowered, product: Op) -> dict[Place, Sharding]:
    """Returns the operands that read a product's partial sum reduced and not scattered, though it is stored scattered."""
    (value,) = product.results
    if not lowered.actual[value].partial:
        return {}
    stated: dict[Place, Sharding] = {}
    for number, k in lowered.structure.uses[value]:
        consumer = lowered.program.ops[number]
        need = lowered.need(consumer, k) if consumer.rule is not None else lowered.storage[value]
        if not need.partial and need.dims != lowered.storage[value].dims:
            stated[Place("used", number, k)] = need
    return stated


def _stated(lowered: Lowered, op: Op) -> dict[Place, Sharding]:
    rule, assigned = op.factor_rule, lowered.computes[op.id].assigned
    stated: dict[Place, Sharding] = {}
    computed, stored = result_sharding(rule, 0, assigned, ()), lowered.storage[op.results[0]]
    moved = op.unit is Unit.MATRIX and not computed.partial and is_moved(computed, stored, lowered.state.mesh)
    agreed, idle = _agreed_axes(lowered, op), _is_any_idle(lowered, op)
    needs = {k: tensor_sharding(rule.operand_majors[k], assigned) for k, v in enumerate(op.operands) if v >= 0}
    needs = {k: need for k, need in needs.items() if not lowered.actual[op.operands[k]].partial}
    changed = {k: _changed_axes(lowered, op.operands[k], need) for k, need in needs.items()}
    for k, need in needs.items():
        if changed[k] & agreed or (changed[k] and (moved or idle)) or op.kind == CONVOLUTION:
            stated[Place("used", op.id, k)] = need
    if stated and op.unit is not Unit.MATRIX:  # a gather or a scatter
        stated = {Place("used", op.id, k): need for k, need in needs.items() if changed[k]}
    if (stated and moved) or (op.kind == CONVOLUTION and computed.dims != stored.dims):
        stated[Place("computed", op.id)] = Sharding(computed.dims)
    if op.unit is Unit.MATRIX:
        stated |= {Place("used", op.id, k): need for k, need in scattered_product(lowered, op).items()}
    return stated


def _changed_axes(lowered: Lowered, value: int, need: Sharding) -> set[int]:
    steps = reshard(lowered.structure.arrays[value], lowered.actual[value], need, lowered.state.mesh)
    return {a for step in steps for a in step.axes}


def _is_any_idle(lowered: Lowered, op: Op) -> bool:
    """Returns whether an op neither computes on some axis nor has it in its operands or its result."""
    used = {a for axes in lowered.computes[op.id].assigned for a in axes} | lowered.storage[op.results[0]].axes()
    used = used.union(*(lowered.actual[v].axes() for v in op.operands if v >= 0))
    return any(size > 1 and a not in used for a, size in enumerate(lowered.state.mesh.sizes))


def _agreed_axes(lowered: Lowered, op: Op) -> set[int]:
    """Returns the axes that shard one factor of the operands as stored, which can be split, or none."""
    rule = op.factor_rule
    on: dict[int, set[int]] = {a: set() for a in range(len(lowered.state.mesh.sizes))}
    for k, v in enumerate(op.operands):
        for d, axes in enumerate(lowered.actual[v].dims if v >= 0 else ()):
            for axis in axes:
                on[axis].add(rule.operand_majors[k][d])
    return {a for a, factors in on.items() if len(factors) < 2 and all(rule.splittable[f] for f in factors)}
