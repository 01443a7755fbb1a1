"""Rules of Pallas kernels, derived from the kernel itself, and of cuDNN's attention.

A ``pallas_call`` runs its body once for every point of a grid, on blocks that index maps choose. A grid dimension can be split
if its steps are independent of their index and of each other:

- the body does not read its index (``program_id``);
- every index map uses the index only as the block number of one dimension, or divided by a constant (heads that share keys and
  values), or not at all; the blocks cover the array exactly;
- an output that does not use it, and scratch memory, carry nothing from step to step: the kernel overwrites them before reading
  them wherever the dimensions inside are at their first step. For scratch memory it may also declare the dimension parallel.

Such a dimension is a factor, the major one of the array dimensions whose blocks it numbers. All other factors are blocked. An
output that does not use it has what the last step wrote.

Weak: an index that is computed in any other way blocks its grid dimension, and so does a scratch buffer whose reset depends on
data. Jaxprs are read by their attributes only, since rules do not import JAX.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardwise.ir.rule import Rule
from shardwise.rules.call import OpCall, Place, RuleBuilder, Shape


@dataclass(frozen=True, slots=True)
class GridSplit:
    """A grid dimension that can be split in at most ``parts`` equal parts. ``places``: the dimensions of operands and results
    whose blocks it numbers; ``rewritten``: the results that every step overwrites."""

    axis: int
    parts: int
    places: tuple[Place, ...]
    rewritten: tuple[int, ...] = ()


def pallas_rule(call: OpCall) -> Rule | None:
    """Returns the rule of a ``pallas_call``, or None where no grid dimension can be split."""
    try:
        splits = grid_splits(call.params)
    except (AttributeError, KeyError):  # a version of JAX with other parameters
        return None
    if not splits:
        return None
    b = RuleBuilder(call)
    for split in splits:
        b.add(split.places, split.parts)
        for tensor, dim in split.places:
            b.block([(tensor, dim)], "inside a block of the kernel", call.shape(tensor)[dim] // split.parts)
    b.block_rest("the kernel's grid does not split it")
    return b.build()


def grid_splits(params: Mapping[str, Any]) -> list[GridSplit]:
    """Returns the grid dimensions of a ``pallas_call`` that can be split between devices."""
    mapping, body = params["grid_mapping"], _open(params["jaxpr"])
    if params.get("mesh") is not None or getattr(mapping, "local_grid_env", None) is not None:
        return []
    if any(name.startswith("prng_") for name in primitive_names(body)) or body.constvars:
        return []
    # The body numbers the dimensions that are not mapped by vmap.
    numbered = [axis for axis in range(len(mapping.grid)) if axis not in mapping.vmapped_dims]
    indices_read = {numbered[axis] for axis in _indices_read(body)}
    declared = _declared_parallel(params, numbered)
    first = mapping.num_index_operands + mapping.num_inputs
    outputs, scratch = body.invars[first : first + mapping.num_outputs], body.invars[first + mapping.num_outputs :]
    splits = []
    for axis, size in enumerate(mapping.grid):
        if not _is_static(size) or size <= 1 or axis in indices_read:
            continue
        split = _split(mapping, params.get("input_output_aliases", ()), axis)
        if split is None:
            continue
        refs = [outputs[r] for r in split.rewritten]
        if axis not in declared and axis not in mapping.vmapped_dims:
            refs += scratch
        inner = {number for number, other in enumerate(numbered) if other > axis}
        if _overwritten(body, {ref: n for n, ref in enumerate(refs)}, inner, {}) == frozenset(range(len(refs))):
            splits.append(split)
    return splits


# Index maps.


def _split(mapping: Any, aliases: Sequence[tuple[int, int]], axis: int) -> GridSplit | None:
    """Returns how index maps use a grid dimension; None where they do not use it to number blocks."""
    steps = int(mapping.grid[axis])
    dynamic = sum(not _is_static(size) for size in mapping.grid)
    first = dynamic + mapping.num_index_operands
    places: dict[int, tuple[int, int]] = {}  # by tensor: the dimension, and how many steps have one index
    rewritten = []
    for number, block in enumerate(mapping.block_mappings):
        indices = _index_uses(block, mapping.grid)
        uses = [(d, plain) for d, (axes, plain) in enumerate(indices) if axis in axes]
        if not uses:
            if number >= mapping.num_inputs:
                if any(other > axis for axes, _ in indices for other in axes):
                    return None
                rewritten.append(number - mapping.num_inputs)
            continue
        dim, plain = uses[0]
        if len(uses) > 1 or plain is None:
            return None
        shared = plain[1]
        width = _block_width(block.block_shape[dim])
        if width is None or steps % shared or block.array_aval.shape[dim] != steps // shared * width:
            return None
        places[first + number] = dim, shared
    outputs = first + mapping.num_inputs
    for source, target in aliases:
        if outputs + target not in places or places.get(dynamic + source) != places[outputs + target]:
            return None
    together = math.lcm(*(shared for _, shared in places.values()))
    if steps % together or steps == together or len(rewritten) == mapping.num_outputs:
        return None
    return GridSplit(axis, steps // together, tuple((t, d) for t, (d, _) in places.items()), tuple(rewritten))


#: The grid dimensions that an index depends on, and, where it is one of them over a constant, which one and the constant.
_Use = tuple[frozenset[int], tuple[int, int] | None]
_NO_USE: Final[_Use] = (frozenset(), None)


def _index_uses(block: Any, grid: Sequence[Any]) -> list[_Use]:
    """Returns how results of an index map depend on the grid's indices. One divided by at least its size is zero."""
    jaxpr = _open(block.index_map_jaxpr)
    uses: dict[Any, _Use] = {v: (frozenset({g}), (g, 1)) for g, v in enumerate(jaxpr.invars[: len(grid)])}

    def use(atom: Any) -> _Use:
        return _NO_USE if _is_literal(atom) else uses.get(atom, _NO_USE)

    for equation in jaxpr.eqns:
        axes = frozenset[int]().union(*(use(v)[0] for v in equation.invars))
        plain = use(equation.invars[0])[1] if equation.invars else None
        divisor = _divisor(equation)
        if plain is not None and divisor:
            g, shared = plain[0], plain[1] * divisor
            use_of = _NO_USE if _is_static(grid[g]) and shared >= grid[g] else (axes, (g, shared))
        else:
            use_of = axes, plain if equation.primitive.name == "convert_element_type" else None
        uses.update((v, use_of) for v in equation.outvars)
    return [use(atom) for atom in jaxpr.outvars]


def _divisor(equation: Any) -> int:
    """Returns the positive constant that an equation divides by, or 0 where it is no such division."""
    name, params = equation.primitive.name, equation.params
    divides = name == "div" or (name in ("jit", "pjit") and params.get("name") == "floor_divide")
    return max(int(equation.invars[1].val), 0) if divides and _is_literal(equation.invars[1]) else 0


def _is_static(size: Any) -> bool:
    return hasattr(size, "__index__")


def _block_width(block: Any) -> int | None:
    """Returns the size of a block along a dimension; None where blocks are not numbered, but start anywhere."""
    if block is None or type(block).__name__ in ("Squeezed", "Mapped"):
        return 1
    if isinstance(block, int):
        return block
    return int(block.block_size) if type(block).__name__ == "Blocked" else None


# Bodies.


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")


def _inner(equation: Any) -> list[Any]:
    """Returns the open jaxprs among an equation's parameters."""
    values = [v for p in equation.params.values() for v in (p if isinstance(p, tuple | list) else (p,))]
    return [_open(v) for v in values if hasattr(_open(v), "eqns")]


def primitive_names(jaxpr: Any) -> Iterator[str]:
    """Yields the names of all primitives in a jaxpr."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in _inner(equation):
            yield from primitive_names(inner)


def _live(jaxpr: Any) -> list[Any]:
    """Returns the equations that have an effect or whose results are used."""
    used = {v for v in jaxpr.outvars if not _is_literal(v)}
    live = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(v in used for v in equation.outvars):
            live.append(equation)
            used.update(v for v in equation.invars if not _is_literal(v))
    return live


def _indices_read(jaxpr: Any) -> set[int]:
    """Returns the grid dimensions whose index or size a body reads."""
    axes: set[int] = set()
    for equation in _live(jaxpr):
        if equation.primitive.name in ("program_id", "num_programs"):
            axes.add(equation.params["axis"])
        axes.update(*map(_indices_read, _inner(equation)))
    return axes


def _declared_parallel(params: Mapping[str, Any], numbered: Sequence[int]) -> set[int]:
    """Returns the grid dimensions that a kernel's compiler parameters declare parallel."""
    stated = params.get("compiler_params")
    axes: set[int] = set()
    for options in stated.values() if isinstance(stated, Mapping) else (stated,):
        get = options.get if isinstance(options, Mapping) else functools.partial(getattr, options)
        words = [str(getattr(word, "value", word)) for word in get("dimension_semantics", None) or ()]
        axes |= {axis for axis, word in zip(numbered, words, strict=False) if word.endswith("parallel")}
    return axes


def _overwritten(jaxpr: Any, refs: dict[Any, int], first: set[int], scalars: dict[Any, Any]) -> frozenset[int] | None:
    """Returns which buffers a step overwrites where the grid dimensions ``first`` are at their first step; None where it reads
    one before. ``scalars``: known values."""
    fresh: frozenset[int] = frozenset()
    used = {v for atoms in (jaxpr.outvars, *(e.invars for e in jaxpr.eqns)) for v in atoms if not _is_literal(v)}

    def read(atom: Any) -> Any:
        if not _is_literal(atom):
            return scalars.get(atom)
        return int(atom.val) if atom.aval.shape == () and atom.aval.dtype.kind in "biu" else None

    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, equation.invars
        touched = {refs[v] for v in operands if not _is_literal(v) and v in refs} - fresh
        if name == "program_id" and equation.params["axis"] in first:
            scalars[equation.outvars[0]] = 0
        elif name == "cond" and touched:
            index, branches = read(operands[0]), [_open(b) for b in equation.params["branches"]]
            outcomes = []
            for branch in branches if index is None else [branches[min(max(int(index), 0), len(branches) - 1)]]:
                passed = dict(zip(branch.invars, operands[1:], strict=True))
                seen = {v: refs[a] for v, a in passed.items() if not _is_literal(a) and refs.get(a) in touched}
                outcomes.append(_overwritten(branch, seen, first, {v: read(a) for v, a in passed.items()}))
            if None in outcomes:
                return None
            fresh |= frozenset.intersection(*(o for o in outcomes if o is not None))
        elif touched:
            kept = any(v in used for v in equation.outvars)
            if name != "swap" or touched != {refs.get(operands[0])} or kept:
                return None
            ref, value = (math.prod(v.aval.shape) for v in operands[:2])
            if ref != value:
                return None
            fresh |= touched
        elif len(equation.outvars) == 1:
            scalars[equation.outvars[0]] = _folded(equation, [read(v) for v in operands])
    return fresh


def _folded(equation: Any, values: Sequence[Any]) -> Any:
    """Returns the scalar that an equation computes; None where an operand is unknown or the equation is no scalar operation."""
    if any(value is None for value in values):
        return None
    if equation.primitive.name == "convert_element_type":
        kind = getattr(equation.params["new_dtype"], "kind", "")
        return bool(values[0]) if kind == "b" else values[0] if kind in ("i", "u") else None
    fold = _SCALARS.get(equation.primitive.name)
    return None if fold is None else fold(*values)


#: Operations on scalars, by the name of the primitive.
_SCALARS: Final[dict[str, Callable[..., Any]]] = {
    name.rstrip("_"): getattr(operator, name) for name in "add and_ eq ge gt le lt mul ne or_ sub".split()
}


# FLOPs.


def pallas_flops(params: Mapping[str, Any]) -> float:
    """Returns the FLOPs that a ``pallas_call`` states, or else those of the products in its body for all steps of its grid."""
    stated = getattr(params.get("cost_estimate"), "flops", 0)
    if stated:
        return float(stated)
    steps = math.prod(int(size) for size in params["grid_mapping"].grid if _is_static(size))
    return steps * jaxpr_flops(params["jaxpr"])


def jaxpr_flops(jaxpr: Any) -> float:
    """Returns the FLOPs of the products in a jaxpr. A ``while`` loop counts once, of branches the largest."""
    total = 0.0
    for equation in _open(jaxpr).eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[d] for d in contracted)
        elif name == "pallas_call":
            total += pallas_flops(params)
        elif name == "cond":
            total += max(map(jaxpr_flops, params["branches"]))
        else:
            total += params.get("length", 1) * sum(map(jaxpr_flops, _inner(equation)))
    return total


# cuDNN's attention, ``dot_product_attention_fwd_wrapper`` and ``_bwd_wrapper`` in JAX. Operands are query, key, value,
# bias, the lengths of queries and keys, the offsets of packed segments, two page tables; going backward also the softmax
# statistics, the output and its gradient. Those that are not in use have shape ``(0,)``.

_QUERY, _KEY, _VALUE, _BIAS = range(4)
_LENGTHS: Final = (4, 5)
_OFFSETS, _PAGES = 6, 8
_STATISTICS, _OUTPUT, _GRADIENT = 10, 11, 12
_SHARED: Final = "heads that share a key and a value stay together"


def fused_attention(b: RuleBuilder) -> None:
    """Batch and heads can be split; with paged keys or packed segments only heads, or nothing in the inner primitives."""
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
    b.block_rest("cuDNN's attention cannot split it")


def broadcast_bias_dims(shapes: Sequence[Shape], params: Mapping[str, Any]) -> list[Place]:
    """Returns the dimensions of the query over which the gradient of a bias of size one is summed: batch or heads."""
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
