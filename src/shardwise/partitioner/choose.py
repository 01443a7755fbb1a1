"""Which constraints a plan needs: only where Shardy's own propagation would end elsewhere.

Shardy is asked how it shards every value given the inputs' and outputs' shardings. The largest value that differs from the
plan (size times how often it is made; the first one of equals) is constrained, and Shardy is asked again, until nothing
differs. Fewer constraints are faster programs: each leaves the partitioner less room. After the first few rounds the number
that is added doubles, so that a plan that fights the propagation everywhere is settled in a dozen rounds. Where the values that
differ lie in many parts of the program, with values between them that do not, as in unrolled layers, each part has a
constraint in every round: one hardly settles another. Values that stay partial have no sharding of their own and are left
alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from shardwise.capture.jax_internals import AGAIN
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.sharding import Sharding, result_sharding
from shardwise.partitioner.faults import CONVOLUTION, PAD, failing_pads
from shardwise.partitioner.shardy import Constraints, Dims, Propagation
from shardwise.partitioner.stated import Place, stated_computations
from shardwise.plans.plan import StatedConstraint

#: Rounds that add a single constraint, and rounds at most.
SINGLE: Final = 6
ROUNDS: Final = 20
#: Parts of a program that are settled together. Scanned layers make a few; unrolled ones some each.
MANY: Final = 16


@dataclass(frozen=True)
class Chosen:
    """``rounds`` is how often Shardy was asked; ``open`` the values that differ in spite of a constraint."""

    constraints: Constraints
    rounds: int
    open: tuple[int, ...]


def choose_constraints(lowered: Lowered, jaxpr: Any) -> Chosen:
    """The constraints under which Shardy arrives at the plan's shardings."""
    program, mesh = lowered.program, lowered.state.mesh
    inputs = [lowered.storage[a.value] for a in program.arguments]
    outputs = [lowered.storage[v] for v in program.outputs]
    ends = {*(a.value for a in program.arguments), *program.outputs}
    stated = {Place("stored", v): lowered.actual[v] for v in lowered.state.pinned if v not in ends}
    stated |= stated_computations(lowered)
    # A result that is stated as computed is stated as stored, too; Shardy is not asked about it.
    twice = {program.ops[p.number].results[p.index] for p in stated if p.place == "computed"}
    stated |= {Place("stored", v): lowered.actual[v] for v in twice}
    others = {p for p in stated if p.place != "stored"}
    others |= {Place("computed", op.id) for op in program.ops if op.kind == PAD}
    propagation = Propagation(program, jaxpr, mesh, inputs, outputs, others)
    for rounds in range(1, ROUNDS + 1):
        found = propagation.shardings(stated)
        wrong = [v for v in _differing(lowered, found) if v not in twice]
        left = [v for v in wrong if Place("stored", v) not in stated]
        if not left or rounds == ROUNDS:
            padded = _stated_pads(lowered, found, stated)
            if not padded:
                return Chosen(stated, rounds, tuple(wrong))
            for place, sharding in padded.items():
                value = program.ops[place.number].results[0]
                stated |= {place: sharding, Place("stored", value): lowered.actual[value]}
                twice.add(value)
            continue
        left.sort(key=lambda v: (-_weight(lowered, v), v))
        at_once = 2 ** max(0, rounds - SINGLE)
        stated.update((Place("stored", v), lowered.actual[v]) for v in _first(lowered, found, left, at_once))
    return Chosen(stated, ROUNDS, tuple(wrong))


def _stated_pads(lowered: Lowered, found: dict[int, Dims], stated: Constraints) -> dict[Place, Sharding]:
    """The results of pads that XLA would get wrong as Shardy shards them, as the plan computes them."""
    added: dict[Place, Sharding] = {}
    for op in lowered.program.ops:
        if op.kind != PAD:
            continue
        assert op.rule is not None
        operand, result, place = op.operands[0], op.results[0], Place("computed", op.id)
        known = stated.get(Place("stored", operand))
        source = known.dims if known else found.get(operand, lowered.actual[operand].dims)
        if not failing_pads(op, source, found.get(result, lowered.actual[result].dims)):
            continue
        made = result_sharding(op.rule, 0, lowered.factors[op.id], ()).dims
        failing = failing_pads(op, source, made)
        whole = Sharding(tuple(() if d in failing else axes for d, axes in enumerate(made)))
        if stated.get(place) != whole:
            added[place] = whole
    return added


def _first(lowered: Lowered, found: dict[int, Dims], left: list[int], count: int) -> list[int]:
    """The first so many of the values. Where they lie in many parts of the program: the first of each part, and more of all to
    make up the number."""
    part = _parts(lowered, found)
    first_of = {part[v]: v for v in reversed(left)}
    if len(first_of) <= MANY:
        return left[:count]
    firsts = [v for v in left if first_of[part[v]] == v]
    rest = [v for v in left if first_of[part[v]] != v]
    return firsts + rest[: max(0, count - len(firsts))]


def _parts(lowered: Lowered, found: dict[int, Dims]) -> list[int]:
    """For every value the part of the program that it lies in. An op joins those of its values that differ from the plan, or
    that Shardy says nothing of; what agrees already has little to pass on."""
    program, actual = lowered.program, lowered.actual
    ends = {*(a.value for a in program.arguments), *program.outputs}
    joins = [
        bool(value.shape) and v not in ends and found.get(v) != actual[v].dims for v, value in enumerate(program.values)
    ]
    part = list(range(len(program.values)))

    def root(v: int) -> int:
        while part[v] != v:
            part[v] = v = part[part[v]]
        return v

    for op in program.ops:
        near = [v for v in (*op.operands, *op.results) if v >= 0 and joins[v]]
        for v in near[1:]:
            part[root(v)] = root(near[0])
    return [root(v) for v in part]


def _weight(lowered: Lowered, value: int) -> float:
    program = lowered.program
    op = program.ops[program.definitions[value][0]]
    return program.values[value].nbytes * float(program.trips[op.region])


def _differing(lowered: Lowered, found: dict[int, Dims]) -> list[int]:
    """Values of inner ops that Shardy shards otherwise than the plan.

    A dimension that does not divide is whole in a plan; Shardy may cut it unevenly, with padding. That is left to it: a
    constraint there makes XLA undo the padding, which costs, and which it has been seen to do wrongly (concatenations). A
    scatter and a convolution are the exceptions: XLA aborts, or computes wrongly, where they are cut unevenly, so their
    operands and results are stated.
    """
    actual, sizes = lowered.actual, lowered.state.mesh.sizes
    values = lowered.program.values

    strict = [op for op in lowered.program.ops if op.kind.startswith("scatter") or op.kind == CONVOLUTION]
    stated = {v for op in strict for v in (*op.operands, *op.results)}

    def uneven(value: int, dims: Dims) -> bool:
        if value in stated:
            return False
        pieces = [math.prod(sizes[a] for a in axes) for axes in dims]
        return any(size % n for size, n in zip(values[value].shape, pieces, strict=True))

    differing = [v for v, dims in sorted(found.items()) if not actual[v].partial and dims != actual[v].dims]
    return [v for v in differing if not uneven(v, found[v])]


def stated_constraints(lowered: Lowered, jaxpr: Any) -> tuple[StatedConstraint, ...]:
    """The constraints that a lowered state needs under XLA's partitioner, each with the line it belongs to."""
    program, mesh = lowered.program, lowered.mesh
    found = []
    for place, sharding in sorted(choose_constraints(lowered, jaxpr).constraints.items()):
        stored = place.place == "stored"
        op = program.ops[program.definitions[place.number][0] if stored else place.number]
        value = place.number if stored else (op.operands if place.place == "used" else op.results)[place.index]
        source = program.source_of(op)
        backward = " (backward)" if "transpose(" in source.names or AGAIN in source.names else ""
        where = f"{source}{backward}", program.values[value].shape
        spec = tuple(tuple(mesh.names[a] for a in axes) for axes in sharding.dims)
        found.append(StatedConstraint(place.place, place.number, place.index, op.kind, *where, spec))
    return tuple(found)
