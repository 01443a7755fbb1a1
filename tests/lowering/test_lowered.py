"""The two rules: how values are stored, how ops compute, what moves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwise
from shardwise.errors import DecisionError, MeshError
from shardwise.hardware.collectives import collective
from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.decisions import Decision, Keep, Shard, State
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import Lowered, collectives, lower_state
from shardwise.lowering.sharding import ArrayType, Kind, Ring, Sharding, reshard
from shardwise.lowering.structure import linear_operands
from tests.dims import programs as p

MESH = MeshAxes.of({"a": 4, "b": 2})
KIBI, MEBI = ArrayType((16, 16), 4.0), ArrayType((512, 512), 4.0)


def sharding(*dims: tuple[int, ...], partial: tuple[int, ...] = ()) -> Sharding:
    return Sharding(dims, partial)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (sharding((0,), ()), sharding((), ()), [(Kind.ALL_GATHER, 1024.0)]),
        (sharding((), ()), sharding((0,), ()), [(Kind.SLICE, 1024.0)]),
        (sharding((0,), ()), sharding((), (0,)), [(Kind.ALL_TO_ALL, 256.0)]),
        (sharding((), (), partial=(0,)), sharding((), ()), [(Kind.ALL_REDUCE, 1024.0)]),
        (sharding((), (), partial=(0,)), sharding((0,), ()), [(Kind.REDUCE_SCATTER, 1024.0)]),
        (sharding((0, 1), ()), sharding((1, 0), ()), [(Kind.PERMUTE, 128.0)]),
        # Axes come and go at the minor end. Elsewhere shards change places: while they are small.
        (sharding((0,), ()), sharding((0, 1), ()), [(Kind.SLICE, 256.0)]),
        (sharding((0,), ()), sharding((1, 0), ()), [(Kind.SLICE, 256.0), (Kind.PERMUTE, 128.0)]),
        (sharding((0, 1), ()), sharding((0,), ()), [(Kind.ALL_GATHER, 256.0)]),
        (sharding((0, 1), ()), sharding((1,), ()), [(Kind.PERMUTE, 128.0), (Kind.ALL_GATHER, 512.0)]),
        (sharding((0,), (1,)), sharding((), ()), [(Kind.ALL_GATHER, 1024.0)]),
        # What makes the value smaller comes first, gathers last.
        (sharding((0,), ()), sharding((), (1,)), [(Kind.SLICE, 256.0), (Kind.ALL_GATHER, 512.0)]),
        (sharding((0,), (), partial=(1,)), sharding((), ()), [(Kind.ALL_REDUCE, 256.0), (Kind.ALL_GATHER, 1024.0)]),
        (sharding((0,), ()), sharding((0,), ()), []),
    ],
)
def test_reshards(source: Sharding, target: Sharding, expected: list[tuple[Kind, float]]) -> None:
    assert [(step.kind, step.nbytes) for step in reshard(KIBI, source, target, MESH)] == expected


def test_pieces_of_several_dimensions_are_copied() -> None:
    cost = HardwareCost.of(MESH)

    def copying(source: Sharding, target: Sharding) -> float:
        return sum(cost.copy_s(step) for step in reshard(KIBI, source, target, MESH))

    whole = sharding((), ())
    assert copying(sharding((0, 1), ()), whole) == copying(sharding((), (0, 1)), whole) == 0
    assert copying(sharding((0,), (1,)), whole) > 0
    assert copying(sharding((0,), ()), sharding((), (0,))) > 0
    early = [cost.communication_s(reshard(KIBI, source, whole, MESH), True) for source in (sharding((0,), (1,)), whole)]
    assert early[0] > copying(sharding((0,), (1,)), whole) > early[1] == 0


def costing(**figures: Any) -> HardwareCost:
    """Of v5e chips with other figures."""
    placement = HardwareCost.of(MESH).placement
    where = placement.topology
    return HardwareCost(replace(placement, topology=replace(where, profile=replace(where.profile, **figures))))


def test_gathers_that_turn_their_arrays_round() -> None:
    """Both sides are copied unless the first dimension is gathered, and read the other way round if the last is."""
    plain = HardwareCost.of(MESH)
    cost = costing(minor_copies=True, transposed_bytes_per_s=1e9, efficiency=(("all-gather", 1.0),))
    profile = cost.profile
    whole = sharding((), ())
    (first,), (second,) = (reshard(KIBI, s, whole, MESH) for s in (sharding((0, 1), ()), sharding((), (0, 1))))
    assert cost.copy_s(first) == 0.0 == plain.copy_s(second)
    streamed = 2 / (profile.memory_bytes_per_s * profile.memory_efficiency)
    assert cost.copy_s(second) == pytest.approx((second.bytes_in + 1024) * (streamed + 1e-9))
    (middle,) = reshard(ArrayType((8, 8, 4), 4.0), sharding((), (0, 1), ()), sharding((), (), ()), MESH)
    assert cost.copy_s(middle) == pytest.approx((second.bytes_in + 1024) * streamed), "rows stay whole"
    (moved,) = (s for s in reshard(KIBI, sharding((0,), ()), sharding((), (0,)), MESH))
    assert cost.copy_s(moved) == 0.0, "an efficiency that was measured has the copies of an all-to-all in it"


def lowered(fn, args, mesh: dict[str, int], decide, grouping: bool = True) -> Lowered:
    analysis = shardwise.analyze(fn, *args, grouping=grouping)

    def color(path: str, dim: int) -> int:
        found = analysis.color_of(path, dim)
        assert found is not None
        return found.id

    decisions: list[Decision] = decide(color, analysis)
    return lower_state(analysis, State(MeshAxes.of(mesh), tuple(decisions)), HardwareCost.of(MeshAxes.of(mesh)))


def kinds(low: Lowered) -> Counter[str]:
    return Counter(kind.value for kind, *_ in collectives(low))


def mlp_gradient(w, x):
    return jax.grad(lambda w: jnp.sum(jax.nn.relu(x @ w[0]) @ w[1]))(w)


#: Sizes at which bytes matter and latency does not.
WIDE = ((p.shape(1024, 8192), p.shape(8192, 1024)), p.shape(16384, 1024))


def test_data_parallel_reduces_each_gradient_once() -> None:
    low = lowered(mlp_gradient, WIDE, {"data": 8}, lambda c, _: [Shard((c("x", 0),), "data")])
    assert kinds(low) == {"all-reduce": 2}


def test_values_that_no_product_or_loop_waits_for_are_late() -> None:
    def step(w, x):
        def layer(y, own):
            return jnp.tanh(y @ own), jnp.sum(y @ own.T)

        return jax.lax.scan(layer, x, w)[1], jnp.tanh(x @ w[0])

    structure = lowered(step, (p.shape(3, 64, 64), p.shape(32, 64)), {"data": 8}, lambda *_: []).structure
    program = structure.program
    late = [structure.late[op.results[0]] for op in program.schedule if op.kind == "dot_general"]
    assert late == [False, True, True], "the carry is waited for, what is stacked and returned is not"


@pytest.mark.parametrize(("scatters", "combined"), [(True, [True, False]), (False, [True, True])])
def test_late_all_reduces_are_combined(scatters: bool, combined: list[bool]) -> None:
    """So are reduce-scatters where the compiler has none: they are all-reduces."""
    cost, source = costing(scatters=scatters), sharding((), (), partial=(0,))
    steps = [reshard(MEBI, source, target, MESH)[0] for target in (sharding((), ()), sharding((0,), ()))]
    assert [cost.step_s(step, late=True) < cost.step_s(step) for step in steps] == combined


def test_what_hides() -> None:
    """Gathers of what is ready early, and reductions of what is used late."""
    cost = costing(hidden=(("all-gather", 0.5), ("reduce-scatter", 0.25)), rings=False)
    partial, whole, split = sharding((), (), partial=(0,)), sharding((), ()), sharding((0,), ())
    gather, scatter, reduction = (
        reshard(MEBI, *ends, MESH)[0] for ends in ((split, whole), (partial, split), (partial, whole))
    )

    def shares(early: bool, late: bool) -> list[float]:
        steps = (gather, scatter, reduction)
        return [cost.hidden_s(s, early, late) / (cost.link(s).s_per_byte * s.nbytes) for s in steps]

    assert shares(early=False, late=False) == [0, 0, 0]
    assert shares(early=True, late=False) == pytest.approx([0.5, 0, 0])
    assert shares(early=False, late=True) == pytest.approx([0, 0.25, 0])


def test_late_sums_go_round_where_permutes_hide_and_scatters_do_not() -> None:
    """The hops of a ring start one after another, and most of their time hides."""
    cost, plain = costing(rings=True, hidden=(("reduce-scatter", 0.9),)), costing(rings=False)
    assert cost.ring(MEBI, True) is Ring.ALWAYS and plain.ring(MEBI, True) is Ring.NEVER
    assert cost.ring(MEBI, False) is Ring.MISSING, "nothing runs beside it"
    assert cost.ring(KIBI, True) is Ring.NEVER, "small pieces take nothing but latency"
    partial, split = sharding((), (), partial=(0,)), sharding((0,), ())
    (native,), (ring,) = (reshard(MEBI._replace(ring=ring), partial, split, MESH) for ring in (Ring.NEVER, Ring.ALWAYS))
    assert (ring.kind, ring.purpose, ring.hops, ring.nbytes) == (Kind.PERMUTE, Kind.REDUCE_SCATTER, 3, MEBI.nbytes / 4)
    hop, scatter = (collective(kind, (0,), cost.placement) for kind in ("hop", "reduce-scatter"))
    assert cost.step_s(ring) == 3 * hop.time_s(MEBI.nbytes / 4) > cost.step_s(native) == scatter.time_s(MEBI.nbytes)
    assert 3 / 4 * hop.s_per_byte == pytest.approx(scatter.s_per_byte), "the same links, but each hop starts anew"
    assert cost.hidden_s(ring, False, True) > 0.7 * cost.step_s(ring) and cost.hidden_s(native, False, True) == 0
    assert cost.copy_s(ring) > cost.copy_s(native) == 0, "what arrives is added"


def test_what_was_widened_moves_as_it_was_before() -> None:
    """Partial sums do not: they are added up in the type that they have."""
    array = MEBI._replace(narrow=2.0)
    split, whole, partial = sharding((0,), ()), sharding((), ()), sharding((), (), partial=(0,))
    (gather,), (reduction,) = (reshard(array, source, whole, MESH) for source in (split, partial))
    assert (gather.nbytes, reduction.nbytes) == (MEBI.nbytes / 2, MEBI.nbytes)

    def sorted_twice(x: Any, n: Any) -> Any:
        wide = x.astype(jnp.float32).T.reshape(8, 4, 8)
        return jnp.sort(wide, 0), jnp.sort(n.astype(jnp.float32), 0), jnp.sort(wide * 2, 0)

    x, n = jnp.ones((32, 8), jnp.bfloat16), jnp.ones((32,), jnp.int32)
    program = shardwise.analyze(sorted_twice, x, n).program
    operands = [op.operands[0] for op in program.ops if op.kind == "sort"]
    assert [v in program.moved_as for v in operands] == [True, False, False]


@pytest.mark.parametrize(
    ("old", "new", "waits"),
    [
        ("float32", "bfloat16", True),
        ("float16", "float32", True),
        ("float32", "float16", False),  # large addends of a small sum do not fit
        ("int32", "int8", True),
        ("int8", "int32", False),  # what wrapped around is another number in a longer type
        ("int32", "float32", False),
    ],
)
def test_conversions_that_partial_sums_pass(old: str, new: str, waits: bool) -> None:
    program = shardwise.analyze(lambda x: x.astype(new), jnp.ones((8, 8), old)).program
    (op,) = (op for op in program.ops if op.kind == "convert_element_type")
    assert linear_operands(program, op) == ((0,) if waits else ())


def test_arrays_of_one_number_do_not_move() -> None:
    """Every device makes its part; what a scan stacks may have another number in each trip."""
    split, whole = sharding((0,), ()), sharding((), ())
    assert reshard(MEBI, split, whole, MESH) and not reshard(MEBI._replace(uniform=True), split, whole, MESH)

    def step(x: Any, n: Any) -> Any:
        zeros = jnp.zeros((16, 8)).T
        stack = jax.lax.scan(lambda c, _: (c + 1, jnp.full((8,), c)), n, None, length=4)[1]
        return jnp.sort(zeros + x, 0), jnp.full((8,), n), stack, zeros

    program = shardwise.analyze(step, jnp.ones((8, 16)), jnp.float32(1)).program
    uniform = [v for v in program.outputs if program.ops[program.definitions[v][0]].operands[0] in program.uniform]
    assert [program.outputs.index(v) for v in uniform] == [1, 3]


def test_what_is_narrowed_by_all_its_uses_moves_narrow() -> None:
    def step(x: Any, y: Any, z: Any) -> Any:
        x, y, z = jnp.sort(x, 0), jnp.sort(y, 0), jnp.sort(z, 0)
        return x.T.astype(jnp.bfloat16), x.astype(jnp.bfloat16) * 2, y.astype(jnp.bfloat16), y + 1, z.astype(jnp.int32)

    program = shardwise.analyze(step, *[jnp.ones((8, 8))] * 3).program
    results = [op.results[0] for op in program.ops if op.kind == "sort"]
    moved = [program.values[program.moved_as[v]].dtype if v in program.moved_as else "" for v in results]
    assert moved == ["bfloat16", "", ""], "y is used as it is too, and integers do not hold what z has"


def test_partial_sums_do_not_wait_for_a_use_behind_a_loop() -> None:
    """All devices would keep a whole array through the loop; without one the sum of both is reduced once."""

    def step(w: Any, x: Any, loop: bool) -> Any:
        first = x.T @ x
        y, _ = jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=3) if loop else (x @ w, None)
        return first + y.T @ x

    for loop in (False, True):
        args = jnp.ones((16, 16)), jnp.ones((64, 16))
        low = lowered(
            lambda w, x, loop=loop: step(w, x, loop), args, {"a": 4}, lambda color, _: [Shard((color("x", 0),), "a")]
        )
        assert kinds(low)["all-reduce"] == (2 if loop else 1)


def test_the_rule_counts_what_of_an_early_gather_is_exposed() -> None:
    gather = reshard(MEBI, sharding((0,), ()), sharding((), ()), MESH)
    little, much, none = (costing(hidden=h) for h in ((("all-gather", 0.1),), (("all-gather", 0.9),), ()))
    times = [c.communication_s(gather, early=True) for c in (much, little, none)]
    assert times[0] < times[1] < times[2]


def test_hidden_dimension_needs_one_all_reduce_forward() -> None:
    fn = lambda w, x: jax.nn.relu(x @ w[0]) @ w[1]  # noqa: E731
    low = lowered(fn, WIDE, {"model": 8}, lambda c, _: [Shard((c("w/0", 1),), "model")])
    assert kinds(low) == {"all-reduce": 1}


def test_fsdp_gathers_parameters_and_scatters_gradients() -> None:
    low = lowered(
        mlp_gradient, WIDE, {"data": 8}, lambda c, _: [Shard((c("x", 0),), "data"), Shard((c("w/0", 1),), "data")]
    )
    found = Counter(step.purpose.value for r in low.reshards for step in r.steps)
    assert found["reduce-scatter"] == 2 and found["all-gather"] >= 2 and "all-reduce" not in found


def test_reductions_are_deferred_through_sums() -> None:
    """Three products summed are reduced once."""

    def fn(a, b, c, wa, wb, wc):
        return jnp.tanh(a) @ wa + jnp.tanh(b) @ wb + jnp.tanh(c) @ wc

    args = [p.shape(65536, 2048)] * 3 + [p.shape(2048, 1024)] * 3
    low = lowered(
        fn,
        args,
        {"model": 8},
        lambda c, _: [Shard(tuple(c(w, 0) for w in ("wa", "wb", "wc")), "model")],
        grouping=False,
    )
    assert kinds(low) == {"all-reduce": 1}


@pytest.mark.parametrize("product", [False, True])
def test_scatters_are_reduced_together_and_with_products(product: bool) -> None:

    def fn(table, ids, grown):
        one, two = table.at[ids].add(grown), table.at[ids + 1].add(grown * 2)
        return one + two + (jnp.tanh(grown.T) @ grown if product else 0)

    args = [p.shape(1024, 1024), p.shape(65536, dtype="int32"), p.shape(65536, 1024)]
    low = lowered(fn, args, {"m": 8}, lambda c, _: [Shard((c("ids", 0), c("grown", 0)), "m")], grouping=False)
    assert kinds(low) == {"all-reduce": 1}


def test_a_reduction_with_two_uses_stands_at_the_definition() -> None:
    def fn(x, w):
        y = jnp.tanh(x) @ w
        return jnp.exp(y), jnp.sin(y)

    low = lowered(fn, [p.shape(65536, 2048), p.shape(2048, 1024)], {"m": 8}, lambda c, _: [Shard((c("w", 0),), "m")])
    (found,) = collectives(low)
    assert found[0] is Kind.ALL_REDUCE and found[4].operand == -1


def test_the_first_color_gets_the_axis_and_the_next_where_it_does_not_divide() -> None:
    def fn(x, y):
        return x + 1, y * 2

    args = [p.shape(16, 8), p.shape(12, 8)]
    analysis = shardwise.analyze(fn, *args, grouping=False)
    rows = [analysis.color_of(n, 0).id for n in "xy"]
    columns = [analysis.color_of(n, 1).id for n in "xy"]
    state = State(MeshAxes.of({"a": 8}), (Shard((*rows,), "a"), Shard((*columns,), "a")))
    low = lower_state(analysis, state, HardwareCost.of(MESH))
    stored = [low.storage[a.value].dims for a in analysis.program.arguments]
    assert stored == [((0,), ()), ((), (0,))]
    assert low.stored(analysis.program.paths["y"])[1] == ((0, 8, 0),)


def test_a_color_may_take_several_axes_the_earlier_one_major() -> None:
    analysis = shardwise.analyze(lambda x: x + 1, p.shape(16, 8))
    rows = analysis.color_of("x", 0).id
    low = lower_state(analysis, State(MESH, (Shard((rows,), "b"), Shard((rows,), "a"))), HardwareCost.of(MESH))
    assert low.storage[0].dims == ((1, 0), ())


def test_keep_holds_for_views_of_an_argument() -> None:
    def fn(w, x):
        return jax.lax.scan(lambda c, w: (c @ w.astype(c.dtype), None), x, w)[0]

    analysis = shardwise.analyze(fn, p.shape(4, 512, 512), p.shape(64, 512))
    model = analysis.color_of("x", 1).id
    state = State(MeshAxes.of({"a": 8}), (Shard((model,), "a"), Keep((0,), "a")))
    low = lower_state(analysis, state, HardwareCost.of(MESH))
    assert low.storage[0].dims == ((), (), ())
    inside = [v for v in analysis.program.values if v.shape == (512, 512)]
    assert inside and all(not any(low.storage[v.id].dims) for v in inside)


def test_both_sides_of_attention() -> None:
    """Queries keep the axis: keys and values are gathered. Keys keep it: only small statistics and outputs are reduced."""
    args = [p.attention_params(model=64), p.shape(8, 4096, 64)]
    moved = []
    for side in (0, 1):
        analysis = shardwise.analyze(p.attention, *args)
        sequence = analysis.color_of("x", 1)
        (bit,) = analysis.groups[sequence.group].bits
        state = State(MeshAxes.of({"seq": 8}), (Shard((sequence.id,), "seq", ((bit, side),)),))
        moved.append(kinds(lower_state(analysis, state, HardwareCost.of(MESH))))
    assert {"all-gather": 2} in moved
    assert any("all-reduce" in m or "reduce-scatter" in m for m in moved)
    assert moved[0] != moved[1]


def test_bad_states_are_refused() -> None:
    with pytest.raises(MeshError, match="no axis 'c'; its axes are a, b"):
        State(MESH, (Shard((0,), "c"),))
    with pytest.raises(DecisionError, match="both sides"):
        State(MESH, (Shard((0,), "a", ((0, 0),)), Shard((1,), "a", ((0, 1),))))
    for bad in ({"a": 0}, {"a": 2.5}, {"": 2}, 7):
        with pytest.raises(MeshError):
            MeshAxes.of(bad)


def test_a_product_stays_as_computed_where_its_uses_like_that_better() -> None:
    """The masks of a mixture of experts stay with the tokens; tokens go to the experts and come back."""

    def layer(chosen, seat, x, up, down):
        mask = jnp.einsum("nme,nmq->nmeq", chosen, seat)
        inputs = jnp.einsum("nmeq,nmd->enqd", mask, jnp.tanh(x))  # an argument's own gather would be hidden
        hidden = jax.nn.relu(jnp.einsum("enqd,edf->enqf", inputs, up))
        return jnp.einsum("nmeq,enqd->nmd", mask, jnp.einsum("enqf,efd->enqd", hidden, down))

    n, m, e, q, d, f = 64, 512, 8, 160, 1024, 4096
    args = [p.shape(n, m, e), p.shape(n, m, q), p.shape(n, m, d), p.shape(e, d, f), p.shape(e, f, d)]
    low = lowered(layer, args, {"x": 8}, lambda c, _: [Shard((c("up", 0),), "x"), Shard((c("x", 0),), "x")])
    moved = [(kind.value, low.program.values[r.value].shape) for kind, _, _, _, r in collectives(low)]
    assert moved.count(("all-to-all", (n, d, e, q))) + moved.count(("all-to-all", (e, n, q, d))) == 2
    assert {kind for kind, _ in moved} == {"all-to-all"}
    assert (n, m, e, q) not in [shape for _, shape in moved]
