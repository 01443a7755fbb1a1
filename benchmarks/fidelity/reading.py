"""What one compiled program says about its cost: cycles by kind of instruction, collectives, and what lies in memory.

``estimated_cycles`` stands on instructions of the scheduled program. An instruction inside a fusion is covered by the fusion's
figure; one inside a loop counts as often as the loop runs. Collectives have none, so of each it is only noted how many cycles
of compute the schedule puts beside it.

What lies in memory comes from the compiler's buffer assignment, see ``buffers.py``.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.fidelity.buffers import Assignment
from shardwise.verification.collectives import KINDS, Collective
from shardwise.verification.hlo import Instruction, Module, bits
from shardwise.verification.step_time import Schedule

_PRODUCTS: Final = frozenset({"convolution", "dot"})
#: Ops that only say where something is, and those that only move it.
_SILENT: Final = frozenset({"parameter", "bitcast", "tuple", "get-tuple-element", "constant", "iota", "reshape", "add"})
_MOVES: Final = frozenset({"copy", "transpose"})
_SLICES: Final = frozenset({"dynamic-slice", "dynamic-update-slice", "slice", "pad", "concatenate", "broadcast"})
#: Ops of a computation that cost nothing by themselves, or whose cost stands elsewhere.
_FREE: Final = frozenset(
    {"parameter", "bitcast", "tuple", "get-tuple-element", "constant", "iota", "while", "call", "conditional", "domain"}
)
#: Primitives of which the compiler estimates at most a part, with those whose names go on (``scatter-add``): lookups, sorts,
#: pools, and decompositions, which are calls or loops without known trips.
UNTIMED: Final = (
    *("gather", "scatter", "sort", "top_k", "approx_top_k", "reduce_window", "select_and_scatter", "select_and_gather"),
    *("lu", "cholesky", "triangular_solve", "eigh", "eig", "geqrf", "householder_product", "qr", "svd", "schur"),
    *("hessenberg", "tridiagonal"),
)
_UNTIMED_NAME: Final = re.compile(rf"(?:{'|'.join(UNTIMED)})(?:[-_](?:add|mul|sub|min|max|sum|apply))?")
_LAYOUT: Final = re.compile(r"([a-z][a-z0-9]*)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_LARGEST: Final = 15


@dataclass(frozen=True, slots=True)
class Placed:
    """An array with its layout: bytes it has, bytes it takes in tiles, and the memory space (0 is HBM, 1 VMEM)."""

    text: str
    nbytes: int
    padded_bytes: int
    space: int


def placed(shape: str) -> list[Placed]:
    """The arrays of a shape with their tiles applied.

    The tile covers the minor-most dimensions; a dimension takes whole tiles. What follows the first tile, such as ``(2,1)``
    for two 16-bit rows in one sublane, orders the inside of a tile and does not change its size.

    >>> [(p.nbytes, p.padded_bytes, p.space) for p in placed("bf16[16,64]{1,0:T(8,128)(2,1)S(1)}")]
    [(2048, 4096, 1)]
    """
    found = []
    for dtype, dims_text, order_text, how in _LAYOUT.findall(shape):
        dims = [int(d) for d in dims_text.split(",") if d]
        order = [int(d) for d in order_text.split(",") if d]
        tile = re.search(r"T\(([\d,]+)\)", how)
        sizes = [dims[d] for d in order] if len(order) == len(dims) else dims[::-1]
        whole = list(sizes)
        if tile:
            for place, size in enumerate(reversed([int(t) for t in tile.group(1).split(",")])):
                if place < len(whole):
                    whole[place] = -(-whole[place] // size) * size
                else:
                    whole.append(size)
        space = re.search(r"S\((\d+)\)", how)
        width = bits(dtype)
        text = f"{dtype}[{dims_text}]" + (f"{{{order_text}:{how}}}" if how else "")
        nbytes, padded = (math.ceil(math.prod(s) * width / 8) for s in (sizes, whole))
        found.append(Placed(text, nbytes, padded, int(space.group(1)) if space else 0))
    return found


class Reader:
    """A module with what its instructions contain."""

    def __init__(self, module: Module):
        self._module, self._schedule = module, Schedule(module)
        self._inside: dict[str, frozenset[str]] = {}
        fused = {name for name, by in module.callers.items() if any(c.opcode == "fusion" for c in by)}
        applied = {name for name, by in module.callers.items() if any(_applies(c, name) for c in by)}
        self._scheduled = [c for name, c in module.computations.items() if name not in fused | applied]

    def cycles(self) -> dict[str, Any]:
        """Estimates by kind, the largest items, and the instructions that have no estimate."""
        by_kind: Counter[str] = Counter()
        silent: dict[str, list[int]] = {}
        items: Counter[str] = Counter()
        for i, runs in self._executed():
            kind = self.kind(i)
            cycles = i.estimated_cycles
            if cycles:
                by_kind[kind] += cycles * runs
                items[json.dumps(self._item(i, kind, runs))] += 1
            elif i.opcode not in _FREE and not i.opcode.endswith("-done"):
                count = silent.setdefault(i.opcode, [0, 0])
                count[0] += runs
                count[1] += runs * sum(p.padded_bytes for p in placed(i.shape))
        rows = [{**json.loads(item), "count": count} for item, count in items.items()]
        rows.sort(key=lambda r: -r["cycles"] * r["runs"] * r["count"])
        return {
            "total": sum(by_kind.values()),
            "untimed": sum(i.estimated_cycles * runs for i, runs in self._executed() if is_untimed(i.op_name)),
            "by_kind": dict(sorted(by_kind.items())),
            "largest": rows[:_LARGEST],
            "unestimated": {k: v for k, v in sorted(silent.items()) if v[1] > 1_000_000},
        }

    def _executed(self) -> Iterator[tuple[Instruction, int]]:
        for computation in self._scheduled:
            runs = self._module.runs[computation.name]
            for i in computation.instructions:
                yield i, runs

    def _item(self, i: Instruction, kind: str, runs: int) -> dict[str, Any]:
        own = self._module.computations[i.computation].by_name
        operands = [placed(own[name].shape)[:1] for name in i.operands if name in own]
        large = sorted((o[0] for o in operands if o), key=lambda p: -p.nbytes)[:3]
        results = sorted(placed(i.shape), key=lambda p: -p.nbytes)[:3]
        return {
            "kind": kind,
            "op": i.opcode,
            "cycles": i.estimated_cycles,
            "runs": runs,
            "out": [p.text for p in results],
            "in": [p.text for p in large],
            "op_name": _short(i.op_name),
        }

    def kind(self, i: Instruction) -> str:
        """matmul, matmul+collective, collective, copy, slice, gather, reduce, loop, or the opcode."""
        inside = self._contents(i)
        collective = any(op.removesuffix("-start") in KINDS for op in inside)
        if inside & _PRODUCTS:
            return "matmul+collective" if collective else "matmul"
        if collective:
            return "collective"
        if i.opcode.startswith("copy") or i.opcode == "transpose":
            return "copy"
        if i.opcode != "fusion":
            return i.opcode
        working = inside - _SILENT - {"fusion"}
        if working and working <= _MOVES:
            return "copy"
        if working & {"gather", "scatter", "sort"}:
            return "gather"
        if working & {"reduce", "reduce-window"}:
            return "reduce"
        if working & _SLICES and working <= _SLICES | _MOVES | {"convert", "compare", "select", "subtract"}:
            return "slice"
        return "loop"

    def _contents(self, i: Instruction) -> frozenset[str]:
        """The opcode, or for a fusion or a call all that are inside."""
        if i.opcode == "while" or not i.called or _reduces(i):
            return frozenset({i.opcode})
        return frozenset({i.opcode}).union(*(self._of(name) for name in i.called))

    def _of(self, computation: str) -> frozenset[str]:
        if computation not in self._inside:
            self._inside[computation] = frozenset()
            own = (self._contents(i) for i in self._module.computations[computation].instructions)
            self._inside[computation] = frozenset().union(*own)
        return self._inside[computation]

    def collectives(self, found: Iterable[Collective]) -> list[dict[str, Any]]:
        """Collectives as rows, equal ones counted. ``beside`` is the cycles of compute that one run may hide behind.

        Those that move less than a five-hundredth of all bytes and run beside nothing are one row for each kind and axes, with
        ``parts`` their number.
        """
        rows: Counter[tuple[Any, ...]] = Counter()
        all_found = list(found)
        little = sum(c.nbytes * c.runs for c in all_found) / 500
        small: dict[tuple[Any, ...], list[Collective]] = {}
        for c in all_found:
            kinds = sorted({part.kind for part in c.parts}) or [c.kind]
            logical = sum(part.logical_bytes for part in c.parts)
            axes = None if c.axes is None else tuple(c.axes)
            beside = self._schedule.beside_cycles(c) // max(1, c.runs)
            if c.nbytes * c.runs < little and not beside:
                small.setdefault((c.kind, "+".join(kinds), axes, c.form, c.dtype, c.hop), []).append(c)
                continue
            row = (c.kind, "+".join(kinds), axes, c.form, c.dtype, c.hop, c.nbytes, logical, c.runs, beside)
            rows[(*row, len(c.parts), _short(c.op_name))] += 1
        for key, several in small.items():
            nbytes = sum(c.nbytes * c.runs for c in several)
            logical = sum(part.logical_bytes * c.runs for c in several for part in c.parts)
            rows[(*key, nbytes, logical, 1, 0, sum(c.runs for c in several), "smaller")] += 1
        keys = "kind logical axes form dtype hop bytes logical_bytes runs beside parts op_name".split()
        table = [{**dict(zip(keys, row, strict=True)), "count": count} for row, count in rows.items()]
        return sorted(table, key=lambda r: -r["bytes"] * r["runs"] * r["count"])

    def arguments(self) -> dict[str, int]:
        """Bytes of the arguments as they are and in tiles."""
        entry = self._module.computations[self._module.entry]
        found = [p for i in entry.instructions if i.opcode == "parameter" for p in placed(i.shape)]
        return {"bytes": sum(p.nbytes for p in found), "padded_bytes": sum(p.padded_bytes for p in found)}


def is_untimed(op_name: str) -> bool:
    """Is an instruction part of an op in ``UNTIMED``, or of a function of that name?

    >>> is_untimed("jit(step)/jit(eigh)/jit(_eigh_work)/while/body/dot_general"), is_untimed("jit(step)/eigenvalues/add")
    (True, False)
    >>> is_untimed("jit(step)/scatter-add")
    True
    """
    return any(_UNTIMED_NAME.fullmatch(re.sub(r".*\(|\)", "", part)) for part in op_name.split("/"))


def _applies(caller: Instruction, name: str) -> bool:
    return caller.attribute("to_apply") == name and caller.opcode != "call"


def _reduces(i: Instruction) -> bool:
    return bool(i.attribute("to_apply")) and i.opcode != "call"


def _short(op_name: str) -> str:
    return "/".join(op_name.replace("closed_call/", "").split("/")[-4:])


def live(assignment: Assignment, known: dict[int, tuple[str, str]], module: Module) -> dict[str, Any]:
    """The heap at its fullest: how many buffers, their bytes as they are and in tiles, and the largest of them.

    Each of the largest is: name, bytes in tiles, bytes, layout, where it comes from.
    """
    alive = assignment.at_peak()
    origin = {i.name: i.op_name for i in module.instructions()}
    rows = []
    for buffer, size in alive.items():
        name, shape = known.get(buffer, ("", ""))
        arrays = placed(shape)
        nbytes, text = (arrays[0].nbytes, arrays[0].text) if len(arrays) == 1 else (size, "")
        rows.append([name, size, nbytes, text, _short(origin.get(name.partition("{")[0], ""))])
    return {
        "count": len(rows),
        "padded_bytes": sum(r[1] for r in rows),
        "bytes": sum(r[2] for r in rows),
        "largest": rows[:_LARGEST],
    }
