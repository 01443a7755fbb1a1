"""The collectives of a compiled program, each counted once, in the terms in which a plan states them.

Problem. One reduce-scatter or all-gather of a plan appears in compiled text in several forms. To compare the two, the forms
have to be recognized:

- ``plain``: the instruction itself. XLA combines several values into one collective; each is a ``Part`` of it;
- ``async``: a ``-start`` and ``-done`` pair, or an ``async-start`` around the collective;
- ``fused``: inside a fusion, such as TPU's ``all-reduce-scatter`` fusions, which are reduce-scatters;
- ``slices``: a ``send`` and a ``recv`` from slice to slice (``slices.py``);
- ``pieces``: TPU's ``async_collective_fusion`` repeats a collective in every fusion that it overlaps with; instructions with
  the same channel and ``chain_id`` are one collective, which runs as often as the least executed one.

Rewrites of XLA:CPU are undone per part. An all-reduce whose result is only sliced into as many pieces as its group has
devices is a reduce-scatter. ``logical_dtype`` is the dtype before widening: XLA:CPU computes products in 32 bits and
communicates their 16-bit operands and results in 32 bits.

Weak. A slice counts as the slice of its device because of its size alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.profile import COLLECTIVES
from shardwise.verification.dataflow import narrow_dtype, slice_count
from shardwise.verification.hlo import Instruction, Module, bits
from shardwise.verification.replica_groups import (
    Axes,
    group_axes,
    is_hop,
    replica_groups,
    source_target_pairs,
    spanned_axes,
)
from shardwise.verification.slices import Slices, kind_across, sent

KINDS: Final = ({*COLLECTIVES} - {"halo"}) | {"ragged-all-to-all", "collective-broadcast"}
_OPCODES: Final = {opcode: kind for kind in KINDS for opcode in (kind, f"{kind}-start")}
_CHAIN: Final = re.compile(r'chain_id="(\w+)"')


@dataclass(frozen=True, slots=True)
class Part:
    """One value that a collective communicates, with the sizes of one device, and the ``kind`` that a plan states for it."""

    kind: str
    dtype: str
    bytes_in: int
    bytes_out: int
    logical_dtype: str

    @property
    def nbytes(self) -> int:
        """The larger of operand and result."""
        return max(self.bytes_in, self.bytes_out)

    @property
    def logical_bytes(self) -> int:
        """The larger of operand and result in the dtype before widening."""
        return self.nbytes * bits(self.logical_dtype) // max(1, bits(self.dtype))


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective. ``axes`` is ``None`` where its groups are no product of mesh axes; ``runs`` counts executions in one
    call of the program; ``pairs`` are the sources and targets of a permute, which may be a ``hop`` of a ring."""

    name: str
    kind: str
    form: str
    parts: tuple[Part, ...]
    pairs: tuple[tuple[int, int], ...]
    axes: Axes | None
    group_size: int
    runs: int
    op_name: str
    instructions: tuple[str, ...]
    hop: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one device and one run, the larger of operand and result of every part."""
        return sum(p.nbytes for p in self.parts)

    @property
    def dtype(self) -> str:
        """The dtype of the largest part."""
        return max(self.parts, key=lambda p: p.nbytes).dtype if self.parts else ""


class Total(NamedTuple):
    """How many values, how many executions, and the bytes of all executions on one device."""

    values: int
    runs: int
    nbytes: int


def totals(collectives: Iterable[Collective]) -> dict[tuple[str, Axes | None], Total]:
    """Returns totals by kind and axes, as a plan states them."""
    sums: dict[tuple[str, Axes | None], Total] = {}
    for c in collectives:
        for part in c.parts:
            values, runs, nbytes = sums.get((part.kind, c.axes), Total(0, 0, 0))
            sums[part.kind, c.axes] = Total(values + 1, runs + c.runs, nbytes + part.logical_bytes * c.runs)
    return sums


def read_collectives(module: Module, mesh: MeshAxes, slices: Slices | None = None) -> tuple[Collective, ...]:
    """Returns the collectives of a program, except those within single devices; ``mesh`` names their groups."""
    chains: dict[tuple[str, ...], list[Collective]] = {}
    for i in module.instructions():
        if slices and (kind := kind_across(i)):
            chains[(i.name,)] = [_read_across(module, mesh, i, kind, slices)]
        elif kind := _OPCODES.get(i.opcode, ""):
            chain = _CHAIN.search(i.attributes) if kind != "collective-permute" else None
            key: tuple[str, ...] = (i.attribute("channel_id"), chain.group(1)) if chain else (i.name,)
            chains.setdefault(key, []).append(_read(module, mesh, i, kind, slices))
    collectives = []
    for key, pieces in chains.items():
        least = min(pieces, key=lambda c: c.runs)
        if len(key) > 1:
            least = replace(least, name=pieces[0].name, form="pieces", instructions=tuple(c.name for c in pieces))
        if least.group_size > 1 or least.pairs:
            collectives.append(least)
    return tuple(collectives)


def _read_across(module: Module, mesh: MeshAxes, received: Instruction, kind: str, slices: Slices) -> Collective:
    """Returns the part of a collective that crosses slices."""
    groups, is_pairs = slices.across(received)
    array, result = sent(module, received).arrays[0], received.arrays[0]
    return Collective(
        name=received.name,
        kind=kind,
        form="slices",
        parts=(Part(kind, array.dtype, array.nbytes, result.nbytes, array.dtype),),
        pairs=tuple((a, b) for a, b in groups) if kind == "collective-permute" else (),
        axes=spanned_axes(groups, mesh) if is_pairs else group_axes(groups, mesh),
        group_size=1 if is_pairs else len(groups[0]),
        runs=module.runs[received.computation],
        op_name=_op_name(module, received),
        instructions=(received.name,),
    )


def _read(module: Module, mesh: MeshAxes, instruction: Instruction, kind: str, slices: Slices | None) -> Collective:
    callers = {caller.opcode for caller in module.callers.get(instruction.computation, ())}
    form = "fused" if "fusion" in callers else "plain"
    if instruction.opcode.endswith("-start") or any(opcode.endswith("-start") for opcode in callers):
        form = "async"
    pairs = source_target_pairs(instruction.attributes)
    groups = replica_groups(instruction.attributes, len(slices.positions[0]) if slices else mesh.devices)
    if slices:
        groups, pairs = slices.everywhere(groups), tuple((a, b) for a, b in slices.everywhere(pairs))
    size = 1 if pairs else len(groups[0])
    parts = tuple(_parts(module, instruction, kind, size))
    if form == "fused" and kind == "all-reduce" and all(p.kind == "reduce-scatter" for p in parts):
        kind = "reduce-scatter"
        parts = tuple(replace(p, bytes_out=p.bytes_in // size) for p in parts)
    return Collective(
        name=instruction.name,
        kind=kind,
        form=form,
        parts=parts,
        pairs=pairs,
        axes=spanned_axes(pairs, mesh) if pairs else group_axes(groups, mesh),
        group_size=size,
        runs=module.runs[instruction.computation],
        op_name=_op_name(module, instruction),
        instructions=(instruction.name,),
        hop=is_hop(pairs, mesh),
    )


def _parts(module: Module, instruction: Instruction, kind: str, group_size: int) -> Iterator[Part]:
    operands = (module.operand(instruction, index) for index in range(len(instruction.operands)))
    inputs = [array for operand in operands if operand is not None for array in operand.arrays]
    results = list(instruction.arrays)
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        # (operands, results, contexts): as many results as operands.
        results = results[len(inputs) : 2 * len(inputs)] or results
    if kind == "ragged-all-to-all":
        inputs, results = inputs[:1], results[:1]
    if kind == "all-to-all" and len(inputs) > 1:
        # One operand for every device of the group: together they are one value.
        dtype = narrow_dtype(module, instruction, 0, False) or inputs[0].dtype
        yield Part(kind, inputs[0].dtype, sum(a.nbytes for a in inputs), sum(a.nbytes for a in results), dtype)
        return
    promoted = "promoted" in instruction.attribute("to_apply")
    for index, (array, result) in enumerate(zip(inputs, results, strict=False)):
        dtype = narrow_dtype(module, instruction, index, promoted) or array.dtype
        element = index if len(inputs) > 1 else None
        scattered = kind == "all-reduce" and slice_count(module, instruction, element) == group_size > 1
        yield Part("reduce-scatter" if scattered else kind, array.dtype, array.nbytes, result.nbytes, dtype)


def _op_name(module: Module, instruction: Instruction) -> str:
    """Returns the JAX name of an instruction or, where it has none, of the fusion or wrapper around it."""
    while not instruction.op_name and (callers := module.callers.get(instruction.computation)):
        if callers[0].opcode == "while":
            return ""
        instruction = callers[0]
    return instruction.op_name
