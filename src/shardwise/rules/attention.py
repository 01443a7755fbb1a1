"""Rules of cuDNN's attention, which JAX binds as ``dot_product_attention_fwd_wrapper`` and ``_bwd_wrapper``.

Operands are query, key, value, bias, the lengths of queries and keys, the offsets of packed segments, two page tables; going
backward also the softmax statistics, the output and its gradient. Those that are not in use have shape ``(0,)``. Heads of the
query may share a head of key and value; such heads stay together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shardwise.rules.call import Place, RuleBuilder, Shape

_QUERY, _KEY, _VALUE, _BIAS = range(4)
_LENGTHS: Final = (4, 5)
_OFFSETS, _PAGES = 6, 8
_STATISTICS, _OUTPUT, _GRADIENT = 10, 11, 12
_SHARED: Final = "heads that share a key and a value stay together"


def fused_attention(b: RuleBuilder) -> None:
    """Batch and heads can be split. With paged keys or packed segments, which are numbered through the batch, only heads; with
    segments in the inner primitives, whose offsets count through all heads, nothing."""
    head = _head_dim(b.params)
    queries, keys, statistics = [_QUERY, b.out], [_KEY, _VALUE], list(b.outs[1:2])
    biases = [_BIAS] if len(b.shapes[_BIAS]) == 4 else []
    if b.out > _GRADIENT:
        queries += [_OUTPUT, _GRADIENT]
        keys += b.outs[1:3]
        statistics = [_STATISTICS]
        biases += b.outs[3:4]
    batch, heads = b.shapes[_QUERY][0], b.shapes[_KEY][head]
    lengths = [t for t in _LENGTHS if b.shapes[t] == (batch,)]
    packed, paged = len(b.shapes[_OFFSETS]) == 2, len(b.shapes[_PAGES]) == 4
    if not packed and not paged:
        b.add([(t, 0) for t in (*queries, *keys, *statistics, *biases, *lengths)])
    if not packed or b.call.kind.endswith("_wrapper"):
        places = [(t, head) for t in (*queries, *keys)] + [(t, 1) for t in (*statistics, *biases)]
        b.add(places, heads)
        for t, d in places:
            b.block([(t, d)], _SHARED, b.shapes[t][d] // heads)
    b.block_rest("cuDNN's attention needs it whole")


def broadcast_bias_dims(shapes: Sequence[Shape], params: Mapping[str, Any]) -> list[Place]:
    """Returns the dimensions of the query over which the gradient of the bias is summed: batch or heads, where the bias has
    size one."""
    bias = shapes[_BIAS]
    dims = (0, _head_dim(params))
    return [(_QUERY, d) for k, d in enumerate(dims) if len(bias) == 4 and bias[k] == 1 < shapes[_QUERY][d]]


def fused_attention_flops(operands: Sequence[Shape], params: Mapping[str, Any]) -> float:
    """Returns the FLOPs of attention on operands of these shapes: two products forward, five backward."""
    keys = operands[_KEY][3 - _head_dim(params)]
    products = 5 if len(operands) > _GRADIENT else 2
    return products * 2.0 * math.prod(operands[_QUERY]) * keys


def _head_dim(params: Mapping[str, Any]) -> int:
    """Returns the dimension of the heads. Layout 0 has the positions before the heads (BTNH), layout 1 after them (BNTH)."""
    layout = params["layout"]
    return 1 if getattr(layout, "value", layout) == 1 else 2
