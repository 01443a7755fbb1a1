"""Peak memory: when arrays live, what they take, and what resharding adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.cost.layouts import padded_elements
from shardwise.cost.memory import (
    BLOCK,
    GAPS,
    Allocation,
    Lifetimes,
    copy_allocations,
    on_chip_blocks,
    value_allocations,
)
from shardwise.cost.model import CostModel, memory_curve
from shardwise.cost.predict import predict
from shardwise.dims.analysis import analyze_program
from shardwise.hardware.load import load_profile
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.profile import Profile
from shardwise.lowering.decisions import Shard, State
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import Lowered, Reshard, lower_state
from tests.dims import programs as p

V5E = load_profile("v5e")
#: The blocks of a float32[64,128], as an argument and as a temporary.
ARRAY = 64 * 128 * 4 // BLOCK
TEMPORARY = ARRAY + ARRAY // GAPS


def made(
    fn: Callable[..., Any],
    args: Sequence[Any],
    shard: Sequence[tuple[str, int]] = (),
    donate: int | Sequence[int] | None = None,
    axis: int = 4,
    library: bool = False,
) -> tuple[Lowered, Lifetimes]:
    """A program with some dimensions (path, number) sharded on one axis, in order, and its lifetimes."""
    analysis = analyze_program(lower(trace(fn, tuple(args), {}, JitOptions(donate_argnums=donate))))
    mesh = MeshAxes.of({"a": axis})
    colors = [analysis.color_of(path, dim) for path, dim in shard]
    state = State(mesh, tuple(Shard((c.id,), "a") for c in colors if c is not None))
    return lower_state(analysis, state, HardwareCost.of(mesh)), Lifetimes(analysis.program, library)


def allocations(lowered: Lowered, life: Lifetimes, profile: Profile) -> list[Allocation]:
    """All allocations of a state."""
    found = [a for v in life.values() for a in value_allocations(lowered, life, v, profile)]
    groups: dict[tuple[int, int], list[Reshard]] = {}
    for r in lowered.reshards:
        groups.setdefault((life.program.ops[r.op].region, r.value), []).append(r)
    return found + [a for own in groups.values() for a in copy_allocations(lowered, life, own, profile)]


def blocks(found: tuple[Lowered, Lifetimes], profile: Profile = V5E) -> int:
    return int(memory_curve(found[1].points, allocations(*found, profile)).max())


def of(found: tuple[Lowered, Lifetimes], what: str, kind: str = "") -> list[Allocation]:
    """The allocations of a sort, of values that ops of a kind make."""
    program = found[0].program
    own = [a for a in allocations(*found, V5E) if a.what == what]
    return [a for a in own if not kind or program.ops[program.definitions[a.value][0]].kind == kind]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((), 128),
        ((5,), 128),
        ((1000,), 1024),
        ((8, 128), 1024),
        ((9, 128), 16 * 128),
        ((2, 128), 2 * 128),
        ((3, 128), 4 * 128),
        ((1, 7, 1, 128), 8 * 128),
        ((128, 3), 4 * 128),  # the dimensions change places
        ((16, 1024, 3), 16 * 1024 * 3),  # so that nothing is padded
    ],
)
def test_tiles(sizes: tuple[int, ...], expected: int) -> None:
    assert padded_elements(sizes, (8, 128)) == expected
    assert padded_elements(sizes, (1, 32)) == int(np.prod(sizes, dtype=int))


def test_a_chain_takes_what_goes_in_and_what_comes_out() -> None:
    found = made(lambda x: jnp.tanh(x * 2.0) + 1.0, [p.shape(64, 128)])
    assert blocks(found) == ARRAY + TEMPORARY


def test_a_donated_argument_counts_once() -> None:
    fn, args = (lambda x: jnp.tanh(x * 2.0) + 1.0), [p.shape(64, 128)]
    assert blocks(made(fn, args, donate=0)) == ARRAY
    # An output of another type cannot take its place.
    assert blocks(made(lambda x: x.astype(jnp.bfloat16), args, donate=0)) == ARRAY + TEMPORARY // 2


def test_an_output_without_an_argument_to_replace_is_there_from_the_start() -> None:
    found = made(lambda x: jnp.tanh(x @ x) @ x, [p.shape(256, 256)])
    inner, output = of(found, "value", "tanh"), of(found, "value", "dot_general")
    assert [(a.first, a.last) for a in output] == [(0, found[1].points - 1)]
    assert all(a.first > 0 for a in inner) and inner


def test_a_donated_argument_that_is_still_read_is_not_overwritten() -> None:
    def fn(x, w):
        y = x @ w
        return y, jnp.sum(jnp.sin(y @ w) * x)

    args = [p.shape(128, 128)] * 2
    kept, given = (made(fn, args, donate=d) for d in (None, 0))
    until = [min(of(found, "value", "dot_general"), key=lambda a: a.first).last for found in (kept, given)]
    (last,) = (op.id for op in given[0].program.ops if op.kind == "mul")
    assert until == [kept[1].points - 1, given[1].point[last]]


def test_an_elementwise_kernel_writes_over_an_operand_that_dies() -> None:
    found = made(lambda x: jnp.sort(jnp.sin(jnp.sort(x))), [p.shape(64, 128)])
    (sine,) = of(found, "value", "sin")
    first, output = of(found, "value", "sort")
    assert first.last == sine.first - 1
    life = found[1]
    assert sine.last == life.point[life.program.definitions[output.value][0]]  # a sort does not


def test_shards_are_counted_not_wholes() -> None:
    fn, args = (lambda x: jnp.tanh(x)), [p.shape(256, 128)]
    assert blocks(made(fn, args)) == 4 * ARRAY + 4 * TEMPORARY
    assert blocks(made(fn, args, [("x", 0)])) == ARRAY + TEMPORARY


def test_a_gathered_copy_lives_from_its_first_to_its_last_use() -> None:
    """Weights are sharded as a batch is: each is gathered for its product, one for two."""

    def fn(x, w, v):
        y = jnp.sin(x @ w) + x
        z = jnp.sin(y @ v) + y
        return jnp.sin(z @ w) + z

    args = [p.shape(65536, 1024), p.shape(1024, 1024), p.shape(1024, 1024)]
    found = made(fn, args, [("x", 0), ("w", 0), ("v", 0)])
    program = found[0].program
    copies = {program.values[a.value].path: a for a in of(found, "copy")}
    assert set(copies) == {"w", "v"}
    whole = 1024 * 1024 * 4 // BLOCK
    assert copies["w"].blocks == copies["v"].blocks == whole  # copies of arguments: no gaps are added
    # The second arrives beside the first product.
    assert copies["w"].first == copies["v"].first < copies["v"].last < copies["w"].last


def test_a_reduction_to_shards_has_both_sides() -> None:
    def fn(x, w):
        return x.T @ (x @ w)

    found = made(fn, [p.shape(65536, 1024), p.shape(1024, 1024)], [("x", 0), ("w", 0)])
    sizes = [a.blocks for a in of(found, "unreduced")]
    whole = 1024 * 1024 * 4 // BLOCK
    assert sizes == [whole + whole // GAPS]


def test_what_a_ring_reduces_is_there_for_as_many_products_as_it_has_hops() -> None:
    def fn(x, ws):
        def loss(ws):
            y = x
            for w in ws:
                y = jnp.sin(y @ w)
            return jnp.sum(y)

        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))

    layers = 24
    shapes = [p.shape(65536, 1024), [p.shape(1024, 1024)] * layers]
    found = made(fn, shapes, [("x", 0), *((f"ws/{k}", 0) for k in range(layers))])
    products = sorted({point for points in found[1].products.values() for point in points})
    spans = [sum(a.first < point <= a.last for point in products) for a in of(found, "unreduced", "dot_general")]
    assert len(spans) == layers and max(spans) <= 6, "three hops, and the product that computes it"


def test_a_ring_goes_on_after_a_loop() -> None:
    """The gradient of a head is computed before the loop over the layers; three hops do not fit before it."""

    def fn(x, ws, head):
        def loss(ws, head):
            y, _ = lax.scan(lambda c, w: (jnp.sin(c @ w), None), x, ws)
            return jnp.sum(jnp.sin(y @ head))

        grads = jax.grad(loss, argnums=(0, 1))(ws, head)
        return jax.tree.map(lambda w, g: w - g, (ws, head), grads)

    shapes = [p.shape(65536, 1024), p.shape(4, 1024, 1024), p.shape(1024, 1024)]
    found = made(fn, shapes, [("x", 0), ("head", 0)], donate=(1, 2))
    life = found[1]
    loop = max(op.id for op in life.program.ops if op.kind == "scan")
    whole = 1024 * 1024 * 4 // BLOCK
    rings = [a for a in of(found, "unreduced") if a.first < life.point[loop] and a.blocks == whole + whole // GAPS]
    assert rings and all(a.last > life.span[life.program.ops[loop].regions[-1]][1] for a in rings)


def scanned(x, ws):
    """Ten layers; gradients need each layer's input."""

    def loss(x, ws):
        y, _ = lax.scan(lambda c, w: (jnp.sin(c @ w), None), x, ws)
        return jnp.sum(y)

    return jax.grad(loss, argnums=1)(x, ws)


def test_a_carry_is_one_array() -> None:
    fn = lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=10)[0]  # noqa: E731
    found = made(fn, [p.shape(64, 128)])
    assert blocks(found) == ARRAY + TEMPORARY
    (carry,) = of(found, "value", "scan.carry")
    assert carry.last == found[1].points - 1


@pytest.mark.parametrize("kind", ["scan", "while", "cond"])
def test_what_enters_a_loop_or_a_branch_is_no_second_array(kind: str) -> None:
    def fn(x, w):
        if kind == "scan":
            return lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, None, length=10)[0]
        if kind == "while":
            return lax.while_loop(lambda c: c[0, 0] < 1, lambda c: jnp.sin(c @ w), x)
        return lax.cond(x[0, 0] < 1, lambda c: jnp.sin(c @ w), lambda c: jnp.cos(c @ w), x)

    found = made(fn, [p.shape(64, 128), p.shape(128, 128)])
    arrays = [a for a in of(found, "value") if a.blocks >= ARRAY]
    program = found[0].program
    kinds = {program.ops[program.definitions[a.value][0]].kind for a in arrays}
    assert not kinds & {"scan.const", "while.const", "cond.input"}
    assert sum(program.values[a.value].shape == (128, 128) for a in arrays) == 1


def test_a_carry_that_is_still_read_has_a_second_array() -> None:
    def body(c, w):
        new = c @ w
        return new, jnp.sum(jnp.sin(new @ w) * c)

    fn = lambda x, ws: lax.scan(body, x, ws)  # noqa: E731
    found = made(fn, [p.shape(128, 128), p.shape(10, 128, 128)])
    carry = of(found, "value", "scan.carry")
    inside = of(found, "value", "dot_general")
    assert len(carry) == 1 and any(a.last > a.first for a in inside)


def test_a_carry_goes_on_in_a_loop_inside_unless_it_is_read_again() -> None:
    def nested(again):
        def outer(c, _):
            inner = lax.scan(lambda c, _: (jnp.sin(c), None), c, None, length=3)[0]
            return jnp.cos(inner) + c if again else inner, None

        return lambda x: lax.scan(outer, x, None, length=10)[0]

    one, two = (made(nested(again), [p.shape(64, 128)]) for again in (False, True))
    assert [len(of(found, "value", "scan.carry")) for found in (one, two)] == [1, 2]


def test_residuals_are_stacked_and_live_to_the_end_of_the_backward_loop() -> None:
    found = made(scanned, [p.shape(64, 128), p.shape(10, 128, 128)])
    life, program = found[1], found[0].program
    stacks = [a for a in of(found, "value", "scan.output") if program.values[a.value].shape[:2] == (10, 64)]
    forward, backward = (life.span[r.id] for r in program.regions[1:])
    assert stacks
    assert all(a.first < forward[0] and a.last >= backward[1] for a in stacks)
    assert all(a.blocks == 10 * ARRAY + 10 * ARRAY // GAPS for a in stacks)


def test_a_stack_that_is_read_in_a_narrower_type_is_converted_before_the_loop() -> None:
    def fn(x, ws):
        return lax.scan(lambda c, w: (c @ w.astype(jnp.bfloat16), None), x, ws)[0]

    found = made(fn, [p.shape(64, 128, dtype="bfloat16"), p.shape(10, 128, 128)])
    (narrow,) = of(found, "narrow copy")
    size = 10 * 128 * 128 * 2 // BLOCK
    assert narrow.blocks == size + size // GAPS
    (body,) = (found[1].span[r.id] for r in found[0].program.regions[1:])
    assert narrow.first < body[0] and narrow.last >= body[1]


def test_a_product_does_not_overwrite_what_it_reads() -> None:
    def fn(x, w):
        for _ in range(3):
            x = jnp.maximum(x @ w, 0.0)
        return x.sum()

    found = made(fn, [p.shape(1024, 128), p.shape(128, 128)])
    size = 1024 * 128 * 4 // BLOCK
    temporaries = [a for a in allocations(*found, V5E) if a.blocks >= size and a.first > 0]
    assert memory_curve(found[1].points, temporaries).max() == 2 * (size + size // GAPS)


def test_only_few_examples_make_a_convolution_store_its_operand() -> None:
    def fn(x, w):
        return lax.conv(jnp.sin(x) * 2.0, w, (1, 1), "SAME")

    few, many = (made(fn, [p.shape(n, 16, 32, 128), p.shape(16, 16, 3, 3)]) for n in (2, 16))
    # 16 features take 128 lanes.
    assert [a.blocks for a in of(few, "operand")] == [2 * 128 * 32 * 128 * 4 // BLOCK * (GAPS + 1) // GAPS]
    assert not of(many, "operand")


def test_a_loop_that_goes_round_once_leaves_no_stack() -> None:
    def fn(x, ws):
        step = lambda c, w: (jnp.sort(c) * w, jnp.sort(c, 0))  # noqa: E731
        return lax.scan(step, x, ws)[1]

    once, thrice = (made(fn, [p.shape(64, 128), p.shape(n, 64, 128)]) for n in (1, 3))
    assert blocks(once) == 2 * ARRAY + TEMPORARY  # nothing needs what the last turn carries
    assert blocks(thrice) > 4 * ARRAY + 3 * TEMPORARY


def test_on_gpus_what_is_transposed_is_not_written_in_place() -> None:
    def fn(x):
        return jnp.sort(jnp.sort(x).T * 2.0)

    tiled, flat = (made(fn, [p.shape(64, 128)], library=library) for library in (False, True))
    assert blocks(tiled) == ARRAY + 2 * TEMPORARY
    assert blocks(flat) == ARRAY + 3 * TEMPORARY
    live = {
        k: [life.live[v] for v in life.live if v not in life.clusters.program.paths.values()]
        for k, (_, life) in (("tiled", tiled), ("flat", flat))
    }
    assert sum(b - a for a, b in live["flat"]) > sum(b - a for a, b in live["tiled"])


def test_without_tiles_nothing_is_padded() -> None:
    found = made(lambda x: jnp.tanh(x), [p.shape(9, 129)])
    flat = replace(V5E, vector_tile=(1, 32))
    size = -(-9 * 129 * 4 // BLOCK)
    assert blocks(found, flat) == 2 * size + size // GAPS
    assert blocks(found) > blocks(found, flat)


def test_temporaries_are_on_the_chip_as_far_as_they_fit() -> None:
    """Arguments and outputs are not. Where more is alive than fits, half of the room is saved."""
    size, chip = 1 << 20, on_chip_blocks(V5E)
    assert 2 * chip * BLOCK == V5E.on_chip_bytes == 112 * size

    def peak(*sizes: int) -> int:
        alive = [Allocation("value", k, s * size // BLOCK, 0, 0, on_chip=True) for k, s in enumerate(sizes)]
        return int(memory_curve(1, [*alive, Allocation("value", 9, 7, 0, 0)], chip)[0]) - 7

    assert peak(40, 16) == 0
    assert peak(50, 20) == 2 * 14 * size // BLOCK
    assert peak(*[50] * 6) == (300 - 28) * size // BLOCK
    found = made(lambda x: jnp.sort(jnp.sort(x)) + 1.0, [p.shape(1024, 1024)])
    program = found[0].program
    on_chip = {program.ops[program.definitions[a.value][0]].kind: a.on_chip for a in of(found, "value")}
    assert on_chip == {"argument": False, "sort": True, "add": False}
    large = made(lambda x: jnp.sort(jnp.sort(x)) + 1.0, [p.shape(16384, 1024)])
    assert not any(a.on_chip for a in of(large, "value")), "more than half of the chip"
    assert not any(a.on_chip for a in allocations(*found, load_profile("h100")))


def test_the_peak_is_explained() -> None:
    found = made(
        lambda x, w: jnp.sum(jnp.sort(jnp.sin(x @ w)) + jnp.sort(x)), [p.shape(4096, 2048), p.shape(2048, 2048)]
    )
    lowered = found[0]
    memory = predict(CostModel(lowered.structure, HardwareCost.of(lowered.mesh)), lowered)
    assert sum(a.nbytes for a in memory.alive) == memory.peak_bytes == max(memory.curve) < blocks(found) * BLOCK
    assert {"x", "w"} <= {a.label for a in memory.alive}
    assert any(a.source.startswith("test_memory.py") for a in memory.alive)


def test_the_structure_does_not_depend_on_the_state() -> None:
    args = [p.shape(64, 128), p.shape(10, 128, 128)]
    whole, split = made(scanned, args), made(scanned, args, [("x", 0)])
    assert whole[1].live == split[1].live and whole[1].point == split[1].point


def test_kernels_that_share_what_they_make_are_found_in_linear_time() -> None:
    """Each value is used twice, so that there are 2^60 ways from the first to the last."""

    def fn(x: Any) -> Any:
        for _ in range(60):
            x = x * x + x
        return x

    traced = trace(fn, (jax.ShapeDtypeStruct((8, 128), "float32"),), {}, JitOptions())
    life = Lifetimes(lower(traced))
    assert all(len(points) <= 2 for points in life.runs)
