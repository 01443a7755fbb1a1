"""A summary of the analysis that is saved with a plan, of bounded size: groups of colors, conflicts, decisions."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from shardwise.dims.analysis import Analysis, Conflict, Group
from shardwise.ir.program import Origin
from shardwise.lowering.decisions import State

#: The most groups, conflicts and meetings that are saved; and examples of each.
MOST_GROUPS: Final = 60
MOST_CONFLICTS: Final = 60
MOST_MEETINGS: Final = 150
_EXAMPLES: Final = 4
#: The conflicts of a compatibility set among which examples are searched: an unrolled program has thousands of equal ones.
_MOST_SEARCHED: Final = 200


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """Dimensions that are sharded together: ``size`` the largest size, ``places`` examples of its ``in_all`` dimensions of
    arguments and outputs, ``axes`` the plan's mesh axes for it, major first."""

    number: int
    size: int
    colors: int
    values: int
    nbytes: float
    flops: float
    places: tuple[str, ...]
    in_all: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConflictSummary:
    """Two dimensions of one group that one axis cannot both shard, in ``count`` ops, with examples of the sides and source
    lines. ``kept``: for each axis of the group the side that is sharded, 1 or 2; 0 where no side is consistent."""

    bit: int
    group: int
    count: int
    first: tuple[str, ...]
    second: tuple[str, ...]
    lines: tuple[str, ...]
    kept: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Two groups, and the number of values with dimensions of both: one axis can shard only one of them there."""

    one: int
    other: int
    values: int


@dataclass(frozen=True, slots=True)
class ColorGraph:
    """Groups that matter, those with an axis first, then by arithmetic; and how many are left out."""

    groups: tuple[GroupSummary, ...] = ()
    conflicts: tuple[ConflictSummary, ...] = ()
    meetings: tuple[Meeting, ...] = ()
    more_groups: int = 0
    more_conflicts: int = 0


#: Nothing to decide.
NO_COLORS: Final = ColorGraph()


def color_graph(analysis: Analysis, state: State) -> ColorGraph:
    """Returns the groups of an analysis and how a state decides them."""
    axes = {g.id: _axes(g, state) for g in analysis.groups if g.matters}
    every = [analysis.groups[n] for n in axes]
    every.sort(key=lambda g: (not axes[g.id], -g.flops, -g.nbytes, g.id))
    shown = every[:MOST_GROUPS]
    conflicts = _conflicts(analysis, state, axes)
    return ColorGraph(
        tuple(_group(analysis, g, axes[g.id]) for g in shown),
        tuple(itertools.islice(conflicts, MOST_CONFLICTS)),
        _meetings(analysis, [g.id for g in shown]),
        len(every) - len(shown),
        max(0, len(conflicts) - MOST_CONFLICTS),
    )


def _axes(group: Group, state: State) -> tuple[str, ...]:
    """Returns the axes of all colors of a group: a tactic or a pin may have decided some of them alone."""
    colors = set(group.colors)
    return tuple(dict.fromkeys(state.mesh.names[axis] for color, axis in state.order if color in colors))


def _group(analysis: Analysis, group: Group, axes: tuple[str, ...]) -> GroupSummary:
    values = analysis.program.values
    places = sorted(group.places, key=lambda p: values[p.value].origin is not Origin.ARGUMENT)
    examples = tuple(str(p) for p in places[:_EXAMPLES])
    figures = (group.size, len(group.colors), group.values, group.nbytes, group.flops)
    return GroupSummary(group.id, *figures, examples, len(places), axes)


def _conflicts(analysis: Analysis, state: State, axes: dict[int, tuple[str, ...]]) -> list[ConflictSummary]:
    """Returns one summary for each bit of a group that matters: first those that the plan resolves, then by frequency."""
    table, groups = analysis.conflict_table, analysis.group_table
    by_bit: dict[int, list[Conflict]] = {}
    for conflict in analysis.conflicts:
        by_bit.setdefault(int(groups.bit[conflict.compatibility_set]), []).append(conflict)
    summaries = []
    for bit, conflicts in by_bit.items():
        number, group = conflicts[0].compatibility_set, int(groups.group[conflicts[0].color])
        if group not in axes:
            continue
        flipped, consistent = bool(groups.flipped[number]), bool(table.consistent[number])
        kept = {
            axis: 1 + (state.sides.get((bit, state.mesh.index(axis)), 0) ^ flipped) if consistent else 0
            for axis in axes[group]
        }
        examples = [c for c in conflicts if c.compatibility_set == number][:_MOST_SEARCHED]
        sides, lines = _sides(analysis, examples), _lines(analysis, examples)
        summaries.append(ConflictSummary(bit, group, len(conflicts), *sides, lines, kept))
    return sorted(summaries, key=lambda c: (not c.kept, -c.count, c.bit))


def _sides(analysis: Analysis, conflicts: Sequence[Conflict]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns examples of both sides: first arguments and outputs, and values of which only one side has a dimension."""
    program = analysis.program
    sides: list[dict[tuple[int, int], None]] = [{}, {}]
    for conflict in conflicts:
        op = program.ops[conflict.op]
        rule = op.factor_rule
        majors_of = zip((*op.operands, *op.results), (*rule.operand_majors, *rule.result_majors), strict=True)
        for v, d, major in [(v, d, major) for v, majors in majors_of for d, major in enumerate(majors)]:
            for side, factor in zip(sides, (conflict.first, conflict.second), strict=True):
                if major == factor:
                    side[v, d] = None

    def examples(side: Iterable[tuple[int, int]], other: Iterable[tuple[int, int]]) -> tuple[str, ...]:
        others = {v for v, _ in other}
        ranked = sorted(side, key=lambda place: (not program.values[place[0]].path, place[0] in others))
        return tuple(dict.fromkeys(f"{program.label(v)}[{d}]" for v, d in ranked[:_EXAMPLES]))

    return examples(*sides), examples(*reversed(sides))


def _lines(analysis: Analysis, conflicts: Sequence[Conflict]) -> tuple[str, ...]:
    """Returns source lines, the most frequent first."""
    program = analysis.program
    counts = Counter(str(program.source_of(program.ops[c.op])) for c in conflicts)
    counts.pop("?", None)
    return tuple(sorted(counts, key=lambda line: (-counts[line], line))[:_EXAMPLES])


def _meetings(analysis: Analysis, shown: Sequence[int]) -> tuple[Meeting, ...]:
    """Returns pairs of groups by the number of values with both, the most frequent first."""
    names = analysis.names
    group = analysis.group_table.group[names.color[names.member_node]]
    rows = np.unique(np.stack([names.member_value, group], axis=1)[np.isin(group, shown)], axis=0)
    counts: Counter[tuple[int, int]] = Counter()
    for _, of_value in itertools.groupby(rows.tolist(), key=lambda row: row[0]):
        counts.update(itertools.combinations([number for _, number in of_value], 2))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Meeting(*pair, count) for pair, count in ranked[:MOST_MEETINGS])
