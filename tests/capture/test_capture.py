"""Capture: what becomes of calls, loops, branches, remat, constants, arguments."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardwise
from shardwise.capture.trace import JitOptions
from shardwise.ir.program import Origin, Program, Unit, format_program
from tests.capture import capture
from tests.dims.programs import shape
from tests.ir.verify import check_program


def captured(fn, *args, options: JitOptions | None = None, **kwargs) -> Program:
    program = capture(fn, *args, options=options, **kwargs)
    check_program(program)
    return program


def kinds(program: Program) -> list[str]:
    return [op.kind for op in program.ops if op.kind not in ("argument", "output")]


def test_text_is_stable() -> None:
    program = captured(lambda x, w: jnp.tanh(x @ w).sum(0), shape(8, 4), shape(4, 2))
    assert format_program(program) == (
        "program <lambda>\n"
        "  %0:float32[8,4] = argument 'x'  ->(i,j)\n"
        "  %1:float32[4,2] = argument 'w'  ->(i,j)\n"
        "  %2:float32[8,2] = dot_general %0 %1  (i,k),(k,j)->(i,j); sum k\n"
        "  %3:float32[8,2] = tanh %2  (i,j)->(i,j)\n"
        "  %4:float32[2] = reduce_sum %3  (i,j)->(j); sum i\n"
        "  %5:float32[2] = output %4 'out'  (i)->(i)\n"
        "return %5"
    )


def test_scan_has_a_region_with_trips_and_links() -> None:
    def fn(c, xs):
        return jax.lax.scan(lambda c, x: (c * 2 + x, c.sum()), c, xs)

    program = captured(fn, shape(4), shape(5, 4))
    (loop,) = [op for op in program.ops if op.kind == "scan"]
    (body,) = [program.regions[k] for k in loop.regions]
    assert body.trips == 5 and body.kind == "scan.body"
    assert [program.ops[k].kind for k in loop.links] == ["scan.carry", "scan.input", "scan.output"]
    carry = program.ops[loop.links[0]]
    assert len(carry.operands) == 2 and len(carry.results) == 2
    assert str(program.ops[loop.links[1]].rule) == "(i,j)->(j); blocked i"


def test_a_scan_of_one_trip_is_no_loop() -> None:
    def fn(c, xs):
        return jax.lax.scan(lambda c, x: (c * 2 + x, c.sum()), c, xs)

    kinds = [op.kind for op in captured(fn, shape(4), shape(1, 4)).ops]
    assert "scan" not in kinds and kinds.count("mul") == 1


def test_what_is_computed_twice_is_one_op() -> None:
    def fn(x):
        half = jax.jit(lambda x: x.astype(jnp.bfloat16).T)
        gradient = jax.grad(jax.checkpoint(lambda x: jnp.sin(half(x)).sum().astype(jnp.float32)))(x)
        return half(x) + half(x), gradient, jnp.zeros((4, 8)), jnp.zeros((4, 8))

    program = captured(fn, shape(8, 4))
    narrowed = [v for v in program.values if v.type_text == "bfloat16[8,4]" and v.id in program.definitions]
    made = [program.ops[program.definitions[v.id][0]].kind for v in narrowed]
    assert made.count("convert_element_type") == 2  # what is behind a barrier shares nothing
    zeros = [op.results[0] for op in program.ops if op.kind == "output"][2:]
    assert (
        len({op.operands[0] for op in program.ops if op.results[:1] and op.results[0] in zeros}) == 2
    )  # sharded apart


def test_a_gather_reads_what_was_not_widened_yet() -> None:
    def fn(x, labels):
        wide = x.astype(jnp.float32)
        return jnp.take_along_axis(wide, labels, 1), jnp.exp(wide)

    program = captured(fn, shape(8, 32, dtype="bfloat16"), shape(8, 1, dtype="int32"))
    (gather,) = (op for op in program.ops if op.kind == "gather")
    assert program.values[gather.operands[0]].path == "x" and program.values[gather.results[0]].dtype == "bfloat16"
    assert program.values[program.outputs[0]].dtype == "float32"


def test_a_reshape_that_undoes_another_computes_nothing() -> None:
    def fn(x):
        flat = x.reshape(32)
        return flat.reshape(8, 4) + 1, flat.reshape(4, 8)

    kinds = [op.kind for op in captured(fn, shape(8, 4)).ops]
    assert kinds.count("reshape") == 2


def test_reversing_one_element_computes_nothing() -> None:
    kinds = [op.kind for op in captured(lambda x: (jnp.flip(x, 0), jnp.flip(x, 1)), shape(1, 8)).ops]
    assert kinds.count("rev") == 1


def test_flops_count_trips() -> None:
    program = captured(
        lambda c, w: jax.lax.scan(lambda c, _: (c @ w, None), c, None, length=7)[0], shape(4, 8), shape(8, 8)
    )
    flops = sum(op.flops * program.trips[op.region] for op in program.ops if op.unit is Unit.MATRIX)
    assert flops == 7 * 2 * 4 * 8 * 8


def test_trip_dimensions_of_a_loop_are_one_color() -> None:
    def fn(ws, vs):
        return jax.lax.scan(lambda c, wv: (c @ wv[0] + wv[1], c), jnp.ones((4, 8)), (ws, vs))

    analysis = shardwise.analyze(fn, shape(5, 8, 8), shape(5, 8))
    loops = [c for c in analysis.colors if c.loop]
    assert len(loops) == 1 and loops[0].size == 5
    assert analysis.color_of("ws", 0) == analysis.color_of("vs", 0) == analysis.color_of("out/1", 0) == loops[0]


def test_a_carry_has_one_sharding() -> None:
    """Initial value, body input, body output and result are one value, even where the body does not connect them."""

    def fn(x, y):
        return jax.lax.scan(lambda c, _: (jnp.zeros_like(c) + y, None), x, None, length=3)[0]

    analysis = shardwise.analyze(fn, shape(8), shape(8))
    assert analysis.color_of("x", 0) == analysis.color_of("y", 0) == analysis.color_of("out", 0)


@pytest.mark.parametrize(
    ("first", "test", "trips"),
    [
        (2, lambda c: c[0] < 10, 8),
        (2, lambda c: c[0] <= 10, 9),
        (2, lambda c: (c[0] < 10) & (c[1].sum() > 0), 1),
        (2, lambda c: c[1].sum() < 10, 1),
    ],
)
def test_trips_of_a_while_that_counts_to_a_constant(first, test, trips) -> None:
    def fn(x):
        return jax.lax.while_loop(test, lambda c: (c[0] + 1, c[1] * 2), (first, x))[1]

    assert {r.trips for r in capture(fn, shape(8)).regions[1:]} == {trips}


def test_the_limit_of_a_loop_may_be_carried() -> None:
    def fn(x):
        return jax.lax.fori_loop(0, jnp.asarray(7), lambda i, c: c * 2, x)

    assert {r.trips for r in capture(fn, shape(8)).regions[1:]} == {7}


def test_while_links_condition_and_body() -> None:
    def fn(x):
        return jax.lax.while_loop(lambda c: c.sum() < 100, lambda c: c * 2, x)

    program = captured(fn, shape(8))
    (loop,) = [op for op in program.ops if op.kind == "while"]
    assert [program.regions[k].kind for k in loop.regions] == ["while.cond", "while.body"]
    assert not any(program.regions[k].trips_known for k in loop.regions)
    (carry,) = [program.ops[k] for k in loop.links]
    assert len(carry.results) == 3


def test_fori_loop_and_cond_and_switch() -> None:
    program = captured(lambda x: jax.lax.fori_loop(0, 6, lambda i, c: c + i, x), shape(8))
    assert [r.trips for r in program.regions[1:]] == [6]
    analysis = shardwise.analyze(
        lambda i, x, y: jax.lax.switch(i, [jnp.add, jnp.multiply, lambda a, b: a], x, y), 1, shape(8), shape(8)
    )
    assert len(analysis.colors) == 1
    (branch,) = [op for op in analysis.program.ops if op.kind == "cond"]
    assert len(branch.regions) == 3


def test_calls_are_inlined_and_leave_scopes() -> None:
    @jax.jit
    def inner(x):
        return jnp.sin(x)

    @jax.custom_vjp
    def custom(x):
        return x * 3

    custom.defvjp(lambda x: (x * 3, None), lambda _, g: (g * 3,))

    @jax.custom_jvp
    def jvp(x):
        return jnp.cos(x)

    jvp.defjvp(lambda p, t: (jnp.cos(p[0]), -jnp.sin(p[0]) * t[0]))
    program = captured(lambda x: jvp(custom(inner(x))), shape(8))
    assert kinds(program) == ["sin", "mul", "cos"]
    assert {s.kind for s in program.scopes} >= {"jit", "custom_vjp_call", "custom_jvp_call"}


def test_remat_keeps_its_meaning() -> None:
    fn = jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum())
    program = captured(fn, shape(8))
    (scope,) = [s for s in program.scopes if s.kind == "remat"]
    assert scope.has_barrier
    assert [op.kind for op in program.ops if op.scope == scope.id].count("sin") == 1


def test_dead_code_is_dropped_also_in_loops() -> None:
    def fn(x):
        jnp.cos(x).sum()
        (a, _), _ = jax.lax.scan(lambda c, _: ((c[0] + 1, jnp.exp(c[1])), jnp.tan(c[0])), (x, x), None, length=3)
        return a

    assert not {"cos", "exp", "tan"} & set(kinds(captured(fn, shape(8))))


def test_effects_keep_ops_alive() -> None:
    def fn(x):
        jax.debug.print("{}", x.sum())
        return x

    analysis = shardwise.analyze(fn, shape(8))
    assert [op.kind for op in analysis.opaque_ops] in (["debug_callback"], ["debug_print"])
    assert "reduce_sum" in kinds(analysis.program)


def test_closed_over_arrays_are_constants() -> None:
    table = np.ones((8, 4), np.float32)
    program = captured(lambda x: x @ jnp.asarray(table), shape(2, 8))
    constants = [v for v in program.values if v.origin is Origin.CONSTANT]
    assert [v.shape for v in constants] == [(8, 4)]


def test_paths_donation_keywords_and_static_arguments() -> None:
    def step(state, *, batch, activation, scale=2.0):
        y = batch["x"] @ state["w"]
        return {"w": state["w"] * scale}, (jax.nn.relu(y) if activation == "relu" else y)

    options = JitOptions(donate_argnames="state", static_argnames="activation")
    program = captured(step, {"w": shape(4, 2)}, batch={"x": shape(8, 4)}, activation="relu", options=options)
    assert [a.path for a in program.arguments] == ["state/w", "batch/x"]
    assert [a.donated for a in program.arguments] == [True, False]
    assert [program.values[v].path for v in program.outputs] == ["out/0/w", "out/1"]
    positional = captured(lambda x, n, y: x * n + y, shape(3), 2, shape(3), options=JitOptions(static_argnums=1))
    assert [a.path for a in positional.arguments] == ["x", "y"]
    variadic = captured(lambda *xs, **ys: sum(xs) + ys["k"], shape(3), shape(3), k=shape(3))
    assert [a.path for a in variadic.arguments] == ["xs/0", "xs/1", "k"]


def test_jitted_functions_keep_their_options() -> None:
    @functools.partial(jax.jit, donate_argnums=0, static_argnames="power")
    def step(x, power):
        return x**power

    program = captured(step, shape(4), power=3)
    assert [a.donated for a in program.arguments] == [True]
    with pytest.raises(shardwise.ShardwiseError, match="already jitted"):
        shardwise.analyze(step, shape(4), kwargs={"power": 3}, donate_argnums=0)


def test_shardings_on_arguments_are_kept() -> None:
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(kind,) * 2)
        sharded = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data", None)))
        program = captured(lambda x, y: x + y, sharded, shape(8, 4))
        assert [a.spec for a in program.arguments] == [(("data",), ()), None]


def test_constraints_and_names_are_kept() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

    def fn(x):
        y = checkpoint_name(x * 2, "doubled")
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, PartitionSpec("data")))

    program = captured(fn, shape(8, 4))
    attributes = {op.kind: dict(op.attributes) for op in program.ops if op.attributes}
    assert attributes["name"] == {"name": "doubled"}
    assert attributes["sharding_constraint"] == {"spec": (("data",),)}


def test_shard_map_keeps_its_specs() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    body = jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec()
    )
    analysis = shardwise.analyze(lambda x: body(x) + 1, shape(8, 4))
    assert not analysis.opaque_ops
    borders = [op for op in analysis.program.ops if op.kind.startswith("shard_map.")]
    assert [(op.kind, op.attribute("spec")) for op in borders] == [
        ("shard_map.input", (("data",),)),
        ("shard_map.output", ()),
    ]
    assert [op.attribute("axes") for op in analysis.program.ops if op.kind.startswith("psum")] == [("data",)]


def test_source_lines_are_the_users() -> None:
    def fn(x):
        a = jnp.where(x > 0, x, 0.0)
        b = jnp.where(a > 1, a, 1.0)  # the jitted library function was traced on the line above
        return b

    program = captured(fn, shape(8))
    first = fn.__code__.co_firstlineno
    lines = [program.source_of(op).line - first for op in program.ops if op.kind == "select_n"]
    assert lines == [1, 2]
    assert all(program.source_of(op).file.endswith("test_capture.py") for op in program.ops if op.kind == "select_n")


def test_a_405b_step_is_captured_from_shapes() -> None:
    from shardwise import zoo

    program = zoo.load("llama3", "405b")
    analysis = shardwise.analyze(program.fn, *program.args, donate_argnums=program.donate_argnums)
    held = sum(analysis.program.values[a.value].nbytes for a in analysis.program.arguments)
    assert held > 2e12
    assert any(a.donated for a in analysis.program.arguments)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda: jnp.float32(1.0), ()),
        (lambda x: (), (shape(3),)),
        (lambda x: x, (shape(3),)),
        (lambda x: x + 1, (shape(),)),
        (lambda x: x + 1, (shape(0, 4),)),
        (lambda x: x.reshape(0, 8) @ jnp.ones((8, 2)), (shape(4, 0),)),
        (lambda x: jnp.concatenate([x, x]), (shape(0),)),
        (lambda x: x, (3,)),
        (lambda x: x, (None,)),
        (lambda x: x, ({},)),
        (lambda k: jax.random.normal(k, (4, 2)), (jax.eval_shape(lambda: jax.random.key(0)),)),
    ],
)
def test_empty_scalar_and_zero_sized_programs_are_fine(fn, args) -> None:
    analysis = shardwise.analyze(fn, *args)
    check_program(analysis.program)
    assert str(analysis)
    assert analysis.to_json()["counts"]["conflicts"] == 0


def test_a_device_put_of_a_tree_is_one_op_for_each_array() -> None:
    """One op of 30 arrays would have a candidate for every pair of their dimensions on two axes."""

    def copied(tree):
        return jax.tree.map(jnp.sin, jax.device_put(tree))

    arrays = [shape(8, 4 + k) for k in range(30)]
    analysis = shardwise.analyze(copied, arrays)
    puts = [op for op in analysis.program.ops if op.kind == "device_put"]
    assert len(puts) == 30 and all(len(op.operands) == len(op.results) == 1 for op in puts)
