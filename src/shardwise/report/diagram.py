"""The parts of a program as data for a picture: kernels from top to bottom, what each writes and how that is sharded, and the
collectives in between.

A part is the body of a loop, or ops of which the program has the same again and again (unrolled layers): it is shown once. Rows
are the kernels of the cost model (``cost/kernels.py``), so that every array in the picture is one that memory holds.
"""

from __future__ import annotations

import linecache
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from shardwise.cost.compute import work
from shardwise.cost.kernels import Kernel
from shardwise.cost.model import CostModel, TermKind
from shardwise.ir.program import HEAVY, Source, Value
from shardwise.lowering.lowered import Lowered, Reshard
from shardwise.lowering.sharding import Kind, Sharding
from shardwise.plans.plan import Plan
from shardwise.transforms.blocks import repetitions

#: Parts that are shown, and rows of one; the rows with the most time are kept.
_MOST_PARTS: Final = 8
_MOST_ROWS: Final = 40
#: A kernel that takes less of its part, is no product and has no collective is left out.
_LITTLE: Final = 0.01
#: Kernels of the shortest sequence whose repetitions are shown as one part.
_SHORTEST: Final = 4
#: Characters of a source line that are shown.
_MOST_TEXT: Final = 160
#: Kernels of a block in which it is looked for where a layer begins.
_LONGEST: Final = 300
_NUMBER: Final = re.compile(r"\d+")


@dataclass(frozen=True)
class _Part:
    """Kernels, by number, that run ``times`` times one after another."""

    kernels: list[int]
    times: int
    what: str


def diagram(plan: Plan) -> list[dict[str, Any]]:
    """Returns the parts of a plan's program, what is repeated and runs forward first; none for a loaded plan."""
    if plan.asked is None:
        return []
    drawing = _Drawing(plan.asked.model, plan.settled.lowered)
    parts = [drawing.part(part) for part in drawing.parts()]
    shown = sorted((p for p in parts if p["rows"]), key=lambda p: -p["time_s"])[:_MOST_PARTS]
    return sorted(shown, key=lambda p: (p["backward"], p["times"] == 1, -p["time_s"]))


class _Drawing:
    def __init__(self, model: CostModel, lowered: Lowered):
        self.model, self.lowered, self.program = model, lowered, lowered.program
        self.base = model.life.clusters.base
        self.kernels = {n: k for n, k in enumerate(model.kernels) if k.returned is None and k.transposed is None}
        self.time_s: dict[int, float] = {}
        self.moves: defaultdict[int, list[tuple[Reshard, list[tuple[int, int, int]]]]] = defaultdict(list)  # by op
        for term in model.terms:
            if term.kind is TermKind.KERNEL:
                self.time_s[term.number] = model.figures(lowered, term).compute_ps * 1e-12
            elif term.kind is TermKind.EDGE:
                for move in model.figures(lowered, term).reshards:
                    self.moves[move.op].append((move, model.step_ps(move)))

    def parts(self) -> Iterator[_Part]:
        by_region: defaultdict[int, list[int]] = defaultdict(list)
        for n, kernel in self.kernels.items():
            by_region[kernel.region].append(n)
        for region, numbers in by_region.items():
            numbers.sort(key=lambda n: (self._point(self.kernels[n]), n))
            runs = int(self.program.runs[region])
            if region:
                yield _Part(numbers, runs, "body of a loop")
            else:
                yield from self._repeated(numbers)

    def _point(self, kernel: Kernel) -> int:
        """Where a kernel stands in the program as it is written. What a loop stacks stands at its end, not where it is made."""
        position = self.lowered.structure.position
        roots = [k for k in (kernel.main, *kernel.roots) if not self._stacked(k)]
        return max(position[k] for k in roots or [kernel.main])

    def _stacked(self, op: int) -> bool:
        return self.program.ops[op].kind.endswith((".output", ".carry"))

    def _repeated(self, numbers: list[int]) -> Iterator[_Part]:
        """Splits a sequence of kernels where the same comes again and again."""
        codes: dict[object, int] = {}
        keys = np.array([codes.setdefault(self._key(self.kernels[n]), len(codes)) for n in numbers])
        at, outside = 0, "whole program" if len(numbers) == len(self.kernels) else "outside of what repeats"
        for first, end, period in sorted(r for r in repetitions(keys) if r[2] >= _SHORTEST):
            if first > at:
                yield _Part(numbers[at:first], 1, "outside of what repeats")
            begin = first + self._begin(numbers[first:end], period)
            yield _Part(numbers[begin : begin + period], (end - first) // period, "repeated block")
            at, outside = end - (end - first) % period, "outside of what repeats"
        if at < len(numbers):
            yield _Part(numbers[at:], 1, outside)

    def _begin(self, numbers: list[int], period: int) -> int:
        """Returns where in a repeated sequence a block begins: such that what it reads is of the fewest layers."""
        if len(numbers) < 2 * period or period > _LONGEST:
            return 0
        layers = [
            {tuple(_NUMBER.findall(a["path"])) for a in self._arguments(self.kernels[n])} for n in numbers[: 2 * period]
        ]
        return min(range(period), key=lambda k: len(set().union(*layers[k : k + period])))

    def _key(self, kernel: Kernel) -> object:
        ops = [self.program.ops[k] for k in kernel.ops]
        return tuple([(op.kind, *(self.program.values[v].type_text for v in op.results if v >= 0)) for op in ops])

    # Rows.

    def part(self, part: _Part) -> dict[str, Any]:
        total = sum(self.time_s.get(n, 0.0) for n in part.kernels) or 1.0
        shown = [n for n in part.kernels if self._matters(n, total)]
        if len(shown) > _MOST_ROWS:
            kept = set(sorted(shown, key=lambda n: -self._weight(n))[:_MOST_ROWS])
            shown = [n for n in shown if n in kept]
        writer, sources = {}, self._sources(part.kernels, set(shown))
        for row, n in enumerate(shown):
            writer[n] = row
        rows = [self._row(n, sorted({writer[m] for m in sources[n]})) for n in shown]
        ops = [self.program.ops[k] for n in part.kernels for k in self.kernels[n].ops]
        ops = [op for op in ops if op.unit in HEAVY] or ops
        backward = sum("transpose(" in self.program.source_of(op).names for op in ops) > len(ops) / 2
        time_s = sum(self.time_s.get(n, 0.0) for n in part.kernels) * (
            part.times if part.what == "repeated block" else 1
        )
        return {
            "what": part.what,
            "times": part.times,
            "backward": backward,
            "time_s": time_s,
            "left_out": len(part.kernels) - len(shown),
            "rows": rows,
        }

    def _weight(self, n: int) -> float:
        moved = (ps for op in self.kernels[n].ops for _, steps in self.moves[op] for _, ps, _ in steps)
        return self.time_s.get(n, 0.0) + sum(moved) * 1e-12

    def _matters(self, n: int, total: float) -> bool:
        kernel = self.kernels[n]
        moved = any(s.kind is not Kind.SLICE for op in kernel.ops for move, _ in self.moves[op] for s in move.steps)
        product = any(self.program.ops[k].unit in HEAVY for k in kernel.ops)
        links = self._stacked(kernel.main) and not moved
        return bool(kernel.writes) and not links and (product or moved or self.time_s.get(n, 0.0) > _LITTLE * total)

    def _sources(self, numbers: Sequence[int], shown: set[int]) -> dict[int, set[int]]:
        """Returns for each kernel the shown ones that it reads from, directly or through some that are not shown."""
        of_value = {v: n for n in numbers for v in self._written(self.kernels[n])}
        found: dict[int, set[int]] = {}
        for n in numbers:
            found[n] = set()
            for v in self._read(self.kernels[n]):
                m = of_value.get(v, n)
                if m != n and m in found:
                    found[n] |= {m} if m in shown else found[m]
        return found

    def _read(self, kernel: Kernel) -> Iterator[int]:
        for tensors in kernel.reads:
            op = self.program.ops[tensors[0].op]
            if tensors[0].number < len(op.operands) and op.operands[tensors[0].number] >= 0:
                yield self.base[op.operands[tensors[0].number]]

    def _written(self, kernel: Kernel) -> Iterator[int]:
        for tensor in kernel.writes:
            op = self.program.ops[tensor.op]
            if tensor.number >= len(op.operands):
                yield op.results[tensor.number - len(op.operands)]

    def _row(self, n: int, sources: list[int]) -> dict[str, Any]:
        kernel = self.kernels[n]
        main = self.program.ops[kernel.main]
        place = self.program.source_of(main)
        values = [self.program.values[v] for v in self._written(kernel)]
        out = max(values, key=lambda v: v.nbytes)
        stacked = self.program.ops[self.program.definitions[out.id][0]].kind.endswith(".output")
        others = {self.program.ops[k].kind for k in kernel.ops if k != main.id} - {"broadcast_in_dim", "reshape"}
        return {
            "op": main.kind,
            "with": sorted(others)[:8],
            "source": str(place),
            "module": place.module,
            "text": line_text(place),
            "time_s": self.time_s.get(n, 0.0),
            **self._work(kernel),
            "from": sources,
            "arguments": list(self._arguments(kernel)),
            "out": self._array(out, self.lowered.actual[out.id]),
            "label": self.program.label(out.id) if out.path else "stacked by the loop:" * stacked,
            "moves": list(self._moves(kernel)),
        }

    def _work(self, kernel: Kernel) -> dict[str, float]:
        """What a kernel computes, reads and writes in a step, on one device."""
        runs = float(self.program.runs[kernel.region])
        flops, nbytes = work(self.lowered, kernel, self.model.cost.profile, self.model.life.layouts)
        return {"flops": flops * runs, "nbytes": nbytes * runs}

    def _arguments(self, kernel: Kernel) -> Iterator[dict[str, Any]]:
        """The arguments that a kernel reads, as they are stored."""
        used = (v for k in kernel.ops for v in self.program.ops[k].operands if v >= 0)
        for root in dict.fromkeys(self.program.argument_of.get(v) for v in used):
            if root is not None and self.program.values[root].shape:
                value = self.program.values[root]
                yield {"path": value.path, **self._array(value, self.lowered.storage[root])}

    def _array(self, value: Value, sharding: Sharding) -> dict[str, Any]:
        colors = self.lowered.structure.colors[value.id]
        return {
            "dtype": value.dtype,
            "shape": list(value.shape),
            "local": list(sharding.local_shape(value.shape, self.lowered.mesh)),
            "axes": [list(axes) for axes in sharding.dims],
            "partial": list(sharding.partial),
            "colors": list(colors),
        }

    def _moves(self, kernel: Kernel) -> Iterator[dict[str, Any]]:
        for op in kernel.ops:
            for move, times in self.moves[op]:
                for step, (_, comm_ps, overlapped_ps) in zip(move.steps, times, strict=True):
                    if step.kind is Kind.SLICE:
                        continue
                    value = self.program.values[move.value]
                    root = self.program.argument_of.get(move.value)
                    yield {
                        "kind": step.kind.value,
                        "axes": list(step.axes),
                        "nbytes": step.nbytes * step.count * float(self.program.runs[move.region]),
                        "time_s": comm_ps * 1e-12,
                        "overlapped_s": overlapped_ps * 1e-12,
                        "of": self.program.values[root].path if root is not None else value.type_text,
                        "before": move.operand >= 0,
                    }


def line_text(place: Source) -> str:
    """Returns the text of a source line, where its file can be read."""
    return linecache.getline(place.file, place.line).strip()[:_MOST_TEXT] if place.file else ""


def colors_in(parts: Iterable[dict[str, Any]]) -> set[int]:
    """Returns the colors of all arrays in a picture."""
    arrays = (a for part in parts for row in part["rows"] for a in (row["out"], *row["arguments"]))
    return {c for a in arrays for c in a["colors"] if c >= 0}
