"""Named strategies, in all sensible combinations, beside plans of the same function: their predictions, the best first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from shardwise.capture.trace import JitOptions
from shardwise.cost.uncertainty import is_tight
from shardwise.errors import DecisionError, MeshError, PlanError
from shardwise.hardware.layout import Placement, ideal
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import Topology
from shardwise.ir.collector import collector_paused
from shardwise.planner.bind import check_version
from shardwise.planner.inquiry import Variants
from shardwise.planner.mesh import OpenMesh, placement_of
from shardwise.plans.load import load_plan
from shardwise.plans.plan import Plan
from shardwise.report.page import Page
from shardwise.tactics.baselines import MENU, Baseline, baselines
from shardwise.tactics.named import PARTS
from shardwise.tactics.roles import RolesLike, complete_roles
from shardwise.tactics.text import read_words
from shardwise.transforms.variants import AS_IS, Variant
from shardwise.units import binary, plural, seconds

#: A plan, one with a name, or the path of a saved one.
PlanLike = Plan | tuple[str, Plan] | str | os.PathLike[str]

_MOST: Final = 10
#: The method that is not named.
_USUAL: Final = "mcts"


@dataclass(frozen=True, slots=True)
class Row:
    """A named strategy (``baseline``) or a ``plan``, and its prediction. ``tactics`` takes the name of a strategy; ``variant``
    is empty for the unchanged program. ``mirrors``: the strategy with the same figures that is this one with axes of equal size
    exchanged. Tables show that one alone."""

    kind: str
    name: str
    time_s: float
    compute_s: float
    comm_s: float
    peak_bytes: int
    fits: bool
    variant: str = ""
    mirrors: str = ""

    @property
    def text(self) -> str:
        return f"{self.name}, {self.variant}" if self.variant else self.name

    @property
    def rank(self) -> tuple[bool, float]:
        """What fits by step time, then the rest by peak memory."""
        return not self.fits, self.time_s if self.fits else self.peak_bytes


def baseline_row(baseline: Baseline, variant: Variant) -> Row:
    cost = baseline.cost
    assert cost is not None
    times = cost.time_s, cost.compute_ps * 1e-12, cost.comm_ps * 1e-12
    return Row("baseline", baseline.name, *times, cost.peak_bytes, baseline.fits, _changed(variant))


def mirrored(rows: Iterable[Row], mesh: MeshAxes) -> tuple[Row, ...]:
    """Returns named strategies with ``mirrors``, which is the first of those that mirror each other."""
    first: dict[object, str] = {}
    marked = []
    for row in rows:
        uses: dict[str, list[str]] = {axis: [] for axis in mesh.names}
        for words in read_words(row.name) if row.name != "replicated" else ():
            for axis in words.axes:
                uses[axis] += words.names
        figures = row.time_s, row.compute_s, row.comm_s, row.peak_bytes, row.variant
        exchanged = sorted((size, tuple(uses[axis])) for axis, size in mesh.shape.items())
        found = first.setdefault((*figures, *exchanged), row.name)
        marked.append(replace(row, mirrors=found if found != row.name else ""))
    return tuple(marked)


def plan_row(name: str, plan: Plan, mesh: str) -> Row:
    """Returns the row of a plan; its name has the mesh where strategies are compared on another one."""
    p = plan.predicted
    other = [f"on {plan.mesh}"] if str(plan.mesh) != mesh else []
    method = [plan.search.method] if plan.search is not None and plan.search.method != _USUAL else []
    name = ", ".join([f"plan {name}", *method, *other])
    return Row("plan", name, p.time_s, p.compute_s, p.comm_s, p.peak_bytes, p.fits, _changed(plan.variant))


def _changed(variant: Variant) -> str:
    return str(variant) if variant != AS_IS else ""


@dataclass(frozen=True, repr=False)
class Comparison:
    """The rows that were compared, and the strategies that do not apply, with the reason; see :func:`shardwise.compare`."""

    function: str
    mesh: str
    hardware: str
    usable_bytes: int
    rows: tuple[Row, ...]
    refused: tuple[tuple[str, str], ...]

    @property
    def ranked(self) -> list[Row]:
        """The rows, the best first; of equals, plans come before strategies."""
        return sorted(self.rows, key=lambda row: row.rank)

    def __repr__(self) -> str:
        return comparison_text(self)

    def to_json(self) -> dict[str, Any]:
        """Returns the comparison as plain data, the best first."""
        rows = [asdict(row) for row in self.ranked]
        refused = [{"name": name, "reason": reason} for name, reason in self.refused]
        return {"schema": 1, **asdict(self), "rows": rows, "refused": refused}


@collector_paused()
def compare(
    fn: Callable[..., Any],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    plans: PlanLike | Iterable[PlanLike] = (),
    mesh: Any = None,
    topology: str | Topology | Placement | None = None,
    roles: RolesLike | None = None,
    tactics: str | Sequence[str] | None = None,
    static_argnums: Any = None,
    static_argnames: Any = None,
    donate_argnums: Any = None,
    donate_argnames: Any = None,
) -> Comparison:
    """Predicts named strategies over the axes of a mesh, in all sensible combinations, and sets plans beside them.

    A strategy is at its best variant: the program as it is, or as one of the plans changes it (remat, micro-batches).
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
    menu, named = _menu(tactics), _named(plans)
    place = _place(mesh, topology, named)
    plain = variants[AS_IS].analysis
    for name, plan in named.items():
        check_version(plan, plain.program, name, lambda plan=plan: variants[plan.variant].analysis.program)  # type: ignore[misc]
        if plan.predicted.hardware != place.topology.text:
            raise PlanError(
                f"{name} is a plan for {plan.predicted.hardware}, and strategies are compared on "
                f"{place.topology.text}: plan again for those devices, or compare there"
            )
    mesh_text, roles = str(place.mesh), complete_roles(plain, roles)
    rows = [plan_row(name, plan, mesh_text) for name, plan in named.items()]
    best: dict[str, Row] = {}
    refused: dict[str, str] = {}
    for variant in dict.fromkeys((AS_IS, *(plan.variant for plan in named.values()))):
        inquiry = variants[variant].inquiry(place, roles)
        tried = baselines(inquiry.context, inquiry.model, menu)
        for row in (baseline_row(one, variant) for one in tried if one.applies):
            best[row.name] = min(row, best.get(row.name, row), key=lambda row: row.rank)
        refused |= {one.name: one.reason for one in tried if not one.applies}
    return Comparison(
        function=plain.program.name,
        mesh=mesh_text,
        hardware=place.topology.text,
        usable_bytes=inquiry.cost.profile.usable_bytes,
        rows=(*rows, *mirrored(best.values(), place.mesh)),
        refused=tuple(refused.items()),
    )


def _menu(tactics: str | Sequence[str] | None) -> list[tuple[str, ...]]:
    """Returns the tactics that an axis may be used for, from ``dp,megatron+sequence`` or a list."""
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


def _named(plans: PlanLike | Iterable[PlanLike]) -> dict[str, Plan]:
    """Returns the plans by name, loaded where they are files; those without a name are numbered."""
    single = isinstance(plans, Plan | str | os.PathLike)
    items: list[Any] = [plans] if single else list(plans.items() if isinstance(plans, Mapping) else plans)  # type: ignore[arg-type]
    named: dict[str, Plan] = {}
    for number, item in enumerate(items, start=1):
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
    """Returns the mesh and topology on which strategies are compared: those of the call, or those that all plans have."""
    if isinstance(topology, Placement):
        return placement_of(mesh, topology)
    if mesh is None and not named:
        raise MeshError("say what to compare on: mesh={'data': 4, 'model': 4}, or plans, which have one")
    if mesh is None:
        mesh = _agreed("mesh", "meshes", {name: plan.mesh for name, plan in named.items()})
    if (open_mesh := OpenMesh.of(mesh)) is not None:
        raise MeshError(f"{open_mesh}: strategies are compared on one mesh, give all its sizes")
    if topology is None and named:
        # Plans without a topology have no placement; the number in their hardware is that of their mesh.
        hardware = {name: (plan.predicted.hardware, bool(plan.placement)) for name, plan in named.items()}
        places = {name: text if placed else text.rpartition(" ")[2] for name, (text, placed) in hardware.items()}
        topology = str(_agreed("topology", "devices", places))
        if not any(placed for _, placed in hardware.values()):
            return ideal(MeshAxes.of(mesh), topology)
    return placement_of(mesh, topology)


def _agreed(what: str, plural: str, values: Mapping[str, Any]) -> Any:
    if len(set(values.values())) > 1:
        each = ", ".join(f"{name}: {value}" for name, value in values.items())
        raise MeshError(f"the plans are for different {plural} ({each}): say which {what} is meant")
    return next(iter(values.values()))


def comparison_text(compared: Comparison, width: int = 80, every: bool = False) -> str:
    """Returns a table with all plans and, unless ``every``, only the first strategies, without mirror images."""
    page = Page(width)
    page.print(
        f"{compared.function} on {compared.mesh}: {compared.hardware}, {binary(compared.usable_bytes)} per device\n"
    )
    ranked = [row for row in compared.ranked if every or not row.mirrors]
    shown = [row for k, row in enumerate(ranked) if every or k < _MOST or row.kind == "plan"]
    cells = []
    for row in shown:
        times = (seconds(t) for t in (row.time_s, row.compute_s, row.comm_s))
        name = row.text if row.kind == "plan" else row.text.replace(",", ", ").replace(",  ", ", ")
        fits = "tight" if is_tight(row.peak_bytes, compared.usable_bytes) else "yes" if row.fits else "no"
        cells.append([name, *times, binary(row.peak_bytes), fits])
    page.table(["*strategy or plan", ">step time", ">compute", ">communication", ">memory", "fits"], cells)
    if len(shown) < len(compared.rows):
        page.print(f"\nand {plural(len(compared.rows) - len(shown), 'combination')} more: --all or .ranked")
    if compared.refused and every:
        page.print("\nNot possible\n" + "\n".join(f"  {name}: {reason}" for name, reason in compared.refused))
    elif compared.refused:
        page.print(f"\n{plural(len(compared.refused), 'combination')} not possible: --all or .refused says why")
    return page.text()
