"""The zoo: every program is built from shapes at full size, trains when tiny, and means what it says."""

import doctest
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise import zoo
from shardwise.zoo import itx, layers, mixtral, registry, specs, ssm

TRAINED = [name for name in zoo.names() if name != "itx"]
SCANNED = [name for name in zoo.names() if name not in ("unet", "wresnet", "dlrm")]
FULL = [(name, config) for name in zoo.names() for config in zoo.configs(name) if "tiny" not in config]

PARAMETERS = {
    ("t2b", "2b"): 2.506e9,
    ("t7b", "7b"): 8.54e9,
    ("gpt", "2.6b"): 2.65e9,
    ("gpt", "6.7b"): 6.66e9,
    ("gpt", "39b"): 39.1e9,
    ("llama3", "8b"): 8.03e9,
    ("llama3", "70b"): 70.6e9,
    ("llama3", "405b"): 405.9e9,
    ("mixtral", "8x7b"): 46.7e9,
    ("deepseek", "671b"): 671.0e9,
    ("gns", "full"): 0.25e9,
    ("unet", "full"): 0.30e9,
    ("itx", "decode"): 5.67e9,
    ("itx", "prefill"): 5.67e9,
    ("itx", "step"): 5.67e9,
    ("vit", "l16"): 0.304e9,
    ("vit", "h14"): 0.632e9,
    ("wresnet", "1b"): 1.075e9,
    ("wresnet", "4b"): 4.29e9,
    ("t5", "3b"): 2.85e9,
    ("t5", "11b"): 11.3e9,
    ("ssm", "2.8b"): 2.77e9,
    ("dlrm", "full"): 26.1e9,
    ("mlp", "full"): 2.23e9,
}


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def finite(tree: Any) -> bool:
    return all(np.all(np.isfinite(np.asarray(x, np.float32))) for x in jax.tree.leaves(tree))


def primitives(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


def restack(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the scanned form from those of the unrolled one."""
    return {
        key: jax.tree.map(lambda *xs: jnp.stack(xs), *value) if isinstance(value, tuple) else value
        for key, value in params.items()
    }


# Full size: shapes only.


def test_every_full_configuration_has_a_stated_size() -> None:
    assert set(PARAMETERS) == set(FULL)


# The larger wide ResNet has the trace of the smaller one, which takes seconds.
@pytest.mark.parametrize(("name", "config"), [full for full in FULL if full != ("wresnet", "4b")])
def test_full_configuration_traces_from_shapes(name: str, config: str) -> None:
    program = zoo.load(name, config)
    assert len(program.roles) == len(program.args)
    assert all(type(leaf) is jax.ShapeDtypeStruct for leaf in jax.tree.leaves(program.args))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(program.args[0]))
    assert count == pytest.approx(PARAMETERS[name, config], rel=0.01)

    traced = jax.jit(program.fn, donate_argnums=program.donate_argnums).trace(*program.args)
    constants = sum(np.size(constant) for constant in traced.jaxpr.consts)
    assert constants < 10_000, "arrays are arguments, not closures"
    found = set(primitives(traced.jaxpr.jaxpr))
    assert {"dot_general"} <= found
    opaque = ("pallas_call", "custom_call", "ffi_call", "pure_callback", "io_callback", "debug_callback")
    assert not found.intersection(opaque)
    if "optimizer" in program.roles:
        assert shapes(traced.out_info[:2]) == shapes(program.args[:2])
        assert (traced.out_info[2].shape, traced.out_info[2].dtype) == ((), jnp.float32)


def test_optimizer_keeps_two_float32_moments_of_every_parameter() -> None:
    params, moments, _ = zoo.load("llama3", "405b").args
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    sizes = sorted(leaf.shape for leaf in jax.tree.leaves(moments) if leaf.shape)
    assert sizes == sorted([leaf.shape for leaf in jax.tree.leaves(params)] * 2)


# Tiny: runs.


@pytest.mark.parametrize("name", [*TRAINED, "mixtral:dropless"])
def test_tiny_step_trains(name: str) -> None:
    name, _, flag = name.partition(":")
    program = zoo.parse(f"{name}:tiny,{flag}")
    args = program.make_args()
    assert shapes(args) == shapes(program.args)
    before = jax.tree.map(np.array, args[0])
    batch = args[2]
    step = jax.jit(program.fn, donate_argnums=program.donate_argnums)
    losses = []
    params, opt_state, _, *state = args
    for _ in range(3):
        params, opt_state, loss, *state = step(params, opt_state, batch, *state)
        losses.append(float(loss))
    assert finite((params, opt_state, loss, state))
    assert losses[0] > losses[1] > losses[2]
    changed = jax.tree.map(lambda old, new: bool(np.any(old != np.asarray(new))), before, params)
    assert all(jax.tree.leaves(changed)), changed


def test_the_same_sizes_are_the_same_program() -> None:
    program = zoo.load("mlp", "tiny", layers=3, remat=True)
    assert zoo.parse("mlp:tiny,remat,layers=3") is program
    assert zoo.load("mlp", "tiny", layers=4, remat=True).fn is not program.fn
    with pytest.raises(zoo.ZooError, match="option 'remat' of mlp wants"):
        zoo.load("mlp", "tiny", layers=3, remat=1)


def test_make_args_follows_the_seed_and_keeps_indices_in_range() -> None:
    program = zoo.load("dlrm", "tiny")
    first, again, other = (program.make_args(seed)[2] for seed in (3, 3, 4))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, first, again)))
    assert not np.array_equal(first["ids"], other["ids"])
    rows = [table.shape[0] for table in program.args[0]["tables"]]
    ids = np.asarray(first["ids"])
    assert ids.min() >= 0
    assert np.all(ids.max(axis=0) < rows)


def test_fresh_optimizer_state_is_the_optimizers_own() -> None:
    params, state, _ = zoo.load("mlp", "tiny").make_args()
    jax.tree.map(np.testing.assert_array_equal, state, specs.optimizer().init(params))


@pytest.mark.parametrize("name", ["t2b", "gns"])
def test_scanned_and_unrolled_layers_agree(name: str) -> None:
    unrolled, scanned = (zoo.load(name, "tiny", scan=scan, train=False) for scan in (False, True))
    params, batch = unrolled.make_args()
    stacked = restack(params)
    assert shapes(stacked) == shapes(scanned.args[0])
    losses = [float(jax.jit(p.fn)(w, batch)) for p, w in ((unrolled, params), (scanned, stacked))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("name", zoo.names())
def test_forms_change_the_program_as_asked(name: str) -> None:
    plain = zoo.load(name, "tiny", scan=False, **({} if name == "itx" else {"train": False}))
    found = list(primitives(jax.make_jaxpr(plain.fn)(*plain.args).jaxpr))
    assert found.count("scan") == (1 if name == "itx" else 0), "only the decode loop is left"
    if name in SCANNED:
        scanned = zoo.load(name, "tiny", scan=True)
        assert "scan" in primitives(jax.make_jaxpr(scanned.fn)(*scanned.args).jaxpr)
    if name != "itx":
        remat = zoo.load(name, "tiny", remat=True)
        assert shapes(remat.args) == shapes(zoo.load(name, "tiny").args)
        found = list(primitives(jax.make_jaxpr(remat.fn)(*remat.args).jaxpr))
        assert {"checkpoint", "remat", "remat2"}.intersection(found)


def test_remat_updates_running_statistics_alike() -> None:
    results = []
    for remat in (False, True):
        program = zoo.load("wresnet", "tiny", remat=remat)
        assert program.roles == ("params", "optimizer", "batch", "state")
        *_, loss, stats = jax.jit(program.fn)(*program.make_args())
        results.append((loss, stats))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-2, atol=1e-4), *results)
    means = [x for x in jax.tree.leaves(results[0][1]) if np.any(np.asarray(x) != 0)]
    assert means, "the statistics moved"


def test_options_change_sizes() -> None:
    program = zoo.load("gpt", "tiny", layers=3, batch=8, seq=12, scan=False)
    params, _, batch = program.args
    assert len(params["layers"]) == 3
    assert batch["inputs"].shape == (8, 12)
    assert params["positions"].shape == (12, 64)


# The models' parts.


def test_grouped_attention_is_attention_with_repeated_keys() -> None:
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, 5, 6, 4)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, 5, 3, 4)), jnp.float32) for _ in range(2))
    mask = layers.causal_mask(5)
    attend = jax.jit(layers.attention)
    repeated_k, repeated_v = np.repeat(k, 2, axis=2), np.repeat(v, 2, axis=2)
    grouped = attend(q, k, v, mask=mask)
    np.testing.assert_allclose(grouped, attend(q, repeated_k, repeated_v, mask=mask), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grouped[:, 0], repeated_v[:, 0], rtol=1e-5, atol=1e-6)


def test_rope_depends_on_distance_alone() -> None:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def score(at_q: int, at_k: int) -> float:
        return float(jnp.vdot(layers.rope(q, jnp.array([at_q])), layers.rope(k, jnp.array([at_k]))))

    assert score(7, 4) == pytest.approx(score(23, 20), rel=1e-4)
    assert score(7, 4) != pytest.approx(score(7, 5), rel=1e-4)


def test_recurrence_is_the_loop() -> None:
    rng = np.random.default_rng(0)
    decay, drive = (rng.uniform(size=(2, 7, 3)).astype(np.float32) for _ in range(2))
    h, expected = np.zeros((2, 3), np.float32), []
    for s in range(7):
        h = decay[:, s] * h + drive[:, s]
        expected.append(h)
    np.testing.assert_allclose(ssm.recurrence(decay, drive), np.stack(expected, axis=1), rtol=1e-5)


def test_dispatch_with_room_for_all_is_dropless() -> None:
    program = zoo.load("mixtral", "tiny", scan=False)
    roomy = registry.config_of("mixtral", "tiny", capacity_factor=4.0)
    p = program.make_args()[0]["layers"][0]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(48, 40, 64)), layers.COMPUTE)
    experts = layers.cast(p["experts"])
    dispatched, balance = jax.jit(partial(mixtral.dispatched_experts, roomy))(p["router"], experts, x)
    dropless, same_balance = jax.jit(partial(mixtral.dropless_experts, roomy))(p["router"], experts, x)
    assert float(balance) == pytest.approx(float(same_balance), rel=1e-4)
    difference = np.abs(np.asarray(dispatched, np.float32) - np.asarray(dropless, np.float32))
    assert difference.max() < 0.05 * np.abs(np.asarray(dropless, np.float32)).max()


def test_decoding_from_the_cache_is_prefill_of_the_longer_prompt() -> None:
    program = zoo.load("itx", "tiny-prefill")
    params, batch = program.make_args()
    tokens = batch["tokens"]
    empty = jax.tree.map(jnp.zeros_like, zoo.load("itx", "tiny").make_args()[1])
    forward = jax.jit(itx.forward)
    whole, _ = forward(params, empty, tokens, 0)
    _, cache = forward(params, empty, tokens[:, :-1], 0)
    last, cache = forward(params, cache, tokens[:, -1:], tokens.shape[1] - 1)
    np.testing.assert_allclose(last, whole, atol=0.05, rtol=0.05)

    logits, prefilled = jax.jit(program.fn)(params, batch)
    np.testing.assert_allclose(logits, whole, atol=1e-3, rtol=1e-3)
    assert shapes(prefilled) == shapes(empty)


@pytest.mark.parametrize("form", ["scan", "unrolled"])
def test_decode_loop_is_repeated_steps(form: str) -> None:
    loop, step = zoo.parse(f"itx:tiny,{form},generate=3"), zoo.parse(f"itx:tiny-step,{form},generate=3")
    assert loop.roles == step.roles == ("params", "cache", "batch")
    assert loop.donate_argnums == (1,)
    params, cache, batch = loop.make_args()
    tokens, filled = jax.jit(loop.fn)(params, cache, batch)
    assert tokens.shape == (16, 3)
    run = jax.jit(step.fn)
    for i in range(3):
        token, cache = run(params, cache, batch)
        np.testing.assert_array_equal(tokens[:, i], token)
        batch = {"tokens": token, "position": batch["position"] + 1}
    jax.tree.map(partial(np.testing.assert_allclose, atol=0.05, rtol=0.05), filled, cache)


# Names, text form, errors.


def test_names_and_configs() -> None:
    assert set(zoo.names()) >= {"t2b", "t7b", "gpt", "llama3", "mixtral", "gns", "unet", "itx", "vit"}
    assert zoo.configs("gpt") == ("2.6b", "6.7b", "39b", "tiny")
    assert all("tiny" in zoo.configs(name) for name in zoo.names())
    assert zoo.load("llama3").config == "8b"


def test_parse_reads_configuration_flags_and_options() -> None:
    program = zoo.parse(" t2b:tiny, unrolled,remat,forward,layers=3,batch=8 ")
    assert (program.name, program.config, program.roles) == ("t2b", "tiny", ("params", "batch"))
    assert len(program.args[0]["layers"]) == 3
    assert program.args[1]["inputs"].shape == (8, 24)
    assert "remat" in str(jax.make_jaxpr(program.fn)(*program.args))
    assert zoo.parse("gpt:39b").args[0]["embed"].shape == (51200, 8192)
    assert zoo.parse("mixtral:capacity_factor=2").config == "8x7b"
    assert zoo.parse("unet:tiny,unrolled").name == "unet"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("t2c", ["zoo program", "'t2c'", "did you mean t2b", "mixtral"]),
        ("", ["zoo program", "There are: t2b"]),
        ("gpt:38b", ["configuration or flag of gpt", "did you mean 39b", "2.6b, 6.7b", "unrolled"]),
        ("gpt:39b,tiny", ["two configurations", "39b", "tiny"]),
        ("gpt:layer=3", ["option of gpt", "'layer'", "did you mean layers"]),
        ("gpt:layers=three", ["'layers'", "a whole number", "'three'"]),
        ("gpt:layers=0", ["'layers'", "at least 1"]),
        ("gpt:scan=2", ["'scan'", "true or false"]),
        ("unet:scan", ["option of unet", "'scan'"]),
        ("itx:tiny,mode=sing", ["'sing'", "decode, prefill, step"]),
        ("llama3:tiny,kv_heads=5", ["heads by kv heads", "16 is not a multiple of 5"]),
        ("mixtral:tiny,experts=1", ["2 experts chosen out of 1"]),
    ],
)
def test_bad_targets_say_what_exists(target: str, words: list[str]) -> None:
    with pytest.raises(zoo.ZooError) as caught:
        zoo.parse(target)
    for word in words:
        assert word in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_bad_configuration_of_load() -> None:
    with pytest.raises(zoo.ZooError, match="no configuration of vit called 'l14'; did you mean"):
        zoo.load("vit", "l14")


@pytest.mark.parametrize("module", [zoo, registry])
def test_examples_in_docstrings(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
