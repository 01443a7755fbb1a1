"""Pins on inner values that are marked by name: found everywhere, stated in the program, and explained where they cannot be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import shardwise
from shardwise.tactics.pins import Marks
from shardwise.tactics.strategies import DataParallel
from tests.capture import capture
from tests.dims.programs import shape

MESH = {"data": 2, "model": 4}


def layer(x, w):
    return jnp.tanh(checkpoint_name(jnp.tanh(x @ w["in"]), "hidden") @ w["out"])


def scanned(w, x):
    def body(x, w):
        return jax.checkpoint(layer)(x, w), None

    return jnp.sum(jax.lax.scan(body, x, w)[0] ** 2)


def unrolled(w, x):
    for k in range(3):
        x = layer(x, jax.tree.map(lambda a, k=k: a[k], w))
    return jnp.sum(x**2)


def arguments() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    w = {"in": jax.random.normal(keys[0], (3, 16, 32)) / 4, "out": jax.random.normal(keys[1], (3, 32, 16)) / 5}
    return w, jax.random.normal(keys[2], (8, 16))


def stated(plan: shardwise.Plan, op: str) -> list[tuple[tuple[str, ...], ...]]:
    return [c.spec for c in plan.constraints if c.op == op]


@pytest.mark.parametrize(("loss", "count"), [(scanned, 2), (unrolled, 3)])
def test_a_name_pins_every_layer_forward_and_recomputed(loss, count: int) -> None:
    fn = jax.value_and_grad(loss)
    plan = shardwise.plan(fn, *arguments(), mesh=MESH, tactics=[], pins={"hidden": P("data", "model")})
    assert stated(plan, "name") == [(("data",), ("model",))] * count
    assert sum(str(d).endswith("pinned to [data, model]") for d in plan.decisions) == count
    assert plan.array("x").spec == (("data",), ()), "the rest goes along"
    assert plan.array("w/in").spec == ((), (), ("model",)) and plan.array("w/out").spec == ((), ("model",), ())
    rewritten = str(jax.make_jaxpr(plan.apply(fn, partitioner="xla"))(*arguments()))
    assert rewritten.count("sharding_constraint[") == len(plan.constraints)
    assert shardwise.verify(plan, fn, *arguments()).agrees


def test_a_name_pinned_whole_holds_against_tactics() -> None:
    fn = jax.grad(unrolled)
    where = {"mesh": MESH, "tactics": [DataParallel("data")], "roles": {"batch": "x"}}
    plan = shardwise.plan(fn, *arguments(), pins={"hidden": P()}, **where)
    assert stated(plan, "name") == [((), ())] * 3 and plan.array("x").spec == (("data",), ())
    assert [c.op for c in plan.collectives if c.value == "float32[8,32]" and c.kind == "all-gather"].count("name") == 3
    assert shardwise.verify(plan, fn, *arguments()).agrees


def test_paths_come_before_names() -> None:
    plan = shardwise.plan(
        lambda x: checkpoint_name(x * 2, "x") + 1, shape(8, 16), mesh=MESH, tactics=[], pins={"x": P("data")}
    )
    assert plan.array("x").spec == (("data",), ()) and not stated(plan, "name")


def block(x, w):
    return jnp.tanh(x @ w)


@pytest.mark.parametrize("transform", [lambda f: f, jax.value_and_grad], ids=["forward", "grad"])
def test_the_result_of_a_named_call(transform) -> None:
    named = jax.named_call(block, name="up")

    def loss(w, x):
        return jnp.sum((named(x, w["in"][0]) @ w["out"][0]) ** 2)

    fn = transform(loss)
    plan = shardwise.plan(fn, *arguments(), mesh=MESH, tactics=[], pins={"up": P("data", "model")})
    assert stated(plan, "tanh") == [(("data",), ("model",))]
    assert shardwise.verify(plan, fn, *arguments()).agrees


def test_named_calls_in_loops_and_checkpoints() -> None:
    named = jax.checkpoint(jax.named_call(block, name="up"))

    def loss(w, x):
        def body(x, w):
            return named(x, w["in"]) @ w["out"], None

        return jnp.sum(jax.lax.scan(body, x, w)[0] ** 2)

    fn = jax.value_and_grad(loss)
    marks = Marks(capture(fn, *arguments()))
    made = [[marks.program.ops[marks.program.definitions[v][0]].kind for v in call] for call in marks.calls("up")]
    assert made == [["tanh"]], "what is recomputed leaves only into cotangents"
    plan = shardwise.plan(fn, *arguments(), mesh=MESH, tactics=[], pins={"up": P("data", "model")})
    assert stated(plan, "tanh") == [(("data",), ("model",))]
    assert shardwise.verify(plan, fn, *arguments()).agrees


def test_a_loop_inside_a_named_call_leaves_by_its_result() -> None:
    def loop(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0]

    program = capture(lambda x: jax.named_call(loop, name="loop")(x) + 1, shape(8, 16))
    ((value,),) = Marks(program).calls("loop")
    assert program.ops[program.definitions[value][0]].kind == "scan.carry" and program.values[value].shape == (8, 16)


def test_several_results_are_pinned_by_number() -> None:
    def both(x, w):
        return jnp.tanh(x @ w), jnp.sum(x, axis=0)

    def fn(x, w):
        a, b = jax.named_call(both, name="both")(x, w)
        return a * 2, b * 3

    shapes = shape(8, 16), shape(16, 32)
    pins = {"both/0": P("data", "model"), "both/1": P("model")}
    plan = shardwise.plan(fn, *shapes, mesh=MESH, tactics=[], pins=pins)
    assert stated(plan, "tanh") == [(("data",), ("model",))] and stated(plan, "reduce_sum") == [(("model",),)]
    with pytest.raises(shardwise.ShardwiseError) as caught:
        shardwise.plan(fn, *shapes, mesh=MESH, tactics=[], pins={"both": P("data")})
    for part in ("'both' has 2 results", "both/0 is float32[8,32]", "both/1 is float32[16]", "test_marks.py"):
        assert part in str(caught.value)
    with pytest.raises(shardwise.ShardwiseError, match=r"no result number 2: the last is both/1"):
        shardwise.plan(fn, *shapes, mesh=MESH, tactics=[], pins={"both/2": P("data")})


def test_what_cannot_be_pinned_is_said_at_once() -> None:
    def fn(x, w):
        h = checkpoint_name(x @ w, "hidden")
        s = checkpoint_name(h.sum(axis=0), "hidden")
        again = checkpoint_name(checkpoint_name(h + s, "sum"), "total")
        return jax.named_call(jnp.tanh, name="squash")(again) * 2

    shapes = shape(8, 16), shape(16, 6)
    pins = {"hidden": P("data"), "hiden": P(), "sqush": P(), "sum": P(None, "model")}
    with pytest.raises(shardwise.ShardwiseError) as caught:
        shardwise.plan(fn, *shapes, mesh=MESH, tactics=[], pins=pins)
    text = str(caught.value)
    for part in (
        "'hidden' marks values of different ranks (float32[8,6]",
        "path 'hiden', and no inner value is marked by that name; did you mean hidden",
        "did you mean squash",
        "size 6 does not divide by 4",
        "sum at %",
    ):
        assert part in text, part
