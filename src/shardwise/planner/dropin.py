"""``shardwise.jit``: plans at the first call from the arguments' shapes, and then works like ``jax.jit``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from shardwise.capture import jax_internals as internals
from shardwise.capture.leaves import type_keys
from shardwise.capture.trace import JitOptions
from shardwise.errors import PlanError
from shardwise.hardware.layout import Placement
from shardwise.hardware.topology import Topology
from shardwise.planner.apply import Flat, PlannedFunction, array_type, static_split
from shardwise.planner.asked import Asked
from shardwise.planner.devices import real_mesh
from shardwise.planner.planning import plan_asked
from shardwise.plans.plan import Plan
from shardwise.search.run import Progress
from shardwise.search.searcher import Options
from shardwise.tactics.roles import RolesLike
from shardwise.tactics.text import TacticsLike
from shardwise.transforms.variants import Wanted


class Planned:
    """A function that is planned once for each combination of argument shapes and current mesh."""

    def __init__(self, fn: Callable[..., Any], asked: Asked):
        self._fn, self._asked = fn, asked
        self._static = static_split(fn, asked.jit)
        self._by_type: dict[Any, PlannedFunction] = {}  # by JAX's types, which are quick to compare
        self._by_shape: dict[Any, PlannedFunction] = {}  # by shape, dtype and weak type
        functools.update_wrapper(self, fn)

    def planned(self, *args: Any, **kwargs: Any) -> PlannedFunction:
        """The planned function for arguments of these types."""
        return self._find(Flat.of(args, kwargs, self._static), args, kwargs)

    def _find(self, flat: Flat, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PlannedFunction:
        mesh = internals.current_mesh() if self._asked.mesh is None else None
        key = mesh, flat.tree, flat.static, *type_keys(flat.leaves)
        planned = self._by_type.get(key)  # one lookup: hashing the key is most of what a call takes
        if planned is None:
            # JAX's types contain shardings, which results that are passed in again have; the plan is the same.
            types = mesh, flat.tree, flat.static, *map(array_type, flat.leaves)
            if types not in self._by_shape:
                self._by_shape[types] = self._make(args, kwargs)
            planned = self._by_type[key] = self._by_shape[types]
        return planned

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes."""
        return self.planned(*args, **kwargs).plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat = Flat.of(args, kwargs, self._static)
        return self._find(flat, args, kwargs).call(flat)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Returns the function with the instance as its first argument, where it is a method of a class."""
        return self if instance is None else functools.partial(self, instance)

    def _make(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PlannedFunction:
        plan = plan_asked(self._fn, tuple(args), kwargs, self._asked)
        return PlannedFunction(plan, self._fn, real_mesh(plan))


def jit(
    fn: Callable[..., Any] | None = None,
    /,
    *,
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
    **jit_options: Any,
) -> Any:
    """``jax.jit`` with a plan: ``shardwise.jit(fn, mesh=...)``, or as a decorator.

    Args:
      fn: the function; leave it out to use this as a decorator.
      mesh, topology, tactics, pins, roles, budget_s, budget_evals, seed, method, progress, objective, step_time_s,
        memory_limit, allow_infeasible, microbatches, remat, pipeline, offload: as in :func:`shardwise.plan`, but for the
        objective ``"devices"``, since the devices are there. A dict of axis sizes is a mesh of ``jax.devices()``. Without
        tactics the first call with new shapes searches.
      **jit_options: ``static_argnums``, ``static_argnames``, ``donate_argnums``, ``donate_argnames``.

    >>> import jax.numpy as jnp, shardwise
    >>> from shardwise.tactics.strategies import Shard
    >>> double = shardwise.jit(lambda x: x * 2, mesh={"data": 1}, tactics=[Shard("x", 0, "data")])
    >>> double(jnp.arange(4)).tolist()
    [0, 2, 4, 6]
    """
    if objective == "devices":
        raise PlanError(
            "shardwise.jit uses the devices that are there: shardwise.plan(objective='devices') counts them"
        )
    asked = Asked.of(
        mesh=mesh,
        topology=topology,
        tactics=tactics,
        pins=pins,
        roles=roles,
        search=Options(method, seed, budget_s, budget_evals, progress),
        objective=objective,
        step_time_s=step_time_s,
        memory_limit=memory_limit,
        allow_infeasible=allow_infeasible,
        jit=JitOptions(**jit_options),
        wanted=Wanted(microbatches, remat, offload, pipeline),
    )
    return functools.partial(Planned, asked=asked) if fn is None else Planned(fn, asked)
