"""The collectives of a compiled program, each counted once, however the compiler wrote it.

Problem. What a person plans as one reduce-scatter or one all-gather reaches the compiled text in many disguises. To compare a
plan with it, the disguises have to be taken off and noted.

What is recognised, by ``form``:

- ``PLAIN``: the instruction itself. Combining puts several values into one collective, each a ``Part`` of it;
- ``ASYNC``: a ``-start`` and ``-done`` pair, or an ``async-start`` around the collective;
- ``FUSED``: inside a fusion, such as TPU's ``all-reduce-scatter`` fusions, which are reduce-scatters;
- ``PIECES``: TPU's ``async_collective_fusion`` repeats a collective in every fusion that it is drawn out over; those that
  share a channel and a ``chain_id`` are one, executed as often as the least executed piece;
- ``WINDOWED``: a product whose operand is gathered, or whose result is scattered, in steps while it computes. The ring of
  permutes inside and beside such a loop is one all-gather or reduce-scatter of the whole value.

Of a part is further noted: ``scattered``, how many slices an all-reduced value is cut into before anything else uses it (an
all-reduce whose group keeps one slice each is a reduce-scatter that the backend cannot say); and ``logical_dtype``, the type
before it was widened: XLA:CPU computes products in 32 bits and moves their 16-bit operands and results as such. Where a value
is all-reduced over one axis and then at once over another, as XLA:CPU does with two sharded dimensions, the first part is
``absorbed`` and the second has the axes of both as ``merged``. Where results of all-reduces are only added up, all but one
are ``joined``: XLA reassociates them into one, but XLA:CPU does not.

Weak. A slice is taken for the device's own by its size alone.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shardwise.hardware.mesh import MeshAxes
from shardwise.verification.follow import Chain, after, before, chains, completes, narrow_dtype, slices, whole_sum
from shardwise.verification.groups import AxisNames, Groups, connected, pairs, replica_groups
from shardwise.verification.hlo import Loop, Module
from shardwise.verification.instructions import Array, Computation, Instruction, bits

KINDS: Final = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)
_OPCODES: Final = {**{k: k for k in KINDS}, **{f"{k}-start": k for k in KINDS}}
_REDUCTIONS: Final = {"add": "sum", "maximum": "max", "minimum": "min", "and": "and", "or": "or", "multiply": "product"}
_WINDOWED: Final = re.compile(r"windowed_dot_general_body_(ag|rs)")
_CHAIN: Final = re.compile(r'chain_id="(\w+)"')


class Form(enum.Enum):
    """How the compiler wrote a collective."""

    PLAIN = "plain"
    ASYNC = "async"
    FUSED = "fused"
    PIECES = "pieces"
    WINDOWED = "windowed"


@dataclass(frozen=True, slots=True)
class Part:
    """One value that a collective moves, at the sizes of one device."""

    dtype: str
    dims: tuple[int, ...]
    bytes_in: int
    bytes_out: int
    logical_dtype: str
    scattered: int = 1
    merged: tuple[str, ...] = ()
    merged_size: int = 1
    absorbed: bool = False
    joined: bool = False

    @property
    def nbytes(self) -> int:
        """The larger side."""
        return max(self.bytes_in, self.bytes_out)

    @property
    def logical_bytes(self) -> int:
        """The larger side, had the type not been promoted."""
        return self.nbytes * bits(self.logical_dtype) // max(1, bits(self.dtype))


@dataclass(frozen=True, slots=True)
class Transfer:
    """One part of a collective as a plan would name it: disguises and promotion taken off."""

    kind: str
    axes: tuple[str, ...] | None
    dtype: str
    nbytes: int
    runs: int
    source: tuple[str, int]
    collective: str


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective. ``kind`` is what it does; ``axes`` is ``None`` where its groups are no product of mesh axes.

    ``runs`` counts executions in one call of the program; ``loop`` is the innermost loop around it, whose ``trips`` may
    be ``None`` if only known at run time; ``branch`` says that a conditional may leave it out.
    """

    name: str
    kind: str
    form: Form
    parts: tuple[Part, ...]
    reduction: str
    groups: Groups
    pairs: tuple[tuple[int, int], ...]
    axes: tuple[str, ...] | None
    runs: int
    loop: Loop | None
    branch: bool
    op_name: str
    source: tuple[str, int]
    instructions: tuple[str, ...]

    @property
    def bytes_in(self) -> int:
        return sum(p.bytes_in for p in self.parts)

    @property
    def bytes_out(self) -> int:
        return sum(p.bytes_out for p in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of one device and one run, the larger side of every part."""
        return sum(p.nbytes for p in self.parts)

    @property
    def dtype(self) -> str:
        """The type of the largest part."""
        return max(self.parts, key=lambda p: p.nbytes).dtype if self.parts else ""

    @property
    def group_size(self) -> int:
        return len(self.groups[0]) if self.groups else 1

    @property
    def reduce_scatter_in_disguise(self) -> bool:
        return self.kind == "all-reduce" and any(p.scattered == self.group_size * p.merged_size > 1 for p in self.parts)

    def transfers(self) -> Iterator[Transfer]:
        """The parts, one by one, with their logical kind and bytes."""
        for p in self.parts:
            if p.absorbed or p.joined:
                continue
            size = self.group_size * p.merged_size
            kind = "reduce-scatter" if self.kind == "all-reduce" and p.scattered == size > 1 else self.kind
            axes = p.merged or self.axes
            yield Transfer(kind, axes, p.logical_dtype, p.logical_bytes, self.runs, self.source, self.name)


def collectives(
    module: Module, mesh: MeshAxes, order: Sequence[int] | None = None, trivial: bool = False
) -> tuple[Collective, ...]:
    """The collectives of a program in the order of execution.

    Args:
      module: the program that ``hlo.read`` gave.
      mesh: names and sizes of the axes, to name the groups.
      order: for every mesh position in row-major order the device's number in the program; by default the position.
      trivial: keep collectives among one device each, which move nothing.
    """
    names = AxisNames(mesh, order)
    reader = _Reader(module, mesh.devices, names)
    found = reader.join(reader.merge(list(reader.read())))
    return tuple(c for c in found if trivial or c.group_size > 1 or c.pairs)


class _Reader:
    def __init__(self, module: Module, devices: int, names: AxisNames):
        self._module = module
        self._devices = devices
        self._names = names
        self._windowed = {
            loop.body: (loop, found.group(1)) for loop in module.loops if (found := _WINDOWED.search(loop.body))
        }

    def read(self) -> Iterator[Collective]:
        """Gather the instructions that are one collective, in the order of their first ones."""
        sets: dict[tuple[str, ...], list[Instruction]] = {}
        rings = self._rings()
        for instruction in self._walk():
            kind = _OPCODES.get(instruction.opcode)
            if kind is None:
                continue
            key: tuple[str, ...] = ("single", instruction.computation, instruction.name)
            if kind == "collective-permute":
                if (body := self._window_of(instruction)) is not None:
                    key = ("window", body)
                elif (instruction.computation, instruction.name) in rings:
                    key = ("ring", instruction.computation, rings[instruction.computation, instruction.name][0])
            elif chain := _CHAIN.search(instruction.attributes):
                key = ("pieces", instruction.attribute("channel_id"), chain.group(1))
            sets.setdefault(key, []).append(instruction)
        for (what, *rest), found in sets.items():
            if what == "window":
                yield self._window(found, *self._windowed[rest[0]])
            elif what == "ring":
                yield self._ring(found, rings[found[0].computation, found[0].name][1])
            elif what == "pieces":
                yield _one_of_pieces([self._single(i, _OPCODES[i.opcode]) for i in found])
            else:
                yield self._single(found[0], _OPCODES[found[0].opcode])

    def merge(self, found: list[Collective]) -> list[Collective]:
        """Note the all-reduces that complete others over further axes."""
        places = {c.name: place for place, c in enumerate(found) if c.kind == "all-reduce"}
        reduces = [i for i in self._walk() if _OPCODES.get(i.opcode) == "all-reduce" and i.name in places]
        for instruction in reduces:
            place = places[instruction.name]
            for index in range(len(found[place].parts)):
                first = completes(self._module, instruction, index)
                if first is None or first[0].name not in places:
                    continue
                early, late = found[places[first[0].name]], found[place]
                part = early.parts[first[1]]
                axes = self._names.together(part.merged or early.axes, late.axes)
                if axes is None or early.reduction != late.reduction or early.runs != late.runs:
                    continue
                size = early.group_size * part.merged_size
                found[places[early.name]] = _with_part(early, first[1], replace(part, absorbed=True))
                found[place] = _with_part(late, index, replace(late.parts[index], merged=axes, merged_size=size))
        return found

    def join(self, found: list[Collective]) -> list[Collective]:
        """Note the all-reduces whose results are only added up with others'."""
        places = {c.name: place for place, c in enumerate(found) if c.kind == "all-reduce" and c.reduction == "sum"}
        kept = set[tuple[object, ...]]()
        for instruction in (i for i in self._walk() if _OPCODES.get(i.opcode) == "all-reduce" and i.name in places):
            place = places[instruction.name]
            for index, part in enumerate(found[place].parts):
                total = whole_sum(self._module, instruction, index if len(instruction.operands) > 1 else None)
                axes, runs = part.merged or found[place].axes, found[place].runs
                if total is None or part.absorbed or axes is None:
                    continue
                key = total.computation, total.name, axes, runs
                if key in kept:
                    found[place] = _with_part(found[place], index, replace(part, joined=True))
                kept.add(key)
        return found

    def _rings(self) -> dict[tuple[str, str], tuple[str, Chain]]:
        """For every permute of a windowed product without a loop: the first permute's name, and the ring."""
        loose: dict[str, list[Instruction]] = {}
        for i in self._walk():
            if _OPCODES.get(i.opcode) == "collective-permute" and "dot_general" in i.op_name and not self._window_of(i):
                loose.setdefault(i.computation, []).append(i)
        found = [chain for permutes in loose.values() for chain in chains(self._module, permutes)]
        return {(p.computation, p.name): (c.permutes[0].name, c) for c in found for p in c.permutes}

    def _walk(self) -> Iterator[Instruction]:
        """Instructions in the order of execution; a computation with several callers comes once, at its first."""
        seen = set[str]()
        module = self._module

        def walk(name: str) -> Iterator[Instruction]:
            seen.add(name)
            for instruction in module.computations[name].instructions:
                inner = instruction.called
                if instruction.opcode == "while":
                    inner += (instruction.attribute("condition"), instruction.attribute("body"))
                yield instruction
                for called in inner:
                    if called not in seen:
                        yield from walk(called)

        return walk(module.entry)

    def _single(self, instruction: Instruction, kind: str) -> Collective:
        module = self._module
        links = pairs(instruction.attributes)
        groups = connected(links) if links else replica_groups(instruction.attributes, self._devices)
        callers = {caller.opcode for caller in module.callers.get(instruction.computation, ())}
        computation = module.computations[instruction.computation]
        form = Form.PLAIN
        if instruction.opcode.endswith("-start") or any(c.endswith("-start") for c in callers):
            form = Form.ASYNC
        elif "fusion" in callers:
            form = Form.FUSED
        told = self._with_metadata(instruction)
        parts = tuple(self._parts(computation, instruction, kind))
        size = len(groups[0]) if groups else 1
        if form is Form.FUSED and kind == "all-reduce" and all(p.scattered == size for p in parts):
            kind = "reduce-scatter"
            parts = tuple(replace(p, bytes_out=p.bytes_in // size, scattered=1) for p in parts)
        return Collective(
            name=instruction.name,
            kind=kind,
            form=form,
            parts=parts,
            reduction=self._reduction(instruction),
            groups=groups,
            pairs=links,
            axes=self._names.of_pairs(links) if links else self._names.of_groups(groups),
            runs=module.runs[instruction.computation],
            loop=module.enclosing_loop(instruction.computation),
            branch=module.in_branch(instruction.computation),
            op_name=told.op_name,
            source=module.source(told),
            instructions=(instruction.name,),
        )

    def _parts(self, computation: Computation, instruction: Instruction, kind: str) -> Iterator[Part]:
        operands = [o.arrays for name in instruction.operands if (o := computation.by_name.get(name)) is not None]
        inputs = [array for shape in operands for array in shape]
        results = list(instruction.arrays)
        if instruction.opcode.endswith("-start") and kind != "all-reduce":
            # (operands, results, contexts): the half that holds the results has as many arrays as there are operands.
            results = results[len(inputs) : 2 * len(inputs)] or results
        if kind == "ragged-all-to-all":
            inputs, results = inputs[:1], results[:1]
        if kind == "all-to-all" and len(inputs) > 1:
            # One operand for every device of the group is one value cut by hand.
            total, out = sum(a.nbytes for a in inputs), sum(a.nbytes for a in results)
            dtype = narrow_dtype(self._module, instruction, 0, False) or inputs[0].dtype
            yield Part(inputs[0].dtype, inputs[0].dims, total, out, dtype)
            return
        promoted = "promoted" in instruction.attribute("to_apply")
        for index, (array, result) in enumerate(zip(inputs, results, strict=False)):
            dtype = narrow_dtype(self._module, instruction, index, promoted)
            cut = slices(self._module, instruction, index, len(inputs) > 1) if kind == "all-reduce" else 1
            yield Part(array.dtype, array.dims, array.nbytes, result.nbytes, dtype or array.dtype, cut)

    def _with_metadata(self, instruction: Instruction) -> Instruction:
        """The instruction or, where the compiler made it without saying where from, the fusion or wrapper around it."""
        told = instruction
        while not told.op_name and (callers := self._module.callers.get(told.computation)):
            if callers[0].opcode == "while":
                return instruction
            told = callers[0]
        return told if told.op_name else instruction

    def _reduction(self, instruction: Instruction) -> str:
        applied = self._module.computations.get(instruction.attribute("to_apply"))
        if applied is None:
            return ""
        return next((_REDUCTIONS[i.opcode] for i in applied.instructions if i.opcode in _REDUCTIONS), "other")

    def _window_of(self, instruction: Instruction) -> str | None:
        """The body of the windowed product that a permute belongs to: inside its loop, or next to it on the same ring."""
        if instruction.computation in self._windowed:
            return instruction.computation
        for body, (loop, way) in self._windowed.items():
            beside = after if way == "rs" else before
            if loop.computation == instruction.computation and beside(self._module, instruction, loop.name):
                return body
        return None

    def _window(self, permutes: list[Instruction], loop: Loop, way: str) -> Collective:
        module = self._module
        return replace(
            self._ring(permutes, Chain(tuple(permutes), way == "ag")),
            name=loop.name,
            runs=module.runs[loop.computation],
            loop=module.enclosing_loop(loop.computation),
            branch=module.in_branch(loop.computation),
            op_name=loop.op_name,
        )

    def _ring(self, permutes: list[Instruction], ring: Chain) -> Collective:
        groups = connected([link for permute in permutes for link in pairs(permute.attributes)])
        shard: Array = max((a for p in permutes for a in p.arrays[:1]), key=lambda a: a.nbytes)
        whole = shard.nbytes * len(groups[0])
        into, out = (shard.nbytes, whole) if ring.gathers else (whole, shard.nbytes)
        return replace(
            self._single(permutes[0], "collective-permute"),
            kind="all-gather" if ring.gathers else "reduce-scatter",
            form=Form.WINDOWED,
            parts=(Part(shard.dtype, shard.dims, into, out, shard.dtype),),
            reduction="" if ring.gathers else "sum",
            groups=groups,
            pairs=(),
            axes=self._names.of_groups(groups),
            instructions=tuple(p.name for p in permutes),
        )


def _with_part(collective: Collective, index: int, part: Part) -> Collective:
    return replace(collective, parts=(*collective.parts[:index], part, *collective.parts[index + 1 :]))


def _one_of_pieces(pieces: list[Collective]) -> Collective:
    least = min(pieces, key=lambda c: c.runs)
    return replace(least, name=pieces[0].name, form=Form.PIECES, instructions=tuple(c.name for c in pieces))
