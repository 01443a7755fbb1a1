"""What the emitted program and its listing share: the shardings in which ops take and compute values."""

from __future__ import annotations

from shardwise.ir.program import Op, Program
from shardwise.lowering.reshard_times import partial_need
from shardwise.lowering.sharded_program import ShardedProgram
from shardwise.lowering.sharding import (
    ROUNDED,
    ArrayType,
    Sharding,
    is_narrowed,
    is_rounded,
    result_sharding,
    tensor_sharding,
)


class Walk:
    """A walk over a sharded program; ``rounds``: products read their operands rounded where the plan says so."""

    def __init__(self, program: Program, sharded: ShardedProgram, rounds: bool):
        self.program, self.sharded, self.mesh = program, sharded, sharded.mesh
        self._types = [sharded.array_type(program, v.id) for v in program.values]
        self._rounding = program.rounding if rounds and sharded.rounds else frozenset[int]()

    def _need(self, op: Op, operand: int, source: Sharding) -> Sharding:
        """The sharding in which an op uses an operand that comes in another."""
        assert op.rule is not None
        need = tensor_sharding(op.rule.operand_majors[operand], self.sharded.factors[op.id])
        return partial_need(need, source, self.sharded.passed[op.id])

    def _computed(self, op: Op, result: int) -> Sharding:
        """The sharding in which an op computes a result, before any reshard."""
        assert op.rule is not None
        return result_sharding(op.rule, result, self.sharded.factors[op.id], self.sharded.passed[op.id])

    def _is_rounded(self, op: Op, value: int, source: Sharding) -> bool:
        """Does an operand of an op move rounded, unlike for other ops?"""
        return op.id in self._rounding and is_rounded(self._types[value], source)

    def _array(self, value: int, rounded: bool) -> ArrayType:
        return self._types[value].rounded if rounded else self._types[value]

    def _moved_dtype(self, value: int, source: Sharding, rounded: bool) -> str:
        """The shorter type in which a value moves, which holds what is used of it; empty where there is none."""
        if not is_narrowed(self._array(value, rounded), source):
            return ""
        return ROUNDED if rounded else self.program.values[self.program.moved_as[value]].dtype

    def _counted_once(self, op: Op, source: Sharding) -> tuple[int, ...]:
        """The axes on which an operand counts on the first device only: those on which a sum is partial, and it is not."""
        passed = self.sharded.passed[op.id] if op.kind in ("add", "add_any", "sub") else ()
        return tuple(a for a in passed if a not in source.partial)
