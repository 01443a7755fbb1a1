"""Rematerialization of scans (``transforms/remat``).

Differentiation turns a scan over layers into a forward scan F that stacks residuals, every activation of every layer, and a
backward scan G that reads them, step by step. A stacked output of F whose only uses are as scanned operands of scans of the
same length is not stacked. F stacks its carry at the start of each step instead, and G runs F's body on that and on F's scanned
operands and constants for the same step, as far as the residuals need it. Both scans index by position, so that their
directions do not matter. Inside of loops XLA cannot merge the second computation with the first: no barrier is needed.

A scan is not changed where its stacked carries would take as much memory as its residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from shardwise.capture import jax_internals as internals
from shardwise.transforms.flat import Flat, Scan, Step, read_atoms, values_of


@dataclass(frozen=True, slots=True)
class Residuals:
    """The residuals that scan ``step`` does not stack, by value their position; and the carries stacked instead."""

    step: int
    dropped: Mapping[int, int]
    carries: tuple[int, ...]


def find_scans(flat: Flat, excluded: Collection[int]) -> tuple[list[int], list[int]]:
    """Returns the scans whose residuals take more than the carries stacked instead: each by itself, and all together."""
    scans = [k for k, step in enumerate(flat.steps) if step.name == "scan" and k not in excluded]
    first = [k for k in scans if _saves_memory(flat, find_residuals(flat, k))]
    return first, [k for k in first if _saves_memory(flat, find_residuals(flat, k, first))]


def find_residuals(flat: Flat, number: int, sources: Sequence[int] = ()) -> Residuals:
    """Returns the stacked outputs of a scan that only scans read, step by step; not those in ``sources``."""
    scan = _Scan(flat.steps[number])
    elsewhere, read = set(values_of(flat.outputs)), set[int]()
    for k in {k for v in scan.stacked for k in flat.users.get(v, ())}:
        step = flat.steps[k]
        in_step: set[int] = set()
        if step.name == "scan" and k not in sources and step.equation.params["length"] == scan.length:
            other = _Scan(step)
            in_step = set(values_of(other.scanned)) - set(values_of((*other.constants, *other.initial)))
        elsewhere.update(set(step.reads) - in_step)
        read |= in_step
    dropped = {v: k for k, v in enumerate(scan.stacked) if v in read - elsewhere}
    needed = scan.needed({scan.carries + k for k in dropped.values()})
    return Residuals(number, dropped, tuple(k for k in range(scan.carries) if scan.consts + k in needed))


def _saves_memory(flat: Flat, residuals: Residuals) -> bool:
    scan = _Scan(flat.steps[residuals.step])
    inputs = set(scan.body.invars)
    outputs = [scan.body.outvars[scan.carries + k] for k in residuals.dropped.values()]
    saved = sum(map(flat.nbytes, residuals.dropped))
    added = sum(flat.nbytes(scan.carried[k]) * scan.length for k in residuals.carries)
    return saved > added and any(internals.is_literal(v) or v not in inputs for v in outputs)


class _Scan(Scan):
    """A scan with its body."""

    def __init__(self, step: Step):
        super().__init__(step)
        params = step.equation.params
        self.body, self._arrays = internals.split_jaxpr(params["jaxpr"])
        self.options = {key: params[key] for key in ("length", "reverse", "unroll")}

    def _live(self, outputs: Collection[int]) -> tuple[list[Any], set[Any]]:
        """Returns the equations that some outputs need, and all the variables that these read."""
        needed = {v for k in outputs if not internals.is_literal(v := self.body.outvars[k])}
        live = []
        for equation in reversed(self.body.eqns):
            if any(v in needed for v in equation.outvars):
                live.append(equation)
                needed.update(v for v in equation.invars if not internals.is_literal(v))
        return live[::-1], needed

    def needed(self, outputs: Collection[int]) -> set[int]:
        """Returns the inputs of the body that some of its outputs depend on."""
        _, needed = self._live(outputs)
        return {k for k, v in enumerate(self.body.invars) if v in needed}

    def run(self, args: Sequence[Any], wanted: set[int] | None = None) -> list[Any]:
        """Returns the body's outputs; those that are not wanted may be None."""
        live, _ = self._live(range(len(self.body.outvars)) if wanted is None else wanted)
        variables = (*self.body.constvars, *self.body.invars)
        env: dict[Any, Any] = dict(zip(variables, (*self._arrays, *args), strict=True))
        for equation in live:
            arrays = [a.val if internals.is_literal(a) else env[a] for a in equation.invars]
            env.update(zip(equation.outvars, internals.bind(equation, arrays), strict=True))
        return [a.val if internals.is_literal(a) else env.get(a) for a in self.body.outvars]


class RematerializedScans:
    """Scans that do not stack some residuals, and those that read and recompute them."""

    def __init__(self, flat: Flat, residuals: Sequence[Residuals]):
        self._flat = flat
        self._residuals = {one.step: one for one in residuals}
        self._source = {v: one for one in residuals for v in one.dropped}
        self._carries: dict[tuple[int, int], Any] = {}

    def changes(self, number: int) -> bool:
        """Returns whether a step is a scan that is rewritten."""
        step = self._flat.steps[number]
        return step.name == "scan" and (
            number in self._residuals or not self._source.keys().isdisjoint(values_of(_Scan(step).scanned))
        )

    def run(self, number: int, env: Mapping[int, Any]) -> list[Any]:
        """Returns the results of a rewritten scan, None for residuals that are not stacked."""
        scan = _Scan(self._flat.steps[number])
        residuals = self._residuals.get(number, Residuals(number, {}, ()))
        kept = [k for k in range(len(scan.stacked)) if k not in residuals.dropped.values()]
        constants = read_atoms(env, scan.constants)
        values = values_of(scan.scanned)
        sources = {s.step: s for v in values if (s := self._source.get(v)) is not None}
        recomputed = [self._recomputed(s, scan, env) for s in sources.values()]

        def body(carry: list[Any], rows: tuple[dict[int, Any], list[Any]]) -> tuple[list[Any], Any]:
            row = dict(rows[0])
            for (_, recompute), operands in zip(recomputed, rows[1], strict=True):
                row.update(recompute(operands))
            outputs = scan.run([*constants, *carry, *read_atoms(row, scan.scanned)])
            stacked = [outputs[scan.carries + k] for k in kept]
            return outputs[: scan.carries], (stacked, [carry[k] for k in residuals.carries])

        xs = {v: env[v] for v in values if v not in self._source}, [scanned for scanned, _ in recomputed]
        carried, (stacked, carries) = jax.lax.scan(body, read_atoms(env, scan.initial), xs, **scan.options)
        self._carries.update(((number, k), c) for k, c in zip(residuals.carries, carries, strict=True))
        by_position = dict(zip(kept, stacked, strict=True))
        return [*carried, *(by_position.get(k) for k in range(len(scan.stacked)))]

    def _recomputed(
        self, residuals: Residuals, reader: _Scan, env: Mapping[int, Any]
    ) -> tuple[list[Any], Callable[[Sequence[Any]], dict[int, Any]]]:
        """Returns what to scan over to run a forward scan's body in a reader, and the function from a row to residuals."""
        scan = _Scan(self._flat.steps[residuals.step])
        read = residuals.dropped.keys() & set(values_of(reader.scanned))
        positions = {v: scan.carries + k for v, k in residuals.dropped.items() if v in read}
        needed = scan.needed(positions.values())
        operands = [k for k in range(len(scan.scanned)) if scan.first_xs + k in needed]
        constants = read_atoms(env, scan.constants)
        places = [*(scan.consts + k for k in residuals.carries), *(scan.first_xs + k for k in operands)]
        carries = [self._carries[residuals.step, k] for k in residuals.carries]

        def run(rows: Sequence[Any]) -> dict[int, Any]:
            inputs: list[Any] = [*constants, *[None] * (scan.carries + len(scan.scanned))]
            for place, row in zip(places, rows, strict=True):
                inputs[place] = row
            outputs = scan.run(inputs, set(positions.values()))
            return {v: outputs[k] for v, k in positions.items()}

        return [*carries, *read_atoms(env, [scan.scanned[k] for k in operands])], run
