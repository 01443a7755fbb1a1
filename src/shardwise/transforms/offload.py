"""State of the optimizer in the memory of the host, read and written layer by layer.

Problem. Moments take twice as much memory as parameters, and are used once in a step. Idea. They stay in the memory of the
host. What is computed from them is elementwise, so that it runs in a loop over the first dimension of the arrays, the layers
of a stack: each trip fetches a slice, updates it and sends it back. XLA's TPU compiler streams such slices. Whole arrays it
fetches at the start of the program, where they take as much memory as without the host.

A *group* is the elementwise steps that depend on some of the state, and those before them that nothing else reads. A step that
needs something complete, such as a norm of the update, comes after the loops.

Weak. Arrays that are no stacks (embeddings, layers one by one) stay on the device: what is not stacked has no loop, or one of
many trips. Every group waits until all gradients are there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import jax

from shardwise.capture import jax_internals as internals
from shardwise.capture.leaves import as_host
from shardwise.capture.trace import Traced
from shardwise.errors import VariantError
from shardwise.rules.tables import ELEMENTWISE
from shardwise.transforms.flat import Flat, Step, emit, read_atoms, spliced, values_of

#: The most trips of a loop: a first dimension that is larger counts no layers.
_MOST_TRIPS: Final = 256
#: Arrays of at most this share of the state's bytes are not worth a transfer.
_SMALL: Final = 1e-3
_BROADCAST: Final = "broadcast_in_dim"


def offload(traced: Traced, state: Collection[str]) -> Traced:
    """Returns a traced function with those arguments of the optimizer's ``state`` (paths) that are stacks in the memory of the
    host, and the outputs that replace them."""
    flat = Flat(traced.jaxpr)
    asked = [flat.inputs[k] for k, leaf in enumerate(traced.arguments) if leaf.path in state]
    least = _SMALL * sum(map(flat.nbytes, asked))
    moved = {v for v in asked if 2 <= _length(flat, v) <= _MOST_TRIPS and flat.nbytes(v) > least}
    while True:
        groups, after = _groups(flat, moved)
        replaced = {v: o for group in groups for v, o in _replaced(flat, group).items()}
        if replaced.keys() == moved:
            break
        moved = set(replaced)
    if not moved:
        raise VariantError(
            f"no state of the optimizer of {traced.name} can be in the memory of the host: that needs arrays of at least two "
            "dimensions whose first one counts layers, updated element by element"
        )
    returned = set(replaced.values())

    def run(*arrays: Any) -> list[Any]:
        env = flat.constants | dict(zip(flat.inputs, arrays, strict=True))
        inside = {id(step) for group in groups for step in group.steps}
        before = [step for step in flat.steps if id(step) not in inside | after]
        later = [step for step in flat.steps if id(step) in after]
        wanted = {v for step in (*later, *(s for g in groups for s in g.steps)) for v in step.reads}
        wanted |= set(values_of(flat.outputs))
        env |= emit(before, env, wanted)
        for group in groups:
            env |= group.run(flat, env, returned)
        env |= emit(later, env, wanted)
        return read_atoms(env, flat.outputs)

    types = [as_host(flat.types[v]) if v in moved else internals.plain_shape(flat.types[v]) for v in flat.inputs]
    return replace(traced, jaxpr=spliced(jax.make_jaxpr(run)(*types)))


def _length(flat: Flat, value: int) -> int:
    """Returns the size of the first dimension, 0 where there are fewer than two."""
    shape = internals.shape_of(flat.types[value])
    return shape[0] if len(shape) > 1 else 0


@dataclass(eq=False)
class _Group:
    """Elementwise ``steps`` on arrays of one ``shape``, which read the ``state``; ``results`` are read by others."""

    shape: tuple[int, ...]
    steps: list[Step] = field(default_factory=list)
    state: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)

    @property
    def made(self) -> set[int]:
        return {v for step in self.steps for v in step.results}

    def run(self, flat: Flat, env: Mapping[int, Any], returned: Collection[int]) -> dict[int, Any]:
        """Returns the results, computed in a loop over the first dimension; those that are ``returned`` in the host."""
        made = self.made
        read = list(dict.fromkeys(v for step in self.steps for v in step.reads if v not in made))
        ranks = {v: len(internals.shape_of(flat.types[v])) for v in read}
        stacks = [v for v in read if ranks[v] == len(self.shape) and _length(flat, v) == self.shape[0]]
        others = {v: env[v][0] if ranks[v] == len(self.shape) else env[v] for v in read if v not in stacks}

        def trip(_: None, slices: list[Any]) -> tuple[None, list[Any]]:
            local = others | dict(zip(stacks, slices, strict=True))
            local |= {v: jax.device_put(local[v], jax.memory.Space.Device) for v in self.state}
            for step in self.steps:
                with step.inside_calls():
                    local |= zip(step.results, self._part(step, read_atoms(local, step.operands)), strict=True)
            return None, [
                jax.device_put(local[v], jax.memory.Space.Host) if v in returned else local[v] for v in self.results
            ]

        _, results = jax.lax.scan(trip, None, [env[v] for v in stacks], length=self.shape[0])
        return dict(zip(self.results, results, strict=True))

    def _part(self, step: Step, arrays: list[Any]) -> list[Any]:
        """Returns what a step computes of one slice."""
        if step.name != _BROADCAST:
            return internals.bind(step.equation, arrays)
        with internals.standing_at(step.equation):
            dims = [d - 1 for d in step.equation.params["broadcast_dimensions"]]
            return [jax.lax.broadcast_in_dim(arrays[0], self.shape[1:], dims)]


def _is_elementwise(flat: Flat, step: Step) -> bool:
    """Returns whether a step computes each element of a stack from the same elements of others, or repeats what is smaller."""
    if len(step.results) != 1 or step.equation.effects:
        return False
    shape = internals.shape_of(flat.types[step.results[0]])
    sizes = [internals.shape_of(flat.types[v]) for v in step.reads]
    if step.name == _BROADCAST:
        return 0 not in step.equation.params["broadcast_dimensions"] and len(shape) > 1
    same = all(not s or (len(s) == len(shape) and s[0] in (1, shape[0])) for s in sizes)
    return step.name in ELEMENTWISE and len(shape) > 1 and same


def _groups(flat: Flat, state: set[int]) -> tuple[list[_Group], set[int]]:
    """Returns the groups of some state, and the steps after them (``id``). State that is also read elsewhere is left out."""
    while True:
        inside, after = _reached(flat, state)
        members = set(map(id, inside))
        wrong = {v for v in state for k in flat.users.get(v, ()) if id(flat.steps[k]) not in members}
        wrong |= state & set(values_of(flat.outputs)) | {v for v in state if not flat.users.get(v)}
        if not wrong:
            break
        state = state - wrong
    _absorb(flat, inside, members)
    order = {id(step): k for k, step in enumerate(flat.steps)}
    groups: dict[int, _Group] = {}  # by value that a group makes or reads as state
    for step in sorted(inside, key=lambda step: order[id(step)]):
        shape = internals.shape_of(flat.types[step.results[0]])
        met = list(dict.fromkeys(groups[v] for v in step.reads if v in groups and groups[v].shape == shape))
        group = met[0] if met else _Group(shape)
        for other in met[1:]:
            group.steps += other.steps
            group.state += other.state
        group.steps.append(step)
        group.state += [v for v in dict.fromkeys(step.reads) if v in state and v not in group.state]
        groups |= dict.fromkeys((*group.state, *group.made), group)
    found = list(dict.fromkeys(groups.values()))
    outputs = set(values_of(flat.outputs))
    for group in found:
        group.steps.sort(key=lambda step: order[id(step)])
        own = {id(step) for step in group.steps}
        users = {v: flat.users.get(v, ()) for v in sorted(group.made)}
        group.results = [v for v, us in users.items() if v in outputs or any(id(flat.steps[k]) not in own for k in us)]
    return found, after


def _reached(flat: Flat, state: set[int]) -> tuple[list[Step], set[int]]:
    """Returns the elementwise steps that depend on some state, and (``id``) those that depend on them in another way."""
    inside: list[Step] = []
    after: set[int] = set()
    within, later = set(state), set[int]()
    for step in flat.steps:
        reads = set(step.reads)
        if reads & within and not reads & later and _is_elementwise(flat, step):
            inside.append(step)
            within.update(step.results)
        elif reads & (within | later):
            after.add(id(step))
            later.update(step.results)
    return inside, after


def _absorb(flat: Flat, inside: list[Step], members: set[int]) -> None:
    """Adds the elementwise steps that nothing but these steps reads, so that their results are not stored."""
    outputs, waiting = set(values_of(flat.outputs)), list(inside)
    while waiting:
        for v in waiting.pop().reads:
            step = flat.steps[flat.producer[v]] if v in flat.producer else None
            if step is None or id(step) in members or v in outputs or not _is_elementwise(flat, step):
                continue
            if all(id(flat.steps[k]) in members for k in flat.users[v]):
                members.add(id(step))
                inside.append(step)
                waiting.append(step)


def _replaced(flat: Flat, group: _Group) -> dict[int, int]:
    """Returns the outputs that replace the state of a group: for each array the one of its type that depends on it and on as
    little else as possible."""
    depends: dict[int, set[int]] = {}
    for step in group.steps:
        sources = set[int]().union(*(depends.get(v, {v}) for v in step.reads))
        depends |= dict.fromkeys(step.results, sources)
    outputs = [v for v in group.results if v in values_of(flat.outputs)]
    replaced: dict[int, int] = {}
    for v in group.state:
        like = [
            o for o in outputs if v in depends[o] and o not in replaced.values() and _type(flat, o) == _type(flat, v)
        ]
        if like:
            replaced[v] = min(like, key=lambda o: len(depends[o]))
    return replaced


def _type(flat: Flat, value: int) -> Sequence[Any]:
    aval = flat.types[value]
    return aval.shape, aval.dtype
