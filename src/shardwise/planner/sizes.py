"""What a plan says about sizes that mesh axes do not divide: once for each group of dimensions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from shardwise.ir.program import HEAVY
from shardwise.lowering.decisions import Decision
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.padding import block
from shardwise.planner.inquiry import places_text
from shardwise.tactics.strategies import Megatron
from shardwise.tactics.tactic import Context

#: A group, one of its sizes, and an axis.
_Uneven = tuple[int, int, int]


class _Use(NamedTuple):
    """A factor of a product: its size, the axes that shard it, and the axes that shard some factor of the product."""

    size: int
    axes: Collection[int]
    used: Collection[int]


def size_notes(lowered: Lowered) -> tuple[str, ...]:
    """One line for each group that is padded, that is not sharded on an axis as decided, or that is replicated because mesh
    axes do not divide its size."""
    padded = _padded(lowered)
    refused = _refused(lowered, padded)
    noted = {*refused, *(group for group, _, _ in padded)}
    lines = (*_padded_lines(lowered, padded), *refused.values(), *_replicated_lines(lowered, noted))
    return tuple(dict.fromkeys(lines))


def megatron_notes(
    context: Context, megatron: Megatron, taken: Sequence[Decision], said: Sequence[str]
) -> Iterator[str]:
    """One line for each group that Megatron shards nowhere, or not in all arguments, since an axis does not divide it. Groups
    that other notes have ``said`` to be replicated are left out, unless there is a way to shard them."""
    analysis = context.analysis
    arguments = {a.value for a in analysis.program.arguments}
    for axis, pieces, number, left, replicated, split in megatron.uneven(context, taken):
        sizes = ", ".join(f"{size:,}" for size in left)
        places = [str(p) for p in analysis.groups[number].places if p.value in arguments]
        two = f"; two axes, of {split} and {pieces // split} devices, would shard it" if split else ""
        if replicated is None and (split or not any(note.startswith(places_text(places)) for note in said)):
            yield f"megatron:{axis} does not shard {places_text(places)}: {pieces} devices do not divide {sizes}{two}"
        elif replicated:
            kept = places_text([analysis.program.label(v) for v in replicated])
            yield f"megatron:{axis} leaves {kept} replicated: {pieces} devices do not divide {sizes}"


def _padded(lowered: Lowered) -> dict[_Uneven, None]:
    """What inner values have padded, in program order."""
    mesh, colors, analysis = lowered.mesh, lowered.structure.colors, lowered.analysis
    padded: dict[_Uneven, None] = {}
    for v in lowered.program.values if lowered.state.padded else ():
        for size, axes, color in zip(v.shape, lowered.actual[v.id].dims, colors[v.id], strict=True):
            if axes and size % mesh.pieces(axes):
                padded[analysis.colors[color].group, size, axes[0]] = None
    return padded


def _padded_lines(lowered: Lowered, padded: dict[_Uneven, None]) -> Iterator[str]:
    by_group: dict[int, list[str]] = {}
    for group, size, axis in padded:
        pieces = lowered.mesh.sizes[axis]
        text = f"{size:,} padded to {block(size, pieces) * pieces:,} over {lowered.mesh.names[axis]}"
        by_group.setdefault(group, []).append(text)
    for group, texts in by_group.items():
        yield f"{_named(lowered, group)}: {', '.join(texts)}, inside the program"


def _refused(lowered: Lowered, padded: dict[_Uneven, None]) -> dict[int, str]:
    """By group: a line about the axes that do not divide an argument or output."""
    noted = {(group, axis) for group, _, axis in padded}
    by_group: dict[int, tuple[str, list[str]]] = {}
    for value in (v for v in lowered.program.values if v.path):
        for d, pieces, axis in lowered.stored(value.id)[1]:
            group = lowered.analysis.colors[lowered.structure.colors[value.id][d]].group
            if (group, axis) not in noted:
                noted.add((group, axis))
                first = f"{value.path}[{d}] of size {value.shape[d]} does not divide by "
                by_group.setdefault(group, (first, []))[1].append(f"{pieces} ({lowered.mesh.names[axis]})")
    return {group: text + ", ".join(axes) for group, (text, axes) in by_group.items()}


def _replicated_lines(lowered: Lowered, noted: Collection[int]) -> Iterator[str]:
    """Lines about groups that products compute whole where no axis could shard them: it does not divide their size, or it
    shards all of these products already."""
    mesh, program = lowered.mesh, lowered.program
    every = {a: k for a, k in enumerate(mesh.sizes) if k > 1}
    for group, uses in _uses(lowered).items() if every else ():
        whole = {u.size for u in uses} - {u.size for u in uses if u.axes}
        by_reason: dict[str, list[int]] = {}
        for size in sorted(whole if group not in noted and lowered.analysis.groups[group].matters else ()):
            used = set.intersection(*(set(u.used) for u in uses if u.size == size))
            uneven = {a for a, k in every.items() if size % k}
            # A size below all axes is no loss where all devices share its products, and nobody could change an inner one.
            small = size < min(every.values()) and (used == every.keys() or not lowered.analysis.groups[group].places)
            if small or not uneven or not (every.keys() - uneven) <= used:
                continue
            why = f"no mesh axis divides it ({_axes(lowered, every)})"
            if len(uneven) < len(every):
                others = _axes(lowered, every.keys() - uneven)
                why = f"{_axes(lowered, uneven)} does not divide it, and {others} shards its products over other dimensions"
            by_reason.setdefault(why, []).append(size)
        places = [p for p in lowered.analysis.groups[group].places if p.value in program.argument_of]
        stored = {program.values[p.value].shape[p.dim] for p in places}
        for why, sizes in by_reason.items():
            text = ", ".join(f"{n:,}" for n in sizes)
            if stored.isdisjoint(sizes) and stored:
                yield f"{_named(lowered, group)}, of size {text} inside the program, is replicated there: {why}"
            else:
                yield f"{_named(lowered, group)} of size {text} is replicated: {why}"


def _uses(lowered: Lowered) -> dict[int, list[_Use]]:
    """By group: its factors in products, without those of windows."""
    uses: dict[int, list[_Use]] = {}
    for op in lowered.program.ops:
        windows = {w.factor for w in op.factor_rule.windows} if op.unit in HEAVY else set()
        for f, color in enumerate(lowered.structure.factor_colors[op.id] if op.unit in HEAVY else ()):
            if color >= 0 and f not in windows:
                assigned = lowered.computes[op.id].assigned
                use = _Use(op.factor_rule.factors[f].size, assigned[f], {a for axes in assigned for a in axes})
                uses.setdefault(lowered.analysis.colors[color].group, []).append(use)
    return uses


def _axes(lowered: Lowered, axes: Collection[int]) -> str:
    return ", ".join(f"{lowered.mesh.names[a]} {lowered.mesh.sizes[a]}" for a in sorted(axes))


def _named(lowered: Lowered, group: int) -> str:
    arguments = {a.value for a in lowered.program.arguments}
    places = lowered.analysis.groups[group].places
    return places_text([str(p) for p in places if p.value in arguments] or [str(p) for p in places])
