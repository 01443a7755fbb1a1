"""Optax's losses, line searches and contributed optimizers, each optimizer on the same small network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .program import Fact, Program, Step, apart, conflicts, exactly, no_conflict, one_color, shape, tokens, training


def ctc() -> tuple[Step, tuple[Any, ...]]:
    def loss(logits: jax.Array, padding: jax.Array, labels: jax.Array, label_padding: jax.Array) -> jax.Array:
        return optax.ctc_loss(logits, padding, labels, label_padding).mean()

    return jax.value_and_grad(loss), (shape(32, 400, 1024), shape(32, 400), tokens(32, 60), shape(32, 60))


def contrastive() -> tuple[Step, tuple[Any, ...]]:
    def loss(embeddings: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.losses.ntxent(embeddings, labels)

    return jax.value_and_grad(loss), (shape(128, 64), tokens(128))


def segmentation() -> tuple[Step, tuple[Any, ...]]:
    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        focal = optax.losses.sigmoid_focal_loss(logits, labels).mean()
        return focal + optax.losses.dice_loss(logits, labels).mean()

    return jax.value_and_grad(loss), (shape(16, 64, 64, 8), shape(16, 64, 64, 8))


def ranking() -> tuple[Step, tuple[Any, ...]]:
    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.losses.ranking_softmax_loss(logits, labels) + optax.losses.sparsemax_loss(logits, labels).mean()

    return jax.value_and_grad(loss), (shape(256, 128), shape(256, 128))


def assignment() -> tuple[Step, tuple[Any, ...]]:
    def assign(costs: jax.Array) -> Any:
        return jax.vmap(optax.assignment.hungarian_algorithm)(costs)

    return assign, (shape(32, 36, 36),)


def _logistic(weights: jax.Array, features: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.logaddexp(0, -labels * (features @ weights)).mean()


def lbfgs() -> tuple[Step, tuple[Any, ...]]:
    optimizer = optax.lbfgs()

    def step(weights: jax.Array, state: Any, features: jax.Array, labels: jax.Array) -> Any:
        value, gradient = optax.value_and_grad_from_state(_logistic)(weights, features, labels, state=state)
        updates, state = optimizer.update(
            gradient, state, weights, value=value, grad=gradient, value_fn=_logistic, features=features, labels=labels
        )
        return optax.apply_updates(weights, updates), state

    weights = shape(1024)
    return step, (weights, jax.eval_shape(optimizer.init, weights), shape(4096, 1024), shape(4096))


def network_with(optimizer: Callable[[], optax.GradientTransformation]) -> tuple[Step, tuple[Any, ...]]:
    """``x[B,D] W1[D,F] W2[F,E]``: four colors, whatever the optimizer does with gradients and moments."""
    params = {"up": shape(256, 1024), "bias": shape(1024), "down": shape(1024, 64)}

    def loss(p: Any, batch: Any) -> jax.Array:
        return jnp.mean((jax.nn.gelu(batch["x"] @ p["up"] + p["bias"]) @ p["down"] - batch["y"]) ** 2)

    return training(loss, optimizer(), params, {"x": shape(128, 256), "y": shape(128, 64)})


def sharpness_aware() -> tuple[Step, tuple[Any, ...]]:
    """SAM in its opaque mode, which takes gradients inside the update."""
    params = {"up": shape(256, 1024), "bias": shape(1024), "down": shape(1024, 64)}
    optimizer = optax.contrib.sam(
        optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), opaque_mode=True
    )

    def loss(p: Any, batch: Any) -> jax.Array:
        return jnp.mean((jax.nn.gelu(batch["x"] @ p["up"] + p["bias"]) @ p["down"] - batch["y"]) ** 2)

    def step(params: Any, state: Any, batch: Any) -> Any:
        gradient = jax.grad(loss)
        updates, state = optimizer.update(
            gradient(params, batch), state, params, grad_fn=lambda p, _: gradient(p, batch)
        )
        return optax.apply_updates(params, updates), state

    batch = {"x": shape(128, 256), "y": shape(128, 64)}
    return step, (params, jax.eval_shape(optimizer.init, params), batch)


_FOUR_COLORS = (
    exactly("batch/x[0]", "batch/y[0]"),
    one_color("batch/x[1]", "params/up[0]"),
    one_color("params/up[1]", "params/bias[0]", "params/down[0]"),
    one_color("batch/y[1]", "params/down[1]"),
    apart("batch/x[0]", "batch/x[1]", "params/bias[0]", "batch/y[1]"),
)


def _optimizer(name: str, make: Callable[[], optax.GradientTransformation], *facts: Fact) -> Program:
    what = f"{name} on a two-layer network"
    return Program(f"optax-{name}", "optax", what, partial(network_with, make), (*_FOUR_COLORS, *facts))


def _moments(*prefixes: str) -> Fact:
    return one_color("params/up[1]", *(f"state/{prefix}/up[1]" for prefix in prefixes))


PROGRAMS = (
    Program(
        "optax-ctc",
        "optax",
        "connectionist temporal classification and its gradient",
        ctc,
        (
            exactly("logits[0]", "padding[0]", "labels[0]", "label_padding[0]"),
            one_color("logits[1]", "padding[1]"),
            apart("logits[0]", "logits[1]", "logits[2]", "labels[1]"),
            no_conflict(),
        ),
    ),
    Program(
        "optax-ntxent",
        "optax",
        "the contrastive loss: every example against every other",
        contrastive,
        (exactly("embeddings[0]", "labels[0]"), exactly("embeddings[1]"), conflicts(1, 1, "embeddings[0]")),
    ),
    Program(
        "optax-segmentation",
        "optax",
        "sigmoid focal loss and Dice loss",
        segmentation,
        (*(exactly(f"logits[{d}]", f"labels[{d}]") for d in range(4)), no_conflict()),
    ),
    Program(
        "optax-ranking",
        "optax",
        "ranking softmax and sparsemax losses (a sort)",
        ranking,
        (exactly("logits[0]", "labels[0]"), one_color("logits[1]", "labels[1]"), no_conflict()),
    ),
    Program(
        "optax-assignment",
        "optax",
        "the Hungarian algorithm, a while loop in a loop, under vmap",
        assignment,
        (exactly("costs[0]"), apart("costs[0]", "costs[1]", "costs[2]"), no_conflict()),
    ),
    Program(
        "optax-lbfgs",
        "optax",
        "L-BFGS with a zoom line search on logistic regression",
        lbfgs,
        (
            exactly("features[0]", "labels[0]"),
            one_color("weights[0]", "features[1]", "state/0/diff_params_memory[1]", "state/0/diff_updates_memory[1]"),
            no_conflict(),
        ),
    ),
    _optimizer("adafactor", lambda: optax.adafactor(1e-3), no_conflict()),
    _optimizer("ademamix", lambda: optax.contrib.ademamix(1e-3), no_conflict(), _moments("0/m1", "0/m2", "0/nu")),
    _optimizer("cocob", lambda: optax.contrib.cocob(1e-3), no_conflict()),
    _optimizer("galore", lambda: optax.contrib.galore(1e-3, rank=32), no_conflict()),
    _optimizer("lion", lambda: optax.lion(1e-3), no_conflict(), _moments("0/mu")),
    _optimizer("mechanic", lambda: optax.contrib.mechanize(optax.adam(1e-3)), no_conflict()),
    _optimizer("muon", lambda: optax.contrib.muon(1e-3), conflicts(2, 2, "params/up[0]", "params/down[1]")),
    _optimizer("novograd", lambda: optax.novograd(1e-3), no_conflict()),
    _optimizer("prodigy", lambda: optax.contrib.prodigy(), no_conflict()),
    _optimizer("schedule-free", lambda: optax.contrib.schedule_free_adamw(1e-3), no_conflict(), _moments("z")),
    _optimizer("sm3", lambda: optax.sm3(1e-3), no_conflict()),
    Program(
        "optax-sam",
        "optax",
        "sharpness-aware minimization: gradients inside the update",
        sharpness_aware,
        (*_FOUR_COLORS, no_conflict()),
    ),
)
