"""A bound from below: the best way to store every value and compute every op, by integer programming.

The problem: a search over decisions finds good states; how far are they from the best that any sharding could reach?

The idea. Alpa's (Zheng et al., 2022): every value lies in one of its shardings, every op computes in one of its candidates, ops
cost their time and edges the time of resharding, all local; what is alive at one time must fit. Here, in the words of
``shardwise.lowering.lowered`` and with its own local costs:

    minimize    Σ_o runs_o Σ_w seconds_w y_ow  +  Σ_o Σ_r runs_o Σ_ms move(m, s) f_orms  +  Σ_vg runs_g Σ_st move(s, t) z_vgst
    such that   Σ_s x_vs = 1    Σ_w y_ow = 1                                       every value, every op         (``_choices``)
                Σ_s f_orms = Σ_{w makes m} y_ow    Σ_m f_orms = x_vs               result r of op o is v         (``_made``)
                Σ_s e_ust = Σ_{w needs t} y_ow     Σ_t e_ust = x_vs    e_u ≤ z_vg  use u of v, in region g       (``_used``)
                Σ_v blocks(v, s) x_vs ≤ usable                                     points that can be peaks      (``_memory``)

x, y are binary, the others follow. A reshard is paid once in a region (z). Partial values may wait where the lowering lets
them.

Two things make it smaller and leave the optimum as it is. A value with one use, in the region where it is made, and that no
row of memory counts, needs no x: its flow goes from what is made to what is needed, over the cheapest way to lie in between
(``_direct``). And axes that share a dimension are in one order, that of the mesh: with one order everywhere nothing costs more.

Deviations. Alpa merges elementwise ops into their operands and has no deferred reductions, no storage apart from how an op
computes, no sharing of reshards. Here nothing is merged, so that every lowered state is a solution: its ``local_s`` is never
less than ``Optimum.bound_s``. In memory only stored values count, copies do not, which bounds from below as well. Local
costs (a roofline for every op) are not those of the model (one for every fused kernel): compare ``local_s`` with ``bound_s``,
not with times of a ``Cost``.

Weak: variables grow with the squares of the shardings a value may have; with a thousand ops one mesh axis takes seconds, two
take minutes.
A solution is no state: the same dimension may be sharded here and whole there, which no list of decisions can say
(``benchmarks.search.ilp_state`` looks for the nearest).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from shardwise.cost.memory import blocks
from shardwise.cost.model import CostModel
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Op
from shardwise.lowering.candidates import Candidates
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.sharding import ArrayType, Axes, Sharding, reshard
from shardwise.search.run import SearchError

Array = np.ndarray[Any, Any]
#: More variables than this are refused.
MOST: Final = 1_000_000


class Option(NamedTuple):
    """A candidate of an op: the shardings of its operands and results, and its time."""

    needs: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    seconds: float


@dataclass(frozen=True)
class Optimum:
    """``bound_s``: no state that fits has less ``local_s``. ``local_s``: what the solution itself costs, None where none was
    found in time. ``lies`` and ``options`` are the solution, by value and by op."""

    bound_s: float
    local_s: float | None
    seconds: float
    variables: int
    lies: dict[int, Sharding] = field(repr=False)
    options: dict[int, Option] = field(repr=False)


def ilp(model: CostModel, mesh: MeshAxes, seconds: float = 60.0, gap: float = 1e-4, most: int = MOST) -> Optimum:
    """Solves a program on a mesh until the solution is within ``gap`` of the bound, or for some seconds."""
    start = time.perf_counter()
    made = _Program(model, mesh, most)
    made.build()
    left = max(0.0, seconds - (time.perf_counter() - start))
    found = milp(
        made.cost,
        integrality=made.integral,
        bounds=Bounds(0, 1),
        constraints=made.constraints(),
        options={"time_limit": left, "mip_rel_gap": gap},
    )
    if found.status == 2:
        raise SearchError(f"ilp: no sharding of the stored values over {mesh} fits the memory of a device")
    bound = made.scale_s * (found.mip_dual_bound if found.mip_dual_bound is not None else 0.0)
    spent = time.perf_counter() - start
    if found.x is None:
        return Optimum(bound, None, spent, len(made.cost), {}, {})
    return Optimum(bound, made.scale_s * found.fun, spent, len(made.cost), *made.solution(found.x))


def local_s(model: CostModel, lowered: Lowered) -> float:
    """What a lowered state costs by the measure of the integer program."""
    program, cost = model.structure.program, model.cost
    total, paid = 0.0, set()
    for op in program.schedule:
        if op.rule is None:
            continue
        seconds = _seconds(
            lowered.memo.candidates, op, lowered.computes[op.id].assigned, lowered.computes[op.id].passed
        )
        for r in lowered.operand_reshards(op):
            if (op.region, r.value, r.target) not in paid:
                paid.add((op.region, r.value, r.target))
                seconds += cost.communication_s(r.steps, model.structure.early[r.value])
        seconds += sum(cost.communication_s(r.steps, False) for r in lowered.result_reshards(op))
        total += seconds * float(program.runs[op.region])
    return total


def _seconds(candidates: Candidates, op: Op, assigned: tuple[Axes, ...], passed: Axes) -> float:
    factor = {a: f for f, axes in enumerate(assigned) for a in axes}
    able = tuple(() if a in passed else (factor.get(a, -1),) for a in range(len(candidates.mesh.sizes)))
    (way,) = candidates.of(op, able, assigned, passed)
    return way.seconds


def shardings(shape: Sequence[int], mesh: MeshAxes, partial: bool) -> list[Sharding]:
    """All shardings of an array, the whole one first; with ``partial`` also those that wait for a reduction. Axes that share a
    dimension are in the order of the mesh.

    >>> mesh = MeshAxes.of({"x": 2, "y": 2})
    >>> [s.text(mesh) for s in shardings((4, 2), mesh, False)]
    ['[-,-]', '[y,-]', '[-,y]', '[x,-]', '[x·y,-]', '[x,y]', '[-,x]', '[y,x]']
    """
    found = []
    places = [-1, *range(len(shape)), *([len(shape)] if partial else [])]
    for where in itertools.product(places, repeat=len(mesh.sizes)):
        *dims, waiting = (tuple(a for a in range(len(mesh.sizes)) if where[a] == d) for d in range(len(shape) + 1))
        if all(size % math.prod(mesh.sizes[a] for a in axes) == 0 for size, axes in zip(shape, dims, strict=True)):
            found.append(Sharding(tuple(dims), waiting))
    return found


def options(candidates: Candidates, op: Op) -> list[Option]:
    """The candidates of an op; of those with the same shardings of operands and results only the fastest."""
    rule = op.rule
    assert rule is not None
    axes = tuple(range(len(candidates.mesh.sizes)))
    split = [f for f, ok in enumerate(rule.splittable) if ok]
    able = ((*split, -1),) * len(axes)
    linear = candidates.structure.linear[op.id]
    passing = axes if linear != () else ()
    best: dict[tuple[tuple[Sharding, ...], tuple[Sharding, ...]], float] = {}
    for way in candidates.of(op, able, (axes,) * len(rule.factors), passing):
        for needs in _passing(op, linear, way.needs, way.passed):
            key = (needs, way.results)
            best[key] = min(way.seconds, best.get(key, way.seconds))
    return [Option(*key, seconds) for key, seconds in best.items()]


def _passing(
    op: Op, linear: tuple[int, ...] | None, needs: tuple[Sharding, ...], passed: Axes
) -> Iterator[tuple[Sharding, ...]]:
    """What an op may need that passes partial values on: which of its operands are partial, for each axis."""
    if not passed:
        yield needs
        return
    given = [k for k, v in enumerate(op.operands) if v >= 0]
    if linear is None:
        sets: list[tuple[int, ...]] = [s for n in range(1, len(given) + 1) for s in itertools.combinations(given, n)]
    else:
        sets = [(k,) for k in linear if k in given]
    for chosen in itertools.product(sets, repeat=len(passed)):
        yield tuple(
            Sharding(need.dims, tuple(a for a, own in zip(passed, chosen, strict=True) if k in own))
            for k, need in enumerate(needs)
        )


class _Program:
    """The variables and rows of the integer program, as they are made."""

    def __init__(self, model: CostModel, mesh: MeshAxes, most: int):
        self.model, self.mesh, self.most = model, mesh, most
        self.structure = model.structure
        self.program = self.structure.program
        candidates = Candidates(self.structure, mesh, model.cost)
        self.candidates = candidates
        ops = [op for op in self.program.schedule if op.rule is not None]
        self.options = {op.id: options(candidates, op) for op in ops}
        waits = self.structure.waits
        values = self.program.values
        self.lies = {v: shardings(values[v].shape, mesh, waits[v]) for op in ops for v in op.results}
        self.x: dict[int, range] = {}
        self.y: dict[int, range] = {}
        self.cost: list[float] = []
        self.integral: list[int] = []
        whole_s = sum(self._runs(op) * max(o.seconds for o in self.options[op.id]) for op in ops)
        self.scale_s = max(whole_s, 1e-12) / 1e3  # so that costs are about one
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._data: list[float] = []
        self._least: list[float] = []
        self._most: list[float] = []
        self._moves: dict[object, float] = {}
        self._shortest_known: dict[object, tuple[Array, Array]] = {}
        self._between: dict[int, tuple[range, Array]] = {}  # by value without x: its flow, and how it lies on the way

    def build(self) -> None:
        rows = self._peaks()
        fixed = {v for alive in rows for v in alive}
        makers = {v: (op, r) for op in self.program.schedule if op.rule is not None for r, v in enumerate(op.results)}
        uses: dict[int, list[tuple[Op, int]]] = {v: [] for v in makers}
        for op in self.program.schedule:
            for k, v in enumerate(op.operands if op.rule is not None else ()):
                if v >= 0:
                    uses[v].append((op, k))
        direct = {
            v for v, own in uses.items() if v not in fixed and len(own) == 1 and own[0][0].region == makers[v][0].region
        }
        self._choices(v for v in makers if v not in direct)
        for v, (op, result) in makers.items():
            if v in direct:
                self._direct(v, op, result, *uses[v][0])
                continue
            self._made(op, result, v)
            by_region: dict[int, list[tuple[Op, int]]] = {}
            for user, k in uses[v]:
                by_region.setdefault(user.region, []).append((user, k))
            for users in by_region.values():
                self._used(v, users)
        self._memory(rows)

    def constraints(self) -> Any:
        shape = (len(self._least), len(self.cost))
        matrix = csr_array((self._data, (self._rows, self._columns)), shape=shape)
        return LinearConstraint(matrix, self._least, self._most)

    # Variables and rows.

    def _new(self, costs_s: Sequence[float], integral: bool = False) -> range:
        start = len(self.cost)
        self.cost += [c / self.scale_s for c in costs_s]
        self.integral += [int(integral)] * len(costs_s)
        if len(self.cost) > self.most:
            raise SearchError(
                f"ilp: {len(self.program.ops):,} ops on {self.mesh} take more than {self.most:,} variables; "
                "solve it on fewer mesh axes, or a smaller program"
            )
        return range(start, len(self.cost))

    def _row(self, terms: Iterable[tuple[int, float]], least: float, most: float) -> None:
        row = len(self._least)
        for column, factor in terms:
            self._rows.append(row)
            self._columns.append(column)
            self._data.append(factor)
        self._least.append(least)
        self._most.append(most)

    def _runs(self, op: Op) -> float:
        return float(self.program.runs[op.region])

    def _move_s(self, array: ArrayType, source: Sharding, target: Sharding, early: bool) -> float:
        if source == target:
            return 0.0
        key = (array, source, target, early)
        if key not in self._moves:
            steps = reshard(array, source, target, self.mesh)
            self._moves[key] = self.model.cost.communication_s(steps, early)
        return self._moves[key]

    # The parts of the formula.

    def _choices(self, values: Iterable[int]) -> None:
        for v in values:
            self.x[v] = self._new([0.0] * len(self.lies[v]), True)
            self._row(((n, 1.0) for n in self.x[v]), 1, 1)
        for number, own in self.options.items():
            runs = self._runs(self.program.ops[number])
            self.y[number] = self._new([runs * o.seconds for o in own], True)
            self._row(((n, 1.0) for n in self.y[number]), 1, 1)

    def _made(self, op: Op, result: int, value: int) -> None:
        """From how a result is computed to how it lies."""
        by_made = self._by(op, [o.results[result] for o in self.options[op.id]])
        self._flow(by_made, value, self.candidates.arrays[value], self._runs(op), False, True)

    def _direct(self, value: int, op: Op, result: int, user: Op, operand: int) -> None:
        """From how a result is computed to what its one use needs, over the cheapest way to lie in between."""
        made = self._by(op, [o.results[result] for o in self.options[op.id]])
        needs = self._by(user, [o.needs[operand] for o in self.options[user.id]])
        seconds, between = self._shortest(value, self.candidates.operand(user, operand), tuple(made), tuple(needs))
        own = self._new((seconds * self._runs(op)).ravel().tolist())
        for k, candidates in enumerate(made.values()):
            self._row(
                [*((n, 1.0) for n in own[k * len(needs) : (k + 1) * len(needs)]), *((n, -1.0) for n in candidates)],
                0,
                0,
            )
        for k, candidates in enumerate(needs.values()):
            self._row([*((n, 1.0) for n in own[k :: len(needs)]), *((n, -1.0) for n in candidates)], 0, 0)
        self._between[value] = (own, between)

    def _shortest(
        self, value: int, used: ArrayType, results: tuple[Sharding, ...], needs: tuple[Sharding, ...]
    ) -> tuple[Array, Array]:
        """(from, to): the seconds over the best sharding in between, and which of the value's it is."""
        early, lies, array = self.structure.early[value], self.lies[value], self.candidates.arrays[value]
        key = (array, used, tuple(lies), results, needs, early)
        if key not in self._shortest_known:
            there = np.array([[self._move_s(array, m, lie, False) for lie in lies] for m in results])
            back = np.array([[self._move_s(used, lie, t, early) for t in needs] for lie in lies])
            over = there[:, :, None] + back
            self._shortest_known[key] = over.min(axis=1), over.argmin(axis=1)
        return self._shortest_known[key]

    def _used(self, value: int, users: Sequence[tuple[Op, int]]) -> None:
        """From how a value lies to what its uses in one region need, each different need once."""
        early = self.structure.early[value]
        flows = []
        for op, k in users:
            by_need, array = self._by(op, [o.needs[k] for o in self.options[op.id]]), self.candidates.operand(op, k)
            runs = self._runs(op) if len(users) == 1 else 0.0
            flows.append((array, self._flow(by_need, value, array, runs, early, False)))
        if len(users) == 1:
            return
        moves = dict.fromkeys((array, pair) for array, flow in flows for pair in flow)
        runs = self._runs(users[0][0])
        moved = {(a, pair): s for a, pair in moves if (s := self._move_s(a, *pair, early) * runs) > 0}
        for ((array, pair), _), z in zip(moved.items(), self._new(list(moved.values())), strict=True):
            for used, flow in flows:
                if pair in flow and used == array:
                    self._row([(z, 1.0), (flow[pair], -1.0)], 0, np.inf)

    def _by(self, op: Op, shardings: Sequence[Sharding]) -> dict[Sharding, list[int]]:
        """The variables of an op's candidates by one of their shardings."""
        found: dict[Sharding, list[int]] = {}
        for n, sharding in zip(self.y[op.id], shardings, strict=True):
            found.setdefault(sharding, []).append(n)
        return found

    def _flow(
        self, by_end: dict[Sharding, list[int]], value: int, array: ArrayType, runs: float, early: bool, into: bool
    ) -> dict[tuple[Sharding, Sharding], int]:
        """Variables for every pair of a value's shardings and an op's, by (from, to)."""
        lies = dict(zip(self.lies[value], self.x[value], strict=True))
        pairs = [(end, lie) if into else (lie, end) for end in by_end for lie in lies]
        own = self._new([runs * self._move_s(array, *pair, early) if runs else 0.0 for pair in pairs])
        flow = dict(zip(pairs, own, strict=True))
        for end, candidates in by_end.items():
            terms = [(flow[(end, lie) if into else (lie, end)], 1.0) for lie in lies]
            self._row([*terms, *((n, -1.0) for n in candidates)], 0, 0)
        for lie, n in lies.items():
            terms = [(flow[(end, lie) if into else (lie, end)], 1.0) for end in by_end]
            self._row([*terms, (n, -1.0)], 0, 0)
        return flow

    def _peaks(self) -> list[list[int]]:
        """The stored values alive at points that can be peaks over what there is: where one more has come and the next event
        is that one goes."""
        live = {v: interval for v, interval in self.model.life.live.items() if v in self.lies}
        whole = {v: self._blocks(v, Sharding.whole(len(self.program.values[v].shape))) for v in live}
        starts = sorted({first for first, _ in live.values()})
        ends = np.array(sorted({last for _, last in live.values()}))
        found: dict[tuple[int, ...], None] = {}
        for at, following in itertools.zip_longest(starts, starts[1:]):
            if following is not None and following <= ends[np.searchsorted(ends, at)]:
                continue
            alive = tuple(v for v, (first, last) in live.items() if first <= at <= last)
            if sum(whole[v] for v in alive) > self.model.usable_blocks:
                found[alive] = None
        return [list(alive) for alive in found]

    def _blocks(self, value: int, sharding: Sharding) -> int:
        return blocks(self.program.values[value], sharding, self.mesh, self.model.cost.profile)

    def _memory(self, rows: list[list[int]]) -> None:
        """Relative to what there is, so that coefficients are about one."""
        usable = self.model.usable_blocks
        for alive in rows:
            fixed = ((n, self._blocks(v, s)) for v in alive for n, s in zip(self.x[v], self.lies[v], strict=True))
            self._row(((n, size / usable) for n, size in fixed), 0, 1)

    def solution(self, found: Array) -> tuple[dict[int, Sharding], dict[int, Option]]:
        """How values lie and ops compute."""
        lies = {v: self.lies[v][int(found[own.start : own.stop].argmax())] for v, own in self.x.items()}
        for v, (own, between) in self._between.items():
            lies[v] = self.lies[v][int(between.ravel()[found[own.start : own.stop].argmax()])]
        chosen = {o: self.options[o][int(found[own.start : own.stop].argmax())] for o, own in self.y.items()}
        return lies, chosen
