"""The device-local program as text: what stands in it, in which order, and that its collectives are those of the plan."""

from __future__ import annotations

import io
import linecache
import re
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import shardwise
from shardwise import zoo
from shardwise.errors import PlanError
from shardwise.hardware.layout import ideal
from shardwise.hardware.mesh import MeshAxes
from shardwise.report.program_text import laid_out, touching
from shardwise.spmd.text import MOVING, Line, program_lines, totals
from shardwise.tactics.strategies import FSDP, ExpertParallel, Megatron, SequenceParallel, Shard

MESH = {"data": 2, "model": 4}
ROLES = {"batch": "batch", "params": "params"}


def lines_of(plan: shardwise.Plan) -> list[Line]:
    return program_lines(plan.inquiry.analysis.program, plan.sharded)


def planned(fn: Any, *shapes: tuple[int, ...], **options: Any) -> shardwise.Plan:
    where = {"mesh": MESH, "topology": ideal(MeshAxes.of(MESH), "v5e"), "tactics": [], **options}
    return shardwise.plan(fn, *(jax.ShapeDtypeStruct(s, "float32") for s in shapes), **where)


def statements(plan: shardwise.Plan) -> list[str]:
    """The lines without sources and columns; lines that communicate are marked."""
    found = []
    for line in lines_of(plan):
        mark, note = "> " if line.kind in MOVING else "", f"  # {line.note}" if line.note else ""
        equals = " = " if line.name and line.expression else ""
        words = " ".join(filter(None, (line.name, line.type)))
        found.append(f"{'  ' * line.depth}{mark}{words}{equals}{line.expression}{note}")
    return found


def mlp(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ up) @ down


MLP = """\
  up    f32[256·data,512·model]
  down  f32[512·model,256·data]
  x     f32[512·data,512]

> up.a    f32[512,512·model]       = all_gather(up, data, dim 0)                               1.00 MiB  test_text.py:00
  %3      f32[512·data,512·model]  = dot_general(x, up.a)                                                test_text.py:00
  %4      f32[512·data,512·model]  = tanh(%3)                                                            test_text.py:00
> down.a  f32[512·model,512]       = all_gather(down, data, dim 1)                             1.00 MiB  test_text.py:00
  %5      f32[512·data,512]        = dot_general(%4, down.a)  # partial over model                       test_text.py:00
  %6      f32[512·data,512]        = add(x, %5)  # partial over model; x counted once                    test_text.py:00
> %6.a    f32[512·data,512]        = psum(%6, model)                                           1.00 MiB  test_text.py:00
  out   f32[512·data,512]        = %6.a

Collectives of one device in a step

kind        axes   count     bytes
all-gather  data       2  2.00 MiB
all-reduce  model      1  1.00 MiB
"""


@pytest.fixture(scope="module")
def plan() -> shardwise.Plan:
    options = {"tactics": [FSDP("data"), Megatron("model")], "roles": {"batch": "x", "params": ("up", "down")}}
    return planned(mlp, (512, 2048), (2048, 512), (1024, 512), **options)


def test_a_layer_under_fsdp_and_megatron(plan: shardwise.Plan) -> None:
    head, legend, listing = plan.program().split("\n\n", 2)
    assert head == "mlp on data 2 × model 4, one device of 8" and legend.startswith("Lines with > communicate")
    assert listing == MLP.replace(":00", f":{mlp.__code__.co_firstlineno + 1}")


def test_the_page_of_plans_shows_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()
    found = re.search(
        r"## Reading the device-local program\n.*?```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL
    )
    assert found is not None
    monkeypatch.setitem(linecache.cache, "train.py", (0, None, found[1].splitlines(keepends=True), "train.py"))
    with redirect_stdout(io.StringIO()) as stream:
        exec(compile(found[1], "train.py", "exec"), {"__name__": "train"})
    assert stream.getvalue().rstrip() == found[2].rstrip()


@pytest.mark.parametrize(
    ("target", "tactics"),
    [
        ("mlp:tiny", None),
        ("itx:tiny", None),
        ("gpt:tiny", [FSDP("data"), Megatron("model"), SequenceParallel("model", ("batch/inputs", 1))]),
        ("mixtral:tiny", [FSDP("data"), ExpertParallel("model", ("params/layers/experts/up", 1))]),
        ("mixtral:tiny", [Shard("params/embed", 0, "data"), Shard("batch/inputs", 1, "model")]),
        ("wresnet:tiny", [Shard("batch/images", 1, "data"), Shard("batch/images", 2, "model")]),
    ],
)
def test_the_collectives_are_those_of_the_plan(target: str, tactics: list[Any] | None) -> None:
    program = zoo.parse(target)
    plan = shardwise.plan(program.fn, *program.args, mesh=MESH, tactics=tactics, roles=ROLES, budget_evals=60)
    assert totals(lines_of(plan)) == plan.moved()
    assert plan.moved() or tactics is None, "the program should move something, or this tests nothing"
    for width in (80, 120):
        assert max(map(len, plan.program(width).splitlines())) <= width


def emitted(jaxpr: Any) -> Counter[str]:
    """The collectives of a jaxpr and of those inside of it, by the name of their function."""
    found: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        name = equation.primitive.name.replace("reduce_scatter", "psum_scatter")
        found[name] += name in ("psum", "pmax", "pmin", "all_gather", "psum_scatter", "all_to_all", "ppermute")
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                found += emitted(getattr(inner, "jaxpr", inner))
    return +found


@pytest.mark.parametrize(
    ("target", "tactics"),
    [
        ("gpt:tiny", [FSDP("data"), Megatron("model")]),
        ("mixtral:tiny", [FSDP("data"), ExpertParallel("model", ("params/layers/experts/up", 1))]),
    ],
)
def test_the_collectives_are_those_that_are_executed(target: str, tactics: list[Any]) -> None:
    program = zoo.parse(target)
    plan = shardwise.plan(program.fn, *program.args, mesh=MESH, tactics=tactics, roles=ROLES)
    jaxpr = jax.make_jaxpr(plan.apply(program.fn))(*program.args).jaxpr
    listed = Counter(line.function for line in lines_of(plan) if line.kind in MOVING)
    assert emitted(jaxpr) == listed and len(listed) > 2


def loops(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def body(carry: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = jnp.tanh(carry @ k)
        return carry, carry.sum()

    carry, sums = jax.lax.scan(body, x, w)
    carry = jax.lax.cond(sums[0] > 0, lambda c: c * 2, lambda c: c @ w[0], carry)
    return jax.lax.while_loop(lambda c: c[0, 0] < 3, lambda c: c + 1, carry), sums


def test_bodies_of_loops_are_indented_and_hand_on_what_they_make() -> None:
    plan = planned(loops, (4, 64, 64), (128, 64), tactics=[FSDP("data")], roles={"batch": "x", "params": "w"})
    found = statements(plan)
    start = found.index("scan ×4:")
    assert found[start : start + 11] == [
        "scan ×4:",
        "  %4 f32[64·data,64] = scan.carry(x)",
        "  w[i] f32[32·data,64] = scan.input(w)",
        "  > w[i].a f32[64,64] = all_gather(w[i], data, dim 0)",
        "  %6 f32[64·data,64] = dot_general(%4, w[i].a)",
        "  %7 f32[64·data,64] = tanh(%6)",
        "  %8 f32[] = reduce_sum(%7)  # partial over data",
        "  > %8.a f32[] = psum(%8, data)",
        "  next %4 = %7",
        "  %3[i] = %8.a",
        "%2 f32[64·data,64] = scan.carry(%4)",
    ]
    assert found[start + 11] == "%3 f32[4] = scan.output(%3[i])"
    text = "\n".join(found)
    assert ", branch 0:\n" in text and ", branch 1:\n  %" in text
    assert "while, condition:\n" in text and "  continue if %" in text and "while ×?:\n" in text
    times = {line.times for line in lines_of(plan) if line.kind in MOVING and line.name.startswith("w[i]")}
    assert times == {4.0} and totals(lines_of(plan)) == plan.moved()


def test_a_value_is_brought_into_a_sharding_once_and_again_behind_a_barrier() -> None:
    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jax.checkpoint(layer)(w, jnp.sin(x @ w)).sum())(w)

    options = {"tactics": [FSDP("data")], "roles": {"batch": "x", "params": "w"}}
    shapes = (256, 256), (4096, 256)
    for fn, notes in ((layer, [""]), (step, ["", "again, behind a remat barrier"])):
        gathers = [line for line in lines_of(planned(fn, *shapes, **options)) if line.function == "all_gather"]
        assert [line.note for line in gathers if line.operands == ("w",)] == notes


def test_halos_come_from_the_neighbors() -> None:
    def blurred(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))

    plan = planned(blurred, (16, 4096, 64), (3, 64, 64), tactics=[Shard("x", 1, "model")])
    assert statements(plan)[2:] == [
        "> x.a f32[16,1,64] = ppermute(x, model, 1 of dim 1)  # to the next device",
        "> x.b f32[16,1,64] = ppermute(x, model, 1 of dim 1)  # to the previous device",
        "%2 f32[16,1024·model,64] = conv_general_dilated(concatenate(x, x.a, x.b), kernel)",
        "out f32[16,1024·model,64] = %2",
    ]
    assert totals(lines_of(plan)) == plan.moved() == {("collective-permute", ("model",)): (2, 8192.0)}


def test_halos_are_shared_by_ops_that_need_the_same() -> None:
    def both(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        numbers = ("NHC", "HIO", "NHC")
        made = (jax.lax.conv_general_dilated(x, k, (1,), "SAME", dimension_numbers=numbers) for k in (first, second))
        return sum(made, jnp.zeros(()))

    plan = planned(both, (16, 4096, 64), (3, 64, 64), (3, 64, 64), tactics=[Shard("x", 1, "model")])
    operands = [line.operands[0] for line in lines_of(plan) if line.function == "conv_general_dilated"]
    assert operands == ["concatenate(x, x.a, x.b)"] * 2
    assert totals(lines_of(plan)) == plan.moved() == {("collective-permute", ("model",)): (2, 8192.0)}


def test_other_reshards_have_the_names_of_jax() -> None:
    def turned(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    pins = {"x": PartitionSpec("data", "model"), "out": PartitionSpec("model", "data")}
    assert statements(planned(turned, (4096, 4096), pins=pins))[3:] == [
        "> out.a f32[4096,512·model·data] = all_to_all(out, data, split dim 1, concat dim 0)",
        "> out.b f32[4096,512·data·model] = ppermute(out.a, model·data, dim 1 to data·model)",
        "> out.c f32[1024·model,2048·data] = all_to_all(out.b, model, split dim 0, concat dim 1)",
    ]

    def product(x: jax.Array) -> jax.Array:
        return jnp.prod(x, 0)

    found = statements(planned(product, (64, 64), tactics=[Shard("x", 0, "data")]))
    assert "%1 f32[64] = reduce_prod(x)  # partial prod over data" in found
    assert "> %1.a f32[64] = all_gather(%1, data)  # then combined by prod" in found


def test_long_paths_are_named_by_number_and_said_where_they_are_used() -> None:
    def step(params: Any) -> Any:
        return jnp.tanh(params["a_rather_long_name"])

    made = shardwise.plan(step, {"a_rather_long_name": jax.ShapeDtypeStruct((8,), "float32")}, mesh=MESH, tactics=[])
    rows = laid_out(lines_of(made), 120)
    assert rows[0].split() == ["%0", "params/a_rather_long_name", "f32[8]"]
    assert "= tanh(%0)  # params/a_rather_long_name" in rows[1]


def test_too_long_a_line_goes_below() -> None:
    parts = [Line("op", 1, "%99", "f32[8]", "concatenate", tuple(f"%{k}" for k in range(40)), source="model.py:1")]
    (row,) = laid_out(parts, 60)
    first, *below = row.splitlines()
    assert first == "    %99 f32[8]" and len(below) > 2 and max(map(len, below)) <= 60
    assert all(line.startswith("        ") for line in below) and below[-1].endswith(") model.py:1".lstrip(")"))
    assert "".join(below).replace(" ", "").startswith("=concatenate(%0,%1,%2,")


def test_the_lines_about_an_argument_and_its_views(plan: shardwise.Plan) -> None:
    program = plan.inquiry.analysis.program
    assert [line.name for line in touching(program, lines_of(plan), "up")] == ["up", "up.a", "%3"]
    assert [line.name for line in touching(program, lines_of(plan), "out")] == ["%6", "%6.a", "out"]
    assert "  in the device-local program:\n" in plan.explain("up")
    assert "    > up.a  f32[512,512·model]  = all_gather(up, data, dim 0)" in plan.explain("up")


def test_a_loaded_plan_needs_its_function(plan: shardwise.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = shardwise.load_plan(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"plan\.bind"):
        loaded.program()
    assert "device-local" not in loaded.explain("up")
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in plan.arguments]
    assert loaded.bind(mlp, *shapes).program() == plan.program()


def test_a_border_whose_path_leaves_no_room_has_a_row() -> None:
    """An argument has nothing to show below its name."""
    line = Line(
        "argument", 0, "variables/" + "Attention_0/" * 3 + "key/kernel", "bf16[16·data,4,8·model]", source="model.py:8"
    )
    (row,) = laid_out([line], 60)
    assert row.split() == [line.name, line.type, line.source]
