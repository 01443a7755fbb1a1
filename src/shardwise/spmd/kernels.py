"""Local forms of kernels: Pallas on a part of its grid, cuDNN's attention, users' functions on local blocks, and callbacks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.capture import equations
from shardwise.errors import RuleError, SpmdError
from shardwise.lowering.sharding import Axes
from shardwise.rules.kernels import broadcast_bias_dims, grid_splits
from shardwise.spmd.collectives import block_index
from shardwise.spmd.local import Array, LocalOp, form


@form("pallas_call")
def pallas_call(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Runs the kernel on a part of its grid. An output that every step overwrites comes from the devices with the last step."""
    params, mapping = op.params, op.params["grid_mapping"]
    grid, split_axes = list(mapping.grid), _axes_by_split(op)
    for axis, axes in split_axes.items():
        grid[axis] //= op.mesh.pieces(axes)
    outputs = [op.local_shape(op.out + r) for r in range(mapping.num_outputs)]
    shapes = [*(array.shape for array in arrays[len(arrays) - mapping.num_inputs :]), *outputs]
    blocks = [
        block.replace(array_aval=block.array_aval.update(shape=shape))
        for block, shape in zip(mapping.block_mappings, shapes, strict=True)
    ]
    count = math.prod(op.mesh.pieces(axes) for axes in split_axes.values())
    cost = params.get("cost_estimate")
    if cost is not None:
        cost = dataclasses.replace(cost, **{k: n // count for k, n in dataclasses.asdict(cost).items()})
    results = op.bind(
        arrays,
        grid_mapping=mapping.replace(grid=tuple(grid), block_mappings=tuple(blocks)),
        out_avals=tuple(aval.update(shape=shape) for aval, shape in zip(params["out_avals"], outputs, strict=True)),
        cost_estimate=cost,
    )
    for split in grid_splits(params):
        axes = split_axes[split.axis]
        for r in split.rewritten if axes else ():
            last = block_index(axes, op.mesh) == op.mesh.pieces(axes) - 1
            results[r] = _sum(jnp.where(last, results[r], jnp.zeros_like(results[r])), axes, op)
    return results


def _axes_by_split(op: LocalOp) -> dict[int, Axes]:
    """Returns the mesh axes of each grid dimension. Raises where a user's rule shards what the grid does not split."""
    by_split: dict[int, Axes] = {}
    explained = set()
    for split in grid_splits(op.params):
        sharded = {op.axes(*place) for place in split.places}
        explained |= set(split.places) if len(sharded) == 1 else set()
        by_split[split.axis] = sharded.pop()
    for tensor, dims in enumerate(op.rule.tensors):
        for d in range(len(dims)):
            if op.axes(tensor, d) and (tensor, d) not in explained:
                reason = (
                    f"its grid does not split dimension {d} of tensor {tensor}; wrap its caller with shardwise.kernel"
                )
                raise SpmdError(op.op.kind, equations.user_line(op.equation.source_info), reason)
    return by_split


def _sum(array: Array, axes: Axes, op: LocalOp) -> Array:
    return jax.lax.psum(array, tuple(op.mesh.names[a] for a in axes))


@form("dot_product_attention_bwd", "dot_product_attention_bwd_wrapper")
def attention_backward(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Sums the gradient of a bias that examples or heads share over devices. XLA drops the sum where it is not used."""
    results = op.bind(arrays)
    if len(results) > 3:
        for tensor, dim in broadcast_bias_dims(op.shapes, op.params):
            axes = op.axes(tensor, dim)
            results[3] = _sum(results[3], axes, op) if axes else results[3]
    return results


@form("shardwise_kernel")
def user_kernel(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Calls the user's function on local blocks. Its results must have the shapes that its rule implies."""
    results: list[Array] = jax.tree.leaves(op.params["fn"](*arrays))
    shapes = [op.local_shape(op.out + r) for r in range(len(op.op.results))]
    if [tuple(x.shape) for x in results] != shapes:
        raise RuleError(
            f"shardwise.kernel of {op.params['name']}: on blocks {[list(x.shape) for x in arrays]} it returns "
            f"{[list(x.shape) for x in results]}, by its rule {op.rule} these would be "
            f"{[list(shape) for shape in shapes]}; say which dimensions are 'blocked'"
        )
    return results


@dataclasses.dataclass(frozen=True)
class _Raised:
    """A callback whose results have at least some number of dimensions."""

    callback: Callable[..., Any]
    ndim: int

    def __call__(self, *arrays: Any) -> list[Any]:
        return [np.reshape(x, (1,) * (self.ndim - np.ndim(x)) + np.shape(x)) for x in self.callback(*arrays)]


@form("pure_callback", "io_callback")
def callback(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Calls Python with results of one rank: under ``shard_map``, JAX lowers all for TPUs with the rank of the first."""
    avals = op.params["result_avals"]
    ndim = max((aval.ndim for aval in avals), default=0)
    raised = tuple(aval.update(shape=(1,) * (ndim - aval.ndim) + aval.shape) for aval in avals)
    results = op.bind(arrays, callback=_Raised(op.params["callback"], ndim), result_avals=raised)
    return [x.reshape(aval.shape) for x, aval in zip(results, avals, strict=True)]
