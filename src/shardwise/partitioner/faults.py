"""Where XLA's partitioner computes wrong numbers (seen with JAX 0.10 to 0.11), and how plans stay clear of it.

Each was found by comparing sharded with plain runs, and fails under plain ``jax.jit`` with the same shardings.

- A product over an axis that its result is scattered on, while the operands' other axes are not those of the result:
  ``P(None, "x") @ P("x", None) -> P("x", ("z", "y"))``. The operands are stated so that only the scattering is left to do.
  Where the use of a product reduces it whole (stated.py), that is stated: ``P("y", None, ("x", "z"))`` times the same, batched
  over the first dimension, to ``P(("z", "y"))`` comes out wrong.
- A convolution that sums over a sharded spatial dimension, or over any sharded dimension where it has groups (the gradient of
  a kernel, mostly), while a mesh axis does not shard its left operand: the sum is multiplied by the size of that axis. A
  forward convolution with a spatial dimension and the output features on different axes: the same. Such convolutions are
  computed otherwise, and the operands of convolutions are always stated.
- A pad between elements or by a negative number, along a dimension that is whole in its operand and cut in its result: wrong
  numbers, or "Implicit broadcast is not allowed in HLO". Between elements and by a negative number in front, the process aborts
  wherever the result is cut. Such a result is stated whole along the dimension, and cut afterwards (partitioner/choose.py).
- A gather whose operand is whole along the gathered dimension, whose indices are cut by an axis that the result has on another
  dimension: a slice larger than what it slices, and the compiler stops. Where one operand of a gather or a scatter is stated,
  all that change are (stated.py).

Elsewhere: dynamic slices (partitioner/interpret.py), scatters and concatenations that are cut unevenly (partitioner/choose.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Op
from shardwise.ir.rule import Kind, Rule
from shardwise.lowering.sharding import Sharding, result_sharding, tensor_sharding

if TYPE_CHECKING:
    from shardwise.lowering.lowered import Lowered

CONVOLUTION: Final = "conv_general_dilated"
PAD: Final = "pad"


def scattered_product(lowered: Lowered, op: Op) -> dict[int, Sharding]:
    """The operands of a product that must be stated, so that nothing but a scattering of its result is left to do."""
    rule = op.rule
    assert rule is not None
    assigned = list(lowered.factors[op.id])
    stored = lowered.storage[op.results[0]]
    partial = result_sharding(rule, 0, assigned, ()).partial
    if not set(partial) & stored.axes():
        return {}
    for factor, axes in zip(rule.result_majors[0], stored.dims, strict=True):
        if factor >= 0:
            assigned[factor] = tuple(a for a in axes if a not in partial)
    needs = {k: tensor_sharding(rule.operand_majors[k], assigned) for k in range(len(op.operands))}
    if all(lowered.actual[op.operands[k]].dims == need.dims for k, need in needs.items()):
        return {}
    return needs


def fails_convolution(rule: Rule, assigned: Sequence[Sequence[int]], mesh: MeshAxes) -> bool:
    """Would XLA multiply a convolution's result by the size of an axis that does not shard its left operand?"""
    left, right, result = ({f for dim in tensor for f in dim} for tensor in rule.tensors)
    sharded = {f for f, axes in enumerate(assigned) if axes}
    on_left = {a for f in sharded & left for a in assigned[f]}
    windowed = {w.factor for w in rule.windows}
    grouped = bool(left & right & result)
    summed = [f for f in sharded if rule.factors[f].kind is Kind.REDUCTION and (f in windowed or grouped)]
    if summed:
        return any(size > 1 and a not in on_left for a, size in enumerate(mesh.sizes))
    return bool(sharded & windowed and sharded & right - left)


def failing_pads(op: Op, operand: Sequence[Sequence[int]], result: Sequence[Sequence[int]]) -> set[int]:
    """The dimensions along which XLA would get a pad wrong, or abort, with its operand and result sharded like this."""
    found = set()
    for d, (low, high, inner) in enumerate(op.attribute("padding", ())):
        whole = not operand[d] and (inner > 0 or low < 0 or high < 0)
        if result[d] and (whole or (inner > 0 and low < 0)):
            found.add(d)
    return found
