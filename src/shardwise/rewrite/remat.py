"""Rematerialisation by loop: a scan keeps what it carries, and the scan that reads its residuals computes them again.

The problem: differentiation turns a scan over layers into a forward scan F that stacks residuals, every activation of every
layer, and a backward scan G that reads them, step by step. The stacks do not fit.

The idea is ``jax.checkpoint`` around the body, done after differentiation: a stacked output of F that is used by nothing but
scans of the same length, as what they scan over, is not stacked. F stacks its carry at the start of each step instead, and G
runs F's body on that, on F's own scanned operands and constants for the same step, as far as it takes for what was left out
(dead code is not run). Positions agree whatever the direction of either scan, since both index by position. Inside of loops
XLA cannot merge the second computation with the first, so that no barrier is needed.

A scan is left alone where its carries would take as much as what is left out. Calls that contain scans are taken apart, since
differentiation may have put F and G into different ones.

Weak: of each scan all residuals or none; no choice of what is cheap to keep. Layers that are unrolled in the program have no
scan to find, and are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from shardwise.capture import jax_internals as internals
from shardwise.capture.trace import Traced
from shardwise.errors import VariantError
from shardwise.rewrite.paired import Atom, Number, read_atoms


def rematerialised(traced: Traced, but: Collection[int] = (), like: Traced | None = None) -> Traced:
    """A traced function whose scans compute again what their backward scans need.

    Of those that can, in their order from 1, the ones in ``but`` are left alone. ``like`` is the same function at another size,
    whose choice of scans is taken over.
    """
    first, chosen = _choose(_Flat(like.jaxpr if like is not None else traced.jaxpr))
    if not chosen:
        raise VariantError(
            f"{traced.name} has no loop whose backward loop reads more than the loop carries: scan over the layers "
            "(jax.lax.scan), or put jax.checkpoint around them"
        )
    left = [k for number, k in enumerate(chosen, 1) if number not in but]
    if not left or not set(but) <= set(range(1, len(chosen) + 1)):
        raise VariantError(f"{traced.name} has {len(chosen)} loops that can compute again: all but {sorted(but)}?")
    flat = _Flat(traced.jaxpr)
    pairs = [flat.residuals(k, first) for k in left]
    return replace(traced, jaxpr=internals.retrace(_Again(flat, pairs).run, traced.jaxpr))


def rematerialisable(traced: Traced) -> int:
    """How many scans could compute again what their backward scans need."""
    return len(_choose(_Flat(traced.jaxpr))[1])


@dataclass(frozen=True, slots=True)
class _Step:
    equation: Any
    calls: tuple[Any, ...]
    operands: tuple[Atom, ...]
    results: tuple[int, ...]

    @property
    def is_scan(self) -> bool:
        return str(self.equation.primitive.name) == "scan"


class _Scan:
    """The parts of a scan equation."""

    def __init__(self, step: _Step):
        params = step.equation.params
        self.consts, self.carries = internals.scan_counts(params)
        self.body, self.held = internals.split_jaxpr(params["jaxpr"])
        self.length, self.reverse, self.unroll = params["length"], params["reverse"], params["unroll"]
        self.first_xs = self.consts + self.carries
        self.constants = step.operands[: self.consts]
        self.initial = step.operands[self.consts : self.first_xs]
        self.scanned = step.operands[self.first_xs :]
        self.carried = step.results[: self.carries]
        self.stacked = step.results[self.carries :]

    def run(self, args: Sequence[Any], wanted: set[int] | None = None) -> list[Any]:
        """The body's outputs; those that are not wanted may be None."""
        return _run_body(self.body, self.held, args, wanted)


@dataclass(frozen=True, slots=True)
class _Residuals:
    """What scan ``step`` need not stack: positions among its stacked outputs, by value; and the carries that are stacked
    instead, by number."""

    step: int
    dropped: Mapping[int, int]
    carries: tuple[int, ...]


@dataclass(slots=True)
class _Flat:
    """The equations of a program with the calls that contain scans taken apart; values are numbers."""

    jaxpr: Any
    steps: list[_Step] = field(default_factory=list)
    values: int = 0
    held: list[tuple[int, Any]] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[Atom] = field(default_factory=list)
    types: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inner, consts = internals.split_jaxpr(self.jaxpr)
        self.inputs = [self._value(v) for v in inner.invars]
        self.outputs = self._walk(inner, self._hold(inner, consts), self.inputs, ())

    def _value(self, variable: Any) -> int:
        self.types[self.values] = variable.aval
        self.values += 1
        return self.values - 1

    def _hold(self, inner: Any, consts: Sequence[Any]) -> list[int]:
        made = [self._value(v) for v in inner.constvars]
        self.held += zip(made, consts, strict=True)
        return made

    def _walk(self, inner: Any, consts: Sequence[int], args: Sequence[Atom], calls: tuple[Any, ...]) -> list[Atom]:
        env: dict[Any, Atom] = dict(zip((*inner.constvars, *inner.invars), (*consts, *args), strict=True))

        def read(atom: Any) -> Atom:
            return Number(atom.val) if internals.is_literal(atom) else env[atom]

        for equation in inner.eqns:
            operands = tuple(read(atom) for atom in equation.invars)
            called = internals.inner_jaxpr(equation)
            if called is not None and equation.primitive.name not in internals.REMAT and _has_scan(called):
                body, held = internals.split_jaxpr(called)
                results = self._walk(body, self._hold(body, held), operands, (*calls, equation))
            else:
                made = tuple(self._value(v) for v in equation.outvars)
                self.steps.append(_Step(equation, calls, operands, made))
                results = list(made)
            env.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in inner.outvars]

    def residuals(self, number: int, sources: Sequence[int] = ()) -> _Residuals:
        """Which stacked outputs of a scan are read by nothing but scans, in step with it; not by ``sources``, which need their
        operands to be run again themselves."""
        scan = _Scan(self.steps[number])
        elsewhere = {v for v in self.outputs if isinstance(v, int)}
        read: set[int] = set()
        for k, step in enumerate(self.steps):
            in_step: set[Atom] = set()
            if step.is_scan and k not in sources and step.equation.params["length"] == scan.length:
                other = _Scan(step)
                in_step = set(other.scanned) - set(other.constants) - set(other.initial)
            elsewhere.update(v for v in step.operands if isinstance(v, int) and v not in in_step)
            read.update(v for v in in_step if isinstance(v, int))
        dropped = {v: k for k, v in enumerate(scan.stacked) if v in read - elsewhere}
        needed = _needed(scan.body, {scan.carries + k for k in dropped.values()})
        return _Residuals(number, dropped, tuple(k for k in range(scan.carries) if scan.consts + k in needed))


def _choose(flat: _Flat) -> tuple[list[int], list[int]]:
    """The scans that have more to leave out than to stack instead: taken one by one, and all together."""
    first = [k for k, step in enumerate(flat.steps) if step.is_scan and _spares(flat, flat.residuals(k))]
    return first, [k for k in first if _spares(flat, flat.residuals(k, first))]


def _spares(flat: _Flat, left: _Residuals) -> bool:
    scan = _Scan(flat.steps[left.step])
    inputs = set(scan.body.invars)
    outputs = [scan.body.outvars[scan.carries + k] for k in left.dropped.values()]
    spared = sum(_nbytes(flat.types[v]) for v in left.dropped)
    added = sum(_nbytes(flat.types[scan.carried[k]]) * scan.length for k in left.carries)
    return spared > added and any(internals.is_literal(v) or v not in inputs for v in outputs)


def _nbytes(aval: Any) -> float:
    return float(aval.size * internals.dtype_of(aval)[1])


def _has_scan(jaxpr: Any) -> bool:
    for equation in internals.split_jaxpr(jaxpr)[0].eqns:
        called = internals.inner_jaxpr(equation)
        if equation.primitive.name == "scan" or (called is not None and _has_scan(called)):
            return True
    return False


def _live(body: Any, wanted: set[int]) -> tuple[list[bool], set[Any]]:
    """Which equations it takes for some of the outputs, and all the variables that are read on the way."""
    needed = {body.outvars[k] for k in wanted if not internals.is_literal(body.outvars[k])}
    live = [False] * len(body.eqns)
    for k in reversed(range(len(body.eqns))):
        equation = body.eqns[k]
        if any(v in needed for v in equation.outvars):
            live[k] = True
            needed.update(v for v in equation.invars if not internals.is_literal(v))
    return live, needed


def _needed(body: Any, wanted: set[int]) -> set[int]:
    """The inputs of a body that some of its outputs depend on."""
    _, needed = _live(body, wanted)
    return {k for k, v in enumerate(body.invars) if v in needed}


def _run_body(body: Any, consts: Sequence[Any], args: Sequence[Any], wanted: set[int] | None = None) -> list[Any]:
    live, _ = _live(body, set(range(len(body.outvars))) if wanted is None else wanted)
    env: dict[Any, Any] = dict(zip((*body.constvars, *body.invars), (*consts, *args), strict=True))
    for equation, runs in zip(body.eqns, live, strict=True):
        if runs:
            arrays = [a.val if internals.is_literal(a) else env[a] for a in equation.invars]
            env.update(zip(equation.outvars, internals.bind(equation, arrays), strict=True))
    return [a.val if internals.is_literal(a) else env.get(a) for a in body.outvars]


class _Again:
    """A program in which some scans leave residuals out, and those that read them compute them again."""

    def __init__(self, flat: _Flat, left: Sequence[_Residuals]):
        self._flat = flat
        self._left = {one.step: one for one in left}
        self._source = {v: one for one in left for v in one.dropped}
        self._carries: dict[tuple[int, int], Any] = {}

    def run(self, *arrays: Any) -> list[Any]:
        """The function on arrays or tracers."""
        flat = self._flat
        env: dict[int, Any] = {**dict(flat.held), **dict(zip(flat.inputs, arrays, strict=True))}
        for number, step in enumerate(flat.steps):
            with ExitStack() as stack:
                for call in step.calls:
                    stack.enter_context(internals.standing_at(call))
                env.update(zip(step.results, self._results(number, step, env), strict=True))
        return read_atoms(env, flat.outputs)

    def _results(self, number: int, step: _Step, env: Mapping[int, Any]) -> list[Any]:
        if step.is_scan and (number in self._left or any(v in self._source for v in _Scan(step).scanned)):
            with internals.standing_at(step.equation):
                return self._scan(number, _Scan(step), env)
        return internals.bind(step.equation, read_atoms(env, step.operands))

    def _scan(self, number: int, scan: _Scan, env: Mapping[int, Any]) -> list[Any]:
        """A scan with its own residuals left out, and with those it reads computed again. What is left out is None."""
        own = self._left.get(number, _Residuals(number, {}, ()))
        kept = [k for k in range(len(scan.stacked)) if k not in own.dropped.values()]
        constants = read_atoms(env, scan.constants)
        scanned = [v for v in scan.scanned if isinstance(v, int)]
        sources = {s.step: s for v in scanned if (s := self._source.get(v)) is not None}
        xs = {v: env[v] for v in scanned if v not in self._source}
        again = [_Recomputed(self._flat, s, scan, self._source, env, self._carries) for s in sources.values()]

        def body(carry: list[Any], rows: tuple[dict[int, Any], list[Any]]) -> tuple[list[Any], Any]:
            row, others = dict(rows[0]), rows[1]
            for one, given in zip(again, others, strict=True):
                row.update(one.run(given))
            outputs = scan.run([*constants, *carry, *read_atoms(row, scan.scanned)])
            stacked = [outputs[scan.carries + k] for k in kept]
            return outputs[: scan.carries], (stacked, [carry[k] for k in own.carries])

        given = xs, [one.scanned for one in again]
        options: dict[str, Any] = {"length": scan.length, "reverse": scan.reverse, "unroll": scan.unroll}
        carried, (stacked, carries) = jax.lax.scan(body, read_atoms(env, scan.initial), given, **options)
        self._carries.update(((number, k), c) for k, c in zip(own.carries, carries, strict=True))
        found: list[Any] = [None] * len(scan.stacked)
        for k, array in zip(kept, stacked, strict=True):
            found[k] = array
        return [*carried, *found]


class _Recomputed:
    """One forward scan's body, run again inside of another scan."""

    def __init__(
        self,
        flat: _Flat,
        left: _Residuals,
        reader: _Scan,
        source: Mapping[int, _Residuals],
        env: Mapping[int, Any],
        carries: Mapping[tuple[int, int], Any],
    ):
        self._scan = _Scan(flat.steps[left.step])
        self._values = {v: k for v, k in left.dropped.items() if v in reader.scanned}
        self._wanted = {self._scan.carries + k for k in self._values.values()}
        self._carried = left.carries
        needed = _needed(self._scan.body, self._wanted)
        self._inputs = [k for k in range(len(self._scan.scanned)) if self._scan.first_xs + k in needed]
        self._constants = read_atoms(env, self._scan.constants)
        rows = read_atoms(env, [self._scan.scanned[k] for k in self._inputs])
        #: What is scanned over: the carries at the start of each step, and the scanned operands that it takes.
        self.scanned = [*(carries[left.step, k] for k in self._carried), *rows]

    def run(self, rows: Sequence[Any]) -> dict[int, Any]:
        """The residuals of one step, by the value that stacked them."""
        scan = self._scan
        inputs: list[Any] = [*self._constants, *[None] * (scan.carries + len(scan.scanned))]
        places = [*(scan.consts + k for k in self._carried), *(scan.first_xs + k for k in self._inputs)]
        for place, row in zip(places, rows, strict=True):
            inputs[place] = row
        outputs = scan.run(inputs, self._wanted)
        return {v: outputs[scan.carries + k] for v, k in self._values.items()}
