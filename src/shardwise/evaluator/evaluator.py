"""The cost of many states, each computed from a state that is near it (design, section 7).

The problem. A search asks for the costs of thousands of states, and lowering one of them from nothing takes tens of
milliseconds.

The idea. The cost is a sum of local terms (``shardwise.cost.model``), and what a term reads depends on few decisions
(``shardwise.evaluator.dependencies``). A *snapshot* holds everything that was computed for a state. A new state starts from
the most similar of the recent snapshots. The nodes that read a changed decision are computed again, in order; where a result
differs, so are the nodes that read it. Terms that read a changed result are computed again, and the difference is added to the
sums. Terms that are equal in every state are one *class*, which is computed once and counted as often as it occurs. Results
are looked up by what they were computed from, so that nothing is computed twice in the same situation.

Costs are whole picoseconds and blocks, so they equal those of the specification exactly. What limits the speed is situations
that were never seen: new local choices and new terms.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Final

import numpy as np

from shardwise.cost.model import Cost, CostModel, Figures, Term, in_use
from shardwise.evaluator.dependencies import Dependencies, Node, Situation
from shardwise.evaluator.space import Action, Seen, Space
from shardwise.lowering.candidates import NO_CANDIDATE, Candidates
from shardwise.lowering.decisions import Decision, State
from shardwise.lowering.lowered import Lowered, Memo
from shardwise.lowering.structure import numbered

Array = np.ndarray[Any, Any]
_EMPTY: Final = np.zeros(0, np.int64)
#: Snapshots from which new states can start.
_RECENT: Final = 64


@dataclass(frozen=True, slots=True)
class Part:
    """What the terms of a class cost in sum: three times, and how the memory in use changes at some points (``in_use``)."""

    compute_ps: int
    comm_ps: int
    overlapped_ps: int
    points: Array
    blocks: Array


@dataclass(frozen=True, slots=True)
class Class:
    """Terms that are equal in every state: the first of them, their number, and for each of its points those of all of them.
    ``read`` picks what the term reads from the results of all nodes; ``width`` is the number of points of the program, and one
    for the end."""

    term: Term
    count: int
    width: int
    points: dict[int, Array]
    read: Callable[[Sequence[Any]], Hashable]
    parts: dict[Hashable, Part] = field(default_factory=dict)

    def part(self, figures: Figures) -> Part:
        times = (self.count * figures.compute_ps, self.count * figures.comm_ps, self.count * figures.overlapped_ps)
        if not figures.allocations:
            return Part(*times, _EMPTY, _EMPTY)
        starts = [self.width * a.on_chip for a in figures.allocations]
        pairs = zip(figures.allocations, starts, strict=True)
        points = [p for a, start in pairs for p in (self.points[a.first] + start, self.points[a.last] + start + 1)]
        blocks = [n for a in figures.allocations for n in (a.blocks, -a.blocks)]
        return Part(*times, np.concatenate(points), np.repeat(blocks, self.count))


_NO_PART: Final = Part(0, 0, 0, _EMPTY, _EMPTY)


class _Rule:
    """A node with a memo of its results by what it read."""

    __slots__ = ("_index", "_kind", "_wide_memo", "_wide_read", "_wide_view", "memo", "read", "view")

    def __init__(self, node: Node):
        self._kind, self._index, self.view, self._wide_view = node.kind, node.index, node.view, node.wide_view
        self.read: Callable[[Sequence[Any]], Hashable] = itemgetter(*node.reads) if node.reads else _nothing
        self._wide_read = itemgetter(*node.wide_reads) if node.wide_reads else _nothing
        self.memo: dict[Hashable, Any] = {}  # None where the result depends on more, which the wide key has
        self._wide_memo: dict[Hashable, Any] = {}

    def result(self, key: Hashable, seen: list[int], lowered: _LazyLowering) -> Any:
        """Computes the result, or looks it up by the wide key where consumers were compared (``Lowered.stays``)."""
        if key in self.memo:
            wide = (seen[self._wide_view], self._wide_read(lowered.results))
            if wide in self._wide_memo:
                return self._wide_memo[wide]
        state = lowered()
        comparisons = state.comparisons
        if self._kind == "stored":
            result: Any = state.stored(self._index)[0]
        else:
            result = state.choose(self._index) if self._kind == "computes" else state.actual_sharding(self._index)
        if state.comparisons == comparisons:
            self.memo[key] = result
        else:
            self.memo[key] = None
            self._wide_memo[seen[self._wide_view], self._wide_read(lowered.results)] = result
        return result


def _nothing(results: Sequence[Any]) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a state decides by view, the results of all nodes, the parts of all classes, and their sums."""

    seen: list[int]
    results: list[Any]
    parts: list[Part]
    times_ps: tuple[int, int, int]
    changes: Array
    on_chip_blocks: int

    @property
    def curve(self) -> Array:
        """The blocks in use at each point."""
        return in_use(self.changes, self.on_chip_blocks)

    @property
    def cost(self) -> Cost:
        return Cost(*self.times_ps, int(self.curve.max(initial=0)))


class _Prepared:
    """What the evaluators of a program share on all meshes: the classes of its terms, and by node those that read it."""

    def __init__(self, model: CostModel, dependencies: Dependencies):
        self._model, self.dependencies = model, dependencies
        s = model.structure
        facts = zip(dependencies.actual, dependencies.stored, s.early, s.late, s.overlapped, strict=True)
        self._values = numbered(facts)
        self._read = [(*op.operands, *op.results) for op in s.program.ops]
        self.classes = self._make_classes()
        del self._model  # it keeps this object
        readers: list[list[int]] = [[] for _ in dependencies.nodes]
        for number, same in enumerate(self.classes):
            for node in self._term_nodes(same.term):
                readers[node].append(number)
        self.readers = [tuple(numbers) for numbers in readers]

    def _term_nodes(self, term: Term) -> list[int]:
        nodes = self.dependencies
        by_value = [by_value[v] for by_value in (nodes.actual, nodes.stored) for v in term.values]
        return [*(nodes.computes[k] for k in term.ops), *by_value]

    def _make_classes(self) -> list[Class]:
        equal: dict[Hashable, list[Term]] = {}
        for term in self._model.terms:
            equal.setdefault(self._key(term), []).append(term)
        classes = []
        for terms in equal.values():
            all_points = np.array([t.points for t in terms], np.int64).reshape(len(terms), -1)
            points = {p: all_points[:, n] for n, p in reversed(list(enumerate(terms[0].points)))}
            nodes = self._term_nodes(terms[0])
            width = self._model.life.points + 1
            classes.append(Class(terms[0], len(terms), width, points, itemgetter(*nodes)))
        return classes

    def _key(self, term: Term) -> Hashable:
        """Equal for terms that cost the same in every state."""
        computes, read = self.dependencies.computes, self._read
        values = tuple([self._values[v] for v in term.values])
        place = {v: k for k, v in enumerate(term.values)}
        used = tuple([(computes[k], *[place.get(v, -1) for v in read[k]]) for k in term.ops])
        # Allocations go from the earliest to the latest of some points: their order is part of the key.
        rank = {point: k for k, point in enumerate(sorted(set(term.points)))}
        order = tuple([rank[point] for point in term.points])
        runs = float(self._model.structure.program.runs[term.region])
        return term.kind, values, used, order, runs, self._model.shape(term)


class Evaluator:
    """A cost model prepared for many states: ``evaluate`` returns the costs of sequences of action numbers."""

    def __init__(self, model: CostModel, space: Space, decisions: Sequence[Decision]):
        self.model, self.space = model, space
        self.actions = tuple(Action.of(decision, space) for decision in decisions)
        situation = Situation(model.structure.program, space)
        if situation.key not in model.prepared:
            model.prepared[situation.key] = _Prepared(model, Dependencies(model.structure, situation))
        prepared: _Prepared = model.prepared[situation.key]
        self.dependencies = nodes = prepared.dependencies
        candidates = Candidates(model.structure, space.mesh, model.cost)
        self._memo = Memo(candidates, lambda op: nodes.reach(op, space))
        self._classes = [replace(same, parts={}) for same in prepared.classes]
        self._nodes = []
        for node, readers, class_readers in zip(nodes.nodes, nodes.readers, prepared.readers, strict=True):
            rule = _Rule(node)
            self._nodes.append((node.view, rule.read, rule.memo, rule, readers, class_readers))
        self._numbers: dict[Hashable, int] = {}
        self._views: list[tuple[dict[int, Seen], dict[tuple[Seen, ...], int]]] = []
        for view in nodes.views:
            seen = ((n, action.seen(*view)) for n, action in enumerate(self.actions))
            self._views.append(({n: what for n, what in seen if what is not None}, {}))
        # Recent snapshots, with what each decides by view and when it was last used. At first there is nothing.
        results: list[Any] = [*[None] * len(self._nodes), NO_CANDIDATE]  # the last, -1, is for ops without a rule
        parts, changes = [_NO_PART] * len(self._classes), np.zeros(2 * (model.life.points + 1), np.int64)
        nothing = Snapshot([-1] * len(self._views), results, parts, (0, 0, 0), changes, model.on_chip_blocks)
        self._recent = [nothing] * _RECENT
        self._recent_seen = np.full((_RECENT, len(self._views)), -1)
        self._last_used = np.zeros(_RECENT, np.int64)
        self._view_nodes = np.array([len(numbers) for numbers in nodes.by_view])

    # Evaluating.

    def evaluate(self, states: Sequence[Sequence[int]]) -> list[Cost]:
        """The costs of states, each a sequence of action numbers in the order in which they are taken."""
        return [self._snapshot(tuple(state)).cost for state in states]

    def curve(self, state: Sequence[int]) -> Array:
        """The blocks in use at each point under a state."""
        return self._snapshot(tuple(state)).curve

    def _snapshot(self, state: tuple[int, ...]) -> Snapshot:
        """The snapshot of a state, computed from the recent one of which the fewest nodes read other decisions."""
        seen = self._seen(state)
        differing = (self._recent_seen != seen) @ self._view_nodes
        nearest = int(differing.argmin())
        self._last_used[nearest] = now = self._last_used.max() + 1
        snapshot = self._recent[nearest]
        if differing[nearest]:
            snapshot = self._updated(snapshot, state, seen)
            oldest = int(self._last_used.argmin())
            self._recent[oldest], self._recent_seen[oldest], self._last_used[oldest] = snapshot, seen, now
        return snapshot

    def _updated(self, base: Snapshot, state: tuple[int, ...], seen: list[int]) -> Snapshot:
        """The snapshot of a state, computed from that of another."""
        results = base.results.copy()
        lowered = _LazyLowering(self, state, results)
        dirty = bytearray(len(self._nodes))
        for before, after, numbers in zip(base.seen, seen, self.dependencies.by_view, strict=True):
            if before != after:
                for number in numbers:
                    dirty[number] = 1
        classes: set[int] = set()
        number = dirty.find(1)
        while number >= 0:
            view, read, memo, rule, readers, class_readers = self._nodes[number]
            key = (seen[view], read(results))
            result = memo.get(key)
            if result is None:
                result = rule.result(key, seen, lowered)
            if result is not results[number]:
                results[number] = result
                classes.update(class_readers)
                for reader in readers:
                    dirty[reader] = 1
            number = dirty.find(1, number + 1)
        parts, changes = base.parts.copy(), base.changes.copy()
        compute, comm, hidden = base.times_ps
        added: list[Part] = []
        removed: list[Part] = []
        for number in classes:
            terms, old = self._classes[number], parts[number]
            reads = terms.read(results)
            new = terms.parts.get(reads)
            if new is None:
                new = terms.parts[reads] = terms.part(self.model.figures(lowered(), terms.term))
            if old is not new:
                parts[number] = new
                compute += new.compute_ps - old.compute_ps
                comm += new.comm_ps - old.comm_ps
                hidden += new.overlapped_ps - old.overlapped_ps
                if len(new.points):
                    added.append(new)
                if len(old.points):
                    removed.append(old)
        for some, sign in ((added, 1), (removed, -1)):
            if some:
                blocks = np.concatenate([part.blocks for part in some])
                np.add.at(changes, np.concatenate([part.points for part in some]), sign * blocks)
        lowered.close()
        return Snapshot(seen, results, parts, (compute, comm, hidden), changes, base.on_chip_blocks)

    def _seen(self, state: tuple[int, ...]) -> list[int]:
        """Returns, by view, a number for what a state decides about its units, bits and keeps; states that agree have one."""
        numbers = []
        for by_action, memo in self._views:
            seen = tuple([by_action[n] for n in state if n in by_action])
            number = memo.get(seen)
            if number is None:
                number = memo[seen] = self._numbers.setdefault(_decided(seen), len(self._numbers))
            numbers.append(number)
        return numbers

    def lowered(self, state: Sequence[int]) -> Lowered:
        """A state lowered by the specification."""
        decisions = (*self.space.base, *(self.actions[n].decision for n in state))
        lowered = Lowered(self.model.structure, State(self.space.mesh, decisions), self.model.cost)
        lowered.lower_all()
        return lowered


def _decided(seen: tuple[Seen, ...]) -> Hashable:
    """Equal for sequences that decide the same: the order of two actions counts on one axis or for one unit."""
    by_unit: dict[int, tuple[Seen, ...]] = {}
    by_axis: dict[int, tuple[Seen, ...]] = {}
    for one in seen:
        if one[0] >= 0:
            by_unit[one[0]] = (*by_unit.get(one[0], ()), one)
            by_axis[one[2]] = (*by_axis.get(one[2], ()), one)
    others = frozenset(one for one in seen if one[0] < 0)
    return others, frozenset(by_unit.values()), frozenset(by_axis.values())


class _LazyLowering:
    """The lowering of a state that shares the results of nodes, created when first asked for."""

    __slots__ = ("_evaluator", "_lowered", "_state", "results")

    def __init__(self, evaluator: Evaluator, state: tuple[int, ...], results: list[Any]):
        self._evaluator, self._state, self.results = evaluator, state, results
        self._lowered: Lowered | None = None

    def __call__(self) -> Lowered:
        if self._lowered is None:
            e = self._evaluator
            decisions = (*e.space.base, *(e.actions[n].decision for n in self._state))
            lowered = Lowered(e.model.structure, State(e.space.mesh, decisions), e.model.cost, e._memo)
            lowered.storage = _Results(e.dependencies.stored, self.results)  # type: ignore[assignment]
            lowered.actual = _Results(e.dependencies.actual, self.results)  # type: ignore[assignment]
            lowered.computes = _Results(e.dependencies.computes, self.results)  # type: ignore[assignment]
            self._lowered = lowered
        return self._lowered

    def close(self) -> None:
        if self._lowered is not None:
            vars(self._lowered).clear()  # its lazy lists refer to it


class _Results(Sequence[Any]):
    """The results of nodes, by value or op."""

    __slots__ = ("_nodes", "_results")

    def __init__(self, nodes: list[int], results: list[Any]):
        self._nodes, self._results = nodes, results

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        return self._results[self._nodes[index]]

    def __len__(self) -> int:
        return len(self._nodes)
