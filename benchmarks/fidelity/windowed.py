"""Windowed products: XLA's partitioner gathers an operand, or scatters a result, in steps while a product is computed.

The ring of permutes inside and beside such a loop is one all-gather or reduce-scatter. Short products have no loop left, only
its permutes. Device-local programs have none of this; it is read where XLA's partitioner is what we compare with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from shardwise.hardware.mesh import MeshAxes
from shardwise.verification.collectives import Collective, Part
from shardwise.verification.dataflow import SAME_ELEMENTS, uses
from shardwise.verification.hlo import Instruction, Module
from shardwise.verification.replica_groups import Groups, group_axes

_BODY: Final = re.compile(r"windowed_dot_general_body_(ag|rs)")


def merge_windowed(module: Module, mesh: MeshAxes, collectives: Iterable[Collective]) -> list[Collective]:
    """Returns the collectives with the permutes of every windowed product merged into one, of form ``windowed``."""
    found = {c.name: c for c in collectives}
    permutes = [i for i in module.instructions() if i.name in found and found[i.name].kind == "collective-permute"]
    loops = {i: match.group(1) for i in module.trips if (match := _BODY.search(i.attribute("body")))}
    rings: list[tuple[list[Instruction], bool, Instruction | None]] = []
    loose: dict[str, list[Instruction]] = {}
    members: dict[Instruction, list[Instruction]] = {}
    for permute in permutes:
        loop = next((loop for loop, kind in loops.items() if _belongs(module, permute, loop, kind)), None)
        if loop is not None:
            members.setdefault(loop, []).append(permute)
        elif "dot_general" in permute.op_name:
            loose.setdefault(permute.computation, []).append(permute)
    rings += [(ring, loops[loop] == "ag", loop) for loop, ring in members.items()]
    rings += [(ring, gathers, None) for several in loose.values() for ring, gathers in _chains(module, several)]
    for ring, gathers, loop in rings:
        merged = _merged(mesh, [found[p.name] for p in ring], ring, gathers)
        if loop is not None:
            merged = replace(merged, name=loop.name, runs=module.runs[loop.computation], op_name=loop.op_name)
        for permute in ring:
            found.pop(permute.name)
        found[merged.name] = merged
    return list(found.values())


def _merged(mesh: MeshAxes, several: list[Collective], ring: list[Instruction], gathers: bool) -> Collective:
    groups = connected([pair for c in several for pair in c.pairs])
    shard = max((p.arrays[0] for p in ring), key=lambda a: a.nbytes)
    size, axes = len(groups[0]), group_axes(groups, mesh)
    kind = "all-gather" if gathers else "reduce-scatter"
    sizes = (shard.nbytes, shard.nbytes * size) if gathers else (shard.nbytes * size, shard.nbytes)
    return replace(
        several[0],
        kind=kind,
        form="windowed",
        parts=(Part(kind, shard.dtype, *sizes, shard.dtype),),
        pairs=(),
        axes=axes,
        group_size=size,
        instructions=tuple(p.name for p in ring),
    )


def connected(pairs: Sequence[tuple[int, int]]) -> Groups:
    """Returns the groups of devices that permutes connect.

    >>> connected([(0, 1), (1, 0), (2, 3), (3, 2)])
    ((0, 1), (2, 3))
    """
    return tuple(map(tuple, _components(sorted({device for pair in pairs for device in pair}), pairs)))


def _components(nodes: Iterable[int], edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    home = {node: node for node in nodes}

    def find(node: int) -> int:
        while home[node] != node:
            node = home[node]
        return node

    for a, b in edges:
        home[max(find(a), find(b))] = min(find(a), find(b))
    members: dict[int, list[int]] = {}
    for node in home:
        members.setdefault(find(node), []).append(node)
    return list(members.values())


def _belongs(module: Module, permute: Instruction, loop: Instruction, kind: str) -> bool:
    """Whether a permute is inside a loop, or beside it: before one that gathers, after one that scatters."""
    if permute.computation == loop.attribute("body"):
        return True
    if permute.computation != loop.computation:
        return False
    if kind == "ag":
        users = uses(module, permute, None, (), SAME_ELEMENTS | {"tuple"})
        return any(use is not None and use.name == loop.name for use in users)
    source = module.operand(permute)
    while source is not None and source.opcode in SAME_ELEMENTS | {"convert", "get-tuple-element"}:
        source = module.operand(source)
    return source is not None and source.name == loop.name


def _chains(module: Module, permutes: Sequence[Instruction]) -> list[tuple[list[Instruction], bool]]:
    """Returns the rings of permutes of one computation, and whether each gathers.

    A gathering ring sends one shard on in both directions. A scattering ring adds to what arrives before it sends it on, and
    both directions meet in the op that adds them; its first permutes, of zeros, are shared by equal products.
    """
    origins = [_origin(module, p) for p in permutes]
    results = [_results(module, p) for p in permutes]
    consumers = [
        {u.name for name in names for u in _users(module, p, name) if not u.opcode.startswith("collective-permute")}
        - names
        for p, names in zip(permutes, results, strict=True)
    ]
    like = [(p.arrays, p.op_name, p.attribute("stack_frame_id")) for p in permutes]
    zeros = [origin is not None and origin[0].opcode in ("broadcast", "constant") for origin in origins]
    edges = []
    for a in range(len(permutes)):
        for b, other in enumerate(permutes):
            if a == b or like[a] != like[b] or zeros[a] or zeros[b]:
                continue
            source = module.operand(other)
            while source is not None and source.opcode in SAME_ELEMENTS | {"get-tuple-element"}:
                source = module.operand(source)
            sent_on = source is not None and bool(results[a] & {*source.operands, source.name})
            if sent_on or origins[a] == origins[b] or consumers[a] & consumers[b]:
                edges.append((a, b))
    rings = [ring for ring in _components(range(len(permutes)), edges) if len(ring) > 1]
    for index in (i for i, zero in enumerate(zeros) if zero):
        host = next((ring for ring in rings if like[ring[0]] == like[index]), None)
        if host is not None:
            host.append(index)
    return [([permutes[i] for i in sorted(ring)], len({origins[i] for i in ring}) == 1) for ring in rings]


def _origin(module: Module, permute: Instruction) -> tuple[Instruction, str] | None:
    """Returns the value that the first of a chain of permutes sends, with its index in a tuple."""
    source, element = module.operand(permute), ""
    while source is not None:
        if source.opcode == "get-tuple-element":
            element = source.attribute("index")
        elif source.opcode not in SAME_ELEMENTS and not source.opcode.startswith("collective-permute"):
            return source, element
        source = module.operand(source)
    return None


def _results(module: Module, permute: Instruction) -> frozenset[str]:
    """Returns the names of a permute's result in its computation."""
    names, added = {permute.name}, {permute.name}
    while added:
        users = [user for name in added for user in _users(module, permute, name)]
        added = {user.name for user in users if user.opcode in SAME_ELEMENTS or user.opcode.endswith("-done")} - names
        names |= added
    return frozenset(names)


def _users(module: Module, near: Instruction, name: str) -> Sequence[Instruction]:
    return module.computations[near.computation].users(name)
