"""Compute seconds: what is one pass, what a product costs, what more hardware buys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardwise
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.cost.clusters import Clusters
from shardwise.cost.compute import Product, kernel_s, product_s, stream_s
from shardwise.cost.kernels import Kernel, kernels
from shardwise.cost.layouts import Layouts
from shardwise.cost.memory import Lifetimes
from shardwise.cost.model import CostModel
from shardwise.dims.analysis import analyze_program
from shardwise.hardware.load import load_profile
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.profile import Profile
from shardwise.lowering.decisions import Keep, Shard, State
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import Lowered, collectives, lower_state
from tests.dims import programs as p

V5E = load_profile("v5e")
#: Round figures: a FLOP and a byte a second, no overheads, no padding.
UNIT = replace(
    V5E,
    matrix_flops_per_s=(("f32", 1.0),),
    matrix_efficiency=1.0,
    matrix_tile=(1, 1, 1),
    memory_bytes_per_s=1.0,
    memory_efficiency=1.0,
    vector_flops_per_s=1e30,
    elements_per_s=1e30,
    launch_s=0.0,
    on_chip_bytes=0,
)


def time_s(lowered: Lowered, kernel: Kernel, profile: Profile) -> float:
    return kernel_s(lowered, kernel, profile, Layouts(lowered.program))


def predicted(
    fn: Callable[..., Any], args: Sequence[Any], shard: Sequence[tuple[str, int]] = (), axis: int = 4
) -> tuple[Lowered, tuple[Kernel, ...]]:
    """The passes of a program whose dimensions (path, number) are sharded on one axis, in order."""
    analysis = shardwise.analyze(fn, *args)
    mesh = MeshAxes.of({"a": axis})
    colors = [analysis.color_of(path, dim) for path, dim in shard]
    state = State(mesh, tuple(Shard((c.id,), "a") for c in colors if c is not None))
    return lower_state(analysis, state, HardwareCost.of(mesh)), kernels(Clusters(analysis.program))


def seconds(made: tuple[Lowered, tuple[Kernel, ...]], profile: Profile) -> list[float]:
    lowered, work = made
    return [time_s(lowered, w, profile) for w in work]


def kinds(made: tuple[Lowered, tuple[Kernel, ...]]) -> list[list[str]]:
    lowered, work = made
    return [[lowered.program.ops[o].kind for o in w.kernels] for w in work]


# Passes.


def test_a_chain_is_one_pass() -> None:
    made = predicted(lambda x: jnp.tanh(x * 2.0) + 1.0, [p.shape(64, 128)])
    assert len(made[1]) == 1
    assert seconds(made, UNIT) == [2 * 64 * 128 * 4.0]  # read once, written once


def test_results_over_one_array_are_one_pass() -> None:
    def update(m, v, g):
        return 0.9 * m + g, 0.9 * v + g * g

    made = predicted(update, [p.shape(64, 128)] * 3)
    assert len(made[1]) == 1
    assert seconds(made, UNIT) == [5 * 64 * 128 * 4.0]


def test_what_needs_a_reduction_is_a_second_pass() -> None:
    made = predicted(lambda x: x / jnp.sum(x, axis=1, keepdims=True), [p.shape(64, 128)])
    assert len(made[1]) == 2
    assert seconds(made, UNIT) == [(64 * 128 + 64) * 4.0, (2 * 64 * 128 + 64) * 4.0]


def test_passes_before_and_after_a_loop_are_not_joined() -> None:
    """A parameter is narrowed for the loop, and updated with what the loop gives: it is read twice."""

    def fn(table, indices, xs):
        narrow = table.astype(jnp.bfloat16)[indices]
        grads = lax.scan(lambda c, x: (c + x * narrow.sum().astype(jnp.float32), None), jnp.zeros((512, 128)), xs)[0]
        return table - grads

    lowered, work = predicted(fn, [p.shape(512, 128), p.shape(16, dtype="int32"), p.shape(4, 512, 128)])
    parts = [{lowered.program.ops[k].kind for k in w.roots} for w in work if w.region == 0]
    assert {"convert_element_type"} in parts and {"sub"} in parts


def test_a_product_takes_its_epilogue() -> None:
    made = predicted(lambda x, w: jnp.maximum(x @ w, 0.0), [p.shape(8, 16), p.shape(16, 32)])
    assert len(made[1]) == 1
    assert seconds(made, UNIT) == [2.0 * 8 * 16 * 32]


def test_two_products_are_two_passes() -> None:
    made = predicted(lambda x, v, w: (x @ v) @ w, [p.shape(8, 16), p.shape(16, 32), p.shape(32, 4)])
    assert [sorted(w.products) == list(w.products) and len(w.products) for w in made[1]] == [1, 1]


def test_pooling_is_a_pass_beside_its_convolution() -> None:
    def fn(x, w):
        y = jnp.maximum(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")), 0.0)
        return lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    lowered, work = predicted(fn, [p.shape(8, 16, 16, 128), p.shape(3, 3, 128, 128)])
    assert [lowered.program.ops[w.main].kind for w in work] == ["conv_general_dilated", "reduce_window_max"]


def test_an_outer_product_is_computed_where_it_is_used() -> None:
    made = predicted(lambda x, y: jnp.einsum("bi,bj->bij", x, y).sum(0), [p.shape(64, 32), p.shape(64, 16)])
    assert seconds(made, UNIT) == [(64 * 32 + 64 * 16 + 32 * 16) * 4.0]


def test_random_numbers_are_made_where_they_are_used() -> None:
    made = predicted(lambda key, x: x + jax.random.normal(jax.random.key(key), (64, 128)), [0, p.shape(64, 128)])
    key, sweep = seconds(made, UNIT)
    assert (key, sweep) == (4.0 + 8.0, 2 * 64 * 128 * 4.0 + 8.0)


def test_of_a_stacked_value_only_the_slice_is_read() -> None:
    def fn(x, ws):
        return lax.scan(lambda c, w: (c + w, ()), x, ws)[0]

    lowered, work = predicted(fn, [p.shape(64, 128), p.shape(10, 64, 128)])
    (inner,) = [w for w in work if lowered.program.runs[w.region] == 10]
    assert time_s(lowered, inner, UNIT) == 3 * 64 * 128 * 4.0


def test_a_pass_names_the_ops_it_depends_on() -> None:
    lowered, work = predicted(lambda x, w: jnp.maximum(x @ w, 0.0), [p.shape(8, 16), p.shape(16, 32)])
    named = [lowered.program.ops[o].kind for o in work[0].ops]
    assert named == ["dot_general", "max"]


# Products.


def test_a_product_is_bound_by_flops_or_by_bytes() -> None:
    product = Product(2, (8,), (32,), (16,), "float32")
    assert product_s(product, 1.0, UNIT) == 2.0 * 2 * 8 * 32 * 16
    assert product_s(product, 1e6, UNIT) == 1e6


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "waste"),
    [
        ((8,), (128,), (128,), 1.0),
        ((8,), (129,), (128,), 256 / 129),
        ((9,), (128,), (128,), 16 / 9),
        ((128,), (8,), (128,), 1.0),  # the other operand is held
        ((8,), (4, 80), (128,), 128 / 80),  # padded in one dimension
        ((8,), (4, 128), (128,), 1.0),
        ((8,), (128,), (16, 80), 1.0),  # the depth is one run
        ((8,), (128,), (64,), 2.0),
        ((), (128,), (128,), 8.0),
    ],
)
def test_ragged_tiles_cost(
    rows: tuple[int, ...], columns: tuple[int, ...], depth: tuple[int, ...], waste: float
) -> None:
    tiled = replace(UNIT, matrix_tile=(8, 128, 128))
    product = Product(1, rows, columns, depth, "float32")
    assert product_s(product, 0.0, tiled) == pytest.approx(product.flops * waste)


def test_a_convolution_is_a_product_of_its_window() -> None:
    def fn(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    made = predicted(fn, [p.shape(2, 16, 16, 8), p.shape(3, 3, 8, 32)])
    assert seconds(made, UNIT) == [2.0 * (2 * 16 * 16) * 32 * (3 * 3 * 8)]


def test_a_strided_weight_gradient_counts_its_outputs() -> None:
    def fn(x, w):
        y = lax.conv_general_dilated(x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.sum(y)

    lowered, work = predicted(jax.grad(fn, argnums=1), [p.shape(128, 16, 16, 8), p.shape(2, 2, 8, 32)])
    found = [time_s(lowered, w, UNIT) for w in work if w.products]
    assert found == [2.0 * (2 * 2 * 8) * 32 * (128 * 8 * 8)]


# Shardings.


def test_a_sharded_product_is_faster_by_its_parts() -> None:
    args = [p.shape(64, 128), p.shape(128, 256)]
    whole = seconds(predicted(jnp.matmul, args), UNIT)
    parts = seconds(predicted(jnp.matmul, args, [("a", 0)]), UNIT)
    assert parts == [whole[0] / 4] == [2.0 * 16 * 128 * 256]


def test_a_collective_breaks_a_pass() -> None:
    args = [p.shape(2048, 16384), p.shape(16384, 2048)]
    fn = lambda x, w: jnp.maximum(x @ w, 0.0)  # noqa: E731
    (whole,) = seconds(predicted(fn, args), UNIT)
    (parts,) = seconds(predicted(fn, args, [("x", 1)]), UNIT)
    # A quarter of the product; the reduced result is then read, and written once more, by a second kernel.
    assert parts == whole / 4 + 2 * 2048 * 2048 * 4.0


def test_a_gathered_result_is_copied_over_a_donated_argument() -> None:
    fn = lambda w, m: (w + m, m * 0.9)  # noqa: E731
    args = [p.shape(1024, 1024)] * 2
    analysis = analyze_program(lower(trace(fn, args, {}, JitOptions(donate_argnums=(0, 1)))))
    mesh = MeshAxes.of({"a": 4})
    outputs = [analysis.program.values[v].path for v in analysis.program.outputs]
    whole, color = (analysis.program.paths[path] for path in ("w", outputs[0])), analysis.color_of("m", 0)
    assert color is not None
    state = State(mesh, (Shard((color.id,), "a"), Keep(tuple(whole), "a")))
    lowered = lower_state(analysis, state, HardwareCost.of(mesh))
    assert [kind.value for kind, *_ in collectives(lowered)] == ["all-gather"]
    found = [time_s(lowered, w, UNIT) for w in kernels(Clusters(analysis.program)) if w.returned]
    assert found == [2 * 2 * 1024 * 1024 * 4.0, 0.0]  # the argument and the result, each read and written


def test_a_stack_beside_the_donated_one_is_copied_over_it() -> None:
    def fn(cache, x):
        return lax.scan(lambda c, slot: (c, slot + c), x, cache)[1]

    def seconds_of(donate: tuple[int, ...]) -> float:
        args = (p.shape(4, 64, 128), p.shape(64, 128))
        analysis = analyze_program(lower(trace(fn, args, {}, JitOptions(donate_argnums=donate))))
        mesh = MeshAxes.of({"a": 1})
        lowered, runs = lower_state(analysis, State(mesh, ()), HardwareCost.of(mesh)), analysis.program.runs
        return float(sum(runs[w.region] * time_s(lowered, w, UNIT) for w in kernels(Clusters(analysis.program))))

    assert seconds_of((0,)) == seconds_of(()) + 2 * 4 * 64 * 128 * 4.0


def test_products_of_a_library_are_passes_of_their_own() -> None:
    def fn(x, w, y):
        return jnp.tanh(x @ w) + y

    analysis = shardwise.analyze(fn, p.shape(64, 128), p.shape(128, 256), p.shape(64, 256))
    inside, apart = (kernels(Clusters(analysis.program, library)) for library in (False, True))
    assert [len(w.products) for w in inside] == [1]
    assert [(len(w.ops), len(w.products)) for w in apart] == [(1, 1), (2, 0)]


def test_a_library_sees_one_dimension_of_each_role_and_skips_spread_zeros() -> None:
    flat = replace(UNIT, vector_tile=(1, 32), matrix_tile=(128, 128, 1))
    heads = Product(1, (512,), (8, 80), (256,), "float32")
    assert product_s(heads, 0.0, flat) == heads.flops
    assert product_s(heads, 0.0, replace(flat, vector_tile=(8, 128))) == heads.flops * 128 / 80
    spread = replace(heads, zeros=4)
    assert product_s(spread, 0.0, flat) == heads.flops / 4
    assert product_s(spread, 0.0, replace(flat, vector_tile=(8, 128))) == heads.flops * 128 / 80


def test_on_gpus_a_stack_is_filled_with_zeros_first() -> None:
    def fn(x, ws):
        return lax.scan(lambda c, w: (c, jnp.sort(w)), x, ws)[1]

    analysis = shardwise.analyze(fn, p.shape(64, 128), p.shape(4, 64, 128))
    mesh = MeshAxes.of({"a": 1})
    lowered = lower_state(analysis, State(mesh, ()), HardwareCost.of(mesh))
    tiled, flat = (
        sum(time_s(lowered, w, UNIT) for w in kernels(Clusters(analysis.program, library))) for library in (False, True)
    )
    assert flat == tiled + 64 * 128 * 4.0


def test_a_pass_depends_on_its_own_ops_only() -> None:
    def loss(ws, x):
        body = lambda c, w: (jnp.tanh(c @ w) + c, jnp.sum(c))  # noqa: E731
        return jnp.sum(lax.scan(body, x, ws)[0] ** 2)

    args = [p.shape(4, 1024, 1024), p.shape(4096, 1024)]
    for shard in ([("x", 0)], [("x", 0), ("ws", 1)], [("ws", 2)]):
        lowered, work = predicted(jax.value_and_grad(loss), args, shard)
        program = lowered.program
        for w in work:
            near = {v for o in w.ops for v in (*program.ops[o].operands, *program.ops[o].results) if v >= 0}
            alone: Any = SimpleNamespace(
                program=program,
                structure=lowered.structure,
                mesh=lowered.mesh,
                storage={v: lowered.storage[v] for v in near},
                actual={v: lowered.actual[v] for v in near},
                computes={o: lowered.computes[o] for o in w.ops},
                memo=SimpleNamespace(local={}, candidates=lowered.memo.candidates),
            )
            assert time_s(alone, w, V5E) == time_s(lowered, w, V5E)


# Hardware.


@pytest.mark.parametrize(
    "better",
    [
        {"memory_bytes_per_s": V5E.memory_bytes_per_s * 2},
        {"matrix_flops_per_s": tuple((t, 2 * rate) for t, rate in V5E.matrix_flops_per_s)},
        {"vector_flops_per_s": V5E.vector_flops_per_s * 2},
        {"elements_per_s": V5E.elements_per_s * 2},
        {"launch_s": 0.0},
    ],
)
def test_a_better_device_is_never_slower(better: dict[str, Any]) -> None:
    def fn(w, x):
        return x @ w, (jnp.tanh(x) * 2.0).astype(jnp.bfloat16)

    made = predicted(fn, [p.shape(1024, 4096), p.shape(8192, 1024)], [("x", 0)])
    before, after = seconds(made, V5E), seconds(made, replace(V5E, **better))
    assert all(b >= a for b, a in zip(before, after, strict=True))
    assert sum(before) > sum(after) or "vector_flops_per_s" in better


def test_seconds_are_whole_picoseconds() -> None:
    made = predicted(lambda x: jnp.tanh(x) * 3.0, [p.shape(63, 127)])
    (found,) = seconds(made, V5E)
    assert round(found * 1e12) / 1e12 == found > V5E.launch_s


def test_higher_precision_takes_several_products() -> None:
    def times(precision: str) -> float:
        made = predicted(lambda x, w: jnp.dot(x, w, precision=precision), [p.shape(512, 512)] * 2)
        return seconds(made, replace(V5E, launch_s=0.0, memory_bytes_per_s=1e30))[0]

    assert [round(times(precision) / times("default")) for precision in ("high", "highest")] == [3, 6]


def test_a_product_with_one_row_is_a_stream() -> None:
    """``tests/verification/test_tpu.py`` compares with libtpu."""
    device = replace(UNIT, elements_per_s=0.5)
    (vector,) = seconds(predicted(lambda x, w: x @ w, [p.shape(64), p.shape(64, 32)]), device)
    assert vector == (64 + 64 * 32 + 32) * 4.0 + 2 * 64 * 32
    (matrix,) = seconds(predicted(lambda x, w: x @ w, [p.shape(64, 64), p.shape(64, 32)]), device)
    assert matrix == 2.0 * 64 * 64 * 32


def test_what_is_used_soon_stays_on_chip() -> None:
    made = predicted(lambda x, v, w: (x @ v) @ w, [p.shape(8, 16), p.shape(16, 32), p.shape(32, 4)])
    device = replace(UNIT, matrix_flops_per_s=(("f32", 1e30),))
    assert seconds(made, device) == [(8 * 16 + 16 * 32 + 8 * 32) * 4.0, (8 * 32 + 32 * 4 + 8 * 4) * 4.0]
    kept = replace(device, on_chip_bytes=8 * 32 * 4)
    assert seconds(made, kept)[0] == (8 * 16 + 16 * 32) * 4.0
    assert seconds(made, kept)[1] == pytest.approx((32 * 4 + 8 * 4) * 4.0)
    assert seconds(made, replace(kept, on_chip_bytes=8 * 32 * 4 - 1)) == seconds(made, device)


def test_what_is_on_chip_is_read_for_free() -> None:
    made = predicted(lambda x: x / jnp.sum(x, axis=1, keepdims=True), [p.shape(64, 128)])
    assert seconds(made, replace(UNIT, on_chip_bytes=64 * 4)) == [64 * 128 * 4.0, 2 * 64 * 128 * 4.0]


def test_products_start_with_the_kernel_before() -> None:
    """Calls of a library do not."""
    made = predicted(lambda x, w: x @ w, [p.shape(64, 64), p.shape(64, 32)])
    (without,) = seconds(made, UNIT)
    assert seconds(made, replace(UNIT, launch_s=7.0)) == [without]
    library = replace(UNIT, vector_tile=(1, 32))
    (call,) = seconds(made, library)
    assert seconds(made, replace(library, launch_s=7.0)) == [call + 7.0]


def test_batched_products_of_one_row_are_streams() -> None:
    """They read what is broadcast inside of the kernel as it is in memory."""
    device = replace(UNIT, elements_per_s=1.0)
    made = predicted(lambda q, k: jnp.einsum("bd,btd->bt", q, k), [p.shape(4, 64), p.shape(4, 32, 64)])
    elements = 4 * 32 * 64
    assert seconds(made, device)[-1] == elements + (4 * 64 + elements + 4 * 32) * 4.0


def test_products_that_are_too_small_for_a_library_are_streams() -> None:
    library = replace(UNIT, vector_tile=(1, 32))

    def batched(size: int) -> float:
        (found,) = seconds(predicted(lambda x, w: x @ w, [p.shape(10, size, size)] * 2), library)
        return found

    assert batched(3) == 3 * 10 * 3 * 3 * 4.0
    assert batched(8) == 2.0 * 10 * 8**3


def test_a_stack_is_converted_once_before_the_loops_that_read_it_narrow() -> None:
    def fn(x, ws):
        return lax.scan(lambda c, w: (jnp.tanh(c @ w.astype(jnp.bfloat16)), None), x, ws)[0]

    x, ws = p.shape(64, 64, dtype=jnp.bfloat16), p.shape(3, 64, 64)
    lowered, _ = predicted(fn, [x, ws])
    life = Lifetimes(lowered.program)
    ((stack, (itemsize, _, _)),) = life.narrowed.items()
    work = kernels(life.clusters, narrowed={stack: itemsize})
    (conversion,) = (w for w in work if [lowered.program.ops[o].kind for o in w.ops] == ["scan.input"])
    assert time_s(lowered, conversion, UNIT) == 64 * 64 * (4.0 + 2.0)
    (product,) = (w for w in work if w.products)
    assert time_s(lowered, product, replace(UNIT, matrix_flops_per_s=(("f32", 1e30),))) == 3 * 64 * 64 * 2.0


def test_a_stack_that_passes_through_an_outer_loop_is_converted_once_before_it() -> None:
    def layers(x, ws):
        return lax.scan(lambda c, w: (jnp.tanh(c @ w.astype(jnp.bfloat16)), None), x, ws)[0]

    def fn(x, ws):
        return lax.scan(lambda c, _: (layers(c, ws), None), x, None, length=5)[0]

    lowered, _ = predicted(fn, [p.shape(64, 64, dtype=jnp.bfloat16), p.shape(3, 64, 64)])
    life = Lifetimes(lowered.program)
    ((stack, (itemsize, _, _)),) = life.narrowed.items()
    work = kernels(life.clusters, narrowed={stack: itemsize})
    (conversion,) = (w for w in work if [lowered.program.ops[o].kind for o in w.ops] == ["scan.const"])
    assert conversion.region == 0 and time_s(lowered, conversion, UNIT) == 3 * 64 * 64 * (4.0 + 2.0)


def test_only_what_is_outside_of_a_loop_overlaps_with_a_collective_around_it() -> None:
    def fn(x, w, ws):
        return lax.scan(lambda c, v: (c @ v, None), x @ w, ws)[0]

    analysis = shardwise.analyze(fn, p.shape(64, 64), p.shape(64, 64), p.shape(3, 64, 64))
    model = CostModel.of(analysis, HardwareCost.of(MeshAxes.of({"a": 4})))
    assert model._outside == (0.25, 1.0)


def test_a_stream_costs_by_element_and_byte_or_by_flops() -> None:
    device = replace(UNIT, elements_per_s=2.0, vector_flops_per_s=4.0)
    assert stream_s(10.0, 6.0, 0.0, device) == 13.0
    assert stream_s(10.0, 6.0, 80.0, device) == 20.0
