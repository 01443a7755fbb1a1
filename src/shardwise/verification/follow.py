"""Following values through compiled text: where an operand comes from, what becomes of a result.

Both directions pass through ops that hand on the same elements, into fusions and out of them again. A place is an
instruction together with the fusions around it, innermost last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from shardwise.verification.hlo import Module
from shardwise.verification.instructions import Instruction, bits

Fusions = tuple[Instruction, ...]

#: Ops that hand on the same elements, perhaps in another layout.
_SAME: Final = frozenset({"bitcast", "copy", "reshape", "transpose", "copy-start", "copy-done", "optimization-barrier"})
_SAME_OR_CONVERTED: Final = _SAME | {"convert"}


def slices(module: Module, collective: Instruction, part: int, variadic: bool) -> int:
    """Into how many slices a result is cut before anything else uses it; 1 where something uses the whole."""
    whole = math.prod(collective.arrays[part if variadic else 0].dims)
    cuts = set[int]()
    for use in _uses(module, collective, part if variadic else None, (), _SAME_OR_CONVERTED):
        if use is None or use.opcode != "dynamic-slice":
            return 1
        piece = math.prod(use.arrays[0].dims)
        if piece == 0 or whole % piece:
            return 1
        cuts.add(whole // piece)
    return cuts.pop() if len(cuts) == 1 else 1


def narrow_dtype(module: Module, collective: Instruction, part: int, promoted: bool) -> str:
    """The narrower type that an operand was widened from or, in a promoted reduction, that its result returns to."""
    operand = module.operand(collective, part)
    if operand is None or len(operand.arrays) != 1:
        return ""
    width = bits(operand.arrays[0].dtype)
    dtype = _widened_from(module, operand, ())
    if dtype and bits(dtype) < width:
        return dtype
    if promoted:
        element = part if len(collective.operands) > 1 else None
        uses = list(_uses(module, collective, element, (), _SAME))
        found = {"" if use is None or use.opcode != "convert" else use.arrays[0].dtype for use in uses}
        if len(found) == 1 and (dtype := found.pop()) and bits(dtype) < width:
            return dtype
    return ""


def completes(module: Module, collective: Instruction, part: int) -> tuple[Instruction, int] | None:
    """The collective, and its part, whose whole result only serves as this operand."""
    value, element = module.operand(collective, part), 0
    fusions: Fusions = ()
    while value is not None and value.opcode not in ("all-reduce", "all-reduce-done"):
        if value.opcode in _SAME_OR_CONVERTED:
            value = module.operand(value)
        elif value.opcode == "fusion":
            fusions = (*fusions, value)
            value = module.computations[value.attribute("calls")].root
        elif value.opcode == "parameter" and fusions:
            value, fusions = module.operand(fusions[-1], int(value.arguments)), fusions[:-1]
        elif value.opcode == "get-tuple-element" and not fusions:
            element = int(value.attribute("index"))
            value = module.operand(value)
        else:
            return None
    if value is not None and value.opcode.endswith("-done"):
        value = module.operand(value)
    if value is None or fusions:
        return None
    uses = list(_uses(module, value, element if len(value.operands) > 1 else None, (), _SAME_OR_CONVERTED))
    only = all(use is not None and use.name == collective.name for use in uses)
    return (value, element) if only else None


def whole_sum(module: Module, value: Instruction, element: int | None) -> Instruction | None:
    """The last of the sums that a value, or an element of it, goes into and nowhere else."""
    total = None
    while True:
        uses = list(_uses(module, value, element, _around(module, value), _SAME_OR_CONVERTED))
        if len(uses) != 1 or uses[0] is None or uses[0].opcode != "add":
            return total
        total = value = uses[0]
        element = None


def before(module: Module, instruction: Instruction, loop: str) -> bool:
    """Whether an instruction's result goes into the state that a loop starts with."""
    uses = list(_uses(module, instruction, None, (), _SAME | {"tuple"}))
    return any(use is not None and use.name == loop for use in uses)


def after(module: Module, instruction: Instruction, loop: str) -> bool:
    """Whether an instruction's operand is what a loop left behind."""
    source = module.operand(instruction)
    while source is not None and source.opcode in _SAME_OR_CONVERTED | {"get-tuple-element"}:
        source = module.operand(source)
    return source is not None and source.name == loop


def _around(module: Module, value: Instruction) -> Fusions:
    """The fusions around an instruction, innermost last."""
    callers = module.callers.get(value.computation, ())
    if len(callers) != 1 or callers[0].opcode != "fusion":
        return ()
    return (*_around(module, callers[0]), callers[0])


def _uses(
    module: Module, value: Instruction, element: int | None, fusions: Fusions, passing: frozenset[str]
) -> Iterator[Instruction | None]:
    """The first uses that do more than hand a value on; ``None`` for a use that cannot be followed."""
    users = list(module.computations[value.computation].users(value.name))
    if value.root:
        if fusions:
            yield from _uses(module, fusions[-1], element, fusions[:-1], passing)
        else:
            yield None
    for user in users:
        if element is not None and not user.opcode.endswith("-done"):
            if user.opcode != "get-tuple-element":
                yield None
            elif int(user.attribute("index")) == element:
                yield from _uses(module, user, None, fusions, passing)
        elif user.opcode in passing or user.opcode.endswith("-done"):
            yield from _uses(module, user, element, fusions, passing)
        elif user.opcode == "fusion":
            called = module.computations[user.attribute("calls")]
            for position in (p for p, operand in enumerate(user.operands) if operand == value.name):
                parameter = called.parameter(position)
                yield from _uses(module, parameter, None, (*fusions, user), passing) if parameter else (None,)
        elif user.opcode == "tuple" and user.root and fusions:
            for position in (p for p, operand in enumerate(user.operands) if operand == value.name):
                yield from _uses(module, fusions[-1], position, fusions[:-1], passing)
        elif user.opcode == "dynamic-slice" and user.operands[0] != value.name:
            yield None
        else:
            yield user


def _widened_from(module: Module, value: Instruction | None, fusions: Fusions) -> str:
    """The type before the conversion that a value comes straight out of, ``""`` where there is none."""
    while value is not None:
        if value.opcode == "convert":
            source = module.operand(value)
            return source.arrays[0].dtype if source is not None else ""
        if value.opcode in _SAME or value.opcode in ("dynamic-slice", "slice"):
            value = module.operand(value)
        elif value.opcode == "fusion":
            fusions = (*fusions, value)
            value = module.computations[value.attribute("calls")].root
        elif value.opcode == "parameter" and fusions:
            value, fusions = module.operand(fusions[-1], int(value.arguments)), fusions[:-1]
        elif value.opcode == "get-tuple-element":
            value, fusions = _element(module, value, fusions)
        else:
            return ""
    return ""


def _element(module: Module, value: Instruction, fusions: Fusions) -> tuple[Instruction | None, Fusions]:
    """Where an element of a tuple was made: in the tuple, in a fusion, or before the loop whose state it is."""
    source, index = module.operand(value), int(value.attribute("index"))
    if source is not None and source.opcode == "fusion":
        root = module.computations[source.attribute("calls")].root
        return (module.operand(root, index) if root.opcode == "tuple" else None), (*fusions, source)
    if source is not None and source.opcode == "parameter":
        callers = module.callers.get(value.computation, ())
        source = module.operand(callers[0]) if callers and callers[0].opcode == "while" else None
        fusions = ()
    return (module.operand(source, index) if source is not None and source.opcode == "tuple" else None), fusions


@dataclass(frozen=True, slots=True)
class Chain:
    """Permutes that together are one windowed product without a loop around them."""

    permutes: tuple[Instruction, ...]
    gathers: bool


def chains(module: Module, permutes: Sequence[Instruction]) -> list[Chain]:
    """Rings of permutes of one computation that belong together: short windowed products have no loop left.

    A gathering ring passes one shard on in both directions. A scattering ring adds to what arrives before it passes it on,
    and both directions meet in the op that adds them up; its first permutes, of zeros, are shared by equal products.
    """
    home = list(range(len(permutes)))

    def find(index: int) -> int:
        while home[index] != index:
            index = home[index]
        return index

    origins = [_origin(module, p) for p in permutes]
    results = [_results(module, p) for p in permutes]
    consumers = [
        {u.name for name in names for u in _users(module, p, name) if not u.opcode.startswith("collective-permute")}
        - names
        for p, names in zip(permutes, results, strict=True)
    ]
    like = [(p.arrays, p.op_name, module.source(p)) for p in permutes]
    empty = [origin is not None and origin[0].opcode in ("broadcast", "constant") for origin in origins]
    for a in range(len(permutes)):
        for b, other in enumerate(permutes):
            if a == b or like[a] != like[b] or empty[a] or empty[b]:
                continue
            made = module.operand(other)
            while made is not None and made.opcode in _SAME | {"get-tuple-element"}:
                made = module.operand(made)
            passed_on = made is not None and bool(results[a] & {*made.operands, made.name})
            if passed_on or origins[a] == origins[b] or consumers[a] & consumers[b]:
                home[max(find(a), find(b))] = min(find(a), find(b))
    members: dict[int, list[int]] = {}
    for index in range(len(permutes)):
        members.setdefault(find(index), []).append(index)
    rings = {key: found for key, found in members.items() if len(found) > 1}
    for index in (i for i, nothing in enumerate(empty) if nothing):
        host = next((found for key, found in rings.items() if like[key] == like[index]), None)
        if host is not None:
            host.append(index)
    return [
        Chain(tuple(permutes[i] for i in sorted(found)), len({origins[i] for i in found}) == 1)
        for found in rings.values()
    ]


def _origin(module: Module, permute: Instruction) -> tuple[Instruction, str] | None:
    """The value that a permute passes on, before it and the permutes before it; with the element of a tuple it is."""
    source, element = module.operand(permute), ""
    while source is not None:
        if source.opcode == "get-tuple-element":
            element = source.attribute("index")
        elif source.opcode not in _SAME and not source.opcode.startswith("collective-permute"):
            return source, element
        source = module.operand(source)
    return None


def _results(module: Module, permute: Instruction) -> frozenset[str]:
    """Names under which a permute's result is known in its computation."""
    names, added = {permute.name}, {permute.name}
    while added:
        users = [user for name in added for user in _users(module, permute, name)]
        added = {user.name for user in users if user.opcode in _SAME or user.opcode.endswith("-done")} - names
        names |= added
    return frozenset(names)


def _users(module: Module, near: Instruction, name: str) -> tuple[Instruction, ...]:
    return module.computations[near.computation].users(name)
