"""A program or a loop's body on a part of the batch: the role of every value, and every equation for the size of a part.

Bodies of loops, branches and calls are built again. A carry has one role: that of a loop is found as a fixed point. An
invariant input of a body that is needed in rows inside comes in rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax

from shardwise.capture import jax_internals as internals
from shardwise.capture.expand import implementation
from shardwise.errors import VariantError
from shardwise.transforms.batch_roles import (
    INVARIANT,
    NEEDS_BOTH,
    BatchAnalysis,
    BatchState,
    Role,
    Sized,
    has_body,
    invariant,
    join,
    linear,
    literal_state,
    where,
)
from shardwise.transforms.flat import Atom, Flat, Step, emit, read_atoms, spliced, values_of


@dataclass(frozen=True, slots=True)
class PartStep:
    """A step on the whole batch and on a part of it, and its role, which determines the piece that it belongs to."""

    step: Step
    part: Step
    role: Role


class Walk:
    """The steps of a program, or of a loop's body or a branch, with the roles of all values."""

    def __init__(self, flat: Flat, inputs: Sequence[BatchState], analysis: BatchAnalysis):
        self.flat, self.analysis = flat, analysis
        self.states = dict.fromkeys(flat.constants, INVARIANT) | dict(zip(flat.inputs, inputs, strict=True))
        self.steps: list[PartStep] = []
        self._makers: dict[int, PartStep] = {}
        self._rows: dict[tuple[int, int, int], int] = {}
        for step in flat.steps:
            self._add(step)

    # What differs between a program and a body.

    def _reduced(self, equation: Any) -> list[BatchState]:
        """Returns the roles of results that need a complete sum over the batch."""
        raise NotImplementedError

    def _cut(self, value: int, wanted: BatchState) -> int:
        """Returns the rows of a value that is not computed in rows."""
        raise NotImplementedError

    def _computed_before(self, step: Step) -> Step | None:
        """Returns the step with reduced operands computed in loops before; None where that is not possible or expensive."""
        return None

    # Steps.

    def _state(self, atom: Atom) -> BatchState:
        return self.states[atom] if isinstance(atom, int) else literal_state(atom.val)

    def _add(self, step: Step) -> None:
        states = [self._state(atom) for atom in step.operands]
        try:
            sized = self._sized(step.equation, states)
        except VariantError:
            early = self._computed_before(step) if any(s.role is Role.BATCH for s in states) else None
            if early is None:
                raise
            return self._add(early)
        self._append(step, sized)

    def _append(self, step: Step, sized: Sized) -> None:
        """Adds a step, after those that compute its operands in rows."""
        operands = list(step.operands)
        for k, (atom, wanted) in enumerate(zip(step.operands, sized.operands, strict=True)):
            if wanted.role is Role.BATCH and self._state(atom).role is not Role.BATCH:
                operands[k] = self._in_rows(atom, wanted)
        self.states |= zip(step.results, sized.results, strict=True)
        step = replace(step, operands=tuple(operands))
        part = replace(step, equation=self.analysis.resized(step.equation, sized))
        added = PartStep(step, part, self._role(step, [*sized.operands, *sized.results]))
        self._makers |= dict.fromkeys(step.results, added)
        self.steps.append(added)

    def _role(self, step: Step, states: Sequence[BatchState]) -> Role:
        roles = {s.role for s in states}
        if Role.AFTER in roles:
            return Role.AFTER
        # What is the same for every part may be computed in the loop.
        inside = (v in self._makers and self._makers[v].role is Role.BATCH for v in step.reads)
        if Role.BATCH in roles or (Role.PARTIAL not in roles and any(inside)):
            return Role.BATCH
        return Role.PARTIAL if Role.PARTIAL in roles else Role.INVARIANT

    def _sized(self, equation: Any, states: Sequence[BatchState]) -> Sized:
        roles = {s.role for s in states}
        if equation.primitive.name == "optimization_barrier":
            return Sized(tuple(states), tuple(states))
        if Role.BATCH in roles:
            if Role.AFTER in roles:
                raise VariantError(f"{where(equation)} {NEEDS_BOTH}")
            return self._with_body(equation, states) if has_body(equation) else self.analysis.equation(equation, states)
        results = invariant(equation, states) if roles <= {Role.INVARIANT} else linear(equation, states)
        return Sized(tuple(states), tuple(self._reduced(equation) if results is None else results))

    # Rows.

    def _in_rows(self, value: int, wanted: BatchState) -> int:
        """Returns the rows of a value that has the batch's size, but does not depend on the batch."""
        key = value, wanted.dim, wanted.outer
        if key not in self._rows:
            rows = self._computed_in_rows(value, wanted)
            self._rows[key] = self._cut(value, wanted) if rows is None else rows
        return self._rows[key]

    def _computed_in_rows(self, value: int, wanted: BatchState) -> int | None:
        maker = self._makers.get(value)
        if maker is None or maker.role in (Role.PARTIAL, Role.AFTER):
            return None
        number = maker.step.results.index(value)
        if maker.step.name == "optimization_barrier":
            return self._in_rows(maker.step.operands[number], wanted)
        sized = self.analysis.rows(maker.step.equation, number, wanted)
        if sized is None:
            return None
        step = replace(maker.step, results=tuple(self.flat.new(v) for v in maker.step.results))
        self._append(step, sized)
        return step.results[number]

    # Loops, branches and calls.

    def _with_body(self, equation: Any, states: Sequence[BatchState]) -> Sized:
        name = equation.primitive.name
        try:
            if name == "scan":
                return self._scan(equation, states)
            if name == "while":
                return self._while(equation, states)
            if name == "cond":
                return self._cond(equation, states)
            inner = internals.inner_jaxpr(equation)
            jaxpr = implementation(equation) if inner is None else inner
            if jaxpr is None:
                return self.analysis.equation(equation, states)
            body = self._body(jaxpr, states)
            changed = {} if inner is None else {"jaxpr": internals.open_jaxpr(body.jaxpr())}
            return Sized(tuple(body.inputs), tuple(body.outputs), changed)
        except VariantError as error:
            # Inside of a library's function there may be no line of the user: the call has one.
            raise VariantError(str(error).replace(" at ?", where(equation).removeprefix(name), 1)) from None

    def _new_body(self, jaxpr: Any, states: Sequence[BatchState], wanted: Mapping[int, BatchState]) -> Body:
        return Body(jaxpr, states, self.analysis, wanted)

    def _body(self, jaxpr: Any, states: Sequence[BatchState], wanted: Mapping[int, BatchState] | None = None) -> Body:
        """Returns a body for some roles of its inputs, and of some outputs. Inputs may be needed in rows, though invariant."""
        while True:
            body = self._new_body(jaxpr, states, wanted or {})
            if body.inputs == list(states):
                return body
            states = body.inputs

    def _scan(self, equation: Any, states: Sequence[BatchState]) -> Sized:
        consts, carries = internals.scan_counts(equation.params)
        first = consts + carries
        body = self._scan_body(equation, states)
        operands = (*body.inputs[:first], *(moved(s, 1) for s in body.inputs[first:]))
        results = (*body.outputs[:carries], *(moved(s, 1) for s in body.outputs[carries:]))
        return Sized(operands, results, {"jaxpr": body.jaxpr()})

    def _scan_body(
        self, equation: Any, states: Sequence[BatchState], wanted: Mapping[int, BatchState] | None = None
    ) -> Body:
        """Returns the body of a scan with operands of these roles; ``wanted``: the roles of some stacked outputs."""
        consts, carries = internals.scan_counts(equation.params)
        first = consts + carries
        if any(s.role is Role.BATCH and s.dim == 0 for s in states[first:]):
            raise VariantError(f"{where(equation)} runs over the batch, one example after another")
        inner = [*states[:first], *(moved(s, -1) for s in states[first:])]
        return self._loop(equation, "jaxpr", inner, range(consts, first), wanted or {})

    def _while(self, equation: Any, states: Sequence[BatchState]) -> Sized:
        tests, consts = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        body = self._loop(equation, "body_jaxpr", states[tests:], range(consts, len(states) - tests))
        test = self._body(equation.params["cond_jaxpr"], [*states[:tests], *body.outputs])
        if test.outputs[0].role is not Role.INVARIANT or test.inputs[tests:] != body.outputs:
            raise VariantError(f"{where(equation)}: how often it runs depends on the whole batch")
        changed = {"body_jaxpr": body.jaxpr(), "cond_jaxpr": test.jaxpr()}
        return Sized((*test.inputs[:tests], *body.inputs), tuple(body.outputs), changed)

    def _loop(
        self,
        equation: Any,
        name: str,
        inputs: Sequence[BatchState],
        carry: range,
        wanted: Mapping[int, BatchState] = MappingProxyType({}),
    ) -> Body:
        """Returns a loop's body at the fixed point of its carry, whose roles are those of its first outputs."""
        inner = list(inputs)
        while True:
            body = self._body(equation.params[name], inner, {**wanted, **dict(enumerate(inner[k] for k in carry))})
            new = list(body.inputs)
            for k, output in zip(carry, body.outputs, strict=False):
                new[k] = join(equation, new[k], output)
            if new == inner:
                body.outputs[: len(carry)] = [inner[k] for k in carry]
                return body
            inner = new

    def _cond(self, equation: Any, states: Sequence[BatchState]) -> Sized:
        if states[0].role is not Role.INVARIANT:
            raise VariantError(f"{where(equation)}: which branch runs depends on the whole batch")
        inputs, wanted = list(states[1:]), dict[int, BatchState]()
        while True:
            bodies = [self._body(branch, inputs, wanted) for branch in equation.params["branches"]]
            before = inputs, wanted
            for body in bodies:
                inputs = [join(equation, *both) for both in zip(inputs, body.inputs, strict=True)]
                outputs = [join(equation, wanted.get(k, s), s) for k, s in enumerate(body.outputs)]
                wanted = dict(enumerate(outputs))
            if (inputs, wanted) == before:
                changed = {"branches": tuple(body.jaxpr() for body in bodies)}
                return Sized((states[0], *inputs), tuple(wanted.values()), changed)


class Body(Walk):
    """The body of a loop, a branch or a call. ``inputs`` are roles that they must have, ``outputs`` the roles of results."""

    def __init__(
        self, jaxpr: Any, inputs: Sequence[BatchState], analysis: BatchAnalysis, wanted: Mapping[int, BatchState]
    ):
        self.inputs = list(inputs)
        super().__init__(self._flattened(jaxpr), inputs, analysis)
        self.returned = list(self.flat.outputs)
        for k, state in wanted.items():
            if state.role is Role.BATCH and self._state(self.returned[k]).role is Role.INVARIANT:
                self.returned[k] = self._in_rows(self.returned[k], state)
        self.outputs = [self._state(atom) for atom in self.returned]
        for k, state in wanted.items():
            if state.role is Role.BATCH and self.returned[k] in self.flat.inputs:
                self.outputs[k] = state  # it is needed in rows, and will be an input in rows

    def _flattened(self, jaxpr: Any) -> Flat:
        return Flat(jaxpr)

    def _reduced(self, equation: Any) -> list[BatchState]:
        raise VariantError(
            f"{where(equation)} needs the complete sum over the batch inside of a loop or branch, and a part of the batch has "
            "another one: sums over each example, or over groups of its tokens, can be computed in parts"
        )

    def _cut(self, value: int, wanted: BatchState) -> int:
        if value not in self.flat.inputs:
            maker = self._makers.get(value)
            what = where(maker.step.equation) if maker is not None else "a constant"
            raise VariantError(f"{what} makes an array that counts the batch's examples, inside of a loop or branch")
        self.inputs[self.flat.inputs.index(value)] = wanted
        return value

    def jaxpr(self) -> Any:
        """Returns the body for a part of the batch."""
        return self._traced(self._part_types(), self.flat.inputs)

    def _part_types(self) -> list[Any]:
        types = [self.flat.types[v] for v in self.flat.inputs]
        shapes = (self.analysis.shape(internals.shape_of(t), s) for t, s in zip(types, self.inputs, strict=True))
        return [internals.plain_shape(t, shape) for t, shape in zip(types, shapes, strict=True)]

    def _traced(self, structs: Sequence[Any], inputs: Sequence[int]) -> Any:
        """Returns the steps on a part of the batch as a jaxpr with these inputs, by number."""

        def run(*arrays: Any) -> list[Any]:
            env = self.flat.constants | dict(zip(inputs, arrays, strict=True))
            env |= emit([step.part for step in self.steps], env, values_of(self.returned))
            return read_atoms(env, self.returned)

        return spliced(jax.make_jaxpr(run)(*structs))


def moved(state: BatchState, by: int) -> BatchState:
    return replace(state, dim=state.dim + by) if state.role is Role.BATCH else state
