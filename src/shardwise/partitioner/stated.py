"""What a plan must state of how an op computes, because XLA's partitioner would do otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.ir.program import Op, Unit
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.sharding import Sharding, is_moved, reshard, result_sharding, tensor_sharding
from shardwise.partitioner.faults import CONVOLUTION, scattered_product


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a sharding is stated inside the program: of value ``number`` as it is ``stored``; of operand ``index`` where op
    ``number`` has it ``used``; of its result ``index`` as it is ``computed``."""

    place: str
    number: int
    index: int = 0


def stated_computations(lowered: Lowered) -> dict[Place, Sharding]:
    """Operands and results that must be stated as the op computes on them.

    Where the operands as stored agree on an axis (it lies on one factor, which can be split) the partitioner computes on them
    as they are; where they disagree it has to reshard anyway, and does what the result's sharding asks for, or moves shards to
    an axis that is idle. If the plan computes otherwise it must say so. The partitioner is not left to itself where it has
    faults (faults.py).
    """
    found: dict[Place, Sharding] = {}
    for op in lowered.program.ops:
        busy = any(lowered.factors[op.id]) or any(lowered.actual[v].axes() for v in op.operands if v >= 0)
        if busy and (op.unit is Unit.MATRIX or op.kind.startswith(("gather", "scatter"))):
            found |= _stated(lowered, op)
        if op.unit is Unit.MATRIX:
            found |= _reduced_by_use(lowered, op)
    return found


def _reduced_by_use(lowered: Lowered, product: Op) -> dict[Place, Sharding]:
    """A product's partial result that its use reduces whole, where it would be stored scattered: the use's operand is stated.

    Else the partitioner scatters at once, and where the product has more axes to sum over, it gets that wrong (faults.py).
    """
    (value,) = product.results
    if not lowered.actual[value].partial:
        return {}
    found: dict[Place, Sharding] = {}
    for user, k in lowered.structure.uses[value]:
        use = lowered.program.ops[user]
        need = lowered.need(use, k) if use.rule is not None else lowered.storage[value]
        if not need.partial and need.dims != lowered.storage[value].dims:
            found[Place("used", user, k)] = need
    return found


def _stated(lowered: Lowered, op: Op) -> dict[Place, Sharding]:
    rule, assigned = op.rule, lowered.factors[op.id]
    assert rule is not None
    found: dict[Place, Sharding] = {}
    made, stored = result_sharding(rule, 0, assigned, ()), lowered.storage[op.results[0]]
    moved = op.unit is Unit.MATRIX and not made.partial and is_moved(made, stored, lowered.state.mesh)
    agreed, idle = _agreed_axes(lowered, op), _is_any_idle(lowered, op)
    needs = {k: tensor_sharding(rule.operand_majors[k], assigned) for k, v in enumerate(op.operands) if v >= 0}
    needs = {k: need for k, need in needs.items() if not lowered.actual[op.operands[k]].partial}
    changed = {k: _changed_axes(lowered, op.operands[k], need) for k, need in needs.items()}
    for k, need in needs.items():
        if changed[k] & agreed or (changed[k] and (moved or idle)) or op.kind == CONVOLUTION:
            found[Place("used", op.id, k)] = need
    if found and op.unit is not Unit.MATRIX:  # a gather or a scatter
        found = {Place("used", op.id, k): need for k, need in needs.items() if changed[k]}
    if (found and moved) or (op.kind == CONVOLUTION and made.dims != stored.dims):
        found[Place("computed", op.id)] = Sharding(made.dims)
    if op.unit is Unit.MATRIX:
        found |= {Place("used", op.id, k): need for k, need in scattered_product(lowered, op).items()}
    return found


def _changed_axes(lowered: Lowered, value: int, need: Sharding) -> set[int]:
    steps = reshard(lowered.structure.arrays[value], lowered.actual[value], need, lowered.state.mesh)
    return {a for step in steps for a in step.axes}


def _is_any_idle(lowered: Lowered, op: Op) -> bool:
    """Is there an axis that an op neither computes on nor has in its operands or its result?"""
    used = {a for axes in lowered.factors[op.id] for a in axes} | lowered.storage[op.results[0]].axes()
    used = used.union(*(lowered.actual[v].axes() for v in op.operands if v >= 0))
    return any(size > 1 and a not in used for a, size in enumerate(lowered.state.mesh.sizes))


def _agreed_axes(lowered: Lowered, op: Op) -> set[int]:
    """Axes that an op's operands, as stored, put on one factor, which can be split, or do not use at all."""
    assert op.rule is not None
    on: dict[int, set[int]] = {a: set() for a in range(len(lowered.state.mesh.sizes))}
    for k, v in enumerate(op.operands):
        for d, axes in enumerate(lowered.actual[v].dims if v >= 0 else ()):
            for axis in axes:
                on[axis].add(op.rule.operand_majors[k][d])
    return {a for a, factors in on.items() if len(factors) < 2 and all(op.rule.splittable[f] for f in factors)}
