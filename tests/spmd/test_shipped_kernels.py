"""Kernels that people use, on local blocks: flash, splash and paged attention, grouped products, cuDNN's attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.megablox import ops as megablox
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

import shardwise
import shardwise.spmd.kernels
from shardwise.ir.program import Op, Unit
from shardwise.tactics.strategies import Shard
from tests.spmd.test_kernels import BOTH, check, grad, kernels, normal, struct

# Kernels of libraries.


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of libraries that have no say about it run in interpret mode."""
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))


def flash_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    return flash.flash_attention(q, k, v, causal=True)


@functools.cache
def splash_kernel(heads: int) -> Any:
    words = "block_q block_kv block_kv_compute block_q_dkv block_kv_dkv block_kv_dkv_compute block_q_dq block_kv_dq"
    mask = masks.MultiHeadMask([masks.CausalMask((256, 256)) for _ in range(heads)])
    blocks = splash.BlockSizes(**dict.fromkeys(words.split(), 128))
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha_single_device(mask, block_sizes=blocks, interpret=True)


def splash_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    return jax.vmap(splash_kernel(q.shape[1]))(q, k, v)


def split_of_first(op: Op, tensor: int) -> list[int]:
    """The sizes of the factors that may be split, by dimension of an operand; 0 for none."""
    assert op.rule is not None
    rule = op.rule
    return [rule.factors[dim[0]].size if dim and rule.splittable[dim[0]] else 0 for dim in rule.operands[tensor]]


def test_flash_attention_splits_batch_and_heads() -> None:
    x = struct(4, 8, 256, 128)
    forward, dkv, dq = kernels(grad(flash_attention), x, x, x)
    for op in (forward, dkv, dq):
        assert split_of_first(op, 0) == split_of_first(op, 1) == split_of_first(op, 2) == [4, 8, 0, 0]
    assert 1.0 <= forward.flops / (2 * 2 * 4 * 8 * 256 * 256 * 128) < 1.01, "it states what it costs"


def test_splash_attention_splits_batch_and_heads() -> None:
    x = struct(4, 8, 256, 128)
    for op in kernels(grad(splash_attention), x, x, x):
        assert split_of_first(op, 2) == split_of_first(op, 3) == split_of_first(op, 4) == [4, 8, 0, 0]
    y = struct(4, 2, 256, 128)
    forward, dkv, dq = kernels(grad(splash_attention), x, y, y)
    for op in (forward, dq):
        assert split_of_first(op, 2) == split_of_first(op, 3) == [4, 2, 0, 0]
    # It sums over the heads of a group, and asks which head it is at.
    assert split_of_first(dkv, 3) == [4, 0, 0, 0]


def test_grouped_products_split_columns() -> None:
    args = struct(512, 256, dtype="bfloat16"), struct(4, 256, 512, dtype="bfloat16"), struct(4, dtype="int32")
    (op,) = kernels(megablox.gmm, *args)
    assert split_of_first(op, 6) == [0, 0, 4]


def test_paged_attention_is_opaque() -> None:
    """It asks where it is in the grid, to fetch the pages of its next step."""
    pages, args = struct(8, 64, 16, 128), (struct(8, dtype="int32"), struct(8, 8, dtype="int32"))
    (op,) = kernels(
        functools.partial(paged_attention, pages_per_compute_block=4), struct(8, 8, 128), pages, pages, *args
    )
    assert op.opaque


def test_paged_attention_as_a_kernel_is_split_by_heads() -> None:
    """The rule of docs/rules.md. Pages and queries of a device are those of its key-value heads."""
    attend = shardwise.kernel(
        functools.partial(paged_attention, pages_per_compute_block=4),
        rule="(b,g*r,d),(g,p,s,d),(g,p,s,d),(b),(b,i)->(b,g*r,d); blocked p s d i",
    )

    def fn(q: Any, k: Any, v: Any, lengths: Any, pages: Any) -> Any:
        return attend(q, k, v, lengths, pages)

    pages = struct(4, 64, 16, 128)
    args = (struct(8, 8, 128), pages, pages, struct(8, dtype="int32"), struct(8, 8, dtype="int32"))
    plan = shardwise.plan(fn, *args, mesh={"data": 2, "model": 4}, tactics=[Shard("k", 0, "model")])
    assert not plan.moved()
    assert [a.spec for a in plan.arguments[:3]] == [((), ("model",), ()), *[(("model",), (), (), ())] * 2]


@pytest.mark.parametrize("fn", [flash_attention, grad(flash_attention)])
def test_flash_attention_runs_on_local_blocks(fn: Callable[..., Any], interpreted: None) -> None:
    args = [normal(4, 4, 128, 32, seed=k) for k in range(3)]
    assert not check(fn, args, BOTH, Shard("q", 0, "data"), Shard("q", 1, "model")).moved()


@pytest.mark.parametrize("fn", [splash_attention, grad(splash_attention)])
def test_splash_attention_runs_on_local_blocks(fn: Callable[..., Any]) -> None:
    args = [normal(4, 2, 256, 128, seed=k) for k in range(3)]
    assert not check(fn, args, BOTH, Shard("q", 0, "data"), Shard("q", 1, "model")).moved()


def test_splash_attention_with_grouped_heads_runs_on_local_blocks() -> None:
    args = normal(4, 4, 256, 128), normal(4, 2, 256, 128, seed=1), normal(4, 2, 256, 128, seed=2)
    assert not check(splash_attention, args, BOTH, Shard("q", 0, "data"), Shard("k", 1, "model")).moved()


def test_grouped_products_run_on_local_blocks() -> None:
    def gmm(x: jax.Array, w: jax.Array, sizes: jax.Array) -> Any:
        return megablox.gmm(x, w, sizes, preferred_element_type=jnp.float32, interpret=True)

    args = normal(256, 128), normal(4, 128, 512), jnp.array([64, 32, 96, 64], jnp.int32)
    assert not check(gmm, args, {"model": 4}, Shard("w", 2, "model")).moved()


# Attention without Pallas.


def test_plain_attention_is_plain_jax() -> None:
    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")

    args = [normal(4, 8, 4, 16, seed=k) for k in range(3)]
    assert not check(attention, args, BOTH, Shard("q", 0, "data"), Shard("q", 2, "model")).moved()


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """cuDNN's attention as JAX traces it where there is a GPU."""
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(fused, "check_is_flash_attention", lambda *args, **more: None)
    return fused


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_cudnn_attention_splits_batch_and_heads(cudnn: Any, layout: str) -> None:
    heads = layout.index("N")

    def shape(n: int) -> Any:
        return struct(*((4, n, 64, 16) if heads == 1 else (4, 64, n, 16)), dtype="bfloat16")

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        return cudnn.dot_product_attention(q, k, v, bias, qkv_layout=layout)

    args = shape(8), shape(2), shape(2)
    want = [4, 2, 0, 0] if heads == 1 else [4, 0, 2, 0]
    for bias in ([], [struct(1, 8, 64, 64, dtype="bfloat16")]):
        both = grad(lambda *xs, bias=bias: attention(*xs, *(jnp.ones(b.shape, b.dtype) for b in bias)))
        (forward,) = kernels(both, *args, kind="dot_product_attention_fwd_wrapper")
        (backward,) = kernels(both, *args, kind="dot_product_attention_bwd_wrapper")
        for op in (forward, backward):
            assert not op.opaque and op.unit is Unit.KERNEL
            assert [split_of_first(op, k) for k in range(3)] == [want] * 3
        assert split_of_first(backward, 12) == want
        assert forward.flops == 4 * 4 * 8 * 64 * 64 * 16
        if bias:
            assert split_of_first(forward, 3) == [0, 2, 0, 0]


def test_cudnn_attention_with_lengths_splits_them(cudnn: Any) -> None:
    x, lengths = struct(4, 64, 8, 16, dtype="bfloat16"), struct(4, dtype="int32")

    def attention(x: jax.Array, lengths: jax.Array) -> jax.Array:
        padding = cudnn.MaskType.PADDING
        return cudnn.dot_product_attention(x, x, x, q_seqlen=lengths, kv_seqlen=lengths, mask_type=padding)

    (op,) = kernels(attention, x, lengths, kind="dot_product_attention_fwd_wrapper")
    assert split_of_first(op, 4) == split_of_first(op, 5) == [4]
