"""Micro-batches: a step as a loop over parts of the batch, with the same result.

Problem. The activations of a step do not fit. Idea. Gradient accumulation as a transformation of the program: the function is
traced with its batch and with a part of it, the two traces are walked together (``transforms/trace_pair.py``), and every
top-level equation belongs to one of three pieces (``transforms/batch_roles.py``):

- *before*: what does not depend on the batch and is needed inside, computed once;
- *inside*: what has the batch as a dimension, in a ``lax.scan`` over the parts, up to the values that are reduced over it,
  which are accumulated (sums, maxima, …, in the dtype of the value), and outputs with the batch, which are stacked and
  reordered;
- *after*: what needs the reduced values: clipping, the optimizer.

Literals are those of the full batch, so that a mean over the batch is the sum of its parts' sums over the full count, and the
result differs from the original by rounding alone.

Sums of partial values and widening casts of them are inside, so that a parameter that is used twice has one accumulator, in the
wider dtype; other linear ops are after.

Part ``k`` of ``m`` has the examples ``k, k + m, k + 2m, …``: ``[B] -> [B/m, m]``, the minor dimension scanned over. A batch
that is sharded over devices is split without communication: every device has its share of every part.

A reduced value that is used together with the batch, such as the number of valid tokens, is computed in a separate loop before,
if that needs neither products nor loops; else (batch normalization, contrastive losses) an error is raised.

Weak. The loop before reads the batch once more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.capture import jax_internals as internals
from shardwise.capture.trace import Traced
from shardwise.errors import VariantError
from shardwise.transforms.batch_roles import AFTER, INVARIANT, BatchAnalysis, BatchState, Role, linear, literal_state
from shardwise.transforms.trace_pair import Atom, Literal, Pair, pairs, read_atoms, run_pair


def microbatched(full: Traced, part: Traced, batch: Collection[str], parts: int) -> Traced:
    """Returns a traced function as a loop over parts of its batch.

    Args:
      full, part: the function traced with the full batch and with one part of it.
      batch: the paths of the arguments whose first dimension is the batch.
      parts: the number of parts.
    """
    large = internals.split_jaxpr(full.jaxpr)[0]
    inputs = [k for k, leaf in enumerate(full.arguments) if leaf.path in batch]
    sizes = {internals.shape_of(large.invars[k].aval)[0] for k in inputs}
    if len(sizes) != 1:
        raise VariantError(f"the arguments of the batch have different numbers of examples: {sorted(sizes)}")
    split = _Split(full.jaxpr, part.jaxpr, inputs, sizes.pop(), parts)
    return replace(full, jaxpr=internals.retrace(split.run, full.jaxpr))


@dataclass(frozen=True, slots=True)
class _Step:
    """A top-level equation: its operands and results (values by number), and the role that determines its piece."""

    pair: Pair
    operands: tuple[Atom, ...]
    results: tuple[int, ...]
    role: Role

    @property
    def reads(self) -> list[int]:
        return [v for v in self.operands if isinstance(v, int)]


@dataclass(slots=True)
class _Program:
    """The top level of a program, with calls inlined that belong to several pieces. ``states`` and ``types`` are by value."""

    steps: list[_Step] = field(default_factory=list)
    states: list[BatchState] = field(default_factory=list)
    types: list[Any] = field(default_factory=list)

    def value(self, state: BatchState, variable: Any) -> int:
        self.states.append(state)
        self.types.append(variable.aval)
        return len(self.states) - 1


class _Split:
    """A program in three pieces. ``_looped`` are values of the loop, ``_sized`` those after it that have the batch's size, and
    ``_early`` those that have a separate loop before, with the value that replaces them."""

    def __init__(self, full: Any, part: Any, batch: Collection[int], size: int, parts: int):
        self._analysis = BatchAnalysis(size, parts)
        self._top = _Program()
        self._looped: set[int] = set()
        self._sized: set[int] = set()
        self._early: dict[int, tuple[int, _Loop]] = {}
        large, self._consts = internals.split_jaxpr(full)
        self._inputs = [
            self._top.value(BatchState(Role.BATCH, 0) if k in batch else INVARIANT, var)
            for k, var in enumerate(large.invars)
        ]
        self._constants = [self._top.value(INVARIANT, var) for var in large.constvars]
        outputs = self._walk(full, part, [*self._constants, *self._inputs])
        self._main = _Loop(self._top, self._top.steps, outputs, self._inputs, size, parts)

    def _walk(self, full: Any, part: Any, args: Sequence[Atom]) -> list[Atom]:
        large = internals.split_jaxpr(full)[0]
        env: dict[Any, Atom] = dict(zip((*large.constvars, *large.invars), args, strict=True))

        def read(atom: Any) -> Atom:
            return Literal(atom.val) if internals.is_literal(atom) else env[atom]

        for pair in pairs(full, part):
            operands = [read(atom) for atom in pair.full.invars]
            env.update(zip(pair.full.outvars, self._equation(pair, operands), strict=True))
        return [read(atom) for atom in large.outvars]

    def _state(self, atom: Atom) -> BatchState:
        return literal_state(atom.value) if isinstance(atom, Literal) else self._top.states[atom]

    def _equation(self, pair: Pair, operands: list[Atom]) -> Sequence[Atom]:
        states = [self._state(atom) for atom in operands]
        roles = {s.role for s in states}
        if Role.BATCH not in roles:
            sized = [internals.shape_of(a.aval) != internals.shape_of(b.aval) for a, b in _both(pair)]
            early = self._computed_before(operands) if any(sized) else None
            if early is not None:
                return self._equation(pair, early)
            results = self._add(pair, operands, self._without_batch(pair, states))
            self._sized.update(v for v, differs in zip(results, sized, strict=True) if differs)
            return results
        full, part = (internals.inner_jaxpr(equation) for equation in pair)
        called = full is not None and pair.name not in internals.REMAT
        try:
            if Role.AFTER in roles:
                raise VariantError(
                    f"{pair.where} needs a value that is reduced over the whole batch together with the batch"
                )
            result_states = self._analysis.equation(pair, states)
        except VariantError:
            early = self._computed_before(operands)
            if early is not None:
                return self._equation(pair, early)
            if not called:
                raise
            result_states = []
        if called and (not result_states or any(s.role is Role.PARTIAL for s in (*states, *result_states))):
            inner, arrays = internals.split_jaxpr(full)
            consts = [self._constant(var, array) for var, array in zip(inner.constvars, arrays, strict=True)]
            return self._walk(full, part, [*consts, *operands])
        return self._add(pair, operands, result_states)

    def _computed_before(self, operands: Sequence[Atom]) -> list[Atom] | None:
        """Returns the operands with those that are reduced over the batch computed in loops before; None where that is too
        expensive, or where there are none."""
        reduced = {v for v in operands if isinstance(v, int) and self._state(v).role in (Role.PARTIAL, Role.AFTER)}
        early = {v: self._early_value(v) for v in sorted(reduced)}
        if not early or None in early.values():
            return None
        return [v if isinstance(v, Literal) else early.get(v) or v for v in operands]

    def _early_value(self, value: int) -> int | None:
        if value not in self._early:
            needed, steps = {value}, []
            for step in reversed(self._top.steps):
                if needed.intersection(step.results):
                    needed.update(step.reads)
                    steps.append(step)
            expensive = any(step.role is not Role.INVARIANT and _is_expensive(step.pair.full) for step in steps)
            if expensive or needed & self._sized:
                return None
            loop = _Loop(self._top, steps[::-1], [value], self._inputs, self._analysis.size, self._analysis.parts)
            self._top.states.append(INVARIANT)
            self._top.types.append(self._top.types[value])
            self._early[value] = len(self._top.states) - 1, loop
        return self._early[value][0]

    def _without_batch(self, pair: Pair, states: Sequence[BatchState]) -> list[BatchState]:
        """Returns the roles of results that do not read the batch, of a loop or call as one."""
        if all(s.role is Role.INVARIANT for s in states):
            return self._analysis.equation(pair, states)
        return linear(pair, states) or [AFTER] * len(pair.full.outvars)

    def _constant(self, variable: Any, array: Any) -> int:
        self._consts = [*self._consts, array]
        self._constants.append(self._top.value(INVARIANT, variable))
        return self._constants[-1]

    def _add(self, pair: Pair, operands: Sequence[Atom], result_states: Sequence[BatchState]) -> Sequence[int]:
        states = [self._state(atom) for atom in operands]
        roles = {s.role for s in (*states, *result_states)}
        reads = {s.role for s in states}
        if Role.AFTER in roles:
            role = Role.AFTER
        elif Role.BATCH in roles:
            role = Role.BATCH
        else:
            role = Role.PARTIAL if Role.PARTIAL in reads else Role.INVARIANT
        if role is Role.INVARIANT and self._looped.intersection(v for v in operands if isinstance(v, int)):
            role = Role.BATCH  # the same for every part, but computed in the loop
        results = tuple(self._top.value(s, v) for s, v in zip(result_states, pair.full.outvars, strict=True))
        if role is Role.BATCH:
            self._looped.update(results)
        self._top.steps.append(_Step(pair, tuple(operands), results, role))
        return results

    def run(self, *arrays: Any) -> list[Any]:
        """Returns the outputs of the function on arrays or tracers."""
        env: dict[int, Any] = dict(zip((*self._constants, *self._inputs), (*self._consts, *arrays), strict=True))
        for value, loop in self._early.values():
            (env[value],) = loop.run(env)
        return self._main.run(env)


class _Loop:
    """Some of a program's steps in a loop over the parts of the batch, with the pieces before and after."""

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
        self._entering = [v for v in inputs if top.states[v].role is Role.BATCH and v in read]

    def _arrange(self, steps: Sequence[_Step]) -> None:
        states = self._top.states
        if not any(s.role is Role.BATCH for s in steps):
            raise VariantError("nothing in the function depends on the batch")
        wanted: set[int] = set()
        inside: set[int] = set()
        for k in reversed(range(len(steps))):
            step = steps[k]
            if step.role is Role.BATCH or (
                step.role is Role.PARTIAL and (self._belongs(step) or wanted & set(step.results))
            ):
                inside.add(k)
                if step.role is Role.PARTIAL:
                    wanted.update(v for v in step.reads if states[v].role is Role.PARTIAL)
        needed: set[int] = {v for k in inside for v in steps[k].reads}
        before: set[int] = set()
        for k in reversed(range(len(steps))):
            if steps[k].role is Role.INVARIANT and needed & set(steps[k].results):
                before.add(k)
                needed.update(steps[k].reads)
        computed = {v for k in inside for v in steps[k].results}
        rest = [k for k in range(len(steps)) if k not in inside and k not in before]
        used = {v for k in rest for v in steps[k].reads} | {v for v in self._outputs if isinstance(v, int)}
        self._before = [steps[k] for k in sorted(before)]
        self._inside = [steps[k] for k in sorted(inside)]
        self._after = [steps[k] for k in rest]
        self._sums = sorted(v for v in computed & used if states[v].role is not Role.BATCH)
        self._stacked = sorted(v for v in computed & used if states[v].role is Role.BATCH)

    def _belongs(self, step: _Step) -> bool:
        """Returns whether a linear step belongs inside: a sum of partial values, or a widening of one."""
        parts = {v for v in step.reads if self._top.states[v].role is Role.PARTIAL}
        if len(parts) > 1:
            return True
        if step.pair.name != "convert_element_type" or not parts:
            return False
        (before,), (after,) = step.reads, step.results
        return bool(self._top.types[after].dtype.itemsize > self._top.types[before].dtype.itemsize)

    def run(self, values: Mapping[int, Any]) -> list[Any]:
        """Returns the outputs, from the values of inputs and constants."""
        env = dict(values)
        for step in self._before:
            _record(env, step, internals.bind(step.pair.full, read_atoms(env, step.operands)))
        cut = [self._cut(env[v], self._top.states[v]) for v in self._entering]

        def body(sums: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            local = {**env, **dict(zip(self._entering, rows, strict=True))}
            for step in self._inside:
                _record(local, step, run_pair(step.pair, read_atoms(local, step.operands)))
            added = [self._reducer(v)[0](s, local[v]) for v, s in zip(self._sums, sums, strict=True)]
            return added, [local[v] for v in self._stacked]

        start = [self._start(v) for v in self._sums]
        sums, rows = jax.lax.scan(body, start, cut, length=self._parts)
        env.update(zip(self._sums, sums, strict=True))
        env.update((v, self._joined(r, self._top.states[v])) for v, r in zip(self._stacked, rows, strict=True))
        for step in self._after:
            _record(env, step, internals.bind(step.pair.full, read_atoms(env, step.operands)))
        return read_atoms(env, self._outputs)

    def _cut(self, array: Any, state: BatchState) -> Any:
        shape, d = array.shape, state.dim
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
        return _REDUCERS[self._top.states[value].reducer]

    def _start(self, value: int) -> Any:
        aval = self._top.types[value]
        return jnp.full(aval.shape, self._reducer(value)[1](aval.dtype), aval.dtype)


def _both(pair: Pair) -> list[tuple[Any, Any]]:
    return list(zip(pair.full.outvars, pair.part.outvars, strict=True))


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


def _record(env: dict[int, Any], step: _Step, results: Sequence[Any]) -> None:
    env.update(zip(step.results, results, strict=True))
