"""The static analysis of a program: its colors, conflicts, compatibility sets and groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.dims.conflicts import ConflictTable, find_conflicts
from shardwise.dims.groups import GroupTable, find_groups
from shardwise.dims.names import Names, build_names
from shardwise.dims.replaced import find_replaced
from shardwise.dims.why import Chain, find_chain, find_place
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
class Dimensions:
    """Dimensions that are sharded alike. ``sizes`` are their sizes; ``places`` those of arguments and outputs; ``values`` the
    number of values that have one; ``nbytes`` the bytes of these and ``flops`` the FLOPs of the ops that can compute them in
    parts, both over all trips of loops. ``matters``: sharding them can help; not if they are blocked in every op, or are the
    trips of a loop where no product can compute them in parts."""

    id: int
    sizes: tuple[int, ...]
    places: tuple[Place, ...]
    values: int
    nbytes: float
    flops: float
    matters: bool

    @property
    def size(self) -> int:
        return max(self.sizes)


@dataclass(frozen=True, slots=True)
class Color(Dimensions):
    """Dimensions that want to be sharded alike across the program. ``loop``: they are the trips of a loop."""

    loop: bool
    group: int


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two factors of one op (or two dimensions of one value) with one color, in the order of the set's orientation."""

    op: int
    first: int
    second: int
    color: int
    compatibility_set: int


@dataclass(frozen=True, slots=True)
class CompatibilitySet:
    """Conflicts that must be decided the same way: one bit, which side keeps the axis. ``first`` and ``second``: the dimensions
    of values that are sharded if that side keeps it. ``bit`` is shared by sets of equal structure; ``flipped``: against the
    bit's sides."""

    id: int
    color: int
    conflicts: tuple[Conflict, ...]
    first: tuple[Place, ...]
    second: tuple[Place, ...]
    consistent: bool
    bit: int
    flipped: bool


@dataclass(frozen=True, slots=True)
class Group(Dimensions):
    """Colors of equal structure, decided together, with the bits that resolve their conflicts."""

    colors: tuple[int, ...]
    bits: tuple[int, ...]


@dataclass(frozen=True)
class Analysis:
    """What can be decided about a program: its colors, conflicts, compatibility sets and groups.

    The examples of its members continue from these two, of which the second has a conflict:

    >>> import jax.numpy as jnp, shardwise
    >>> analysis = shardwise.analyze(lambda x, w: x @ w, jnp.ones((32, 8)), jnp.ones((8, 4)))
    >>> scores = shardwise.analyze(lambda x: jnp.exp(x @ x.T), jnp.ones((64, 8)))
    >>> [color.size for color in analysis.colors]
    [32, 8, 4]
    """

    program: Program
    names: Names
    conflict_table: ConflictTable
    group_table: GroupTable

    @cached_property
    def colors(self) -> tuple[Color, ...]:
        """All colors, in program order.

        >>> [(color.size, [str(place) for place in color.places]) for color in analysis.colors]
        [(32, ['x[0]', 'out[0]']), (8, ['x[1]', 'w[0]']), (4, ['w[1]', 'out[1]'])]
        """
        names, program = self.names, self.program
        count = names.color_count

        def has(nodes: np.ndarray) -> np.ndarray:
            """Returns, by color, whether it has some of these nodes."""
            return np.bincount(names.color[nodes], minlength=count) > 0

        def totals(items: np.ndarray, colors: np.ndarray, amounts: np.ndarray) -> np.ndarray:
            """Returns, by color, the sum of the amounts of its items, each counted once."""
            pairs = np.unique(items * count + colors)
            return np.bincount(pairs % count, amounts[pairs // count], count)

        able = names.splittable
        op_flops = np.array([op.flops for op in program.ops]) * program.runs[[op.region for op in program.ops]]
        flops = totals(names.node_op[able], names.color[able], op_flops)
        member_color = names.color[names.member_node]
        value_bytes = np.array([float(v.nbytes) for v in program.values])
        value_bytes[list(program.home)] *= program.trips[list(program.home.values())]
        nbytes = totals(names.member_value, member_color, value_bytes)
        values = totals(names.member_value, member_color, np.ones(len(program.values)))
        loop = has(names.trip)
        border = np.array([op.kind in BORDERS for op in program.ops], dtype=bool)
        product = np.array([op.unit in HEAVY for op in program.ops], dtype=bool)
        matters = np.where(loop, has(able & product[names.node_op]), has(able & ~border[names.node_op]))
        sizes: list[set[int]] = [set() for _ in range(count)]
        factor_sizes = (f.size for op in program.ops if op.rule is not None for f in op.rule.factors)
        for c, size in zip(names.color.tolist(), factor_sizes, strict=True):
            sizes[c].add(size)
        places: list[list[Place]] = [[] for _ in range(count)]
        for c, v, dim in zip(
            member_color.tolist(), names.member_value.tolist(), names.member_dim.tolist(), strict=True
        ):
            value = program.values[v]
            sizes[c].add(value.shape[dim])
            if value.origin in (Origin.ARGUMENT, Origin.OUTPUT):
                places[c].append(Place(v, dim, value.path))
        return tuple(
            Color(
                id=c,
                sizes=tuple(sorted(sizes[c], reverse=True)),
                places=tuple(places[c]),
                values=int(values[c]),
                nbytes=float(nbytes[c]),
                flops=float(flops[c]),
                loop=bool(loop[c]),
                matters=bool(matters[c]),
                group=int(self.group_table.group[c]),
            )
            for c in range(count)
        )

    @cached_property
    def value_nodes(self) -> tuple[tuple[int, ...], ...]:
        """By value: the nodes (``dims/names.py``) of its dimensions, -1 for dimensions of size one.

        >>> [len(analysis.value_nodes[analysis.program.paths[path]]) for path in ("w", "x")]
        [2, 2]
        """
        names, nodes = self.names, [[-1] * len(v.shape) for v in self.program.values]
        rows = (names.member_value, names.member_dim, names.member_node)
        for value, dim, node in zip(*(row.tolist() for row in rows), strict=True):
            nodes[value][dim] = node
        return tuple(map(tuple, nodes))

    @cached_property
    def value_colors(self) -> tuple[tuple[int, ...], ...]:
        """By value: the colors of its dimensions, -1 for dimensions of size one.

        >>> analysis.value_colors[analysis.program.paths["w"]]
        (1, 2)
        """
        colors = self.names.color.tolist()
        return tuple(tuple(colors[n] if n >= 0 else -1 for n in nodes) for nodes in self.value_nodes)

    @cached_property
    def leading_colors(self) -> dict[int, int]:
        """By argument: the color of its first dimension that no loop runs over, -1 where there is none. Of a dimension that is
        split for a loop, as a batch into micro-batches, it is the color of what one trip has.

        >>> {analysis.program.label(v): color for v, color in analysis.leading_colors.items()}
        {'x': 0, 'w': 1}
        """
        names, arguments = self.names, self.program.argument_of
        trips = set(names.color[names.trip].tolist())
        rest: dict[
            tuple[int, int], int
        ] = {}  # by argument and color of a loop: the color of the rest of that dimension
        for op in self.program.ops:
            if op.kind == "reshape" and op.rule is not None and op.operands[0] in arguments:
                colors = names.factor_colors(op.id)
                for major, *minor in (dim for dim in op.rule.operands[0] if dim):
                    if minor and colors[major] in trips:
                        rest[arguments[op.operands[0]], colors[major]] = colors[minor[0]]
        leading = {}
        for a in self.program.arguments:
            dims = (rest.get((a.value, c), c) for c in self.value_colors[a.value])
            leading[a.value] = next((c for c in dims if c not in trips), -1)
        return leading

    @cached_property
    def replaced_by(self) -> dict[int, int]:
        """By argument that comes back updated: the output that replaces it.

        >>> sgd = shardwise.analyze(lambda w, x: w - x.T @ (x @ w), jnp.ones((8, 4)), jnp.ones((32, 8)))
        >>> {sgd.program.label(v): sgd.program.label(output) for v, output in sgd.replaced_by.items()}
        {'w': 'out'}
        """
        return find_replaced(self.program, self.value_colors)

    @cached_property
    def conflicts(self) -> tuple[Conflict, ...]:
        """All conflicts, in program order.

        >>> [scores.program.ops[conflict.op].kind for conflict in scores.conflicts]
        ['dot_general', 'exp', 'output']
        """
        t, names = self.conflict_table, self.names
        factors = names.node_factor[t.first], names.node_factor[t.second]
        columns = (names.node_op[t.first], *factors, names.color[t.first], t.set)
        return tuple(Conflict(*row) for row in zip(*(c.tolist() for c in columns), strict=True))

    @cached_property
    def compatibility_sets(self) -> tuple[CompatibilitySet, ...]:
        """Families of conflicts; an orientation and its mirror are one.

        >>> [(len(family.conflicts), family.consistent) for family in scores.compatibility_sets]
        [(3, True)]
        """
        by_set: list[list[Conflict]] = [[] for _ in self.conflict_table.consistent]
        for conflict in self.conflicts:
            by_set[conflict.compatibility_set].append(conflict)
        return tuple(
            CompatibilitySet(
                id=s,
                color=members[0].color,
                conflicts=tuple(members),
                first=tuple(dict.fromkeys(place for c in members for place in self._factor_places(c.op, c.first))),
                second=tuple(dict.fromkeys(place for c in members for place in self._factor_places(c.op, c.second))),
                consistent=bool(self.conflict_table.consistent[s]),
                bit=int(self.group_table.bit[s]),
                flipped=bool(self.group_table.flipped[s]),
            )
            for s, members in enumerate(by_set)
        )

    def _factor_places(self, op_id: int, factor: int) -> list[Place]:
        """Returns the dimensions of an op's results and operands that have a factor."""
        op, rule = self.program.ops[op_id], self.program.ops[op_id].factor_rule
        tensors = zip((*op.results, *op.operands), (*rule.result_majors, *rule.operand_majors), strict=True)
        places = [(v, d) for v, majors in tensors for d, m in enumerate(majors) if m == factor]
        return [Place(v, d, self.program.label(v)) for v, d in places]

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
        t = self.conflict_table
        decided = t.consistent[t.set]
        groups = self.group_table.group[self.names.color[t.first[decided]]]
        for g, bit in zip(groups.tolist(), self.group_table.bit[t.set[decided]].tolist(), strict=True):
            bits[g].add(bit)
        return tuple(
            Group(
                id=g,
                colors=tuple(c.id for c in colors),
                sizes=tuple(sorted({s for c in colors for s in c.sizes}, reverse=True)),
                bits=tuple(sorted(bits[g])),
                values=sum(c.values for c in colors),
                nbytes=sum(c.nbytes for c in colors),
                flops=sum(c.flops for c in colors),
                matters=any(c.matters for c in colors),
                places=tuple(p for c in colors for p in c.places),
            )
            for g, colors in enumerate(members)
        )

    @cached_property
    def opaque_ops(self) -> tuple[Op, ...]:
        """Ops with the safe rule: every dimension is blocked. ``op.opaque`` is the reason.

        >>> analysis.opaque_ops
        ()
        """
        return tuple(op for op in self.program.ops if op.opaque)

    @property
    def bits(self) -> int:
        """The number of binary decisions that conflicts need, after grouping, in groups that matter.

        >>> scores.bits
        1
        """
        return len({bit for group in self.groups if group.matters for bit in group.bits})

    def color_of(self, path: str, dim: int) -> Color | None:
        """Returns the color of a dimension of an argument or output, None where its size is one.

        >>> analysis.color_of("x", 1) is analysis.color_of("w", 0)
        True
        """
        value, dim = find_place(self.program, path, dim)
        color = self.value_colors[value][dim]
        return None if color < 0 else self.colors[color]

    def why(self, path_a: str, dim_a: int, path_b: str, dim_b: int) -> Chain:
        """Returns the chain of ops that makes two dimensions one color, each with its source line.

        Paths are those of arguments and outputs (``"params/w1"``, ``"out/0"``). The chain is empty where the two have
        different colors.

        >>> [step.op for step in analysis.why("x", 1, "w", 0).steps]
        ['dot_general']
        """
        return find_chain(self.program, self.names, (path_a, dim_a), (path_b, dim_b))

    def to_json(self) -> dict[str, Any]:
        """Returns the analysis as plain data, as ``shardwise inspect --json`` prints it.

        >>> len(analysis.to_json()["colors"])
        3
        """
        from shardwise.report.inspection import analysis_json

        return analysis_json(self)

    def __str__(self) -> str:
        from shardwise.report.inspection import analysis_page

        return analysis_page(self).text()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        from shardwise.report.html import notebook_html
        from shardwise.report.inspection import analysis_page

        return notebook_html(analysis_page(self))


@collector_paused()
def analyze_program(program: Program, grouping: bool = True) -> Analysis:
    """Returns the static analysis of a captured program."""
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
