"""The role of the batch for the values of an op when the program is run on a part of the batch. A value is

- *invariant*: the same for every part;
- *batch*: the rows of the full value that belong to the part's examples. Dimension ``dim`` is ``outer × batch × …``, major to
  minor;
- *partial*: the full value is the sum (maximum, minimum, …) of the parts' values;
- *after*: computed from values that are complete only after all parts (never inside of loops and branches).

An op is described by its factor rule: a parallel factor keeps the batch, a reduction makes a partial value, and anything else
(blocked, windowed, indexed) would mix examples and raises an error. Partial values go through linear ops only. An invariant
operand that has the batch's factor is needed in rows, too.

Weak. An index over the batch (``logits[arange(n), labels]``) raises, although it would be right within each part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import numpy as np

from shardwise.capture import control, equations
from shardwise.capture import jax_internals as internals
from shardwise.errors import VariantError
from shardwise.ir import traits
from shardwise.ir.rule import Kind, Rule, Symbol
from shardwise.rules.call import OpCall
from shardwise.rules.registry import find_rule, is_known

#: Partial values that can be accumulated.
REDUCERS: Final = ("sum", "max", "min", "and", "or")

NEEDS_BOTH: Final = "needs a value that is reduced over the whole batch together with the batch"


class Role(Symbol):
    INVARIANT = "invariant"
    BATCH = "batch"
    PARTIAL = "partial"
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class BatchState:
    """The role of a value. ``neutral``: the reducer of which an invariant value is the neutral element, so that it is a partial
    value too: ``sum`` for a value that is zero everywhere."""

    role: Role
    dim: int = -1
    outer: int = 1
    reducer: str = ""
    neutral: str = ""


INVARIANT: Final = BatchState(Role.INVARIANT)
ZERO: Final = BatchState(Role.INVARIANT, neutral="sum")
AFTER: Final = BatchState(Role.AFTER)

#: Linear ops in the notation of ``traits.LINEAR``, with those that also commute with a loop over parts of the batch.
_LINEAR: Final = (
    traits.LINEAR
    | dict.fromkeys("concatenate optimization_barrier pad".split())
    | dict.fromkeys(
        """broadcast_in_dim conj cumsum dynamic_slice imag name real reduce_window_sum rev sharding_constraint slice
        split""".split(),
        (0,),
    )
    | dict.fromkeys(("conv_general_dilated", "dot_general"), (0, 1))
)
#: Ops that are linear in these operands at once, while the others are invariant.
_JOINTLY: Final = {"select_n": slice(1, None), "dynamic_update_slice": slice(2), "scatter-add": slice(0, 3, 2)}
#: Ops that commute with every reducer.
_MOVES: Final = traits.SAME_ELEMENTS - {"convert_element_type"} | {"name", "rev", "sharding_constraint", "slice"}
#: Ops whose results are equal along dimensions that no operand has.
_REPEATING: Final = ("broadcast_in_dim", "broadcast_to", "empty", "full", "iota")


@dataclass(frozen=True, slots=True)
class Sized:
    """An equation on a part of the batch: the roles that its operands must have and that its results have, and the parameters
    that change."""

    operands: tuple[BatchState, ...]
    results: tuple[BatchState, ...]
    params: Mapping[str, Any] = field(default_factory=dict)


def where(equation: Any) -> str:
    """The primitive and the user's line, such as ``reduce_sum at model.py:12``."""
    return f"{equation.primitive.name} at {equations.user_line(equation.source_info)}"


def has_body(equation: Any) -> bool:
    """Returns whether an equation has no rule, but a body: loops, branches, calls, primitives that only name a function."""
    name = equation.primitive.name
    return name in control.LOWERINGS or internals.inner_jaxpr(equation) is not None or not is_known(name)


def literal_state(value: Any) -> BatchState:
    return ZERO if np.ndim(value) == 0 and bool(np.asarray(value) == 0) else INVARIANT


class BatchAnalysis:
    """Finds the roles of values for a batch of ``size`` examples in ``parts``."""

    def __init__(self, size: int, parts: int):
        self.size, self.parts = size, parts
        self._rules: dict[Any, Rule] = {}
        self._sized: dict[Any, Sized] = {}

    def shape(self, full: tuple[int, ...], state: BatchState) -> tuple[int, ...]:
        """Returns the shape of a value for one part."""
        return tuple(n // self.parts if d == state.dim else n for d, n in enumerate(full))

    def resized(self, equation: Any, sized: Sized) -> Any:
        """Returns an equation with the parameters and the types of results for one part."""
        outputs = []
        for v, state in zip(equation.outvars, sized.results, strict=True):
            full = internals.shape_of(v.aval)
            part = self.shape(full, state)
            outputs.append(v if part == full else internals.variable(internals.resized(v.aval, part)))
        return equation.replace(params={**equation.params, **sized.params}, outvars=outputs)

    def equation(self, equation: Any, states: Sequence[BatchState]) -> Sized:
        """Returns an equation that reads the batch, on a part of it; raises where examples would mix."""
        call = _call(equation)
        key = None if call.key is None else (call.key, *states)
        if key is None or key not in self._sized:
            sized = self._sized[key] = self._with_batch(equation, call, states)
            self._check(equation, call, sized)
        return self._sized[key]

    def _check(self, equation: Any, call: OpCall, sized: Sized) -> None:
        """Raises where an equation does not have the expected results on a part."""
        shapes = map(self.shape, call.operands, sized.operands)
        want = list(map(self.shape, call.results, sized.results))
        have = internals.result_shapes(equation, list(shapes), sized.params)
        if have != want:
            raise VariantError(f"{where(equation)}: on a part of the batch its results are {have}, not {want}")

    def _with_batch(self, equation: Any, call: OpCall, states: Sequence[BatchState]) -> Sized:
        if equation.effects:
            raise VariantError(f"{where(equation)} has an effect on the batch: it would happen once for every part")
        rule = self._rule(equation, call)
        pairs = list(zip(rule.operands, states, strict=True))
        places = {self._locate(rule, tensor, state) for tensor, state in pairs if state.role is Role.BATCH}
        if None in places:
            raise VariantError(f"{where(equation)} takes the batch's dimension apart")
        if len(places) > 1:
            raise VariantError(f"{where(equation)} lets the examples of the batch meet each other")
        ((factor, offset),) = (place for place in places if place is not None)
        kind, operands = rule.factors[factor].kind, list(states)
        for k, (tensor, state) in enumerate(pairs):
            adds = equation.primitive.name == "scatter-add" and k == 0 and kind is Kind.REDUCTION
            if state.role in (Role.PARTIAL, Role.AFTER) and not adds:
                raise VariantError(f"{where(equation)} {NEEDS_BOTH}")
            rows = self._placed(rule, tensor, factor, offset)
            if state.role is Role.INVARIANT and rows is not None:
                operands[k] = rows
        if kind is Kind.REDUCTION:
            results = [self._reduced(equation, rule.factors[factor].reducer, states)] * len(rule.results)
        elif kind is Kind.PARALLEL:
            kept = [self._placed(rule, tensor, factor, offset) for tensor in rule.results]
            results = [state for state in kept if state is not None]
            if len(results) < len(kept):
                raise VariantError(f"{where(equation)} has a result without the batch")
        else:
            reason = rule.factors[factor].reason or f"it is {kind.value} there"
            raise VariantError(f"{where(equation)} needs the whole batch at once: {reason}")
        return Sized(tuple(operands), tuple(results), self._params(call, operands, results))

    def rows(self, equation: Any, result: int, wanted: BatchState) -> Sized | None:
        """Returns an equation without the batch such that it computes rows of a result; None where that is not possible."""
        if has_body(equation) or equation.effects:
            return None
        call = _call(equation)
        rule = self._rule(equation, call)
        place = self._locate(rule, rule.results[result], wanted)
        if place is None:
            return None
        kind, name = rule.factors[place[0]].kind, equation.primitive.name
        repeated = name in _REPEATING and equation.params.get("dimension") != wanted.dim
        results = [self._placed(rule, tensor, *place) for tensor in rule.results]
        if None in results or not (kind is Kind.PARALLEL or (kind is Kind.FREE and repeated)):
            return None
        operands = [self._placed(rule, tensor, *place) or INVARIANT for tensor in rule.operands]
        rows = [state for state in results if state is not None]
        sized = Sized(tuple(operands), tuple(rows), self._params(call, operands, rows))
        self._check(equation, call, sized)
        return sized

    def _params(self, call: OpCall, operands: Sequence[BatchState], results: Sequence[BatchState]) -> Mapping[str, Any]:
        """Returns the parameters that have shapes, for a part."""
        p, result = call.params, self.shape(call.results[0], results[0]) if results else ()
        if call.kind in ("slice", "gather") and operands:
            full, part = call.operands[0], self.shape(call.operands[0], operands[0])
            name = "limit_indices" if call.kind == "slice" else "slice_sizes"
            return {name: tuple(b if n == a else n for n, a, b in zip(p[name], full, part, strict=True))}
        name = {"reshape": "new_sizes", "dynamic_slice": "slice_sizes"}.get(call.kind, "shape")
        return {name: result} if name != "shape" or call.kind in _REPEATING else {}

    def _rule(self, equation: Any, call: OpCall) -> Rule:
        key = call.key
        if key is None or key not in self._rules:
            self._rules[key], _ = find_rule(call, equations.kernel_name(equation), equations.stated_rule(equation))
        return self._rules[key]

    def _locate(self, rule: Rule, tensor: Sequence[Sequence[int]], state: BatchState) -> tuple[int, int] | None:
        """Returns the factor with the batch, and the size before it in the factor."""
        start = 1
        for f in tensor[state.dim]:
            end = start * rule.factors[f].size
            if start <= state.outer and state.outer * self.size <= end:
                inside = state.outer % start == 0 and end % (state.outer * self.size) == 0
                return (f, state.outer // start) if inside else None
            start = end
        return None

    def _placed(self, rule: Rule, tensor: Sequence[Sequence[int]], factor: int, offset: int) -> BatchState | None:
        """Returns the role of a tensor that has the batch in a factor; None if it does not have the factor."""
        for d, dim in enumerate(tensor):
            if factor in dim:
                before = dim[: dim.index(factor)]
                return BatchState(Role.BATCH, d, math.prod(rule.factors[f].size for f in before) * offset)
        return None

    def _reduced(self, equation: Any, reducer: str, states: Sequence[BatchState]) -> BatchState:
        if reducer not in REDUCERS:
            raise VariantError(
                f"{where(equation)} reduces the batch by {reducer}, of which parts cannot be put together"
            )
        if equation.primitive.name in ("scatter-add", "scatter-sub") and not _partial(states[0]):
            raise VariantError(f"{where(equation)} adds the batch to an array that is not zero: every part would")
        return BatchState(Role.PARTIAL, reducer=reducer)


def invariant(equation: Any, states: Sequence[BatchState]) -> list[BatchState]:
    """Returns the roles of results that do not depend on the batch."""
    zero = all(s.neutral == "sum" for s in states) and equation.primitive.name in _LINEAR
    return [ZERO if zero else INVARIANT] * len(equation.outvars)


def _partial(state: BatchState, reducer: str = "sum") -> bool:
    return state.neutral == reducer or (state.role is Role.PARTIAL and state.reducer == reducer)


def linear(equation: Any, states: Sequence[BatchState]) -> list[BatchState] | None:
    """Returns the roles of an op's results on partial values, None where it does not commute with the reduction."""
    partial = [k for k, s in enumerate(states) if s.role is Role.PARTIAL]
    reducers = {states[k].reducer for k in partial}
    if len(reducers) != 1 or any(s.role in (Role.BATCH, Role.AFTER) for s in states):
        return None
    (reducer,) = reducers
    operands = _linear_operands(equation, reducer, partial)
    if not set(partial) <= set(operands) or not all(_partial(states[k], reducer) for k in operands):
        return None
    return [BatchState(Role.PARTIAL, reducer=reducer)] * len(equation.outvars)


def _linear_operands(equation: Any, reducer: str, partial: Sequence[int]) -> Sequence[int]:
    """Returns the operands that must be partial for an op to commute with a reduction; none where it does not commute."""
    name, every = equation.primitive.name, range(len(equation.invars))
    if reducer != "sum":
        return every if name in (*_MOVES, reducer) else ()
    if name in ("convert_element_type", "div"):
        dtypes = [v.aval.dtype for v in (*equation.invars, *equation.outvars)]
        kinds = (jax.numpy.floating,) if name == "div" else (jax.numpy.floating, jax.numpy.integer)
        if not any(all(jax.numpy.issubdtype(dtype, kind) for dtype in dtypes) for kind in kinds):
            return ()
    if name in _JOINTLY:
        return every[_JOINTLY[name]]
    operands = _LINEAR.get(name, ())
    if operands is None:
        return every
    return partial if len(partial) == 1 and partial[0] in operands else ()


def join(equation: Any, one: BatchState, other: BatchState) -> BatchState:
    """Returns the role of a value that may come from either. An invariant value can be cut into rows."""
    if one == other:
        return one
    first, second = sorted((one, other), key=lambda s: s.role is not Role.INVARIANT)
    if first.role is Role.INVARIANT and second.role is not Role.PARTIAL:
        return second if second.role is Role.BATCH else INVARIANT
    if first.neutral and first.neutral == second.reducer:
        return second
    raise VariantError(f"{where(equation)} carries a value that depends on the whole batch in some iterations only")


def _call(equation: Any) -> OpCall:
    operands, results = (
        tuple(internals.shape_of(v.aval) for v in some) for some in (equation.invars, equation.outvars)
    )
    dtypes = tuple(str(getattr(v.aval, "dtype", "")) for v in equation.invars)
    return OpCall(equation.primitive.name, equation.params, operands, results, dtypes)
