"""Facts about a program that do not depend on a state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.dims.analysis import analyze_program
from shardwise.lowering.structure import Structure


def test_gradients_that_a_loop_adds_up_are_accumulated_and_its_activations_are_not() -> None:
    """A product that is added to a carry, also after a cast; not one that the next trip multiplies."""

    def step(w: Any, xs: Any) -> Any:
        def body(carry: Any, x: Any) -> tuple[Any, None]:
            total, h = carry
            return (total + (x.T @ x).astype("float32"), h @ w), None

        return jax.lax.scan(body, (jnp.zeros((8, 8), "float32"), w), xs)[0]

    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in [(8, 8), (4, 16, 8)]]
    structure = Structure(analyze_program(lower(trace(step, tuple(shapes), {}, JitOptions()))))
    ops, definitions = structure.program.ops, structure.program.definitions
    kinds = sorted(ops[definitions[v][0]].kind for v in structure.added_to)
    assert kinds == ["convert_element_type", "dot_general"]
