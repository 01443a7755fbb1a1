"""An op on one device's blocks, and the table of local forms.

Most primitives have no shape among their parameters, and are bound as they are on smaller arrays. The others have a *local
form*: a function of the op and the local operands that returns the local results, in one file for each family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from shardwise.capture import jax_internals as internals
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Op
from shardwise.ir.rule import Kind, Rule
from shardwise.ir.traits import MANUAL, SCATTERS
from shardwise.lowering.halo import Fetch
from shardwise.lowering.padding import block
from shardwise.lowering.sharding import Axes
from shardwise.spmd.collectives import block_index, fetch, fill_outside, in_range

Array = Any
Form = Callable[["LocalOp", list[Array]], list[Array]]

#: Primitives whose local form is used even where no factor is sharded.
_ALWAYS: Final = frozenset(
    {
        *("device_put", "dynamic_slice", "dynamic_update_slice", "fft", "io_callback", "pure_callback"),
        *("ragged_dot_general", *SCATTERS),
    }
)
#: Local forms by primitive.
FORMS: Final[dict[str, Form]] = {}


def form(*kinds: str) -> Callable[[Form], Form]:
    """Registers the local form of some primitives."""

    def register(function: Form) -> Form:
        FORMS.update(dict.fromkeys(kinds, function))
        return function

    return register


@dataclass(frozen=True)
class LocalOp:
    """One op on local blocks. ``assigned`` are the axes of each of its factors; ``shapes`` the global shapes of its tensors,
    operands first, then results; ``fetches``, by operand, what a windowed op needs from other devices; ``shared``, by
    operand, what other ops have fetched of it."""

    op: Op
    equation: Any
    assigned: tuple[Axes, ...]
    mesh: MeshAxes
    shapes: tuple[tuple[int, ...], ...]
    fetches: dict[int, tuple[Fetch, ...]]
    shared: tuple[dict[Any, Array], ...]

    @property
    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = self.equation.params
        return params

    @property
    def rule(self) -> Rule:
        return self.op.factor_rule

    @property
    def out(self) -> int:
        """The tensor number of the first result."""
        return len(self.op.operands)

    def axes(self, tensor: int, dim: int) -> Axes:
        """Returns the axes over which a dimension is sharded while the op computes."""
        factors = self.rule.tensors[tensor][dim]
        return self.assigned[factors[0]] if factors else ()

    def local_shape(self, tensor: int) -> tuple[int, ...]:
        """Returns the shape of this device's block."""
        shape = self.shapes[tensor]
        return tuple(block(n, self.mesh.pieces(self.axes(tensor, d))) for d, n in enumerate(shape))

    def offset(self, tensor: int, dim: int) -> Any:
        """Returns the global position of the first element of this device's block."""
        return block_index(self.axes(tensor, dim), self.mesh) * np.int32(self.local_shape(tensor)[dim])

    def sharded(self, *kinds: Kind) -> list[int]:
        """Returns the sharded factors of some kinds."""
        return [f for f, axes in enumerate(self.assigned) if axes and self.rule.factors[f].kind in kinds]

    def is_first(self, factors: Sequence[int]) -> Any:
        """Returns whether this is the first device along all axes of some factors."""
        axes = tuple(a for f in factors for a in self.assigned[f])
        return block_index(axes, self.mesh) == 0

    def fetched(self, arrays: list[Array], fills: Sequence[Any]) -> tuple[list[Array], dict[tuple[int, int], Fetch]]:
        """Returns the operands with halos, and the fetches by operand and dimension; ``fills``: the values outside."""
        arrays, by_dim = list(arrays), dict[tuple[int, int], Fetch]()
        for k, needed in self.fetches.items():
            arrays[k] = self.fetch(k, needed, arrays[k], fills[k])
            by_dim |= {(k, f.dim): f for f in needed}
        return arrays, by_dim

    def fetch(self, operand: int, needed: tuple[Fetch, ...], array: Array, fill: Any) -> Array:
        """Returns an operand with its halos, dimension by dimension. Ops that need the same halos share them."""
        shared = self.shared[operand]
        if needed not in shared:
            for f in needed:
                array = fetch(array, f, self.assigned[f.factor], self.mesh)
            shared[needed] = array
        array = shared[needed]
        for f in needed if fill is not None else ():
            array = fill_outside(array, f, self.assigned[f.factor], self.mesh, fill)
        return array

    def padding(self, f: Fetch) -> tuple[int, int]:
        """Returns the padding with which a fetched operand gives exactly this device's block of the result."""
        window = next(w for w in self.rule.windows if (w.factor, w.of) == (f.factor, f.operand))
        dim = self.rule.tensors[window.by].index((f.factor,))
        span = (self.local_shape(window.by)[dim] - 1) * window.stride + window.high - window.low + 1
        return f.offset, span - (f.offset + (f.width - 1) * window.dilation + 1)

    def bind(self, arrays: Sequence[Array], **changed: Any) -> list[Array]:
        """Binds the op to other arrays, with changed parameters. The shardings that it states are part of the plan."""
        if self.op.kind in MANUAL:
            return internals.bind_manual(self.equation, arrays)
        stated = {key: None for key in ("sharding", "out_sharding") if self.params.get(key) is not None}
        return internals.bind(self.equation, arrays, stated | changed)


def last_chosen(dtype: Any, largest: bool) -> Any:
    """Returns the value that a maximum (or minimum) chooses only where there is no other."""
    if jnp.issubdtype(dtype, jnp.floating):
        has_infinity = np.isinf(np.array(np.inf).astype(dtype))
        last = np.inf if has_infinity else float(jnp.finfo(dtype).max)
        return -last if largest else last
    if dtype == jnp.bool_:
        return not largest
    return jnp.iinfo(dtype).min if largest else jnp.iinfo(dtype).max


def _masked(op: LocalOp, operand: int, x: Array) -> Array:
    """Returns an operand with the identity of the reducer in the padding of dimensions that the op reduces."""
    for d, dim in enumerate(op.rule.operands[operand]):
        size, reduced = op.shapes[operand][d], [f for f in dim if op.rule.factors[f].kind is Kind.REDUCTION]
        if reduced and size % op.mesh.pieces(op.axes(operand, d)):
            valid = in_range(op.offset(operand, d), x.shape[d], size, d, x.ndim)
            x = jnp.where(valid, x, _identity(op.rule.factors[reduced[0]].reducer, x.dtype))
    return x


def _identity(reducer: str, dtype: Any) -> Any:
    """Returns the number that changes no result of a reducer."""
    if reducer in ("max", "min", "argmax", "argmin"):
        return jnp.asarray(last_chosen(dtype, reducer.endswith("max")), dtype)
    if reducer == "and":
        return jnp.invert(jnp.zeros((), dtype))
    return jnp.asarray(reducer == "prod", dtype)


def compute(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Returns the local results of an op."""
    arrays = [_masked(op, k, x) for k, x in enumerate(arrays)] if any(op.assigned) else arrays
    form = FORMS.get(op.op.kind) if any(op.assigned) or op.op.kind in _ALWAYS else None
    return form(op, arrays) if form is not None else op.bind(arrays)
