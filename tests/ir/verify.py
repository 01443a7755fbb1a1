"""A type checker for programs: what every stage may rely on."""

from __future__ import annotations

from shardwise.ir.program import Program
from shardwise.ir.rule import check_rule


def check_program(program: Program) -> None:
    """Raises AssertionError unless the program is well formed.

    Every value is defined once, every operand is defined, rules fit their shapes, links belong to their loops, region
    borders are crossed by links only.
    """
    defined: dict[int, int] = {}
    for op in (op for op in program.ops if op.rule is not None):
        for v in op.results:
            assert v not in defined, f"%{v} is defined twice, by {program.ops[defined[v]].kind} and {op.kind}"
            defined[v] = op.id
    assert set(defined) == {v.id for v in program.values}, "a value without a definition"
    inner = {v: r.id for r in program.regions for v in r.inputs if v >= 0}
    links = {k: op.id for op in program.ops for k in op.links}
    for op in program.ops:
        assert program.ops[op.id] is op
        assert op.id in program.regions[op.region].ops, f"{op.kind} is missing from its region"
        if op.rule is not None:
            shapes = [program.values[v].shape if v >= 0 else () for v in op.operands]
            check_rule(op.rule, shapes, [program.values[v].shape for v in op.results])
        for v in op.operands:
            if v < 0 or op.id in links or op.rule is None:
                continue
            home = inner.get(v, program.ops[defined[v]].region)
            assert _encloses(program, home, op.region), f"{op.kind} reads %{v} from inside another region"


def _encloses(program: Program, outer: int, region: int) -> bool:
    while region >= 0:
        if region == outer:
            return True
        region = program.regions[region].parent
    return False
