"""Convolutions that XLA's partitioner gets wrong are planned around."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.dims.analysis import analyze_program
from shardwise.hardware.mesh import MeshAxes
from shardwise.partitioner.faults import CONVOLUTION, fails_convolution
from shardwise.planner.planning import plan_decisions
from tests.planner.test_apply import MESHES, random_decisions

LAYOUT = ("NHWC", "HWIO", "NHWC")


def gradients(stride: int, groups: int):
    def convolve(x, w, stride, groups=1):
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=LAYOUT, feature_group_count=groups
        )

    def loss(x, w, v):
        return jnp.sum(jnp.tanh(convolve(jnp.tanh(convolve(x, w, stride, groups)), v, 1)) ** 2)

    return jax.value_and_grad(loss, (0, 1, 2))


def arguments(groups: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    shapes = ((8, 16, 16, 16), (3, 3, 16 // groups, 16), (3, 3, 16, 8))
    return [0.3 * draw.standard_normal(shape, np.float32) for shape in shapes]


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 16])
def test_gradients_equal_the_plain_run(stride: int, groups: int) -> None:
    fn, args = gradients(stride, groups), arguments(groups)
    traced = trace(fn, tuple(args), {}, JitOptions())
    analysis = analyze_program(lower(traced))
    want = jax.tree.leaves(jax.jit(fn)(*args))
    for mesh in MESHES:
        for seed in (3, 8):
            axes = MeshAxes.of(mesh)
            decisions = random_decisions(analysis, axes, seed)
            have = jax.tree.leaves(plan_decisions(traced, analysis, axes, decisions).jit(fn)(*args))
            for a, b in zip(want, have, strict=True):
                np.testing.assert_allclose(b, a, rtol=1e-3, atol=1e-3 * np.abs(a).max(), err_msg=str(decisions))


def test_what_fails() -> None:
    program = lower(trace(gradients(1, 1), tuple(arguments(1)), {}, JitOptions()))
    rules = [op.rule for op in program.ops if op.kind == CONVOLUTION]
    forward = rules[0]
    weights = next(r for r in rules if any(w.of < 2 and w.by < 2 for w in r.windows))
    mesh = MeshAxes.of({"x": 2, "y": 4})

    def assigned(rule, **axes: tuple[int, int] | None):
        """Axes by (tensor, dimension)."""
        made: list[tuple[int, ...]] = [()] * len(rule.factors)
        for name, place in axes.items():
            if place is not None:
                made[rule.tensors[place[0]][place[1]][0]] += ("xy".index(name),)
        return made

    rows, batch, features = (0, 1), (0, 0), (2, 3)
    assert fails_convolution(forward, assigned(forward, x=rows, y=features), mesh)
    assert not fails_convolution(forward, assigned(forward, x=rows, y=batch), mesh)
    assert not fails_convolution(forward, assigned(forward, x=rows), mesh)
    assert not fails_convolution(forward, assigned(forward, x=batch, y=features), mesh)
    assert fails_convolution(weights, assigned(weights, x=rows), mesh)
    assert not fails_convolution(weights, assigned(weights, x=rows), MeshAxes.of({"x": 2}))
