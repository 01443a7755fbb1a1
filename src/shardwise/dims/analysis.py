"""The finished analysis, as people and later stages ask it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.dims.conflicts import ConflictTable, find_conflicts
from shardwise.dims.groups import GroupTable, find_groups
from shardwise.dims.names import Names, build_names
from shardwise.dims.why import Chain, find_chain
from shardwise.ir.collector import collector_paused
from shardwise.ir.program import HEAVY, Op, Origin, Program
from shardwise.ir.traits import BORDERS


@dataclass(frozen=True, slots=True)
class Place:
    """One dimension of one value, as a person would name it."""

    value: int
    dim: int
    label: str

    def __str__(self) -> str:
        return f"{self.label}[{self.dim}]"


@dataclass(frozen=True, slots=True)
class Color:
    """Dimensions that want to be sharded alike across the program.

    ``sizes`` are the sizes it has (more than one only across slices, windows and merged dimensions); ``places`` its
    dimensions of arguments and outputs; ``values`` how many values have it; ``nbytes`` their bytes and ``flops`` the
    FLOPs of the ops that can compute it in parts, both over all trips of loops (of the branches of a ``cond`` only the
    dearest has FLOPs). ``loop`` says that it is the trip dimension of a loop. ``matters``: can sharding it help? Not if
    every op needs it whole; the trips of a loop only where a product can compute them in parts (a sequence that is also
    scanned over in chunks), since all else of a loop runs trip by trip.
    """

    id: int
    sizes: tuple[int, ...]
    places: tuple[Place, ...]
    values: int
    nbytes: float
    flops: float
    loop: bool
    matters: bool
    group: int

    @property
    def size(self) -> int:
        return max(self.sizes)


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two factors of one op (or two dimensions of one value) with one color.

    ``first`` and ``second`` are the factors' numbers in the op's rule, in the order of the set's orientation.
    """

    op: int
    first: int
    second: int
    color: int
    compatibility_set: int


@dataclass(frozen=True, slots=True)
class CompatibilitySet:
    """Conflicts that must be decided the same way: one bit, which side keeps the axis.

    ``first`` and ``second`` are the two sides: the dimensions of values that are sharded if that side keeps the axis.
    ``bit`` is shared by sets of equal structure; ``flipped`` says that this set's sides are exchanged against the bit's.
    """

    id: int
    color: int
    conflicts: tuple[Conflict, ...]
    first: tuple[Place, ...]
    second: tuple[Place, ...]
    consistent: bool
    bit: int
    flipped: bool


@dataclass(frozen=True, slots=True)
class Group:
    """Colors of equal structure, decided together, with the bits that resolve their conflicts."""

    id: int
    colors: tuple[int, ...]
    sizes: tuple[int, ...]
    bits: tuple[int, ...]
    values: int
    nbytes: float
    flops: float
    matters: bool
    places: tuple[Place, ...]

    @property
    def size(self) -> int:
        return max(self.sizes)


@dataclass(frozen=True)
class Analysis:
    """What can be decided about a program: its colors, conflicts, compatibility sets and groups.

    >>> import jax, jax.numpy as jnp, shardwise
    >>> x, w1, w2 = (jax.ShapeDtypeStruct(s, "float32") for s in [(32, 8), (8, 64), (64, 4)])
    >>> analysis = shardwise.analyze(lambda x, w1, w2: jax.nn.relu(x @ w1) @ w2, x, w1, w2)
    >>> [color.size for color in analysis.colors]
    [32, 8, 64, 4]
    >>> analysis.conflicts
    ()
    """

    program: Program
    names: Names
    conflict_table: ConflictTable
    group_table: GroupTable

    @cached_property
    def colors(self) -> tuple[Color, ...]:
        """All colors, in program order.

        >>> import jax, shardwise
        >>> x, w = jax.ShapeDtypeStruct((32, 8), "float32"), jax.ShapeDtypeStruct((8, 4), "float32")
        >>> analysis = shardwise.analyze(lambda x, w: x @ w, x, w)
        >>> [(color.size, [str(place) for place in color.places]) for color in analysis.colors]
        [(32, ['x[0]', 'out[0]']), (8, ['x[1]', 'w[0]']), (4, ['w[1]', 'out[1]'])]
        """
        names, program = self.names, self.program
        count = names.color_count
        trips = program.trips
        op_flops = np.array([op.flops * program.runs[op.region] for op in program.ops])
        value_bytes = np.array([float(v.nbytes) for v in program.values])
        value_trips = np.ones(len(program.values))
        for region in program.regions[1:]:
            made = [v for k in region.ops if program.ops[k].rule is not None for v in program.ops[k].results]
            value_trips[[v for v in (*region.inputs, *made) if v >= 0]] = trips[region.id]
        flops = np.zeros(count)
        own = names.splittable
        op_color = np.unique(np.stack([names.node_op[own], names.color[own]], axis=1), axis=0)
        np.add.at(flops, op_color[:, 1], op_flops[op_color[:, 0]])
        member_color = names.color[names.member_node]
        value_color = np.unique(np.stack([names.member_value, member_color], axis=1), axis=0)
        nbytes = np.zeros(count)
        np.add.at(nbytes, value_color[:, 1], (value_bytes * value_trips)[value_color[:, 0]])
        values = np.bincount(value_color[:, 1], minlength=count)
        loop = np.zeros(count, dtype=bool)
        loop[names.color[names.trip]] = True
        border = np.array([op.kind in BORDERS for op in program.ops], dtype=bool)
        product = np.array([op.unit in HEAVY for op in program.ops], dtype=bool)
        inner, multiplied = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        inner[names.color[names.splittable & ~border[names.node_op]]] = True
        multiplied[names.color[names.splittable & product[names.node_op]]] = True
        matters = np.where(loop, multiplied, inner)
        sizes: list[set[int]] = [set() for _ in range(count)]
        for node, op_id, factor in zip(
            names.color.tolist(), names.node_op.tolist(), names.node_factor.tolist(), strict=True
        ):
            rule = program.ops[op_id].rule
            assert rule is not None
            sizes[node].add(rule.factors[factor].size)
        for c, size in zip(member_color.tolist(), names.member_size.tolist(), strict=True):
            sizes[c].add(size)
        places = self._border_places(member_color)
        return tuple(
            Color(
                c,
                tuple(sorted(sizes[c], reverse=True)),
                tuple(places.get(c, ())),
                int(values[c]),
                float(nbytes[c]),
                float(flops[c]),
                bool(loop[c]),
                bool(matters[c]),
                int(self.group_table.group[c]),
            )
            for c in range(count)
        )

    def _border_places(self, member_color: np.ndarray) -> dict[int, list[Place]]:
        """Dimensions of arguments and outputs by color, arguments first."""
        found: dict[int, list[Place]] = {}
        border = {v.id: v for v in self.program.values if v.origin in (Origin.ARGUMENT, Origin.OUTPUT)}
        rows = zip(member_color.tolist(), self.names.member_value.tolist(), self.names.member_dim.tolist(), strict=True)
        for color, value, dim in rows:
            if value in border:
                found.setdefault(color, []).append(Place(value, dim, border[value].path))
        return found

    @cached_property
    def value_colors(self) -> tuple[tuple[int, ...], ...]:
        """By value: the colors of its dimensions, -1 for dimensions of size one.

        >>> import jax, shardwise
        >>> x, w = jax.ShapeDtypeStruct((32, 8), "float32"), jax.ShapeDtypeStruct((8, 4), "float32")
        >>> analysis = shardwise.analyze(lambda x, w: x @ w, x, w)
        >>> [analysis.value_colors[analysis.program.paths[path]] for path in ("x", "w", "out")]
        [(0, 1), (1, 2), (0, 2)]
        """
        names = self.names
        colors = [[-1] * len(v.shape) for v in self.program.values]
        rows = (names.member_value, names.member_dim, names.color[names.member_node])
        for value, dim, color in zip(*(row.tolist() for row in rows), strict=True):
            colors[value][dim] = color
        return tuple(map(tuple, colors))

    @cached_property
    def conflicts(self) -> tuple[Conflict, ...]:
        """All conflicts, in program order.

        >>> import jax, shardwise
        >>> x = jax.ShapeDtypeStruct((64, 8), "float32")
        >>> analysis = shardwise.analyze(lambda x: jax.numpy.exp(x @ x.T), x)
        >>> [analysis.program.ops[conflict.op].kind for conflict in analysis.conflicts]
        ['dot_general', 'exp', 'output']
        """
        t, names = self.conflict_table, self.names
        first = np.where(t.mirrored, t.q, t.p)
        second = np.where(t.mirrored, t.p, t.q)
        columns = (t.op, names.node_factor[first], names.node_factor[second], names.color[t.p], t.set)
        return tuple(Conflict(*row) for row in zip(*(c.tolist() for c in columns), strict=True))

    @cached_property
    def compatibility_sets(self) -> tuple[CompatibilitySet, ...]:
        """Families of conflicts; an orientation and its mirror are one.

        >>> import jax, shardwise
        >>> x = jax.ShapeDtypeStruct((64, 8), "float32")
        >>> analysis = shardwise.analyze(lambda x: jax.numpy.exp(x @ x.T), x)
        >>> [(len(family.conflicts), family.consistent) for family in analysis.compatibility_sets]
        [(3, True)]
        """
        by_set: list[list[Conflict]] = [[] for _ in self.conflict_table.consistent]
        for conflict in self.conflicts:
            by_set[conflict.compatibility_set].append(conflict)
        found = []
        for s, members in enumerate(by_set):
            first: dict[Place, None] = {}
            second: dict[Place, None] = {}
            for c in members:
                first.update(dict.fromkeys(self._factor_places(c.op, c.first)))
                second.update(dict.fromkeys(self._factor_places(c.op, c.second)))
            found.append(
                CompatibilitySet(
                    s,
                    members[0].color,
                    tuple(members),
                    tuple(first),
                    tuple(second),
                    bool(self.conflict_table.consistent[s]),
                    int(self.group_table.bit[s]),
                    bool(self.group_table.flipped[s]),
                )
            )
        return tuple(found)

    def _factor_places(self, op_id: int, factor: int) -> list[Place]:
        """The dimensions of an op's results, and of its operands' values, that hold a factor."""
        op = self.program.ops[op_id]
        assert op.rule is not None
        found = []
        for v, majors in [
            *zip(op.results, op.rule.result_majors, strict=True),
            *zip(op.operands, op.rule.operand_majors, strict=True),
        ]:
            found += [Place(v, d, self.program.label(v)) for d, m in enumerate(majors) if m == factor]
        return found

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Decision units: colors of equal structure.

        >>> import jax, shardwise
        >>> def layers(x, weights):
        ...     for up, down in weights:
        ...         x = x + jax.nn.relu(x @ up) @ down
        ...     return x
        >>> x, up, down = (jax.ShapeDtypeStruct(s, "float32") for s in [(32, 8), (8, 64), (64, 8)])
        >>> analysis = shardwise.analyze(layers, x, [(up, down)] * 6)
        >>> len(analysis.colors), [(group.size, len(group.colors)) for group in analysis.groups]
        (8, [(32, 1), (8, 1), (64, 6)])
        """
        members: list[list[Color]] = [[] for _ in range(self.group_table.group_count)]
        for color in self.colors:
            members[color.group].append(color)
        bits: list[set[int]] = [set() for _ in members]
        for s, bit in zip(
            self.conflict_table.set.tolist(), self.group_table.bit[self.conflict_table.set].tolist(), strict=True
        ):
            if self.conflict_table.consistent[s]:
                bits[int(self.group_table.group[self._set_color[s]])].add(bit)
        return tuple(
            Group(
                g,
                tuple(c.id for c in colors),
                tuple(sorted({s for c in colors for s in c.sizes}, reverse=True)),
                tuple(sorted(bits[g])),
                sum(c.values for c in colors),
                sum(c.nbytes for c in colors),
                sum(c.flops for c in colors),
                any(c.matters for c in colors),
                tuple(p for c in colors for p in c.places),
            )
            for g, colors in enumerate(members)
        )

    @cached_property
    def _set_color(self) -> dict[int, int]:
        t = self.conflict_table
        return dict(zip(t.set.tolist(), self.names.color[t.p].tolist(), strict=True))

    @cached_property
    def opaque_ops(self) -> tuple[Op, ...]:
        """Ops with the safe rule: every dimension whole. ``op.opaque`` says why.

        >>> import jax, shardwise
        >>> x, w = jax.ShapeDtypeStruct((32, 8), "float32"), jax.ShapeDtypeStruct((8, 4), "float32")
        >>> analysis = shardwise.analyze(lambda x, w: x @ w, x, w)
        >>> analysis.opaque_ops
        ()
        """
        return tuple(op for op in self.program.ops if op.opaque)

    @property
    def bits(self) -> int:
        """How many binary choices the conflicts leave, after grouping, in groups that matter.

        >>> import jax, shardwise
        >>> x = jax.ShapeDtypeStruct((64, 8), "float32")
        >>> analysis = shardwise.analyze(lambda x: jax.numpy.exp(x @ x.T), x)
        >>> analysis.bits
        1
        """
        return len({bit for group in self.groups if group.matters for bit in group.bits})

    def color_of(self, path: str, dim: int) -> Color | None:
        """The color of a dimension of an argument or output, None where its size is one.

        >>> import jax, shardwise
        >>> x, w = jax.ShapeDtypeStruct((32, 8), "float32"), jax.ShapeDtypeStruct((8, 4), "float32")
        >>> analysis = shardwise.analyze(lambda x, w: x @ w, x, w)
        >>> analysis.color_of("x", 1) is analysis.color_of("w", 0)
        True
        """
        from shardwise.dims.why import place_node

        node = place_node(self.program, self.names, path, dim)
        return None if node is None else self.colors[int(self.names.color[node])]

    def why(self, path_a: str, dim_a: int, path_b: str, dim_b: int) -> Chain:
        """The chain of merges that made two dimensions one color, each with its op and source line.

        Paths are those of arguments and outputs (``"params/w1"``, ``"out/0"``). The chain is empty, and says so, where the
        two have different colors.

        >>> import jax, shardwise
        >>> x, w = jax.ShapeDtypeStruct((32, 8), "float32"), jax.ShapeDtypeStruct((8, 8), "float32")
        >>> chain = shardwise.analyze(lambda x, w: x @ w, x, w).why("x", 1, "w", 0)
        >>> [step.op for step in chain.steps]
        ['dot_general']
        """
        return find_chain(self.program, self.names, (path_a, dim_a), (path_b, dim_b))

    def to_json(self) -> dict[str, Any]:
        """The analysis as plain data, as ``shardwise inspect --json`` prints it.

        >>> import jax, shardwise
        >>> x, w = jax.ShapeDtypeStruct((32, 8), "float32"), jax.ShapeDtypeStruct((8, 4), "float32")
        >>> analysis = shardwise.analyze(lambda x, w: x @ w, x, w)
        >>> len(analysis.to_json()["colors"])
        3
        """
        from shardwise.report.inspection import analysis_json

        return analysis_json(self)

    def __str__(self) -> str:
        from shardwise.report.inspection import analysis_text

        return analysis_text(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook without HTML shows: the same text as a terminal."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        from shardwise.report.notebook import analysis_html

        return analysis_html(self)


@collector_paused
def analyze_program(program: Program, grouping: bool = True) -> Analysis:
    """The static analysis of a captured program."""
    names = build_names(program)
    conflicts = find_conflicts(program, names)
    return Analysis(program, names, conflicts, find_groups(program, names, conflicts, grouping))


def analyze(
    fn: Callable[..., Any],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    static_argnums: Any = None,
    static_argnames: Any = None,
    donate_argnums: Any = None,
    donate_argnames: Any = None,
    grouping: bool = True,
) -> Analysis:
    """Finds what can be sharded in a JAX function: colors, conflicts and how they can be resolved.

    Nothing is run and no device is needed: arguments may be arrays or ``jax.ShapeDtypeStruct``s.

    Args:
      fn: any function that ``jax.jit`` can trace, or one that is already jitted.
      args, kwargs: its arguments, by position and by name.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as in ``jax.jit``.
      grouping: decide repeated structure (layers) together.

    Returns:
      An :class:`Analysis`.

    >>> import jax, shardwise
    >>> shape = jax.ShapeDtypeStruct((16, 16), "float32")
    >>> analysis = shardwise.analyze(lambda x, w: (x @ w) @ w, shape, shape)
    >>> len(analysis.colors), len(analysis.compatibility_sets)
    (2, 1)
    """
    from shardwise.capture.lower import lower  # imports JAX, which reading an analysis does not need
    from shardwise.capture.trace import JitOptions, trace

    options = JitOptions(static_argnums, static_argnames, donate_argnums, donate_argnames)
    return analyze_program(lower(trace(fn, args, kwargs or {}, options)), grouping)
