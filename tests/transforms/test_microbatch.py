"""Micro-batches: the same numbers in a loop over parts of the batch, or a reason why not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwise
from shardwise import zoo
from shardwise.capture import jax_internals as internals
from shardwise.capture.trace import JitOptions
from shardwise.errors import InfeasibleError, PlanError, VariantError
from shardwise.tactics.strategies import FSDP, DataParallel
from shardwise.transforms.variants import Variant, Wanted, trace_variant
from tests.planner.test_plan_search import small_memory
from tests.plans.files import signed
from tests.programs import flax_programs

ROLES = {"batch": "batch", "params": "params"}


def parts(fn: Callable[..., Any], args: tuple[Any, ...], count: int, roles: Any = ROLES) -> Any:
    """The jaxpr of a function in micro-batches."""
    plain = trace_variant(fn, args, {}, JitOptions(), Variant())
    (variant,) = Wanted(count, remat=False).variants(
        plain, {role: (p,) if isinstance(p, str) else tuple(p) for role, p in roles.items()}
    )
    return trace_variant(fn, args, {}, JitOptions(), variant).jaxpr


def run(jaxpr: Any, *args: Any) -> list[Any]:
    evaluate: Any = jax.core.eval_jaxpr
    found: list[Any] = jax.jit(lambda *xs: evaluate(*internals.split_jaxpr(jaxpr), *xs))(*jax.tree.leaves(args))
    return found


def loops(jaxpr: Any) -> list[Any]:
    return [e for e in internals.split_jaxpr(jaxpr)[0].eqns if e.primitive.name == "scan"]


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def step(params: Any, moments: Any, batch: Any, short: Any = jnp.float32) -> Any:
    """Momentum, clipped by the norm over all gradients; ``tied`` is used twice."""

    def loss(p: Any) -> jax.Array:
        hidden = jax.nn.relu(batch["x"].astype(short) @ p["tied"].astype(short))
        hidden = hidden @ p["tied"].T.astype(short) + p["bias"]
        return jnp.mean((hidden @ p["out"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), grads)
    moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments, {"loss": value, "norm": norm}


def step_args(batch: int = 32) -> tuple[Any, ...]:
    tied, bias, out, x, y = arrays((12, 20), (12,), (12, 3), (batch, 12), (batch, 3))
    params = {"tied": tied, "bias": bias, "out": out}
    return params, jax.tree.map(np.zeros_like, params), {"x": x, "y": y}


@pytest.mark.parametrize("count", [2, 4, 16])
def test_a_training_step_has_the_same_result(count: int) -> None:
    args = step_args()
    want = jax.tree.leaves(jax.jit(step)(*args))
    for have, expected in zip(run(parts(step, args, count), *args), want, strict=True):
        np.testing.assert_allclose(have, expected, rtol=2e-5, atol=2e-6)


def test_one_accumulator_a_parameter_in_its_own_type_and_the_optimizer_once() -> None:
    (loop,) = loops(parts(partial(step, short=jnp.bfloat16), step_args(), 4))
    made = [str(v.aval) for v in loop.outvars]
    assert sorted(made) == sorted(["float32[]", "float32[12,20]", "float32[12]", "float32[3,12]"])
    inside = {e.primitive.name for e in internals.split_jaxpr(loop.params["jaxpr"])[0].eqns}
    assert "sqrt" not in inside and "dot_general" in inside


def test_outputs_of_the_batch_come_back_in_order() -> None:
    def fn(w: jax.Array, batch: jax.Array) -> Any:
        y = batch @ w
        flat = y.reshape(-1, 5)
        return {
            "rows": y,
            "transposed": y[:, 0, :].T,
            "merged": flat * 2,
            "minor": jnp.moveaxis(y, 0, 1).reshape(-1, 5),
            "largest": jnp.max(y, axis=0),
            "smallest": jnp.min(y),
            "any": jnp.any(y > 2.5),
            "all": jnp.all(y > -9.0, axis=(0, 2)),
            "bits": jnp.bitwise_and.reduce((y[:, 0, 0] > 0).astype(jnp.uint8) + 6),
            "filled": jnp.zeros((2 * len(batch), 3)) + w[0, 0],
            "whole": w + 1,
        }

    w, batch = arrays((4, 5), (12, 3, 4))
    want = jax.tree.leaves(jax.jit(fn)(w, batch))
    for have, expected in zip(run(parts(fn, (w, batch), 3), w, batch), want, strict=True):
        np.testing.assert_allclose(have, expected, rtol=1e-6)


def test_loops_branches_and_calls_over_the_batch() -> None:
    def fn(params: jax.Array, batch: jax.Array) -> Any:
        @jax.jit
        def loss(w: jax.Array) -> jax.Array:
            def layer(carry: Any, p: jax.Array) -> Any:
                x, penalty, depth = carry
                x = jax.lax.cond(jnp.sum(p) > 0, jnp.tanh, jnp.sin, x @ p)
                return (x, penalty + jnp.sum(x**2), depth + jnp.max(p)), None

            (x, penalty, depth), _ = jax.lax.scan(layer, (batch, jnp.zeros(()), jnp.ones(())), w)
            depth = jax.lax.stop_gradient(depth)
            return jnp.mean(x) * depth + 1e-3 * penalty + depth**2

        return jax.value_and_grad(loss)(params)

    args = tuple(arrays((3, 6, 6), (8, 6)))
    for have, want in zip(run(parts(fn, args, 4), *args), jax.jit(fn)(*args), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6)


def test_a_count_in_the_batch_has_a_loop_of_its_own_before() -> None:
    def fn(w: jax.Array, batch: Any) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            errors = jnp.sum((batch["x"] @ w) ** 2, axis=-1)
            return jnp.sum(errors * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1.0)

        return jax.value_and_grad(loss)(w)

    w, x, mask = arrays((6, 6), (8, 5, 6), (8, 5))
    args = w, {"x": x, "mask": jnp.where(mask > 0, 1.0, 0.0)}
    made = parts(fn, args, 4)
    count, main = loops(made)
    assert "dot_general" not in str(count.params["jaxpr"]) and "dot_general" in str(main.params["jaxpr"])
    for have, want in zip(run(made, *args), jax.jit(fn)(*args), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def by_size(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(x @ w) if len(x) > 4 else jnp.sum(x) * 2


def reset(w: jax.Array, x: jax.Array) -> Any:
    """The carry is the batch after the first iteration, and zero again in some."""

    def body(carry: jax.Array, p: jax.Array) -> Any:
        new = jax.lax.cond(p[0, 0] > 0, lambda c: jnp.ones_like(c), lambda c: c + x, carry @ p)
        return jnp.where(p[0, 1] > 0, jnp.zeros_like(new), new), new

    return jax.lax.scan(body, jnp.zeros((8, 4)), jnp.stack([w, -w, w.T]))


def counted(w: jax.Array, x: jax.Array) -> Any:
    """The count of the batch is needed with it, broadcast and in positions."""
    count = jnp.sum(jnp.where(x > 0, 1.0, 0.0)) + 1
    places = jnp.broadcast_to(jnp.arange(8.0)[:, None] / count, (8, 4)).reshape(8, 2, 2)
    return jnp.sum(x / count, axis=1), jnp.moveaxis(x.reshape(8, 2, 2) * places, 0, 2), places


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: jnp.sum(x * jax.random.normal(jax.random.key(0), x.shape)),
        lambda w, x: jnp.sum(x[:, 0] * jnp.arange(len(x))),
        lambda w, x: jnp.tile(jnp.arange(8), 3) * jnp.tile(x[:, 0], 3),
        lambda w, x: jnp.sum(x + np.arange(32, dtype=np.float32).reshape(8, 4) ** 2),
        lambda w, x: (jnp.sum(x @ w, 0) @ jnp.ones((4, 8)), x * jnp.ones((8, 4)) * 2 + jnp.zeros(8)[:, None]),
        by_size,
        reset,
        counted,
    ],
)
def test_arrays_of_the_size_of_the_batch(fn: Callable[..., Any]) -> None:
    w, x = arrays((4, 4), (8, 4))
    made = parts(fn, (w, x), 2, {"batch": "x"})
    assert loops(made)
    for have, want in zip(run(made, w, x), jax.tree.leaves(jax.jit(fn)(w, x)), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def refused(fn: Callable[..., Any], batch: Any = None) -> str:
    w, x = arrays((4, 4), (8, 4))
    with pytest.raises(VariantError) as caught:
        parts(fn, (w, x if batch is None else batch), 2, {"batch": "x"})
    return str(caught.value)


def normalised(w: jax.Array, x: jax.Array) -> jax.Array:
    y = x @ w
    return jnp.sum(((y - y.mean(0)) / y.std(0)) ** 3)


def counted_in_a_loop(w: jax.Array, x: jax.Array) -> Any:
    return jax.lax.scan(lambda c, p: (c * jnp.arange(len(x))[:, None] @ p, None), x, jnp.stack([w, w]))[0]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (
            normalised,
            r"sub at test_microbatch\.py:\d+ needs a value that is reduced over the whole batch together with",
        ),
        (lambda w, x: jnp.sum(jnp.exp(x @ x.T)), "lets the examples of the batch meet each other"),
        (
            lambda w, x: jnp.sum(jnp.cumsum(x, 0) * x),
            "needs the whole batch at once: each position needs all positions",
        ),
        (lambda w, x: jnp.sort(x, 0), "needs the whole batch at once"),
        (lambda w, x: jnp.prod(x, 0), "reduces the batch by prod"),
        (lambda w, x: jax.lax.scan(lambda c, r: (c + r, None), w[0], x)[0], "runs over the batch"),
        (lambda w, x: x.reshape(2, -1).sum(1), "takes the batch's dimension apart"),
        (
            lambda w, x: jax.lax.scan(lambda c, p: (c + jnp.sin(jnp.sum(x @ p)), None), 0.0, w),
            "inside of a loop or branch",
        ),
        (counted_in_a_loop, "makes an array that counts the batch's examples, inside of a loop or branch"),
        (lambda w, x: w + 1, "nothing in the function depends on the batch"),
        (lambda w, x: (jax.debug.print("{}", x), jnp.sum(x))[1], "has an effect|nothing"),
    ],
)
def test_what_cannot_be_cut_says_why(fn: Callable[..., Any], message: str) -> None:
    text = refused(fn)
    assert "cannot be computed in 2 micro-batches: " in text
    assert re.search(message, text), text


def test_arguments_that_are_no_batch() -> None:
    w, x = arrays((4, 4), (6, 4))
    fn = lambda w, x: jnp.sum(x @ w)  # noqa: E731
    for count, roles, message in [
        (4, {"batch": "x"}, r"x \[6, 4\] cannot be cut into 4 micro-batches of one size"),
        (2, {"batch": "y"}, "no argument has the path 'y'; there are w, x"),
        (2, {"batch": ["w", "x"]}, r"must count its examples; they are w \[4, 4\], x \[6, 4\]"),
    ]:
        with pytest.raises(shardwise.ShardwiseError, match=message):
            shardwise.plan(fn, w, x, mesh={"data": 2}, tactics=[], microbatches=count, roles=roles)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"microbatches": 0}, "microbatches is a whole number above zero or 'auto', not 0"),
        ({"microbatches": True}, "microbatches is a whole number"),
        (
            {"microbatches": "all", "remat": "yes"},
            "microbatches .*; remat is True, False, 'gathers' or 'auto', not 'yes'",
        ),
    ],
)
def test_options_that_cannot_be_used(option: dict[str, Any], message: str) -> None:
    with pytest.raises(VariantError, match=message):
        shardwise.plan(step, *step_args(), mesh={"data": 2}, **option)


def planned(count: int | str | None = 4, **asked: Any) -> shardwise.Plan:
    asked = {"mesh": {"data": 8}, "tactics": [DataParallel("data")]} | asked
    return shardwise.plan(step, *step_args(asked.pop("batch", 64)), roles=ROLES, microbatches=count, **asked)


def test_a_sharded_batch_is_cut_without_moving_anything() -> None:
    verified = shardwise.verify(planned(batch=8192), step, *step_args(8192))
    assert verified.agrees
    assert {row.kind for row in verified.rows if row.compiled_bytes} == {"all-reduce"}


def test_parameters_sharded_with_the_batch() -> None:
    verified = shardwise.verify(planned(2, tactics=[FSDP("data")], mesh={"data": 4}), step, *step_args(64))
    assert verified.agrees


def test_a_plan_says_what_it_does_and_is_saved(tmp_path: Path) -> None:
    plan = planned()
    assert plan.variant == Variant(4, ("batch/x", "batch/y"))
    assert "4 micro-batches of batch/x and 1 more, one after the other" in str(plan)
    assert "cut into 4 micro-batches of 16 examples" in plan.explain("batch/x")
    assert "variant: 4 micro-batches | as it is" in plan.diff(planned(None))
    plan.save(tmp_path / "plan.json")
    loaded = shardwise.load_plan(tmp_path / "plan.json")
    assert loaded == plan
    args = step_args(64)
    for have, want in zip(*(jax.tree.leaves(f(*args)) for f in (loaded.jit(step), jax.jit(step))), strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-6)
    inner = jax.jit(plan.apply(step))(*args)
    np.testing.assert_allclose(inner[2]["loss"], jax.jit(step)(*args)[2]["loss"], rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"microbatches": 0}, "variant: expected at least one micro-batch"),
        ({"microbatches": 1}, "with more than one the arguments that are split"),
        ({"batch": ["batch/z"]}, "no argument has the path 'batch/z'"),
        ({"remat": 1}, "variant.remat: expected true or false, not 1"),
        (None, "variant is missing"),
    ],
)
def test_a_damaged_variant_is_refused(tmp_path: Path, change: dict[str, Any] | None, message: str) -> None:
    data = json.loads(planned().to_json())
    if change is None:
        del data["variant"]
    else:
        data["variant"].update(change)
    (tmp_path / "plan.json").write_text(signed(data))
    with pytest.raises(PlanError, match=message):
        shardwise.load_plan(tmp_path / "plan.json")


def wide(params: list[jax.Array], batch: jax.Array) -> Any:
    """Activations take most of the memory."""

    def loss(params: list[jax.Array]) -> jax.Array:
        x = batch
        for p in params:
            x = jnp.sin(x @ p)
        return jnp.mean(x**2)

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


def test_the_search_takes_as_many_parts_as_it_takes_to_fit() -> None:
    shape = jax.ShapeDtypeStruct
    args = [shape((256, 256), "float32")] * 6, shape((65536, 256), "float32")
    where: dict[str, Any] = {"topology": small_memory("v5e:2x2", 80 * 2**20), "mesh": {"x": 4}, "budget_evals": 400}
    with pytest.raises(InfeasibleError):
        shardwise.plan(wide, *args, **where)
    plan = shardwise.plan(wide, *args, roles={"batch": "batch"}, microbatches="auto", **where)
    assert plan.predicted.fits and plan.variant.microbatches > 1 and plan.search is not None
    tried = plan.search.variants
    assert tried[0].variant == "as it is" and len(tried) > 1, "and only those that could pay"
    fastest = min((t for t in tried if t.fits), key=lambda t: t.time_s or 0.0)
    assert not tried[0].fits and str(plan.variant) == fastest.variant
    assert f"of {len(tried)} variants" in str(plan.search)
    again = shardwise.plan(wide, *args, roles={"batch": "batch"}, microbatches="auto", **where)
    assert again.to_json() == plan.to_json()
    where["topology"] = "v5e:2x2"
    roomy = shardwise.plan(wide, *args, roles={"batch": "batch"}, microbatches="auto", **where)
    assert roomy.variant == Variant(), "what fits already is left as it is"
    # XLA compiles it to 1.50 ms where it takes 1.64 ms unchanged: storing sines takes longer than computing them again.
    faster = shardwise.plan(wide, *args, roles={"batch": "batch"}, microbatches="auto", remat="auto", **where)
    assert faster.variant == Variant(remat=True) and faster.predicted.time_s < roomy.predicted.time_s
    where["topology"] = small_memory("v5e:2x2", 80 * 2**20)
    growing = [shape((width, width + 64), "float32") for width in range(256, 640, 64)]
    both = shardwise.plan(wide, growing, args[1], roles={"batch": "batch"}, microbatches="auto", remat="auto", **where)
    assert any("no loop and no repeated block" in note for note in both.notes)
    assert any(note.startswith("unchanged, the program does not fit: ") for note in both.notes)


def test_nothing_fits_and_the_error_has_what_was_tried() -> None:
    shape = jax.ShapeDtypeStruct
    args = [shape((256, 256), "float32")] * 6, shape((64, 256), "float32")
    where: dict[str, Any] = {"topology": small_memory("v5e:2x2", 2**18), "mesh": {"x": 4}, "budget_evals": 100}
    with pytest.raises(InfeasibleError, match=r"(?s)no plan .*\ntried 4 micro-batches: .* [KM]iB"):
        shardwise.plan(wide, *args, roles={"batch": "batch"}, microbatches="auto", **where)


def test_jit_takes_the_options() -> None:
    planned = shardwise.jit(step, mesh={"data": 8}, tactics=[DataParallel("data")], roles=ROLES, microbatches=2)
    args = step_args(64)
    np.testing.assert_allclose(planned(*args)[2]["loss"], jax.jit(step)(*args)[2]["loss"], rtol=1e-5)
    assert planned.plan(*args).variant.microbatches == 2


@pytest.mark.parametrize("name", ["mlp", "t2b", "gpt", "llama3", "t5", "vit", "dlrm", "ssm"])
def test_training_steps_of_the_zoo_can_be_cut(name: str) -> None:
    program = zoo.load(name, "tiny")
    made = parts(program.fn, program.args, 4)
    assert any(loop.params["length"] == 4 for loop in loops(made))
    plain = trace_variant(program.fn, program.args, {}, JitOptions(), Variant()).jaxpr
    have, want = ([v.aval for v in internals.split_jaxpr(j)[0].outvars] for j in (made, plain))
    assert have == want


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("wresnet", {}, "needs a value that is reduced over the whole batch"),
        ("mixtral", {"group": 40}, "mixtral.py.* needs the complete sum over the batch"),
        ("mixtral", {}, "takes the batch's dimension apart"),
        ("gns", {}, "must count its examples"),
    ],
)
def test_programs_of_the_zoo_that_cannot(name: str, options: dict[str, Any], message: str) -> None:
    program = zoo.load(name, "tiny", **options)
    with pytest.raises(VariantError, match=message):
        parts(program.fn, program.args, 4)


def test_a_flax_language_model_with_optax_can_be_cut() -> None:
    fn, args = next(p for p in flax_programs.PROGRAMS if p.name == "linen-language-model").build()
    assert loops(parts(fn, args, 4))


def test_flax_and_optax_compute_the_same() -> None:
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y: jax.Array = nn.Dense(4)(nn.LayerNorm()(nn.gelu(nn.Dense(32)(x))))
            return y

    net, optimizer = Net(), optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))

    def train(params: Any, state: Any, batch: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            logits = net.apply(p, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    (x,) = arrays((32, 8))
    params = net.init(jax.random.key(0), x)
    args = params, optimizer.init(params), {"x": x, "y": jnp.arange(32) % 4}
    plan = shardwise.plan(train, *args, mesh={"data": 4}, tactics=[FSDP("data")], roles=ROLES, microbatches=4)
    assert shardwise.verify(plan, train, *args).agrees
