"""``shardwise.plan_together``: one layout of what several programs share, and the right numbers when they run in turn."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwise
from shardwise.errors import DecisionError, PlanError, QueryError

MESH = {"data": 4, "model": 2}


def apply(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ w["up"]) @ w["down"]


def wide(rows: int) -> tuple[Any, Any]:
    """Two layers of 4 GB, and an input of some rows."""
    w = {"up": jax.ShapeDtypeStruct((8192, 65536), "float32"), "down": jax.ShapeDtypeStruct((65536, 8192), "float32")}
    return w, jax.ShapeDtypeStruct((rows, 8192), "float32")


def prefill(params: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The last output, and a cache with room for one more position."""
    cache = jnp.pad(x @ params["k"], ((0, 0), (0, 1), (0, 0)))
    return apply(params, x[:, -1]), cache


def decode(params: dict[str, jax.Array], cache: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    cache = cache.at[:, -1].set(x @ params["k"])
    weights = jax.nn.softmax(jnp.einsum("bd,btd->bt", x, cache), axis=-1)
    return apply(params, jnp.einsum("bt,btd->bd", weights, cache)), cache


def test_shared_arrays_have_one_layout_and_numbers_are_those_of_plain_jax() -> None:
    rng = np.random.default_rng(0)
    shapes = {"up": (32, 64), "down": (64, 32), "k": (32, 32)}
    params = {name: (rng.normal(size=shape) / 8).astype("float32") for name, shape in shapes.items()}
    prompt, last = (rng.normal(size=shape).astype("float32") for shape in [(16, 24, 32), (16, 32)])
    cache = jax.ShapeDtypeStruct((16, 25, 32), "float32")
    plans = shardwise.plan_together(
        {"prefill": (prefill, (params, prompt)), "decode": (decode, (params, cache, last), {"donate_argnums": 1})},
        shared={"params": "params", "cache": {"prefill": "out/1", "decode": ["cache", "out/1"]}},
        weights={"decode": 8},
        mesh=MESH,
    )
    for name in shapes:
        assert plans["decode"].spec(f"params/{name}") == plans["prefill"].spec(f"params/{name}")
    assert plans["prefill"].spec("out/1") == plans["decode"].spec("cache") == plans["decode"].spec("out/1")

    planned = plans["prefill"].jit(prefill), plans["decode"].jit(decode)
    outputs = []
    for run_prefill, run_decode in (planned, (prefill, decode)):
        first, filled = run_prefill(params, prompt)
        outputs.append((first, *run_decode(params, filled, last)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *outputs)


def test_weights_decide_whose_layout_is_kept() -> None:
    """Few rows want the weights sharded where they are; many rows in one chip's memory want them whole."""
    (w, many), (_, few) = wide(65536), wide(8)
    programs = {"many": (apply, (w, many)), "few": (apply, (w, few))}
    where = {"shared": {"w": "w"}, "topology": "v5e:2x4", "mesh": {"model": 8}}
    often = shardwise.plan_together(programs, weights={"few": 100_000}, **where)
    rarely = shardwise.plan_together(programs, weights={"many": 100_000}, **where)
    assert often["few"].predicted.time_s <= rarely["few"].predicted.time_s
    assert rarely["many"].predicted.time_s <= often["many"].predicted.time_s
    for plans in (often, rarely):
        assert plans["few"].spec("w/up") == plans["many"].spec("w/up")
        assert plans.time_s >= plans.alone_s * 0.999


def test_it_is_as_good_as_pinning_one_programs_layout_in_the_other() -> None:
    (w, many), (_, few) = wide(4096), wide(8)
    where: dict[str, Any] = {"topology": "v5e:2x4", "mesh": {"data": 2, "model": 4}}
    programs = {"many": (apply, (w, many)), "few": (apply, (w, few))}
    plans = shardwise.plan_together(programs, shared={"w": "w"}, weights={"few": 50}, **where)
    alone = {name: shardwise.plan(fn, *args, **where) for name, (fn, args) in programs.items()}
    for owner, other in (("many", "few"), ("few", "many")):
        pins = {path: alone[owner].spec(path) for path in ("w/up", "w/down")}
        pinned = shardwise.plan(apply, *programs[other][1], pins=pins, **where)
        times = {owner: alone[owner].predicted.time_s, other: pinned.predicted.time_s}
        assert plans.time_s <= (times["many"] + 50 * times["few"]) * 1.001


def test_on_an_open_mesh_a_training_step_and_its_evaluation_share_a_layout() -> None:
    """Axes are named by what they carry; named strategies propose layouts with these names too."""
    shape = jax.ShapeDtypeStruct
    w = {"up": shape((1024, 4096), "float32"), "down": shape((4096, 1024), "float32")}

    def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        return jnp.mean(apply(params, batch) ** 2)

    def train(params: dict[str, jax.Array], batch: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch))

    programs = {
        name: (fn, (w, shape((rows, 1024), "float32")))
        for name, fn, rows in (("train", train, 8192), ("eval", loss, 64))
    }
    plans = shardwise.plan_together(programs, shared={"params": "params"}, topology="v5e:2x4")
    assert plans["train"].mesh == plans["eval"].mesh and plans["train"].mesh.devices == 8
    assert plans["train"].spec("params/up") == plans["eval"].spec("params/up")


def test_an_axis_that_carries_the_batch_alone_is_called_data() -> None:
    """Alone the training step shards its parameters with the batch; ten thousand evaluations for each step use them whole."""
    shape = jax.ShapeDtypeStruct
    w = {"up": shape((1024, 4096), "float32"), "down": shape((4096, 1024), "float32")}

    def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        return jnp.mean(apply(params, batch) ** 2)

    def train(params: dict[str, jax.Array], batch: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch))

    programs = {
        name: (fn, (w, shape((rows, 1024), "float32")))
        for name, fn, rows in (("train", train, 65536), ("eval", loss, 8192))
    }
    plans = shardwise.plan_together(programs, shared={"params": "params"}, weights={"eval": 10_000}, topology="v5e:2x4")
    assert plans.alone["train"].mesh.names == ("fsdp",) and plans["train"].mesh.names == ("data",)
    assert plans.shared["params/up"] == ((), ())
    for plan in plans.plans.values():
        assert plan.spec("batch")[0] == "data" and plan.spec("params/up") == P()
        assert all("fsdp" not in str(text) for text in (*plan.decisions, *plan.notes, plan.moved()))


def test_it_prints_both_times_and_the_layout() -> None:
    w, x = (jax.ShapeDtypeStruct(s, "float32") for s in [(512, 2048), (4096, 512)])
    programs = {"a": (lambda w, x: x @ w, (w, x)), "b": (lambda w, x: (x @ w).sum(), (w, x))}
    plans = shardwise.plan_together(programs, shared={"w": "w"}, mesh=MESH, weights={"b": 3})
    text = str(plans)
    assert (
        text.startswith("a, b on data 4 × model 2")
        and "program  weight  step time" in text
        and "over        shared" in text
    )
    assert plans.time_s == pytest.approx(plans["a"].predicted.time_s + 3 * plans["b"].predicted.time_s)
    assert list(plans) == ["a", "b"] and len(plans) == 2


@pytest.mark.parametrize(
    ("shared", "weights", "error", "words"),
    [
        ({"w": "v"}, {}, QueryError, "no program has an argument or output at 'v'; there are w, x, out"),
        ({"w": "ww"}, {}, QueryError, "no program has an argument or output at 'ww'; did you mean w?"),
        ({"w": {"c": "w"}}, {}, PlanError, "'c', which is no program"),
        ({"w": {"a": "v", "b": "w"}}, {}, QueryError, "no argument or output has the path 'v'"),
        (
            {"w": {"a": "w", "b": "x"}},
            {},
            PlanError,
            r"a's w is float32[512, 2048] and b's x is float32[4096, 512]: shared",
        ),
        ({"w": {"a": "w"}}, {}, PlanError, "only one program has it"),
        ({"w": "w"}, {"c": 2}, PlanError, "weights name 'c', and the programs are a, b"),
        ({"w": "w"}, {"a": 0}, PlanError, "a weight is a positive number, not a: 0"),
    ],
)
def test_what_cannot_be_shared_is_an_error(shared: Any, weights: Any, error: type[Exception], words: str) -> None:
    w, x = (jax.ShapeDtypeStruct(s, "float32") for s in [(512, 2048), (4096, 512)])
    programs = {"a": (lambda w, x: x @ w, (w, x)), "b": (lambda w, x: (x @ w).sum(), (w, x))}
    with pytest.raises(error, match=re.escape(words)):
        shardwise.plan_together(programs, shared=shared, weights=weights, mesh=MESH)


@pytest.mark.parametrize(
    ("layers", "sizes", "dtype", "words"),
    [
        (
            3,
            (16, 16),
            "float32",
            r"a's w/2 is float32\[16, 16\], and b has no such array at 'w': shared trees have the same",
        ),
        (
            1,
            (16, 16),
            "float32",
            r"b's w/1 is float32\[16, 16\], and a has no such array at 'w': shared trees have the same",
        ),
        (2, (16, 32), "float32", r"a's w/0 is float32\[16, 32\] and b's w/0 is float32\[16, 16\]: shared arrays have"),
        (
            2,
            (16, 16),
            "bfloat16",
            r"a's w/0 is bfloat16\[16, 16\] and b's w/0 is float32\[16, 16\]: shared arrays have",
        ),
    ],
)
def test_programs_whose_shared_trees_differ(layers: int, sizes: tuple[int, int], dtype: str, words: str) -> None:
    def total(w: list[jax.Array], x: jax.Array) -> jax.Array:
        return sum((x @ each).sum() for each in w)

    x = jax.ShapeDtypeStruct((64, 16), "float32")
    one = [jax.ShapeDtypeStruct(sizes, dtype)] * layers
    other = [jax.ShapeDtypeStruct((16, 16), "float32")] * 2
    programs = {"a": (total, (one, x)), "b": (total, (other, x))}
    with pytest.raises(PlanError, match=words):
        shardwise.plan_together(programs, shared={"w": "w"}, mesh=MESH)


def test_programs_share_the_axes_of_a_given_mesh_as_they_are() -> None:
    """Alone the first would use an axis in parts; together both have the given mesh, and a layout of its axes."""
    from tests.planner import test_splits

    small, large = test_splits.arguments(3 * 4099, 9), test_splits.arguments(64, 9)
    where: dict[str, Any] = {"mesh": {"model": 8}, "topology": "v5e:2x4"}
    assert shardwise.plan(test_splits.decode, *small, **where).mesh.names == ("model_0", "model_1")
    programs = {"a": (test_splits.decode, small), "b": (test_splits.decode, large)}
    plans = shardwise.plan_together(programs, shared={"params": "params"}, **where)
    assert {plan.mesh.names for plan in plans.values()} == {("model",)}
    assert plans["a"].spec("params/q") == plans["b"].spec("params/q")


def test_the_current_mesh_is_used() -> None:
    w, x = (jax.ShapeDtypeStruct(s, "float32") for s in [(512, 2048), (4096, 512)])
    programs = {"a": (lambda w, x: x @ w, (w, x)), "b": (lambda w, x: (x @ w).sum(), (w, x))}
    with jax.set_mesh(jax.make_mesh((8,), ("chips",))):
        assert shardwise.plan_together(programs, shared={"w": "w"})["a"].mesh.names == ("chips",)


def test_wrong_programs_are_an_error() -> None:
    with pytest.raises(PlanError, match="there are no programs"):
        shardwise.plan_together({}, shared={}, mesh=MESH)
    w = jax.ShapeDtypeStruct((512, 2048), "float32")
    with pytest.raises(
        PlanError, match=r"a: the third item has options of jit, which are static_argnums, .*'donate': 1"
    ):
        shardwise.plan_together({"a": (lambda w: w, (w,), {"donate": 1})}, shared={"w": "w"}, mesh=MESH)
    with pytest.raises(PlanError, match=r"given as \(function, arguments\)"):
        shardwise.plan_together({"a": 3}, shared={}, mesh=MESH)  # type: ignore[dict-item]


def test_a_pin_does_not_force_activations_to_follow() -> None:
    """Weights that are sharded at rest are gathered for a large batch: faster than computing as they are stored."""
    w, x = wide(65536)
    where: dict[str, Any] = {"topology": "v5e:2x4", "mesh": {"model": 8}}
    P = jax.sharding.PartitionSpec
    plan = shardwise.plan(apply, w, x, pins={"w/up": P(None, "model"), "w/down": P("model")}, **where)
    assert plan.spec("w/up") == P(None, "model") and plan.spec("x") == P("model")
    follows = shardwise.plan(apply, w, x, pins={"w/up": P(None, "model"), "w/down": P("model")}, tactics=[], **where)
    assert plan.predicted.time_s < follows.predicted.time_s
    with pytest.raises(DecisionError):
        shardwise.plan(apply, w, x, pins={"w/up": P("data")}, **where)


def test_updated_arrays_have_the_layout_of_those_that_they_replace() -> None:
    """Training and evaluation share parameters: the next step takes what this one returns, so that it has the same layout."""

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return (apply(params, x) ** 2).mean()

    def train(params: dict[str, jax.Array], moments: dict[str, jax.Array], x: jax.Array) -> tuple[Any, ...]:
        value, gradient = jax.value_and_grad(loss)(params, x)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradient)
        return jax.tree.map(lambda w, m: w - 0.1 * m, params, moments), moments, value

    w = {"up": jax.ShapeDtypeStruct((1024, 4096), "float32"), "down": jax.ShapeDtypeStruct((4096, 1024), "float32")}
    x = jax.ShapeDtypeStruct((256, 1024), "float32")
    programs = {"train": (train, (w, w, x), {"donate_argnums": (0, 1)}), "eval": (loss, (w, x))}
    plans = shardwise.plan_together(
        programs, shared={"params": "params"}, mesh=MESH, topology="v5e:2x4", weights={"eval": 9}
    )
    stated = shardwise.plan_together(
        programs,
        shared={"params": {"train": ["params", "out/0"], "eval": "params"}},
        mesh=MESH,
        topology="v5e:2x4",
        weights={"eval": 9},
    )
    for name in ("up", "down"):
        assert plans["train"].spec(f"out/0/{name}") == plans["train"].spec(f"params/{name}")
        assert plans["eval"].spec(f"params/{name}") == plans["train"].spec(f"params/{name}")
    assert plans.time_s == stated.time_s >= plans.alone_s * 0.999
