"""Roles are inferred from structure: over the zoo, and over steps as people write them."""

from __future__ import annotations

import inspect
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise import zoo
from shardwise.ir.paths import find_paths
from shardwise.tactics.roles import complete_roles
from tests.plans.files import signed

#: Zoo programs whose roles are not quite the inferred ones: scalars have no role, and running statistics are what comes back.
EXCEPTIONS = {
    "unet": {"batch/seed": ("batch", None)},
    "itx": {"batch/position": ("batch", None)},
    "wresnet": {"stats": ("state", "optimizer")},
}


def shape(*sizes: int, dtype: str = "float32") -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def inferred(fn: Any, *args: Any, given: Any = None) -> dict[str, tuple[str, ...]]:
    return complete_roles(sw.analyze(fn, *args), given)


@pytest.mark.parametrize("name", zoo.names())
def test_the_zoo(name: str) -> None:
    program = zoo.load(name, "tiny")
    analysis = sw.analyze(program.fn, *program.args)
    paths = analysis.program.named_paths[0]
    have = {
        p: role for role, found in complete_roles(analysis, None).items() for q in found for p in find_paths(q, paths)
    }
    want = {}
    for root, role in zip(inspect.signature(program.fn).parameters, program.roles, strict=True):
        want.update(dict.fromkeys(find_paths(root, paths), role))
    differ = {path: (want[path], have.get(path)) for path in paths if want[path] != have.get(path)}
    for root, roles in EXCEPTIONS.get(name, {}).items():
        for path in find_paths(root, paths):
            assert differ.pop(path) == roles
    assert not differ


def loss_of(params: Any, x: Any, y: Any) -> Any:
    h = jax.nn.relu(x @ params["up"] + params["bias"])
    return ((h @ params["down"] - y) ** 2).mean()


PARAMS = {"up": shape(16, 64), "bias": shape(64), "down": shape(64, 8)}
X, Y = shape(256, 16), shape(256, 8)


def adam(params: Any, moments: Any, grads: Any) -> Any:
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments["mean"], grads)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, moments["square"], grads)
    params = jax.tree.map(lambda w, m, s: w - m / (jnp.sqrt(s) + 1e-8), params, mean, square)
    return params, {"mean": mean, "square": square, "count": moments["count"] + 1}


MOMENTS = {"mean": PARAMS, "square": PARAMS, "count": shape(dtype="int32")}
TRAINED = {"batch": ("x", "y"), "params": ("params",), "optimizer": ("moments",)}


def test_a_training_step() -> None:
    def step(params: Any, moments: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        return *adam(params, moments, grads), loss

    assert inferred(step, PARAMS, MOMENTS, X, Y) == TRAINED


def test_in_another_order_with_metrics_that_need_the_moments() -> None:
    def step(x: Any, y: Any, moments: Any, params: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        new, moments = adam(params, moments, grads)
        norm = sum(jnp.sum((a - b) ** 2) for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(params), strict=True))
        return {"loss": loss, "update": norm}, moments, new

    assert inferred(step, X, Y, MOMENTS, PARAMS) == TRAINED


def test_no_loss_is_returned() -> None:
    def step(params: Any, moments: Any, x: Any, y: Any) -> Any:
        return adam(params, moments, jax.grad(loss_of)(params, x, y))

    assert inferred(step, PARAMS, MOMENTS, X, Y) == TRAINED
    assert inferred(lambda w, x: w - jax.grad(lambda w: ((x @ w) ** 2).sum())(w), shape(16, 8), X) == {
        "batch": ("x",),
        "params": ("w",),
    }


def test_a_dict_with_a_dropout_key_statistics_and_a_rate() -> None:
    def step(state: Any, batch: Any, rate: Any) -> Any:
        key, other = jax.random.split(state["key"])

        def loss(params: Any) -> Any:
            mean = batch["x"].mean(0)
            x = (batch["x"] - mean) * jax.random.bernoulli(other, 0.9, batch["x"].shape)
            return loss_of(params, x, batch["y"]), mean

        (value, mean), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        params, moments = adam(state["params"], state["moments"], jax.tree.map(lambda g: rate * g, grads))
        mean = 0.9 * state["mean"] + 0.1 * mean
        return {"params": params, "moments": moments, "mean": mean, "key": key}, value

    key = jax.eval_shape(lambda: jax.random.key(0))
    state = {"params": PARAMS, "moments": MOMENTS, "mean": shape(16), "key": key}
    assert inferred(step, state, {"x": X, "y": Y}, shape()) == {
        "batch": ("batch",),
        "params": ("state/params",),
        "optimizer": ("state/key", "state/mean", "state/moments"),
    }


def _updated(w: Any, m: Any, gradients: Any) -> tuple[Any, Any]:
    m = jax.tree.map(lambda a, g: 0.9 * a + g, m, gradients)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, m), m


def test_networks_that_are_trained_in_turn() -> None:
    """The critic's moments reach the actor's loss, through the critic that they changed."""

    def step(critic: Any, moments: Any, actor: Any, x: Any) -> Any:
        critic, moments = _updated(critic, moments, jax.grad(lambda c: ((x @ c) ** 2).mean())(critic))
        loss, gradient = jax.value_and_grad(lambda a: (jnp.tanh(x @ a) @ critic).mean())(actor)
        return critic, moments, actor - 0.1 * gradient, loss

    found = inferred(step, shape(16, 8), shape(16, 8), shape(16, 16), X)
    assert found == {"batch": ("x",), "params": ("critic", "actor"), "optimizer": ("moments",)}


def test_several_updates_in_loops() -> None:
    """Epochs over minibatches, as in PPO: moments change the parameters of the next trip."""

    def step(w: Any, m: Any, x: Any) -> Any:
        def update(state: Any, part: Any) -> Any:
            w, m = state
            loss, gradient = jax.value_and_grad(lambda w: (jnp.tanh(part @ w) ** 2).mean())(w)
            return _updated(w, m, gradient), loss

        def epoch(state: Any, _: Any) -> Any:
            return jax.lax.scan(update, state, x.reshape(4, -1, *x.shape[1:]))

        (w, m), losses = jax.lax.scan(epoch, (w, m), None, length=2)
        return w, m, losses

    found = inferred(step, shape(16, 8), shape(16, 8), X)
    assert found == {"batch": ("x",), "params": ("w",), "optimizer": ("m",)}


def test_states_with_the_dimension_of_the_batch() -> None:
    """Environments that are stepped while a policy is trained, and the state of a recurrent network between parts of a text."""

    def act(w: Any, m: Any, env: Any) -> Any:
        def loss(w: Any) -> Any:
            moved = jnp.tanh(env + jnp.tanh(env @ w["in"]) @ w["out"])
            return (moved**2).mean(), moved

        gradients, env = jax.grad(loss, has_aux=True)(w)
        return *_updated(w, m, gradients), env

    w = {"in": shape(16, 64), "out": shape(64, 16)}
    assert inferred(act, w, w, X) == {"batch": ("env",), "params": ("w",), "optimizer": ("m",)}

    def read(w: Any, m: Any, state: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            out, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ w["h"] + x @ w["in"]), None), state, x)
            return ((out @ w["h"]) ** 2).mean(), out

        gradients, state = jax.grad(loss, has_aux=True)(w)
        return *_updated(w, m, gradients), state

    w = {"h": shape(64, 64), "in": shape(16, 64)}
    found = inferred(read, w, w, shape(256, 64), shape(20, 256, 16))
    assert found == {"batch": ("x",), "params": ("w",), "optimizer": ("m",), "cache": ("state",)}


def test_experts_by_scatter_and_ensembles_are_no_batch() -> None:
    def experts(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            best = (x @ w["gate"]).argmax(-1)
            buffer = jnp.zeros((8, 64, 16)).at[best, jnp.arange(256) // 8].set(x, mode="drop")
            out = jax.nn.relu(buffer @ w["up"]) @ w["down"]
            return ((out[best, jnp.arange(256) // 8] - x) ** 2).mean() + (x @ w["gate"]).mean()

        loss_, gradients = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, g: a - g, w, gradients), loss_

    w = {"gate": shape(16, 8), "up": shape(8, 16, 32), "down": shape(8, 32, 16)}
    assert inferred(experts, w, X) == {"batch": ("x",), "params": ("w",)}

    def one(w: Any, count: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: (jax.nn.relu(x @ w) ** 2).mean())(w), count + 1

    found = inferred(jax.vmap(one, (0, 0, None)), shape(4, 16, 8), shape(4, dtype="int32"), X)
    assert (found["batch"], found["params"]) == (("x",), ("w",))


def test_a_frozen_vocabulary_is_no_batch() -> None:
    """Each example looks up one of its own logits: the vocabulary is no array of nodes that the batch addresses."""

    def step(adapter: Any, base: Any, tokens: Any) -> Any:
        def loss(adapter: Any) -> Any:
            x = base["table"][tokens]
            logits = jax.nn.log_softmax((x + x @ adapter) @ base["head"])
            return -jnp.take_along_axis(logits, tokens[:, None], 1).mean()

        value, gradient = jax.value_and_grad(loss)(adapter)
        return adapter - gradient, value

    base = {"table": shape(96, 16), "head": shape(16, 96)}
    found = inferred(step, shape(16, 16), base, shape(256, dtype="int32"))
    assert found == {"batch": ("tokens",), "params": ("adapter", "base")}


def test_quantized_weights_are_parameters() -> None:
    def multiplied(w: Any, scales: Any, x: Any) -> Any:
        return jax.lax.dot(x.astype("int8"), w, preferred_element_type="int32") * scales

    def dequantized(w: Any, scales: Any, x: Any) -> Any:
        def layer(x: Any, each: Any) -> Any:
            return jax.nn.relu(x @ (each[0].astype("float32") * each[1])), None

        return jax.lax.scan(layer, x, (w, scales))[0]

    weights = {
        multiplied: (shape(16, 8, dtype="int8"), shape(8)),
        dequantized: (shape(2, 16, 16, dtype="int8"), shape(2, 16)),
    }
    for fn, args in weights.items():
        assert inferred(fn, *args, X) == {"batch": ("x",), "params": ("w", "scales")}


def test_complex_weights_are_parameters() -> None:
    def step(w: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.abs(jnp.fft.fft(x) @ w).mean())(w)
        return w - jnp.conj(gradient), loss

    assert inferred(step, shape(16, 8, dtype="complex64"), X) == {"batch": ("x",), "params": ("w",)}


def test_data_parallelism_leaves_the_dimension_that_a_loop_runs_over() -> None:
    def step(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda total, part: (total + loss_of(params, *part), None), 0.0, x)[0]

    plan = sw.plan(step, PARAMS, (shape(4, 64, 16), shape(4, 64, 8)), mesh={"data": 4}, tactics="dp")
    assert plan.spec("x/0") == P(None, "data")
    plan = sw.plan(
        step,
        PARAMS,
        (shape(4, 64, 16), shape(4, 64, 8)),
        mesh={"data": 4},
        tactics=[sw.DataParallel("data", dim=0)],
    )
    assert plan.spec("x/0") == P("data")


def test_one_example_is_no_reason_to_shard_its_tokens() -> None:
    text = shape(1, 64, 16)
    with pytest.raises(sw.DecisionError, match="DataParallel: the batch has one example"):
        sw.plan(lambda w, x: x @ w, shape(16, 16), text, mesh={"data": 4}, tactics="dp", roles={"batch": "x"})


def test_a_batch_that_is_stacked_for_a_loop() -> None:
    def step(params: Any, x: Any, y: Any) -> Any:
        def more(total: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss_of)(params, *part)), None

        grads, _ = jax.lax.scan(more, jax.tree.map(jnp.zeros_like, params), (x, y))
        return jax.tree.map(lambda w, g: w - g, params, grads)

    assert inferred(step, PARAMS, shape(4, 64, 16), shape(4, 64, 8)) == {"batch": ("x", "y"), "params": ("params",)}


def test_nothing_to_go_by() -> None:
    assert inferred(lambda x: x * 2, shape(64, 8)) == {}
    assert inferred(lambda x: x.sum(), shape(64, 8)) == {}


def test_given_roles_come_first() -> None:
    def step(w: Any, x: Any, y: Any) -> Any:
        return w - jax.grad(lambda w: ((x @ w - y) ** 2).sum())(w)

    args = shape(16, 8), X, Y
    assert inferred(step, *args) == {"batch": ("x", "y"), "params": ("w",)}
    assert inferred(step, *args, given={"batch": "x"}) == {"batch": ("x",), "params": ("w",)}
    assert inferred(step, *args, given={"params": ["x", "w"]}) == {"batch": ("y",), "params": ("w", "x")}
    assert inferred(step, *args, given={"mine": "y"}) == {"batch": ("x",), "params": ("w",), "mine": ("y",)}
    with pytest.raises(sw.QueryError, match="no argument has the path 'z'"):
        inferred(step, *args, given={"batch": "z"})


def test_batches_of_several_sizes() -> None:
    """Unlabeled examples beside labeled ones, points on a boundary beside those inside; a mask is not one of them."""

    def step(w: Any, x: Any, y: Any, unlabeled: Any, mask: Any) -> Any:
        def loss(w: Any) -> Any:
            hidden = unlabeled @ w["up"] * mask
            return ((x @ w["up"] @ w["down"] - y) ** 2).mean() + jax.nn.relu(hidden @ w["down"]).mean()

        value, grads = jax.value_and_grad(loss)(w)
        jax.debug.print("{}", value)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value

    w = {"up": shape(16, 64), "down": shape(64, 8)}
    args = w, shape(64, 16), shape(64, 8), shape(256, 32, 16), shape(32, 64)
    assert inferred(step, *args) == {"batch": ("x", "y", "unlabeled"), "params": ("w",)}
    plan = sw.plan(step, *args, mesh={"data": 4}, tactics="dp:data")
    assert plan.spec("x") == plan.spec("unlabeled") == P("data")


def test_a_table_that_a_loop_looks_into() -> None:
    def decode(table: Any, w: Any, tokens: Any) -> Any:
        def step(tokens: Any, _: Any) -> Any:
            return (jnp.tanh(table[tokens] @ w)).argmax(-1), None

        return jax.lax.scan(step, tokens, None, length=3)[0]

    args = shape(100, 16), shape(16, 100), shape(32, dtype="int32")
    assert inferred(decode, *args) == {"batch": ("tokens",), "params": ("table", "w")}


def test_positions_that_count_are_no_training() -> None:
    def decode(table: Any, cache: Any, token: Any, position: Any) -> Any:
        x = table[token]
        cache = cache.at[jnp.arange(8), position].set(x)
        logits = jnp.einsum("bd,btd,vd->bv", x, cache, table)
        return cache, logits.argmax(-1), position + 1

    args = shape(100, 16), shape(8, 32, 16), shape(8, dtype="int32"), shape(8, dtype="int32")
    expected = {"batch": ("token", "position"), "params": ("table",), "cache": ("cache",)}
    assert inferred(decode, *args) == expected


def test_a_plan_has_them(tmp_path: Any) -> None:
    def step(params: Any, moments: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        return *adam(params, moments, grads), loss

    plan = sw.plan(step, PARAMS, MOMENTS, X, Y, mesh={"data": 4}, tactics="fsdp")
    assert plan.roles == TRAINED and [row.name for row in plan.baselines]
    assert "batch: x, y; params: params; optimizer: moments" in plan.summary() and "batch: x, y" in str(plan)
    plan.save(tmp_path / "plan.json")
    loaded = sw.load_plan(tmp_path / "plan.json")
    assert loaded == plan and loaded.bind(step, PARAMS, MOMENTS, X, Y).baselines == plan.baselines
    data = json.loads(plan.to_json())
    data["roles"]["params"] = ["nothing"]
    (tmp_path / "plan.json").write_text(signed(data))
    with pytest.raises(sw.PlanError, match="no argument has the path 'nothing'"):
        sw.load_plan(tmp_path / "plan.json")
    assert sw.compare(step, PARAMS, MOMENTS, X, Y, mesh={"data": 4}, tactics="dp,fsdp").rows


def test_a_batch_that_is_split_into_micro_batches() -> None:
    def step(params, x, y):
        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss_of)(params, *part)), None

        parts = tuple(a.astype("float32").reshape(4, -1, a.shape[-1]) for a in (x, y))
        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, total)

    args = PARAMS, shape(256, 16, dtype="bfloat16"), Y
    assert inferred(step, *args) == {"batch": ("x", "y"), "params": ("params",)}
    plan = sw.plan(step, *args, mesh={"data": 2, "model": 4}, tactics="dp:data,megatron:model")
    assert plan["params/up"] == P(None, "model")
    products = [op.id for op in plan.inquiry.analysis.program.ops if op.kind == "dot_general"]
    assert products and all((0,) in plan.sharded.factors[op] for op in products)


def test_without_gradients_the_batch_is_not_contracted() -> None:
    def smooth(step, noise, x):
        def predict(m, y):
            m = step @ m + noise @ y
            return m, m

        return jax.vmap(lambda ys: jax.lax.scan(predict, jnp.zeros(4), ys)[1])(x)

    assert inferred(smooth, shape(4, 4), shape(4, 4), shape(64, 30, 4))["batch"] == ("x",)


def test_a_state_without_parameters_is_no_optimizer() -> None:
    def simulate(x, v):
        pull = jnp.sum(x[None] - x[:, None], 1)
        return x + v, v + pull

    assert inferred(simulate, shape(64, 3), shape(64, 3)) == {}


def test_what_needs_a_role_that_nothing_has_says_so() -> None:
    with pytest.raises(
        sw.DecisionError, match=r"DataParallel needs to know which arguments are the batch: the structure"
    ):
        sw.plan(lambda x: x.sum(), shape(64, 8), mesh={"data": 4}, tactics="dp")
    with pytest.raises(sw.VariantError, match=r"which arguments are the batch: .*roles=\{'batch': 'path'\}"):
        sw.plan(lambda x: x.sum(), shape(64, 8), mesh={"data": 4}, tactics=[], microbatches=2)
    assert (
        sw.plan(lambda x: x.sum(), shape(64, 8), mesh={"data": 4}, tactics=[], microbatches="auto").variant.microbatches
        == 1
    )


#: Programs of other packages, with the roles of their arguments.
THIRD = {
    "linen-language-model": {"batch": ("batch",), "params": ("params",), "optimizer": ("state",)},
    "linen-decode": {
        "batch": ("x",),
        "params": ("params",),
        "cache": ("cache",),
    },
    "equinox-recurrent": {"batch": ("batch",), "params": ("params",), "optimizer": ("state",)},
    "haiku-layer-stack": {"batch": ("batch",), "params": ("params",), "optimizer": ("state",)},
    "optax-muon": {"batch": ("batch",), "params": ("params",), "optimizer": ("state",)},
    "optax-schedule-free": {"batch": ("batch",), "params": ("params",), "optimizer": ("state",)},
}


@pytest.mark.parametrize("name", THIRD)
def test_programs_of_other_packages(name: str) -> None:
    for package in ("flax", "equinox", "haiku", "optax"):
        pytest.importorskip(package)
    from tests.programs import equinox_programs, flax_programs, haiku_programs, optax_programs

    modules = (equinox_programs, flax_programs, haiku_programs, optax_programs)
    (program,) = (p for module in modules for p in module.PROGRAMS if p.name == name)
    fn, args = program.build()
    assert inferred(fn, *args) == THIRD[name]
