"""The named strategies. Each is defined by the structure of the program, never by the names of its arguments.

All but ``Replicate`` are applied to mesh axes, one after another: ``FSDP("data")``, ``FSDP("data", "model")`` or
``FSDP(("data", "model"))``, and ``FSDP()`` for all axes of the mesh. Beside a place, several axes are a tuple.

Most examples are about this training step, or this layer:

>>> import jax, shardwise
>>> def step(w, mean, x):
...     mean = 0.9 * mean + jax.grad(lambda w: ((x @ w) ** 2).sum())(w)
...     return w - 0.1 * mean, mean
>>> w, x = (jax.ShapeDtypeStruct(s, "float32") for s in [(16, 8), (512, 16)])
>>> layer = lambda y, up, down: jax.nn.relu(y @ up) @ down
>>> y, up, down = (jax.ShapeDtypeStruct(s, "float32") for s in [(8192, 512), (512, 2048), (2048, 512)])
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.errors import DecisionError
from shardwise.lowering.decisions import Decision
from shardwise.lowering.decisions import Keep as KeepDecision
from shardwise.lowering.decisions import Shard as ShardDecision
from shardwise.tactics.divided import Divided, Uneven, divided_part, head_groups
from shardwise.tactics.places import PathDim
from shardwise.tactics.structure import (
    batch_colors,
    covering_colors,
    inner_colors,
    meeting_groups,
    scattered_values,
    step_s,
    with_outputs,
)
from shardwise.tactics.tactic import Axes, Batched, Context, Listed, OverAxes, shard_groups


@dataclass(frozen=True, slots=True)
class Shard(OverAxes):
    """Shards one dimension of an argument or output, with its color and its group, on a mesh axis.

    ``side`` resolves conflicts of that color: 0 or 1.

    >>> plan = shardwise.plan(layer, y, up, down, mesh={"model": 4}, tactics=[Shard("up", 1, "model")])
    >>> plan.spec("up"), plan.spec("down")
    (P(None, 'model'), P('model',))
    """

    path: str
    dim: int
    axes: Axes = ()
    side: int = 0

    def on(self, axis: str, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        colors = context.colors((self.path, self.dim), f"Shard({self.path!r}, {self.dim}, {axis!r})")
        return shard_groups(context, colors, axis, taken, self.side)


@dataclass(frozen=True, init=False)
class Pipeline(Listed):
    """Computes the layers of scans in stages, one for each device of an axis: a stage has its own layers, and sends the
    activations of a micro-batch on to the next.

    The program is changed for it (``transforms/pipeline.py``): it has as many stages as the axes have devices.
    ``microbatches``: the number of micro-batches, several numbers are tried without it. With ``circular=2`` each stage has
    layers from both halves of the model, and micro-batches go around the stages twice, which halves the time that stages wait
    and sends activations twice as often. The axes of other tactics are free.

    >>> import jax.numpy as jnp
    >>> def deep(w, x):
    ...     return jax.grad(lambda w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum())(w)
    >>> w, x = (jax.ShapeDtypeStruct(s, "float32") for s in [(8, 512, 512), (4096, 512)])
    >>> plan = shardwise.plan(deep, w, x, mesh={"stage": 4}, tactics=[Pipeline("stage", microbatches=16)])
    >>> plan.spec("w"), [kind for kind, _ in plan.moved()]
    (P('stage',), ['collective-permute'])
    """

    microbatches: int | None
    circular: int

    def __init__(self, *axes: Axes, microbatches: int | None = None, circular: int = 1) -> None:
        super().__init__(*axes)
        object.__setattr__(self, "microbatches", microbatches)
        object.__setattr__(self, "circular", circular)

    def on(self, axis: str, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        if not context.stages:
            raise DecisionError(
                "Pipeline: the program has no stages: give pipeline=..., or Pipeline among the tactics of plan(...)"
            )
        return shard_groups(context, context.stages, axis, taken)


class DataParallel(Batched):
    """Shards the batch on an axis. ``dim`` is the batch dimension of every batch argument; without it, the first dimension of
    each that no loop runs over. Rows that no argument has, but over which gradients are summed like over the batch, are sharded
    with it: minibatches that are drawn in the program, generated noise, slots of experts.

    >>> plan = shardwise.plan(step, w, w, x, mesh={"data": 8}, tactics=[DataParallel("data")])
    >>> plan.spec("w"), plan.spec("mean"), plan.spec("x")
    (P(), P(), P('data',))
    >>> [kind for kind, _ in plan.moved()]
    ['all-reduce']
    """

    def on(self, axis: str, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        return shard_groups(context, batch_colors(context, self.dim, "DataParallel", or_sequence=False), axis, taken)


class FSDP(Batched):
    """Shards the batch, parameters, gradients and moments on the same axis (ZeRO-3).

    The parameter dimensions are the fewest colors that shard every parameter, those that cover most bytes first. Of a batch of
    one example the sequence is sharded.

    >>> plan = shardwise.plan(step, w, w, x, mesh={"data": 8}, tactics=[FSDP("data")])
    >>> plan.spec("w"), plan.spec("mean"), plan.spec("x")
    (P('data',), P('data',), P('data',))
    >>> [kind for kind, _ in plan.moved()]
    ['all-gather', 'reduce-scatter']
    """

    def on(self, axis: str, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        name = type(self).__name__  # that of ZeRO2 and ZeRO1, too
        batch = batch_colors(context, self.dim, name)
        cover = covering_colors(context, context.role("params", name), axis, set(batch))
        return shard_groups(context, [*batch, *cover], axis, taken)


class ZeRO2(FSDP):
    """Does as FSDP, but parameters stay replicated: gradients are reduced into shards, moments are sharded, and the updated
    parameters are gathered once.

    >>> plan = shardwise.plan(step, w, w, x, mesh={"data": 8}, tactics=[ZeRO2("data")])
    >>> plan.spec("w"), plan.spec("mean"), plan.spec("x")
    (P(), P('data',), P('data',))
    >>> [kind for kind, _ in plan.moved()]
    ['all-gather', 'reduce-scatter']
    """

    def on(self, axis: str, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        fsdp, params = super().on(axis, context, taken), context.role("params", type(self).__name__)
        return [*fsdp, KeepDecision(with_outputs(context.analysis, params), axis)]


class ZeRO1(ZeRO2):
    """Does as ZeRO2, but gradients are replicated too: they are all-reduced, and the update slices them.

    The gradients are what ZeRO2 reduces into shards. The reduction of a value that is kept replicated may move to the one op
    that uses it (a sum over a broadcast dimension, a scale): that op's result is then kept as well, until there are no more.

    >>> plan = shardwise.plan(step, w, w, x, mesh={"data": 8}, tactics=[ZeRO1("data")])
    >>> plan.spec("w"), plan.spec("mean")
    (P(), P('data',))
    >>> [kind for kind, _ in plan.moved()]
    ['all-gather', 'all-reduce']
    """

    def on(self, axis: str, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        zero2 = super().on(axis, context, taken)
        # Those of ZeRO2 on this axis alone.
        gradients = context.once(
            ("gradients", self.dim), lambda: scattered_values(context, ZeRO2(dim=self.dim).on(axis, context, ()), axis)
        )
        return [*zero2, *([KeepDecision(gradients, axis)] if gradients else [])]


@dataclass(frozen=True, init=False)
class Megatron(Listed):
    """Shards hidden dimensions and heads on an axis.

    By structure: groups that one product with a parameter makes and another contracts, other than residual streams (to which
    a product that is computed from them is added), the width of heads and what a gather looks into. Of those that the axis
    divides, as many as no two of which meet in one op; where there are several such sets, the one that makes the shortest
    step. Where the axis divides the heads of queries but not those of keys and values, the latter stay replicated. Decisions
    before this one do not change the choice.

    ``heads=False`` leaves parameters with heads alone, so that ``SequenceParallel`` on the same axis shards the sequence in
    attention.

    >>> plan = shardwise.plan(layer, y, up, down, mesh={"model": 4}, tactics=[Megatron("model")])
    >>> plan.spec("up"), plan.spec("down"), [kind for kind, _ in plan.moved()]
    (P(None, 'model'), P('model',), ['all-reduce'])
    """

    heads: bool

    def __init__(self, *axes: Axes, heads: bool = True) -> None:
        super().__init__(*axes)
        object.__setattr__(self, "heads", heads)

    def on(self, axis: str, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        able = self._able(axis, context, taken)
        if not able:
            raise DecisionError(
                "Megatron: no dimension is made by one parameter's product and contracted by another's, and can be divided by "
                f"{axis} {context.mesh.sizes[context.mesh.index(axis)]}"
            )
        meeting = context.once("meeting", lambda: meeting_groups(context.analysis))
        groups = {c: {context.group(one).id for one in divided.colors} for c, divided in able.items()}

        def meet(color: int, other: int) -> bool:
            return any(pair in meeting for pair in itertools.product(groups[color], groups[other]))

        def compatible(first: int) -> tuple[int, ...]:
            """Returns a color, with others that none of these meets and that shard more parameters."""
            chosen, covered = [first], set(able[first].covered)
            for c, divided in able.items():
                if not divided.covered <= covered and not any(meet(c, other) for other in chosen):
                    chosen.append(c)
                    covered |= divided.covered
            return tuple(c for one in sorted(chosen, key=list(able).index) for c in able[one].colors)

        sets = list(dict.fromkeys(map(compatible, able)))
        if len(sets) > 1:
            sets.sort(key=lambda chosen: context.once(("step", chosen), lambda: self._step_s(context, chosen)))
        whole = [v for c in sets[0] if c in able for v in able[c].replicated]
        values = with_outputs(context.analysis, [context.analysis.program.values[v] for v in whole])
        return [*shard_groups(context, sets[0], axis, taken), *([KeepDecision(values, axis)] if values else [])]

    def uneven(self, context: Context, taken: Sequence[Decision]) -> Iterator[Uneven]:
        """Returns the groups that an axis does not divide everywhere, other than further dimensions of the same parameters."""
        decisions = list(taken)
        for axis in self.axes or context.mesh.names:
            pieces = _pieces(context, axis, decisions)
            every = self._every(axis, context, decisions)
            covered = set[int]().union(*(divided.covered for divided in every.values() if divided))
            for color, divided in every.items():
                group = context.group(color)
                left = tuple(size for size in group.sizes if size % pieces(color))
                if left and (divided or not _covered(context, color) <= covered):
                    replicated, split = (
                        (divided.replicated, 0) if divided else (None, self._split(context, color, pieces(color)))
                    )
                    yield Uneven(axis, pieces(color), group.id, left, replicated, split)
                covered |= _covered(context, color)
            decisions += self.on(axis, context, decisions) if any(every.values()) else []

    def _able(self, axis: str, context: Context, taken: Sequence[Decision]) -> dict[int, Divided]:
        """Returns what can be sharded on an axis, by the color of its group."""
        return {color: divided for color, divided in self._every(axis, context, taken).items() if divided}

    def _every(self, axis: str, context: Context, taken: Sequence[Decision]) -> dict[int, Divided | None]:
        """Returns, by the color of its group, what can be sharded on an axis, or None."""
        parameters, pieces = context.role("params", "Megatron"), _pieces(context, axis, taken)
        every: dict[int, Divided | None] = {}
        inner = self.inner(context)
        heads = [c for c in inner if context.group(c).id in head_groups(context, parameters)] if not self.heads else []
        attention = set[int]().union(*(_covered(context, c) for c in heads))
        for color in (c for c in inner if attention.isdisjoint(_covered(context, c))):
            if all(size % pieces(color) == 0 for size in context.group(color).sizes):
                every[color] = Divided((color,), frozenset(_covered(context, color)))
            else:
                every[color] = divided_part(context, color, pieces, parameters)
        return every

    @staticmethod
    def _split(context: Context, color: int, pieces: int) -> int:
        """Returns the size of a first axis that divides a group, if with a second one all pieces are used; otherwise 0."""
        first = math.gcd(pieces, *context.group(color).sizes)
        if first in (1, pieces):
            return 0
        second, parameters = pieces // first, context.role("params", "Megatron")
        divided = divided_part(context, color, lambda c: pieces if c == color else second, parameters)
        return first if divided else 0

    def inner(self, context: Context) -> list[int]:
        """Returns one color of each group of inner colors. Those that shard the most bytes come first."""

        def inner() -> list[int]:
            groups: dict[int, int] = {}
            for color in sorted(inner_colors(context, context.role("params", "Megatron"))):
                if _covered(context, color):  # not of a part of a parameter alone, which is reshaped for its product
                    groups.setdefault(context.analysis.colors[color].group, color)
            return sorted(groups.values(), key=lambda color: -_covered_bytes(context, color))

        return context.once("megatron", inner)

    def _step_s(self, context: Context, colors: Sequence[int]) -> float:
        """Returns the time of a step in which some colors are sharded, and nothing else."""
        axis = max(zip(context.mesh.sizes, context.mesh.names, strict=True))[1]
        return step_s(context, shard_groups(context, colors, axis, ()))


def _pieces(context: Context, axis: str, taken: Sequence[Decision]) -> Callable[[int], int]:
    """Returns a function: the number of pieces of a color on an axis, with those axes that decisions have given it."""
    sizes = dict(zip(context.mesh.names, context.mesh.sizes, strict=True))
    sharded = {(c, d.axis) for d in taken if isinstance(d, ShardDecision) for c in d.colors}
    others = [name for name in sizes if name != axis]
    return lambda color: sizes[axis] * math.prod(sizes[name] for name in others if (color, name) in sharded)


def shards_heads_in_part(context: Context, axis: str) -> bool:
    """Returns whether Megatron, on an axis alone or with others, shards a group in some places alone."""
    own = context.mesh.sizes[context.mesh.index(axis)]
    others = [size for name, size in zip(context.mesh.names, context.mesh.sizes, strict=True) if name != axis]
    counts = {own * math.prod(some) for k in range(len(others) + 1) for some in itertools.combinations(others, k)}
    parameters = context.arguments(context.roles.get("params", ()))

    def in_part(color: int, count: int) -> bool:
        if all(size % count == 0 for size in context.group(color).sizes):
            return False
        return divided_part(context, color, lambda c: count if c == color else own, parameters) is not None

    colors = Megatron().inner(context) if parameters else []
    return any(in_part(color, count) for color in colors for count in sorted(counts))


def _covered(context: Context, color: int) -> set[int]:
    """Returns the parameters that have a dimension of a color's group."""
    group = context.group(color)

    def covered() -> set[int]:
        parameters, colors = context.role("params", "Megatron"), set(group.colors)
        return {v.id for v in parameters if any(c in colors for _, c in context.colors_of(v))}

    return context.once(("covered", group.id), covered)


def _covered_bytes(context: Context, color: int) -> int:
    return sum(context.analysis.program.values[v].nbytes for v in _covered(context, color))


@dataclass(frozen=True, slots=True)
class SequenceParallel(OverAxes):
    """Shards the sequence, named by one of its places, where Megatron before it does not use the axis.

    >>> tactics = [Megatron("model"), SequenceParallel("model", ("y", 0))]
    >>> plan = shardwise.plan(layer, y, up, down, mesh={"model": 4}, tactics=tactics)
    >>> plan.spec("y"), [kind for kind, _ in plan.moved()]
    (P('model',), ['all-gather', 'reduce-scatter'])
    """

    axes: Axes
    sequence: PathDim

    def on(self, axis: str, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        return shard_groups(context, context.colors(self.sequence, "SequenceParallel"), axis, taken)


@dataclass(frozen=True, slots=True)
class ContextParallel(OverAxes):
    """Shards the sequence on an axis; in attention that of the queries (``side`` 0) or of the keys (``side`` 1).

    >>> x, w = (jax.ShapeDtypeStruct(s, "float32") for s in [(2048, 64), (64, 64)])
    >>> attention = lambda x, w: jax.nn.softmax((x @ w) @ x.T) @ x
    >>> for side in (0, 1):
    ...     plan = shardwise.plan(attention, x, w, mesh={"seq": 4}, tactics=[ContextParallel("seq", ("x", 0), side)])
    ...     print(plan.spec("x"), [kind for kind, _ in plan.moved()])
    P('seq',) ['all-gather']
    P('seq',) ['all-gather', 'all-reduce', 'reduce-scatter']
    """

    axes: Axes
    sequence: PathDim
    side: int = 0

    def on(self, axis: str, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        return shard_groups(context, context.colors(self.sequence, "ContextParallel"), axis, taken, self.side)


@dataclass(frozen=True, slots=True)
class ExpertParallel(OverAxes):
    """Shards experts on an axis, then the batch on the same: tokens are sent to their experts and back.

    >>> import jax.numpy as jnp
    >>> def layer(mask, x, w):
    ...     sent = jnp.einsum("gsec,gsd->egcd", mask, x)
    ...     return jnp.einsum("gsec,egcf->gsf", mask, jnp.einsum("egcd,edf->egcf", sent, w))
    >>> mask, x, w = (jax.ShapeDtypeStruct(s, "float32") for s in [(32, 256, 8, 64), (32, 256, 512), (8, 512, 512)])
    >>> plan = shardwise.plan(layer, mask, x, w, mesh={"expert": 8}, tactics=[ExpertParallel("expert", ("w", 0))])
    >>> plan.spec("x"), plan.spec("w"), ("all-to-all", ("expert",)) in plan.moved()
    (P('expert',), P('expert',), True)
    """

    axes: Axes
    experts: PathDim
    dim: int | None = None

    def on(self, axis: str, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        experts = context.colors(self.experts, "ExpertParallel")
        return shard_groups(context, [*experts, *batch_colors(context, self.dim, "ExpertParallel")], axis, taken)


@dataclass(frozen=True, slots=True)
class EdgeSharding(OverAxes):
    """Shards the edges of a graph on an axis: only sums over nodes are reduced.

    >>> def messages(sender, receiver, nodes, w):
    ...     return jax.ops.segment_sum(nodes[sender] @ w, receiver, 1024)
    >>> edges = jax.ShapeDtypeStruct((65536,), "int32")
    >>> nodes, w = (jax.ShapeDtypeStruct(s, "float32") for s in [(1024, 64), (64, 64)])
    >>> tactics = [EdgeSharding("edges", ("sender", 0))]
    >>> plan = shardwise.plan(messages, edges, edges, nodes, w, mesh={"edges": 8}, tactics=tactics)
    >>> plan.spec("receiver"), plan.spec("nodes"), [kind for kind, _ in plan.moved()]
    (P('edges',), P(), ['all-reduce'])
    """

    axes: Axes
    edges: PathDim

    def on(self, axis: str, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        return shard_groups(context, context.colors(self.edges, "EdgeSharding"), axis, taken)


@dataclass(frozen=True, slots=True)
class Keep(OverAxes):
    """Stores arguments under a path, and the outputs that replace them, replicated on an axis.

    >>> plan = shardwise.plan(layer, y, up, down, mesh={"model": 4}, tactics=[Keep("up", "model"), Megatron("model")])
    >>> plan.spec("up"), plan.spec("down")
    (P(), P('model',))
    """

    path: str
    axes: Axes = ()

    def on(self, axis: str, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        return [KeepDecision(with_outputs(context.analysis, context.arguments([self.path])), axis)]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Stores arguments under a path replicated on every axis.

    >>> plan = shardwise.plan(layer, y, up, down, mesh={"model": 4}, tactics=[Replicate("down"), Shard("up", 1, "model")])
    >>> plan.spec("up"), plan.spec("down")
    (P(None, 'model'), P())
    """

    path: str

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        return Keep(self.path, context.mesh.names).decide(context, taken)
