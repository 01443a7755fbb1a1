"""Single ops on local blocks against the plain run, with each of their dimensions sharded in turn.

Among them are those that XLA's partitioner computes wrongly, or aborts on, when they are sharded by constraints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardwise
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.dims.analysis import analyze_program
from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.decisions import Decision, Shard
from shardwise.plans.plan import Plan
from tests.planner.decisions import decided, inquire, plan_decisions
from tests.spmd.emitted import emitted, predicted

MESH = {"a": 2, "b": 4}
Args = Sequence[Any]
#: Plans that are compiled as one program.
TOGETHER = 8


def check(
    fn: Callable[..., Any],
    args: Args,
    mesh: dict[str, int] = MESH,
    decisions: Sequence[Decision] | None = None,
    padded: bool = False,
) -> int:
    """Every color alone on every axis, and all colors at once, on one axis and on all in turn; returns how many plans sharded
    something, or ``padded`` it."""
    traced = trace(fn, tuple(args), {}, JitOptions())
    analysis, axes = analyze_program(lower(traced)), MeshAxes.of(mesh)
    inquiry = inquire(analysis, axes)
    groups = [g.colors for g in analysis.groups if any(analysis.colors[c].size > 1 for c in g.colors)]

    def shard(colors: tuple[int, ...], name: str) -> Decision:
        return Shard(colors, name, padded=padded)

    plans: list[list[Decision]] = [[shard(colors, name)] for colors in groups for name in axes.names]
    plans.append([shard(colors, axes.names[-1]) for colors in groups])
    if len(axes.names) > 1:
        plans.append([shard(colors, axes.names[k % len(axes.names)]) for k, colors in enumerate(groups)])
        plans += [[shard(colors, name) for name in axes.names] for colors in groups]
    want = jax.tree.leaves(jax.device_get(jax.jit(fn)(*args)))
    sharded = 0
    different: dict[Any, tuple[Any, list[Decision]]] = {}  # by how the program is sharded
    for chosen in [list(decisions)] if decisions is not None else plans:
        plan = decided(traced, inquiry, chosen)
        if padded:
            sharded += has_padding(plan)
        else:
            sharded += any(axes_ for a in (*plan.arguments, *plan.outputs) for axes_ in a.spec)
        wanted, how = predicted(plan), plan.sharded
        key = how.factors, how.passed, how.shardings, frozenset(wanted.items())
        if key in different:
            continue
        local = jax.jit(plan.jit(fn).inline)  # traced once, for its collectives and for the program of several
        assert emitted(jax.make_jaxpr(local)(*args)) == wanted, chosen
        different[key] = local, chosen
    # Compiled together, which takes a third of the time.
    both = list(different.values())
    for some in (both[k : k + TOGETHER] for k in range(0, len(both), TOGETHER)):
        results = jax.device_get(jax.jit(lambda *xs, some=some: [local(*xs) for local, _ in some])(*args))
        for have, (_, chosen) in zip(results, some, strict=True):
            for x, y in zip(want, jax.tree.leaves(have), strict=True):
                x, y = (np.asarray(z, np.complex128) for z in (x, y))
                np.testing.assert_allclose(x, y, atol=2e-4, rtol=2e-4, err_msg=str(chosen))
    return sharded


def has_padding(plan: Plan) -> bool:
    """Is a dimension of a value padded?"""
    values, pieces = plan.inquiry.analysis.program.values, plan.mesh.pieces
    pairs = ((v.shape, plan.sharded.shardings[v.id].dims) for v in values)
    return any(n % pieces(axes) for shape, dims in pairs for n, axes in zip(shape, dims, strict=True))


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def integers(limit: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(-limit // 4, limit + limit // 4, shape).astype(np.int32)


def convolution(x: Any, w: Any, **options: Any) -> Any:
    strides = options.pop("strides", (1, 1))
    return lax.conv_general_dilated(x, w, strides, options.pop("padding", "SAME"), **options)


_IMAGE = ("NHWC", "HWIO", "NHWC")


def pooled(x: Any, reducer: Any, start: float, stride: int, width: int = 3, padding: str = "SAME") -> Any:
    return lax.reduce_window(x, start, reducer, (1, width, width, 1), (1, stride, stride, 1), padding)


def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of a function in all its arguments, for a random cotangent."""

    def run(*args: Any) -> Any:
        out, pull = jax.vjp(fn, *args)
        return out, pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype).reshape(out.shape)))

    return run


CASES: dict[str, tuple[Callable[..., Any], Args]] = {
    "grouped 1x1 convolution": (
        lambda x, w: convolution(x, w, feature_group_count=2, dimension_numbers=_IMAGE),
        (draw(1, 8, 8, 32), draw(1, 1, 16, 32)),
    ),
    "depthwise": (
        gradient(lambda x, w: convolution(x, w, feature_group_count=8, dimension_numbers=_IMAGE)),
        (draw(4, 8, 8, 8), draw(3, 3, 1, 8)),
    ),
    "batch groups": (
        lambda x, w: convolution(
            x, w, batch_group_count=4, strides=(2, 1), padding="VALID", rhs_dilation=(2, 1), dimension_numbers=_IMAGE
        ),
        (draw(8, 16, 8, 4), draw(3, 3, 4, 16)),
    ),
    "convolution with strides, gradients": (
        gradient(lambda x, w: convolution(x, w, strides=(2, 1), padding=((1, 2), (0, 3)), dimension_numbers=_IMAGE)),
        (draw(4, 16, 8, 4), draw(3, 5, 4, 8)),
    ),
    "transposed convolution": (
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=_IMAGE),
        (draw(4, 8, 8, 4), draw(3, 3, 4, 8)),
    ),
    **{
        f"gradient of {name} pooling, stride {stride}, {padding}": (
            gradient(lambda x, r=reducer, s=start, k=stride, p=padding: pooled(x, r, s, k, padding=p)),
            (draw(2, 16, 8, 4),),
        )
        for name, reducer, start in (("max", lax.max, -np.inf), ("min", lax.min, np.inf), ("mean", lax.add, 0.0))
        for stride, padding in ((1, "SAME"), (2, "SAME"), (2, "VALID"))
    },
    "dynamic update beyond the end": (
        lambda x, u, k: lax.dynamic_update_slice(x, u, (k, 0)),
        (draw(16, 8), draw(3, 8), np.int32(15)),
    ),
    "dynamic update across blocks": (
        lambda x, u, k, j: lax.dynamic_update_slice(x, u, (k, j)),
        (draw(16, 16), draw(7, 3), np.int32(2), np.int32(14)),
    ),
    "updates in a decode loop": (
        lambda x, u: lax.fori_loop(0, 6, lambda k, y: lax.dynamic_update_slice(y, u * (k + 1), (3 * k, 0)), x),
        (draw(16, 8), draw(1, 8)),
    ),
    "sort, then a scalar scatter": (lambda x: jnp.sort(x, 0).at[5].set(9.0), (draw(16, 6),)),
    "associative scan": (lambda x: lax.associative_scan(jnp.add, x), (draw(16, 8),)),
    "cache writes of each example": (
        lambda cache, new, at: jax.vmap(lambda c, n, k: lax.dynamic_update_slice(c, n, (k, 0)))(cache, new, at),
        (draw(8, 16, 4), draw(8, 1, 4), integers(16, 8)),
    ),
    "cache writes at batch 1": (
        lambda cache, new, at: jax.vmap(lambda c, n, k: lax.dynamic_update_slice(c, n, (k, 0)))(cache, new, at),
        (draw(1, 16, 4), draw(1, 1, 4), integers(16, 1)),
    ),
    "xor": (lambda n: lax.reduce_xor_p.bind(n, axes=(0,)), (integers(1000, 16, 8),)),
    "other reductions": (
        lambda n, b: (jnp.prod(n, 0), jnp.all(b, 0), jnp.any(b, 1), n.max(0), n.min(1)),
        (integers(5, 16, 8), integers(5, 8, 16) > 0),
    ),
    "argmax": (
        lambda x, n: (jnp.argmax(x, 0), jnp.argmin(x, 1), jnp.argmax(n, 0), jnp.argmin(n, 0), jnp.argmax(n > 1, 0)),
        (np.where(draw(16, 8) > 1.4, np.nan, draw(16, 8, seed=3)).astype(np.float32), integers(3, 16, 8)),
    ),
    "lookups out of bounds": (
        lambda t, i: (
            jnp.take(t, i, 0, mode="fill"),
            jnp.take(t, i, 0, mode="clip"),
            jnp.take(t, i, 0, mode="wrap"),
            jnp.take(t > 0, i, 0, mode="clip"),
            jnp.take((t * 10).astype(jnp.int32), i, 0, mode="fill", fill_value=7),
        ),
        (draw(16, 8), integers(16, 8)),
    ),
    "scatters out of bounds": (
        lambda t, i, u: (
            t.at[i].add(u, mode="drop"),
            t.at[i].add(u, mode="clip"),
            t.at[i].max(u),
            t.at[i].min(u),
            t.at[i].multiply(u),
            t.at[i[:2]].set(u[:2]),
            t.at[i].subtract(u) if hasattr(t.at[i], "subtract") else t,
        ),
        (draw(16, 8), integers(16, 8), draw(8, 8)),
    ),
    "uneven slices": (
        lambda x: (x[1:9], x[::2], x[3:15:3], x[8:], x[:, ::-1], jnp.flip(x, 0), jnp.roll(x, 3, 0), x[4:12, 2:6]),
        (draw(16, 8),),
    ),
    "pads": (
        lambda x: tuple(
            lax.pad(x, np.float32(0.5), (w, (0, 0, 0)))
            for w in ((1, 3, 0), (4, 4, 0), (0, 0, 1), (1, 0, 1), (-2, 2, 0), (-4, -4, 0), (3, 1, 3))
        ),
        (draw(16, 8),),
    ),
    "concatenations": (
        lambda x, y, z: (
            jnp.concatenate([x, y], 0),
            jnp.concatenate([x, z, x], 0),
            jnp.concatenate([z[:1], x, z[1:]], 0),
            jnp.stack([x, x + 1], 1),
            *jnp.split(x, 4, 0),
        ),
        (draw(16, 8), draw(8, 8), draw(4, 8)),
    ),
    "reshapes": (
        lambda x: (x.reshape(4, 4, 8), x.reshape(-1), x.reshape(32, 4), x.T.reshape(16, 8), jnp.tile(x, (2, 3))),
        (draw(16, 8),),
    ),
    "positions": (
        lambda x: (
            x + jnp.arange(16)[:, None],
            jnp.where(lax.broadcasted_iota(jnp.int32, (16, 8), 1) > 3, x, 0),
            jnp.tril(x),
        ),
        (draw(16, 8),),
    ),
    "cumulative": (lambda x: (jnp.cumsum(x, 0), jnp.cumsum(x, 1), lax.top_k(x, 3), jnp.sort(x, 0)), (draw(16, 8),)),
    "partial sums meet whole values": (
        lambda x, w, b: (x @ w + b, (x @ w) * 2 - b, b - x @ w, ((x @ w).astype(jnp.float16) / 3 + b)),
        (draw(8, 16), draw(16, 8), draw(8)),
    ),
    "loops of each example": (
        lambda x, n: (
            jax.vmap(lambda v, k: lax.while_loop(lambda c: c[1] < k, lambda c: (c[0] * 1.5 + k, c[1] + 1), (v, 0)))(
                x, n
            ),
            jax.vmap(jax.vmap(lambda v: lax.while_loop(lambda c: c < 9.0, lambda c: c * 2 + 1, v)))(jnp.abs(x)),
        ),
        (draw(8, 16), integers(6, 8)),
    ),
    "loops and branches on sums": (
        lambda x: (
            lax.while_loop(lambda c: jnp.sum(c) < 50.0, lambda c: c * 1.5 + 0.1, jnp.abs(x)),
            lax.cond(jnp.sum(x) > 0, lambda y: y * 2, lambda y: y - jnp.mean(y, 0), x),
            lax.switch(jnp.argmax(jnp.sum(x, 0)) % 3, [jnp.sin, jnp.cos, jnp.tanh], x),
        ),
        (draw(16, 8),),
    ),
    "numbers of the program": (
        lambda x, i, k: (
            (x > 0).at[i].set(True, mode="drop"),
            jnp.zeros((16, 8), jnp.int32).at[i, 1].add(3),
            lax.dynamic_update_slice(x > 0, jnp.ones((1, 8), bool), (k, 0)),
            x.at[k].set(2.5),
            lax.pad(x, -1.0, ((1, 3, 0), (0, 0, 0))),
            lax.select(x > 0, x, jnp.full_like(x, 7.0)),
        ),
        (draw(16, 8), integers(16, 8), np.int32(9)),
    ),
    "bitwise reductions": (
        lambda n: (
            lax.reduce(n, np.int32(0), lax.bitwise_or, (0,)),
            lax.reduce(n | 7, np.int32(-1), lax.bitwise_and, (0,)),
            lax.reduce(n, np.int32(0), lax.bitwise_xor, (1,)),
        ),
        (integers(1 << 20, 16, 8),),
    ),
    "maxima of complex numbers": (lambda x: (jnp.max(x, 0), jnp.min(x, 1)), (draw(16, 8) + 1j * draw(16, 8, seed=1),)),
    "large addends of a small sum": (
        lambda x: jnp.sum(jnp.where(jnp.arange(16)[:, None] < 8, 30000.0, -30000.0).astype(jnp.float16) + x * 0, 0),
        (np.ones((16, 8), np.float16),),
    ),
    "linear solves": (
        lambda a, b: (
            jnp.linalg.solve(a + 8 * jnp.eye(8), b),
            jax.grad(lambda a: jnp.linalg.inv(a + 8 * jnp.eye(8)).sum())(a),
        ),
        (draw(8, 8), draw(8, 8, seed=1)),
    ),
    "gradient of a pooling by one window": (
        jax.grad(lambda x: jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, (1, 8, 8, 1), (1, 1, 1, 1), "VALID") ** 2)),
        (draw(4, 8, 8, 8),),
    ),
    "transforms of gathered dimensions": (
        lambda x: jnp.abs(jnp.fft.fft(x)) + jnp.abs(jnp.fft.fft(x, axis=1)),
        (draw(8, 8, 16),),
    ),
    "windows with other surroundings": (
        lambda x: (
            lax.reduce_window(x, jnp.inf, lax.min, (3, 1), (1, 1), "SAME"),
            lax.reduce_window(x, 0.0, lax.add, (3, 3), (1, 1), "SAME"),
            lax.reduce_window(x, -jnp.inf, lax.max, (3, 3), (1, 1), "SAME"),
        ),
        (draw(16, 8),),
    ),
    "arrays of one number": (
        lambda x, i: (
            jnp.zeros((16, 8)).at[i].add(x),
            jnp.cumsum(jnp.full((16, 8), x[0, 0]), 0),
            lax.scan(lambda c, row: (c + 1, jnp.sort(jnp.full((8,), c[0])) + row), jnp.ones(1), x)[1],
        ),
        (draw(16, 8), integers(16, 16)),
    ),
    "widened values": (
        lambda x, m, n: (
            jnp.sort(x.astype(jnp.bfloat16).astype(jnp.float32).T, 1),
            jnp.cumsum((m > 0).astype(jnp.float32), 0),
            jnp.cumsum(n.astype(jnp.int32)[:, None] + jnp.zeros((1, 4), jnp.int32), 0),
            jnp.flip(x.astype(jnp.float16).astype(jnp.float32).reshape(8, 16), 0),
            jnp.sort(x, 0).T.astype(jnp.bfloat16) * 2,
        ),
        (draw(16, 8), integers(3, 16, 8), np.arange(16, dtype=np.int8)),
    ),
    "what is computed twice": (
        lambda x, w: (
            jax.jit(lambda x: jnp.cumsum(x.astype(jnp.float16), 0))(x) @ w.astype(jnp.float16),
            jax.checkpoint(lambda x: jnp.cumsum(x.astype(jnp.float16), 0) + jnp.cumsum(x.astype(jnp.float16), 0))(x),
            jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w)).sum())(x))(x),
            jnp.cumsum(x.astype(jnp.float16), 0),
        ),
        (draw(16, 8) / 8, draw(8, 8) / 8),
    ),
    "gathers from widened arrays": (
        lambda x, i: (
            jnp.take_along_axis(x.astype(jnp.float16).astype(jnp.float32), i, 1) + x[:, :1],
            jnp.take(jnp.exp(x.astype(jnp.float16)).astype(jnp.float32), i[:, 0], axis=0, mode="fill"),
            jnp.sum(x.astype(jnp.float16).astype(jnp.float32), 1),
        ),
        (draw(16, 8), integers(8, 16, 2)),
    ),
    "reshapes that undo others": (
        lambda x: (jnp.tanh(x).reshape(128).reshape(16, 8) * 2, x.reshape(1, 16, 8)[0], x.reshape(64, 2).sum(1)),
        (draw(16, 8),),
    ),
    "gathers that fill with what a narrow type has not": (
        lambda x: jnp.take(
            x.astype(jnp.float16).astype(jnp.float32), jnp.array([1, 99]), axis=0, mode="fill", fill_value=1e30
        ),
        (draw(16, 8),),
    ),
    "what is handed twice into a remat": (
        lambda x, i: jax.grad(
            jax.checkpoint(
                lambda x: (jnp.take_along_axis(jnp.sin(x), i, 1) + jnp.take_along_axis(jnp.cos(x), i, 1)).sum(),
                policy=jax.checkpoint_policies.everything_saveable,
            )
        )(x),
        (draw(16, 8), integers(8, 16, 2)),
    ),
    "barriers": (
        lambda x: (
            lax.optimization_barrier((jnp.sin(x), jnp.sin(x)))[1],
            sum(lax.optimization_barrier((jnp.asarray(np.ones((16, 8), np.float32)), x))),
        ),
        (draw(16, 8),),
    ),
    "loops that run once, with a number": (
        lambda x: lax.scan(lambda c, _: (c * 2, 1.0), x, None, length=1),
        (draw(16, 8),),
    ),
    "loops that run once": (
        lambda x, w: jax.value_and_grad(
            lambda w: lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum(0)), x, w, reverse=True)[0].sum()
        )(w),
        (draw(16, 8), draw(1, 8, 8)),
    ),
    "sums that are converted": (
        lambda n, x: (jnp.sum(x, 0).astype(jnp.int32), jnp.sum(n, 0) // 3, jnp.sum(n, 0).astype(jnp.float32)),
        (integers(9, 16, 8), draw(16, 8) * 10),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_the_plain_run(name: str) -> None:
    assert check(*CASES[name]) > 0


def test_the_search_shards_a_grouped_convolution_rightly() -> None:
    """XLA's partitioner multiplies the result of this plan."""
    x, w = draw(1, 64, 64, 512), draw(1, 1, 256, 512) / 16
    fn = CASES["grouped 1x1 convolution"][0]
    plan = shardwise.plan(fn, x, w, mesh={"a": 2, "b": 4}, budget_evals=200)
    np.testing.assert_allclose(plan.jit(fn)(x, w), jax.jit(fn)(x, w), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("bits", "impl"), [(8, "threefry2x32"), (16, "threefry2x32"), (32, "threefry2x32"), (32, "rbg"), (8, "unsafe_rbg")]
)
def test_sharded_random_numbers_are_the_unsharded_ones(bits: int, impl: str) -> None:
    def fn(key: Any, keys: Any) -> Any:
        many = jax.vmap(lambda k: jax.random.bits(k, (4, 8), f"uint{bits}"))(keys)
        gamma = jax.random.gamma(key, jnp.arange(1.0, 17.0)), jax.vmap(lambda k: jax.random.gamma(k, 2.0))(keys)
        split = jax.random.split(key, (8, 2)), jax.vmap(lambda k: jax.random.split(k, 4))(keys)
        folded = (
            jax.vmap(jax.random.fold_in)(keys, jnp.arange(8)),
            jax.vmap(lambda k: jax.random.fold_in(key, k))(jnp.arange(8)),
        )
        return jax.random.bits(key, (16, 8), f"uint{bits}"), many, split, folded, gamma

    args = (jax.random.key(3, impl=impl), jax.random.split(jax.random.key(4, impl=impl), 8))
    traced = trace(fn, args, {}, JitOptions())
    analysis, axes = analyze_program(lower(traced)), MeshAxes.of({"a": 2, "b": 4})
    decisions = [Shard(g.colors, axes.names[k % 2]) for k, g in enumerate(analysis.groups)]
    plan = plan_decisions(traced, analysis, axes, decisions)
    assert any(any(a.spec) for a in plan.outputs)
    for x, y in zip(jax.tree.leaves(jax.jit(fn)(*args)), jax.tree.leaves(plan.jit(fn)(*args)), strict=True):
        a, b = (jax.random.key_data(z) if jnp.issubdtype(z.dtype, jax.dtypes.prng_key) else z for z in (x, y))
        np.testing.assert_allclose(a, b, rtol=1e-6 if a.dtype.kind == "f" else 0)


def test_weak_types_are_those_of_the_plain_run() -> None:
    """A Python number stays one for the types of what is computed with it, call after call."""

    def fn(x: Any, scale: Any) -> Any:
        return x * scale, scale * 0.5

    x = jnp.ones((8, 8), jnp.bfloat16)
    planned = shardwise.plan(fn, x, 1.0, mesh={"a": 8}, tactics=[]).jit(fn)
    y, scale = planned(*planned(x, 1.0))
    assert y.dtype == jnp.bfloat16 and scale.weak_type and float(scale) == 0.25
