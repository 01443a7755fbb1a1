"""Scans that compute again: one keeps what it carries, and the scan that reads its residuals computes them
(``transforms/remat``).

Differentiation turns a scan over layers into a forward scan F that stacks residuals, every activation of every layer, and a
backward scan G that reads them, step by step. A stacked output of F that is used by nothing but scans of the same length, as
what they scan over, is not stacked. F stacks its carry at the start of each step instead, and G runs F's body on that, on F's
own scanned operands and constants for the same step, as far as it takes for what was left out (dead code is not run). Positions
agree whatever the direction of either scan, since both index by position. Inside of loops XLA cannot merge the second
computation with the first, so that no barrier is needed.

A scan is left alone where its carries would take as much as what is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from shardwise.capture import jax_internals as internals
from shardwise.transforms.flat import Flat, Step
from shardwise.transforms.paired import Atom, read_atoms


@dataclass(frozen=True, slots=True)
class Residuals:
    """What scan ``step`` need not stack: positions among its stacked outputs, by value; and the carries that are stacked
    instead, by number."""

    step: int
    dropped: Mapping[int, int]
    carries: tuple[int, ...]


def find_scans(flat: Flat, taken: Collection[int]) -> tuple[list[int], list[int]]:
    """The scans that have more to leave out than to stack instead: taken one by one, and all together. Those that are
    ``taken`` are not looked at."""
    scans = [k for k, step in enumerate(flat.steps) if step.is_scan and k not in taken]
    first = [k for k in scans if _spares(flat, find_residuals(flat, k))]
    return first, [k for k in first if _spares(flat, find_residuals(flat, k, first))]


def find_residuals(flat: Flat, number: int, sources: Sequence[int] = ()) -> Residuals:
    """Which stacked outputs of a scan are read by nothing but scans, in step with it; not by ``sources``, which need their
    operands to be run again themselves."""
    scan = _Scan(flat.steps[number])
    elsewhere = {v for v in flat.outputs if isinstance(v, int)}
    read: set[int] = set()
    for k in sorted({k for v in scan.stacked for k in flat.users.get(v, ())}):
        step = flat.steps[k]
        in_step: set[Atom] = set()
        if step.is_scan and k not in sources and step.equation.params["length"] == scan.length:
            other = _Scan(step)
            in_step = set(other.scanned) - set(other.constants) - set(other.initial)
        elsewhere.update(v for v in step.reads if v not in in_step)
        read.update(v for v in in_step if isinstance(v, int))
    dropped = {v: k for k, v in enumerate(scan.stacked) if v in read - elsewhere}
    needed = _needed(scan.body, {scan.carries + k for k in dropped.values()})
    return Residuals(number, dropped, tuple(k for k in range(scan.carries) if scan.consts + k in needed))


def _spares(flat: Flat, left: Residuals) -> bool:
    scan = _Scan(flat.steps[left.step])
    inputs = set(scan.body.invars)
    outputs = [scan.body.outvars[scan.carries + k] for k in left.dropped.values()]
    spared = sum(map(flat.nbytes, left.dropped))
    added = sum(flat.nbytes(scan.carried[k]) * scan.length for k in left.carries)
    return spared > added and any(internals.is_literal(v) or v not in inputs for v in outputs)


class _Scan:
    """The parts of a scan equation."""

    def __init__(self, step: Step):
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


class ScansAgain:
    """Scans that leave residuals out, and those that read them and compute them again."""

    def __init__(self, flat: Flat, left: Sequence[Residuals]):
        self._flat = flat
        self._left = {one.step: one for one in left}
        self._source = {v: one for one in left for v in one.dropped}
        self._carries: dict[tuple[int, int], Any] = {}

    def concerns(self, number: int) -> bool:
        """Is a step a scan that is another one here?"""
        step = self._flat.steps[number]
        return step.is_scan and (number in self._left or any(v in self._source for v in _Scan(step).scanned))

    def run(self, number: int, env: Mapping[int, Any]) -> list[Any]:
        """A scan with its own residuals left out, and with those it reads computed again. What is left out is None."""
        scan = _Scan(self._flat.steps[number])
        own = self._left.get(number, Residuals(number, {}, ()))
        kept = [k for k in range(len(scan.stacked)) if k not in own.dropped.values()]
        constants = read_atoms(env, scan.constants)
        scanned = [v for v in scan.scanned if isinstance(v, int)]
        sources = {s.step: s for v in scanned if (s := self._source.get(v)) is not None}
        xs = {v: env[v] for v in scanned if v not in self._source}
        again = [_Recomputed(self._flat, s, scan, env, self._carries) for s in sources.values()]

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
        flat: Flat,
        left: Residuals,
        reader: _Scan,
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
