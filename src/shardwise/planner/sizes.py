"""What a plan says about sizes that mesh axes do not divide: once for each group of dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.lowering.decisions import Decision
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.padding import block
from shardwise.planner.inquiry import places_text
from shardwise.tactics.strategies import Megatron
from shardwise.tactics.tactic import Context

#: A group, one of its sizes, and an axis.
_Uneven = tuple[int, int, int]


def size_notes(lowered: Lowered) -> tuple[str, ...]:
    """One line for each group that is padded, that is not sharded on an axis as decided, or that no axis can shard."""
    padded = _padded(lowered)
    return (*_padded_lines(lowered, padded), *_refused_lines(lowered, padded), *_replicated_lines(lowered))


def megatron_notes(
    context: Context, megatron: Megatron, taken: Sequence[Decision], said: Sequence[str]
) -> Iterator[str]:
    """One line for each group that Megatron shards nowhere, or not in all arguments, since an axis does not divide it. Groups
    that other notes have ``said`` to be replicated are left out."""
    analysis = context.analysis
    arguments = {a.value for a in analysis.program.arguments}
    for axis, pieces, number, left, replicated, split in megatron.uneven(context, taken):
        sizes = ", ".join(f"{size:,}" for size in left)
        places = [str(p) for p in analysis.groups[number].places if p.value in arguments]
        two = f"; two axes, of {split} and {pieces // split} devices, would shard it" if split else ""
        if replicated is None and not any(note.startswith(places_text(places)) for note in said):
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


def _refused_lines(lowered: Lowered, padded: dict[_Uneven, None]) -> Iterator[str]:
    noted = {(group, axis) for group, _, axis in padded}
    by_group: dict[int, tuple[str, list[str]]] = {}
    for value in (v for v in lowered.program.values if v.path):
        for d, pieces, axis in lowered.stored(value.id)[1]:
            group = lowered.analysis.colors[lowered.structure.colors[value.id][d]].group
            if (group, axis) not in noted:
                noted.add((group, axis))
                first = f"{value.path}[{d}] of size {value.shape[d]} does not divide by "
                by_group.setdefault(group, (first, []))[1].append(f"{pieces} ({lowered.mesh.names[axis]})")
    yield from (text + ", ".join(axes) for text, axes in by_group.values())


def _replicated_lines(lowered: Lowered) -> Iterator[str]:
    mesh, sharded = lowered.mesh, {color for color, _ in lowered.state.order}
    axes = ", ".join(f"{name} {k}" for name, k in zip(mesh.names, mesh.sizes, strict=True) if k > 1)
    for group in lowered.analysis.groups:
        sizes = {n for k in mesh.sizes for n in lowered.structure.padded_sizes(group, k)}
        divided = any(n % k == 0 for n in group.sizes for k in mesh.sizes if k > 1)
        if group.matters and sizes and not divided and sharded.isdisjoint(group.colors):
            size = ", ".join(f"{n:,}" for n in sorted(sizes))
            yield f"{_named(lowered, group.id)} of size {size} is replicated: no mesh axis divides it ({axes})"


def _named(lowered: Lowered, group: int) -> str:
    arguments = {a.value for a in lowered.program.arguments}
    places = lowered.analysis.groups[group].places
    return places_text([str(p) for p in places if p.value in arguments] or [str(p) for p in places])
