"""Where an op comes from: the user's line, not that of a framework; the module; repeated layers as one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import shardwise as sw

BATCH = jax.ShapeDtypeStruct((64, 16), "float32")


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


class Stack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(8)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = x + block(x)
        return x


def gradient(model: Stack, x: jax.Array) -> Any:
    return nnx.grad(lambda model: (model(x) ** 2).mean())(model)


def test_lines_are_the_users() -> None:
    program = sw.analyze(gradient, nnx.eval_shape(lambda: Stack(nnx.Rngs(0))), BATCH).program
    files = {Path(program.source_of(op).file).name for op in program.ops if op.kind == "dot_general"}
    assert files == {"test_sources.py"}
    product = next(op for op in program.ops if op.kind == "dot_general")
    assert f"(dot_general at model/blocks/0/up, {program.source_of(product)})" in program.label(product.results[0])
    params = linen.Dense(8).init(jax.random.key(0), jnp.ones((4, 16)))
    dense = sw.analyze(lambda params, x: linen.Dense(8).apply(params, x), params, BATCH).program
    assert {str(dense.source_of(op)).split(":")[0] for op in dense.ops if op.unit} <= {"test_sources.py", "?"}


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "tinylayers.py").write_text("def dense(w, x):\n    return x @ w\n")
    (folder / "tinymodel.py").write_text(
        "from tinylayers import dense\n\n\ndef inner(w, x):\n    return dense(w, x)\n\n\n"
        "def model(w, x):\n    return inner(w, x)\n"
    )
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in ("tinylayers", "tinymodel"):
        sys.modules.pop(name, None)


def test_if_all_code_is_installed_it_is_the_package_that_was_called(installed: Path) -> None:
    model = importlib.import_module("tinymodel").model
    w = jax.ShapeDtypeStruct((16, 8), "float32")
    program = sw.analyze(model, w, BATCH).program
    (product,) = (op for op in program.ops if op.kind == "dot_general")
    assert str(program.source_of(product)) == "tinymodel.py:5"
    program = sw.analyze(lambda w, x: model(w, x), w, BATCH).program
    (product,) = (op for op in program.ops if op.kind == "dot_general")
    assert Path(program.source_of(product).file).name == "test_sources.py"


def test_repeated_layers_are_one_row() -> None:
    plan = sw.plan(gradient, nnx.eval_shape(lambda: Stack(nnx.Rngs(0))), BATCH, mesh={"data": 4}, tactics="fsdp")
    text = str(plan)
    assert "model/blocks/*/up/kernel (8)" in text and "blocks/3" not in text
    assert len(text.splitlines()) < 60
    assert "model/blocks/*/up/kernel (8): " in plan.diff(replicated(plan))
    assert "model/blocks/*/up/kernel" in str(plan.inquiry.analysis) and "blocks/3" not in str(plan.inquiry.analysis)


def replicated(plan: sw.Plan) -> sw.Plan:
    assert plan.call is not None
    return sw.plan(plan.call.fn, *plan.call.args, mesh={"data": 4}, tactics=[])


def test_items_of_a_list_say_where_they_are_used() -> None:
    def fn(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for k in range(0, 4, 2):
            with jax.named_scope(f"dense_{k // 2}"):
                x = jnp.tanh(x @ params[k] + params[k + 1])
        return x @ params[4]

    w, b = (jax.ShapeDtypeStruct(s, "float32") for s in [(16, 16), (16,)])
    text = str(sw.plan(fn, [w, b, w, b, jax.ShapeDtypeStruct((16, 4), "float32")], BATCH, mesh={"data": 4}, tactics=[]))
    rows = [line.split() for line in text.splitlines() if line.startswith("params/")]
    assert [" ".join(row) for row in rows[:2]] == [
        "params/* (2) float32[16, 16] dense_*",
        "params/* (2) float32[16] dense_*",
    ]
    assert rows[2][0] == "params/4" and rows[2][-1].startswith("test_sources.py:")
