"""Functions and arguments as people really have them: odd callables, clashing names, meshes, every kind of control flow."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardwise
from shardwise.dims.analysis import Analysis
from shardwise.ir.program import Origin
from tests.capture import capture
from tests.dims.programs import shape
from tests.ir.verify import check_program

#: Closed over by loops below.
TABLE = np.ones((8, 8), np.float32)


def analyzed(fn: Any, /, *args: Any, **kwargs: Any) -> Analysis:
    analysis = shardwise.analyze(fn, *args, **kwargs)
    check_program(analysis.program)
    assert str(analysis) and analysis.to_json()
    return analysis


def paths(analysis: Analysis) -> list[str]:
    return [a.path for a in analysis.program.arguments]


def out_paths(analysis: Analysis) -> list[str]:
    return [analysis.program.values[v].path for v in analysis.program.outputs]


# Arguments and their names.


def test_static_arguments_of_a_jitted_function_are_known() -> None:
    """A static number looks like an array; only ``jax.jit`` can tell."""
    by_position = jax.jit(lambda n, x, y: (x if n > 2 else y) * n, static_argnums=0)
    assert paths(analyzed(by_position, 3, shape(8), shape(8))) == ["x", "y"]
    by_name = jax.jit(lambda x, n, y: (x if n > 2 else y) * n, static_argnames="n")
    assert paths(analyzed(by_name, shape(8), 3, shape(8))) == ["x", "y"]
    assert paths(analyzed(by_name, shape(8), kwargs={"n": 3, "y": shape(8)})) == ["x", "y"]
    assert paths(analyzed(lambda x, n: x * n, shape(8), 3, static_argnums=-1)) == ["x"]


def test_paths_that_read_alike_are_told_apart() -> None:
    mesh = jax.make_mesh((1, 1), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def on(axis: str, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(axis)))

    analysis = analyzed(lambda p: p, {"w": {"b": on("a", 4)}, "w/b": on("b", 6), "v": shape(3)})
    assert paths(analysis) == ["p/v", "p['w']['b']", "p['w/b']"]
    assert out_paths(analysis) == ["out/v", "out['w']['b']", "out['w/b']"]
    assert [a.spec for a in analysis.program.arguments] == [None, (("a",),), (("b",),)]
    assert analysis.color_of("p['w/b']", 0).size == 6


def test_an_argument_called_out_is_no_output() -> None:
    analysis = analyzed(lambda out: out["w"] * 2, {"w": shape(8)})
    assert paths(analysis) == ["out/w"] and out_paths(analysis) == ["result"]
    assert "outer[0]" in str(analyzed(lambda outer: outer * 2, shape(8)))


def test_arguments_may_be_called_fn() -> None:
    assert paths(analyzed(lambda fn, args: fn + args, kwargs={"fn": shape(3), "args": shape(3)})) == ["args", "fn"]


def test_outputs_that_are_inputs_twice_or_constant() -> None:
    analysis = analyzed(lambda x: (x, x, None, {"k": 1, "t": True}, jnp.ones(3), ()), shape(8))
    assert out_paths(analysis) == ["out/0", "out/1", "out/3/k", "out/3/t", "out/4"]


@pytest.mark.parametrize(
    "dtype", "bool int8 uint4 int4 int2 float8_e4m3fn float8_e5m2 float4_e2m1fn bfloat16 complex64 uint32".split()
)
def test_every_dtype(dtype: str) -> None:
    analysis = analyzed(lambda x: (x, x.reshape(-1), x.T[0]), shape(4, 2, dtype=dtype))
    bits = {"bool": 8, "bfloat16": 16, "complex64": 64, "uint32": 32, "int2": 2}.get(dtype)
    bits = bits or (4 if "4" in dtype and "e4m3" not in dtype else 8)
    assert analysis.program.values[0].nbytes == bits


def test_symbolic_shapes_are_refused() -> None:
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4"), jnp.float32)
    with pytest.raises(shardwise.ShardwiseError, match="x has a symbolic shape: give its sizes as numbers"):
        shardwise.analyze(lambda x: x, symbolic)


# Callables.


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    w: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w

    def method(self, x: jax.Array, scale: float = 2.0) -> jax.Array:
        return self(x) * scale


@pytest.mark.parametrize(
    "fn",
    [
        Module(jnp.ones((4, 2))),
        Module(jnp.ones((4, 2))).method,
        functools.partial(Module.method, Module(jnp.ones((4, 2))), scale=3.0),
        jax.tree_util.Partial(Module.method, Module(jnp.ones((4, 2)))),
        jax.jit(Module(jnp.ones((4, 2))).method),
        jax.vmap(Module(jnp.ones((4, 2))).method),
    ],
    ids=["module", "method", "partial", "tree partial", "jitted method", "vmapped method"],
)
def test_callables(fn: Any) -> None:
    analysis = analyzed(fn, shape(8, 4))
    assert paths(analysis) == ["x"]
    assert [v.shape for v in analysis.program.values if v.origin is Origin.CONSTANT] == [(4, 2)]


# Meshes.


def test_explicit_shardings_are_part_of_the_type() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data", None)))
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(lambda x: lax.psum(x, "data"), in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
        analysis = analyzed(lambda x: mapped(jnp.sin(x)), x)
    assert [a.spec for a in analysis.program.arguments] == [(("data",), ())]
    assert "shard_map.input" in [op.kind for op in analysis.program.ops]


def test_in_shardings_of_jit_are_kept() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))
    analysis = analyzed(jax.jit(lambda p, x: p["w"] + x, in_shardings=({"w": split}, None)), {"w": shape(8)}, shape(8))
    assert [a.spec for a in analysis.program.arguments] == [(("data",),), None]


def test_stated_rules_need_not_call_a_reduction_one() -> None:
    @custom_partitioning
    def product(x, y):
        return x @ y

    product.def_partition(
        partition=lambda *a: None, infer_sharding_from_operands=lambda *a: None, sharding_rule="i j, j k -> i k"
    )
    analysis = analyzed(product, shape(8, 4), shape(4, 2))
    (op,) = [op for op in analysis.program.ops if op.kind == "custom_partitioning"]
    assert str(op.rule) == "(i,j),(j,k)->(i,k); blocked j"


# Control flow.


def nested(x, w, t):
    def scanned(c, row):
        def inner(c, _):
            return lax.cond(c.sum() > row, lambda c: c @ w, lambda c: c @ TABLE, c), None

        return lax.scan(inner, c, None, length=3)[0], c.sum()

    def body(state):
        c, i = state
        return lax.scan(scanned, c, t, reverse=True)[0], i + 1

    return lax.while_loop(lambda state: state[1] < 5, body, (x, 0))


def test_nested_loops_and_branches() -> None:
    program = analyzed(nested, shape(4, 8), shape(8, 8), shape(7)).program
    assert [(r.kind, r.trips, r.trips_known) for r in program.regions[1:]] == [
        ("while.cond", 5, True),
        ("while.body", 5, True),
        ("scan.body", 7, True),
        ("scan.body", 3, True),
        ("cond.branch0", 1, True),
        ("cond.branch1", 1, True),
    ]
    assert program.trips.tolist() == [1, 5, 5, 35, 105, 105, 105]


def test_of_branches_the_dearest_counts() -> None:
    def fn(x, w, n):
        twice = lambda x: lax.scan(lambda c, _: (c @ w, None), x, None, length=2)[0]  # noqa: E731
        return lax.switch(n, [lambda x: x, lambda x: x @ w, twice], x)

    analysis = analyzed(fn, shape(4, 8), shape(8, 8), shape(dtype="int32"))
    assert analysis.program.runs.tolist() == [1, 0, 0, 1, 2]
    products = 2 * 2 * 4 * 8 * 8
    assert products <= analysis.to_json()["program"]["flops"] < products + 16
    assert analysis.color_of("x", 0).flops == products


def test_switches_of_many_branches() -> None:
    """Links of 65 branches and links of two are different ops."""

    def fn(n, x):
        first = lax.switch(n, [lambda x, k=k: x * k for k in range(65)], x)
        return lax.cond(n > 0, jnp.sin, jnp.cos, first)

    assert len(analyzed(fn, shape(dtype="int32"), shape(8, 4)).colors) == 2


def test_loops_of_unknown_length_are_reported_and_dead_ones_are_not() -> None:
    def fn(x, n):
        lax.while_loop(lambda c: c.sum() < 3, lambda c: c * 2, x)
        return lax.fori_loop(0, n, lambda i, c: c + i, x)

    analysis = analyzed(fn, shape(8), shape(dtype="int32"))
    program = analysis.to_json()["program"]
    assert program["loops"] == program["loops_of_unknown_trips"] == 1
    assert "1 loop of unknown length counted as one trip" in str(analysis)


def solve(a, b):
    return lax.custom_linear_solve(
        lambda x: a @ x, b, lambda _, b: jnp.linalg.solve(a, b), transpose_solve=lambda _, b: jnp.linalg.solve(a.T, b)
    )


def root(a):
    def newton(f, x):
        return lax.fori_loop(0, 10, lambda _, x: x - f(x) / (3 * x * x), x)

    return lax.custom_root(lambda x: x**3 - a, jnp.ones_like(a), newton, lambda g, y: y / g(jnp.ones_like(y)))


def policies(ws, x):
    named = jax.checkpoint_policies.save_only_these_names("h")

    def layer(x, w):
        return jax.checkpoint(jnp.sin)(checkpoint_name(jnp.tanh(x @ w), "h")), None

    def loss(ws, x):
        return lax.scan(jax.checkpoint(layer, policy=named), x, ws)[0].sum()

    return jax.grad(jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable))(ws, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def scaled(f, x, n):
    return f(x) * n


scaled.defvjp(lambda f, x, n: (f(x) * n, x), lambda f, n, x, g: (jax.vjp(f, x)[1](g)[0] * n,))


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda x: lax.scan(lambda c, r: (c + r, c), jnp.zeros(8), x, unroll=2, reverse=True), (shape(6, 8),)),
        (lambda x: lax.scan(lambda c, _: (c * 2, c), x, None, length=0), (shape(8),)),
        (lambda x: lax.scan(lambda c, _: ((c[1], c[0].T), None), (x, x), None, length=3), (shape(8, 8),)),
        (lambda x: lax.map(lambda r: r["a"] @ r["b"], {"a": x, "b": x}, batch_size=2), (shape(3, 8, 8),)),
        (lambda x: lax.associative_scan(jnp.multiply, x, reverse=True), (shape(7, 4),)),
        (lambda x: lax.while_loop(lambda c: (c @ x).sum() < 3, lambda c: c @ x + TABLE, x), (shape(8, 8),)),
        (lambda x: lax.cond(x.sum() > 0, lambda: x @ x.T, lambda: jnp.zeros((8, 8))), (shape(8, 4),)),
        (jax.grad(lambda a, b: solve(a, b).sum(), argnums=(0, 1)), (shape(4, 4), shape(4))),
        (jax.grad(lambda a: root(a).sum()), (shape(8),)),
        (policies, (shape(3, 8, 8), shape(4, 8))),
        (
            lambda x: (
                jax.grad(lambda x: scaled(jnp.sin, x, 3).sum())(x),
                jax.vmap(scaled, (None, 0, None))(jnp.cos, x, 2),
            ),
            (shape(8),),
        ),
        (lambda x: (jax.hessian(lambda x: jnp.prod(jnp.sin(x)))(x), jax.jacfwd(jnp.tan)(x)), (shape(6),)),
        (lambda x: jax.linearize(lambda x: jnp.sin(x) @ x.T, x)[1](x), (shape(8, 4),)),
        (lambda x: lax.composite(lambda x: jnp.sin(x) * 2, "my.op")(x), (shape(8),)),
        (lambda x: lax.optimization_barrier((x, 2.0)), (shape(8),)),
    ],
    ids=lambda value: "" if callable(value) else "x".join(str(s.shape) for s in value),
)
def test_control_flow_and_derivatives_have_no_opaque_op(fn: Any, args: tuple[Any, ...]) -> None:
    analysis = analyzed(fn, *args)
    assert not analysis.opaque_ops
    program = analysis.program
    sources = [program.source_of(op) for op in program.ops if op.kind not in ("argument", "output", "constant")]
    assert all(s.file == __file__ for s in sources)


def test_effects_in_loops_stay_and_references_are_values() -> None:
    def fn(x):
        total = jax.new_ref(jnp.zeros(4))

        def body(c, row):
            total[...] += row
            jax.debug.print("{}", row)
            return c, None

        lax.scan(body, 0.0, x)
        io_callback(lambda x: None, None, x.sum(), ordered=True)
        return total[...]

    kinds = [op.kind for op in analyzed(fn, shape(8, 4)).opaque_ops]
    assert "io_callback" in kinds and not {"new_ref", "swap", "get"} & set(kinds)
    assert any(kind.startswith("debug") for kind in kinds)


def test_every_line_gets_its_own_ops() -> None:
    """Library functions are traced once, wherever they are called first."""

    def fn(x, w):
        a = jax.nn.softmax(x @ w)
        b = jax.nn.softmax(a + 1)
        c = jnp.tril(b @ b.T)
        d = jnp.tril(a @ a.T)
        e = jax.nn.gelu(c) + jnp.var(c)
        f = jax.nn.gelu(d) + jnp.var(d)
        g = lax.scan(lambda c, z: (c + jax.nn.silu(z), None), e[0], f)[0]
        return jax.vmap(jax.nn.silu)(f) + g

    program = capture(fn, shape(8, 8), shape(8, 8))
    lines: dict[int, list[str]] = {}
    for op in program.ops:
        if op.kind not in ("argument", "output", "constant"):
            source = program.source_of(op)
            assert source.file == __file__
            lines.setdefault(source.line - inspect.getsourcelines(fn)[1], []).append(op.kind)
    assert sorted(lines) == list(range(1, 9))
    assert lines[1][1:] == lines[2][1:] and lines[3] == lines[4] and lines[5] == lines[6]
