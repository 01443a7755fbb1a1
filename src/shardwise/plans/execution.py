"""The half of :class:`Plan` that needs JAX; the work is done in ``planner`` and ``verification``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwise.errors import PlanError

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from shardwise.plans.parts import ArrayPlan
    from shardwise.plans.plan import Plan
    from shardwise.report.compare import Comparison
    from shardwise.verification.verify import Verification


class Execution:
    """The examples continue from those of :class:`Plan`.

    >>> import jax, shardwise
    >>> from jax.sharding import PartitionSpec as P
    >>> w, x = jax.numpy.ones((64, 64)), jax.numpy.ones((4096, 64))
    >>> step = lambda w, x: w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).sum())(w)
    >>> plan = shardwise.plan(step, w, x, mesh={"data": 4}, topology="v5e:2x2", tactics="dp")
    >>> one = shardwise.plan(step, w, x, mesh={"data": 1}, tactics="dp")
    """

    if TYPE_CHECKING:
        arguments: tuple[ArrayPlan, ...]
        outputs: tuple[ArrayPlan, ...]

        def array(self, path: str) -> ArrayPlan: ...

        @property
        def _plan(self) -> Plan: ...

    def spec(self, path: str) -> PartitionSpec:
        """Returns the PartitionSpec of an argument or output, by a path as in :meth:`Plan.array`; ``plan[path]`` is the same.

        >>> plan.spec("x") == plan["x"] == P("data"), plan["w"] == P()
        (True, True)
        """
        return _specs([self.array(path)])[0]

    __getitem__ = spec

    @property
    def in_specs(self) -> Any:
        """PartitionSpecs of the arguments: a tuple of the positional ones, each in its own structure.

        >>> plan.in_specs == (P(), P("data"))
        True
        """
        return self._positional(_specs(self.arguments))

    @property
    def out_specs(self) -> Any:
        """PartitionSpecs in the structure of the function's result.

        >>> plan.out_specs == P()
        True
        """
        return self._returned(_specs(self.outputs))

    @property
    def in_shardings(self) -> Any:
        """NamedShardings in the structure of :attr:`in_specs`, for ``jax.jit(fn, in_shardings=plan.in_shardings)``: on the mesh
        of :meth:`on_mesh`, or of ``jax.set_mesh``, or on the available devices.

        >>> jitted = jax.jit(step, in_shardings=one.in_shardings, out_shardings=one.out_shardings)
        >>> jitted(w, x).shape
        (64, 64)
        """
        return self._positional(self._on_devices(self.arguments))

    @property
    def out_shardings(self) -> Any:
        """NamedShardings in the structure of the function's result.

        >>> one.out_shardings.spec == P()
        True
        """
        return self._returned(self._on_devices(self.outputs))

    def _on_devices(self, arrays: Sequence[ArrayPlan]) -> list[Any]:
        from shardwise.planner.devices import named_sharding, real_mesh

        mesh = real_mesh(self._plan)
        return [named_sharding(a, mesh) for a in arrays]

    def _positional(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        from shardwise.capture.objects import together

        (positional, named), _ = together(self._plan._known("trees")[0].unflatten(leaves))
        if named:
            raise PlanError(
                f"jax.jit has shardings of positional arguments alone, and the plan was made with {', '.join(named)} by name: "
                "plan.jit(fn) runs it, plan.spec(path) has each spec"
            )
        return tuple(positional)

    def _returned(self, leaves: Sequence[Any]) -> Any:
        from shardwise.capture.objects import Result, together

        result = self._plan._known("trees")[1].unflatten(leaves)
        return together(result.own)[0] if isinstance(result, Result) else result

    def on_mesh(self, mesh: Any) -> Plan:
        """Returns the same plan on a real mesh with its axes. Explicit axes are treated as automatic ones.

        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> one.on_mesh(mesh).in_shardings[1].spec == P("data")
        True
        """
        from shardwise.planner.devices import automatic, checked_mesh

        return replace(self._plan, tied=automatic(checked_mesh(self._plan, mesh)))

    def shard(self, tree: Any, of: str = "") -> Any:
        """Puts arguments on the devices as planned: all of them as a tuple in the order of the call, the one that looks like
        ``tree``, or those under the path ``of``. Flax nnx objects are changed in place.

        >>> one.shard((w, x))[1].sharding.spec == one.shard(x, of="x").sharding.spec == P("data")
        True
        """
        from shardwise.planner.devices import put_arrays

        return put_arrays(self._plan, tree, of)

    def init(self, fn: Any, *args: Any, of: str) -> Any:
        """Runs ``fn(*args)``, which creates the arguments under the path ``of``, so that they are created sharded.

        >>> one.init(lambda key: jax.random.normal(key, (64, 64)), jax.random.key(0), of="w").shape
        (64, 64)
        """
        from shardwise.planner.devices import init_sharded

        return init_sharded(self._plan, fn, args, of)

    @property
    def restore_args(self) -> Any:
        """``jax.ShapeDtypeStruct``s with shardings, in the structure of :attr:`in_specs`, for checkpoint libraries to restore.

        >>> one.restore_args[0].sharding.spec == P()
        True
        """
        from shardwise.planner.devices import placed_shape, real_mesh

        mesh = real_mesh(self._plan)
        return self._positional([placed_shape(a, mesh) for a in self.arguments])

    def jit(self, fn: Any, partitioner: str = "shardwise") -> Any:
        """``fn`` computed as planned, under ordinary ``jax.jit``. Donated and static arguments are the plan's, and the mesh is
        that of :attr:`in_shardings`.

        Args:
          fn: the function that was planned.
          partitioner: ``"shardwise"`` runs the device-local program that the plan describes, collective by collective.
            ``"xla"`` states the plan's shardings as constraints, and leaves the rest to XLA's partitioner.

        >>> one.jit(step)(w, x).shape
        (64, 64)
        """
        from shardwise.planner.apply import PlannedFunction
        from shardwise.planner.devices import real_mesh

        return PlannedFunction(self._plan, fn, real_mesh(self._plan), partitioner)

    def apply(self, fn: Any, partitioner: str = "shardwise") -> Any:
        """``fn`` computed as planned, as an argument for ``jax.jit``.

        >>> jax.jit(one.apply(step))(w, x).shape
        (64, 64)
        """
        return self.jit(fn, partitioner).inline

    def verify(
        self, *args: Any, kwargs: Mapping[str, Any] | None = None, backend: str = "host", run: bool | None = None
    ) -> Verification:
        """Compares the plan with the compiled program of its function, as :func:`shardwise.verify` does. With arrays it is also
        run; without, it is compiled for the planned shapes.

        >>> one.verify(w, x).agrees, one.verify().differences
        (True, None)
        """
        from shardwise.verification.verify import verify

        call = self._plan._known("call")
        if not args and not kwargs:
            args, kwargs = call.args, call.kwargs
        return verify(self._plan, call.fn, *args, kwargs=kwargs, backend=backend, run=run)

    def compare(self, *plans: Any, tactics: str | Sequence[str] | None = None) -> Comparison:
        """Returns the plan beside named strategies on the same devices, and beside other plans of the same function
        (:func:`shardwise.compare`).

        >>> [row.name for row in plan.compare(tactics="dp,fsdp").ranked]
        ['plan 1', 'dp:data', 'replicated', 'fsdp:data']
        """
        from shardwise.capture.trace import JitOptions
        from shardwise.report.compare import compare

        plan, call = self._plan, self._plan._known("call")
        jit = JitOptions.of_static(plan.static).keywords()
        return compare(
            call.fn, *call.args, kwargs=call.kwargs, plans=[plan, *plans], roles=plan.roles, tactics=tactics, **jit
        )


def _specs(arrays: Sequence[ArrayPlan]) -> list[PartitionSpec]:
    from shardwise.capture.equations import partition_spec

    return [partition_spec(a.spec) for a in arrays]
