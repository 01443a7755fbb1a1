"""How the batch goes through a program: which values carry it, which are parts of a sum over it, which do not depend on it.

The program is run on a part of the batch. Every value is then one of

- *whole*: the same for every part;
- *batch*: the rows of the full value that belong to the part's examples. Its ``Lane`` says where: dimension ``dim`` is
  ``outer × batch × …``, major to minor; ``outer`` is -1 where the value is the same all along the dimension, so that it does
  not matter;
- *partial*: the full value is the sum (maximum, minimum, …) of the parts' values;
- *later*: computed from values that are known only after all parts (never inside of loops and branches).

An op is described by its factor rule: a parallel factor hands the batch on, a reduction makes a partial value, anything else
(blocked, windowed, looked into) would let one example see another, and is refused. Partial values go through linear ops only.

Weak: an index over the batch (``logits[arange(n), labels]``) is refused, although it would be right within each part.
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
from shardwise.transforms.paired import Pair, pairs

#: Partial values that can be accumulated.
REDUCERS: Final = ("sum", "max", "min", "and", "or")


class Way(enum.Enum):
    WHOLE = "whole"
    BATCH = "batch"
    PARTIAL = "partial"
    LATER = "later"


@dataclass(frozen=True, slots=True)
class Lane:
    dim: int
    outer: int = 1


@dataclass(frozen=True, slots=True)
class State:
    """What a value is to the batch. ``zero``: a whole value that is zero everywhere, and so a partial sum too."""

    way: Way
    lane: Lane = Lane(-1)
    reducer: str = ""
    zero: bool = False


WHOLE: Final = State(Way.WHOLE)
ZERO: Final = State(Way.WHOLE, zero=True)
LATER: Final = State(Way.LATER)

#: Linear ops: all operands partial (or zero); the first one, the others whole; one of them, the others whole.
_ALL: Final = frozenset(
    """add sub add_any neg concatenate copy transpose reshape squeeze expand_dims broadcast_in_dim reduce_sum rev slice real
    imag conj cumsum name sharding_constraint split reduce_window_sum stop_gradient optimization_barrier""".split()
)
_FIRST: Final = frozenset({"div", "dynamic_slice"})
_ONE: Final = frozenset({"mul", "dot_general", "conv_general_dilated"})
#: Ops that move elements: of any reducer's parts.
_MOVES: Final = frozenset(
    "copy transpose reshape squeeze expand_dims broadcast_in_dim rev slice name sharding_constraint".split()
)
_RANDOM: Final = ("random_bits", "random_split", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32")


def literal_state(value: Any) -> State:
    return ZERO if np.ndim(value) == 0 and bool(np.asarray(value) == 0) else WHOLE


class Lanes:
    """Follows a batch of ``size`` examples that is cut into ``parts``."""

    def __init__(self, size: int, parts: int):
        self.size, self.parts = size, parts

    def outputs(self, full: Any, part: Any, inputs: Sequence[State]) -> list[State]:
        """What the outputs of a jaxpr are, given its inputs."""
        large, _ = internals.split_jaxpr(full)
        env: dict[Any, State] = dict.fromkeys(large.constvars, WHOLE)
        env.update(zip(large.invars, inputs, strict=True))

        def read(atom: Any) -> State:
            return literal_state(atom.val) if internals.is_literal(atom) else env[atom]

        for pair in pairs(full, part):
            env.update(zip(pair.full.outvars, self.equation(pair, [read(a) for a in pair.full.invars]), strict=True))
        return [read(a) for a in large.outvars]

    def equation(self, pair: Pair, states: Sequence[State]) -> list[State]:
        """What an equation's results are. Refuses where examples would meet, or a partial value is used as if it were whole."""
        if pair.name == "optimization_barrier":
            return list(states)
        try:
            found = self._results(pair, states)
        except (
            VariantError
        ) as error:  # inside of a library's function there may be no line of the user's: the call has one
            raise VariantError(str(error).replace(" at ?", f" at {pair.line}", 1)) from None
        for state, full, part in zip(found, pair.full.outvars, pair.part.outvars, strict=True):
            self._check_shape(pair, state, internals.shape_of(full.aval), internals.shape_of(part.aval))
        return found

    def _results(self, pair: Pair, states: Sequence[State]) -> list[State]:
        if pair.name in _REGIONS:
            return _REGIONS[pair.name](self, pair, states)
        full, part = (internals.inner_jaxpr(equation) for equation in pair)
        if full is None and not is_known(pair.name):
            full, part = (implementation(equation) for equation in pair)
        return self.plain(pair, states) if full is None else self.outputs(full, part, states)

    def _check_shape(self, pair: Pair, state: State, full: tuple[int, ...], part: tuple[int, ...]) -> None:
        want = list(full)
        if state.way is Way.BATCH:
            want[state.lane.dim] //= self.parts
        if list(part) != want:
            raise VariantError(f"{pair.where}: {list(full)} becomes {list(part)} for a smaller batch, not {want}")

    # One op.

    def plain(self, pair: Pair, states: Sequence[State]) -> list[State]:
        ways = {s.way for s in states}
        if Way.BATCH in ways:
            if pair.full.effects:
                raise VariantError(f"{pair.where} has an effect on the batch: it would happen once for every part")
            return self._batch(pair, states)
        if Way.PARTIAL in ways:
            found = linear(pair, states)
            if found is None:
                raise VariantError(f"{pair.where} needs a whole sum over the batch inside of a loop or branch")
            return found
        return self._whole(pair, states)

    def _whole(self, pair: Pair, states: Sequence[State]) -> list[State]:
        """Nothing here depends on the batch's values, but its size may have come in."""
        found = []
        for full, part in zip(pair.full.outvars, pair.part.outvars, strict=True):
            lane = self._shrunk(internals.shape_of(full.aval), internals.shape_of(part.aval))
            zero = all(s.zero for s in states) and pair.name in _ALL | {"convert_element_type"}
            if lane is None:
                found.append(ZERO if zero else WHOLE)
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
                found.append(State(Way.BATCH, lane))
        return found

    def _shrunk(self, full: tuple[int, ...], part: tuple[int, ...]) -> Lane | None:
        """The dimension that is smaller in a part, as one along which nothing changes."""
        dims = [d for d, (a, b) in enumerate(zip(full, part, strict=False)) if a != b]
        if not dims and len(full) == len(part):
            return None
        if len(dims) != 1 or len(full) != len(part) or full[dims[0]] != self.parts * part[dims[0]]:
            raise VariantError(f"an array of shape {list(full)} becomes {list(part)} for a smaller batch")
        return Lane(dims[0], 1 if full[dims[0]] == self.size else -1)

    def _batch(self, pair: Pair, states: Sequence[State]) -> list[State]:
        rule = _rule(pair.full)
        places = set()
        for tensor, state in zip(rule.operands, states, strict=True):
            if state.way is Way.BATCH:
                place = self._locate(rule, tensor, state.lane)
                if place is None:
                    raise VariantError(f"{pair.where} takes the batch's dimension apart")
                places.add(place)
        exact = {p for p in places if p[1] >= 0}
        factors = {f for f, _ in places}
        if len(factors) > 1 or len(exact) > 1:
            raise VariantError(f"{pair.where} lets the examples of the batch meet each other")
        factor, offset = min(exact or places)
        if factor < 0:  # the same all along a dimension that is taken apart
            outs = zip(pair.full.outvars, pair.part.outvars, strict=True)
            lanes = [self._shrunk(*(internals.shape_of(v.aval) for v in both)) for both in outs]
            return [WHOLE if lane is None else State(Way.BATCH, lane) for lane in lanes]
        self._check_others(pair, rule, factor, states)
        kind = rule.factors[factor].kind
        if kind is Kind.REDUCTION:
            return [self._reduced(pair, rule.factors[factor].reducer, states)] * len(rule.results)
        if kind is not Kind.PARALLEL:
            reason = rule.factors[factor].reason or f"it is {kind.value} there"
            raise VariantError(f"{pair.where} needs the whole batch at once: {reason}")
        return [self._handed_on(pair, rule, tensor, factor, offset) for tensor in rule.results]

    def _locate(self, rule: Rule, tensor: Sequence[Sequence[int]], lane: Lane) -> tuple[int, int] | None:
        """The factor that the batch is in, and how much of the factor stands before it. (-1, -1) for a dimension of many
        factors along which nothing changes."""
        dim = tensor[lane.dim]
        if lane.outer < 0:
            return (dim[0], -1) if len(dim) == 1 else (-1, -1)
        start = 1
        for f in dim:
            end = start * rule.factors[f].size
            if start <= lane.outer and lane.outer * self.size <= end:
                inside = lane.outer % start == 0 and end % (lane.outer * self.size) == 0
                return (f, lane.outer // start) if inside else None
            start = end
        return None

    def _check_others(self, pair: Pair, rule: Rule, factor: int, states: Sequence[State]) -> None:
        for k, (tensor, state) in enumerate(zip(rule.operands, states, strict=True)):
            has = any(factor in dim for dim in tensor)
            if has and state.way is not Way.BATCH:
                raise VariantError(f"{pair.where} combines the batch with an array of its size that is not part of it")
            adds = pair.name == "scatter-add" and k == 0 and rule.factors[factor].kind is Kind.REDUCTION
            if state.way in (Way.PARTIAL, Way.LATER) and not adds:
                raise VariantError(
                    f"{pair.where} needs a value that is reduced over the whole batch together with the batch"
                )

    def _reduced(self, pair: Pair, reducer: str, states: Sequence[State]) -> State:
        if reducer not in REDUCERS:
            raise VariantError(f"{pair.where} reduces the batch by {reducer}, of which parts cannot be put together")
        if pair.name in ("scatter-add", "scatter-sub") and not _partial(states[0]):
            raise VariantError(f"{pair.where} adds the batch to an array that is not zero: every part would")
        return State(Way.PARTIAL, reducer=reducer)

    def _handed_on(self, pair: Pair, rule: Rule, tensor: Sequence[Sequence[int]], factor: int, offset: int) -> State:
        for d, dim in enumerate(tensor):
            if factor in dim:
                before = dim[: dim.index(factor)]
                alone = len(dim) == 1 and rule.factors[factor].size == self.size
                outer = int(np.prod([rule.factors[f].size for f in before], dtype=int)) * offset
                return State(Way.BATCH, Lane(d, outer if offset > 0 else 1 if alone else -1))
        raise VariantError(f"{pair.where} has a result without the batch")

    # Loops and branches.

    def scan(self, pair: Pair, states: Sequence[State]) -> list[State]:
        consts, carries = internals.scan_counts(pair.full.params)
        inner = [*states[: consts + carries], *(self._step(pair, s) for s in states[consts + carries :])]
        bodies = pair.full.params["jaxpr"], pair.part.params["jaxpr"]
        carried, outputs = self._settle(pair, inner, consts, carries, lambda given: self.outputs(*bodies, given))
        stacked = [
            replace(s, lane=replace(s.lane, dim=s.lane.dim + 1)) if s.way is Way.BATCH else s for s in outputs[carries:]
        ]
        return [*carried, *stacked]

    def _step(self, pair: Pair, state: State) -> State:
        """A scanned operand as the body sees it."""
        if state.way is not Way.BATCH:
            return state
        if state.lane.dim == 0:
            raise VariantError(f"{pair.where} runs over the examples one by one")
        return replace(state, lane=replace(state.lane, dim=state.lane.dim - 1))

    def _settle(
        self, pair: Pair, inner: list[State], first: int, count: int, run: Callable[[list[State]], list[State]]
    ) -> tuple[list[State], list[State]]:
        """What a loop carries, and what its body gives: until both agree."""
        while True:
            outputs = run(inner)
            carried = [join(pair, a, b) for a, b in zip(inner[first : first + count], outputs[:count], strict=True)]
            if carried == inner[first : first + count]:
                return carried, outputs
            inner = [*inner[:first], *carried, *inner[first + count :]]

    def while_(self, pair: Pair, states: Sequence[State]) -> list[State]:
        p, q = pair.full.params, pair.part.params
        tests, consts = p["cond_nconsts"], p["body_nconsts"]
        inner = list(states[tests:])
        bodies = p["body_jaxpr"], q["body_jaxpr"]
        carried, _ = self._settle(pair, inner, consts, len(inner) - consts, lambda given: self.outputs(*bodies, given))
        test = self.outputs(p["cond_jaxpr"], q["cond_jaxpr"], [*states[:tests], *carried])
        if test[0].way is not Way.WHOLE:
            raise VariantError(f"{pair.where}: how often it runs depends on the whole batch")
        return carried

    def cond(self, pair: Pair, states: Sequence[State]) -> list[State]:
        if states[0].way is not Way.WHOLE:
            raise VariantError(f"{pair.where}: which branch runs depends on the whole batch")
        branches = zip(pair.full.params["branches"], pair.part.params["branches"], strict=True)
        first, *others = [self.outputs(*both, states[1:]) for both in branches]
        for other in others:
            first = [join(pair, a, b) for a, b in zip(first, other, strict=True)]
        return first


_REGIONS: Final[dict[str, Callable[[Lanes, Pair, Sequence[State]], list[State]]]] = {
    "scan": Lanes.scan,
    "while": Lanes.while_,
    "cond": Lanes.cond,
}


def _partial(state: State, reducer: str = "sum") -> bool:
    return (state.zero and reducer == "sum") or (state.way is Way.PARTIAL and state.reducer == reducer)


def linear(pair: Pair, states: Sequence[State]) -> list[State] | None:
    """The results of an op on partial values, where its result on the whole is the reduction of its results on the parts."""
    name, reducers = pair.name, {s.reducer for s in states if s.way is Way.PARTIAL}
    if len(reducers) != 1 or any(s.way in (Way.BATCH, Way.LATER) for s in states):
        return None
    (reducer,) = reducers
    made = [State(Way.PARTIAL, reducer=reducer)] * len(pair.full.outvars)
    parts = [_partial(s, reducer) for s in states]
    if reducer != "sum":
        return made if all(parts) and name in (*_MOVES, reducer) else None
    rest = [s.way is Way.WHOLE for s in states]
    kinds = {_number(v) for v in (*pair.full.invars, *pair.full.outvars)}
    fits = (
        (name in _ALL and all(parts))
        or (name == "convert_element_type" and kinds in ({"real"}, {"integer"}))
        or (name in _FIRST and parts[0] and all(rest[1:]) and (name != "div" or kinds == {"real"}))
        or (name in _ONE and sum(s.way is Way.PARTIAL for s in states) == 1)
        or (name == "pad" and all(parts))
        or (name == "select_n" and rest[0] and all(parts[1:]))
        or (name == "dynamic_update_slice" and all(parts[:2]) and all(rest[2:]))
        or (name == "scatter-add" and parts[0] and rest[1] and parts[2])
    )
    return made if fits else None


def _number(variable: Any) -> str:
    dtype = getattr(variable.aval, "dtype", None)
    if dtype is None:
        return ""
    kinds = {"real": jax.numpy.floating, "integer": jax.numpy.integer}
    return next((name for name, kind in kinds.items() if jax.numpy.issubdtype(dtype, kind)), str(dtype))


def join(pair: Pair, one: State, other: State) -> State:
    """What a value is that may come from either."""
    if one == other:
        return one
    ways = {one.way, other.way}
    if ways == {Way.BATCH} and one.lane.dim == other.lane.dim and -1 in (one.lane.outer, other.lane.outer):
        return one if one.lane.outer >= 0 else other
    if ways == {Way.WHOLE}:
        return WHOLE
    if ways == {Way.WHOLE, Way.PARTIAL} and all(map(_partial, (one, other))):
        return one if one.way is Way.PARTIAL else other
    raise VariantError(f"{pair.where} carries a value that depends on the whole batch in some turns only")


def _rule(equation: Any) -> Rule:
    def shapes(variables: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        return tuple(internals.shape_of(v.aval) for v in variables)

    def types(variables: Sequence[Any]) -> tuple[str, ...]:
        return tuple(str(getattr(v.aval, "dtype", "")) for v in variables)

    ins, outs = equation.invars, equation.outvars
    call = OpCall(equation.primitive.name, equation.params, shapes(ins), shapes(outs), types(ins), types(outs))
    return find_rule(call, equations.kernel_name(equation), equations.stated_rule(equation)).rule
