"""A lowered program as plain data: all that is needed to execute it, and to write it to a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Program
from shardwise.ir.rule import Rule
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.padding import can_pad, is_inner
from shardwise.lowering.sharding import ArrayType, Axes, Ring, Sharding
from shardwise.lowering.structure import array_type

_NO_RULE: Final = Rule((), (), ())


@dataclass(frozen=True)
class ShardedProgram:
    """How a program is computed on a mesh: by op the axes of its factors and those over which it passes partial sums on, by
    value the sharding in which it leaves its op, and its ring; ``rounds``: whether products read their operands rounded."""

    mesh: MeshAxes
    factors: tuple[tuple[Axes, ...], ...]
    passed: tuple[Axes, ...]
    shardings: tuple[Sharding, ...]
    rings: Mapping[int, Ring] = field(default_factory=dict)
    rounds: bool = False

    @staticmethod
    def of(lowered: Lowered) -> ShardedProgram:
        chosen = [lowered.computes[op.id] for op in lowered.program.ops]
        shardings = tuple(lowered.actual[v.id] for v in lowered.program.values)
        arrays = lowered.memo.candidates.arrays
        rings = {v: array.ring for v, array in enumerate(arrays) if array.ring is not Ring.NEVER}
        assigned, passed = tuple(c.assigned for c in chosen), tuple(c.passed for c in chosen)
        return ShardedProgram(lowered.mesh, assigned, passed, shardings, rings, lowered.memo.candidates.cost.rounds)

    def array_type(self, program: Program, value: int) -> ArrayType:
        """What reshards of a value depend on."""
        return array_type(program, value)._replace(ring=self.rings.get(value, Ring.NEVER))

    def problems(self, program: Program) -> Iterator[str]:
        """Yields what cannot be, as this program is: axes on factors and dimensions that are not there or do not divide."""
        if len(self.factors) != len(program.ops) or len(self.shardings) != len(program.values):
            yield f"it has {len(program.ops)} ops and {len(program.values)} values"
            return
        for op, factors, passed in zip(program.ops, self.factors, self.passed, strict=True):
            rule, stated = op.rule or _NO_RULE, op.kind.startswith("shard_map.")
            sizes = [f.size if stated or rule.splittable[k] else 1 for k, f in enumerate(rule.factors)]
            if not self._divide(sizes, (*factors, passed), lambda f, op=op: can_pad(program, op, f)):  # type: ignore[misc]
                yield f"{op.kind} at {program.source_of(op)} cannot be computed on {factors}"
        for value, sharding in zip(program.values, self.shardings, strict=True):
            if not self._divide(value.shape, (*sharding.dims, sharding.partial), lambda _, v=value: is_inner(v)):  # type: ignore[misc]
                yield f"{program.label(value.id)} cannot be sharded on {sharding.dims}"
        if any(not 0 <= v < len(program.values) for v in self.rings):
            yield "a ring is of a value that is not there"

    def _divide(self, sizes: Sequence[int], axes: Sequence[Axes], padded: Callable[[int], bool]) -> bool:
        """Do the axes of each place divide its size, or can it be padded on its one axis? Each axis is used once, and the last
        axes are of no place."""
        used = [a for place in axes for a in place]
        if len(axes) != len(sizes) + 1 or len(set(used)) != len(used):
            return False
        uneven = [k for k, size in enumerate(sizes) if size % self.mesh.pieces(axes[k])]
        return all(len(axes[k]) == 1 and sizes[k] > 1 and padded(k) for k in uneven)

    def to_json(self) -> dict[str, Any]:
        """Repeated entries are written once, and referred to by number."""
        ops, op_numbers = _numbered(list(zip(self.factors, self.passed, strict=True)))
        values, value_numbers = _numbered([(s.dims, s.partial) for s in self.shardings])
        by_ring = {
            kind.value: [v for v, ring in self.rings.items() if ring is kind] for kind in (Ring.MISSING, Ring.ALWAYS)
        }
        numbers = {"ops": op_numbers, "values": value_numbers, "rings": by_ring, "rounds": self.rounds}
        return {"computed": ops, "shardings": values} | numbers


def _numbered(items: Sequence[Any]) -> tuple[list[Any], list[int]]:
    numbers: dict[Any, int] = {}
    places = [numbers.setdefault(item, len(numbers)) for item in items]
    return list(numbers), places


def read_sharded(data: dict[str, Any], mesh: MeshAxes) -> ShardedProgram:
    """From plain data; raises KeyError, TypeError or ValueError where that is not a lowered program."""
    axes = range(len(mesh.sizes))

    def read_axes(entry: Any) -> Axes:
        if any(type(a) is not int or a not in axes for a in entry):
            raise ValueError(f"there is no mesh axis {entry}")
        return tuple(entry)

    def read_pair(entry: Any) -> tuple[tuple[Axes, ...], Axes]:
        by_place, rest = entry
        return tuple(map(read_axes, by_place)), read_axes(rest)

    computed, shardings = (list(map(read_pair, data[key])) for key in ("computed", "shardings"))
    if any(n < 0 for key in ("ops", "values") for n in data[key]):
        raise ValueError("an entry is referred to by a negative number")
    try:
        ops, values = [computed[n] for n in data["ops"]], [shardings[n] for n in data["values"]]
    except IndexError:
        raise ValueError("an entry is referred to that is not there") from None
    by_value = tuple(Sharding(*entry) for entry in values)
    rings = {int(v): Ring(kind) for kind, numbers in data["rings"].items() for v in numbers}
    return ShardedProgram(
        mesh, tuple(f for f, _ in ops), tuple(p for _, p in ops), by_value, rings, bool(data["rounds"])
    )
