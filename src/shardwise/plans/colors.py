"""What there was to decide, and how a plan decided it: groups of colors, where they meet, and the conflicts between their own
dimensions. A summary of the analysis that is kept with the plan, of bounded size however large the program is.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from shardwise.dims.analysis import Analysis, Conflict, Group
from shardwise.ir.program import Origin
from shardwise.lowering.decisions import State

#: Groups, conflicts and meetings that are kept; and examples of each.
MOST_GROUPS: Final = 60
MOST_CONFLICTS: Final = 60
MOST_MEETINGS: Final = 150
_EXAMPLES: Final = 4
#: Conflicts of a family that are looked at for examples: an unrolled program has thousands that are alike.
_LOOKED_AT: Final = 200


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """Dimensions that are sharded together: ``number`` is the group's in the analysis, ``size`` its largest; ``places`` are
    examples of its ``in_all`` dimensions of arguments and outputs; ``axes`` what the plan gave it, major first."""

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
    """Two dimensions of one group that one axis cannot both shard, in ``count`` places of the program, by examples: ``first``
    and ``second`` are the sides, ``lines`` where they meet. ``kept`` says for each axis of the group which side has it: 1 or 2;
    0 where there is no consistent side, so that neither has."""

    bit: int
    group: int
    count: int
    first: tuple[str, ...]
    second: tuple[str, ...]
    lines: tuple[str, ...]
    kept: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Two groups that so many values have both: an axis can shard only one of them there."""

    one: int
    other: int
    values: int


@dataclass(frozen=True, slots=True)
class ColorGraph:
    """Groups that matter, those with an axis first, then by what they compute; and how many are left out."""

    groups: tuple[GroupSummary, ...] = ()
    conflicts: tuple[ConflictSummary, ...] = ()
    meetings: tuple[Meeting, ...] = ()
    more_groups: int = 0
    more_conflicts: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "groups": [_plain(asdict(g)) for g in self.groups],
            "conflicts": [_plain(asdict(c)) | {"kept": dict(c.kept)} for c in self.conflicts],
            "meetings": [asdict(m) for m in self.meetings],
            "more_groups": self.more_groups,
            "more_conflicts": self.more_conflicts,
        }


#: Nothing to decide.
NO_COLORS: Final = ColorGraph()


def color_graph(analysis: Analysis, state: State) -> ColorGraph:
    """The groups of an analysis and what a state does with them."""
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
    """Those of its colors together: a tactic or a pin may have decided on some of them alone."""
    own = set(group.colors)
    return tuple(dict.fromkeys(state.mesh.names[axis] for color, axis in state.order if color in own))


def _group(analysis: Analysis, group: Group, axes: tuple[str, ...]) -> GroupSummary:
    values = analysis.program.values
    places = sorted(group.places, key=lambda p: values[p.value].origin is not Origin.ARGUMENT)
    examples = tuple(str(p) for p in places[:_EXAMPLES])
    figures = (group.size, len(group.colors), group.values, group.nbytes, group.flops)
    return GroupSummary(group.id, *figures, examples, len(places), axes)


def _conflicts(analysis: Analysis, state: State, axes: dict[int, tuple[str, ...]]) -> list[ConflictSummary]:
    """One for each bit of a group that matters: those that the plan had to resolve first, then by how often they occur."""
    table, groups = analysis.conflict_table, analysis.group_table
    of_set: dict[int, list[Conflict]] = {}
    count: Counter[int] = Counter()
    first_set: dict[int, int] = {}
    for conflict in analysis.conflicts:
        of_set.setdefault(conflict.compatibility_set, []).append(conflict)
        bit = int(groups.bit[conflict.compatibility_set])
        count[bit] += 1
        first_set.setdefault(bit, conflict.compatibility_set)
    found = []
    for bit, number in first_set.items():
        group = int(groups.group[of_set[number][0].color])
        if group not in axes:
            continue
        flipped, consistent = bool(groups.flipped[number]), bool(table.consistent[number])
        kept = [
            (axis, 1 + (state.sides.get((bit, state.mesh.index(axis)), 0) ^ flipped) if consistent else 0)
            for axis in axes[group]
        ]
        sides = _sides(analysis, of_set[number])
        lines = _lines(analysis, of_set[number])
        found.append(ConflictSummary(bit, group, count[bit], *sides, lines, tuple(kept)))
    return sorted(found, key=lambda c: (not c.kept, -c.count, c.bit))


def _sides(analysis: Analysis, conflicts: Sequence[Conflict]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Examples of both sides: arguments and outputs before what is made inside, and what only one side has first."""
    program = analysis.program
    sides: list[dict[tuple[int, int], None]] = [{}, {}]
    for conflict in conflicts[:_LOOKED_AT]:
        op = program.ops[conflict.op]
        assert op.rule is not None
        held = [
            *zip(op.operands, op.rule.operand_majors, strict=True),
            *zip(op.results, op.rule.result_majors, strict=True),
        ]
        for side, factor in zip(sides, (conflict.first, conflict.second), strict=True):
            side.update(((v, d), None) for v, majors in held for d, major in enumerate(majors) if major == factor)

    def examples(own: dict[tuple[int, int], None], other: dict[tuple[int, int], None]) -> tuple[str, ...]:
        others = {v for v, _ in other}
        ranked = sorted(own, key=lambda place: (not program.values[place[0]].path, place[0] in others))
        return tuple(dict.fromkeys(f"{program.label(v)}[{d}]" for v, d in ranked[:_EXAMPLES]))

    return examples(*sides), examples(*reversed(sides))


def _lines(analysis: Analysis, conflicts: Sequence[Conflict]) -> tuple[str, ...]:
    """Source lines, the most frequent first."""
    program = analysis.program
    found = Counter(str(program.source_of(program.ops[c.op])) for c in conflicts[:_LOOKED_AT])
    found.pop("?", None)
    return tuple(sorted(found, key=lambda line: (-found[line], line))[:_EXAMPLES])


def _meetings(analysis: Analysis, shown: Sequence[int]) -> tuple[Meeting, ...]:
    """Pairs of groups by the number of values that have both, the most first."""
    names = analysis.names
    group = analysis.group_table.group[names.color[names.member_node]]
    rows = np.unique(np.stack([names.member_value, group], axis=1)[np.isin(group, shown)], axis=0)
    found: Counter[tuple[int, int]] = Counter()
    for _, own in itertools.groupby(rows.tolist(), key=lambda row: row[0]):
        found.update(itertools.combinations([number for _, number in own], 2))
    ranked = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Meeting(*pair, count) for pair, count in ranked[:MOST_MEETINGS])


def read_colors(data: Any, axes: Sequence[str]) -> ColorGraph:
    """From plain data; raises KeyError, TypeError or ValueError where that is no such summary for a mesh of these axes."""
    groups = tuple(_read_group(row, axes) for row in _rows(data["groups"], MOST_GROUPS, "groups"))
    known = {g.number for g in groups}
    if len(known) < len(groups):
        raise ValueError("a group is there twice")
    conflicts = tuple(_read_conflict(row, axes) for row in _rows(data["conflicts"], MOST_CONFLICTS, "conflicts"))
    meetings = tuple(
        Meeting(_count(row["one"]), _count(row["other"]), _count(row["values"]))
        for row in _rows(data["meetings"], MOST_MEETINGS, "meetings")
    )
    if strange := {n for m in meetings for n in (m.one, m.other)} - known:
        raise ValueError(f"meetings of groups that are not there: {sorted(strange)}")
    return ColorGraph(groups, conflicts, meetings, _count(data["more_groups"]), _count(data["more_conflicts"]))


def _read_group(row: dict[str, Any], axes: Sequence[str]) -> GroupSummary:
    own = _texts(row["axes"])
    _check_axes(own, axes)
    return GroupSummary(
        number=_count(row["number"]),
        size=_count(row["size"]),
        colors=_count(row["colors"]),
        values=_count(row["values"]),
        nbytes=_figure(row["nbytes"]),
        flops=_figure(row["flops"]),
        places=_texts(row["places"]),
        in_all=_count(row["in_all"]),
        axes=own,
    )


def _read_conflict(row: dict[str, Any], axes: Sequence[str]) -> ConflictSummary:
    kept = row["kept"]
    if not isinstance(kept, dict) or any(type(s) is not int or s not in (0, 1, 2) for s in kept.values()):
        raise ValueError(f"kept says for each axis 0, 1 or 2, not {kept!r}")
    _check_axes(tuple(kept), axes)
    return ConflictSummary(
        bit=_count(row["bit"]),
        group=_count(row["group"]),
        count=_count(row["count"]),
        first=_texts(row["first"]),
        second=_texts(row["second"]),
        lines=_texts(row["lines"]),
        kept=tuple(kept.items()),
    )


def _check_axes(own: Sequence[str], axes: Sequence[str]) -> None:
    if strange := [axis for axis in own if axis not in axes]:
        raise ValueError(f"no axes of the mesh: {', '.join(strange)}")


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in row.items()}


def _rows(value: Any, most: int, what: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"{what}: expected a list of at most {most}")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise TypeError(f"expected a list of texts, not {value!r}")
    return tuple(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a whole number that is not negative, not {value!r}")
    return value


def _figure(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"expected a figure that is not negative, not {value!r}")
    return float(value)
