"""From a function, a mesh and tactics to a plan: the order of things."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import jax

import shardwise
from shardwise.capture.equations import stated_meshes
from shardwise.capture.trace import JitOptions, Traced
from shardwise.cost.model import TermKind
from shardwise.cost.uncertainty import upper_bytes
from shardwise.errors import InfeasibleError
from shardwise.hardware.layout import Placement
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import Topology
from shardwise.hardware.topology import topology as topology_of
from shardwise.interruption import interruptible
from shardwise.ir.collector import collector_paused
from shardwise.ir.program import Program
from shardwise.lowering.decisions import Decision
from shardwise.lowering.lowered import Lowered, collectives
from shardwise.lowering.sharded_program import ShardedProgram
from shardwise.planner.arms import Decided
from shardwise.planner.asked import Asked
from shardwise.planner.bind import fingerprint
from shardwise.planner.devices import mesh_of_arguments, under_explicit
from shardwise.planner.infeasible import ANYWAY, does_not_fit, variant_changes
from shardwise.planner.inquiry import Inquiry, Settled, Variants, described
from shardwise.planner.mesh import OpenMesh, devices_at_hand
from shardwise.planner.racing import Outcome, choose
from shardwise.planner.sizes import megatron_notes, size_notes
from shardwise.planner.slices import choose_slice
from shardwise.plans.parts import ArrayPlan, PredictedCollective, ScheduleStep
from shardwise.plans.plan import Plan
from shardwise.plans.search_log import VariantTried
from shardwise.search.run import Ended, Progress
from shardwise.search.searcher import Options
from shardwise.tactics.roles import RolesLike, complete_roles
from shardwise.tactics.strategies import Megatron
from shardwise.tactics.tactic import Tactic
from shardwise.tactics.text import TacticsLike, tactic_text
from shardwise.transforms.variants import AS_IS, Wanted
from shardwise.units import binary

_SMALL: Final = "small, gathering would cost more"
#: The share of the step time from which a kernel that every device computes whole is worth a note, and how many are noted.
_MUCH: Final = 0.1
_MOST_WHOLE: Final = 3


def plan(
    fn: Callable[..., Any],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    mesh: Any = None,
    topology: str | Topology | Placement | None = None,
    tactics: TacticsLike | None = None,
    pins: Mapping[str, Any] | None = None,
    roles: RolesLike | None = None,
    budget_s: float | None = None,
    budget_evals: int | None = None,
    seed: int = 0,
    method: str = "mcts",
    progress: Progress | Literal["auto"] | None = None,
    objective: str = "time",
    step_time_s: float | None = None,
    memory_limit: int | str | None = None,
    allow_infeasible: bool = False,
    microbatches: int | str | None = None,
    remat: bool | str | None = None,
    pipeline: int | str | None = None,
    offload: bool | str | None = None,
    static_argnums: Any = None,
    static_argnames: Any = None,
    donate_argnums: Any = None,
    donate_argnames: Any = None,
) -> Plan:
    """Plans how a function is sharded over a mesh, by tactics or by a search.

    Args:
      fn: a function that ``jax.jit`` can trace.
      args, kwargs: its arguments, arrays or ``ShapeDtypeStruct``s, by position and by name.
      mesh: a ``jax.sharding.Mesh``, an ``AbstractMesh`` or a dict of axis sizes. No device is needed. Sizes of None are
        searched for. Without a mesh, that of ``jax.set_mesh`` is used, or that over which arguments are sharded, or that of
        the ``shard_map``s and shardings in the program, or the shape is searched for on the topology.
      topology: the devices and links, such as ``"v5e:4x4"``, ``"16 v5e"`` or ``"h100:8x4"``
        (``shardwise.hardware.topology``). Without one, the devices of ``jax.devices()``; with a
        mesh of another size, as many devices of that kind.
      tactics: strategies, applied in order, as objects or as text: ``[FSDP("data"), Auto("model")]`` is
        ``"fsdp:data,auto:model"``, ``"fsdp:data+model"`` has two axes and ``"fsdp"`` all of the mesh. ``Auto`` searches.
        Without any, all axes are searched; with an empty list nothing is decided but the pins.
      pins: PartitionSpecs that no decision changes: by path of arguments and outputs, or by the names that mark inner values
        (``jax.ad_checkpoint.checkpoint_name``, ``jax.named_call``). Shardings that arguments already have, and
        ``with_sharding_constraint``s in the program, are pins too.
      roles: paths of the arguments with a role, such as ``{"batch": "x", "params": "w"}``. Other roles are inferred from the
        structure of the program (``shardwise.tactics.roles``); ``plan.roles`` has all of them.
      budget_s, budget_evals: when a search stops, in seconds or in evaluated states; it stops earlier if nothing improves for
        a while. By default, and with a budget in evaluations alone, the plan is the same on every machine.
      seed: the seed of the search.
      method: ``"mcts"``, or one of ``shardwise.search.methods``: ``"beam"``, ``"greedy"``, ``"random"``, ``"exhaustive"``,
        ``"automap"``.
      progress: called with every improvement (``shardwise.search.run``) and the share of the budget that is spent;
        ``"auto"`` shows them in a line of the terminal, which moves while the search goes on, or in the notebook. An interrupt
        (Ctrl-C) keeps the best plan so far.
      objective: what is minimized: ``"time"``, the step time of plans that fit; ``"memory"``, their peak memory; ``"devices"``,
        the number of devices, where slices of 1, 2, 4, ... devices of the topology's kind are tried.
      step_time_s: the longest step time, in seconds, of a plan for ``objective="memory"`` or ``"devices"``.
      memory_limit: the memory of a device that a plan may use, in bytes or as text such as ``"12GiB"``. Without one it is that
        of the hardware profile.
      allow_infeasible: whether to return the plan with the smallest peak memory if none is found that fits, instead of raising
        ``InfeasibleError``.
      microbatches: the number of parts in which the batch (the arguments of that role, whose first dimension counts the
        examples) is computed, one after the other, with the same result; ``"auto"`` tries some if it does not fit otherwise.
      remat: loops and repeated blocks (layers, scanned or unrolled) keep only what they carry, and the backward pass recomputes
        the rest; with ``"gathers"`` the backward pass only gathers parameters of unrolled layers again, instead of keeping
        the copies of the forward pass; ``"auto"`` tries both, and without ``remat`` the latter is tried if nothing fits.
      pipeline: the number of stages of a pipeline through the loops over layers (``transforms/pipeline.py``), which some mesh
        axis has as its size; ``"auto"`` tries pipelines over the axes with the slowest links, and keeps one if it is faster.
        The tactic ``Pipeline`` says which axis has the stages.
      offload: whether the stacked state of the optimizer is in the memory of the host, from which each layer's part is fetched
        and sent back; ``"auto"`` tries it if nothing fits otherwise.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as in ``jax.jit``.

    >>> import jax, shardwise
    >>> shapes = [jax.ShapeDtypeStruct(s, "float32") for s in [(64, 64), (65536, 64)]]
    >>> plan = shardwise.plan(lambda w, x: x @ w, *shapes, mesh={"data": 4}, budget_evals=100)
    >>> plan.spec("x"), plan.spec("w"), plan.search.ended.value
    (P('data',), P(), 'all states were tried')

    By a tactic:

    >>> plan = shardwise.plan(lambda w, x: x @ w, *shapes, mesh={"data": 4}, tactics="dp:data")
    >>> plan.spec("x"), plan.spec("w"), plan.roles
    (P('data',), P(), {'batch': ('x',), 'params': ('w',)})

    With a marked and pinned inner value, and nothing else decided:

    >>> from jax.ad_checkpoint import checkpoint_name
    >>> P = jax.sharding.PartitionSpec
    >>> fn = lambda w, x: checkpoint_name(x @ w, "product") * 2
    >>> shardwise.plan(fn, *shapes, mesh={"data": 4}, tactics=[], pins={"product": P(None, "data")}).spec("w")
    P(None, 'data')
    """
    asked = asked_of(
        mesh=mesh,
        topology=topology,
        tactics=tactics,
        pins=pins,
        roles=roles,
        method=method,
        seed=seed,
        budget_s=budget_s,
        budget_evals=budget_evals,
        progress=progress,
        objective=objective,
        step_time_s=step_time_s,
        memory_limit=memory_limit,
        allow_infeasible=allow_infeasible,
        microbatches=microbatches,
        remat=remat,
        pipeline=pipeline,
        offload=offload,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
    )
    return plan_asked(fn, args, kwargs or {}, asked)


def asked_of(**options: Any) -> Asked:
    """The options of :func:`plan`, all of them, checked."""
    search = Options(*(options.pop(name) for name in "method seed budget_s budget_evals progress".split()))
    jit = JitOptions(
        **{f"{how}_arg{by}": options.pop(f"{how}_arg{by}") for how in ("static", "donate") for by in ("nums", "names")}
    )
    wanted = Wanted(*(options.pop(name) for name in ("microbatches", "remat", "offload", "pipeline")))
    return Asked.of(search=search, jit=jit, wanted=wanted, **options)


def plan_asked(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], asked: Asked) -> Plan:
    """Plans a function for some arguments."""
    asked = with_devices(asked, jax.tree.leaves((args, kwargs)))
    with with_progress(asked) as asked, interruptible(), collector_paused(), under_explicit(asked.mesh):
        if callable(begin := getattr(asked.search.progress, "begin", None)):
            begin()
        # 1. Trace and analyze the function; find the roles of its arguments.
        variants = Variants(fn, args, dict(kwargs), asked.jit)
        asked = _with_stated_mesh(asked, variants[AS_IS].traced.jaxpr)
        asked = replace(asked, roles=complete_roles(variants[AS_IS].analysis, asked.roles))
        # 2. Choose the variant, the mesh and the decisions.
        if asked.objective == "devices":
            return plan_of(variants, asked, *choose_slice(variants, asked))
        return plan_of(variants, asked, choose(variants, asked))


@contextlib.contextmanager
def with_progress(asked: Asked) -> Iterator[Asked]:
    """The same with a progress line that is shown in this context, in place of ``progress="auto"``."""
    if asked.search.progress != "auto":
        yield asked
        return
    from shardwise.report.progress import ProgressLine

    with ProgressLine() as line:
        yield replace(asked, search=replace(asked.search, progress=line))


def with_devices(asked: Asked, leaves: Sequence[Any] = ()) -> Asked:
    """The same with the mesh of ``jax.set_mesh``, or that over which some arguments are sharded, if there is one and no other
    was given. Where sizes are open and there is no topology, with that of ``jax.devices()``."""
    current = jax.sharding.get_abstract_mesh()
    if asked.mesh is None and not isinstance(asked.topology, Placement):
        asked = replace(asked, mesh=mesh_of_arguments(leaves) if current.empty else current)
    if asked.topology is not None or asked.objective == "devices":
        return asked
    name, count, _ = devices_at_hand()
    is_open = OpenMesh.of(asked.mesh) is not None
    return replace(asked, at_hand=True, topology=topology_of(f"{count} {name}") if is_open else None)


def _with_stated_mesh(asked: Asked, jaxpr: Any) -> Asked:
    """The same with the mesh that the program states in its ``shard_map``s and shardings, where no other was given. On another
    number of devices its axes have open sizes."""
    if asked.mesh is not None or isinstance(asked.topology, Placement) or asked.objective == "devices":
        return asked
    stated = {MeshAxes.of(mesh): mesh for mesh in stated_meshes(jaxpr)}
    if len(stated) != 1 or (axes := next(iter(stated))).devices == 1:
        return asked
    if asked.at_hand or asked.topology is None:
        return replace(asked, mesh=stated[axes], topology=None)
    return replace(asked, mesh=axes.shape if asked.topology.devices == axes.devices else dict.fromkeys(axes.names))


def plan_of(variants: Variants, asked: Asked, outcome: Outcome, slices: Sequence[str] = ()) -> Plan:
    """The plan of what was chosen; raises InfeasibleError if it does not fit or takes too long. ``slices``: what other slices
    of the topology lack."""
    captured, decided, settled, log, tried = outcome
    placement = decided.inquiry.cost.placement
    notes = [*_objective_notes(asked), *slices]
    if asked.at_hand and (other := devices_at_hand(asked.mesh)[2]):
        notes.append(
            f"there is no profile of {other}: the plan is for {placement.topology.text}; topology=... names others"
        )
    notes += [f"{t.variant}: {t.why}" for t in tried if t.peak_bytes is None and t.why and not tried[0].fits]
    notes += _first_variant(tried)
    if asked.mesh is not None and OpenMesh.of(asked.mesh) is None and placement.mesh != MeshAxes.of(asked.mesh):
        notes.append(
            f"the mesh {MeshAxes.of(asked.mesh)} is used as {placement.mesh}, with the devices in the same order"
        )
    notes += _without_effect(captured.analysis.program)
    # 3. Say what to do if nothing fits.
    if log is not None and not decided.fits and not settled.predicted.fits:
        message = does_not_fit(
            decided.inquiry,
            settled,
            replace(log, variants=tuple(t for t in tried if t.variant != str(captured.variant))),
            list(variant_changes(variants, captured.variant, asked.wanted, asked.roles)),
            check=not asked.allow_infeasible,
        )
        if not asked.allow_infeasible:
            assumed = f"no topology was given, so the devices are those at hand, {placement.topology.text}: name others"
            lines = [message, *([f"{assumed}, as in topology='h100:8'"] if asked.at_hand else ())]
            lines += [f"tried {t.variant}: {t.peak_text or t.why}" for t in tried[1:]]
            raise InfeasibleError("\n".join([*lines, *slices]))
        notes.append(message.partition("\n")[0])
    elif asked.step_time_s is not None and settled.predicted.time_s > asked.step_time_s:
        notes.append(f"no plan was found that takes at most {asked.step_time_s:g} s: {settled.predicted.time_s:.4g} s")
        if not asked.allow_infeasible:
            raise InfeasibleError("\n".join([notes[-1], *slices, ANYWAY]))
    if log is not None and log.ended is Ended.INTERRUPTED:
        notes.append(f"the search was interrupted: this is the best plan of {log.evaluations:,} evaluations")
    # 4. Write the plan.
    plan = assemble(captured.traced, decided.inquiry, settled, decided.decisions)
    inquiry = decided.inquiry
    strategies = _strategy_notes(asked.tactics, decided, plan.notes)
    plan = replace(
        plan,
        notes=(*notes, *_tight_notes(inquiry, settled), *plan.notes, *strategies, *_unused_notes(inquiry, settled)),
        search=log and replace(log, variants=tried),
        variant=captured.variant,
        call=variants.call,
        static=asked.jit.static,
        schedule=tuple(_schedule(asked.tactics, decided)),
    )
    if isinstance(asked.mesh, jax.sharding.Mesh):
        plan = plan.on_mesh(asked.mesh)
    if asked.topology is None:
        return plan
    return replace(plan, placement=placement.lines(), device_order=tuple(placement.order().reshape(-1).tolist()))


def _tight_notes(inquiry: Inquiry, settled: Settled) -> Iterator[str]:
    """Says it if a plan fits by the lower end of its peak only."""
    p = settled.predicted
    upper = upper_bytes(inquiry.model, settled.lowered, p.curve)
    if p.fits and upper > p.usable_bytes:
        yield (
            f"tight: the peak is between {binary(p.peak_bytes)} and {binary(upper)} of {binary(p.usable_bytes)}, by how the "
            "compiler lays out arrays; to ask it: shardwise verify or shardwise tune, for TPUs; more room: memory_limit=..."
        )


def _unused_notes(inquiry: Inquiry, settled: Settled) -> Iterator[str]:
    """What the devices of a mesh do not share: nothing at all, an axis, or kernels that take much of the step."""
    lowered, model, step_s = settled.lowered, inquiry.model, settled.predicted.time_s
    mesh, computes = lowered.mesh, lowered.computes
    used = {axis for op in lowered.program.ops for axes in computes[op.id].assigned for axis in axes}
    if mesh.devices > 1 and not used:
        yield f"nothing is sharded: each of the {mesh.devices} devices computes the whole program"
        return
    for axis, (name, count) in enumerate(zip(mesh.names, mesh.sizes, strict=True)):
        if count > 1 and axis not in used:
            yield f"nothing is sharded over {name}: its {count} devices compute the same"
    whole_ps: Counter[str] = Counter()
    for term in model.terms:
        if term.kind is TermKind.KERNEL and used and all(computes[op].devices == 1 for op in term.ops):
            op = lowered.program.ops[model.kernels[term.number].main]
            whole_ps[f"{op.kind} at {lowered.program.source_of(op)}"] += model.figures(lowered, term).compute_ps
    for what, time_ps in whole_ps.most_common(_MOST_WHOLE):
        if time_ps * 1e-12 > _MUCH * step_s:
            yield f"{what} is computed whole on each device: {time_ps * 1e-12 / step_s:.0%} of the step time"


def _strategy_notes(tactics: Sequence[Tactic], decided: Decided, said: Sequence[str]) -> Iterator[str]:
    """Says what strategies do not shard, since an axis does not divide it; not what other notes have said."""
    for tactic, count in zip(tactics, decided.counts, strict=False):
        if isinstance(tactic, Megatron):
            yield from megatron_notes(decided.inquiry.context, tactic, decided.decisions[:count], said)


def _without_effect(program: Program) -> Iterator[str]:
    """Says it if most arguments affect no output, as where a function forgets to return what it updates."""
    unused = [program.values[a.value].path for a in program.arguments if not program.uses[a.value]]
    if 2 * len(unused) > len(program.arguments):
        yield (
            f"{len(unused)} of {len(program.arguments)} input arrays affect no output ({unused[0]}, ...): return what the "
            "function computes from them; of changes in place only those of Flax nnx objects are followed"
        )


def _objective_notes(asked: Asked) -> Iterator[str]:
    limit = "" if asked.step_time_s is None else f" with a step time of at most {asked.step_time_s:g} s"
    if asked.objective == "memory":
        yield f"the plan has the smallest peak memory that was found{limit}"
    if asked.objective == "devices":
        yield f"the plan is for the fewest devices on which one was found that fits{limit}"


def _first_variant(tried: Sequence[VariantTried]) -> Iterator[str]:
    """Says it if the program as it is does not fit, or if nothing was found for it that fits."""
    for first in (t for t in tried[:1] if t.peak_bytes and not t.fits):
        changed = "unchanged" if first.variant == str(AS_IS) else first.variant
        if first.proven:
            yield f"{changed}, the program does not fit: {first.peak_text} per device"
        else:
            yield (
                f"{changed}, no plan was found that fits: the smallest found needs {first.peak_text} per device (not proven, "
                "and not fully searched)"
            )


def _schedule(tactics: Sequence[Tactic], decided: Decided) -> Iterator[ScheduleStep]:
    """The cost before the first of several tactics and after each."""
    first = "pins" if decided.counts[0] else "replicated"
    for name, count in (
        zip([first, *map(tactic_text, tactics)], decided.counts, strict=True) if len(tactics) > 1 else ()
    ):
        p = decided.inquiry.settle(decided.decisions[:count]).predicted
        yield ScheduleStep(name, p.time_s, p.peak_bytes, p.fits, p.collectives)


def assemble(traced: Traced, inquiry: Inquiry, settled: Settled, decisions: Sequence[Decision]) -> Plan:
    """The plan of settled decisions, without its search log and call."""
    lowered = settled.lowered
    analysis, mesh, program = lowered.analysis, lowered.mesh, lowered.program
    donated = {a.value: a.donated for a in program.arguments}

    def array(value: int) -> ArrayPlan:
        v, colors, spec = program.values[value], lowered.structure.colors[value], lowered.storage[value].spec(mesh)
        return ArrayPlan(v.path, v.shape, v.dtype, spec, donated.get(value, False), colors, v.host)

    return Plan(
        function=traced.name,
        fingerprint=fingerprint(program),
        mesh=mesh,
        arguments=tuple(array(a.value) for a in program.arguments),
        outputs=tuple(array(v) for v in program.outputs),
        sharded=ShardedProgram.of(lowered),
        collectives=tuple(_collectives(lowered)),
        predicted=settled.predicted,
        notes=size_notes(lowered),
        versions={"shardwise": shardwise.__version__, "jax": jax.__version__},
        choices=tuple(described(analysis, d) for d in decisions),
        small=tuple(replace(d, what=described(analysis, d).what, why=_SMALL) for d in settled.small),
        roles=inquiry.roles,
        trees=(traced.inputs, traced.outputs),
        jaxpr=traced.jaxpr,
        asked=inquiry,
    )


def _collectives(lowered: Lowered) -> Iterator[PredictedCollective]:
    program, names = lowered.program, lowered.mesh.names
    argument = {v: program.values[root].path for v, root in program.argument_of.items()}
    for kind, axes, nbytes, times, reshard in collectives(lowered):
        op, value = program.ops[reshard.op], program.values[reshard.value]
        view = f"{argument[value.id]} as {value.type_text}" if value.id in argument else value.type_text
        yield PredictedCollective(
            kind.value,
            tuple(names[a] for a in axes),
            nbytes,
            times,
            op.kind,
            str(program.source_of(op)),
            value.path or view,
        )
