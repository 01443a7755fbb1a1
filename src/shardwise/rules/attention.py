"""Rules of cuDNN's attention, which JAX binds as ``dot_product_attention_fwd_wrapper`` and ``_bwd_wrapper``.

Operands are query, key, value, bias, the lengths of queries and keys, the offsets of packed segments, two page tables; going
backward also the softmax statistics, the output and its gradient. Those that are not in use have shape ``(0,)``. Heads of the
query may share a head of key and value; such heads stay together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shardwise.ir.rule import Rule
from shardwise.rules.call import OpCall, Place, RuleBuilder, Shape

_QUERY, _KEY, _VALUE, _BIAS = range(4)
_LENGTHS: Final = (4, 5)
_OFFSETS, _PAGES = 6, 8
_STATISTICS, _OUTPUT, _GRADIENT = 10, 11, 12
_WHOLE: Final = "cuDNN's attention needs it whole"
_SHARED: Final = "heads that share a key and a value stay together"


def fused_attention(call: OpCall) -> Rule:
    """Batch and heads may be split. With paged keys or packed segments, which are numbered through the batch, only heads; with
    segments in the inner primitives, whose offsets count through all heads, nothing."""
    head = _head_dim(call.params)
    query_like, key_like, statistics = [_QUERY, call.out()], [_KEY, _VALUE], [call.out(1)][: len(call.results) - 1]
    biases = [_BIAS] if len(call.shape(_BIAS)) == 4 else []
    if len(call.operands) > _GRADIENT:
        query_like += [_OUTPUT, _GRADIENT]
        key_like += [call.out(1), call.out(2)]
        statistics = [_STATISTICS]
        biases += [call.out(3)] if len(call.results) > 3 else []
    batch, heads = call.shape(_QUERY)[0], call.shape(_KEY)[head]
    lengths = [t for t in _LENGTHS if call.shape(t) == (batch,)]
    packed, paged = len(call.shape(_OFFSETS)) == 2, len(call.shape(_PAGES)) == 4

    b = RuleBuilder(call)
    known: set[Place] = set()
    if not packed and not paged:
        places: list[Place] = [(t, 0) for t in (*query_like, *key_like, *statistics, *biases, *lengths)]
        b.add(places)
        known |= set(places)
    if not packed or call.kind.endswith("_wrapper"):
        places = [(t, head) for t in (*query_like, *key_like)] + [(t, 1) for t in (*statistics, *biases)]
        b.add(places, heads)
        for t, d in places:
            b.block([(t, d)], _SHARED, call.shape(t)[d] // heads)
        known |= set(places)
    for t in range(len(call.operands) + len(call.results)):
        b.block_apart(((t, d) for d in range(len(call.shape(t))) if (t, d) not in known), _WHOLE)
    return b.build()


def broadcast_bias_dims(shapes: Sequence[Shape], params: Mapping[str, Any]) -> list[Place]:
    """The dimensions of the query over which the gradient of the bias is summed: batch or heads, where the bias has one for
    all."""
    bias = shapes[_BIAS]
    dims = (0, _head_dim(params))
    return [(_QUERY, d) for k, d in enumerate(dims) if len(bias) == 4 and bias[k] == 1 < shapes[_QUERY][d]]


def fused_attention_flops(operands: Sequence[Shape], params: Mapping[str, Any]) -> float:
    """The FLOPs of attention on operands of these shapes: two products forward, five backward."""
    keys = operands[_KEY][3 - _head_dim(params)]
    products = 5 if len(operands) > _GRADIENT else 2
    return products * 2.0 * math.prod(operands[_QUERY]) * keys


def _head_dim(params: Mapping[str, Any]) -> int:
    """Layout 0 has the positions in front of the heads (BTNH), layout 1 the heads in front (BNTH)."""
    layout = params["layout"]
    return 1 if getattr(layout, "value", layout) == 1 else 2
