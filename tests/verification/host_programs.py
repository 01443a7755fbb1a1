"""Programs on eight host devices whose collectives are known by thought; prints what the reader finds in each."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shardwise.errors import CompileError
from tests.verification.compiling import compile_step

GRID = {"data": 2, "model": 4}
B, D, F, L = 16, 8, 32, 5


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def mlp(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ weights[0]) @ weights[1]


def gradient(weights: Any, x: jax.Array) -> Any:
    return jax.grad(lambda w, x: jnp.sum(mlp(w, x) ** 2))(weights, x)


def fsdp(weights: Any, x: jax.Array) -> Any:
    def loss(weights: Any, x: jax.Array) -> jax.Array:
        hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ weights[0]), P("data"))
        return jnp.sum(jax.lax.with_sharding_constraint(hidden @ weights[1], P("data")) ** 2)

    return jax.grad(loss)(weights, x)


def layers(weights: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (mlp(w, x), None), x, weights)[0]


def twice(weights: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (layers(weights, x), None), x, length=3)[0]


def until_small(weights: Any, x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: mlp(weights, x), x)


def narrow(weights: Any, x: jax.Array) -> jax.Array:
    return mlp(jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights), x)


W, X = (shape(D, F), shape(F, D)), shape(B, D)
STACKED = (shape(L, D, F), shape(L, F, D))
COLUMN_ROW = (P(None, "model"), P("model"))
STACKED_SPECS = (P(None, None, "model"), P(None, "model"))
NARROW_X = shape(B, D, dtype=jnp.bfloat16)

PROGRAMS: dict[str, dict[str, Any]] = {
    "data parallel": dict(
        fn=gradient, args=(W, X), in_shardings=((P(), P()), P("data")), out_shardings=P(), mesh={"data": 8}
    ),
    "megatron": dict(fn=mlp, args=(W, X), in_shardings=(COLUMN_ROW, P("data")), out_shardings=P("data")),
    "megatron in 16 bits": dict(
        fn=narrow, args=(W, NARROW_X), in_shardings=(COLUMN_ROW, P("data")), out_shardings=P("data")
    ),
    "fsdp": dict(
        fn=fsdp,
        args=(W, X),
        in_shardings=((P("data"), P("data")), P("data")),
        out_shardings=(P("data"), P("data")),
        mesh={"data": 8},
    ),
    "reshard": dict(fn=jnp.sin, args=(shape(64, 64),), in_shardings=P("model"), out_shardings=P(None, "model")),
    "gather": dict(fn=jnp.sin, args=(shape(64, 64),), in_shardings=P("model"), out_shardings=P()),
    "scan": dict(fn=layers, args=(STACKED, X), in_shardings=(STACKED_SPECS, P("data")), out_shardings=P("data")),
    "nested scans": dict(fn=twice, args=(STACKED, X), in_shardings=(STACKED_SPECS, P("data")), out_shardings=P("data")),
    "while": dict(fn=until_small, args=(W, X), in_shardings=(COLUMN_ROW, P()), out_shardings=P()),
    "two axes": dict(
        fn=lambda x: jnp.max(x, axis=0), args=(shape(16, 4),), in_shardings=P(("data", "model")), out_shardings=P()
    ),
    "nothing": dict(fn=jnp.sin, args=(X,), in_shardings=P("data", "model"), out_shardings=P("data", "model")),
    "donated": dict(
        fn=jnp.sin, args=(shape(64, 64),), in_shardings=P("data"), out_shardings=P("data"), donate_argnums=0
    ),
}


def main() -> None:
    results: dict[str, Any] = {}
    for name, program in PROGRAMS.items():
        results[name] = compile_step(**{"mesh": GRID} | program)
    try:
        compile_step(mlp, (W, X), mesh={"data": 16})
    except CompileError as error:
        results["too many devices"] = {"error": str(error)}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
