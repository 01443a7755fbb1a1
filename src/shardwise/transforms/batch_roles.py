"""The role of the batch for every value: it is one of its dimensions, or was reduced over, or does not matter.

The program is run on a part of the batch. Every value is then one of

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import numpy as np

from shardwise.capture import equations
from shardwise.capture import jax_internals as internals
from shardwise.capture.expand import implementation
from shardwise.errors import VariantError
from shardwise.ir.rule import Kind, Rule
from shardwise.rules.call import OpCall
from shardwise.rules.registry import find_rule, is_known
from shardwise.transforms.trace_pair import Pair, pairs

#: Partial values that can be accumulated.
REDUCERS: Final = ("sum", "max", "min", "and", "or")


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

#: Linear ops: all operands are partial (or zero); the first one, the others invariant; one of them, the others invariant.
_ALL: Final = frozenset(
    """add sub add_any neg concatenate copy transpose reshape squeeze expand_dims broadcast_in_dim reduce_sum rev slice real
    imag conj cumsum name sharding_constraint split reduce_window_sum stop_gradient optimization_barrier""".split()
)
_FIRST: Final = frozenset({"div", "dynamic_slice"})
_ONE: Final = frozenset({"mul", "dot_general", "conv_general_dilated"})
#: Ops that only rearrange elements, for any reducer.
_MOVES: Final = frozenset(
    "copy transpose reshape squeeze expand_dims broadcast_in_dim rev slice name sharding_constraint".split()
)
_RANDOM: Final = ("random_bits", "random_split", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32")


def literal_state(value: Any) -> BatchState:
    return ZERO if np.ndim(value) == 0 and bool(np.asarray(value) == 0) else INVARIANT


class BatchAnalysis:
    """Finds the roles of values for a batch of ``size`` examples in ``parts``."""

    def __init__(self, size: int, parts: int):
        self.size, self.parts = size, parts

    def outputs(self, full: Any, part: Any, inputs: Sequence[BatchState]) -> list[BatchState]:
        """Returns the roles of a jaxpr's outputs, given those of its inputs."""
        large, _ = internals.split_jaxpr(full)
        env: dict[Any, BatchState] = dict.fromkeys(large.constvars, INVARIANT)
        env.update(zip(large.invars, inputs, strict=True))

        def read(atom: Any) -> BatchState:
            return literal_state(atom.val) if internals.is_literal(atom) else env[atom]

        for pair in pairs(full, part):
            env.update(zip(pair.full.outvars, self.equation(pair, [read(a) for a in pair.full.invars]), strict=True))
        return [read(a) for a in large.outvars]

    def equation(self, pair: Pair, states: Sequence[BatchState]) -> list[BatchState]:
        """Returns the roles of an equation's results; raises where examples would mix, or a partial value is used as a sum."""
        if pair.name == "optimization_barrier":
            return list(states)
        try:
            results = self._results(pair, states)
        except VariantError as error:
            # Inside of a library's function there may be no line of the user: the call has one.
            raise VariantError(str(error).replace(" at ?", f" at {pair.line}", 1)) from None
        for state, full, part in zip(results, pair.full.outvars, pair.part.outvars, strict=True):
            self._check_shape(pair, state, internals.shape_of(full.aval), internals.shape_of(part.aval))
        return results

    def _results(self, pair: Pair, states: Sequence[BatchState]) -> list[BatchState]:
        if pair.name in _REGIONS:
            return _REGIONS[pair.name](self, pair, states)
        full, part = (internals.inner_jaxpr(equation) for equation in pair)
        if full is None and not is_known(pair.name):
            full, part = (implementation(equation) for equation in pair)
        return self.plain(pair, states) if full is None else self.outputs(full, part, states)

    def _check_shape(self, pair: Pair, state: BatchState, full: tuple[int, ...], part: tuple[int, ...]) -> None:
        want = list(full)
        if state.role is Role.BATCH:
            want[state.dim] //= self.parts
        if list(part) != want:
            raise VariantError(f"{pair.where}: {list(full)} becomes {list(part)} for a smaller batch, not {want}")

    def plain(self, pair: Pair, states: Sequence[BatchState]) -> list[BatchState]:
        roles = {s.role for s in states}
        if Role.BATCH in roles:
            if pair.full.effects:
                raise VariantError(f"{pair.where} has an effect on the batch: it would happen once for every part")
            return self._batch(pair, states)
        if Role.PARTIAL in roles:
            results = linear(pair, states)
            if results is None:
                raise VariantError(f"{pair.where} needs a whole sum over the batch inside of a loop or branch")
            return results
        return self._invariant(pair, states)

    def _invariant(self, pair: Pair, states: Sequence[BatchState]) -> list[BatchState]:
        """Returns the roles of results that do not depend on the batch's values; they may depend on its size."""
        results = []
        for full, part in zip(pair.full.outvars, pair.part.outvars, strict=True):
            shrunk = self._shrunk(full, part)
            zero = all(s.zero for s in states) and pair.name in _ALL | {"convert_element_type"}
            if shrunk is None:
                results.append(ZERO if zero else INVARIANT)
            elif pair.name in _RANDOM:
                raise VariantError(
                    f"{pair.where} draws random numbers for the batch from one key: a part would draw others. Make keys of "
                    "the examples an argument of the batch"
                )
            elif pair.name not in ("broadcast_in_dim", "broadcast_to", "copy", "convert_element_type"):
                raise VariantError(
                    f"{pair.where} makes an array that counts the batch's examples: a part counts others"
                )
            else:
                results.append(shrunk)
        return results

    def _shrunk(self, full_variable: Any, part_variable: Any) -> BatchState | None:
        """Returns the role of a value with a dimension that is smaller in a part, along which it is constant, else None."""
        full, part = (internals.shape_of(v.aval) for v in (full_variable, part_variable))
        dims = [d for d, (a, b) in enumerate(zip(full, part, strict=False)) if a != b]
        if not dims and len(full) == len(part):
            return None
        if len(dims) != 1 or len(full) != len(part) or full[dims[0]] != self.parts * part[dims[0]]:
            raise VariantError(f"an array of shape {list(full)} becomes {list(part)} for a smaller batch")
        return BatchState(Role.BATCH, dims[0], 1 if full[dims[0]] == self.size else -1)

    def _batch(self, pair: Pair, states: Sequence[BatchState]) -> list[BatchState]:
        rule = _rule(pair.full)
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
            outs = zip(pair.full.outvars, pair.part.outvars, strict=True)
            return [self._shrunk(*both) or INVARIANT for both in outs]
        self._check_others(pair, rule, factor, states)
        kind = rule.factors[factor].kind
        if kind is Kind.REDUCTION:
            return [self._reduced(pair, rule.factors[factor].reducer, states)] * len(rule.results)
        if kind is not Kind.PARALLEL:
            reason = rule.factors[factor].reason or f"it is {kind.value} there"
            raise VariantError(f"{pair.where} needs the whole batch at once: {reason}")
        return [self._kept(pair, rule, tensor, factor, offset) for tensor in rule.results]

    def _locate(self, rule: Rule, tensor: Sequence[Sequence[int]], state: BatchState) -> tuple[int, int] | None:
        """Returns the factor with the batch, and the size before the batch in the factor; (-1, -1) for a dimension of several
        factors along which the value is constant."""
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
            if state.role in (Role.PARTIAL, Role.AFTER) and not adds:
                raise VariantError(
                    f"{pair.where} needs a value that is reduced over the whole batch together with the batch"
                )

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

    def scan(self, pair: Pair, states: Sequence[BatchState]) -> list[BatchState]:
        consts, carries = internals.scan_counts(pair.full.params)
        inner = [*states[: consts + carries], *(self._step(pair, s) for s in states[consts + carries :])]
        bodies = pair.full.params["jaxpr"], pair.part.params["jaxpr"]
        carried, outputs = self._fixed_point(pair, inner, consts, carries, lambda inputs: self.outputs(*bodies, inputs))
        stacked = [replace(s, dim=s.dim + 1) if s.role is Role.BATCH else s for s in outputs[carries:]]
        return [*carried, *stacked]

    def _step(self, pair: Pair, state: BatchState) -> BatchState:
        """Returns the role of a scanned operand inside of the body."""
        if state.role is not Role.BATCH:
            return state
        if state.dim == 0:
            raise VariantError(f"{pair.where} runs over the examples one by one")
        return replace(state, dim=state.dim - 1)

    def _fixed_point(
        self,
        pair: Pair,
        inner: list[BatchState],
        first: int,
        count: int,
        run: Callable[[list[BatchState]], list[BatchState]],
    ) -> tuple[list[BatchState], list[BatchState]]:
        """Returns the roles of a loop's carry and of its body's outputs, at their fixed point."""
        while True:
            outputs = run(inner)
            carried = [join(pair, a, b) for a, b in zip(inner[first : first + count], outputs[:count], strict=True)]
            if carried == inner[first : first + count]:
                return carried, outputs
            inner = [*inner[:first], *carried, *inner[first + count :]]

    def while_(self, pair: Pair, states: Sequence[BatchState]) -> list[BatchState]:
        p, q = pair.full.params, pair.part.params
        tests, consts = p["cond_nconsts"], p["body_nconsts"]
        inner = list(states[tests:])
        bodies = p["body_jaxpr"], q["body_jaxpr"]
        carried, _ = self._fixed_point(
            pair, inner, consts, len(inner) - consts, lambda inputs: self.outputs(*bodies, inputs)
        )
        test = self.outputs(p["cond_jaxpr"], q["cond_jaxpr"], [*states[:tests], *carried])
        if test[0].role is not Role.INVARIANT:
            raise VariantError(f"{pair.where}: how often it runs depends on the whole batch")
        return carried

    def cond(self, pair: Pair, states: Sequence[BatchState]) -> list[BatchState]:
        if states[0].role is not Role.INVARIANT:
            raise VariantError(f"{pair.where}: which branch runs depends on the whole batch")
        branches = zip(pair.full.params["branches"], pair.part.params["branches"], strict=True)
        first, *others = [self.outputs(*both, states[1:]) for both in branches]
        for other in others:
            first = [join(pair, a, b) for a, b in zip(first, other, strict=True)]
        return first


_REGIONS: Final[dict[str, Callable[[BatchAnalysis, Pair, Sequence[BatchState]], list[BatchState]]]] = {
    "scan": BatchAnalysis.scan,
    "while": BatchAnalysis.while_,
    "cond": BatchAnalysis.cond,
}


def _partial(state: BatchState, reducer: str = "sum") -> bool:
    return (state.zero and reducer == "sum") or (state.role is Role.PARTIAL and state.reducer == reducer)


def linear(pair: Pair, states: Sequence[BatchState]) -> list[BatchState] | None:
    """Returns the roles of an op's results on partial values, None where it does not commute with the reduction."""
    name, reducers = pair.name, {s.reducer for s in states if s.role is Role.PARTIAL}
    if len(reducers) != 1 or any(s.role in (Role.BATCH, Role.AFTER) for s in states):
        return None
    (reducer,) = reducers
    partial = [BatchState(Role.PARTIAL, reducer=reducer)] * len(pair.full.outvars)
    parts = [_partial(s, reducer) for s in states]
    if reducer != "sum":
        return partial if all(parts) and name in (*_MOVES, reducer) else None
    rest = [s.role is Role.INVARIANT for s in states]
    kinds = {_number(v) for v in (*pair.full.invars, *pair.full.outvars)}
    fits = (
        (name in _ALL and all(parts))
        or (name == "convert_element_type" and kinds in ({"real"}, {"integer"}))
        or (name in _FIRST and parts[0] and all(rest[1:]) and (name != "div" or kinds == {"real"}))
        or (name in _ONE and sum(s.role is Role.PARTIAL for s in states) == 1)
        or (name == "pad" and all(parts))
        or (name == "select_n" and rest[0] and all(parts[1:]))
        or (name == "dynamic_update_slice" and all(parts[:2]) and all(rest[2:]))
        or (name == "scatter-add" and parts[0] and rest[1] and parts[2])
    )
    return partial if fits else None


def _number(variable: Any) -> str:
    dtype = getattr(variable.aval, "dtype", None)
    if dtype is None:
        return ""
    kinds = {"real": jax.numpy.floating, "integer": jax.numpy.integer}
    return next((name for name, kind in kinds.items() if jax.numpy.issubdtype(dtype, kind)), str(dtype))


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
    raise VariantError(f"{pair.where} carries a value that depends on the whole batch in some turns only")


def _rule(equation: Any) -> Rule:
    def shapes(variables: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        return tuple(internals.shape_of(v.aval) for v in variables)

    dtypes = tuple(str(getattr(v.aval, "dtype", "")) for v in equation.invars)
    call = OpCall(equation.primitive.name, equation.params, shapes(equation.invars), shapes(equation.outvars), dtypes)
    return find_rule(call, equations.kernel_name(equation), equations.stated_rule(equation)).rule
