"""Attention kernels under plans, compiled for a TPU topology without a TPU; prints what of the bytes is as predicted.

``KERNELS`` in the environment chooses by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import PartitionSpec as P

import shardwise

BATCH, HEADS, SEQ, HEAD, WIDTH = 8, 8, 512, 128, 512
MESH = {"data": 2, "model": 4}
SPEC = P("data", "model")


def flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return flash_attention(q, k, v, causal=True)


def splash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((SEQ, SEQ))] * q.shape[1])
    kernel = splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    found: jax.Array = jax.vmap(kernel)(q, k, v)
    return found


def in_shard_map(attention: Callable[..., Any]) -> Callable[..., Any]:
    kinds = (jax.sharding.AxisType.Auto,) * len(MESH)
    mesh = jax.sharding.AbstractMesh(tuple(MESH.values()), tuple(MESH), axis_types=kinds)
    return jax.shard_map(attention, mesh=mesh, in_specs=(SPEC,) * 3, out_specs=SPEC, check_vma=False)


def layer(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Projections around a kernel, so that there is something to communicate."""

    def run(weights: Any, x: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("bsd,dhk->bhsk", x, weights[name]) for name in "qkv")
        return jnp.mean(jnp.einsum("bhsk,dhk->bsd", attention(q, k, v), weights["o"]).astype(jnp.float32) ** 2)

    return run


def main() -> None:
    weight = jax.ShapeDtypeStruct((WIDTH, HEADS, HEAD), jnp.bfloat16)
    args = dict.fromkeys("qkvo", weight), jax.ShapeDtypeStruct((BATCH, SEQ, WIDTH), jnp.bfloat16)
    results = {}
    for kernel in (flash, splash):
        for place, attention in (("bare", kernel), ("in shard_map", in_shard_map(kernel))):
            for what, fn in (("forward", layer(attention)), ("gradient", jax.grad(layer(attention)))):
                name = f"{kernel.__name__} {place} {what}"
                if os.environ.get("KERNELS", "") not in name:
                    continue
                where: dict[str, Any] = {"mesh": MESH, "topology": "v5e:2x4", "budget_evals": 60}
                plan = shardwise.plan(fn, *args, **where)
                found = shardwise.verify(plan, fn, *args, backend="v5e:2x4")
                moved = sum(row.predicted_bytes for row in found.rows)
                results[name] = found.matched, moved
    print(json.dumps(results))


if __name__ == "__main__":
    main()
