"""What an axis shards of heads that it does not divide everywhere.

The problem. With grouped queries there are fewer heads of keys and values than of queries. An axis with more devices divides
the heads of queries, and not those of keys and values, which have the same color.

The idea. Attention multiplies activations. Without these products the values with the heads' color fall into parts: what
belongs to queries, keys, values, and outputs, each with its parameter. A part in which the axis divides every size is sharded,
and the arguments of the others stay replicated. That pays if a parameter that makes heads and one that contracts them are
sharded, as those of queries and outputs are where keys and values are repeated. Where instead the queries are split into
groups, ``[groups, members]``, for one head of keys each, the axis may divide the members: then these are sharded, too.

Weak: groups and members that the axis divides only together (8 groups of 2 on 16 devices) are not sharded by one axis; they are
by two, of 8 and of 2 devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from shardwise.dims.analysis import Analysis, Group
from shardwise.ir.program import HEAVY, Value
from shardwise.ir.rule import Kind
from shardwise.tactics.structure import weights_of
from shardwise.tactics.tactic import Context

#: By color, the number of devices over which it would be sharded.
Pieces = Callable[[int], int]


class Divided(NamedTuple):
    """What is sharded of a group: its color, with those of members of its heads; the parameters that it shards; the arguments
    that stay replicated."""

    colors: tuple[int, ...]
    covered: frozenset[int]
    replicated: tuple[int, ...] = ()


class Uneven(NamedTuple):
    """A group that Megatron does not shard everywhere, since a number of ``pieces`` does not divide some ``sizes``. Arguments
    that stay ``replicated`` beside those that are sharded; None where it does not shard the group at all. Then ``split`` is the
    size of a first of two axes that would, 0 if there is none."""

    axis: str
    pieces: int
    group: int
    sizes: tuple[int, ...]
    replicated: tuple[int, ...] | None
    split: int


def divided_part(context: Context, color: int, pieces: Pieces, parameters: Sequence[Value]) -> Divided | None:
    """Returns what can be sharded of a group that its number of ``pieces`` divides in some places alone, if that pays."""
    group = context.group(color)
    key = ("parts", group.id, *(v.id for v in parameters))
    parts = context.once(key, lambda: list(_parts(context, set(group.colors), parameters)))
    count, sizes = pieces(color), {c.id: c.size for c in context.analysis.colors}
    split = dict.fromkeys(c for part in parts for size, c in part.members if size % count)
    members = tuple(
        c for c in split if sizes[c] % pieces(c) == 0 and context.group(c).id in _common(context, group, parameters)
    )
    for colors in ((color,), (color, *members)) if members else ((color,),):
        sharded = [part for part in parts if part.is_divided(count, colors[1:])]
        if {is_contracted for part in sharded for is_contracted in part.products} == {False, True}:
            left = [v for part in parts if part not in sharded for v in part.arguments]
            whole = [v for v in left if _divides(_sizes(context.analysis, v, group.colors), count)]
            covered = {v.id for v in parameters} & {v for part in sharded for v in part.arguments}
            return Divided(colors, frozenset(covered), tuple(whole))
    return None


class _Part(NamedTuple):
    """Values with a group's colors that no product of activations separates.

    ``shapes`` are their sizes in the group, each with all colors of the value; ``products`` has, for those with a parameter,
    whether they contract the group. ``members`` are what reshapes split off, with the size of the rest.
    """

    arguments: list[int]
    shapes: set[tuple[tuple[int, ...], tuple[int, ...]]]
    products: set[bool]
    members: dict[tuple[int, int], None]

    def is_divided(self, pieces: int, members: Sequence[int]) -> bool:
        """Returns whether a number of pieces divides the group in all values that have no color of members."""
        return all(_divides(sizes, pieces) or not set(members).isdisjoint(colors) for sizes, colors in self.shapes)


def _divides(sizes: Sequence[int], pieces: int) -> bool:
    return all(size % pieces == 0 for size in sizes)


def _sizes(analysis: Analysis, value: int, colors: Collection[int]) -> tuple[int, ...]:
    """Returns the sizes of a value's dimensions that have some colors."""
    dims = zip(analysis.program.values[value].shape, analysis.value_colors[value], strict=True)
    return tuple(size for size, color in dims if color in colors)


def _parts(context: Context, colors: set[int], parameters: Sequence[Value]) -> Iterable[_Part]:
    """Returns the parts into which products of activations separate a group."""
    analysis, weights = context.analysis, weights_of(context, parameters)
    value_colors, parents = analysis.value_colors, dict[int, int]()

    def root(value: int) -> int:
        while (above := parents.setdefault(value, value)) != value:
            parents[value] = value = parents.setdefault(above, above)
        return value

    ops = []
    for op in analysis.program.ops:
        if op.rule is not None and (op.unit not in HEAVY or not weights.isdisjoint(op.operands)):
            values = [v for v in (*op.operands, *op.results) if v >= 0 and not colors.isdisjoint(value_colors[v])]
            for v in values:
                parents[root(v)] = root(values[0])
            ops += [(op, values[0])] if values else []
    parts = {root(v): _Part([], set(), set(), {}) for v in list(parents)}
    for v in parents:
        parts[root(v)].shapes.add((_sizes(analysis, v, colors), value_colors[v]))
    for argument in (a.value for a in analysis.program.arguments if a.value in parents):
        parts[root(argument)].arguments.append(argument)
    for op, value in ops:
        color, factors = analysis.names.factor_colors(op.id), op.rule.factors if op.rule else ()
        if op.unit in HEAVY and any(v in weights and v in parents for v in op.operands):
            kinds = {f.kind for c, f in zip(color, factors, strict=True) if c in colors}
            parts[root(value)].products.add(Kind.REDUCTION in kinds)
        elif op.kind == "reshape" and op.rule is not None:
            for major, minor, *_ in (d for d in (*op.rule.operands[0], *op.rule.results[0]) if len(d) > 1):
                if color[major] in colors:
                    parts[root(value)].members[factors[major].size, color[minor]] = None
    return parts.values()


def head_groups(context: Context, parameters: Sequence[Value]) -> set[int]:
    """Returns the groups of dimensions that products of two activations have, other than those that make gradients of
    parameters: heads, above all."""
    return set().union(*_attention(context, parameters))


def _common(context: Context, group: Group, parameters: Sequence[Value]) -> set[int]:
    """Returns the groups that all products of activations have which have this one: members of heads, and not their width."""
    products = [groups for groups in _attention(context, parameters) if group.id in groups]
    return set.intersection(*products) if products else set()


def _attention(context: Context, parameters: Sequence[Value]) -> list[set[int]]:
    """Returns the groups of each product of two activations that makes no gradient of a parameter."""

    def products() -> list[set[int]]:
        analysis, weights = context.analysis, weights_of(context, parameters)
        of_params = {c for v in weights for c in analysis.value_colors[v]}
        groups: dict[frozenset[int], None] = {}
        for op in analysis.program.ops:
            made = {c for v in op.results for c in analysis.value_colors[v] if c >= 0}
            if op.rule is not None and op.unit in HEAVY and weights.isdisjoint(op.operands) and not made <= of_params:
                groups[frozenset(analysis.colors[c].group for c in analysis.names.factor_colors(op.id))] = None
        return list(map(set, groups))

    return context.once(("attention", *(v.id for v in parameters)), products)
