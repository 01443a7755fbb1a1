"""Kernels on local blocks: rules that are read off Pallas kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import shardwise
import shardwise.spmd.kernels
from shardwise.errors import SpmdError
from shardwise.ir.program import Op, Unit
from shardwise.rules import registry
from shardwise.tactics.strategies import Shard

BOTH = {"data": 4, "model": 2}


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed + sum(shape)), shape)


def struct(*shape: int, dtype: str = "float32") -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def kernels(fn: Callable[..., Any], *args: Any, kind: str = "pallas_call") -> list[Op]:
    """The kernels of a program, in order."""
    return [op for op in shardwise.analyze(fn, *args).program.ops if op.kind == kind]


def check(fn: Callable[..., Any], args: Sequence[Any], mesh: dict[str, int], *tactics: Shard) -> shardwise.Plan:
    """The plan, after running it; what is computed in blocks equals what is computed whole."""
    plan = shardwise.plan(fn, *args, mesh=mesh, tactics=list(tactics))
    have, want = plan.jit(fn)(*args), jax.jit(fn)(*args)
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(np.max(np.abs(b)))))
    return plan


# Pallas kernels.


def grad(fn: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return jax.grad(lambda *xs: (fn(*xs) ** 2).sum(), (0, 1, 2))(q, k, v)

    return gradient


def product(x: jax.Array, y: jax.Array, block: int = 8, **more: Any) -> jax.Array:
    (m, k), n = x.shape, y.shape[1]

    def body(x: Any, y: Any, out: Any) -> None:
        out[...] = x[...] @ y[...]

    return pl.pallas_call(
        body,
        grid=(m // block, n // block),
        in_specs=[pl.BlockSpec((block, k), lambda i, j: (i, 0)), pl.BlockSpec((k, block), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((block, block), lambda i, j: (i, j)),
        out_shape=struct(m, n),
        interpret=True,
        **more,
    )(x, y)


def accumulated(x: jax.Array, y: jax.Array, reset: str = "k") -> jax.Array:
    """A product whose sum over ``k`` lies in scratch memory, which is reset where some index is zero."""

    def body(x: Any, y: Any, out: Any, total: Any) -> None:
        @pl.when(pl.program_id("ijk".index(reset)) == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        total[...] += x[...] @ y[...]
        out[...] = total[...]

    grid = (x.shape[0] // 8, y.shape[1] // 8, x.shape[1] // 8)
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=[pl.BlockSpec((8, 8), lambda i, j, k: (i, k)), pl.BlockSpec((8, 8), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((8, 8), lambda i, j, k: (i, j)),
        out_shape=struct(x.shape[0], y.shape[1]),
        scratch_shapes=[pltpu.VMEM((8, 8), jnp.float32)],
        interpret=True,
    )(x, y)


def rowwise(body: Callable[..., None], x: jax.Array, *outs: tuple[Any, Any]) -> Any:
    """A kernel over the rows of one array; ``outs`` are the block and the shape of each result."""
    return pl.pallas_call(
        body,
        grid=(x.shape[0],),
        in_specs=[pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))],
        out_specs=[spec for spec, _ in outs],
        out_shape=[shape for _, shape in outs],
        interpret=True,
    )(x)


ROW = pl.BlockSpec((1, 16), lambda i: (i, 0))
FIXED = pl.BlockSpec((1, 16), lambda i: (0, 0))


def doubled(x: jax.Array) -> Any:
    def body(x: Any, out: Any) -> None:
        out[...] = 2 * x[...]

    return rowwise(body, x, (ROW, struct(*x.shape)))


def numbered(x: jax.Array) -> Any:
    def body(x: Any, out: Any) -> None:
        out[...] = x[...] + pl.program_id(0)

    return rowwise(body, x, (ROW, struct(*x.shape)))


def asked_in_vain(x: jax.Array) -> Any:
    def body(x: Any, out: Any) -> None:
        pl.program_id(0)
        out[...] = jax.lax.cond(x[0, 0] > 0, lambda a: a, lambda a: -a, x[...])

    return rowwise(body, x, (ROW, struct(*x.shape)))


def last_row(x: jax.Array) -> Any:
    """The second result is overwritten by every step."""

    def body(x: Any, out: Any, last: Any) -> None:
        last[...] = 2 * x[...]
        out[...] = last[...] + 1

    return rowwise(body, x, (ROW, struct(*x.shape)), (FIXED, struct(1, 16)))


def summed_rows(x: jax.Array) -> Any:
    """The second result is added to by every step."""

    def body(x: Any, out: Any, total: Any) -> None:
        out[...] = x[...]
        total[...] += x[...]

    return rowwise(body, x, (ROW, struct(*x.shape)), (FIXED, struct(1, 16)))


def half_rows(x: jax.Array) -> Any:
    """Of sixteen steps for each row, the first eight write one block of the second result, the others another."""

    def body(x: Any, out: Any, half: Any) -> None:
        out[...] = half[...] = x[...]

    return pl.pallas_call(
        body,
        grid=(2, 16),
        in_specs=[pl.BlockSpec((1, 16), lambda i, j: (i, 0))],
        out_specs=[pl.BlockSpec((1, 16), lambda i, j: (i, 0)), pl.BlockSpec((1, 16), lambda i, j: (j // 8, 0))],
        out_shape=[struct(2, 16), struct(2, 16)],
        interpret=True,
    )(x)


def grouped(q: jax.Array, k: jax.Array, divide: Any = jax.lax.div) -> jax.Array:
    """Heads of ``q`` in groups that share one of ``k``."""
    group = q.shape[0] // k.shape[0]

    def body(q: Any, k: Any, out: Any) -> None:
        out[...] = q[...] * k[...]

    return pl.pallas_call(
        body,
        grid=(q.shape[0],),
        in_specs=[
            pl.BlockSpec((None, 16), lambda h: (h, 0)),
            pl.BlockSpec((None, 16), lambda h: (divide(h, group), 0)),
        ],
        out_specs=pl.BlockSpec((None, 16), lambda h: (h, 0)),
        out_shape=struct(*q.shape),
        interpret=True,
    )(q, k)


def looked_up(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows that an index operand names, in blocks of columns."""

    def body(rows: Any, x: Any, out: Any) -> None:
        out[...] = x[...]

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows.shape[0], x.shape[1] // 8),
            in_specs=[pl.BlockSpec((None, 8), lambda i, j, rows: (rows[i], j))],
            out_specs=pl.BlockSpec((None, 8), lambda i, j, rows: (i, j)),
        ),
        out_shape=struct(rows.shape[0], x.shape[1]),
        interpret=True,
    )(rows, x)


SQUARE = struct(16, 16)


@pytest.mark.parametrize(
    ("fn", "args", "rule"),
    [
        (product, (struct(32, 16), struct(16, 24)), "(i*j,o),(p,l*m)->(i*k,l*n); blocked j k m n o p; sizes i=4 l=3"),
        (doubled, (SQUARE,), "(i,j)->(i,k); blocked j k"),
        (asked_in_vain, (SQUARE,), "(i,j)->(i,k); blocked j k"),
        (last_row, (SQUARE,), "(i,j)->(i,k),(1,l); blocked j k l"),
        (grouped, (struct(8, 16), struct(2, 16)), "(i*j,l),(i,m)->(i*k,n); blocked j k l m n"),
        (
            functools.partial(grouped, divide=lambda a, b: a // b),
            (struct(8, 16), struct(2, 16)),
            "(i*j,l),(i,m)->(i*k,n); blocked j k l m n",
        ),
        (looked_up, (struct(6, 16), struct(4, dtype="int32")), "(l),(m,i*j)->(n,i*k); blocked j k l m n; sizes i=2"),
        (
            accumulated,
            (struct(32, 24), struct(24, 16)),
            "(i*j,o),(p,l*m)->(i*k,l*n); blocked j k m n o p; sizes i=4 l=2",
        ),
        (jax.vmap(numbered), (struct(4, 16, 16),), "(i,j,k)->(i,l,m); blocked j k l m"),
    ],
)
def test_rules_are_read_off_kernels(fn: Callable[..., Any], args: Sequence[Any], rule: str) -> None:
    (op,) = kernels(fn, *args)
    assert (str(op.rule), op.opaque, op.unit) == (rule, "", Unit.KERNEL)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (numbered, (SQUARE,)),
        (summed_rows, (SQUARE,)),
        # The sum goes on from one j to the next.
        (functools.partial(accumulated, reset="i"), (struct(8, 8), struct(8, 16))),
        # The last block is padded.
        (lambda x: product(x, x, block=24), (struct(24, 24),)),
    ],
)
def test_kernels_that_cannot_be_split_stay_opaque(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    (op,) = kernels(fn, *args)
    assert op.opaque


def test_a_carried_sum_blocks_the_dimension_it_is_carried_along() -> None:
    """The scratch memory is reset where j is zero, and then goes on through all j and k: only i may be split."""
    (op,) = kernels(functools.partial(accumulated, reset="j"), struct(32, 24), struct(24, 16))
    assert str(op.rule) == "(i*j,l),(m,n)->(i*k,o); blocked j k l m n o; sizes i=4"


def test_an_output_that_steps_inside_number_blocks_the_dimensions_outside() -> None:
    (op,) = kernels(half_rows, struct(2, 16))
    assert str(op.rule) == "(j,k)->(l,m),(i,n); blocked j k l m n"


@pytest.mark.parametrize(
    ("fn", "args", "tactics"),
    [
        (product, (normal(64, 16), normal(16, 32)), [Shard("x", 0, "data"), Shard("y", 1, "model")]),
        (accumulated, (normal(32, 24), normal(24, 16)), [Shard("x", 0, "data"), Shard("y", 1, "model")]),
        (doubled, (normal(16, 16),), [Shard("x", 0, "data")]),
        (last_row, (normal(16, 16),), [Shard("x", 0, "data")]),
        (grouped, (normal(8, 16), normal(2, 16)), [Shard("k", 0, "model")]),
        (looked_up, (normal(6, 16), jnp.array([3, 0, 5, 5], jnp.int32)), [Shard("x", 1, "model")]),
    ],
)
def test_kernels_run_on_local_blocks(fn: Callable[..., Any], args: Sequence[Any], tactics: list[Shard]) -> None:
    plan = check(fn, args, BOTH, *tactics)
    assert not plan.moved()
    assert {axis for a in plan.arguments for axes in a.spec for axis in axes} == {t.axes for t in tactics}


def test_blocks_of_a_kernel_are_not_cut() -> None:
    plan = check(product, (normal(16, 16), normal(16, 16)), {"data": 4}, Shard("x", 0, "data"))
    assert {kind for kind, _ in plan.moved()} == {"all-gather"}, "two blocks of eight rows, four devices"


def test_a_kernel_that_asks_for_its_index_is_gathered() -> None:
    plan = check(numbered, (normal(16, 16),), {"data": 4}, Shard("x", 0, "data"))
    assert {kind for kind, _ in plan.moved()} == {"all-gather"}


def test_flops_are_stated_or_counted() -> None:
    args = struct(64, 16), struct(16, 32)
    (op,) = kernels(product, *args)
    assert (op.flops, op.unit) == (2 * 64 * 16 * 32, Unit.KERNEL)
    cost = pl.CostEstimate(flops=77, transcendentals=0, bytes_accessed=8)
    (op,) = kernels(functools.partial(product, cost_estimate=cost), *args)
    assert op.flops == 77
    check(functools.partial(product, cost_estimate=cost), (normal(64, 16), normal(16, 32)), BOTH, Shard("x", 0, "data"))


@pytest.fixture
def forget() -> Iterator[None]:
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


def test_a_registered_rule_comes_first(forget: None) -> None:
    shardwise.register_rule("pallas_call", "(i,j)->(i,j)")
    (op,) = kernels(doubled, SQUARE)
    assert str(op.rule) == "(i,j)->(i,j)"
    plan = shardwise.plan(doubled, normal(16, 16), mesh={"data": 4}, tactics=[Shard("x", 1, "data")])
    with pytest.raises(SpmdError, match=r"pallas_call at .*does not split dimension 1 .* shardwise\.kernel"):
        plan.jit(doubled)(normal(16, 16))
