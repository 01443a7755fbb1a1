"""Micro-batches: a step as a loop over parts of the batch, with the same result.

Problem. The activations of a step do not fit. Idea. Gradient accumulation as a transformation of the program: the function is
traced with its batch and with a part of it (``trace_pair.py``), and every equation belongs to one of three pieces by the roles
of its values (``batch_roles.py``):

- *before*: what does not depend on the batch and is needed inside, computed once;
- *inside*: what has the batch as a dimension, in a ``lax.scan`` over the parts. Values that are reduced over the batch are
  accumulated (sums, maxima, …, in the dtype of the value); outputs with the batch are stacked and reordered;
- *after*: what needs the reduced values: clipping, the optimizer.

Sums of partial values and widening casts of them are inside, so that a parameter that is used twice has one accumulator, in the
wider dtype; other linear ops are after.

Part ``k`` of ``m`` has the examples ``k, k + m, k + 2m, …``: ``[B] -> [B/m, m]``, the minor dimension scanned over. A batch
that is sharded over devices is split without communication.

A reduced value that is used together with the batch, such as the number of valid tokens, is computed in a separate loop before,
if that needs neither products nor loops; else (batch normalization, contrastive losses) an error is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.capture import jax_internals as internals
from shardwise.capture.trace import Traced
from shardwise.errors import VariantError
from shardwise.transforms.batch_roles import (
    AFTER,
    INVARIANT,
    NEEDS_BOTH,
    BatchAnalysis,
    BatchState,
    Role,
    linear,
    literal_state,
)
from shardwise.transforms.flat import Atom, Flat, Step, read_atoms, values_of
from shardwise.transforms.trace_pair import Pair, with_literals


def microbatched(full: Traced, part: Traced, batch: Collection[str], parts: int) -> Traced:
    """Returns a traced function as a loop over parts of its batch, from traces with the full batch and with one part;
    ``batch``: the paths of the arguments whose first dimension is the batch."""
    split = _Split(full.jaxpr, part.jaxpr, [k for k, leaf in enumerate(full.arguments) if leaf.path in batch], parts)
    return replace(full, jaxpr=internals.retrace(split.run, full.jaxpr))


@dataclass(frozen=True, slots=True)
class _Step:
    """An equation at both sizes; the role determines the piece that it belongs to."""

    full: Step
    part: Any
    role: Role


class _Split:
    """A program in three pieces. ``_looped`` are values of the loop, ``_sized`` those after it of the batch's size, ``_early``
    those that have a separate loop before."""

    def __init__(self, full: Any, part: Any, batch: Collection[int], parts: int):
        self._flat, small = Flat(full), Flat(with_literals(full, part))
        inputs, constants, types = self._flat.inputs, self._flat.constants, self._flat.types
        sizes = {internals.shape_of(types[inputs[k]])[0] for k in batch}
        if len(sizes) != 1:
            raise VariantError(f"the arguments of the batch have different numbers of examples: {sorted(sizes)}")
        self._analysis = BatchAnalysis(sizes.pop(), parts)
        self._states = dict.fromkeys((*inputs, *constants), INVARIANT)
        self._states |= {inputs[k]: BatchState(Role.BATCH, 0) for k in batch}
        self._steps: list[_Step] = []
        self._looped: set[int] = set()
        self._sized: set[int] = set()
        self._early: dict[int, tuple[int, _Loop]] = {}
        for step, other in zip(self._flat.steps, small.steps, strict=True):
            self._add(step, other.equation)
        self._main = self._loop(self._steps, self._flat.outputs)

    def _loop(self, steps: Sequence[_Step], outputs: Sequence[Atom]) -> _Loop:
        return _Loop(self._flat, self._states, steps, outputs, self._analysis)

    def _state(self, atom: Atom) -> BatchState:
        return self._states[atom] if isinstance(atom, int) else literal_state(atom.val)

    def _add(self, step: Step, part: Any) -> None:
        """Adds an equation with its roles; reduced operands that would be needed inside are computed in loops before."""
        pair = Pair(step.equation, part)
        states = [self._state(atom) for atom in step.operands]
        sized = [v for v, a, b in zip(step.results, pair.full.outvars, part.outvars, strict=True) if _differ(a, b)]
        reads_batch = any(s.role is Role.BATCH for s in states)
        early = self._computed_before(step) if sized and not reads_batch else None
        if early is None:
            try:
                result_states = self._result_states(pair, states)
            except VariantError:
                early = self._computed_before(step) if reads_batch else None
                if early is None:
                    raise
        if early is not None:
            return self._add(early, part)
        if not reads_batch:
            self._sized.update(sized)
        self._states |= zip(step.results, result_states, strict=True)
        role = self._role(step, [*states, *result_states])
        if role is Role.BATCH:
            self._looped.update(step.results)
        self._steps.append(_Step(step, part, role))

    def _result_states(self, pair: Pair, states: Sequence[BatchState]) -> list[BatchState]:
        roles = {s.role for s in states}
        if Role.BATCH in roles and Role.AFTER in roles:
            raise VariantError(f"{pair.where} {NEEDS_BOTH}")
        if Role.BATCH in roles or roles <= {Role.INVARIANT}:
            return self._analysis.equation(pair, states)
        return linear(pair, states) or [AFTER] * len(pair.full.outvars)

    def _role(self, step: Step, states: Sequence[BatchState]) -> Role:
        roles = {s.role for s in states}
        if Role.AFTER in roles:
            return Role.AFTER
        # What is the same for every part may be computed in the loop.
        if Role.BATCH in roles or (Role.PARTIAL not in roles and self._looped.intersection(step.reads)):
            return Role.BATCH
        return Role.PARTIAL if Role.PARTIAL in roles else Role.INVARIANT

    def _computed_before(self, step: Step) -> Step | None:
        """Returns the step with reduced operands computed in loops before; None where that is not possible or expensive."""
        reduced = {v for v in step.reads if self._states[v].role in (Role.PARTIAL, Role.AFTER)}
        early = {v: self._early_value(v) for v in sorted(reduced)}
        if not early or None in early.values():
            return None
        return replace(step, operands=tuple(early.get(v, v) if isinstance(v, int) else v for v in step.operands))

    def _early_value(self, value: int) -> int | None:
        if value not in self._early:
            needed, steps = {value}, []
            for step in reversed(self._steps):
                if needed.intersection(step.full.results):
                    needed.update(step.full.reads)
                    steps.append(step)
            expensive = any(step.role is not Role.INVARIANT and _is_expensive(step.full.equation) for step in steps)
            if expensive or needed & self._sized:
                return None
            number = len(self._flat.types)
            self._flat.types.append(self._flat.types[value])
            self._states[number] = INVARIANT
            self._early[value] = number, self._loop(steps[::-1], [value])
        return self._early[value][0]

    def run(self, *arrays: Any) -> list[Any]:
        """Returns the outputs of the function on arrays or tracers."""
        env = self._flat.constants | dict(zip(self._flat.inputs, arrays, strict=True))
        for value, loop in self._early.values():
            (env[value],) = loop.run(env)
        return self._main.run(env)


class _Loop:
    """Some of a program's steps in a loop over the parts of the batch, with the pieces before and after."""

    def __init__(
        self,
        flat: Flat,
        states: Mapping[int, BatchState],
        steps: Sequence[_Step],
        outputs: Sequence[Atom],
        analysis: BatchAnalysis,
    ):
        self._types, self._states, self._outputs = flat.types, states, outputs
        self._size, self._parts = analysis.size, analysis.parts
        self._arrange(steps)
        read = {v for step in self._inside for v in step.full.reads}
        self._entering = [v for v in flat.inputs if states[v].role is Role.BATCH and v in read]

    def _arrange(self, steps: Sequence[_Step]) -> None:
        if not any(s.role is Role.BATCH for s in steps):
            raise VariantError("nothing in the function depends on the batch")
        wanted: set[int] = set()
        needed: set[int] = set()
        self._inside: list[_Step] = []
        self._before: list[_Step] = []
        for step in reversed(steps):
            partial = step.role is Role.PARTIAL and (self._belongs(step) or wanted.intersection(step.full.results))
            if step.role is Role.BATCH or partial:
                self._inside.insert(0, step)
                needed.update(step.full.reads)
                if partial:
                    wanted.update(self._partial(step))
        for step in reversed(steps):
            if step.role is Role.INVARIANT and needed.intersection(step.full.results):
                self._before.insert(0, step)
                needed.update(step.full.reads)
        placed = {id(step) for step in (*self._inside, *self._before)}
        self._after = [step for step in steps if id(step) not in placed]
        used = {v for step in self._after for v in step.full.reads} | set(values_of(self._outputs))
        leaving = sorted(used.intersection(v for step in self._inside for v in step.full.results))
        self._sums = [v for v in leaving if self._states[v].role is not Role.BATCH]
        self._stacked = [v for v in leaving if self._states[v].role is Role.BATCH]

    def _partial(self, step: _Step) -> set[int]:
        return {v for v in step.full.reads if self._states[v].role is Role.PARTIAL}

    def _belongs(self, step: _Step) -> bool:
        """Returns whether a linear step belongs inside: a sum of partial values, or a widening of one."""
        partial = self._partial(step)
        if len(partial) != 1 or step.full.name != "convert_element_type":
            return len(partial) > 1
        before, after = (self._types[v].dtype.itemsize for v in (*partial, *step.full.results))
        return bool(after > before)

    def run(self, values: Mapping[int, Any]) -> list[Any]:
        """Returns the outputs, from the values of inputs and constants."""
        env = dict(values)
        _run(self._before, env)
        cut = [self._cut(env[v], self._states[v].dim) for v in self._entering]

        def body(sums: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            local = env | dict(zip(self._entering, rows, strict=True))
            _run(self._inside, local, part=True)
            added = [self._reducer(v)[0](s, local[v]) for v, s in zip(self._sums, sums, strict=True)]
            return added, [local[v] for v in self._stacked]

        sums, rows = jax.lax.scan(body, [self._start(v) for v in self._sums], cut, length=self._parts)
        env.update(zip(self._sums, sums, strict=True))
        env.update((v, self._joined(r, self._states[v])) for v, r in zip(self._stacked, rows, strict=True))
        _run(self._after, env)
        return read_atoms(env, self._outputs)

    def _cut(self, array: Any, d: int) -> Any:
        shape = array.shape
        return jnp.moveaxis(array.reshape(*shape[:d], shape[d] // self._parts, self._parts, *shape[d + 1 :]), d + 1, 0)

    def _joined(self, rows: Any, state: BatchState) -> Any:
        """Returns the rows of the parts in the batch's order."""
        _, *shape = rows.shape
        d, full = state.dim, shape[state.dim] * self._parts
        split = (state.outer, self._size // self._parts, -1) if state.outer > 0 else (1, shape[d], 1)
        rows = rows.reshape(self._parts, *shape[:d], *split, *shape[d + 1 :])
        return jnp.moveaxis(rows, 0, d + 2).reshape(*shape[:d], full, *shape[d + 1 :])

    def _reducer(self, value: int) -> tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]:
        """Returns how a value is accumulated; one that is the same for every part is that of the last."""
        return _REDUCERS[self._states[value].reducer]

    def _start(self, value: int) -> Any:
        aval = self._types[value]
        return jnp.full(aval.shape, self._reducer(value)[1](aval.dtype), aval.dtype)


def _run(steps: Sequence[_Step], env: dict[int, Any], part: bool = False) -> None:
    for step in steps:
        results = step.full.run(env, step.part if part else None)
        env.update(zip(step.full.results, results, strict=True))


def _differ(full: Any, part: Any) -> bool:
    return internals.shape_of(full.aval) != internals.shape_of(part.aval)


def _is_expensive(equation: Any) -> bool:
    """Returns whether an equation is a product or a loop, or contains one."""
    if equation.primitive.name in _EXPENSIVE:
        return True
    called = internals.inner_jaxpr(equation)
    return called is not None and any(map(_is_expensive, internals.split_jaxpr(called)[0].eqns))


def _limits(dtype: Any) -> tuple[Any, Any]:
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf, jnp.inf
    limits = np.iinfo(dtype)
    return limits.min, limits.max


#: Primitives that are not computed twice.
_EXPENSIVE: Final = frozenset(
    {"dot_general", "conv_general_dilated", "ragged_dot_general", "scan", "while", "cond", "custom_call"}
)

#: How parts are accumulated, and the initial value.
_REDUCERS: Final[dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]]] = {
    "": (lambda old, new: new, lambda dtype: 0),
    "sum": (jax.lax.add, lambda dtype: 0),
    "max": (jax.lax.max, lambda dtype: _limits(dtype)[0]),
    "min": (jax.lax.min, lambda dtype: _limits(dtype)[1]),
    "or": (jax.lax.bitwise_or, lambda dtype: 0),
    "and": (jax.lax.bitwise_and, lambda dtype: ~np.zeros((), dtype)),
}
