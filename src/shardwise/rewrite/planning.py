"""From a function, a mesh and tactics to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

import shardwise
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, Traced, trace
from shardwise.cost.decisions import Decision, Keep, Pin, State
from shardwise.cost.local import HardwareCost
from shardwise.cost.lowering import Lowered, collectives, lower_state
from shardwise.cost.model import CostModel
from shardwise.cost.predict import Predicted, predict
from shardwise.cost.sharding import Sharding
from shardwise.cost.small import keep_small
from shardwise.dims.analysis import Analysis, analyze_program
from shardwise.errors import InfeasibleError, PlanError
from shardwise.hardware.layout import Placement
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import Topology
from shardwise.plans.plan import ArrayPlan, Plan, PredictedCollective, Spec, StatedConstraint
from shardwise.plans.search_log import SearchLog
from shardwise.rewrite.choose import choose_constraints
from shardwise.rewrite.deciding import Asked, decide_asked
from shardwise.rewrite.fingerprint import fingerprint
from shardwise.search.auto import Options
from shardwise.search.infeasible import does_not_fit, size
from shardwise.search.result import Ended, Progress
from shardwise.tactics.tactic import Tactic


def plan(
    fn: Callable[..., Any],
    /,
    *args: Any,
    mesh: Any = None,
    topology: str | Topology | Placement | None = None,
    tactics: Sequence[Tactic] | None = None,
    pins: Mapping[str, Any] | None = None,
    roles: Mapping[str, str | Sequence[str]] | None = None,
    budget_s: float | None = None,
    budget_evals: int | None = None,
    seed: int = 0,
    method: str = "mcts",
    progress: Progress | None = None,
    allow_infeasible: bool = False,
    static_argnums: Any = None,
    static_argnames: Any = None,
    donate_argnums: Any = None,
    donate_argnames: Any = None,
    **kwargs: Any,
) -> Plan:
    """Plans how a function is split over a mesh: as tactics say, or as a search finds.

    Args:
      fn: a function that ``jax.jit`` can trace; ``args`` and ``kwargs`` its arguments, arrays or ``ShapeDtypeStruct``s. An
        argument that has the name of one of those below is passed by position.
      mesh: a ``jax.sharding.Mesh``, an ``AbstractMesh`` or a dict of axis sizes. No device is needed. A size of None is found,
        and without a mesh its shape is, if there is a topology.
      topology: the devices and links, such as ``"v5e:4x4"``, ``"16 v5e"`` or ``"h100:8x4"``
        (``shardwise.hardware.topology``). Without one, TPU v5e chips with a row of links for every mesh axis.
      tactics: strategies, applied in order; ``Auto`` among them searches. Without any, all axes are searched; with an empty
        list nothing is decided but the pins.
      pins: PartitionSpecs that hold whatever else is decided: by path of arguments and outputs, and else by the names that
        inner values are marked with (``jax.ad_checkpoint.checkpoint_name``, ``jax.named_call``). Shardings that arguments
        have already, and ``with_sharding_constraint``s in the program, are pins too.
      roles: paths of the arguments that play a role, for the tactics that ask: ``{"batch": "x", "params": "w"}``.
      budget_s, budget_evals: when a search stops, in seconds or in states evaluated, if nothing better turns up for a while
        it stops by itself. With a budget in evaluations alone the plan is the same on every machine.
      seed: of the search.
      method: ``"mcts"``, or one of ``shardwise.search.methods``.
      progress: called with every improvement (``shardwise.search.result``) and the share of the budget that is spent. An
        interrupt (Ctrl-C) keeps the best plan so far.
      allow_infeasible: if no plan is found that fits the memory, give the one with the smallest peak instead of an
        ``InfeasibleError``.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as in ``jax.jit``.

    >>> import jax, shardwise
    >>> shapes = [jax.ShapeDtypeStruct(s, "float32") for s in [(64, 64), (65536, 64)]]
    >>> made = shardwise.plan(lambda w, x: x @ w, *shapes, mesh={"data": 4}, budget_evals=100)
    >>> made.spec("x"), made.spec("w"), made.search.ended.value
    ((('data',), ()), ((), ()), 'all states were tried')

    By a tactic:

    >>> from shardwise.tactics.strategies import DataParallel
    >>> where = {"mesh": {"data": 4}, "roles": {"batch": "x"}}
    >>> made = shardwise.plan(lambda w, x: x @ w, *shapes, tactics=[DataParallel("data")], **where)
    >>> made.spec("x"), made.spec("w")
    ((('data',), ()), ((), ()))

    An inner value, marked and pinned, and nothing else decided:

    >>> from jax.ad_checkpoint import checkpoint_name
    >>> P = jax.sharding.PartitionSpec
    >>> fn = lambda w, x: checkpoint_name(x @ w, "product") * 2
    >>> shardwise.plan(fn, *shapes, mesh={"data": 4}, tactics=[], pins={"product": P(None, "data")}).spec("w")
    ((), ('data',))
    """
    search = Options(method, seed, budget_s, budget_evals, progress)
    options = JitOptions(static_argnums, static_argnames, donate_argnums, donate_argnames)
    asked = Asked.of(mesh, topology, tactics, pins, roles, search, allow_infeasible, options)
    return plan_asked(fn, args, kwargs, asked)


def plan_asked(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], asked: Asked) -> Plan:
    """The plan of a function for some arguments."""
    traced = trace(fn, args, dict(kwargs), asked.jit)
    analysis = analyze_program(lower(traced))
    if not analysis.program.arguments:
        raise PlanError(f"{traced.name} has no array arguments: there is nothing to shard")
    made, log = decide_asked(analysis, asked)
    settled = _settle(analysis, made.cost, made.decisions)
    notes = []
    if log is not None and not made.fits and not settled.predicted.fits:
        message = _does_not_fit(settled, log, asked)
        if not asked.allow_infeasible:
            raise InfeasibleError(message)
        notes.append(message.partition("\n")[0])
    if log is not None and log.ended is Ended.INTERRUPTED:
        notes.append(f"the search was interrupted: this is the best plan of {log.evaluations:,} evaluations")
    found = _assemble(traced, settled, made.decisions)
    found = replace(found, notes=(*notes, *found.notes), search=log)
    if asked.topology is None:
        return found
    where = made.cost.placement
    return replace(found, placement=where.lines(), device_order=tuple(where.order().reshape(-1).tolist()))


def plan_decisions(
    traced: Traced,
    analysis: Analysis,
    mesh: MeshAxes,
    decisions: Sequence[Decision],
    cost: HardwareCost | None = None,
) -> Plan:
    """The plan of a list of decisions."""
    return _assemble(traced, _settle(analysis, cost or HardwareCost.of(mesh), decisions), decisions)


class _Settled(NamedTuple):
    """Decisions carried out: with those for small arguments, and with what they are predicted to take."""

    lowered: Lowered
    small: tuple[Keep, ...]
    predicted: Predicted


def _settle(analysis: Analysis, cost: HardwareCost, decisions: Sequence[Decision]) -> _Settled:
    """Small arguments are kept whole, unless the plan is the worse for it: slower, or too large."""
    mesh = cost.placement.mesh
    lowered = lower_state(analysis, State(mesh, tuple(decisions)), cost)
    model = CostModel(lowered.structure, cost)
    plain = _Settled(lowered, (), predict(model, lowered))
    small = keep_small(lowered, cost)
    if not small:
        return plain
    lowered = lower_state(analysis, State(mesh, (*decisions, *small)), cost)
    kept = _Settled(lowered, small, predict(model, lowered))
    before, after = plain.predicted, kept.predicted
    worse = after.time_s > before.time_s or (before.fits and not after.fits)
    return plain if worse else kept


def _does_not_fit(settled: _Settled, log: SearchLog, asked: Asked) -> str:
    lowered, predicted = settled.lowered, settled.predicted
    program, mesh = lowered.program, lowered.mesh
    at_rest = 0
    for argument in program.arguments:
        pieces = 1
        for axis in (a for axes in lowered.storage[argument.value].dims for a in axes):
            pieces *= mesh.sizes[axis]
        at_rest += program.values[argument.value].nbytes // pieces
    others = [f"{t.mesh}: {size(t.peak_bytes) if t.peak_bytes is not None else t.why}" for t in log.meshes[1:]]
    message = does_not_fit(predicted, at_rest, mesh.devices, log.ended, log.evaluations, others)
    if asked.topology is None:
        message += "\nno topology was given, so TPU v5e chips were taken: topology='h100:8' names others"
    return message


def _assemble(traced: Traced, settled: _Settled, decisions: Sequence[Decision]) -> Plan:
    lowered, small = settled.lowered, settled.small
    analysis, mesh = lowered.analysis, lowered.mesh
    chosen = choose_constraints(lowered, traced.jaxpr)
    program = analysis.program
    notes = [*lowered.refused]
    notes += [
        f"{program.label(v)} is sharded otherwise by the compiler, in spite of its constraint" for v in chosen.open
    ]
    donated = {a.value: a.donated for a in program.arguments}

    def array(value: int) -> ArrayPlan:
        v = program.values[value]
        return ArrayPlan(v.path, v.shape, v.dtype, _spec(lowered.storage[value], mesh), donated.get(value, False))

    stated = []
    for stated_at, sharding in sorted(chosen.constraints.items()):
        stored = stated_at.place == "stored"
        op = program.ops[program.definitions[stated_at.number][0] if stored else stated_at.number]
        value = (
            stated_at.number if stored else (op.operands if stated_at.place == "used" else op.results)[stated_at.index]
        )
        where = str(program.source_of(op)), program.values[value].shape
        stated.append(
            StatedConstraint(stated_at.place, stated_at.number, stated_at.index, op.kind, *where, _spec(sharding, mesh))
        )
    return Plan(
        function=traced.name,
        fingerprint=fingerprint(program),
        mesh=mesh,
        arguments=tuple(array(a.value) for a in program.arguments),
        outputs=tuple(array(v) for v in program.outputs),
        constraints=tuple(stated),
        collectives=tuple(_predicted(lowered)),
        predicted=settled.predicted,
        decisions=(
            *(_words(analysis, d) for d in decisions),
            *(f"{_words(analysis, d)}: small, so that gathering costs more than keeping" for d in small),
        ),
        notes=tuple(notes),
        versions=(("shardwise", shardwise.__version__), ("jax", jax.__version__)),
        trees=(traced.inputs, traced.outputs),
    )


def _spec(sharding: Sharding, mesh: MeshAxes) -> Spec:
    return tuple(tuple(mesh.names[a] for a in axes) for axes in sharding.dims)


def _predicted(lowered: Lowered) -> list[PredictedCollective]:
    program, mesh = lowered.program, lowered.state.mesh
    found = []
    for kind, axes, nbytes, times, reshard in collectives(lowered):
        op = program.ops[reshard.op]
        names = tuple(mesh.names[a] for a in axes)
        source = str(program.source_of(op))
        value = program.values[reshard.value]
        found.append(
            PredictedCollective(kind.value, names, nbytes, times, op.kind, source, value.path or value.type_text)
        )
    return found


def _words(analysis: Analysis, decision: Decision) -> str:
    """A decision as a person would say it."""
    if isinstance(decision, Pin):
        spec = ", ".join("open" if axes is None else "·".join(axes) or "-" for axes in decision.spec)
        return f"{analysis.program.label(decision.value)} pinned to [{spec}]"
    if isinstance(decision, Keep):
        first, more = analysis.program.label(decision.values[0]), len(decision.values) - 1
        return f"{first}{f' and {more} more' if more else ''} whole on {decision.axis}"
    places = [str(p) for c in decision.colors for p in analysis.colors[c].places]
    size = analysis.colors[decision.colors[0]].size
    where = f"{places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''}" if places else "inner values"
    return f"{where} (size {size:,}) over {decision.axis}"
