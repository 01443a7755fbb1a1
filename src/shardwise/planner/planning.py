"""From a function, a mesh and tactics to a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import jax

import shardwise
from shardwise.capture.trace import Call, JitOptions, Traced
from shardwise.dims.analysis import Analysis
from shardwise.errors import InfeasibleError
from shardwise.hardware.layout import Placement
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import Topology
from shardwise.interruption import interruptible
from shardwise.ir.program import Program
from shardwise.ir.traits import VIEWS
from shardwise.lowering.decisions import Decision
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import Lowered, collectives
from shardwise.lowering.sharded_program import ShardedProgram
from shardwise.lowering.sharding import Sharding
from shardwise.planner.deciding import Asked
from shardwise.planner.fingerprint import fingerprint
from shardwise.planner.infeasible import Change, does_not_fit, size
from shardwise.planner.inquiry import Inquiry, Settled, described
from shardwise.planner.relaxations import variant_changes
from shardwise.planner.trying import Attempt, Captured, attempted, best_variant, capture_variant
from shardwise.plans.colors import color_graph
from shardwise.plans.plan import ArrayPlan, Plan, PredictedCollective, Spec
from shardwise.plans.search_log import SearchLog, VariantTried
from shardwise.search.result import Ended, Progress
from shardwise.search.searcher import Options
from shardwise.tactics.experts import usual
from shardwise.tactics.named import Given
from shardwise.tactics.roles import Given as GivenRoles
from shardwise.tactics.roles import complete_roles
from shardwise.tactics.strategies import Auto
from shardwise.transforms.variant import Variant
from shardwise.transforms.variants import Wanted

_SMALL: Final = "small, so that gathering costs more than keeping"


def plan(
    fn: Callable[..., Any],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    mesh: Any = None,
    topology: str | Topology | Placement | None = None,
    tactics: Given | None = None,
    pins: Mapping[str, Any] | None = None,
    roles: GivenRoles | None = None,
    budget_s: float | None = None,
    budget_evals: int | None = None,
    seed: int = 0,
    method: str = "mcts",
    progress: Progress | Literal["auto"] | None = None,
    allow_infeasible: bool = False,
    microbatches: int | str | None = None,
    remat: bool | str | None = None,
    static_argnums: Any = None,
    static_argnames: Any = None,
    donate_argnums: Any = None,
    donate_argnames: Any = None,
) -> Plan:
    """Plans how a function is split over a mesh: as tactics say, or as a search finds.

    Args:
      fn: a function that ``jax.jit`` can trace.
      args, kwargs: its arguments, arrays or ``ShapeDtypeStruct``s, by position and by name.
      mesh: a ``jax.sharding.Mesh``, an ``AbstractMesh`` or a dict of axis sizes. No device is needed. A size of None is found.
        Without a mesh it is that of ``jax.set_mesh``, and else its shape is found, if there is a topology.
      topology: the devices and links, such as ``"v5e:4x4"``, ``"16 v5e"`` or ``"h100:8x4"``
        (``shardwise.hardware.topology``). Without one, TPU v5e chips with a row of links for every mesh axis.
      tactics: strategies, applied in order, as objects or as text: ``[FSDP("data"), Auto("model")]`` is
        ``"fsdp:data,auto:model"``, ``"fsdp:data+model"`` has two axes and ``"fsdp"`` all of the mesh. ``Auto`` searches.
        Without any, all axes are searched; with an empty list nothing is decided but the pins.
      pins: PartitionSpecs that hold whatever else is decided: by path of arguments and outputs, and else by the names that
        inner values are marked with (``jax.ad_checkpoint.checkpoint_name``, ``jax.named_call``). Shardings that arguments
        have already, and ``with_sharding_constraint``s in the program, are pins too.
      roles: paths of the arguments that play a role, such as ``{"batch": "x", "params": "w"}``. Roles that are not given are
        inferred from the structure of the program (``shardwise.tactics.roles``); ``plan.roles`` has all of them.
      budget_s, budget_evals: when a search stops, in seconds or in states evaluated, if nothing better turns up for a while
        it stops by itself. With a budget in evaluations alone the plan is the same on every machine.
      seed: of the search.
      method: ``"mcts"``, or one of ``shardwise.search.methods``: ``"beam"``, ``"greedy"``, ``"random"``, ``"exhaustive"``.
      progress: called with every improvement (``shardwise.search.result``) and the share of the budget that is spent;
        ``"auto"`` shows them in a line of the terminal or of a notebook's cell. An interrupt (Ctrl-C) keeps the best plan so
        far.
      allow_infeasible: if no plan is found that fits the memory, give the one with the smallest peak instead of an
        ``InfeasibleError``.
      microbatches: compute the batch (the arguments of that role, whose first dimension counts the examples) in so many
        parts, one after the other, with the same result; ``"auto"`` tries how many, if it takes any to fit.
      remat: loops and repeated blocks (layers, scanned or unrolled) keep only what they carry, and the backward pass computes
        the rest again; ``"auto"`` tries it.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as in ``jax.jit``.

    >>> import jax, shardwise
    >>> shapes = [jax.ShapeDtypeStruct(s, "float32") for s in [(64, 64), (65536, 64)]]
    >>> made = shardwise.plan(lambda w, x: x @ w, *shapes, mesh={"data": 4}, budget_evals=100)
    >>> made.spec("x"), made.spec("w"), made.search.ended.value
    (P('data',), P(), 'all states were tried')

    By a tactic:

    >>> made = shardwise.plan(lambda w, x: x @ w, *shapes, mesh={"data": 4}, tactics="dp:data")
    >>> made.spec("x"), made.spec("w"), made.roles
    (P('data',), P(), {'batch': ('x',), 'params': ('w',)})

    An inner value, marked and pinned, and nothing else decided:

    >>> from jax.ad_checkpoint import checkpoint_name
    >>> P = jax.sharding.PartitionSpec
    >>> fn = lambda w, x: checkpoint_name(x @ w, "product") * 2
    >>> shardwise.plan(fn, *shapes, mesh={"data": 4}, tactics=[], pins={"product": P(None, "data")}).spec("w")
    P(None, 'data')
    """
    search = Options(method, seed, budget_s, budget_evals, progress)
    options = JitOptions(static_argnums, static_argnames, donate_argnums, donate_argnames)
    asked = Asked.of(
        mesh, topology, tactics, pins, roles, search, allow_infeasible, options, Wanted(microbatches, remat)
    )
    return plan_asked(fn, args, kwargs or {}, asked)


def plan_asked(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], asked: Asked) -> Plan:
    """The plan of a function for some arguments. Without a mesh it is that of ``jax.set_mesh``, where there is one."""
    current = jax.sharding.get_abstract_mesh()
    if asked.mesh is None and not isinstance(asked.topology, Placement) and not current.empty:
        asked = replace(asked, mesh=current)
    if asked.search.progress == "auto":
        from shardwise.report.progress import ProgressLine

        with ProgressLine() as line:
            return plan_asked(fn, args, kwargs, replace(asked, search=replace(asked.search, progress=line)))
    with interruptible():
        return _planned(fn, args, kwargs, asked)


def _planned(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], asked: Asked) -> Plan:
    def captured(variant: Variant) -> Captured:
        return capture_variant(fn, args, dict(kwargs), asked, variant)

    plain = captured(Variant())
    asked = replace(asked, roles=complete_roles(plain.analysis, asked.roles))
    if asked.wanted.open:
        best, tried = best_variant(plain, captured, asked)
    else:
        ((variant,),) = asked.wanted.rounds(plain.traced, asked.roles)
        best, tried = attempted(plain if variant == plain.variant else captured(variant), asked), ()
    best, taken = _or_usual(best, asked)
    made, log, settled = best.made, best.log, best.settled
    notes = [*taken, *(f"{t.variant}: {t.why}" for t in tried if t.why), *_left_as_it_was(tried)]
    if log is not None and not made.fits and not settled.predicted.fits:
        others = variant_changes(
            asked.wanted,
            asked.roles,
            best.captured.variant,
            plain.traced,
            lambda variant: captured(variant).analysis,
        )
        message = _does_not_fit(settled, log, asked, tuple(others))
        if not asked.allow_infeasible:
            raise InfeasibleError("\n".join([message, *_variants_tried(tried)]))
        notes.append(message.partition("\n")[0])
    if log is not None and log.ended is Ended.INTERRUPTED:
        notes.append(f"the search was interrupted: this is the best plan of {log.evaluations:,} evaluations")
    found = _assemble(best.captured.traced, best.inquiry, settled, made.decisions)
    log = log if log is None else replace(log, variants=tried)
    call, static = Call.of(fn, args, kwargs), asked.jit.static
    found = replace(
        found, notes=(*notes, *found.notes), search=log, variant=best.captured.variant, call=call, static=static
    )
    if isinstance(asked.mesh, jax.sharding.Mesh):
        found = found.on_mesh(asked.mesh)
    if asked.topology is None:
        return found
    where = made.cost.placement
    return replace(found, placement=where.lines(), device_order=tuple(where.order().reshape(-1).tolist()))


def _or_usual(found: Attempt, asked: Asked) -> tuple[Attempt, list[str]]:
    """What was found, or the best of the usual strategies where a short search has missed it; and a note of that. They need a
    batch and parameters. Under a budget in evaluations all are tried, else as many as a second is enough for."""
    searched = (
        found.log is not None
        and not found.interrupted
        and all(isinstance(t, Auto) and not t.axes for t in asked.tactics)
    )
    if not searched or asked.pins or not {"batch", "params"} <= found.inquiry.roles.keys():
        return found, []
    limit_s = 1.0 if asked.search.budget_evals is None else math.inf
    for expert in usual(found.inquiry.context, found.inquiry.model, limit_s)[:1]:
        settled = found.inquiry.settle(expert.decisions)
        made = replace(found.made, decisions=expert.decisions, total=expert.cost, fits=settled.predicted.fits)
        other = found._replace(made=made, settled=settled)
        if other.rank < found.rank:
            return other, [f"this is {expert.name}: the search found nothing better within its budget"]
    return found, []


def _left_as_it_was(tried: Sequence[VariantTried]) -> list[str]:
    """Why the program is not left as it is."""
    return [f"{t.variant} it does not fit: {_peak(t)} a device" for t in tried[:1] if t.peak_bytes and not t.fits]


def _peak(tried: VariantTried) -> str:
    assert tried.peak_bytes is not None
    return f"{'at least ' if tried.time_s is None else ''}{size(tried.peak_bytes)}"


def _variants_tried(tried: Sequence[VariantTried]) -> list[str]:
    return [f"tried {t.variant}: {_peak(t) if t.peak_bytes is not None else t.why}" for t in tried[1:]]


def plan_decisions(
    traced: Traced,
    analysis: Analysis,
    mesh: MeshAxes,
    decisions: Sequence[Decision],
    cost: HardwareCost | None = None,
) -> Plan:
    """The plan of a list of decisions."""
    inquiry = Inquiry(analysis, cost or HardwareCost.of(mesh))
    return _assemble(traced, inquiry, inquiry.settle(decisions), decisions)


def _does_not_fit(settled: Settled, log: SearchLog, asked: Asked, changes: Sequence[Change]) -> str:
    lowered, predicted = settled.lowered, settled.predicted
    program, mesh = lowered.program, lowered.mesh
    at_rest = 0
    for argument in program.arguments:
        pieces = 1
        for axis in (a for axes in lowered.storage[argument.value].dims for a in axes):
            pieces *= mesh.sizes[axis]
        at_rest += program.values[argument.value].nbytes // pieces
    others = [f"{t.mesh}: {size(t.peak_bytes) if t.peak_bytes is not None else t.why}" for t in log.meshes[1:]]
    told, check = (log.ended, log.evaluations, others), not asked.allow_infeasible
    untried = [option for option in ("remat", "microbatches") if getattr(asked.wanted, option) is None]
    message = does_not_fit(lowered, predicted, at_rest, *told, changes, untried, check)
    if asked.topology is None:
        message += "\nno topology was given, so TPU v5e chips were taken: topology='h100:8' names others"
    return message


def _assemble(traced: Traced, inquiry: Inquiry, settled: Settled, decisions: Sequence[Decision]) -> Plan:
    lowered, small = settled.lowered, settled.small
    analysis, mesh = lowered.analysis, lowered.mesh
    program = analysis.program
    donated = {a.value: a.donated for a in program.arguments}

    def array(value: int) -> ArrayPlan:
        v = program.values[value]
        spec, colors = _spec(lowered.storage[value], mesh), lowered.structure.colors[value]
        return ArrayPlan(v.path, v.shape, v.dtype, spec, donated.get(value, False), colors)

    return Plan(
        function=traced.name,
        fingerprint=fingerprint(program),
        mesh=mesh,
        arguments=tuple(array(a.value) for a in program.arguments),
        outputs=tuple(array(v) for v in program.outputs),
        sharded=ShardedProgram.of(lowered),
        collectives=tuple(_predicted(lowered)),
        predicted=settled.predicted,
        notes=lowered.refused,
        versions={"shardwise": shardwise.__version__, "jax": jax.__version__},
        colors=color_graph(analysis, lowered.state),
        choices=tuple(described(analysis, d) for d in decisions),
        small=tuple(replace(d, what=described(analysis, d).what, why=_SMALL) for d in small),
        roles=inquiry.roles,
        trees=(traced.inputs, traced.outputs),
        jaxpr=traced.jaxpr,
        asked=inquiry,
    )


def _spec(sharding: Sharding, mesh: MeshAxes) -> Spec:
    return tuple(tuple(mesh.names[a] for a in axes) for axes in sharding.dims)


def _predicted(lowered: Lowered) -> list[PredictedCollective]:
    program, mesh = lowered.program, lowered.state.mesh
    made_of = _made_of(program)
    found = []
    for kind, axes, nbytes, times, reshard in collectives(lowered):
        op = program.ops[reshard.op]
        names = tuple(mesh.names[a] for a in axes)
        source = str(program.source_of(op))
        value = program.values[reshard.value]
        argument = made_of.get(reshard.value)
        label = value.path or (f"{argument} as {value.type_text}" if argument else value.type_text)
        found.append(PredictedCollective(kind.value, names, nbytes, times, op.kind, source, label))
    return found


def _made_of(program: Program) -> dict[int, str]:
    """By value: the path of the argument that it is a view of, a cast for one."""
    root = {a.value: a.path for a in program.arguments}
    for op in program.schedule:
        if op.kind in VIEWS and op.operands[0] in root:
            root.update((v, root[op.operands[0]]) for v in op.results)
    return root
