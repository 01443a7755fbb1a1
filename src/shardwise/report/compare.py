"""Predicts named strategies, in all sensible combinations, beside plans of the same function."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from shardwise.capture.trace import JitOptions
from shardwise.errors import DecisionError, MeshError, PlanError, ShardwiseError
from shardwise.hardware.layout import Placement
from shardwise.hardware.topology import Topology
from shardwise.planner.captured import Variants
from shardwise.planner.fingerprint import check_version
from shardwise.planner.mesh import OpenMesh, placement_of
from shardwise.plans.load import load_plan
from shardwise.plans.plan import Plan
from shardwise.report.comparison import Comparison, baseline_row, plan_row
from shardwise.tactics.baselines import MENU, baselines
from shardwise.tactics.named import PARTS
from shardwise.tactics.text import read_words
from shardwise.tactics.roles import Given as GivenRoles
from shardwise.tactics.roles import Roles, complete_roles
from shardwise.transforms.variant import AS_IS

#: A plan, one with a name, or the path of a saved one.
PlanLike = Plan | tuple[str, Plan] | str | os.PathLike[str]


def compare(
    fn: Callable[..., Any],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    plans: PlanLike | Iterable[PlanLike] = (),
    mesh: Any = None,
    topology: str | Topology | Placement | None = None,
    roles: GivenRoles | None = None,
    tactics: str | Sequence[str] | None = None,
    static_argnums: Any = None,
    static_argnames: Any = None,
    donate_argnums: Any = None,
    donate_argnames: Any = None,
) -> Comparison:
    """Predicts named strategies over the axes of a mesh, in all sensible combinations, and sets plans beside them.

    Nothing is compiled and nothing runs.

    Args:
      fn: a function that ``jax.jit`` can trace.
      args, kwargs: its arguments, arrays or ``ShapeDtypeStruct``s, by position and by name.
      plans: plans for this function: ``Plan``s, ``(name, Plan)`` pairs or a dict of them, or paths of saved ones. They may be
        for other meshes of the same devices.
      mesh: as in :func:`shardwise.plan`, with all sizes. Without one it is that of the plans.
      topology: the devices and links, as in :func:`shardwise.plan`. Without one they are those of the plans.
      roles: paths of the arguments that are the batch and the parameters, where the inferred ones are not right, as in
        :func:`shardwise.plan`.
      tactics: what an axis may be used for, by name, such as ``"dp,fsdp,megatron+sequence"``; by default all of
        ``shardwise.tactics.baselines.MENU``, and with an empty list plans alone are compared.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as in ``jax.jit``.

    Returns:
      What was compared: ``ranked`` has the best first, ``refused`` what does not apply, with the reason; it prints as a table.

    Raises:
      ShardwiseError: with all that is wrong with what was given.

    >>> import jax, shardwise
    >>> shapes = [jax.ShapeDtypeStruct(s, "float32") for s in [(256, 256), (65536, 256)]]
    >>> step = lambda w, x: x @ w
    >>> found = shardwise.plan(step, *shapes, mesh={"data": 4}, budget_evals=100)
    >>> compared = shardwise.compare(step, *shapes, plans=[("found", found)], tactics="dp,fsdp")
    >>> [row.name for row in compared.ranked]
    ['plan found', 'dp:data', 'fsdp:data', 'replicated']
    """
    options = JitOptions(static_argnums, static_argnames, donate_argnums, donate_argnames)
    variants = Variants(fn, args, kwargs or {}, options)
    problems: list[ShardwiseError] = []
    menu: list[tuple[str, ...]] = []
    place: Placement | None = None
    paths: Roles = {}
    with _collected(problems):
        menu = _menu(tactics)
    named = _named(plans, problems)
    with _collected(problems):
        place = _place(mesh, topology, named)
    plain = variants[AS_IS].analysis
    with _collected(problems):
        paths = complete_roles(plain, roles)

    def check(name: str, plan: Plan) -> None:
        check_version(plan, plain.program, name, lambda: variants[plan.variant].analysis.program)
        if place is not None and plan.predicted.hardware != place.topology.text:
            raise PlanError(
                f"{name} is a plan for {plan.predicted.hardware}, and strategies are compared on "
                f"{place.topology.text}: plan again for those devices, or compare there"
            )

    for name, plan in named.items():
        with _collected(problems):
            check(name, plan)
    if problems:
        raise problems[0] if len(problems) == 1 else PlanError("\n".join(map(str, problems)))
    assert place is not None
    inquiry = variants[AS_IS].inquiry(place, paths)
    tried, mesh_text = baselines(inquiry.context, inquiry.model, menu), str(place.mesh)
    rows = [plan_row(name, plan, mesh_text) for name, plan in named.items()]
    return Comparison(
        function=plain.program.name,
        mesh=mesh_text,
        hardware=place.topology.text,
        usable_bytes=inquiry.cost.profile.usable_bytes,
        rows=(*rows, *(baseline_row(one) for one in tried if one.applies)),
        refused=tuple((one.name, one.reason) for one in tried if not one.applies),
    )


@contextmanager
def _collected(problems: list[ShardwiseError]) -> Iterator[None]:
    """Collects an error, so that all of them can be raised together."""
    try:
        yield
    except ShardwiseError as error:
        problems.append(error)


def _menu(tactics: str | Sequence[str] | None) -> list[tuple[str, ...]]:
    """The tactics that an axis may be used for, from ``dp,megatron+sequence`` or a list."""
    if tactics is None:
        return list(MENU)
    if not isinstance(tactics, str) and not tactics:
        return []
    menu = read_words(tactics if isinstance(tactics, str) else ",".join(tactics), PARTS)
    for words in menu:
        if words.axes:
            what, axes = "+".join(words.names), "+".join(words.axes)
            raise DecisionError(
                f"{what}:{axes}: every axis is compared with every tactic, so name tactics alone: {what}"
            )
    return list(dict.fromkeys(words.names for words in menu))


def _named(plans: PlanLike | Iterable[PlanLike], problems: list[ShardwiseError]) -> dict[str, Plan]:
    """The plans by name, loaded where they are files; those without a name are numbered."""
    single = isinstance(plans, Plan | str | os.PathLike)
    items: list[Any] = [plans] if single else list(plans.items() if isinstance(plans, Mapping) else plans)  # type: ignore[arg-type]
    named: dict[str, Plan] = {}
    for number, item in enumerate(items, start=1):
        with _collected(problems):
            match item:
                case str() | os.PathLike():
                    name = os.fspath(item)
                    plan = named.get(name) or load_plan(name)
                case Plan():
                    name, plan = str(number), item
                case (str(name), Plan() as plan):
                    pass
                case _:
                    kinds = "Plan objects, (name, plan) pairs or paths of saved plans"
                    raise PlanError(f"plans are {kinds}; number {number} is {type(item).__name__}")
            if named.setdefault(name, plan) is not plan:
                raise PlanError(f"two plans are called {name!r}: give each a name, as in plans=[('mine', plan), ...]")
    return named


def _place(mesh: Any, topology: str | Topology | Placement | None, named: Mapping[str, Plan]) -> Placement:
    """Where strategies are compared: on the given mesh and topology, or else on those that all plans have."""
    if isinstance(topology, Placement):
        return placement_of(mesh, topology)
    if mesh is None and not named:
        raise MeshError("say what to compare on: mesh={'data': 4, 'model': 4}, or plans, which have one")
    if mesh is None:
        mesh = _agreed("mesh", "meshes", {name: plan.mesh for name, plan in named.items()})
    if (open_mesh := OpenMesh.of(mesh)) is not None:
        raise MeshError(f"{open_mesh}: strategies are compared on one mesh, give all its sizes")
    if topology is None and named:
        # Plans without a topology have no placement; their hardware depends on the mesh.
        places = {name: plan.predicted.hardware if plan.placement else None for name, plan in named.items()}
        topology = _agreed("topology", "devices", places)
    return placement_of(mesh, topology)


def _agreed(what: str, plural: str, values: Mapping[str, Any]) -> Any:
    if len(set(values.values())) > 1:
        each = ", ".join(f"{name}: {value or 'no topology'}" for name, value in values.items())
        raise MeshError(f"the plans are for different {plural} ({each}): say which {what} is meant")
    return next(iter(values.values()))
