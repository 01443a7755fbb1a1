"""Micro-batches: a step as a loop over parts of the batch, with the same result.

Problem. The activations of a step do not fit. Idea. Gradient accumulation as a transformation of the program. Every equation
belongs to one of three pieces by the roles of its values (``batch_roles.py``):

- *before*: what does not depend on the batch and is needed inside, computed once;
- *inside*: what has the batch as a dimension, in a ``lax.scan`` over the parts, with equations for the size of a part. Values
  that are reduced over the batch are accumulated (sums, maxima, …, in the dtype of the value); outputs with the batch are
  stacked and reordered;
- *after*: what needs the reduced values: clipping, the optimizer.

Sums of partial values and widening casts of them are inside, so that a parameter that is used twice has one accumulator, in the
wider dtype; other linear ops are after.

Part ``k`` of ``m`` has the examples ``k, k + m, k + 2m, …``: ``[B] -> [B/m, m]``, the minor dimension scanned over. A batch
that is sharded over devices is split without communication.

A value that does not depend on the batch, but has its size and is used together with it, is needed in rows. What repeats along
the batch is computed for a part in the loop; an array that does not (positions, random numbers from one key) is computed before
and split as the batch is.

A reduced value that is used together with the batch, such as the number of valid tokens, is computed in a separate loop before,
if that needs neither products nor loops; else (batch normalization, contrastive losses) an error is raised.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp

from shardwise.capture import jax_internals as internals
from shardwise.capture.trace import Traced
from shardwise.errors import VariantError
from shardwise.transforms.batch_roles import AFTER, INVARIANT, BatchAnalysis, BatchState, Role, where
from shardwise.transforms.batch_walk import PartStep, Walk
from shardwise.transforms.flat import Atom, Flat, Step, emit, read_atoms, spliced, values_of
from shardwise.transforms.rows import REDUCERS, cut_rows, joined_rows


def microbatched(traced: Traced, batch: Collection[str], parts: int) -> Traced:
    """Returns a traced function as a loop over parts of its batch; ``batch``: the paths of the arguments whose first dimension
    is the batch."""
    flat = Flat(traced.jaxpr)
    split = _Split(flat, *cut_batch(traced, flat, batch, parts))
    return replace(traced, jaxpr=spliced(internals.retrace(split.run, traced.jaxpr)))


def cut_batch(traced: Traced, flat: Flat, batch: Collection[str], parts: int) -> tuple[list[int], BatchAnalysis]:
    """Returns the numbers of the arguments of the batch, and the analysis of its parts."""
    numbers = [k for k, leaf in enumerate(traced.arguments) if leaf.path in batch]
    sizes = {internals.shape_of(flat.types[flat.inputs[k]])[0] for k in numbers}
    if len(sizes) != 1:
        raise VariantError(f"the arguments of the batch have different numbers of examples: {sorted(sizes)}")
    for path, shape in ((traced.arguments[k].path, list(flat.types[flat.inputs[k]].shape)) for k in numbers):
        if shape[0] % parts:
            raise VariantError(f"{path} {shape} cannot be cut into {parts} micro-batches of one size")
    return numbers, BatchAnalysis(sizes.pop(), parts)


class _Split(Walk):
    """A program in three pieces. ``_early``: values that have a separate loop before; ``cuts``: by value in the loop the value
    outside that it has the rows of."""

    def __init__(self, flat: Flat, batch: Collection[int], analysis: BatchAnalysis):
        roles = [BatchState(Role.BATCH, 0) if k in batch else INVARIANT for k in range(len(flat.inputs))]
        self.cuts = {flat.inputs[k]: flat.inputs[k] for k in batch}
        self._early: dict[int, int | None] = {}
        self._loops: list[tuple[int, _Loop]] = []
        super().__init__(flat, roles, analysis)
        self._main = _Loop(self, self.steps, flat.outputs)

    def _reduced(self, equation: Any) -> list[BatchState]:
        return [AFTER] * len(equation.outvars)

    def _cut(self, value: int, wanted: BatchState) -> int:
        maker = self._makers.get(value)
        if maker is not None and maker.role is Role.BATCH:
            raise VariantError(f"{where(maker.step.equation)} makes an array that counts the batch's examples")
        number = self.flat.new(value)
        self.cuts[number], self.states[number] = value, wanted
        return number

    def _computed_before(self, step: Step) -> Step | None:
        reduced = {v for v in step.reads if self.states[v].role in (Role.PARTIAL, Role.AFTER)}
        early = {v: self._early_value(v) for v in sorted(reduced)}
        if not early or None in early.values():
            return None
        return replace(step, operands=tuple(early.get(v, v) if isinstance(v, int) else v for v in step.operands))

    def _early_value(self, value: int) -> int | None:
        """Returns a reduced value, computed before: a reduction in a separate loop, and what follows from it once more."""
        if value not in self._early:
            maker = self._makers[value]
            step = maker.step if maker.role is Role.BATCH else self._computed_before(maker.step)
            if step is None or _is_expensive(step.equation):
                self._early[value] = None
            elif maker.role is Role.BATCH:
                self._early[value] = self._looped(value)
            else:
                copy = replace(step, results=tuple(self.flat.new(v) for v in step.results))
                self._add(copy)
                self._early |= zip(step.results, copy.results, strict=True)
        return self._early[value]

    def _looped(self, value: int) -> int | None:
        needed, steps = {value}, []
        for step in reversed(self.steps):
            if needed.intersection(step.step.results):
                needed.update(step.step.reads)
                steps.append(step)
        if any(step.role is not Role.INVARIANT and _is_expensive(step.step.equation) for step in steps):
            return None
        number = self.flat.new(value)
        self.states[number] = INVARIANT
        self._loops.append((number, _Loop(self, steps[::-1], [value])))
        return number

    def run(self, *arrays: Any) -> list[Any]:
        """Returns the outputs of the function on arrays or tracers."""
        env = self.flat.constants | dict(zip(self.flat.inputs, arrays, strict=True))
        for value, loop in self._loops:
            (env[value],) = loop.run(env)
        return self._main.run(env)


class _Loop:
    """Some of a program's steps in a loop over the parts of the batch, with the pieces before and after."""

    def __init__(self, split: _Split, steps: Sequence[PartStep], outputs: Sequence[Atom]):
        self._types, self._states, self._outputs = split.flat.types, split.states, outputs
        self._analysis = split.analysis
        if not any(s.role is Role.BATCH for s in steps):
            raise VariantError("nothing in the function depends on the batch")
        wanted: set[int] = set()
        needed: set[int] = set()
        inside: list[Step] = []
        before: list[Step] = []
        after = {id(one): one.step for one in steps}
        for one in reversed(steps):
            partial = one.role is Role.PARTIAL and (self._belongs(one.step) or wanted.intersection(one.step.results))
            if one.role is Role.BATCH or partial:
                inside.append(one.part)
                needed.update(one.step.reads)
                wanted.update(self._partial(one.step) if partial else ())
                del after[id(one)]
        self._entering = {v: source for v, source in split.cuts.items() if v in needed}
        needed.update(self._entering.values())
        for one in reversed(steps):
            if one.role is Role.INVARIANT and needed.intersection(one.step.results):
                before.append(one.step)
                needed.update(one.step.reads)
                del after[id(one)]
        self._inside, self._before, self._after = inside[::-1], before[::-1], list(after.values())
        used = {v for step in self._after for v in step.reads} | set(values_of(outputs))
        self._needed = needed | used
        leaving = sorted(used.intersection(v for step in inside for v in step.results))
        self._sums = [v for v in leaving if self._states[v].role is not Role.BATCH]
        self._stacked = [v for v in leaving if self._states[v].role is Role.BATCH]

    def _partial(self, step: Step) -> set[int]:
        return {v for v in step.reads if self._states[v].role is Role.PARTIAL}

    def _belongs(self, step: Step) -> bool:
        """Returns whether a linear step belongs inside: a sum of partial values, or a widening of one."""
        partial = self._partial(step)
        if len(partial) != 1 or step.name != "convert_element_type":
            return len(partial) > 1
        before, after = (self._types[v].dtype.itemsize for v in (*partial, *step.results))
        return bool(after > before)

    def run(self, values: Mapping[int, Any]) -> list[Any]:
        """Returns the outputs, from the values of inputs and constants."""
        env = dict(values)
        env |= emit(self._before, env, self._needed)
        cut = [cut_rows(self._analysis, env[source], self._states[v]) for v, source in self._entering.items()]
        reducers = [REDUCERS[self._states[v].reducer] for v in self._sums]

        def body(sums: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            local = env | dict(zip(self._entering, rows, strict=True))
            local |= emit(self._inside, local, {*self._sums, *self._stacked})
            added = [add(s, local[v]) for v, s, (add, _) in zip(self._sums, sums, reducers, strict=True)]
            return added, [local[v] for v in self._stacked]

        types = [self._types[v] for v in self._sums]
        start = [jnp.full(t.shape, first(t.dtype), t.dtype) for t, (_, first) in zip(types, reducers, strict=True)]
        sums, rows = jax.lax.scan(body, start, cut, length=self._analysis.parts)
        env.update(zip(self._sums, sums, strict=True))
        env.update(
            (v, joined_rows(self._analysis, r, self._states[v])) for v, r in zip(self._stacked, rows, strict=True)
        )
        env |= emit(self._after, env, values_of(self._outputs))
        return read_atoms(env, self._outputs)


def _is_expensive(equation: Any) -> bool:
    """Returns whether an equation is a product or a loop, or contains one."""
    if equation.primitive.name in _EXPENSIVE:
        return True
    called = internals.inner_jaxpr(equation)
    return called is not None and any(map(_is_expensive, internals.split_jaxpr(called)[0].eqns))


#: Primitives that are not computed twice.
_EXPENSIVE: Final = frozenset(
    {"dot_general", "conv_general_dilated", "ragged_dot_general", "scan", "while", "cond", "custom_call"}
)
