"""Every recipe of docs/recipes.md is run as it stands there, and compared with plain ``jax.jit``."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise.capture.equations import partition_spec

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def sections() -> dict[str, str]:
    """The one Python block of every section, by its title; that of the introduction by ''."""
    found = {}
    for part in re.split(r"^## ", "\n" + PAGE.read_text(), flags=re.M):
        title = part.split("\n", 1)[0]
        (found[title],) = re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL)
    return found


SECTIONS = sections()
STEPS = 3


def run(title: str) -> SimpleNamespace:
    """What a reader of a section has after pasting the introduction and the section."""
    scope: dict[str, object] = {"__name__": "recipe"}
    for block in ("", title):
        exec(compile(SECTIONS[block], f"<recipe {title or 'start'}>", "exec"), scope)
    return SimpleNamespace(**{name: value for name, value in scope.items() if not name.startswith("__")})


def leaves(tree) -> list[jax.Array]:
    return jax.tree.leaves(tree)


def planned_specs(recipe: SimpleNamespace, path: str) -> list[tuple[str, jax.sharding.PartitionSpec]]:
    arrays = [*recipe.plan.arguments, *recipe.plan.outputs]
    return [(a.path, partition_spec(a.spec)) for a in arrays if a.path.startswith(path + "/")]


def short(spec) -> tuple:
    """A spec without what JAX may or may not write at its end."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def check_sharded_as_planned(recipe: SimpleNamespace, params: str) -> None:
    """The state lies as the plan says (as an argument and as an output), and its parameters are not all whole."""
    dim = 1 if recipe.batch["x"].ndim == 3 else 0
    assert all(recipe.plan.array(f"batch/{name}").spec[dim] == ("data",) for name in recipe.batch)
    names = {path.removeprefix("state/"): spec for path, spec in planned_specs(recipe, "state")}
    outputs = [spec for path, spec in planned_specs(recipe, "out/0")]
    arrays = leaves(recipe.state)
    assert len(arrays) == len(names) == len(outputs)
    for array, (path, spec), out in zip(arrays, names.items(), outputs, strict=True):
        assert short(array.sharding.spec) == short(spec) == short(out), path
    held = [(array, spec) for array, (path, spec) in zip(arrays, names.items(), strict=True) if path.startswith(params)]
    assert held
    for array, spec in held:
        if array.ndim == 2:
            assert short(spec), "a parameter that is whole on every device"
            assert array.addressable_shards[0].data.size < array.size


def plain(recipe: SimpleNamespace, step, steps: int = STEPS):
    state = jax.jit(recipe.init)(recipe.key)
    one = jax.jit(step)
    for _ in range(steps):
        state, loss = one(state, recipe.batch)
    return state, loss


def check_same(recipe: SimpleNamespace, step=None, tolerance: float = 1e-4) -> None:
    state, loss = plain(recipe, step or recipe.step)
    np.testing.assert_allclose(recipe.loss, loss, rtol=tolerance)
    got, want = leaves(recipe.state), leaves(state)
    assert jax.tree.structure(recipe.state) == jax.tree.structure(state)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1e-3, float(jnp.abs(b).max())))


#: Tested on their own below, in test_processes.py, and by ``make corpus``.
SPECIAL = {
    *("", "JAX and Optax", "Donated state", "Flax nnx", "Equinox", "Orbax", "Mixed precision", "PyTorch"),
    "Several processes",
}


@pytest.mark.parametrize("title", [t for t in SECTIONS if t not in SPECIAL])
def test_recipe(title: str) -> None:
    recipe = run(title)
    check_sharded_as_planned(recipe, "params/")
    check_same(recipe)


def test_optax_moments_lie_with_their_parameters() -> None:
    recipe = run("JAX and Optax")
    check_sharded_as_planned(recipe, "params/")
    for name, parameter in recipe.state["params"].items():
        moments = recipe.state["opt"][0]
        specs = [short(array[name].sharding.spec) for array in (moments.mu, moments.nu)]
        assert specs == [short(parameter.sharding.spec)] * 2
    assert short(recipe.state["params"]["up"].sharding.spec) == (None, "model")
    assert short(recipe.state["params"]["down"].sharding.spec) == ("model",)
    # Adam divides by the root of the second moment: where a gradient is nearly zero its first steps are rounding.
    state, loss = plain(recipe, recipe.step)
    np.testing.assert_allclose(recipe.loss, loss, rtol=1e-4)
    for a, b in zip(leaves(recipe.state["opt"]), leaves(state["opt"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(jnp.abs(b).max()))


def test_flax_nnx() -> None:
    recipe = run("Flax nnx")
    assert recipe.plan["model/up/kernel"] == recipe.model.up.kernel.sharding.spec == jax.P(None, "model")
    model = recipe.MLP(recipe.nnx.Rngs(0))
    optimizer = recipe.nnx.Optimizer(model, recipe.optax.sgd(0.1, momentum=0.9), wrt=recipe.nnx.Param)
    step = recipe.nnx.jit(recipe.train_step.__wrapped__)
    expected = [step(model, optimizer, recipe.batch) for _ in range(3)]
    assert expected[2] < expected[0]
    np.testing.assert_allclose(recipe.losses, expected, rtol=1e-4)
    np.testing.assert_allclose(recipe.model.down.kernel[...], model.down.kernel[...], rtol=1e-4, atol=1e-6)


def test_equinox() -> None:
    recipe = run("Equinox")
    eqx = recipe.eqx
    spec = next(a.spec for a in recipe.plan.arguments if a.path == "model/layers/0/weight")
    assert short(partition_spec(spec)) == short(recipe.model.layers[0].weight.sharding.spec) == ("model",)
    model = recipe.make(recipe.key)
    opt_state = recipe.optimizer.init(eqx.filter(model, eqx.is_array))
    step = eqx.filter_jit(recipe.train_step.__wrapped__)
    for _ in range(3):
        model, opt_state, loss = step(model, opt_state, recipe.batch)
    np.testing.assert_allclose(recipe.loss, loss, rtol=1e-4)
    assert recipe.model.activation is model.activation
    np.testing.assert_allclose(recipe.model.layers[1].weight, model.layers[1].weight, rtol=1e-4, atol=1e-6)


def test_donated_state() -> None:
    recipe = run("Donated state")
    check_sharded_as_planned(recipe, "params/")
    assert all(a.donated == a.path.startswith("state/") for a in recipe.plan.arguments)
    assert all(array.is_deleted() for array in leaves(recipe.previous))
    assert not any(array.is_deleted() for array in leaves((recipe.state, recipe.batch)))
    check_same(recipe, recipe.train.__wrapped__)


def test_orbax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    recipe = run("Orbax")
    check_sharded_as_planned(recipe, "params/")
    check_same(recipe)
    assert recipe.folder.is_relative_to(tmp_path)
    with recipe.ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(recipe.folder, recipe.shapes)
    saved, _ = plain(recipe, recipe.step, steps=1)
    for a, b, shape in zip(leaves(restored), leaves(saved), leaves(recipe.shapes), strict=True):
        assert a.sharding == shape.sharding
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert short(restored["params"]["up"].sharding.spec) == (None, "model")
    assert recipe.first.array("state/params/up").spec != recipe.plan.array("state/params/up").spec


def test_mixed_precision() -> None:
    recipe = run("Mixed precision")
    check_sharded_as_planned(recipe, "params/")
    assert all(array.dtype == jnp.float32 for array in leaves(recipe.state))
    # A cast is named after the argument that it is one of.
    gathered = {c.value.rpartition(" as ")[2] for c in recipe.plan.collectives if c.kind == "all-gather"}
    assert {"bfloat16[16,64]", "bfloat16[64,8]"} <= gathered and all(g.startswith("bfloat16") for g in gathered)
    check_same(recipe, tolerance=2e-2)  # bfloat16 has eight bits, and sums are taken in another order
