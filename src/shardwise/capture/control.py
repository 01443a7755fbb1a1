"""Loops and branches: regions, and one link op for every value that enters or leaves them.

A carry has one sharding, so its link connects initial operand, body input, body output and result. The leading dimension of a
scanned operand is the trip count: blocked, and one factor for the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardwise.capture import jax_internals as internals
from shardwise.capture.equations import axes_by_dimension
from shardwise.ir.program import Region, Spec
from shardwise.ir.rule import TRIP, Rule
from shardwise.rules.call import OpCall, RuleBuilder, identity, opaque

if TYPE_CHECKING:
    from shardwise.capture.lower import Builder


def _trip_rule(shape: tuple[int, ...], leading_in_operand: bool, trips: int) -> Rule:
    """Returns ``(l,i,j)->(i,j); blocked l`` for a scanned operand, and the reverse for a stacked result."""
    shapes = ((trips, *shape),), (shape,)
    b = RuleBuilder(OpCall("trip", {}, *(shapes if leading_in_operand else shapes[::-1])))
    t = 0 if leading_in_operand else 1
    b.block([(t, 0)], TRIP)
    for d in range(len(shape)):
        b.add([(t, d + 1), (1 - t, d)])
    return b.build()


class _Loop:
    """A loop or branch op under construction. Its operands are those that control it: the branch index, the loop condition."""

    def __init__(self, builder: Builder, equation: Any, needs: Sequence[int] = ()):
        self.b = builder
        self.kind = equation.primitive.name
        self.results = [builder.value(var.aval) for var in equation.outvars]
        self.id = builder.op(self.kind, needs, self.results, None)
        self.links: list[int] = []
        self.regions: list[int] = []

    def link(self, part: str, operands: Sequence[int], results: Sequence[int], rule: Rule | None = None) -> None:
        shape = self.b.values[results[0]].shape
        rule = rule or identity(shape, len(results), len(operands))
        op = self.b.op(f"{self.kind}.{part}", operands, results, rule, attributes=(("owner", self.id),))
        self.links.append(op)

    def close(self, needs: Sequence[int] = ()) -> list[int]:
        """Completes the op, which is controlled by further operands, and returns its results."""
        op = self.b.ops[self.id]
        self.b.ops[self.id] = replace(
            op, operands=(*op.operands, *needs), links=tuple(self.links), regions=tuple(self.regions)
        )
        return self.results

    def region(self, jaxpr: Any, part: str, inputs: Sequence[int], trips: int = 1) -> list[int]:
        """Lowers a body with these inputs and returns its outputs."""
        b = self.b
        region = Region(len(b.regions), f"{self.kind}.{part}", b.region, self.id, tuple(inputs), (), (), trips)
        b.regions.append(region)
        self.regions.append(region.id)
        outputs = b.inline(jaxpr, inputs, b.new_scope(self.kind, part), region.id)
        b.regions[region.id] = replace(region, outputs=tuple(outputs))
        return outputs


def _inputs(b: Builder, jaxpr: Any) -> list[int]:
    return [b.value(var.aval) for var in internals.split_jaxpr(jaxpr)[0].invars]


def scan(b: Builder, equation: Any, operands: list[int]) -> list[int]:
    p = equation.params
    consts, carries = internals.scan_counts(p)
    trips = p["length"]
    loop = _Loop(b, equation)
    results, inputs = loop.results, _inputs(b, p["jaxpr"])
    outputs = loop.region(p["jaxpr"], "body", inputs, trips)
    for k, (operand, inner) in enumerate(zip(operands, inputs, strict=True)):
        if k < consts:
            loop.link("const", [operand], [inner])
        elif k < consts + carries:
            out = k - consts
            loop.link("carry", [operand, outputs[out]], [inner, results[out]])
        else:
            loop.link("input", [operand], [inner], _trip_rule(b.values[inner].shape, True, trips))
    for out in range(carries, len(results)):
        shape = b.values[results[out]].shape[1:]
        loop.link("output", [outputs[out]], [results[out]], _trip_rule(shape, False, trips))
    return loop.close()


def while_(b: Builder, equation: Any, operands: list[int]) -> list[int]:
    p = equation.params
    cond_consts, body_consts = p["cond_nconsts"], p["body_nconsts"]
    loop = _Loop(b, equation)
    cond_inputs, body_inputs = _inputs(b, p["cond_jaxpr"]), _inputs(b, p["body_jaxpr"])
    trips = _while_trips(equation)
    test = loop.region(p["cond_jaxpr"], "cond", cond_inputs, trips)
    outputs = loop.region(p["body_jaxpr"], "body", body_inputs, trips)
    for k in range(cond_consts):
        loop.link("const", [operands[k]], [cond_inputs[k]])
    for k in range(body_consts):
        loop.link("const", [operands[cond_consts + k]], [body_inputs[k]])
    for k, result in enumerate(loop.results):
        initial = operands[cond_consts + body_consts + k]
        loop.link("carry", [initial, outputs[k]], [cond_inputs[cond_consts + k], body_inputs[body_consts + k], result])
    return loop.close(needs=test)


def _while_trips(equation: Any) -> int:
    """Returns how often the body of a ``while`` runs, where its condition compares a counter that starts at a literal and grows
    by one with a literal; 1 where that is not known."""
    p = equation.params
    test, body = (internals.split_jaxpr(p[key])[0] for key in ("cond_jaxpr", "body_jaxpr"))
    consts, start = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    if len(test.eqns) != 1 or test.eqns[0].primitive.name not in ("lt", "le"):
        return 1

    def before(atom: Any) -> int | None:
        """Returns what an operand of the comparison is before the first trip."""
        if not internals.is_literal(atom):
            place = test.invars.index(atom)
            atom = equation.invars[place if place < consts else start + place - consts]
        return int(atom.val) if internals.is_literal(atom) and not internals.shape_of(atom.aval) else None

    def step(atom: Any) -> int | None:
        """Returns what a trip adds to it."""
        if internals.is_literal(atom) or test.invars.index(atom) < consts:
            return 0
        carry = test.invars.index(atom) - consts
        old, new = body.invars[p["body_nconsts"] + carry], body.outvars[carry]
        if new is old:
            return 0
        makers = (e for e in body.eqns if e.primitive.name == "add" and new in e.outvars)
        added = (x.val for e in makers for x in e.invars if old in e.invars and internals.is_literal(x))
        return next((int(n) for n in added), None)

    counter, limit = test.eqns[0].invars
    first, last = before(counter), before(limit)
    if first is None or last is None or step(counter) != 1 or step(limit) != 0:
        return 1
    return max(1, last - first + int(test.eqns[0].primitive.name == "le"))


def cond(b: Builder, equation: Any, operands: list[int]) -> list[int]:
    branches = equation.params["branches"]
    loop = _Loop(b, equation, needs=operands[:1])
    inputs = [_inputs(b, branch) for branch in branches]
    outputs = [loop.region(branch, f"branch{k}", inputs[k]) for k, branch in enumerate(branches)]
    for k, operand in enumerate(operands[1:]):
        loop.link("input", [operand], [branch[k] for branch in inputs])
    for k, result in enumerate(loop.results):
        loop.link("output", [branch[k] for branch in outputs], [result])
    return loop.close()


def shard_map(b: Builder, equation: Any, operands: list[int]) -> list[int]:
    """Lowers a manual region: the ops at its border have the axes of their specs, and the body is inlined on local blocks."""
    inputs, outputs = (list(map(axes_by_dimension, equation.params[key])) for key in ("in_specs", "out_specs"))
    mesh = tuple((str(name), int(size)) for name, size in dict(equation.params["mesh"].shape).items())
    variables = internals.split_jaxpr(equation.params["jaxpr"])[0].invars

    def border(part: str, value: int, result: int, spec: Spec, position: int) -> int:
        shapes = tuple(b.values[v].shape if v >= 0 else () for v in (value, result))
        rule = opaque(OpCall(f"shard_map.{part}", {}, shapes[:1], shapes[1:]), "the border of a shard_map")
        axes: list[tuple[str, ...]] = [()] * len(rule.factors)
        for dim, names in zip(rule.operands[0] if part == "input" else rule.results[0], spec, strict=False):
            if dim:
                axes[dim[0]] = names or ()
        stated = (("axes", tuple(axes)), ("spec", spec), ("mesh", mesh), ("position", position))
        b.op(f"shard_map.{part}", (value,), (result,), rule, attributes=stated)
        return result

    blocks = []
    for k, (value, var) in enumerate(zip(operands, variables, strict=True)):
        blocks.append(border("input", value, b.value(var.aval), inputs[k], k) if value >= 0 else value)
    outer, b.manual = b.manual, True
    results = b.inline(equation.params["jaxpr"], blocks, b.new_scope("shard_map", ""))
    b.manual = outer
    return [
        border("output", value, b.value(var.aval), outputs[k], k)
        for k, (value, var) in enumerate(zip(results, equation.outvars, strict=True))
    ]


LOWERINGS: Final[dict[str, Callable[[Builder, Any, list[int]], list[int]]]] = {
    "scan": scan,
    "while": while_,
    "cond": cond,
    "shard_map": shard_map,
}
