"""Loops over layers that can be cut into the stages of a pipeline.

A loop over layers is a scan whose carry has the batch, over stacked matrices that do not: the forward pass through a stack of
layers, and its backward pass. For each the roles of its operands and results are found (``batch_roles.py``), and its body is
built for a part of the batch. Outside of these loops every value is complete, and examples may mix: only whether a value has
the batch as a dimension is followed there, as far as that can be seen. A value whose batch is not seen is complete for every
part, and cut where a body needs it in rows.

In a body, an array that does not depend on the batch, but has its size (random numbers from one key), is computed whole, and
the part's rows are taken.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import jax
import jax.numpy as jnp

from shardwise.capture import jax_internals as internals
from shardwise.errors import VariantError
from shardwise.transforms.batch_roles import INVARIANT, ZERO, BatchAnalysis, BatchState, Role, where
from shardwise.transforms.batch_walk import Body, PartStep, Walk, moved
from shardwise.transforms.blocks import repeated_product
from shardwise.transforms.flat import Flat, Scan, Step, values_of
from shardwise.transforms.rows import ADDING, rows_of

#: The number of the value that is the number of the part, in a body.
_PART: Final = -1


class StageBody(Body):
    """The body of a loop over layers, on a part of the batch. Calls of ``jax.checkpoint`` are inlined."""

    def _flattened(self, jaxpr: Any) -> Flat:
        return Flat(jaxpr, inline_remat=True)

    def _cut(self, value: int, wanted: BatchState) -> int:
        if value in self.flat.inputs:
            return super()._cut(value, wanted)
        types = [internals.plain_shape(self.flat.types[value]), jax.ShapeDtypeStruct((), jnp.int32)]
        taken = Flat(jax.make_jaxpr(lambda array, part: [rows_of(self.analysis, array, wanted, part)])(*types))
        numbers = dict(zip(taken.inputs, (value, _PART), strict=True))
        for step in taken.steps:
            for v in step.results:
                self.flat.types.append(taken.types[v])
                numbers[v] = len(self.flat.types) - 1
            operands = tuple(numbers[atom] if isinstance(atom, int) else atom for atom in step.operands)
            step = replace(step, operands=operands, results=tuple(numbers[v] for v in step.results))
            self.steps.append(PartStep(step, step, Role.BATCH))
        (result,) = (numbers[v] for v in taken.outputs)
        self.states[result] = wanted
        return result

    def jaxpr(self) -> Any:
        """Returns the body for a part of the batch, whose number is its last input."""
        types = [*self._part_types(), jax.ShapeDtypeStruct((), jnp.int32)]
        return self._traced(types, [*self.flat.inputs, _PART])


class Layers(Scan):
    """A loop over layers, and its body with the roles of its operands and results."""

    def __init__(self, step: Step, body: Body):
        super().__init__(step)
        self.body = body
        self.const_states = body.inputs[: self.consts]
        self.carry_states = body.inputs[self.consts : self.first_xs]
        self.row_states = body.inputs[self.first_xs :]
        self.stacked_states = body.outputs[self.carries :]

    @property
    def has_matrices(self) -> bool:
        """Whether it carries the batch, and runs over stacked matrices."""
        carried = any(s.role is Role.BATCH for s in self.carry_states)
        return carried and _stacks_matrices(self.step, self.row_states)

    @cached_property
    def sums(self) -> frozenset[int]:
        """The carries to which every layer only adds."""
        added = added_carries(self.step.equation)
        states = enumerate(self.carry_states)
        return frozenset(k for k, s in states if s.role is Role.PARTIAL and added.get(k) == s.reducer)

    @cached_property
    def staying(self) -> frozenset[int]:
        """The carries that are not sent on: sums, and those that are the same for every layer and micro-batch."""
        inner = internals.split_jaxpr(self.step.equation.params["jaxpr"])[0]
        ends = enumerate(zip(inner.invars[self.consts :], inner.outvars, self.carry_states, strict=False))
        return self.sums.union(k for k, (old, new, s) in ends if old is new and s.role is Role.INVARIANT)

    @cached_property
    def fixed(self) -> list[int]:
        """The stacked results that follow from constants and rows without the batch: the same for every micro-batch."""
        flat, states = self.body.flat, (*self.const_states, *self.carry_states, *self.row_states)
        carries = range(self.consts, self.first_xs)
        varying = {v for k, v in enumerate(flat.inputs) if k in carries or states[k].role is not Role.INVARIANT}
        for step in flat.steps:
            if varying.intersection(step.reads) or step.equation.effects:
                varying.update(step.results)
        ends = enumerate(zip(flat.outputs[self.carries :], self.stacked_states, strict=True))
        return [k for k, (v, s) in ends if isinstance(v, int) and v not in varying and s.role is Role.INVARIANT]

    def fixed_of(self, layer: Sequence[Any]) -> list[Any]:
        """Returns the fixed results of one layer, from its constants and rows; those with the batch may be None."""
        flat, first = self.body.flat, self.consts
        results = [flat.outputs[self.carries + k] for k in self.fixed]
        needed, steps = set(results), list[Step]()
        for step in reversed(flat.steps):
            if needed.intersection(step.results):
                steps.append(step)
                needed.update(step.reads)
        env: dict[int, Any] = flat.constants | dict(zip(flat.inputs[:first], layer[:first], strict=True))
        env |= zip(flat.inputs[self.first_xs :], layer[first:], strict=True)
        for step in reversed(steps):
            env |= zip(step.results, step.run(env), strict=True)
        return [env[v] for v in results]


def added_carries(equation: Any) -> dict[int, str]:
    """Returns the carries of a scan that its body only adds to, or takes the maximum with, and so on: each with its reducer."""
    consts, carries = internals.scan_counts(equation.params)
    flat = Flat(equation.params["jaxpr"])
    added: dict[int, str] = {}
    for k in range(carries):
        before, after = flat.inputs[consts + k], flat.outputs[k]
        users, returned = flat.users.get(before, []), values_of(flat.outputs)
        if len(users) != 1 or returned.count(after) != 1 or after in flat.users or before in returned:
            continue
        step = flat.steps[users[0]]
        reducer = next((reducer for reducer, names in ADDING.items() if step.name in names), "")
        if reducer and step.results == (after,) and step.operands.count(before) == 1:
            added[k] = reducer
    return added


class Program(Walk):
    """A program with its loops over layers, by the number of their step."""

    def __init__(self, flat: Flat, batch: Collection[int], analysis: BatchAnalysis, stages: int):
        roles = [BatchState(Role.BATCH, 0) if k in batch else INVARIANT for k in range(len(flat.inputs))]
        self.stages, self.layers = stages, dict[int, Layers]()
        self._numbers = {step.results[0]: k for k, step in enumerate(flat.steps) if step.results}
        super().__init__(flat, roles, analysis)
        if not self.layers:
            raise VariantError(
                f"there is no loop over at least {stages} layers, with the batch in its carry and stacked parameters"
                + _why(flat, stages)
                + ": layers have to be a jax.lax.scan over their stacked parameters, outside of other loops"
            )
        for number in list(self.layers):
            self._return_rows(number)

    def by_tick(self, value: int) -> tuple[set[int], bool]:
        """Returns the loops that read a stacked value of a loop in the layout in which that one makes it, and whether it is
        read in another way."""
        maker = self.layers[self.flat.producer[value]]
        state, elsewhere, readers = maker.stacked_states[maker.stacked.index(value)], False, set[int]()
        for number in self.flat.users.get(value, ()):
            reader = self.layers.get(number)
            rows = [s for v, s in zip(reader.scanned, reader.row_states, strict=True) if v == value] if reader else []
            uses = sum(v == value for v in self.flat.steps[number].reads)
            if reader and len(rows) == uses and set(rows) == {state} and reader.length == maker.length:
                readers.add(number)
            else:
                elsewhere = True
        return readers, elsewhere or value in values_of(self.flat.outputs)

    def repeated(self, value: int, wanted: BatchState) -> int | None:
        """Returns the number of the rows of a value, if they are the same for every part: a broadcast mask is computed for a
        part, and not cut. ``steps`` has the steps for them."""
        if self.states[value].role is not Role.INVARIANT:
            return None
        before, known = len(self.steps), dict(self._rows)
        try:
            return self._in_rows(value, wanted)
        except VariantError:
            del self.steps[before:]
            self._rows = known
            return None

    def _cut(self, value: int, wanted: BatchState) -> int:
        raise VariantError("its rows differ from part to part")

    def _return_rows(self, number: int) -> None:
        """Makes a loop return stacked values in rows if that is how all of their readers need them."""
        layers = self.layers[number]
        wanted: dict[int, BatchState] = {}
        for k, (value, state) in enumerate(zip(layers.stacked, layers.stacked_states, strict=True)):
            users = self.flat.users.get(value, ())
            if state.role is not Role.INVARIANT or value in values_of(self.flat.outputs):
                continue
            readers = [self.layers.get(user) for user in users]
            rows = {s for r in readers if r for v, s in zip(r.scanned, r.row_states, strict=True) if v == value}
            if None not in readers and len(rows) == 1 and all(s.role is Role.BATCH for s in rows):
                wanted[layers.carries + k] = rows.pop()
        if wanted:
            states = [*layers.const_states, *layers.carry_states, *(moved(s, 1) for s in layers.row_states)]
            self.layers[number] = Layers(layers.step, self._scan_body(layers.step.equation, states, wanted))

    # The walk.

    def _add(self, step: Step) -> None:
        states = [self._state(atom) for atom in step.operands]
        try:
            results = self._results(step, states)
        except VariantError:
            if step.name == "scan" and _stacks_matrices(
                step, states[sum(internals.scan_counts(step.equation.params)) :]
            ):
                raise
            results = [INVARIANT] * len(step.results)
        complete = (s if s.role is Role.BATCH or (s == ZERO and step.name != "scan") else INVARIANT for s in results)
        self.states |= zip(step.results, complete, strict=True)
        if all(self.states[v].role is Role.INVARIANT for v in (*step.reads, *step.results)):
            self._makers |= dict.fromkeys(step.results, PartStep(step, step, Role.INVARIANT))

    def _results(self, step: Step, states: list[BatchState]) -> Sequence[BatchState]:
        if step.name != "scan" or all(s.role is not Role.BATCH for s in states):
            return self._sized(step.equation, states).results
        consts, _ = internals.scan_counts(step.equation.params)
        for k, reducer in added_carries(step.equation).items():
            # It may start from any value: one part has it, the others start from the neutral element.
            if states[consts + k].role is Role.INVARIANT:
                states[consts + k] = BatchState(Role.INVARIANT, neutral=reducer)
        layers = Layers(step, self._scan_body(step.equation, states))
        if layers.has_matrices and layers.length >= self.stages:
            if step.equation.effects:
                raise VariantError(f"{where(step.equation)} has an effect, which would happen for every micro-batch")
            self.layers[self._numbers[step.results[0]]] = layers
        return [*layers.carry_states, *(moved(s, 1) for s in layers.stacked_states)]

    def _new_body(self, jaxpr: Any, states: Sequence[BatchState], wanted: Mapping[int, BatchState]) -> Body:
        return StageBody(jaxpr, states, self.analysis, wanted)

    def _reduced(self, equation: Any) -> list[BatchState]:
        return [INVARIANT] * len(equation.outvars)


def _stacks_matrices(step: Step, states: Sequence[BatchState]) -> bool:
    """Returns whether a scan runs over matrices that do not have the batch."""
    variables = step.equation.invars[-len(states) :] if states else ()
    return any(
        s.role is Role.INVARIANT and len(internals.shape_of(v.aval)) >= 3 and jnp.issubdtype(v.aval.dtype, jnp.inexact)
        for v, s in zip(variables, states, strict=True)
    )


def _why(flat: Flat, stages: int) -> str:
    """Returns what looks like layers, and why they are none."""
    for step in flat.steps:
        if step.name == "while":
            return f"; {where(step.equation)} is a loop whose number of trips is not known"
        if step.name != "scan":
            continue
        body, scan = internals.split_jaxpr(step.equation.params["jaxpr"])[0], Scan(step)
        inner = next((e for e in body.eqns if e.primitive.name == "scan"), None)
        if inner is not None:
            return f"; {where(inner)} is inside of another loop, at {where(step.equation)}"
        if _stacks_matrices(step, [INVARIANT] * len(scan.scanned)) and scan.length < stages:
            return f"; {where(step.equation)} is a loop over {scan.length}"
    unrolled = repeated_product(flat)
    return f"; {where(unrolled)} is in layers that are unrolled" if unrolled is not None else ""
