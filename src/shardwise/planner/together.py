"""``shardwise.plan_together``: one layout of the arrays that several programs share.

The problem: a server prefills and decodes with one set of weights and one cache, a trainer trains and evaluates with one set of
parameters. Each program alone would have its best layout, and changing the layout between them costs more than it gains.

The idea. Each program is planned alone first. These plans, and the named strategies of each program, propose layouts of the
shared arrays; layouts of different arrays are also mixed. A proposed layout is pinned in every program, with the outputs that
replace shared arguments, and what is left is searched. The layout with the least weighted time is kept. Layouts are tried in
the order of a lower estimate: in a program that has tried a layout its best time there, in others their time alone. The best
few of those that were tried without a search are searched thoroughly.

Weak: a layout that no program and no named strategy proposes is not tried. The memory of arrays that stay on the devices while
a program runs that has no use for them is not counted.
"""

from __future__ import annotations

import itertools
import math
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from shardwise.capture.trace import JitOptions
from shardwise.errors import DecisionError, InfeasibleError, PlanError, QueryError
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import Topology
from shardwise.interruption import interruptible
from shardwise.ir.collector import collector_paused
from shardwise.ir.paths import below, find_paths, matching, near
from shardwise.ir.program import Program, Spec
from shardwise.lowering.lowered import Lowered
from shardwise.planner.asked import Asked
from shardwise.planner.inquiry import Variants
from shardwise.planner.mesh import OpenMesh, numbered
from shardwise.planner.planning import plan_of, with_devices
from shardwise.planner.racing import Outcome, choose
from shardwise.plans.together import Together
from shardwise.search.searcher import Options
from shardwise.tactics.auto import Auto
from shardwise.tactics.roles import complete_roles
from shardwise.transforms.variants import AS_IS

#: Layouts that are tried without a search, and those of them that are searched.
_TRIED: Final = 12
_SEARCHED: Final = 2
#: Named strategies of a program that propose layouts, the best first.
_STRATEGIES: Final = 8

#: Paths of arguments and outputs: in all programs, or by program.
Paths = str | Sequence[str] | Mapping[str, str | Sequence[str]]
#: A shared array: the name under which it was given, and its path below that.
Key = tuple[str, str]
Layout = dict[Key, Spec]


def plan_together(
    programs: Mapping[str, Sequence[Any]],
    /,
    *,
    shared: Mapping[str, Paths],
    weights: Mapping[str, float] | None = None,
    mesh: Any = None,
    topology: str | Topology | None = None,
    budget_s: float | None = None,
    budget_evals: int | None = None,
    seed: int = 0,
) -> Together:
    """Plans several programs that share arrays, with one layout of these arrays.

    Args:
      programs: by name a function and its arguments, ``(fn, args)``, and optionally a dict of ``jax.jit``'s options for static
        and donated arguments: ``(fn, args, {"donate_argnums": 1})``.
      shared: by name the paths of what the programs share: a path that each program has which has it at all, such as
        ``{"params": "params"}``, or paths by program, several where a program takes and returns it:
        ``{"cache": {"prefill": "out/1", "decode": ["cache", "out/1"]}}``. A tree has the same arrays at each of its paths.
        Outputs that replace shared arguments, as updated parameters do, have their layout, too.
      weights: how often each program runs, 1 where nothing is said. The weighted sum of the step times is minimized.
      mesh, topology, budget_s, budget_evals, seed: as in :func:`shardwise.plan`; a budget is for each search.

    Returns:
      The plans by program, with what each program would have had alone.

    >>> import jax, shardwise
    >>> w, x, y = (jax.ShapeDtypeStruct(s, "float32") for s in [(512, 2048), (4096, 512), (8, 512)])
    >>> programs = {"prefill": (lambda w, x: x @ w, (w, x)), "decode": (lambda w, x: x @ w, (w, y))}
    >>> plans = shardwise.plan_together(programs, shared={"w": "w"}, weights={"decode": 100}, mesh={"model": 4})
    >>> plans["prefill"].spec("w") == plans["decode"].spec("w")
    True
    """
    weights = weights or {}
    if not programs:
        raise PlanError("there are no programs: give some, as in plan_together({'step': (fn, args)}, shared={...})")
    if unknown := [name for name in weights if name not in programs]:
        raise PlanError(f"weights name {', '.join(map(repr, unknown))}, and the programs are {', '.join(programs)}")
    good = {n for n, w in weights.items() if isinstance(w, int | float) and w is not True and 0 < w < math.inf}
    if wrong := [f"{name}: {weight!r}" for name, weight in weights.items() if name not in good]:
        raise PlanError(f"a weight is a positive number, not {', '.join(wrong)}")
    search = Options("mcts", seed, budget_s, budget_evals)
    with interruptible(), collector_paused():
        asked = with_devices(Asked.of(search, mesh=mesh, topology=topology, allow_infeasible=True))
        members = [_Member(name, given, weights.get(name, 1), asked) for name, given in programs.items()]
        return _best_together(members, _shared_arrays(members, shared))


def _on(asked: Asked, mesh: Any) -> Asked:
    """Returns the options for a mesh. If its sizes are given, the search is over its axes by name, so that no program splits
    one."""
    names = () if OpenMesh.of(mesh) is not None else MeshAxes.of(mesh).names
    return replace(asked, mesh=mesh, tactics=(Auto(names),))


class _Member:
    """One of the programs: its captured function, its weight, and the paths of each shared array."""

    def __init__(self, name: str, given: Sequence[Any], weight: float, asked: Asked):
        if not isinstance(given, Sequence) or not 2 <= len(given) <= 3 or not callable(given[0]):
            raise PlanError(
                f"{name}: a program is given as (function, arguments), or with jit's options as a third item"
            )
        fn, args, *options = given
        if not isinstance(args, tuple | list):
            raise PlanError(
                f"{name}: the arguments are a tuple, as in (fn, (params, batch)), not {type(args).__name__}"
            )
        try:
            jit = JitOptions(**options[0]) if options else JitOptions()
        except TypeError:
            names = ", ".join(JitOptions.__slots__)
            raise PlanError(
                f"{name}: the third item has options of jit, which are {names}, not {options[0]!r}"
            ) from None
        self.name, self.weight, self.variants = name, weight, Variants(fn, tuple(args), {}, jit)
        roles = complete_roles(self.variants[AS_IS].analysis, None)
        self.asked = _on(replace(asked, jit=jit, roles=roles), asked.mesh)
        self.paths: dict[Key, list[str]] = {}

    @property
    def program(self) -> Program:
        return self.variants[AS_IS].analysis.program

    def share_replaced(self) -> None:
        """Adds to shared arguments the outputs that replace them: the next step, or another program, takes these. An output
        that is shared already keeps its key."""
        stated = {path for paths in self.paths.values() for path in paths}
        replaced, values = self.variants[AS_IS].analysis.replaced_by, self.program.values
        for paths in self.paths.values():
            outputs = [replaced[v] for v in map(self.program.paths.__getitem__, paths) if v in replaced]
            paths += [values[v].path for v in outputs if values[v].path not in stated]

    def pinned(self, layout: Layout, mesh: Any, search: Options | None = None) -> Asked:
        """What is asked for where the shared arrays have a layout."""
        pins = {path: layout[key] for key, paths in self.paths.items() for path in paths if key in layout}
        return replace(_on(self.asked, mesh), pins=pins, search=search or self.asked.search)

    def specs(self, lowered: Lowered) -> dict[Key, list[Spec]]:
        """The specs of each shared array, one for each of its paths."""
        stored, values = lowered.storage, self.program.paths
        return {key: [stored[values[p]].spec(lowered.mesh) for p in paths] for key, paths in self.paths.items()}

    def has(self, lowered: Lowered, layout: Layout) -> bool:
        """Do all shared arrays have a layout already?"""
        return all({*specs} == {layout[key]} for key, specs in self.specs(lowered).items())

    def proposals(self, outcome: Outcome) -> Iterator[tuple[Layout, float]]:
        """The layouts of a plan, and of the named strategies on its mesh, each with its time."""
        inquiry, decided = outcome.decided.inquiry, outcome.decided
        strategies = [b for b in inquiry.baselines if b.fits][:_STRATEGIES] if inquiry.roles else []
        states = [(decided.decisions, decided.total), *((b.decisions, b.cost) for b in strategies if b.cost)]
        for decisions, cost in states:
            specs = self.specs(inquiry.settle(decisions).lowered)
            yield {key: several[0] for key, several in specs.items()}, cost.time_s


def _shared_arrays(members: Sequence[_Member], shared: Mapping[str, Paths]) -> list[Key]:
    """Finds the shared arrays in every program; returns those that two programs have, or that one has twice."""
    for name, asked in shared.items():
        by_program = isinstance(asked, Mapping)
        if isinstance(asked, Mapping) and (unknown := asked.keys() - {m.name for m in members}):
            raise PlanError(f"shared[{name!r}] names {', '.join(map(repr, sorted(unknown)))}, which is no program")
        trees: list[tuple[_Member, str, dict[str, str]]] = []
        for member in members:
            paths = asked.get(member.name, ()) if isinstance(asked, Mapping) else asked
            for prefix in [paths] if isinstance(paths, str) else paths:
                # A path that is written by program must be there.
                found = (find_paths if by_program else matching)(prefix, *member.program.named_paths)
                tree = {below(prefix, path): path for path in found}
                trees += [(member, prefix, tree)] if tree else []
                for inside, path in tree.items():
                    member.paths.setdefault((name, inside), []).append(path)
        if not trees:
            known = dict.fromkeys(p for member in members for group in member.program.named_paths for p in group)
            hint = near(asked, known) if isinstance(asked, str) else ""
            raise QueryError(f"shared[{name!r}]: no program has an argument or output at {asked!r}{hint}")
        for other in trees[1:]:
            _check_same(name, trees[0], other)
        if len(trees) == 1:
            raise PlanError(f"{name}: only one program has it, so nothing is shared; write its paths by program")
    for member in members:
        member.share_replaced()
    return list(dict.fromkeys(key for member in members for key in member.paths))


def _check_same(name: str, *trees: tuple[_Member, str, Mapping[str, str]]) -> None:
    """Raises an error where two trees do not have the same arrays."""
    (_, _, first), (_, _, second) = trees
    for inside in (inside for inside in first if inside in second):
        values = [member.program.values[member.program.paths[tree[inside]]] for member, _, tree in trees]
        if len({(value.shape, value.dtype) for value in values}) > 1:
            words = " and ".join(_array_text(member, tree[inside]) for member, _, tree in trees)
            raise PlanError(f"shared[{name!r}]: {words}: shared arrays have one shape and type")
    for (has, _, tree), (lacks, at, rest) in itertools.permutations(trees):
        if only := [path for inside, path in tree.items() if inside not in rest]:
            raise PlanError(
                f"shared[{name!r}]: {_array_text(has, only[0])}, and {lacks.name} has no such array at {at!r}"
                f"{f', nor {len(only) - 1} more' if len(only) > 1 else ''}: shared trees have the same arrays. "
                "Share a smaller tree that both have"
            )


def _array_text(member: _Member, path: str) -> str:
    """Returns the text of an array, such as ``decode's params/w is float32[8, 16]``."""
    value = member.program.values[member.program.paths[path]]
    return f"{member.name}'s {path} is {value.dtype}[{', '.join(map(str, value.shape))}]"


# The search for a layout.


class _Trial(NamedTuple):
    """The outcomes of all programs with one layout. Of a smaller rank is the better one: first the number of programs that do
    not fit, then the weighted time."""

    rank: tuple[int, float]
    layout: Layout
    outcomes: Mapping[str, Outcome]


def _best_together(members: Sequence[_Member], keys: Sequence[Key]) -> Together:
    alone = {m.name: choose(m.variants, m.asked) for m in members}
    meshes = [outcome.decided.inquiry.cost.placement.mesh for outcome in alone.values()]
    by_size = {axes.sizes: axes for axes in reversed(meshes)}
    is_open = OpenMesh.of(members[0].asked.mesh) is not None
    several = [axes if is_open else members[0].asked.mesh for axes in by_size.values()]
    trials = [(_best_on(mesh, members, alone), mesh) for mesh in several]
    best, mesh = min(trials, key=lambda pair: pair[0].rank)
    if members[0].asked.mesh is None:
        best, mesh = _renamed(best, mesh, members)
    if best.rank[0]:
        missing = ", ".join(name for name, outcome in best.outcomes.items() if not outcome.decided.fits)
        raise InfeasibleError(
            f"no layout of the shared arrays was found with which all programs fit. With the best one these do not: {missing}; "
            "shardwise.plan of such a program alone names the arrays that take the memory"
        )
    asked = {m.name: m.pinned(best.layout, mesh) for m in members}
    return Together(
        plans={m.name: plan_of(m.variants, asked[m.name], best.outcomes[m.name]) for m in members},
        alone={m.name: plan_of(m.variants, m.asked, alone[m.name]) for m in members},
        weights={m.name: m.weight for m in members},
        shared={"/".join(filter(None, key)): best.layout[key] for key in keys},
    )


def _renamed(trial: _Trial, mesh: MeshAxes, members: Sequence[_Member]) -> tuple[_Trial, MeshAxes]:
    """The same with axes that are called ``fsdp`` after one program alone called ``data`` where parameters are replicated."""
    sharded: set[int] = set()
    for outcome in trial.outcomes.values():
        context, storage = outcome.decided.inquiry.context, outcome.settled.lowered.storage
        params = context.arguments(context.roles.get("params", ()))
        sharded |= {axis for v in params for axes in storage[v.id].dims for axis in axes}
    plain = [name.rstrip("0123456789") for name in mesh.names]
    names = numbered(["data" if n == "fsdp" and k not in sharded else n for k, n in enumerate(plain)])
    if names == mesh.names:
        return trial, mesh
    other, new = MeshAxes(names, mesh.sizes), dict(zip(mesh.names, names, strict=True))
    outcomes = {}
    for m in members:
        outcome = trial.outcomes[m.name]
        inquiry, decisions = outcome.decided.inquiry.renamed(outcome.decided.decisions, names)
        log = outcome.log
        if log is not None:
            log = replace(log, improvements=tuple(replace(i, mesh=other) for i in log.improvements))
        decided = replace(outcome.decided, inquiry=inquiry, decisions=decisions)
        outcomes[m.name] = outcome._replace(decided=decided, settled=inquiry.settle(decisions), log=log)
    layout = {key: tuple(axes and tuple(new[a] for a in axes) for axes in spec) for key, spec in trial.layout.items()}
    return _Trial(trial.rank, layout, outcomes), other


def _best_on(mesh: Any, members: Sequence[_Member], alone: Mapping[str, Outcome]) -> _Trial:
    """The best layout on a mesh."""
    single: dict[str, Outcome] = {}
    for m in members:
        same = alone[m.name].decided.inquiry.cost.placement.mesh == MeshAxes.of(mesh)
        single[m.name] = alone[m.name] if same else choose(m.variants, _on(m.asked, mesh))

    def trial(layout: Layout, search: Options | None = None) -> list[_Trial]:
        outcomes = {}
        for m in members:
            unchanged = m.has(single[m.name].settled.lowered, layout)
            try:
                outcomes[m.name] = single[m.name] if unchanged else choose(m.variants, m.pinned(layout, mesh, search))
            except DecisionError:  # an array cannot have this sharding in this program
                return []
        decided = [(m.weight, outcomes[m.name].decided) for m in members]
        rank = sum(not d.fits for _, d in decided), sum(weight * d.total.time_s for weight, d in decided)
        return [_Trial(rank, layout, outcomes)]

    tried: list[_Trial] = []
    for least_s, layout in _candidates(members, single):
        best = min((t.rank for t in tried), default=(1, 0.0))
        if len(tried) == _TRIED or (best[0] == 0 and least_s >= best[1]):
            break
        tried += trial(layout, replace(members[0].asked.search, budget_evals=0))
    if not tried:
        raise PlanError(
            "no layout of the shared arrays is possible in all programs: their shapes or constraints disagree"
        )
    tried.sort(key=lambda t: t.rank)
    searched = [t for one in tried[:_SEARCHED] for t in trial(one.layout)]
    return min(searched + tried, key=lambda t: t.rank)


def _candidates(members: Sequence[_Member], single: Mapping[str, Outcome]) -> list[tuple[float, Layout]]:
    """Layouts with a lower estimate of their weighted time, the most promising first."""
    proposed = {m.name: list(m.proposals(single[m.name])) for m in members}
    first = [proposed[m.name][0][0] for m in members]
    # All shared arrays, each as in the first of several layouts that has it.
    layouts = [dict(ChainMap(layout, *first)) for m in members for layout, _ in proposed[m.name]]
    # Each shared tree as one of the programs would have it alone.
    names = list(dict.fromkeys(name for m in members for name, _ in m.paths))
    for chosen in itertools.product(first, repeat=len(names)):
        own = [{key: spec for key, spec in one.items() if key[0] == n} for n, one in zip(names, chosen, strict=True)]
        layouts.append(dict(ChainMap(*own, *first)))
    unique = {tuple(sorted(layout.items())): layout for layout in layouts}

    def least_s(member: _Member, layout: Layout) -> float:
        same = [t for one, t in proposed[member.name] if one.items() <= layout.items()]
        return min(same, default=single[member.name].decided.total.time_s)

    costed = [(sum(m.weight * least_s(m, layout) for m in members), layout) for layout in unique.values()]
    return sorted(costed, key=lambda pair: pair[0])
