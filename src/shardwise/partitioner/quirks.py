"""Quirks of XLA's partitioner: where it computes wrong numbers or aborts, and what a plan states to avoid that.

Each was seen with JAX 0.10 to 0.11 by comparing sharded with plain runs, and occurs under plain ``jax.jit`` with the same
shardings; ``tests/partitioner/test_quirks.py`` runs programs with them. Device-local programs (``shardwise.spmd``) have none.

1. A product whose result is scattered on an axis that it sums over, while the operands' other axes are not those of the
   result, is wrong: ``P(None, "x") @ P("x", None) -> P("x", ("z", "y"))``. The operands are stated so that only the scattering
   is left (``scattered_product``).
2. A product that is summed over several axes and scattered at once is wrong: ``P("y", None, ("x", "z"))`` times the same,
   batched over the first dimension, to ``P(("z", "y"))``. Where a consumer reads it reduced and not scattered, that is stated
   (``constraints.py``).
3. A convolution that sums over a sharded spatial dimension, or over any sharded dimension where it has groups (the gradient of
   a kernel, mostly), while a mesh axis does not shard its left operand: the sum is multiplied by the size of that axis. So is
   that of a forward convolution with a spatial dimension and the output features on different axes. Operands and result are
   always stated (``CONVOLUTION``), which does not avoid all of these; plans with such convolutions are refused
   (``failing_convolutions``).
4. A pad between elements or by a negative number, along a dimension that is replicated in its operand and sharded in its
   result, is wrong, or fails with "Implicit broadcast is not allowed in HLO". Between elements and by a negative number in
   front, the process aborts wherever the result is sharded. The result is stated replicated along the dimension, and resharded
   afterwards (``failing_pads``).
5. A gather whose operand is replicated along the gathered dimension, with indices sharded by an axis that the result has on
   another dimension, does not compile. Where one operand of a gather or scatter is stated, all that change are
   (``constraints.py``).
6. A dynamic slice along a dimension that is sharded in the result clamps its starts by the size of one shard, which is wrong.
   Starts are clamped beforehand (``clamp_starts``).
7. A scatter or convolution that is sharded unevenly is wrong or aborts. Operands and results are stated (``UNEVEN_FAILS``).
8. A constraint on a value that Shardy shards unevenly undoes the padding, which costs, and makes concatenations wrong. None is
   stated there (``constraints.py``).
9. Not avoided: wrong numbers of grouped 1x1 convolutions with sharded channels, of the gradient of stride-1 pooling along a
   sharded dimension, of a ``dynamic_update_slice`` beyond the end of a sharded dimension, and of a sort along a sharded
   dimension followed by a scatter of one row; JAX 0.11.2 aborts on some scatters on a 2×2×2 mesh ("Check failed:
   grouped_sharding").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np

from shardwise.ir.program import Op
from shardwise.ir.rule import Kind
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.sharding import Sharding, result_sharding, tensor_sharding

CONVOLUTION: Final = "conv_general_dilated"
PAD: Final = "pad"
#: Prefixes of the kinds of ops that fail where they are sharded unevenly.
UNEVEN_FAILS: Final = ("scatter", CONVOLUTION)


def scattered_product(lowered: Lowered, op: Op) -> dict[int, Sharding]:
    """Returns the operands of a product that must be stated, so that only a scattering of its result is left."""
    rule = op.factor_rule
    assigned = list(lowered.computes[op.id].assigned)
    stored = lowered.storage[op.results[0]]
    partial = result_sharding(rule, 0, assigned, ()).partial
    if not set(partial) & stored.axes():
        return {}
    for factor, axes in zip(rule.result_majors[0], stored.dims, strict=True):
        if factor >= 0:
            assigned[factor] = tuple(a for a in axes if a not in partial)
    needs = {k: tensor_sharding(rule.operand_majors[k], assigned) for k in range(len(op.operands))}
    return {} if all(lowered.actual[op.operands[k]].dims == need.dims for k, need in needs.items()) else needs


def failing_convolutions(lowered: Lowered) -> list[Op]:
    """Returns the convolutions whose result would be multiplied by the size of an axis that does not shard the left operand."""
    failing = []
    for op in lowered.program.ops:
        rule, assigned = op.rule, lowered.computes[op.id].assigned
        if op.kind != CONVOLUTION or rule is None:
            continue
        left, right, result = ({f for dim in tensor for f in dim} for tensor in rule.tensors)
        sharded = {f for f, axes in enumerate(assigned) if axes}
        windowed = {w.factor for w in rule.windows}
        grouped = bool(left & right & result)
        if any(rule.factors[f].kind is Kind.REDUCTION and (f in windowed or grouped) for f in sharded):
            on_left = {a for f in sharded & left for a in assigned[f]}
            fails = any(size > 1 and a not in on_left for a, size in enumerate(lowered.mesh.sizes))
        else:
            fails = bool(sharded & windowed and sharded & right - left)
        if fails:
            failing.append(op)
    return failing


def failing_pads(op: Op, operand: Sequence[Sequence[int]], result: Sequence[Sequence[int]]) -> set[int]:
    """Returns the dimensions along which a pad with these shardings is wrong or aborts."""
    failing = set()
    for d, (low, high, inner) in enumerate(op.attribute("padding", ())):
        replicated = not operand[d] and (inner > 0 or low < 0 or high < 0)
        if result[d] and (replicated or (inner > 0 and low < 0)):
            failing.add(d)
    return failing


def clamp_starts(arrays: list[Any], sizes: Sequence[int]) -> list[Any]:
    """Returns the operands of a dynamic slice with its starts in range, as the op would clamp them."""
    array, *starts = arrays
    clamped = []
    for start, total, size in zip(starts, array.shape, sizes, strict=True):
        last = min(total - size, np.iinfo(start.dtype).max)
        clamped.append(jax.lax.clamp(start.dtype.type(0), start, start.dtype.type(last)))
    return [array, *clamped]
