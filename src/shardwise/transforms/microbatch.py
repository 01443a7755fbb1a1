"""Micro-batches: a step in a loop over parts of the batch, with the same result.

The problem: a step whose activations do not fit. The idea is gradient accumulation, done to the program instead of by its
author: the function is traced at its size and at a part of the batch, the two traces are walked together
(``transforms/paired.py``), and every top-level equation falls into one of three pieces (``transforms/lanes.py``):

- *before*: what does not depend on the batch and is needed inside, computed once;
- *inside*: what carries the batch, in a ``lax.scan`` over the parts, up to the values that are reduced over it, which are
  accumulated (sums, maxima, …, in the type of the value), and outputs that carry it, which are stacked and put back in order;
- *after*: what needs reduced values whole: clipping, the optimizer.

Numbers in the program are those of the whole batch, so that a mean over the batch is the sum of its parts' sums over the whole
count, and the loop's result differs from the original's by rounding alone.

Sums of partial values and widening casts of them stand inside, so that a parameter that is used twice has one accumulator, in
the wider type; other linear ops stand after.

Part ``k`` of ``m`` has the examples ``k, k + m, k + 2m, …``: ``[B] -> [B/m, m]``, the minor dimension scanned over. A batch
that is sharded over devices is so cut without moving anything: every device has its share of every part.

A reduced value that is needed together with the batch, such as the number of tokens in it that count, has a loop of its own
before, if that takes neither products nor loops; else (batch normalisation, contrastive losses) the program is refused.

Weak: the loop before reads the batch once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.capture import jax_internals as internals
from shardwise.capture.trace import Traced
from shardwise.errors import VariantError
from shardwise.transforms.lanes import LATER, WHOLE, Lane, Lanes, State, Way, linear, literal_state
from shardwise.transforms.paired import Atom, Number, Pair, pairs, read_atoms, run_pair


def microbatched(full: Traced, part: Traced, batch: Mapping[str, int], parts: int) -> Traced:
    """A traced function in a loop over parts of its batch.

    Args:
      full, part: the function traced with the whole batch and with one part of it.
      batch: the batch's dimension of every argument that has one, by path.
      parts: how many.
    """
    large = internals.split_jaxpr(full.jaxpr)[0]
    lanes = {k: Lane(batch[leaf.path]) for k, leaf in enumerate(full.leaves) if leaf.path in batch}
    sizes = {internals.shape_of(large.invars[k].aval)[lane.dim] for k, lane in lanes.items()}
    if len(sizes) != 1:
        raise VariantError(f"the arguments of the batch have different numbers of examples: {sorted(sizes)}")
    split = _Split(full.jaxpr, part.jaxpr, lanes, sizes.pop(), parts)
    return replace(full, jaxpr=internals.retrace(split.run, full.jaxpr))


@dataclass(frozen=True, slots=True)
class _Step:
    """One equation at the top: what it reads (values by number) and makes, and on which side of the loop it can stand."""

    pair: Pair
    operands: tuple[Atom, ...]
    results: tuple[int, ...]
    way: Way

    @property
    def reads(self) -> list[int]:
        return [v for v in self.operands if isinstance(v, int)]


@dataclass(slots=True)
class _Program:
    """The top of a program, calls taken apart where the cut goes through them. ``states`` by value."""

    steps: list[_Step] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    types: list[Any] = field(default_factory=list)

    def value(self, state: State, variable: Any) -> int:
        self.states.append(state)
        self.types.append(variable.aval)
        return len(self.states) - 1


class _Split:
    """A program taken apart. ``_looped`` are values that are made inside of the loop, ``_sized`` those made after it that have
    the batch's size, and ``_early`` those that have a loop of their own before, with the value that stands for them then."""

    def __init__(self, full: Any, part: Any, lanes: Mapping[int, Lane], size: int, parts: int):
        self._lanes = Lanes(size, parts)
        self._top = _Program()
        self._looped: set[int] = set()
        self._sized: set[int] = set()
        self._early: dict[int, tuple[int, _Loop]] = {}
        large, self._consts = internals.split_jaxpr(full)
        self._inputs = [
            self._top.value(State(Way.BATCH, lanes[k]) if k in lanes else WHOLE, var)
            for k, var in enumerate(large.invars)
        ]
        self._held = [self._top.value(WHOLE, var) for var in large.constvars]
        outputs = self._walk(full, part, [*self._held, *self._inputs])
        self._main = _Loop(self._top, self._top.steps, outputs, self._inputs, size, parts)

    # The walk.

    def _walk(self, full: Any, part: Any, given: Sequence[Atom]) -> list[Atom]:
        large = internals.split_jaxpr(full)[0]
        env: dict[Any, Atom] = dict(zip((*large.constvars, *large.invars), given, strict=True))

        def read(atom: Any) -> Atom:
            return Number(atom.val) if internals.is_literal(atom) else env[atom]

        for pair in pairs(full, part):
            operands = [read(atom) for atom in pair.full.invars]
            env.update(zip(pair.full.outvars, self._equation(pair, operands), strict=True))
        return [read(atom) for atom in large.outvars]

    def _state(self, atom: Atom) -> State:
        return literal_state(atom.value) if isinstance(atom, Number) else self._top.states[atom]

    def _equation(self, pair: Pair, operands: list[Atom]) -> Sequence[Atom]:
        states = [self._state(atom) for atom in operands]
        ways = {s.way for s in states}
        if Way.BATCH not in ways:
            sized = [internals.shape_of(a.aval) != internals.shape_of(b.aval) for a, b in _both(pair)]
            known = self._known_before(operands) if any(sized) else None
            if known is not None:
                return self._equation(pair, known)
            made = self._add(pair, operands, self._without_batch(pair, states))
            self._sized.update(v for v, differs in zip(made, sized, strict=True) if differs)
            return made
        full, part = (internals.inner_jaxpr(equation) for equation in pair)
        called = full is not None and pair.name not in internals.REMAT
        try:
            if Way.LATER in ways:
                raise VariantError(
                    f"{pair.where} needs a value that is reduced over the whole batch together with the batch"
                )
            found = self._lanes.equation(pair, states)
        except VariantError:
            known = self._known_before(operands)
            if known is not None:
                return self._equation(pair, known)
            if not called:
                raise
            found = []
        if called and (not found or any(s.way is Way.PARTIAL for s in (*states, *found))):
            inner, held = internals.split_jaxpr(full)
            consts = [self._hold(var, array) for var, array in zip(inner.constvars, held, strict=True)]
            return self._walk(full, part, [*consts, *operands])
        return self._add(pair, operands, found)

    def _known_before(self, operands: Sequence[Atom]) -> list[Atom] | None:
        """The operands with those that are reduced over the batch computed in loops before; None where that takes too much, or
        where there are none."""
        reduced = {v for v in operands if isinstance(v, int) and self._state(v).way in (Way.PARTIAL, Way.LATER)}
        early = {v: self._before_all(v) for v in sorted(reduced)}
        if not early or None in early.values():
            return None
        return [v if isinstance(v, Number) else early.get(v) or v for v in operands]

    def _before_all(self, value: int) -> int | None:
        if value not in self._early:
            needed, steps = {value}, []
            for step in reversed(self._top.steps):
                if needed.intersection(step.results):
                    needed.update(step.reads)
                    steps.append(step)
            dear = any(step.way is not Way.WHOLE and _is_dear(step.pair.full) for step in steps)
            if dear or needed & self._sized:
                return None
            loop = _Loop(self._top, steps[::-1], [value], self._inputs, self._lanes.size, self._lanes.parts)
            self._top.states.append(WHOLE)
            self._top.types.append(self._top.types[value])
            self._early[value] = len(self._top.states) - 1, loop
        return self._early[value][0]

    def _without_batch(self, pair: Pair, states: Sequence[State]) -> list[State]:
        """Of what does not read the batch: a loop or call as one."""
        if all(s.way is Way.WHOLE for s in states):
            return self._lanes.equation(pair, states)
        return linear(pair, states) or [LATER] * len(pair.full.outvars)

    def _hold(self, variable: Any, array: Any) -> int:
        self._consts = [*self._consts, array]
        self._held.append(self._top.value(WHOLE, variable))
        return self._held[-1]

    def _add(self, pair: Pair, operands: Sequence[Atom], found: Sequence[State]) -> Sequence[int]:
        states = [self._state(atom) for atom in operands]
        ways = {s.way for s in (*states, *found)}
        reads = {s.way for s in states}
        if Way.LATER in ways:
            way = Way.LATER
        elif Way.BATCH in ways:
            way = Way.BATCH
        else:
            way = Way.PARTIAL if Way.PARTIAL in reads else Way.WHOLE
        if way is Way.WHOLE and self._looped.intersection(v for v in operands if isinstance(v, int)):
            way = Way.BATCH  # the same for every part, but of something that is computed with the batch
        results = tuple(self._top.value(s, v) for s, v in zip(found, pair.full.outvars, strict=True))
        if way is Way.BATCH:
            self._looped.update(results)
        self._top.steps.append(_Step(pair, tuple(operands), results, way))
        return results

    def run(self, *arrays: Any) -> list[Any]:
        """The function on arrays or tracers."""
        env: dict[int, Any] = dict(zip((*self._held, *self._inputs), (*self._consts, *arrays), strict=True))
        for value, loop in self._early.values():
            (env[value],) = loop.run(env)
        return self._main.run(env)


class _Loop:
    """Some of a program's steps in a loop over the parts of the batch, with what stands before it and after."""

    def __init__(
        self,
        top: _Program,
        steps: Sequence[_Step],
        outputs: Sequence[Atom],
        inputs: Sequence[int],
        size: int,
        parts: int,
    ):
        self._top, self._outputs, self._size, self._parts = top, outputs, size, parts
        self._arrange(steps)
        read = {v for step in self._inside for v in step.reads}
        self._entering = [v for v in inputs if top.states[v].way is Way.BATCH and v in read]

    def _arrange(self, steps: Sequence[_Step]) -> None:
        states = self._top.states
        if not any(s.way is Way.BATCH for s in steps):
            raise VariantError("nothing in the function depends on the batch")
        wanted: set[int] = set()
        inside: set[int] = set()
        for k in reversed(range(len(steps))):
            step = steps[k]
            if step.way is Way.BATCH or (
                step.way is Way.PARTIAL and (self._belongs(step) or wanted & set(step.results))
            ):
                inside.add(k)
                if step.way is Way.PARTIAL:
                    wanted.update(v for v in step.reads if states[v].way is Way.PARTIAL)
        needed: set[int] = {v for k in inside for v in steps[k].reads}
        before: set[int] = set()
        for k in reversed(range(len(steps))):
            if steps[k].way is Way.WHOLE and needed & set(steps[k].results):
                before.add(k)
                needed.update(steps[k].reads)
        made = {v for k in inside for v in steps[k].results}
        rest = [k for k in range(len(steps)) if k not in inside and k not in before]
        used = {v for k in rest for v in steps[k].reads} | {v for v in self._outputs if isinstance(v, int)}
        self._before = [steps[k] for k in sorted(before)]
        self._inside = [steps[k] for k in sorted(inside)]
        self._after = [steps[k] for k in rest]
        self._sums = sorted(v for v in made & used if states[v].way is not Way.BATCH)
        self._stacked = sorted(v for v in made & used if states[v].way is Way.BATCH)

    def _belongs(self, step: _Step) -> bool:
        """Does a linear step belong inside: a sum of partial values, or a widening of one?"""
        parts = {v for v in step.reads if self._top.states[v].way is Way.PARTIAL}
        if len(parts) > 1:
            return True
        if step.pair.name != "convert_element_type" or not parts:
            return False
        (before,), (after,) = step.reads, step.results
        return bool(self._top.types[after].dtype.itemsize > self._top.types[before].dtype.itemsize)

    def run(self, given: Mapping[int, Any]) -> list[Any]:
        """The outputs, from the values of inputs and constants."""
        env = dict(given)
        for step in self._before:
            _record(env, step, internals.bind(step.pair.full, read_atoms(env, step.operands)))
        cut = [self._cut(env[v], self._top.states[v].lane) for v in self._entering]

        def body(sums: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            local = {**env, **dict(zip(self._entering, rows, strict=True))}
            for step in self._inside:
                _record(local, step, run_pair(step.pair, read_atoms(local, step.operands)))
            added = [self._reducer(v)[0](s, local[v]) for v, s in zip(self._sums, sums, strict=True)]
            return added, [local[v] for v in self._stacked]

        start = [self._start(v) for v in self._sums]
        sums, rows = jax.lax.scan(body, start, cut, length=self._parts)
        env.update(zip(self._sums, sums, strict=True))
        env.update((v, self._joined(r, self._top.states[v].lane)) for v, r in zip(self._stacked, rows, strict=True))
        for step in self._after:
            _record(env, step, internals.bind(step.pair.full, read_atoms(env, step.operands)))
        return read_atoms(env, self._outputs)

    def _cut(self, array: Any, lane: Lane) -> Any:
        shape, d = array.shape, lane.dim
        return jnp.moveaxis(array.reshape(*shape[:d], shape[d] // self._parts, self._parts, *shape[d + 1 :]), d + 1, 0)

    def _joined(self, rows: Any, lane: Lane) -> Any:
        """Rows of the parts, put back in the batch's order."""
        _, *shape = rows.shape
        d, whole = lane.dim, shape[lane.dim] * self._parts
        split = (lane.outer, self._size // self._parts, -1) if lane.outer > 0 else (1, shape[d], 1)
        rows = rows.reshape(self._parts, *shape[:d], *split, *shape[d + 1 :])
        return jnp.moveaxis(rows, 0, d + 2).reshape(*shape[:d], whole, *shape[d + 1 :])

    def _reducer(self, value: int) -> tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]:
        """How a value leaves the loop; one that is the same for every part as the last one has it."""
        return _REDUCERS[self._top.states[value].reducer]

    def _start(self, value: int) -> Any:
        aval = self._top.types[value]
        return jnp.full(aval.shape, self._reducer(value)[1](aval.dtype), aval.dtype)


def _both(pair: Pair) -> list[tuple[Any, Any]]:
    return list(zip(pair.full.outvars, pair.part.outvars, strict=True))


def _is_dear(equation: Any) -> bool:
    """Products, loops, and whatever contains one."""
    if equation.primitive.name in _DEAR:
        return True
    called = internals.inner_jaxpr(equation)
    return called is not None and any(map(_is_dear, internals.split_jaxpr(called)[0].eqns))


def _limits(dtype: Any) -> tuple[Any, Any]:
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf, jnp.inf
    whole = np.iinfo(dtype)
    return whole.min, whole.max


#: What is not computed twice.
_DEAR: Final = frozenset(
    {"dot_general", "conv_general_dilated", "ragged_dot_general", "scan", "while", "cond", "custom_call"}
)

#: How parts are put together, and what a loop over them starts with.
_REDUCERS: Final[dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]]] = {
    "": (lambda old, new: new, lambda dtype: 0),
    "sum": (jax.lax.add, lambda dtype: 0),
    "max": (jax.lax.max, lambda dtype: _limits(dtype)[0]),
    "min": (jax.lax.min, lambda dtype: _limits(dtype)[1]),
    "or": (jax.lax.bitwise_or, lambda dtype: 0),
    "and": (jax.lax.bitwise_and, lambda dtype: ~np.zeros((), dtype)),
}


def _record(env: dict[int, Any], step: _Step, results: Sequence[Any]) -> None:
    env.update(zip(step.results, results, strict=True))
