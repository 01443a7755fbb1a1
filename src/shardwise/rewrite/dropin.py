"""``shardwise.jit``: plans at the first call from the arguments' shapes, and then is ``jax.jit``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.capture import jax_internals as internals
from shardwise.capture.trace import JitOptions
from shardwise.plans.plan import Plan
from shardwise.rewrite.apply import Flat, PlannedFunction, check_mesh, make_mesh, static_split
from shardwise.rewrite.planning import plan
from shardwise.tactics.tactic import Tactic


class Planned:
    """A function that is planned once for each combination of argument shapes."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Any,
        tactics: Sequence[Tactic],
        pins: Mapping[str, Any] | None,
        roles: Mapping[str, str | Sequence[str]] | None,
        options: JitOptions,
    ):
        self._fn, self._mesh, self._options = fn, mesh, options
        self._asked: dict[str, Any] = {"mesh": mesh, "tactics": tuple(tactics), "pins": pins, "roles": roles}
        self._static = static_split(fn, options)
        self._known: dict[Any, PlannedFunction] = {}
        functools.update_wrapper(self, fn)

    def planned(self, *args: Any, **kwargs: Any) -> PlannedFunction:
        """The planned function for arguments of these types."""
        return self._find(Flat.of(args, kwargs, self._static), args, kwargs)

    def _find(self, flat: Flat, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PlannedFunction:
        key = flat.tree, flat.static, *map(internals.type_key, flat.leaves)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._make(args, kwargs)
        return found

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes."""
        return self.planned(*args, **kwargs).plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat = Flat.of(args, kwargs, self._static)
        return self._find(flat, args, kwargs).call(flat)

    def _make(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PlannedFunction:
        options = self._options.given()
        made = plan(self._fn, *args, **self._asked, **options, **kwargs)
        real = self._mesh if hasattr(self._mesh, "devices") else make_mesh(made.mesh, order=made.device_order)
        check_mesh(made, real)
        return PlannedFunction(made, self._fn, real, self._options)


def jit(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Any,
    tactics: Sequence[Tactic] = (),
    pins: Mapping[str, Any] | None = None,
    roles: Mapping[str, str | Sequence[str]] | None = None,
    **jit_options: Any,
) -> Any:
    """``jax.jit`` with a plan: ``shardwise.jit(fn, mesh=..., tactics=...)``, or as a decorator.

    Args:
      fn: the function; leave it out to use this as a decorator.
      mesh, tactics, pins, roles: as in :func:`shardwise.plan`. A mesh of sizes takes the devices that are there.
      **jit_options: ``static_argnums``, ``static_argnames``, ``donate_argnums``, ``donate_argnames``.

    >>> import jax.numpy as jnp, shardwise
    >>> from shardwise.tactics.strategies import Shard
    >>> double = shardwise.jit(lambda x: x * 2, mesh={"data": 1}, tactics=[Shard("x", 0, "data")])
    >>> double(jnp.arange(4)).tolist()
    [0, 2, 4, 6]
    """
    if fn is None:
        return functools.partial(jit, mesh=mesh, tactics=tactics, pins=pins, roles=roles, **jit_options)
    return Planned(fn, mesh, tactics, pins, roles, JitOptions(**jit_options))
