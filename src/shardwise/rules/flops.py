"""The FLOPs of ops, and the unit that computes them."""

from __future__ import annotations

import math
from typing import Final

from shardwise.ir.program import Unit
from shardwise.ir.rule import Rule
from shardwise.rules.call import OpCall
from shardwise.rules.reduction import CUMULATIVE
from shardwise.rules.tables import ELEMENTWISE, LINEAR_ALGEBRA

#: Sorting networks and searches compare each element about log2(n) times.
SORTS: Final = ("sort", "top_k", "approx_top_k")

#: Random numbers and keys: a Threefry hash of 20 rounds and 5 key schedules for each.
_HASHES: Final = ("random_bits", "random_split", "random_fold_in")


def count_flops(call: OpCall, rule: Rule) -> tuple[float, Unit]:
    """Returns the FLOPs of the unsharded op, and its unit. A product counts a multiplication and an addition."""
    kind = call.kind
    if kind in ("dot_general", "scaled_dot", "ragged_dot_general"):
        # Each row of a ragged product is multiplied with the matrix of one group only.
        groups = call.operands[2][-1] if kind == "ragged_dot_general" else 1
        return 2.0 * math.prod(f.size for f in rule.factors) / max(groups, 1), Unit.MATRIX
    if kind == "conv_general_dilated":
        numbers = call.params["dimension_numbers"]
        kernel = call.operands[1]
        per_output = math.prod(kernel) / max(kernel[numbers.rhs_spec[0]], 1)
        return 2.0 * math.prod(call.results[0]) * per_output, Unit.MATRIX
    if kind == "triangular_solve":
        return 1.0 * math.prod(call.operands[1]) * call.operands[0][-1], Unit.VECTOR
    if kind in LINEAR_ALGEBRA:
        matrix = call.operands[0]
        share = 1 / 3 if kind == "cholesky" else 1.0
        return share * math.prod(matrix) * (matrix[-1] if matrix else 1), Unit.VECTOR
    size = sum(math.prod(shape) for shape in call.results)
    inputs = math.prod(call.operands[0]) if call.operands else 0
    if kind in ELEMENTWISE:
        per_element = ELEMENTWISE[kind]
        return float(per_element * size), Unit.VECTOR if per_element else Unit.NONE
    if kind.startswith(("reduce_window", "select_and_")):
        return float(inputs * math.prod(call.params["window_dimensions"])), Unit.VECTOR
    if kind.startswith(("reduce", "arg")) or kind in CUMULATIVE:
        return float(inputs), Unit.VECTOR
    if kind in SORTS:
        return inputs * math.log2(max(inputs, 2)), Unit.VECTOR
    if kind == "fft":
        return 5.0 * size * math.log2(max(math.prod(call.params["fft_lengths"]), 2)), Unit.VECTOR
    if kind in _HASHES:
        return 120.0 * size, Unit.VECTOR
    if kind.startswith("scatter"):
        return float(math.prod(call.operands[-1])), Unit.VECTOR
    return 0.0, Unit.NONE
