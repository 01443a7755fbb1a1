"""Equinox layers, and the solvers built on Equinox: Diffrax, Lineax, Optimistix."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .program import (
    Program,
    Step,
    apart,
    conflicts,
    deciding_groups,
    exactly,
    loop,
    one_color,
    shape,
    tokens,
    training,
)

BATCH, SEQ, MODEL, HEADS, HIDDEN = 16, 128, 512, 8, 2048

CALLBACKS = {"pure_callback": "eqx.error_if calls Python to raise"}


def _split(model: Any) -> tuple[Any, Any]:
    import equinox as eqx

    return eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))


def attention_block() -> tuple[Step, tuple[Any, ...]]:
    import equinox as eqx

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        rope: eqx.nn.RotaryPositionalEmbedding
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __init__(self, key: jax.Array):
            self.attention = eqx.nn.MultiheadAttention(HEADS, MODEL, key=key)
            self.rope = eqx.nn.RotaryPositionalEmbedding(MODEL // HEADS)
            self.norm = eqx.nn.LayerNorm(MODEL)
            self.mlp = eqx.nn.MLP(MODEL, MODEL, HIDDEN, 1, jax.nn.gelu, key=key)

        def __call__(self, x: jax.Array) -> jax.Array:
            def rotate(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
                turn = jax.vmap(self.rope, in_axes=1, out_axes=1)
                return turn(q), turn(k), v

            y = jax.vmap(self.norm)(x)
            x = x + self.attention(y, y, y, process_heads=rotate)
            return x + jax.vmap(self.mlp)(x)

    params, static = _split(eqx.filter_eval_shape(Block, jax.random.key(0)))

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(eqx.combine(params, static))(batch) ** 2)

    return training(loss, optax.adam(1e-3), params, shape(BATCH, SEQ, MODEL))


def recurrent_classifier() -> tuple[Step, tuple[Any, ...]]:
    import equinox as eqx

    class RNN(eqx.Module):
        """The model of Equinox's RNN example."""

        cell: eqx.nn.GRUCell
        linear: eqx.nn.Linear
        bias: jax.Array

        def __init__(self, key: jax.Array):
            self.cell = eqx.nn.GRUCell(32, 256, key=key)
            self.linear = eqx.nn.Linear(256, 10, use_bias=False, key=key)
            self.bias = jnp.zeros(10)

        def __call__(self, xs: jax.Array) -> jax.Array:
            def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
                return self.cell(x, carry), None

            out, _ = jax.lax.scan(step, jnp.zeros(self.cell.hidden_size), xs)
            return self.linear(out) + self.bias

    params, static = _split(eqx.filter_eval_shape(RNN, jax.random.key(0)))

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = jax.vmap(eqx.combine(params, static))(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return training(loss, optax.adam(1e-3), params, {"x": shape(128, 64, 32), "y": tokens(128)})


def neural_ode() -> tuple[Step, tuple[Any, ...]]:
    import diffrax
    import equinox as eqx

    class Field(eqx.Module):
        mlp: eqx.nn.MLP

        def __call__(self, t: jax.Array, y: jax.Array, args: Any) -> jax.Array:
            return self.mlp(y)

    def make(key: jax.Array) -> Field:
        return Field(eqx.nn.MLP(64, 64, 256, 2, jax.nn.softplus, key=key))

    params, static = _split(eqx.filter_eval_shape(make, jax.random.key(0)))

    def loss(params: Any, batch: Any) -> jax.Array:
        def solve(start: jax.Array) -> jax.Array:
            return diffrax.diffeqsolve(
                diffrax.ODETerm(eqx.combine(params, static)),
                diffrax.Tsit5(),
                t0=0.0,
                t1=1.0,
                dt0=0.1,
                y0=start,
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
                saveat=diffrax.SaveAt(ts=batch["ts"]),
                max_steps=64,
            ).ys

        return jnp.mean((jax.vmap(solve)(batch["ys"][:, 0]) - batch["ys"]) ** 2)

    batch = {"ts": shape(20), "ys": shape(512, 20, 64)}
    return training(loss, optax.adabelief(3e-3), params, batch)


def linear_solve() -> tuple[Step, tuple[Any, ...]]:
    import lineax

    def loss(matrix: jax.Array, vector: jax.Array) -> jax.Array:
        def solve(a: jax.Array, b: jax.Array) -> jax.Array:
            operator = lineax.MatrixLinearOperator(a, lineax.positive_semidefinite_tag)
            return lineax.linear_solve(operator, b, lineax.CG(rtol=1e-5, atol=1e-5)).value

        return jnp.sum(jax.vmap(solve)(matrix, vector) ** 2)

    return jax.grad(loss, argnums=(0, 1)), (shape(64, 128, 128), shape(64, 128))


def least_squares() -> tuple[Step, tuple[Any, ...]]:
    import optimistix

    def fit(weights: jax.Array, features: jax.Array, targets: jax.Array) -> jax.Array:
        def residuals(w: jax.Array, data: Any) -> jax.Array:
            return jax.nn.sigmoid(data[0] @ w) - data[1]

        solver = optimistix.LevenbergMarquardt(rtol=1e-3, atol=1e-3)
        data = features, targets
        return optimistix.least_squares(residuals, solver, weights, args=data, max_steps=32, throw=False).value

    return fit, (shape(128), shape(4096, 128), shape(4096))


PROGRAMS = (
    Program(
        "equinox-attention",
        "equinox",
        "MultiheadAttention with rotary embedding, LayerNorm and MLP under vmap, Adam",
        attention_block,
        (
            exactly("batch[0]"),
            exactly("batch[1]"),
            one_color("batch[2]", "params/attention/query_proj/weight[1]", "params/attention/output_proj/weight[0]"),
            one_color("params/attention/query_proj/weight[0]", "params/attention/output_proj/weight[1]"),
            conflicts(1, 1, "batch[1]"),
            deciding_groups(5),
        ),
    ),
    Program(
        "equinox-recurrent",
        "equinox",
        "the RNN example: GRUCell in a scan under vmap, Adam",
        recurrent_classifier,
        (
            exactly("batch/x[0]", "batch/y[0]"),
            loop("batch/x[1]"),
            one_color("batch/x[2]", "params/cell/weight_ih[1]"),
            one_color("params/linear/weight[0]", "params/bias[0]"),
            apart("batch/x[0]", "batch/x[2]", "params/cell/weight_hh[1]", "params/bias[0]"),
            conflicts(1, 1, "params/cell/weight_hh[1]"),
        ),
    ),
    Program(
        "diffrax-neural-ode",
        "diffrax",
        "a neural ODE, adaptive Tsit5 with recursive checkpointing under vmap, AdaBelief",
        neural_ode,
        (
            exactly("batch/ys[0]"),
            one_color("batch/ys[2]", "params/mlp/layers/0/weight[1]"),
            apart("batch/ys[0]", "batch/ys[1]", "batch/ys[2]", "params/mlp/layers/0/weight[0]"),
            one_color(
                "params/mlp/layers/0/weight[0]", "params/mlp/layers/1/weight[1]", "state/0/mu/mlp/layers/0/bias[0]"
            ),
        ),
        opaque=CALLBACKS,
    ),
    Program(
        "lineax-solve",
        "lineax",
        "a batch of conjugate-gradient solves and their implicit gradient",
        linear_solve,
        (
            exactly("matrix[0]", "vector[0]"),
            one_color("matrix[1]", "matrix[2]", "vector[1]"),
            apart("matrix[0]", "matrix[1]"),
        ),
        opaque=CALLBACKS,
    ),
    Program(
        "optimistix-least-squares",
        "optimistix",
        "logistic least squares by Levenberg-Marquardt",
        least_squares,
        (one_color("features[0]", "targets[0]"), one_color("features[1]", "weights[0]")),
        opaque=CALLBACKS,
    ),
)
