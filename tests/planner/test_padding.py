"""Training steps of awkward sizes: with padding, numbers equal plain JAX, and the plan says what is padded and what is not."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwise
from shardwise import zoo
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.cost.memory import BLOCK
from shardwise.cost.model import CostModel
from shardwise.dims.analysis import analyze_program
from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.decisions import Decision, Shard
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.structure import Structure
from shardwise.search.problem import Problem
from tests.planner.decisions import decided, inquire
from tests.spmd.emitted import emitted, predicted
from tests.spmd.test_ops import has_padding

Shape = jax.ShapeDtypeStruct


def layer(x: Any, p: dict[str, Any]) -> Any:
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, p[name]) for name in "qkv")
    scores = jnp.einsum("bshk,bthk->bhst", q, k)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    x = x + jnp.einsum("bhst,bthk,hkd->bsd", jax.nn.softmax(scores), v, p["o"])
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


@functools.cache
def training(scan: bool) -> Callable[..., Any]:
    """A step of a language model with tied embeddings, whose last tokens have no targets."""

    def loss(params: dict[str, Any], tokens: Any) -> Any:
        x = jnp.take(params["embed"], tokens[:, :-1], axis=0)
        if scan:
            x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
        else:
            for n in range(len(params["layers"]["up"])):
                x = jax.checkpoint(layer)(x, jax.tree.map(lambda p, n=n: p[n], params["layers"]))
        logits = jax.nn.log_softmax(x @ params["embed"].T)
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)
        return -jnp.mean(picked), jnp.sum(jnp.argmax(logits, -1) == tokens[:, 1:])

    def step(params: dict[str, Any], tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(loss, has_aux=True)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def sizes(
    batch: int, seq: int, d: int, heads: int, head: int, ffn: int, vocab: int, layers: int = 2
) -> tuple[Any, Any]:
    shape = lambda *sizes: Shape(sizes, "float32")  # noqa: E731
    weights = {name: shape(layers, d, heads, head) for name in "qkv"} | {"o": shape(layers, heads, head, d)}
    weights |= {"up": shape(layers, d, ffn), "down": shape(layers, ffn, d)}
    return {"embed": shape(vocab, d), "layers": weights}, Shape((batch, seq), "int32")


def values(shapes: tuple[Any, Any], vocab: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: (rng.normal(size=s.shape) * 0.3).astype(np.float32), shapes[0])
    return params, rng.integers(0, vocab, shapes[1].shape).astype(np.int32)


def compare(want: Any, have: Any, about: str) -> None:
    for x, y in zip(jax.tree.leaves(want), jax.tree.leaves(have), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4, rtol=1e-4, err_msg=about)


SIZES = {
    "heads, vocabulary and batch": dict(batch=6, seq=17, d=16, heads=5, head=4, ffn=32, vocab=57),
    "all sizes": dict(batch=7, seq=12, d=9, heads=25, head=3, ffn=13, vocab=101, layers=1),
}


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "model": 4}], ids=str)
@pytest.mark.parametrize(("name", "scan"), [("heads, vocabulary and batch", True), ("all sizes", False)])
def test_padded_training_steps_equal_the_plain_ones(name: str, scan: bool, mesh: dict[str, int]) -> None:
    shapes, axes, step = sizes(**SIZES[name]), MeshAxes.of(mesh), training(scan)
    traced = trace(step, shapes, {}, JitOptions())
    analysis = analyze_program(lower(traced))
    args, rng = values(shapes, SIZES[name]["vocab"]), random.Random(name)
    want = jax.device_get(jax.jit(step)(*args))
    groups, padded = [g for g in analysis.groups if g.matters], 0
    inquiry = inquire(analysis, axes)
    local = []
    for _ in range(4):
        chosen: list[Decision] = []
        for axis in axes.names:
            some = rng.sample(groups, min(3, len(groups)))
            chosen += [Shard(g.colors, axis, tuple((bit, 0) for bit in g.bits), padded=True) for g in some]
        plan = decided(traced, inquiry, chosen)
        padded += has_padding(plan)
        local.append(jax.jit(plan.jit(step).inline))  # traced once, here and below
        assert emitted(jax.make_jaxpr(local[-1])(*args)) == predicted(plan), chosen
    assert padded >= 2
    for k, have in enumerate(jax.jit(lambda *xs: [run(*xs) for run in local])(*args)):  # compiled together: faster
        compare(want, have, str(k))
    compare(want, plan.jit(step, partitioner="xla")(*args), str(chosen))


GPT2 = dict(batch=6, seq=1024, d=1600, heads=25, head=64, ffn=6400, vocab=50257)


def test_a_search_pads_where_nothing_else_can_be_sharded_and_says_so() -> None:
    """1,023 tokens of 6 examples, 25 heads: without padding two of eight devices' worth of work can be shared."""
    plan = shardwise.plan(
        training(True), *sizes(**GPT2), mesh={"data": 2, "model": 4}, topology="h100:8", budget_evals=150
    )
    padded = [d for d in plan.choices if isinstance(d, Shard) and d.padded]
    assert padded and all(", padded) over " in str(d) for d in padded)
    exact = plan.inquiry.settle([d for d in plan.choices if d not in padded]).predicted
    assert plan.predicted.time_s < 0.8 * exact.time_s
    assert any("padded to" in note and note.endswith("inside the program") for note in plan.notes), plan.notes
    assert len({note.partition(":")[0] for note in plan.notes}) == len(plan.notes)


def test_a_plan_says_what_no_axis_divides() -> None:
    plan = shardwise.plan(training(True), *sizes(**GPT2), mesh={"data": 2, "model": 4}, tactics="dp")
    whole = [note for note in plan.notes if "is replicated" in note]
    assert [note for note in whole if note.startswith("params/embed[0]")] == [
        "params/embed[0] of size 50,257 is replicated: no mesh axis divides it (data 2, model 4)"
    ]
    assert any("of size 25 is replicated" in note for note in whole)


def heads_step(flat: bool) -> Callable[..., Any]:
    """A step of attention whose weights have heads and their width as two dimensions, or as one."""

    def loss(w: dict[str, Any], x: Any, heads: int) -> Any:
        def split(y: Any) -> Any:
            return y.reshape(*y.shape[:2], heads, -1)

        q, k, v = (split(x @ w[n]) if flat else jnp.einsum("bsd,dhk->bshk", x, w[n]) for n in "qkv")
        y = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k)), v)
        y = y.reshape(*y.shape[:2], -1) @ w["o"] if flat else jnp.einsum("bshk,hkd->bsd", y, w["o"])
        return jnp.mean((x + y) ** 2)

    def step(w: dict[str, Any], x: Any) -> Any:
        heads = HEADS if flat else w["q"].shape[1]
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x, heads))

    return step


HEADS = 6


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("mesh", "tactics", "reason"),
    [
        ({"model": 4}, "dp", "no mesh axis divides it (model 4)"),
        ({"model": 4}, [], "no mesh axis divides it (model 4)"),
        ({"data": 4, "model": 4}, "fsdp", "no mesh axis divides it (data 4, model 4)"),
        (
            {"data": 2, "model": 4},
            "dp:data",
            "model 4 does not divide it, and data 2 shards its products over other dimensions",
        ),
    ],
)
def test_heads_that_no_axis_divides_are_noted_once(flat: bool, mesh: dict[str, int], tactics: Any, reason: str) -> None:
    """Also where a third of the heads would be padding, and where the weights have a dimension that divides."""
    inner = (HEADS * 64,) if flat else (HEADS, 64)
    w = {name: Shape((256, *inner), "float32") for name in "qkv"} | {"o": Shape((*inner, 256), "float32")}
    plan = shardwise.plan(heads_step(flat), w, Shape((16, 128, 256), "float32"), mesh=mesh, tactics=tactics)
    of = ", of size 6 inside the program, is replicated there" if flat else " of size 6 is replicated"
    assert [note for note in plan.notes if "is replicated" in note] == [
        f"w/{{k[1], o[0], q[1]}} and 1 in w{of}: {reason}"
    ]


def test_heads_that_are_sharded_are_not_noted() -> None:
    w = {name: Shape((256, 8, 64), "float32") for name in "qkv"} | {"o": Shape((8, 64, 256), "float32")}
    plan = shardwise.plan(heads_step(False), w, Shape((16, 128, 256), "float32"), mesh={"model": 4}, tactics="megatron")
    assert plan.spec("w/q") and not any("is replicated" in note for note in plan.notes)


def structure(program: Callable[..., Any], args: tuple[Any, ...]) -> Structure:
    return Structure(analyze_program(lower(trace(program, args, {}, JitOptions()))))


def problem(captured: Structure, mesh: dict[str, int]) -> Problem:
    return Problem(CostModel(captured, HardwareCost.of(MeshAxes.of(mesh))))


def padded_actions(found: Problem) -> list[Decision]:
    decisions = (found.evaluator.actions[n].decision for n in found.actions)
    return [d for d in decisions if isinstance(d, Shard) and d.padded]


@pytest.mark.parametrize("target", ["t2b", "llama3:8b", "mixtral", "gpt:2.6b", "t5", "itx:decode"])
def test_sizes_that_divide_are_not_padded(target: str) -> None:
    program = zoo.parse(target)
    captured = structure(program.fn, program.args)
    for mesh in ({"data": 4, "model": 4}, {"data": 2, "model": 8}):
        assert padded_actions(problem(captured, mesh)) == []


def test_costs_of_padded_states_are_those_of_the_specification_and_above_the_bound() -> None:
    found, rng, padded = problem(structure(training(True), sizes(**GPT2)), {"data": 2, "model": 4}), random.Random(0), 0
    assert len(padded_actions(found)) > 4
    for _ in range(12):
        state: tuple[int, ...] = ()
        for n in rng.sample(list(found.actions), 8):
            state = found.joined(state, (n,))
        cost, lowered = found.cost(state), found.evaluator.lowered(state)
        assert cost == found.model.evaluate(lowered), found.decisions(state)
        assert cost.peak_blocks * BLOCK >= found.least_bytes
        pieces = lowered.mesh.pieces
        pairs = ((v.shape, lowered.actual[v.id].dims) for v in lowered.program.values)
        padded += any(n % pieces(axes) for shape, dims in pairs for n, axes in zip(shape, dims, strict=True))
    assert padded > 6
