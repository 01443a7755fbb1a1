"""Programs nobody here wrote, sharded by random decisions and run on eight host devices: every output as in the plain run."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.dims.analysis import analyze_program
from shardwise.hardware.mesh import MeshAxes
from shardwise.verification.verify import verify
from tests.fuzz.generate import random_decisions
from tests.planner.decisions import plan_decisions

from .program import Program
from .table import PROGRAMS

#: Models of full size: to run them takes from 5 s to minutes each.
LONG = (
    "linen-language-model linen-recurrent linen-autoencoder nnx-language-model nnx-convolutional equinox-attention "
    "diffrax-neural-ode haiku-resnet50 haiku-mobilenet haiku-lstm haiku-layer-stack haiku-vector-quantizer penzai-llama "
    "penzai-llama-stacked jraph-graph-network optax-ctc optax-lbfgs"
).split()


def _filled(path: tuple[Any, ...], leaf: Any, number: int) -> Any:
    """An array for a shape. Weights (of the first argument of several) are centered, everything else is positive, as second
    moments must be; matrices that are solved for are positive definite, times are in order."""
    draw = np.random.default_rng(number)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(number), leaf.shape) if leaf.shape else jax.random.key(number)
    if leaf.dtype == jnp.bool_ or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return jax.device_put(np.asarray(draw.integers(0, 2, leaf.shape)).astype(leaf.dtype))
    found = draw.normal(size=leaf.shape)
    if len(leaf.shape) == 3 and leaf.shape[1] == leaf.shape[2] and len(path) == 1:
        found = found @ found.transpose(0, 2, 1) / leaf.shape[1] + np.eye(leaf.shape[1])
    elif jax.tree_util.keystr(path).endswith("['ts']"):
        found = np.linspace(0, 1, leaf.shape[0])
    elif path[0].idx == 0 and len(path) > 1:
        found *= 0.3 / np.sqrt(leaf.shape[0] if leaf.shape else 1)
    else:
        found = 0.05 * np.abs(found) + 0.01
    return jax.device_put(np.asarray(found).astype(leaf.dtype))


@pytest.mark.parametrize(
    "program", [pytest.param(p, id=p.name, marks=[pytest.mark.slow] * (p.name in LONG)) for p in PROGRAMS]
)
def test_computes_as_the_plain_run(program: Program) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other packages' own, while they are imported and traced
        fn, shapes = program.build()
        leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
        args = jax.tree.unflatten(tree, [_filled(path, leaf, k) for k, (path, leaf) in enumerate(leaves)])
        traced = trace(fn, shapes, {}, JitOptions())
        analysis, axes = analyze_program(lower(traced)), MeshAxes.of({"x": 2, "y": 4})
        plan = plan_decisions(traced, analysis, axes, random_decisions(analysis, axes, 1))
        assert any(axis for array in (*plan.arguments, *plan.outputs) for axis in array.spec)
        found = verify(plan, fn, *args)
    assert found.agrees, f"{plan.decisions}\n{found}"
