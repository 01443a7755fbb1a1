"""Random programs under random decisions: what the devices compute equals the plain run.

``SHARDWISE_FUZZ`` is the number of programs, and ``SHARDWISE_FUZZ_FROM`` the number of the first. Floats agree within
``TOLERANCE`` times the largest magnitude of that output (at least 1, the scale of the arguments); integers agree exactly.
"""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.dims.analysis import analyze_program
from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.decisions import Shard
from tests.fuzz.generate import Drawn, arguments, draw, random_decisions, with_rings
from tests.planner.decisions import plan_decisions

MESHES = ({"x": 8}, {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2})
TOLERANCE = 5e-5
PROGRAMS = int(os.environ.get("SHARDWISE_FUZZ", "500"))
FIRST = int(os.environ.get("SHARDWISE_FUZZ_FROM", "0"))
#: Programs in one test.
PART = 25


def differences(expected: Any, found: Any) -> list[str]:
    """The outputs that disagree, in words."""
    wrong = []
    for k, (want, have) in enumerate(zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)):
        want, have = np.asarray(want), np.asarray(have)
        assert want.shape == have.shape and want.dtype == have.dtype
        exact = not np.issubdtype(want.dtype, np.floating)
        finite = np.nan_to_num(want.astype(np.float64), posinf=0.0, neginf=0.0)
        scale = max(1.0, float(np.max(np.abs(finite), initial=0)))
        same = (want == have) | (np.isnan(want) & np.isnan(have))
        off = np.where(same, 0.0, np.abs(have.astype(np.float64) - want))
        if not np.all(off <= (0 if exact else TOLERANCE * scale)):
            at = np.unravel_index(np.argmax(np.nan_to_num(off, nan=np.inf)), off.shape)
            where = ", ".join(map(str, at))
            wrong.append(f"output {k} {want.shape}: {have[at]} at [{where}] for {want[at]}, scale {scale:.3g}")
    return wrong


def check(drawn: Drawn, seed: int, meshes: Sequence[Any] = MESHES) -> None:
    fn, shapes = drawn.function()
    args = arguments(shapes, seed)
    donated = tuple(range(len(args))) if drawn.donated else ()
    traced = trace(fn, tuple(shapes), {}, JitOptions(donate_argnums=donated))
    analysis = analyze_program(lower(traced))
    expected = jax.device_get(jax.jit(fn)(*args))
    for number, mesh in enumerate(meshes):
        axes = MeshAxes.of(mesh)
        decisions = random_decisions(analysis, axes, seed * len(MESHES) + number)
        try:
            plan = plan_decisions(traced, analysis, axes, decisions, with_rings(axes) if seed % 2 else None)
            assert not list(plan.sharded.problems(analysis.program))
            wrong = differences(expected, plan.jit(fn)(*(jax.device_put(a) if donated else a for a in args)))
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            lines = [
                *wrong,
                f"mesh {mesh}, seed {seed}",
                *(f"  {d}" for d in decisions),
                f"reproduce: check({drawn!r}, {seed})",
                str(traced.jaxpr),
            ]
            pytest.fail("\n".join(lines), pytrace=False)


def wrong_together(numbers: Sequence[int], mesh: Any) -> list[str]:
    """Where programs disagree with their plain runs. They are compiled as one program, which takes less than half of the
    time."""
    calls, plain, planned, axes = [], [], [], MeshAxes.of(mesh)
    for number in numbers:
        fn, shapes = draw(number).function()
        traced = trace(fn, tuple(shapes), {}, JitOptions())
        analysis = analyze_program(lower(traced))
        decisions = random_decisions(analysis, axes, number * len(MESHES))
        plan = plan_decisions(traced, analysis, axes, decisions, with_rings(axes) if number % 2 else None)
        assert not list(plan.sharded.problems(analysis.program))
        calls.append(arguments(shapes, number))
        plain.append(fn)
        planned.append(plan.jit(fn).inline)

    def run(functions: Any) -> Any:
        pairs = jax.jit(lambda calls: [fn(*args) for fn, args in zip(functions, calls, strict=True)])
        return jax.device_get(pairs(calls))

    return differences(run(plain), run(planned))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("first", range(FIRST, FIRST + PROGRAMS, PART))
def test_random_programs(first: int) -> None:
    numbers = range(first, min(first + PART, FIRST + PROGRAMS))
    for k, mesh in enumerate(MESHES):
        on_mesh = [n for n in numbers if n % len(MESHES) == k]
        alone = [n for n in on_mesh if draw(n).donated]
        together = [n for n in on_mesh if n not in alone]
        try:
            wrong = wrong_together(together, mesh)
        except Exception:
            wrong = [traceback.format_exc()]
        for number in on_mesh if wrong else alone:  # one by one, to say which program it is
            check(draw(number), number, [mesh])
        if wrong:
            lines = [f"{together} on {mesh} agree alone and not together", *wrong]
            pytest.fail("\n".join(lines), pytrace=False)


FOUND = {
    # XLA refuses a shard_map whose operands are all empty.
    "empty": (Drawn(((3, 8, 8), (0,)), (("transpose", 42, 8, 20, 36), ("binary", 10, 44, 5, 27)), 3), 146),
    # XLA's partitioner clamps the start of a dynamic slice by the size of a shard (see partitioner/quirks.py).
    "dynamic_slice": (Drawn(((8,),), (("dynamic_slice", 0, 4, 0, 0), ("outer", 0, 0, 0, 0)), 0), 78),
    # XLA's partitioner, for a product over an axis that its result is scattered on while the operands' other axes are not
    # those of the result: P(None, "x") @ P("x", None) to P("x", ("z", "y")) is wrong (see partitioner/quirks.py).
    "product": (
        Drawn(
            shapes=((3, 24), (2,)),
            steps=(
                ("linear", 19, 37, 62, 42),
                ("dot", 47, 28, 36, 4),
                ("linear", 17, 14, 36, 44),
                ("concatenate", 43, 31, 45, 62),
                ("expand", 47, 32, 50, 29),
                ("update", 46, 21, 46, 35),
                ("sort", 1, 10, 37, 9),
                ("transpose", 21, 51, 43, 29),
            ),
            form=0,
        ),
        5070,
    ),
    # The same fault, where the use of a batched product reduces it whole and is stored on an axis that it was summed over.
    "batched product": (
        Drawn(
            shapes=((8,), (16, 16), (8, 4, 24)),
            steps=(
                ("update", 29, 51, 12, 27),
                ("remat", 15, 21, 43, 41),
                ("cond", 35, 9, 1, 3),
                ("where", 38, 14, 1, 25),
                ("dot", 14, 10, 44, 32),
                ("update", 29, 51, 12, 27),
                ("outer", 32, 61, 30, 6),
                ("unary", 35, 3, 12, 31),
                ("where", 26, 55, 47, 58),
            ),
            form=0,
        ),
        9051,
    ),
    # XLA's partitioner slices more than there is of a gather whose indices lie on an axis that its result has elsewhere.
    "gather": (
        Drawn(
            shapes=((8,), (8,)),
            steps=(
                ("outer", 14, 30, 42, 24),
                ("outer", 14, 30, 42, 24),
                ("dynamic_slice", 16, 20, 52, 62),
                ("reduce", 25, 22, 26, 56),
                ("gather", 12, 55, 37, 24),
                ("transpose", 11, 39, 17, 60),
                ("causal", 1, 3, 23, 41),
                ("fori", 21, 21, 46, 41),
            ),
            form=1,
        ),
        709,
    ),
    # XLA's plain run merged the slices of slices, and clamped the sum of their starts; the devices were right.
    "slice of slice": (
        Drawn(
            shapes=((24,),),
            steps=(
                ("dynamic_slice", 28, 52, 30, 6),
                ("remat", 23, 4, 43, 42),
                ("dynamic_slice", 13, 26, 47, 52),
                ("dot", 57, 22, 8, 60),
                ("flip", 41, 44, 29, 16),
                ("slice", 21, 22, 32, 9),
            ),
            form=0,
        ),
        17291,
        MESHES[2:],
    ),
    "slice of slice, solved": (
        Drawn(
            shapes=((24, 16, 4),),
            steps=(
                ("dynamic_slice", 55, 1, 7, 3),
                ("dynamic_slice", 38, 51, 61, 44),
                ("split", 52, 55, 13, 28),
                ("recur", 42, 10, 41, 61),
                ("recur", 1, 33, 44, 32),
                ("linalg", 13, 59, 62, 10),
            ),
            form=0,
        ),
        10650,
        MESHES[:1],
    ),
    # A scatter of one row into no rows looked the old row up.
    "scatter into nothing": (
        Drawn(
            ((0, 5),), (("where", 2, 61, 63, 27), ("scatter_other", 30, 24, 40, 57), ("broadcasted", 46, 34, 5, 9)), 4
        ),
        5505,
        MESHES[:1],
    ),
    # An all-to-all of an empty array was reshaped to an unknown number of parts.
    "all-to-all of nothing": (
        Drawn(
            ((0, 8), (3, 4)),
            (
                ("outer", 59, 10, 28, 30),
                ("integers", 46, 45, 63, 2),
                ("softmax", 52, 62, 60, 40),
                ("noise", 57, 37, 25, 1),
            ),
            1,
        ),
        7183,
        MESHES[1:2],
    ),
    # XLA returns an empty result whole on every device although a sharding is asked for.
    "sharded result of nothing": (Drawn(((0, 16),), (("layer_norm", 37, 32, 6, 45),), 0), 35992, MESHES[1:2]),
    # JAX defines no gradient of a scatter into an empty array, nor of its Fourier transform, nor that transform itself in a
    # compiled program: the steps are skipped.
    "gradient of a scatter into nothing": (
        Drawn(
            ((0, 8),),
            (("binary", 27, 24, 3, 32), ("dynamic_slice", 19, 49, 41, 20), ("scatter_other", 4, 54, 24, 6)),
            1,
        ),
        11351,
    ),
    "gradient of a transform of nothing": (
        Drawn(
            shapes=((8, 2, 8), (0, 12, 12)),
            steps=(
                ("switch", 56, 12, 8, 4),
                ("derivative", 51, 57, 30, 28),
                ("whole_numbers", 7, 2, 36, 53),
                ("remat", 45, 0, 62, 5),
                ("fft", 46, 9, 21, 17),
                ("binary", 8, 52, 13, 7),
            ),
            form=3,
        ),
        19157,
        MESHES[1:2],
    ),
    "transform of nothing": (
        Drawn(((0,),), (("along", 10, 48, 22, 34), ("fft", 55, 27, 43, 16), ("unary", 59, 41, 57, 63)), 4),
        9020,
    ),
}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("name", FOUND)
def test_found_before(name: str) -> None:
    check(*FOUND[name])


@pytest.mark.parametrize("start", [0, 3, 6, 9, -2, -20])
def test_dynamic_slices_start_where_the_op_says(start: int) -> None:
    def fn(x: Any, start: Any) -> Any:
        return jax.lax.dynamic_slice(x, (start, 0), (4, 4))

    args = (np.arange(64, dtype=np.float32).reshape(8, 8), np.int32(start))
    traced = trace(fn, args, {}, JitOptions())
    analysis = analyze_program(lower(traced))
    axes = MeshAxes.of({"x": 2, "y": 4})
    decisions = [Shard(group.colors, axis, ()) for group, axis in zip(analysis.groups, "xyxyxy", strict=False)]
    plan = plan_decisions(traced, analysis, axes, decisions)
    assert any(plan.outputs[0].spec)
    assert not differences(jax.jit(fn)(*args), plan.jit(fn)(*args))


@pytest.mark.parametrize("starts", [(0, 0), (20, 1), (3, 20), (20, 20), (-9, 2), (9, -9)], ids=str)
def test_slices_of_slices_clamp_each_start(starts: tuple[int, int]) -> None:
    """Against the run op by op: XLA's own compilation of the plain function clamps the sum of both starts."""

    def fn(x: Any, starts: Any) -> Any:
        half = jax.lax.dynamic_slice(x, (starts[0], 0), (12, 8))
        return jax.lax.dynamic_slice(half, (starts[1], 0), (6, 8)) * 2

    args = (np.arange(192, dtype=np.float32).reshape(24, 8), np.array(starts, np.int32))
    traced = trace(fn, args, {}, JitOptions())
    analysis = analyze_program(lower(traced))
    for padded in (False, True):
        decisions = [Shard(group.colors, "x", padded=padded) for group in analysis.groups if group.matters]
        plan = plan_decisions(traced, analysis, MeshAxes.of({"x": 4}), decisions)
        assert not differences(fn(*args), plan.jit(fn)(*args))


def test_a_program_has_the_same_results_whenever_it_is_traced() -> None:
    """Results are the values that no later step takes. Here a step takes a reshaped value, which nothing else holds."""
    rng, results = random.Random(0), set()
    for _ in range(60):
        garbage = [object() for _ in range(rng.randrange(2000))]
        del garbage[::2]
        fn, shapes = draw(11482).function()
        results.add(tuple(out.shape for out in jax.tree.leaves(jax.eval_shape(fn, *shapes))))
    assert results == {((), (8,), (16,), (5,))}
