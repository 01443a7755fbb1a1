"""Named strategies, in all sensible combinations, and plans for the same function, predicted side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from shardwise.capture.trace import JitOptions
from shardwise.errors import DecisionError, MeshError, PlanError, ShardwiseError
from shardwise.hardware.layout import Placement
from shardwise.hardware.topology import Topology
from shardwise.planner.captured import Variants
from shardwise.planner.fingerprint import check_version
from shardwise.planner.mesh import OpenMesh, placement_of
from shardwise.plans.load import load_plan
from shardwise.plans.plan import Plan
from shardwise.report.comparison import Comparison, expert_row, plan_row
from shardwise.tactics.experts import MENU, experts
from shardwise.tactics.named import PARTS, read_words
from shardwise.tactics.roles import Given as GivenRoles
from shardwise.tactics.roles import Roles, complete_roles
from shardwise.transforms.variant import AS_IS

#: A plan, one with a name, or the path of a saved one.
Given = Plan | tuple[str, Plan] | str | os.PathLike[str]


def compare(
    fn: Callable[..., Any],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    plans: Given | Iterable[Given] = (),
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
        ``shardwise.tactics.experts.MENU``, and with an empty list plans alone are compared.
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
    ['plan found', 'dp data', 'fsdp data', 'replicated']
    """
    options = JitOptions(static_argnums, static_argnames, donate_argnums, donate_argnames)
    variants = Variants(fn, args, kwargs or {}, options)
    problems: list[ShardwiseError] = []
    menu: list[tuple[str, ...]] = []
    place: Placement | None = None
    with _noted(problems):
        menu = _menu(tactics)
    named = _named(plans, problems)
    with _noted(problems):
        place = _place(mesh, topology, named)
    analysis = variants[AS_IS].analysis
    paths: Roles = {}
    with _noted(problems):
        paths = complete_roles(analysis, roles)
    for one in named:
        with _noted(problems):
            _check_plan(one, variants, place)
    if problems:
        raise problems[0] if len(problems) == 1 else PlanError("\n".join(map(str, problems)))
    assert place is not None
    inquiry = variants[AS_IS].inquiry(place, paths)
    found = experts(inquiry.context, inquiry.model, menu)
    shown = str(place.mesh)
    return Comparison(
        analysis.program.name,
        shown,
        place.topology.text,
        inquiry.cost.profile.usable_bytes,
        (
            *(plan_row(one.name, one.plan, shown) for one in named),
            *(expert_row(expert) for expert in found if expert.applies),
        ),
        tuple((expert.name, expert.reason) for expert in found if not expert.applies),
    )


@contextmanager
def _noted(problems: list[ShardwiseError]) -> Iterator[None]:
    """What is wrong is kept, so that it can be said together with the rest."""
    try:
        yield
    except ShardwiseError as error:
        problems.append(error)


def _menu(tactics: str | Sequence[str] | None) -> list[tuple[str, ...]]:
    """What an axis may be used for, from ``dp,megatron+sequence`` or a list."""
    if tactics is None:
        return list(MENU)
    if not isinstance(tactics, str) and not tactics:
        return []
    found = read_words(tactics if isinstance(tactics, str) else ",".join(tactics), PARTS)
    for words in found:
        if words.axes:
            what, axes = "+".join(words.names), "+".join(words.axes)
            raise DecisionError(
                f"{what}:{axes}: every axis is compared with every tactic, so name tactics alone: {what}"
            )
    return list(dict.fromkeys(words.names for words in found))


class _Named(NamedTuple):
    name: str
    plan: Plan


def _named(plans: Given | Iterable[Given], problems: list[ShardwiseError]) -> list[_Named]:
    """The plans, loaded where they are files; those without a name are numbered."""
    several: list[Any] = [plans] if isinstance(plans, Plan | str | os.PathLike) else list(plans)
    if isinstance(plans, Mapping):
        several = list(plans.items())
    named: list[_Named] = []
    taken: dict[str, object] = {}
    for number, given in enumerate(several, start=1):
        with _noted(problems):
            name, source = _source(given, number)
            if name in taken and taken[name] == source:
                continue
            if name in taken:
                raise PlanError(f"two plans are called {name!r}: give each a name, as in plans=[('mine', plan), ...]")
            taken[name] = source
            named.append(_Named(name, source if isinstance(source, Plan) else load_plan(source)))
    return named


def _source(given: Any, number: int) -> tuple[str, Any]:
    if isinstance(given, Plan):
        return str(number), given
    if isinstance(given, str | os.PathLike):
        return os.fspath(given), os.fspath(given)
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str) and isinstance(given[1], Plan):
        return given
    kind = type(given).__name__
    raise PlanError(f"plans are Plan objects, (name, plan) pairs or paths of saved plans; number {number} is {kind}")


def _place(mesh: Any, topology: str | Topology | Placement | None, named: Sequence[_Named]) -> Placement:
    """Where strategies are compared: as was said, and else where the plans agree to be."""
    if mesh is None and not isinstance(topology, Placement):
        if not named:
            raise MeshError("say what to compare on: mesh={'data': 4, 'model': 4}, or plans, which have one")
        mesh = _agreed("mesh", "meshes", [(n.name, n.plan.mesh) for n in named])
    if OpenMesh.of(mesh) is not None and not isinstance(topology, Placement):
        raise MeshError(f"{OpenMesh.of(mesh)}: strategies are compared on one mesh, give all its sizes")
    if topology is None and named:
        # Plans that were made for no topology lie on none; what that comes to depends on the mesh.
        lies = [(n.name, n.plan.predicted.hardware if n.plan.placement else None) for n in named]
        topology = _agreed("topology", "devices", lies)
    return placement_of(mesh, topology)


def _agreed(what: str, several: str, said: Sequence[tuple[str, Any]]) -> Any:
    first = said[0][1]
    if any(other != first for _, other in said):
        each = ", ".join(f"{name}: {value or 'no topology'}" for name, value in said)
        raise MeshError(f"the plans are for different {several} ({each}): say which {what} is meant")
    return first


def _check_plan(one: _Named, variants: Variants, place: Placement | None) -> None:
    """Raises why a plan cannot stand beside the others."""
    name, made = one
    check_version(made, variants[AS_IS].analysis.program, name, lambda: variants[made.variant].analysis.program)
    if place is not None and made.predicted.hardware != place.topology.text:
        raise PlanError(
            f"{name} is a plan for {made.predicted.hardware}, and this is about {place.topology.text}: plan again for "
            "those devices, or compare there"
        )
