"""Plan files that nobody should write, and paths that nobody should have: a PlanError, and Python that does no harm."""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwise
from shardwise.errors import PlanError, ShardwiseError
from shardwise.plans.plan import Plan
from tests.plans.files import signed

ARGS = {"in": jnp.ones((8, 64)), "out": jnp.ones((64, 16))}, jnp.ones((32, 8))


def step(w: Any, x: Any) -> Any:
    return {"y": jax.nn.relu(x @ w["in"]) @ w["out"], "x": x * 2}


@functools.cache
def made() -> Plan:
    return shardwise.plan(
        step,
        *ARGS,
        mesh={"data": 2, "model": 4},
        tactics="dp:data,megatron:model",
        roles={"batch": "x", "params": "w"},
        donate_argnums=1,
    )


def content() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(made().to_json())
    return data


def load(folder: Path, text: str) -> Plan:
    (folder / "plan.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    return shardwise.load_plan(folder / "plan.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"schema": ' + "9" * 5000 + "}", "no complete JSON"),
        ('{"schema": Infinity}', "Infinity is no number"),
        ('{"schema": NaN}', "NaN is no number"),
        ('{"schema": 13, "schema": 13}', "the key 'schema' is there twice"),
        ('{"schema": 13, "function": "\\ud800"}', "surrogates not allowed"),
        ('{"schema": 13, "function": "\ud800"}', "no complete JSON"),
        ('{"schema": 13}', "was changed after it was saved"),
        ("", "no complete JSON"),
        ("null", "is not a plan"),
    ],
)
def test_what_is_no_plan(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value) and len(str(caught.value)) < 400


def reordered(data: dict[str, Any]) -> None:
    data["arguments"].reverse()


def undonated(data: dict[str, Any]) -> None:
    data["arguments"][2]["donated"] = False


def other_mesh(data: dict[str, Any]) -> None:
    data["mesh"] = {"data": 4, "model": 2}


def other_place(data: dict[str, Any]) -> None:
    data["sharded"]["computed"][-1], data["sharded"]["computed"][0] = data["sharded"]["computed"][0], [[[0, 0]], []]


def missing(data: dict[str, Any]) -> None:
    del data["arguments"][0]


def doubled(data: dict[str, Any]) -> None:
    data["arguments"].append(data["arguments"][0])


def without_outputs(data: dict[str, Any]) -> None:
    data["outputs"] = []


def other_spec(data: dict[str, Any]) -> None:
    data["arguments"][2]["spec"] = [[], ["data"]]


EDITS = [reordered, undonated, other_mesh, other_place, missing, doubled, without_outputs, other_spec]


@pytest.mark.parametrize("change", EDITS)
def test_a_changed_file_is_refused(tmp_path: Path, change: Callable[[Any], None]) -> None:
    data = content()
    change(data)
    with pytest.raises(PlanError, match="was changed after it was saved"):
        load(tmp_path, json.dumps(data))


@pytest.mark.parametrize("change", [e for e in EDITS if e not in (undonated, other_mesh)])
def test_a_changed_file_with_a_digest_is_refused_when_it_meets_its_function(
    tmp_path: Path, change: Callable[[Any], None]
) -> None:
    data = content()
    change(data)
    for use in (lambda plan: plan.jit(step)(*ARGS), lambda plan: plan.bind(step, *ARGS)):
        with pytest.raises(PlanError, match=r"does not fit its program|is there 2 times"):
            use(load(tmp_path, signed(data)))


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all parts of some data."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


VALUES = [
    None,
    True,
    -1,
    0,
    1,
    7,
    10**9,
    2**70,
    10**40,
    1e300,
    -1.5,
    "",
    "x",
    "a\nb",
    "key<fry>",
    [],
    [[]],
    {},
    {"x": 1},
]


def mutated(data: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A copy with some parts replaced, removed, doubled or swapped."""
    data = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 2))):
        *way, last = rng.choice(places(data)[1:])
        around = functools.reduce(lambda part, key: part[key], way, data)
        other = rng.choice(list(around) if isinstance(around, dict) else range(len(around)))
        change = rng.choice(("replace", "replace", "remove", "swap", "double"))
        if change == "replace":
            around[last] = rng.choice(VALUES)
        elif change == "remove":
            del around[last]
        elif change == "swap":
            around[last], around[other] = around[other], around[last]
        elif isinstance(around, list):
            around.append(around[last])
    return data


def use(plan: Plan) -> None:
    """Everything that one does with a loaded plan."""
    str(plan), repr(plan), plan.summary(), plan.diff(made()), plan.rules(), plan.moved(), plan.to_json()
    for array in (*plan.arguments, *plan.outputs):
        plan.explain(array.path)
    exec(plan.code(), {})
    plan.jit(step)(*jax.tree.map(jnp.copy, ARGS))
    plan.bind(step, *ARGS).summary()


@pytest.mark.parametrize("seed", range(120))
def test_mutations_with_a_digest(tmp_path: Path, seed: int) -> None:
    data = mutated(content(), random.Random(seed))
    try:
        use(load(tmp_path, signed(data)))
    except ShardwiseError as error:
        assert str(error)


def test_code_is_python_for_any_path() -> None:
    names = ["it's", 'a "quote"', "back\\slash", '"): print(1) #', "line\nbreak", "ü"]
    plan = shardwise.plan(lambda w: sum(w.values()), {n: jnp.ones(8) for n in names}, mesh={"data": 4}, tactics=[])
    scope: dict[str, Any] = {}
    exec(plan.code(), scope)
    assert set(scope["IN_SPECS"]["w"]) == set(names)


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    plan = shardwise.plan(lambda w: w["\ud800"] * 2, {"\ud800": jnp.ones(8)}, mesh={"data": 4}, tactics=[])
    with pytest.raises(PlanError, match="cannot be written"):
        plan.save(tmp_path / "plan.json")
