"""``shardwise.kernel``: a function of arrays that is one op for the analysis, and is called on local blocks when it runs. The
gradient is another such op, whose rule follows from the first one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from shardwise.capture import jax_internals as internals
from shardwise.errors import RuleError
from shardwise.ir.notation import parse_rule, read_rule
from shardwise.ir.rule import Factor, Kind, Rule, Tensor

_SUMMED: Final = "the gradient of an operand without it is a sum over it"
#: Functions derived from kernels that are cached, so that JAX finds them in its caches.
_CACHE_SIZE: Final = 256


def kernel(fn: Callable[..., Any], rule: str) -> Callable[..., Any]:
    """Makes a function of arrays one op, with a rule for the dimensions that can be sharded.

    Where a plan splits the op, every device calls ``fn`` on its blocks of the arrays. It can be anything that JAX can trace: a
    Pallas kernel with the code around it, a call to a library, a custom derivative.

    Args:
      fn: takes arrays by position and returns an array or a tuple of arrays. It may close over constants, but not over arrays
        of a surrounding ``jax.jit``.
      rule: the rule in the notation ``"(b,i,k),(b,k,j)->(b,i,j); blocked k"``. A factor that only operands or only results
        have is blocked, unless a clause such as ``sum k`` says that calls on parts of it give partial sums.

    Returns:
      A function of the same arrays. It can be differentiated in reverse mode if ``fn`` can: the gradient calls ``jax.vjp`` of
      ``fn`` and computes ``fn`` again.

    >>> import jax, shardwise
    >>> attention = shardwise.kernel(
    ...     lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
    ...     rule="(b,s,h,k),(b,t,h,k),(b,t,h,v)->(b,s,h,v); blocked s; blocked t; blocked v",
    ... )
    >>> x = jax.numpy.ones((2, 8, 4, 16))
    >>> attention(x, x, x).shape
    (2, 8, 4, 16)
    """
    name = getattr(fn, "__name__", None) or type(fn).__name__
    if not callable(fn):
        raise RuleError(f"shardwise.kernel: expected a function, got {fn!r}")
    if not isinstance(rule, str):
        raise RuleError(f"shardwise.kernel of {name}: a rule is a text such as '(i,j)->(i,j)', got {rule!r}")
    try:
        text = _complete_rule(rule)
    except RuleError as error:
        raise RuleError(f"shardwise.kernel of {name}: {error}") from None

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        if not all(jax.tree_util.all_leaves([x]) for x in args):
            raise RuleError(f"shardwise.kernel of {name}: its arguments are arrays, by position; got a tree of arrays")
        arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in args]
        tree: Any
        results, tree = jax.tree.flatten(jax.eval_shape(fn, *arrays))
        shapes = [tuple(x.shape) for x in arrays], [tuple(x.shape) for x in results]
        try:
            parsed = parse_rule(text, *shapes)
        except RuleError as error:
            sizes = f"operands {[list(s) for s in shapes[0]]}, results {[list(s) for s in shapes[1]]}"
            raise RuleError(f"shardwise.kernel of {name}: its rule does not fit {sizes}: {error}") from None
        return tree.unflatten(_call(fn, parsed, *arrays))

    return call


def _complete_rule(text: str) -> str:
    """Returns the text of a rule with factors blocked that are on one side only and have no clause."""
    operands, results, kinds, _ = read_rule(text)
    unfit = sorted(name for name, (kind, _) in kinds.items() if kind in (Kind.HALO, Kind.INDEXED))
    if unfit:
        raise RuleError(
            f"rule {text!r}: {', '.join(unfit)} cannot be halo or indexed, since devices see only their blocks"
        )
    sides = [{n for tensor in side for dim in tensor for n in dim} for side in (operands, results)]
    one_sided = sorted((sides[0] ^ sides[1]) - set(kinds) - {"..."})
    return f"{text}; blocked {' '.join(one_sided)}" if one_sided else text


def _bind(fn: Any, rule: Rule, arrays: Sequence[Any]) -> tuple[Any, ...]:
    name = getattr(fn, "__name__", None) or type(fn).__name__
    return tuple(_primitive().bind(*arrays, fn=fn, rule=rule, name=name))


@functools.cache
def _primitive() -> Any:
    return internals.function_primitive("shardwise_kernel", _run, _batch)


def _run(*arrays: Any, fn: Any, rule: Rule, name: str) -> list[Any]:
    return jax.tree.leaves(fn(*arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _call(fn: Any, rule: Rule, *arrays: Any) -> tuple[Any, ...]:
    return _bind(fn, rule, arrays)


def _forward(fn: Any, rule: Rule, *arrays: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return _call(fn, rule, *arrays), arrays


def _backward(fn: Any, rule: Rule, arrays: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    inputs = tuple(k for k, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact))
    outputs = tuple(k for k, x in enumerate(cotangents) if jnp.issubdtype(x.dtype, jnp.inexact))
    gradients: list[Any] = [None] * len(arrays)
    if inputs and outputs:
        pull = _pullback(fn, len(arrays), inputs, outputs)
        results = _call(pull, gradient_rule(rule, inputs, outputs), *arrays, *(cotangents[k] for k in outputs))
        for k, gradient in zip(inputs, results, strict=True):
            gradients[k] = gradient
    return tuple(gradients)


_call.defvjp(_forward, _backward)


@functools.lru_cache(maxsize=_CACHE_SIZE)
def _pullback(fn: Any, count: int, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Callable[..., Any]:
    """Returns the function from the arguments and the gradients of some results to the gradients of some arguments."""

    def pullback(*operands: Any) -> Any:
        args = list(operands[:count])

        def results(*some: Any) -> list[Any]:
            for k, x in zip(inputs, some, strict=True):
                args[k] = x
            leaves = jax.tree.leaves(fn(*args))
            return [leaves[k] for k in outputs]

        return jax.vjp(results, *(args[k] for k in inputs))[1](list(operands[count:]))

    pullback.__name__ = f"{getattr(fn, '__name__', type(fn).__name__)}_vjp"
    return pullback


def gradient_rule(rule: Rule, inputs: Sequence[int], outputs: Sequence[int]) -> Rule:
    """Returns the rule of the op from the operands and the gradients of some results to those of some operands. A factor that
    all of them have, or that results are summed over, stays parallel; any other is blocked."""
    ins, outs = [rule.operands[k] for k in inputs], [rule.results[k] for k in outputs]

    def has(tensor: Tensor, factor: int) -> bool:
        return any(factor in dim for dim in tensor)

    factors: dict[int, Factor] = {}  # those that are in some tensor
    for f, factor in enumerate(rule.factors):
        everywhere = all(has(t, f) for t in ins) and (factor.reducer == "sum" or all(has(t, f) for t in outs))
        if everywhere and factor.kind in (Kind.PARALLEL, Kind.REDUCTION):
            factors[f] = Factor(factor.size, Kind.PARALLEL)
        elif any(has(t, f) for t in (*rule.operands, *outs)):
            factors[f] = Factor(factor.size, Kind.BLOCKED, reason=factor.reason or _SUMMED)
    number = {f: n for n, f in enumerate(factors)}

    def renumbered(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(tuple(tuple(number[f] for f in dim) for dim in tensor) for tensor in tensors)

    return Rule(tuple(factors.values()), renumbered([*rule.operands, *outs]), renumbered(ins))


def _batch(arrays: Sequence[Any], dims: Sequence[int | None], *, fn: Any, rule: Rule, name: str) -> tuple[Any, Any]:
    """Binds the kernel to a batch, which is the first dimension: one more parallel factor."""
    (size,) = {x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None}
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(arrays, dims, strict=True)]
    front = ((len(rule.factors),),) if size > 1 else ((),)
    factors = (*rule.factors, Factor(size, Kind.PARALLEL)) if size > 1 else rule.factors
    operands = tuple(t if d is None else front + t for t, d in zip(rule.operands, dims, strict=True))
    batched = Rule(factors, operands, tuple(front + t for t in rule.results))
    results = _bind(_mapped(fn, tuple(None if d is None else 0 for d in dims)), batched, moved)
    return results, [0] * len(results)


@functools.lru_cache(maxsize=_CACHE_SIZE)
def _mapped(fn: Any, dims: tuple[int | None, ...]) -> Callable[..., Any]:
    mapped: Callable[..., Any] = jax.vmap(fn, in_axes=dims)
    return mapped
