"""The role of the batch for every value when the program is run on a part of the batch. A value is

- *invariant*: the same for every part;
- *batch*: the rows of the full value that belong to the part's examples. Dimension ``dim`` is ``outer × batch × …``, major to
  minor; ``outer`` is -1 where the value is constant along the dimension, so that it does not matter;
- *partial*: the full value is the sum (maximum, minimum, …) of the parts' values;
- *after*: computed from values that are complete only after all parts (never inside of loops and branches).

An op is described by its factor rule: a parallel factor keeps the batch, a reduction makes a partial value, and anything else
(blocked, windowed, indexed) would mix examples and raises an error. Partial values go through linear ops only.

Weak. An index over the batch (``logits[arange(n), labels]``) raises, although it would be right within each part.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import numpy as np

from shardwise.capture import equations
from shardwise.capture import jax_internals as internals
from shardwise.capture.expand import implementation
from shardwise.errors import VariantError
from shardwise.ir import traits
from shardwise.ir.rule import Kind, Rule
from shardwise.rules.call import OpCall
from shardwise.rules.registry import find_rule, is_known
from shardwise.transforms.trace_pair import Pair, pairs, with_literals

#: Partial values that can be accumulated.
REDUCERS: Final = ("sum", "max", "min", "and", "or")


NEEDS_BOTH: Final = "needs a value that is reduced over the whole batch together with the batch"


class Role(enum.Enum):
    INVARIANT = "invariant"
    BATCH = "batch"
    PARTIAL = "partial"
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class BatchState:
    """The role of a value. ``zero``: an invariant value that is zero everywhere, and so a partial sum too."""

    role: Role
    dim: int = -1
    outer: int = 1
    reducer: str = ""
    zero: bool = False


INVARIANT: Final = BatchState(Role.INVARIANT)
ZERO: Final = BatchState(Role.INVARIANT, zero=True)
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
_RANDOM: Final = ("random_bits", "random_split", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32")


def literal_state(value: Any) -> BatchState:
    return ZERO if np.ndim(value) == 0 and bool(np.asarray(value) == 0) else INVARIANT


class BatchAnalysis:
    """Finds the roles of values for a batch of ``size`` examples in ``parts``."""

    def __init__(self, size: int, parts: int):
        self.size, self.parts = size, parts
        self._rules: dict[Any, Rule] = {}

    def outputs(self, full: Any, part: Any, inputs: Sequence[BatchState]) -> list[BatchState]:
        """Returns the roles of a jaxpr's outputs, given those of its inputs."""
        large, both = internals.split_jaxpr(full)[0], pairs(full, part)
        states = [*[INVARIANT] * len(large.constvars), *inputs]
        return internals.interpret(
            large, states, lambda k, operands: self.equation(both[k], operands), lambda atom: literal_state(atom.val)
        )

    def equation(self, pair: Pair, states: Sequence[BatchState]) -> list[BatchState]:
        """Returns the roles of an equation's results; raises where examples would mix, or a partial value is used as a sum."""
        if pair.name == "optimization_barrier":
            return list(states)
        try:
            results = self._results(pair, states)
        except VariantError as error:
            # Inside of a library's function there may be no line of the user: the call has one.
            raise VariantError(str(error).replace(" at ?", f" at {pair.line}", 1)) from None
        for state, full, part in zip(results, _shapes(pair.full.outvars), _shapes(pair.part.outvars), strict=True):
            want = tuple(n // self.parts if d == state.dim else n for d, n in enumerate(full))
            if part != want:
                raise VariantError(
                    f"{pair.where}: {list(full)} becomes {list(part)} for a smaller batch, not {list(want)}"
                )
        return results

    def _results(self, pair: Pair, states: Sequence[BatchState]) -> list[BatchState]:
        match pair.name:
            case "scan":
                return self._scan(pair, states)
            case "while":
                return self._while(pair, states)
            case "cond":
                return self._cond(pair, states)
        full, part = map(internals.inner_jaxpr, pair)
        if full is None and not is_known(pair.name):
            full, part = map(implementation, pair)
            part = part if full is None else with_literals(full, part)
        return self._plain(pair, states) if full is None else self.outputs(full, part, states)

    def _plain(self, pair: Pair, states: Sequence[BatchState]) -> list[BatchState]:
        roles = {s.role for s in states}
        if Role.BATCH in roles:
            if pair.full.effects:
                raise VariantError(f"{pair.where} has an effect on the batch: it would happen once for every part")
            return self._batch(pair, states)
        if Role.PARTIAL in roles:
            results = linear(pair, states)
            if results is None:
                raise VariantError(f"{pair.where} needs the complete sum over the batch inside of a loop or branch")
            return results
        return self._invariant(pair, states)

    def _invariant(self, pair: Pair, states: Sequence[BatchState]) -> list[BatchState]:
        """Returns the roles of results that do not depend on the batch's values; they may depend on its size."""
        results = self._shrunk(pair, ZERO if all(s.zero for s in states) and pair.name in _LINEAR else INVARIANT)
        if all(s.role is Role.INVARIANT for s in results):
            return results
        if pair.name in _RANDOM:
            raise VariantError(
                f"{pair.where} draws random numbers for the batch from one key: a part would draw others. Make keys of "
                "the examples an argument of the batch"
            )
        if pair.name not in ("broadcast_in_dim", "broadcast_to", "copy", "convert_element_type"):
            raise VariantError(f"{pair.where} makes an array that counts the batch's examples: a part counts others")
        return results

    def _shrunk(self, pair: Pair, same: BatchState) -> list[BatchState]:
        """Returns the roles of results that are constant along a dimension that is smaller in a part; ``same`` without one."""
        states = []
        for full, part in zip(_shapes(pair.full.outvars), _shapes(pair.part.outvars), strict=True):
            dims = [d for d, (a, b) in enumerate(zip(full, part, strict=False)) if a != b]
            if len(full) != len(part) or len(dims) > 1 or any(full[d] != self.parts * part[d] for d in dims):
                raise VariantError(f"an array of shape {list(full)} becomes {list(part)} for a smaller batch")
            states.append(BatchState(Role.BATCH, dims[0], 1 if full[dims[0]] == self.size else -1) if dims else same)
        return states

    def _batch(self, pair: Pair, states: Sequence[BatchState]) -> list[BatchState]:
        rule = self._rule(pair.full)
        places = set()
        for tensor, state in zip(rule.operands, states, strict=True):
            if state.role is Role.BATCH:
                place = self._locate(rule, tensor, state)
                if place is None:
                    raise VariantError(f"{pair.where} takes the batch's dimension apart")
                places.add(place)
        exact = {p for p in places if p[1] >= 0}
        factors = {f for f, _ in places}
        if len(factors) > 1 or len(exact) > 1:
            raise VariantError(f"{pair.where} lets the examples of the batch meet each other")
        factor, offset = min(exact or places)
        if factor < 0:  # constant along a dimension that is split
            return self._shrunk(pair, INVARIANT)
        self._check_others(pair, rule, factor, states)
        kind = rule.factors[factor].kind
        if kind is Kind.REDUCTION:
            return [self._reduced(pair, rule.factors[factor].reducer, states)] * len(rule.results)
        if kind is not Kind.PARALLEL:
            reason = rule.factors[factor].reason or f"it is {kind.value} there"
            raise VariantError(f"{pair.where} needs the whole batch at once: {reason}")
        return [self._kept(pair, rule, tensor, factor, offset) for tensor in rule.results]

    def _rule(self, equation: Any) -> Rule:
        dtypes = tuple(str(getattr(v.aval, "dtype", "")) for v in equation.invars)
        call = OpCall(
            equation.primitive.name, equation.params, _shapes(equation.invars), _shapes(equation.outvars), dtypes
        )
        key = call.key
        if key in self._rules:
            return self._rules[key]
        rule = find_rule(call, equations.kernel_name(equation), equations.stated_rule(equation)).rule
        if key is not None:
            self._rules[key] = rule
        return rule

    def _locate(self, rule: Rule, tensor: Sequence[Sequence[int]], state: BatchState) -> tuple[int, int] | None:
        """Returns the factor with the batch and the size before it in the factor; (-1, -1) for several factors."""
        dim = tensor[state.dim]
        if state.outer < 0:
            return (dim[0], -1) if len(dim) == 1 else (-1, -1)
        start = 1
        for f in dim:
            end = start * rule.factors[f].size
            if start <= state.outer and state.outer * self.size <= end:
                inside = state.outer % start == 0 and end % (state.outer * self.size) == 0
                return (f, state.outer // start) if inside else None
            start = end
        return None

    def _check_others(self, pair: Pair, rule: Rule, factor: int, states: Sequence[BatchState]) -> None:
        for k, (tensor, state) in enumerate(zip(rule.operands, states, strict=True)):
            has = any(factor in dim for dim in tensor)
            if has and state.role is not Role.BATCH:
                raise VariantError(f"{pair.where} combines the batch with an array of its size that is not part of it")
            adds = pair.name == "scatter-add" and k == 0 and rule.factors[factor].kind is Kind.REDUCTION
            if state.role is Role.PARTIAL and not adds:
                raise VariantError(f"{pair.where} {NEEDS_BOTH}")

    def _reduced(self, pair: Pair, reducer: str, states: Sequence[BatchState]) -> BatchState:
        if reducer not in REDUCERS:
            raise VariantError(f"{pair.where} reduces the batch by {reducer}, of which parts cannot be put together")
        if pair.name in ("scatter-add", "scatter-sub") and not _partial(states[0]):
            raise VariantError(f"{pair.where} adds the batch to an array that is not zero: every part would")
        return BatchState(Role.PARTIAL, reducer=reducer)

    def _kept(self, pair: Pair, rule: Rule, tensor: Sequence[Sequence[int]], factor: int, offset: int) -> BatchState:
        for d, dim in enumerate(tensor):
            if factor in dim:
                before = dim[: dim.index(factor)]
                alone = len(dim) == 1 and rule.factors[factor].size == self.size
                outer = int(np.prod([rule.factors[f].size for f in before], dtype=int)) * offset
                return BatchState(Role.BATCH, d, outer if offset > 0 else 1 if alone else -1)
        raise VariantError(f"{pair.where} has a result without the batch")

    def _scan(self, pair: Pair, states: Sequence[BatchState]) -> list[BatchState]:
        consts, carries = internals.scan_counts(pair.full.params)
        scanned = states[consts + carries :]
        if any(s.role is Role.BATCH and s.dim == 0 for s in scanned):
            raise VariantError(f"{pair.where} runs over the examples one by one")
        inner = [*states[: consts + carries], *(_moved(s, -1) for s in scanned)]
        outputs = self._loop_outputs(pair, "jaxpr", inner, range(consts, consts + carries))
        return [*outputs[:carries], *(_moved(s, 1) for s in outputs[carries:])]

    def _while(self, pair: Pair, states: Sequence[BatchState]) -> list[BatchState]:
        tests, consts = pair.full.params["cond_nconsts"], pair.full.params["body_nconsts"]
        carried = self._loop_outputs(pair, "body_jaxpr", states[tests:], range(consts, len(states) - tests))
        conditions = pair.full.params["cond_jaxpr"], pair.part.params["cond_jaxpr"]
        if self.outputs(*conditions, [*states[:tests], *carried])[0].role is not Role.INVARIANT:
            raise VariantError(f"{pair.where}: how often it runs depends on the whole batch")
        return carried

    def _loop_outputs(
        self, pair: Pair, body: str, inputs: Sequence[BatchState], carry: Sequence[int]
    ) -> list[BatchState]:
        """Returns the roles of a loop body's outputs, first those of its carry, at their fixed point."""
        inner = list(inputs)
        while True:
            outputs = self.outputs(pair.full.params[body], pair.part.params[body], inner)
            carried = [join(pair, inner[k], output) for k, output in zip(carry, outputs, strict=False)]
            if carried == [inner[k] for k in carry]:
                return [*carried, *outputs[len(carried) :]]
            for k, state in zip(carry, carried, strict=True):
                inner[k] = state

    def _cond(self, pair: Pair, states: Sequence[BatchState]) -> list[BatchState]:
        if states[0].role is not Role.INVARIANT:
            raise VariantError(f"{pair.where}: which branch runs depends on the whole batch")
        branches = zip(pair.full.params["branches"], pair.part.params["branches"], strict=True)
        first, *others = [self.outputs(*both, states[1:]) for both in branches]
        for other in others:
            first = [join(pair, a, b) for a, b in zip(first, other, strict=True)]
        return first


def _moved(state: BatchState, by: int) -> BatchState:
    return replace(state, dim=state.dim + by) if state.role is Role.BATCH else state


def _partial(state: BatchState, reducer: str = "sum") -> bool:
    return (state.zero and reducer == "sum") or (state.role is Role.PARTIAL and state.reducer == reducer)


def linear(pair: Pair, states: Sequence[BatchState]) -> list[BatchState] | None:
    """Returns the roles of an op's results on partial values, None where it does not commute with the reduction."""
    partial = [k for k, s in enumerate(states) if s.role is Role.PARTIAL]
    reducers = {states[k].reducer for k in partial}
    if len(reducers) != 1 or any(s.role in (Role.BATCH, Role.AFTER) for s in states):
        return None
    (reducer,) = reducers
    operands = _linear_operands(pair, reducer, partial)
    if not set(partial) <= set(operands) or not all(_partial(states[k], reducer) for k in operands):
        return None
    return [BatchState(Role.PARTIAL, reducer=reducer)] * len(pair.full.outvars)


def _linear_operands(pair: Pair, reducer: str, partial: Sequence[int]) -> Sequence[int]:
    """Returns the operands that must be partial for an op to commute with a reduction; none where it does not commute."""
    name, every = pair.name, range(len(pair.full.invars))
    if reducer != "sum":
        return every if name in (*_MOVES, reducer) else ()
    if name in ("convert_element_type", "div"):
        dtypes = [v.aval.dtype for v in (*pair.full.invars, *pair.full.outvars)]
        kinds = (jax.numpy.floating,) if name == "div" else (jax.numpy.floating, jax.numpy.integer)
        if not any(all(jax.numpy.issubdtype(dtype, kind) for dtype in dtypes) for kind in kinds):
            return ()
    if name in _JOINTLY:
        return every[_JOINTLY[name]]
    operands = _LINEAR.get(name, ())
    if operands is None:
        return every
    return partial if len(partial) == 1 and partial[0] in operands else ()


def join(pair: Pair, one: BatchState, other: BatchState) -> BatchState:
    """Returns the role of a value that may come from either."""
    if one == other:
        return one
    roles = {one.role, other.role}
    if roles == {Role.BATCH} and one.dim == other.dim and -1 in (one.outer, other.outer):
        return one if one.outer >= 0 else other
    if roles == {Role.INVARIANT}:
        return INVARIANT
    if roles == {Role.INVARIANT, Role.PARTIAL} and all(map(_partial, (one, other))):
        return one if one.role is Role.PARTIAL else other
    raise VariantError(f"{pair.where} carries a value that depends on the whole batch in some iterations only")


def _shapes(variables: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(internals.shape_of(v.aval) for v in variables)
