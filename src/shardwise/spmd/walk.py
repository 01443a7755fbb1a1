"""Walks over a sharded program. The emitted program does so with blocks, its listing with names.

Each operand is resharded to the sharding that its op needs, and each result to the one in which the plan stores it. Within a
section, which is a loop body or the part behind the barrier of a ``remat``, a value is resharded to a sharding once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from shardwise.ir.program import Op, Program, Region
from shardwise.ir.traits import ADDING_SCATTERS, SUMS
from shardwise.lowering.halo import Fetch, fetches
from shardwise.lowering.sharded_program import ShardedProgram
from shardwise.lowering.sharding import (
    ROUNDED,
    ArrayType,
    Sharding,
    is_narrowed,
    is_rounded,
    partial_need,
    result_sharding,
    tensor_sharding,
)
from shardwise.lowering.structure import find_sections

#: By link of a loop or branch: the value that enters or leaves a body.
Handed = Mapping[int, Any]


class Walk:
    """Visits ops in the order of execution. ``rounds``: products read rounded operands where the plan says so. ``stored`` has
    the values as the plan stores them, ``copies`` the same values in other shardings, by section."""

    def __init__(self, program: Program, sharded: ShardedProgram, rounds: bool):
        self.program, self.sharded, self.mesh = program, sharded, sharded.mesh
        self.stored: dict[int, Any] = {}
        self.copies: dict[Hashable, Any] = {}
        self._types = [sharded.array_type(program, v.id) for v in program.values]
        self._rounding = program.rounding if rounds and sharded.rounds else frozenset[int]()
        self._sections, _, self._crossing = find_sections(program)

    # Subclasses define what a walk does.

    def _read(self, op: Op, operand: int) -> Any:
        """Returns an operand as it is stored, or a scalar in the program."""
        raise NotImplementedError

    def _reshard(self, op: Op, value: int, xs: Sequence[Any], ends: tuple[Sharding, Sharding], rounded: bool) -> Any:
        """Returns a value in another sharding; ``xs`` has one array, or the positions of a maximum and the maximum."""
        raise NotImplementedError

    def _op(self, op: Op) -> None:
        raise NotImplementedError

    def _inside(self, op: Op, number: int) -> AbstractContextManager[None]:
        """Returns the context in which a body of a loop or branch is visited."""
        raise NotImplementedError

    def _loop(self, op: Op, links: list[Op], initial: Handed, body: Callable[[int, Handed], Handed]) -> Handed:
        """Runs a loop or branch on initial values by link, and returns its results by link."""
        raise NotImplementedError

    def _enter(self, link: Op, value: int, x: Any) -> None:
        """Stores an input of a body."""
        self._store(link, value, x)

    def _leave(self, link: Op, operand: int, region: Region | None = None) -> Any:
        """Returns the value that a link takes from before the loop, or from a body."""
        return self._operand(link, operand)

    def _test(self, op: Op) -> Any:
        """Returns whether a loop continues."""
        return self._read(op, 0)

    def _exit(self, link: Op, value: int, x: Any) -> None:
        """Stores a result of a loop or branch."""
        self._store(link, value, x)

    # Shardings.

    def _need(self, op: Op, operand: int, source: Sharding) -> Sharding:
        """Returns the sharding in which an op uses an operand that is stored in another."""
        need = tensor_sharding(op.factor_rule.operand_majors[operand], self.sharded.factors[op.id])
        return partial_need(need, source, self.sharded.passed[op.id])

    def _computed(self, op: Op, result: int) -> Sharding:
        """Returns the sharding in which an op computes a result, before any reshard."""
        return result_sharding(op.factor_rule, result, self.sharded.factors[op.id], self.sharded.passed[op.id])

    def _array(self, value: int, rounded: bool) -> ArrayType:
        return self._types[value].rounded if rounded else self._types[value]

    def _moved_dtype(self, value: int, source: Sharding, rounded: bool) -> str:
        """Returns the narrower type in which a value is communicated, or an empty text."""
        if not is_narrowed(self._array(value, rounded), source):
            return ""
        return ROUNDED if rounded else self.program.values[self.program.moved_as[value]].dtype

    def _counted_once(self, op: Op, operand: int) -> tuple[int, ...]:
        """Returns the axes on which an operand counts on the first device only: the sum is partial there, and it is not."""
        addend = op.kind in (*SUMS, "sub", "scan.carry") or (op.kind in ADDING_SCATTERS and operand != 1)
        passed = self.sharded.passed[op.id] if addend else ()
        value = op.operands[operand]
        return tuple(a for a in passed if value < 0 or a not in self.sharded.shardings[value].partial)

    def _operand(self, op: Op, operand: int) -> Any:
        """Returns an operand in the sharding that an op needs."""
        value = op.operands[operand]
        x = self._read(op, operand)
        if value < 0:
            return x
        source = self.sharded.shardings[value]
        need = self._need(op, operand, source)
        if need is source:
            return x
        # An operand of a product may move rounded, unlike for other ops.
        rounded = op.id in self._rounding and is_rounded(self._types[value], source)
        key = (self._crossing.get((op.id, value), self._sections[op.id]), value, need, rounded)
        if key not in self.copies:
            self.copies[key] = self._reshard(op, value, [x], (source, need), rounded)
        return self.copies[key]

    def _shapes(self, op: Op) -> tuple[tuple[int, ...], ...]:
        """Returns the global shapes of operands and results."""
        return tuple(self.program.values[v].shape if v >= 0 else () for v in (*op.operands, *op.results))

    def _fetches(self, op: Op) -> dict[int, tuple[Fetch, ...]]:
        """Returns, by operand, what a windowed op needs from other devices."""
        pieces = [self.mesh.pieces(axes) for axes in self.sharded.factors[op.id]]
        needed = fetches(op.kind, op.factor_rule, self._shapes(op), pieces)
        assert needed is not None, f"{op.kind} cannot be computed in these blocks"
        return {k: tuple(f for f in needed if f.operand == k) for k in dict.fromkeys(f.operand for f in needed)}

    def _fetched(self, op: Op, operand: int) -> dict[Any, Any]:
        """Returns what windowed ops have fetched of an operand in the section of an op."""
        need = self._need(op, operand, Sharding(()))
        return self.copies.setdefault((self._sections[op.id], op.operands[operand], need), {})  # type: ignore[no-any-return]

    def _store(self, op: Op, value: int, *xs: Any) -> None:
        """Stores a result, resharded to the sharding in which the plan stores it."""
        ends = self._computed(op, op.results.index(value)), self.sharded.shardings[value]
        self.stored[value] = self._reshard(op, value, xs, ends, False)

    # The program.

    def run(self, region: int) -> None:
        for k in self.program.regions[region].ops:
            self.step(self.program.ops[k])

    def step(self, op: Op) -> None:
        """Visits one op, or a loop or branch with its bodies."""
        if op.rule is None:
            self._control(op)
        elif op.id not in self.program.linked:
            self._op(op)

    def _control(self, op: Op) -> None:
        links = [self.program.ops[k] for k in op.links]
        regions = [self.program.regions[r] for r in op.regions]
        initial = {link.id: self._leave(link, 0) for link in links if not link.kind.endswith(".output")}
        for link in links:
            for value in link.results if link.kind.endswith(".const") else ():
                self._store(link, value, initial[link.id])

        def body(number: int, handed: Handed) -> Handed:
            region, left = regions[number], dict[int, Any]()
            with self._inside(op, number):
                for link in links:
                    for value in (v for v in link.results if v in region.inputs and not link.kind.endswith(".const")):
                        self._enter(link, value, handed[link.id])
                self.run(region.id)
                for link in links:
                    if link.kind.endswith(".carry") and region.kind.endswith(".body"):
                        left[link.id] = self._leave(link, 1, region)
                    elif link.kind.endswith(".output"):
                        left[link.id] = self._leave(link, number, region)
                if region.kind == "while.cond":
                    left[op.id] = self._test(op)
            return left

        results = self._loop(op, links, initial, body)
        inner = {v for region in regions for v in region.inputs}
        for link in links:
            for value in (v for v in link.results if v not in inner):
                self._exit(link, value, results[link.id])
