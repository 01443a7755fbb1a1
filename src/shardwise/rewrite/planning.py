"""From a function, a mesh and tactics to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

import shardwise
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, Traced, trace
from shardwise.cost.decisions import Decision, Keep, Pin, State
from shardwise.cost.local import HardwareCost
from shardwise.cost.lowering import Lowered, collectives, lower_state
from shardwise.cost.model import CostModel
from shardwise.cost.predict import predict
from shardwise.cost.sharding import Sharding
from shardwise.cost.small import keep_small
from shardwise.dims.analysis import Analysis, analyze_program
from shardwise.errors import PlanError
from shardwise.hardware.layout import Placement, ideal, place
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import Topology
from shardwise.hardware.topology import topology as topology_of
from shardwise.plans.plan import ArrayPlan, Plan, PredictedCollective, Spec, StatedConstraint
from shardwise.rewrite.choose import choose_constraints
from shardwise.rewrite.fingerprint import fingerprint
from shardwise.tactics.pins import make_pins
from shardwise.tactics.tactic import Context, Tactic


def plan(
    fn: Callable[..., Any],
    /,
    *args: Any,
    mesh: Any,
    topology: str | Topology | Placement | None = None,
    tactics: Sequence[Tactic] = (),
    pins: Mapping[str, Any] | None = None,
    roles: Mapping[str, str | Sequence[str]] | None = None,
    static_argnums: Any = None,
    static_argnames: Any = None,
    donate_argnums: Any = None,
    donate_argnames: Any = None,
    **kwargs: Any,
) -> Plan:
    """Plans how a function is split over a mesh.

    Args:
      fn: a function that ``jax.jit`` can trace; ``args`` and ``kwargs`` its arguments, arrays or ``ShapeDtypeStruct``s.
      mesh: a ``jax.sharding.Mesh``, an ``AbstractMesh`` or a dict of axis sizes. No device is needed.
      topology: the devices and links, such as ``"v5e:4x4"`` or ``"h100:8x4"`` (``shardwise.hardware.topology``). Without
        one, TPU v5e chips with a row of links for every mesh axis.
      tactics: strategies, applied in order.
      pins: PartitionSpecs that hold whatever else is decided: by path of arguments and outputs, and else by the names that
        inner values are marked with (``jax.ad_checkpoint.checkpoint_name``, ``jax.named_call``). Shardings that arguments
        have already, and ``with_sharding_constraint``s in the program, are pins too.
      roles: paths of the arguments that play a role, for the tactics that ask: ``{"batch": "x", "params": "w"}``.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as in ``jax.jit``.

    >>> import jax, shardwise
    >>> from shardwise.tactics.strategies import DataParallel
    >>> shapes = [jax.ShapeDtypeStruct(s, "float32") for s in [(8, 4), (32, 8)]]
    >>> where = {"mesh": {"data": 4}, "roles": {"batch": "x"}}
    >>> made = shardwise.plan(lambda w, x: x @ w, *shapes, tactics=[DataParallel("data")], **where)
    >>> made.spec("x"), made.spec("w")
    ((('data',), ()), ((), ()))

    An inner value, marked and pinned:

    >>> from jax.ad_checkpoint import checkpoint_name
    >>> P = jax.sharding.PartitionSpec
    >>> fn = lambda w, x: checkpoint_name(x @ w, "product") * 2
    >>> shardwise.plan(fn, *shapes, mesh={"data": 4}, pins={"product": P(None, "data")}).spec("w")
    ((), ('data',))
    """
    options = JitOptions(static_argnums, static_argnames, donate_argnums, donate_argnames)
    traced = trace(fn, args, kwargs, options)
    axes = MeshAxes.of(mesh)
    analysis = analyze_program(lower(traced))
    if not analysis.program.arguments:
        raise PlanError(f"{traced.name} has no array arguments: there is nothing to shard")
    named = {role: _paths(paths) for role, paths in (roles or {}).items()}
    cost = HardwareCost(_placed(axes, topology))
    decisions = decide(Context(analysis, axes, cost, named), tactics, make_pins(analysis, axes, pins or {}))
    made = plan_decisions(traced, analysis, axes, decisions, cost)
    if topology is None:
        return made
    where = cost.placement
    return replace(made, placement=where.lines(), device_order=tuple(where.order().reshape(-1).tolist()))


def _placed(mesh: MeshAxes, where: str | Topology | Placement | None) -> Placement:
    if isinstance(where, Placement):
        return where
    if where is None:
        return ideal(mesh)
    return place(mesh, topology_of(where) if isinstance(where, str) else where)


def decide(context: Context, tactics: Sequence[Tactic], first: Sequence[Decision] = ()) -> list[Decision]:
    """The decisions of some tactics, in order, after those that were taken before."""
    taken: list[Decision] = list(first)
    for tactic in tactics:
        taken += tactic.decide(context, taken)
    return taken


def plan_decisions(
    traced: Traced,
    analysis: Analysis,
    mesh: MeshAxes,
    decisions: Sequence[Decision],
    cost: HardwareCost | None = None,
) -> Plan:
    """The plan of a list of decisions."""
    cost = cost or HardwareCost.of(mesh)
    lowered = lower_state(analysis, State(mesh, tuple(decisions)), cost)
    small = keep_small(lowered, cost)
    if small:
        lowered = lower_state(analysis, State(mesh, (*decisions, *small)), cost)
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
        predicted=predict(CostModel(lowered.structure, cost), lowered),
        decisions=(
            *(_words(analysis, d) for d in decisions),
            *(f"{_words(analysis, d)}: small, so that gathering costs more than keeping" for d in small),
        ),
        notes=tuple(notes),
        versions=(("shardwise", shardwise.__version__), ("jax", jax.__version__)),
        trees=(traced.inputs, traced.outputs),
    )


def _paths(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


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
