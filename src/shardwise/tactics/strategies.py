"""The named strategies. Each is defined by structure: what is contracted, what is looked up, what is shared.

The file is long for its examples: what a strategy does is seen best on a small step.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.dims.analysis import Analysis
from shardwise.errors import DecisionError
from shardwise.ir.program import HEAVY, Op, Program, Value
from shardwise.ir.rule import Kind
from shardwise.lowering.decisions import Decision, State
from shardwise.lowering.decisions import Keep as KeepDecision
from shardwise.lowering.decisions import Shard as ShardDecision
from shardwise.lowering.lowered import lower_state
from shardwise.lowering.sharding import Kind as Move
from shardwise.lowering.storage import views
from shardwise.search.searcher import Searcher
from shardwise.tactics.stated import stated_shards
from shardwise.tactics.tactic import Context, PathDim, shard_groups


@dataclass(frozen=True, slots=True)
class Shard:
    """One dimension of an argument or output, with everything of its color (and of its group), on a mesh axis.

    ``side`` resolves conflicts of that color: 0 or 1.

    >>> import jax, shardwise
    >>> x, up, down = (jax.ShapeDtypeStruct(s, "float32") for s in [(8192, 512), (512, 2048), (2048, 512)])
    >>> fn = lambda x, up, down: jax.nn.relu(x @ up) @ down
    >>> plan = shardwise.plan(fn, x, up, down, mesh={"model": 4}, tactics=[Shard("up", 1, "model")])
    >>> plan.spec("up"), plan.spec("down")
    (((), ('model',)), (('model',), ()))
    """

    path: str
    dim: int
    axis: str
    side: int = 0

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        color = context.color((self.path, self.dim), f"Shard({self.path!r}, {self.dim}, {self.axis!r})")
        return shard_groups(context, [color], self.axis, taken, self.side)


@dataclass(frozen=True, slots=True)
class DataParallel:
    """The batch on an axis. ``dim`` is the batch dimension of every batch argument.

    >>> import jax, shardwise
    >>> def step(w, mean, x):
    ...     mean = 0.9 * mean + jax.grad(lambda w: ((x @ w) ** 2).sum())(w)
    ...     return w - 0.1 * mean, mean
    >>> w, x = (jax.ShapeDtypeStruct(s, "float32") for s in [(16, 8), (512, 16)])
    >>> where = {"mesh": {"data": 8}, "roles": {"params": "w", "batch": "x"}}
    >>> plan = shardwise.plan(step, w, w, x, tactics=[DataParallel("data")], **where)
    >>> plan.spec("w"), plan.spec("mean"), plan.spec("x")
    (((), ()), ((), ()), (('data',), ()))
    >>> [kind for kind, _ in plan.moved()]
    ['all-reduce']
    """

    axis: str
    dim: int = 0

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        return shard_groups(context, _batch_colors(context, self.dim, "DataParallel"), self.axis, taken)


@dataclass(frozen=True, slots=True)
class FSDP:
    """Data parallel, and parameters, gradients and moments sharded on the same axis (ZeRO-3).

    The parameter dimensions are the fewest colors that shard every parameter, those that cover most bytes first.

    >>> import jax, shardwise
    >>> def step(w, mean, x):
    ...     mean = 0.9 * mean + jax.grad(lambda w: ((x @ w) ** 2).sum())(w)
    ...     return w - 0.1 * mean, mean
    >>> w, x = (jax.ShapeDtypeStruct(s, "float32") for s in [(16, 8), (512, 16)])
    >>> where = {"mesh": {"data": 8}, "roles": {"params": "w", "batch": "x"}}
    >>> plan = shardwise.plan(step, w, w, x, tactics=[FSDP("data")], **where)
    >>> plan.spec("w"), plan.spec("mean"), plan.spec("x")
    ((('data',), ()), (('data',), ()), (('data',), ()))
    >>> [kind for kind, _ in plan.moved()]
    ['all-gather', 'reduce-scatter']
    """

    axis: str
    dim: int = 0

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        batch = _batch_colors(context, self.dim, "FSDP")
        made = shard_groups(context, batch, self.axis, taken)
        cover = _cover(context, context.role("params", "FSDP"), self.axis, set(batch))
        return made + shard_groups(context, cover, self.axis, [*taken, *made])


@dataclass(frozen=True, slots=True)
class ZeRO2:
    """As FSDP, but parameters stay whole: gradients are reduced into shards, moments are sharded, and the updated parameters
    are gathered once.

    >>> import jax, shardwise
    >>> def step(w, mean, x):
    ...     mean = 0.9 * mean + jax.grad(lambda w: ((x @ w) ** 2).sum())(w)
    ...     return w - 0.1 * mean, mean
    >>> w, x = (jax.ShapeDtypeStruct(s, "float32") for s in [(16, 8), (512, 16)])
    >>> where = {"mesh": {"data": 8}, "roles": {"params": "w", "batch": "x"}}
    >>> plan = shardwise.plan(step, w, w, x, tactics=[ZeRO2("data")], **where)
    >>> plan.spec("w"), plan.spec("mean"), plan.spec("x")
    (((), ()), (('data',), ()), (('data',), ()))
    >>> [kind for kind, _ in plan.moved()]
    ['all-gather', 'reduce-scatter']
    """

    axis: str
    dim: int = 0

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        made = FSDP(self.axis, self.dim).decide(context, taken)
        return [*made, KeepDecision(_with_outputs(context.analysis, context.role("params", "ZeRO2")), self.axis)]


@dataclass(frozen=True, slots=True)
class ZeRO1:
    """As ZeRO2, but gradients are whole too: they are all-reduced, and the update takes its part of them.

    The gradients are what ZeRO2 reduces into shards. A value that is kept whole may hand its reduction on to the one op that
    uses it (a sum over a broadcast dimension, a scale): that op's result is then kept as well, until no more are found.

    >>> import jax, shardwise
    >>> def step(w, mean, square, x):
    ...     g = jax.grad(lambda w: ((x @ w) ** 2).sum())(w)
    ...     mean, square = 0.9 * mean + 0.1 * g, 0.9 * square + 0.1 * g * g
    ...     return w - mean / (square + 1) ** 0.5, mean, square
    >>> w, x = (jax.ShapeDtypeStruct(s, "float32") for s in [(16, 8), (512, 16)])
    >>> where = {"mesh": {"data": 8}, "roles": {"params": "w", "batch": "x"}}
    >>> plan = shardwise.plan(step, w, w, w, x, tactics=[ZeRO1("data")], **where)
    >>> plan.spec("w"), plan.spec("mean")
    (((), ()), (('data',), ()))
    >>> [kind for kind, _ in plan.moved()]
    ['all-gather', 'all-reduce']
    """

    axis: str
    dim: int = 0

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        made = ZeRO2(self.axis, self.dim).decide(context, taken)
        gradients: tuple[int, ...] = ()
        while True:
            whole = [KeepDecision(gradients, self.axis)] if gradients else []
            scattered = _scattered(context, [*taken, *made, *whole], self.axis)
            fresh = tuple(v for v in scattered if v not in gradients)
            if not fresh:
                return [*made, *whole]
            gradients += fresh


@dataclass(frozen=True, slots=True)
class Megatron:
    """Hidden dimensions and heads on an axis.

    By structure: colors that one product with a parameter makes and another contracts, other than residual streams (where a
    product is added to something that is not one) and what a gather looks into. Of those, the ones that move least for the
    bytes of parameters they shard, as long as no two of them meet in one op: that leaves out the head dimensions, which are
    made and contracted as well.

    >>> import jax, shardwise
    >>> x, up, down = (jax.ShapeDtypeStruct(s, "float32") for s in [(8192, 512), (512, 2048), (2048, 512)])
    >>> fn = lambda x, up, down: jax.nn.relu(x @ up) @ down
    >>> where = {"mesh": {"model": 4}, "roles": {"params": ["up", "down"]}}
    >>> plan = shardwise.plan(fn, x, up, down, tactics=[Megatron("model")], **where)
    >>> plan.spec("up"), plan.spec("down"), [kind for kind, _ in plan.moved()]
    (((), ('model',)), (('model',), ()), ['all-reduce'])
    """

    axis: str

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        parameters = context.role("params", "Megatron")
        inner = _inner_colors(context, parameters)
        if not inner:
            raise DecisionError("Megatron: no dimension is made by one parameter's product and contracted by another's")
        covers = {c: {v for v in parameters if any(own == c for _, own in context.colors_of(v))} for c in inner}
        price = {}
        for color in inner:
            decisions = shard_groups(context, [color], self.axis, taken)
            held = sum(v.nbytes for own in context.group(color) for v in covers.get(own, ()))
            price[color] = (_communication_s(context, [*taken, *decisions]) / held, color)
        meeting = _meeting(context.analysis)
        chosen: list[int] = []
        covered: set[Value] = set()
        for color in sorted(inner, key=price.__getitem__):
            if not covers[color] <= covered and not any((color, other) in meeting for other in chosen):
                chosen.append(color)
                covered |= covers[color]
        return shard_groups(context, chosen, self.axis, taken)


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """After Megatron on the same axis: the sequence, given by one of its places, wherever the axis is not taken.

    >>> import jax, shardwise
    >>> x, up, down = (jax.ShapeDtypeStruct(s, "float32") for s in [(8192, 512), (512, 2048), (2048, 512)])
    >>> fn = lambda x, up, down: jax.nn.relu(x @ up) @ down
    >>> where = {"mesh": {"model": 4}, "roles": {"params": ["up", "down"]}}
    >>> plan = shardwise.plan(fn, x, up, down, tactics=[Megatron("model"), SequenceParallel("model", ("x", 0))], **where)
    >>> plan.spec("x"), [kind for kind, _ in plan.moved()]
    ((('model',), ()), ['all-gather', 'reduce-scatter'])
    """

    axis: str
    sequence: PathDim

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        return shard_groups(context, [context.color(self.sequence, "SequenceParallel")], self.axis, taken)


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """The sequence on an axis; in attention the queries keep it (``side`` 0) or the keys (``side`` 1).

    >>> import jax, shardwise
    >>> x, w = (jax.ShapeDtypeStruct(s, "float32") for s in [(2048, 64), (64, 64)])
    >>> attention = lambda x, w: jax.nn.softmax((x @ w) @ x.T) @ x
    >>> for side in (0, 1):
    ...     plan = shardwise.plan(attention, x, w, mesh={"seq": 4}, tactics=[ContextParallel("seq", ("x", 0), side)])
    ...     print(plan.spec("x"), [kind for kind, _ in plan.moved()])
    (('seq',), ()) ['all-gather']
    (('seq',), ()) ['all-gather', 'all-reduce', 'reduce-scatter']
    """

    axis: str
    sequence: PathDim
    side: int = 0

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        return shard_groups(context, [context.color(self.sequence, "ContextParallel")], self.axis, taken, self.side)


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """Experts on an axis, then the batch on the same: tokens go to their experts and back.

    >>> import jax, jax.numpy as jnp, shardwise
    >>> def layer(mask, x, w):
    ...     sent = jnp.einsum("gsec,gsd->egcd", mask, x)
    ...     return jnp.einsum("gsec,egcf->gsf", mask, jnp.einsum("egcd,edf->egcf", sent, w))
    >>> mask, x, w = (jax.ShapeDtypeStruct(s, "float32") for s in [(32, 256, 8, 64), (32, 256, 512), (8, 512, 512)])
    >>> where = {"mesh": {"expert": 8}, "roles": {"batch": ["mask", "x"]}}
    >>> plan = shardwise.plan(layer, mask, x, w, tactics=[ExpertParallel("expert", ("w", 0))], **where)
    >>> plan.spec("x"), plan.spec("w"), ("all-to-all", ("expert",)) in plan.moved()
    ((('expert',), (), ()), (('expert',), (), ()), True)
    """

    axis: str
    experts: PathDim
    dim: int = 0

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        made = shard_groups(context, [context.color(self.experts, "ExpertParallel")], self.axis, taken)
        batch = _batch_colors(context, self.dim, "ExpertParallel")
        return made + shard_groups(context, batch, self.axis, [*taken, *made])


@dataclass(frozen=True, slots=True)
class EdgeSharding:
    """The edges of a graph on an axis: only sums over nodes are reduced.

    >>> import jax, shardwise
    >>> def messages(sender, receiver, nodes, w):
    ...     return jax.ops.segment_sum(nodes[sender] @ w, receiver, 1024)
    >>> edges = jax.ShapeDtypeStruct((65536,), "int32")
    >>> nodes, w = (jax.ShapeDtypeStruct(s, "float32") for s in [(1024, 64), (64, 64)])
    >>> where = {"mesh": {"edges": 8}, "tactics": [EdgeSharding("edges", ("sender", 0))]}
    >>> plan = shardwise.plan(messages, edges, edges, nodes, w, **where)
    >>> plan.spec("receiver"), plan.spec("nodes"), [kind for kind, _ in plan.moved()]
    ((('edges',),), ((), ()), ['all-reduce'])
    """

    axis: str
    edges: PathDim

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        return shard_groups(context, [context.color(self.edges, "EdgeSharding")], self.axis, taken)


@dataclass(frozen=True, slots=True)
class Keep:
    """Arguments under a path, and the outputs that replace them, stay whole on an axis at rest.

    >>> import jax, shardwise
    >>> x, up, down = (jax.ShapeDtypeStruct(s, "float32") for s in [(8192, 512), (512, 2048), (2048, 512)])
    >>> fn = lambda x, up, down: jax.nn.relu(x @ up) @ down
    >>> where = {"mesh": {"model": 4}, "roles": {"params": ["up", "down"]}}
    >>> plan = shardwise.plan(fn, x, up, down, tactics=[Keep("up", "model"), Megatron("model")], **where)
    >>> plan.spec("up"), plan.spec("down")
    (((), ()), (('model',), ()))
    """

    path: str
    axis: str

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        context.mesh.index(self.axis)
        values = context.arguments([self.path], f"Keep({self.path!r}, {self.axis!r})")
        return [KeepDecision(_with_outputs(context.analysis, values), self.axis)]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Arguments under a path stay whole on every axis at rest.

    >>> import jax, shardwise
    >>> x, up, down = (jax.ShapeDtypeStruct(s, "float32") for s in [(8192, 512), (512, 2048), (2048, 512)])
    >>> fn = lambda x, up, down: jax.nn.relu(x @ up) @ down
    >>> where = {"mesh": {"data": 2, "model": 4}, "roles": {"batch": "x"}}
    >>> plan = shardwise.plan(fn, x, up, down, tactics=[Replicate("down"), Shard("up", 1, "model")], **where)
    >>> plan.spec("up"), plan.spec("down")
    (((), ('model',)), ((), ()))
    """

    path: str

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        return [d for axis in context.mesh.names for d in Keep(self.path, axis).decide(context, taken)]


@dataclass(frozen=True, slots=True, init=False)
class Auto:
    """Searches for the best decisions on some axes, on top of what was decided before.

    ``Auto("x", "y")`` searches these axes, ``Auto()`` all that no tactic before it has sharded anything on. What was decided
    before holds: pins, kept and replicated arguments, dimensions that have an axis already.

    >>> import jax, shardwise
    >>> w, x = (jax.ShapeDtypeStruct(s, "float32") for s in [(1024, 8192), (256, 1024)])
    >>> where = {"mesh": {"data": 4, "model": 4}, "roles": {"batch": "x"}, "budget_evals": 100}
    >>> plan = shardwise.plan(lambda w, x: x @ w, w, x, tactics=[DataParallel("data"), Auto("model")], **where)
    >>> plan.spec("x"), plan.spec("w")
    ((('data',), ()), ((), ('model',)))
    """

    axes: tuple[str, ...]

    def __init__(self, *axes: str) -> None:
        object.__setattr__(self, "axes", axes)

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        for axis in self.axes:
            context.mesh.index(axis)
        stated = stated_shards(context.analysis, context.mesh)  # by the program itself, before all tactics
        used = {d.axis for d in taken if isinstance(d, ShardDecision) and d not in stated}
        axes = tuple(dict.fromkeys(self.axes)) or tuple(a for a in context.mesh.names if a not in used)
        if not axes:
            raise DecisionError(
                f"Auto(): every axis is taken by the tactics before it; Auto({', '.join(map(repr, context.mesh.names))}) "
                f"searches axes in spite of that"
            )
        searcher = context.searcher or Searcher.alone(context.analysis, context.cost)
        found = searcher.search(taken, axes)
        return list(found.decisions) if found is not None else []


def _batch_colors(context: Context, dim: int, tactic: str) -> list[int]:
    colors = []
    for value in context.role("batch", tactic):
        found = context.analysis.color_of(value.path, dim) if dim < len(value.shape) else None
        if found is not None:
            colors.append(found.id)
    if not colors:
        raise DecisionError(f"{tactic}: no batch argument has a dimension {dim} larger than one")
    return list(dict.fromkeys(colors))


def _cover(context: Context, parameters: Sequence[Value], axis: str, without: set[int]) -> list[int]:
    """The fewest colors that shard all parameters that can be, greedily by bytes covered."""
    size = context.mesh.sizes[context.mesh.index(axis)]
    colors = context.analysis.colors
    able: dict[int, set[int]] = {}
    for k, value in enumerate(parameters):
        for d, c in context.colors_of(value):
            if c not in without and colors[c].matters and value.shape[d] % size == 0:
                able.setdefault(c, set()).add(k)
    chosen: list[int] = []
    left = set(range(len(parameters)))
    while True:
        gains = [(sum(parameters[k].nbytes for k in covers & left), -c) for c, covers in able.items()]
        best = max(gains, default=(0, 0))
        if best[0] <= 0:
            return chosen
        chosen.append(-best[1])
        left -= able[-best[1]]


def _inner_colors(context: Context, parameters: Sequence[Value]) -> set[int]:
    """Colors that a product with a parameter makes and another one contracts, that no gather looks into, and into which no
    product is added as into a residual stream."""
    analysis = context.analysis
    program, names = analysis.program, analysis.names
    weights = views(program, (v.id for v in parameters))
    made: set[int] = set()
    contracted: set[int] = set()
    looked_up: set[int] = set()
    products: set[int] = set()  # results of products with parameters, also after a bias, a cast, a scale
    roots: dict[int, frozenset[int]] = {}  # by value: the products it was made from, position by position
    given = set(weights)  # parameters, constants, and what is made of them alone
    streams: set[int] = set()
    for op in program.schedule:
        if op.rule is None:
            continue
        color = names.color[names.first_node[op.id] : names.first_node[op.id + 1]].tolist()
        kinds = dict(zip(color, (f.kind for f in op.rule.factors), strict=True))
        looked_up |= {c for c, kind in kinds.items() if kind is Kind.INDEXED}
        with_weight = [t for t, v in enumerate(op.operands) if v in weights] if op.unit in HEAVY else []
        held = {color[f] for t in with_weight for dim in op.rule.operands[t] for f in dim}
        contracted |= {c for c in held if kinds[c] is Kind.REDUCTION}
        made |= {c for c in held if kinds[c] is not Kind.REDUCTION}
        inputs = [v for v in op.operands if v >= 0]
        others = [v for v in inputs if v not in given]
        summands = [v for v in others if v in products]
        if op.kind in ("add", "add_any") and len(others) == 2 and len(summands) == 1:
            (other,) = set(others) - set(summands)
            apart = not roots.get(other, frozenset()) & roots.get(summands[0], frozenset())
            if apart and _maker(program, other).kind != "broadcast_in_dim":
                streams |= {color[f] for dim in op.rule.results[0] for f in dim}
        came = frozenset({op.id}) if with_weight else frozenset().union(*(roots.get(v, frozenset()) for v in inputs))
        if with_weight or op.unit not in HEAVY:
            roots.update((v, came) for v in op.results)
        if with_weight or (len(others) == 1 and summands and op.unit not in HEAVY):
            products.update(op.results)
        elif not others and op.kind not in ("argument", "output"):
            given.update(op.results)
    return {c for c in (made & contracted) - looked_up - streams if analysis.colors[c].matters}


def _maker(program: Program, value: int) -> Op:
    return program.ops[program.definitions[value][0]]


def _communication_s(context: Context, decisions: Sequence[Decision]) -> float:
    """What a list of decisions moves in a step, in seconds."""
    lowered = lower_state(context.analysis, State(context.mesh, tuple(decisions)), context.cost)
    return sum(
        context.cost.communication_s(r.steps, False) * float(lowered.program.trips[r.region]) for r in lowered.reshards
    )


def _scattered(context: Context, decisions: Sequence[Decision], axis: str) -> list[int]:
    """Values that are reduced into shards on an axis, and what an op makes of one such value alone."""
    lowered = lower_state(context.analysis, State(context.mesh, tuple(decisions)), context.cost)
    number, program = context.mesh.index(axis), context.analysis.program
    found: dict[int, None] = {}
    for r in lowered.reshards:
        if any(step.purpose is Move.REDUCE_SCATTER and number in step.axes for step in r.steps):
            op = program.ops[r.op]
            alone = r.operand >= 0 and all(v in (r.value, -1) for v in op.operands)
            found.update(dict.fromkeys((r.value, *(op.results if alone else ()))))
    return list(found)


def _meeting(analysis: Analysis) -> set[tuple[int, int]]:
    """Pairs of colors that one axis cannot shard at once in some op."""
    t, color = analysis.conflict_table, analysis.names.color
    pairs = set(zip(color[t.rival_p].tolist(), color[t.rival_q].tolist(), strict=True))
    return pairs | {(b, a) for a, b in pairs}


def _with_outputs(analysis: Analysis, values: Sequence[Value]) -> tuple[int, ...]:
    """Arguments, and the outputs that replace them: the first subtree of the outputs with the same structure and shapes."""
    program = analysis.program
    outputs = {program.values[v].path: program.values[v] for v in program.outputs}
    prefix = os.path.commonpath([v.path for v in values])
    tails = {v.path.removeprefix(prefix).lstrip("/"): v for v in values}
    first = next(iter(tails))
    for path in outputs:
        if not path.endswith(first):
            continue
        root = path.removesuffix(first).rstrip("/")
        twins = {v.id: outputs.get(f"{root}/{tail}" if tail else root) for tail, v in tails.items()}
        if all(t is not None and t.shape == program.values[v].shape for v, t in twins.items()):
            return (*(v.id for v in values), *(t.id for t in twins.values() if t is not None))
    return tuple(v.id for v in values)
