"""The canonical facts about names, colors, conflicts and compatibility sets."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest

import shardwise
from shardwise import zoo
from shardwise.dims.analysis import Analysis
from tests.dims import programs as p


def analyzed(target: str) -> Analysis:
    program = zoo.parse(target)
    return shardwise.analyze(program.fn, *program.args)


def groups_that_matter(analysis: Analysis) -> int:
    return sum(g.matters for g in analysis.groups)


def test_mlp_has_four_colors_and_no_conflict() -> None:
    analysis = shardwise.analyze(
        lambda x, w1, w2: jax.nn.gelu(x @ w1) @ w2, p.shape(32, 8), p.shape(8, 64), p.shape(64, 4)
    )
    assert [c.size for c in analysis.colors] == [32, 8, 64, 4]
    assert analysis.conflicts == () and analysis.compatibility_sets == ()
    assert analysis.color_of("w1", 1) == analysis.color_of("w2", 0) != analysis.color_of("w1", 0)


def test_mlp_training_step_keeps_the_four_colors() -> None:
    def step(w, x, y):
        loss = lambda w: jnp.mean((jax.nn.relu(x @ w[0]) @ w[1] - y) ** 2)  # noqa: E731
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w))

    analysis = shardwise.analyze(step, (p.shape(8, 64), p.shape(64, 4)), p.shape(32, 8), p.shape(32, 4))
    assert sorted(c.size for c in analysis.colors) == [4, 8, 32, 64]
    assert not analysis.conflicts


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_has_one_compatibility_set(causal: bool) -> None:
    def block(params, x):
        return p.attention(params, x, causal=causal)

    for fn in (block, p.gradient(block)):
        analysis = shardwise.analyze(fn, p.attention_params(), p.stream())
        (family,) = analysis.compatibility_sets
        assert family.consistent
        assert analysis.colors[family.color] == analysis.color_of("x", 1)
        assert sorted(c.size for c in analysis.colors) == [2, 4, 8, 8, 12, 16]


def test_the_two_sides_are_queries_and_keys() -> None:
    analysis = shardwise.analyze(p.attention, p.attention_params(), p.stream())
    (family,) = analysis.compatibility_sets
    program = analysis.program
    products = [op for op in program.ops if op.kind == "dot_general"]
    queries, keys, values = (op.results[0] for op in products[:3])
    sides = [{(place.value, place.dim) for place in side} for side in (family.first, family.second)]
    query_side, key_side = sides if (queries, 1) in sides[0] else reversed(sides)
    assert (queries, 1) in query_side and (queries, 1) not in key_side
    assert {(keys, 1), (values, 1)} <= key_side and not {(keys, 1), (values, 1)} & query_side
    scores = products[3].results[0]
    assert (scores, 2) in query_side and (scores, 3) in key_side
    assert not query_side & key_side


def test_scan_links_the_gradients_through_its_residuals() -> None:
    analysis = shardwise.analyze(p.gradient(p.scanned), p.attention_params(3), p.stream())
    assert len(analysis.compatibility_sets) == 1
    stacked = [v for v in analysis.program.values if v.shape == (3, p.BATCH, p.HEADS, p.SEQUENCE, p.SEQUENCE)]
    assert stacked, "the scores or probabilities should be saved for the backward pass"


@pytest.mark.parametrize("form", ["alone", "scanned"])
def test_remat_leaves_at_most_two_sets(form: str) -> None:
    if form == "alone":
        fn, params = jax.checkpoint(p.attention), p.attention_params()
    else:
        fn, params = lambda q, x: p.scanned(q, x, jax.checkpoint), p.attention_params(3)
    analysis = shardwise.analyze(p.gradient(fn), params, p.stream())
    assert 1 <= len(analysis.compatibility_sets) <= 2
    assert all(s.consistent for s in analysis.compatibility_sets)
    assert {analysis.colors[s.color].size for s in analysis.compatibility_sets} == {p.SEQUENCE}


def test_cross_attention_has_no_conflict() -> None:
    memory = p.shape(p.BATCH, 20, p.MODEL)
    for fn in (p.attention, p.gradient(p.attention)):
        analysis = shardwise.analyze(fn, p.attention_params(), p.stream(), memory)
        assert analysis.compatibility_sets == ()
        assert analysis.color_of("x", 1) != analysis.color_of("memory", 1)


def test_weight_tied_square_layer_has_one_set() -> None:
    analysis = shardwise.analyze(lambda x, w: (x @ w) @ w, p.shape(8, 16), p.shape(16, 16))
    (family,) = analysis.compatibility_sets
    assert family.consistent and {str(place) for place in family.first} >= {"w[0]"}
    assert {str(place) for place in family.second} >= {"w[1]"}


def test_a_set_that_meets_its_mirror_is_inconsistent() -> None:
    def symmetric(x):
        y = x @ x.T
        return y + y.T

    analysis = shardwise.analyze(symmetric, p.shape(8, 16))
    (family,) = analysis.compatibility_sets
    assert not family.consistent
    assert analysis.bits == 0


def test_graph_network_separates_nodes_edges_and_features() -> None:
    analysis = analyzed("gns:tiny")
    nodes, edges = analysis.color_of("batch/nodes", 0), analysis.color_of("batch/edges", 0)
    assert nodes is not None and edges is not None and nodes != edges
    assert analysis.color_of("batch/senders", 0) == edges == analysis.color_of("batch/receivers", 0)
    features = [c for c in analysis.colors if any(place.label.startswith("params") for place in c.places)]
    assert len(features) > 3
    assert not {nodes.id, edges.id} & {c.id for c in features}


def test_gemma_training_step_has_eight_colors_that_matter() -> None:
    analysis = analyzed("t2b")
    matter = [c for c in analysis.colors if c.matters]
    where = {
        "batch": ("batch/inputs", 0),
        "sequence": ("batch/inputs", 1),
        "model": ("params/embed", 1),
        "vocabulary": ("params/embed", 0),
        "hidden": ("params/layers/mlp/up", 2),
        "heads": ("params/layers/attention/q", 2),
        "query and key head dimension": ("params/layers/attention/q", 3),
        "value head dimension": ("params/layers/attention/v", 3),
    }
    named = {name: analysis.color_of(*place) for name, place in where.items()}
    assert {c.id for c in matter} == {c.id for c in named.values() if c is not None}
    assert len(matter) == 8
    assert all(c.loop for c in analysis.colors if not c.matters)


@pytest.mark.parametrize("remat", ["", ",remat"])
def test_depth_does_not_matter(remat: str) -> None:
    """Groups and bits of 2, 12 and 24 unrolled layers are those of the scanned form."""
    facts = set()
    for layers in (2, 12, 24):
        analysis = analyzed(f"t2b:tiny,unrolled,layers={layers}{remat}")
        facts.add((groups_that_matter(analysis), analysis.bits))
    scanned = analyzed(f"t2b:tiny,scan{remat}")
    facts.add((groups_that_matter(scanned), scanned.bits))
    assert len(facts) == 1 and facts.pop()[0] == 8


@pytest.mark.parametrize("layers", [2, 5, 12])
def test_depth_does_not_matter_without_embedding_or_loss(layers: int) -> None:
    """The first layer has no gradient of its input here, and the last another cotangent than the rest."""
    fn = jax.grad(lambda q, x: p.unrolled(q, x).sum())
    analysis = shardwise.analyze(fn, [p.attention_params()] * layers, p.stream())
    assert len(analysis.groups) == 6 and analysis.bits == 1
    assert len(analysis.compatibility_sets) == layers


@pytest.mark.parametrize("layers", [3, 8, 9])
def test_equal_widths_of_a_deep_mlp_alternate(layers: int) -> None:
    """All inner widths are alike and meet in the products, so they make two groups: odd and even."""

    def loss(ws, x):
        for w in ws:
            x = jax.nn.relu(x @ w)
        return x.sum()

    analysis = shardwise.analyze(jax.grad(loss), [p.shape(16, 16)] * layers, p.shape(8, 16))
    inner = [analysis.color_of(f"ws/{k}", 1) for k in range(layers - 1)]
    assert len({c.group for c in inner}) == 2
    assert all(a.group != b.group for a, b in itertools.pairwise(inner))


def test_grouping_can_be_switched_off() -> None:
    fn, params = p.gradient(p.unrolled), [p.attention_params()] * 4
    together = shardwise.analyze(fn, params, p.stream())
    apart = shardwise.analyze(fn, params, p.stream(), grouping=False)
    assert len(apart.groups) == len(apart.colors) > len(together.groups)
    assert apart.bits == len(apart.compatibility_sets) > together.bits


def test_sets_of_a_group_are_oriented_alike() -> None:
    """A tied layer and its transposed twin share a bit: for both it says whether the contracted side keeps the axis."""

    def chain(x, w):
        for _ in range(10):
            x = x @ w
        return x

    analysis = shardwise.analyze(
        lambda x1, w1, x2, w2: (chain(x1, w1), chain(x2, w2.T)),
        *[p.shape(8, 16), p.shape(16, 16)] * 2,
    )
    straight, transposed = analysis.compatibility_sets
    assert straight.bit == transposed.bit and analysis.bits == 1

    def first_side_of_bit(family) -> set[str]:
        return {str(place) for place in (family.second if family.flipped else family.first)}

    assert ("w1[0]" in first_side_of_bit(straight)) == ("w2[1]" in first_side_of_bit(transposed))
    assert straight.flipped != transposed.flipped


def test_why_names_the_chain() -> None:
    analysis = shardwise.analyze(p.attention, p.attention_params(), p.stream())
    chain = analysis.why("p/q", 1, "p/o", 0)
    assert chain.tied
    assert [s.op for s in chain.steps].count("dot_general") >= 3
    assert all("programs.py:" in s.source for s in chain.steps)
    assert "different colors" in str(analysis.why("x", 0, "x", 1))
    assert str(analysis.why("x", 0, "x", 0)).startswith("x[0]")


def test_why_explains_bad_questions() -> None:
    analysis = shardwise.analyze(p.attention, p.attention_params(), p.stream())
    with pytest.raises(shardwise.ShardwiseError, match=r"no argument or output has the path 'p/w'.*did you mean"):
        analysis.why("p/w", 0, "x", 0)
    with pytest.raises(shardwise.ShardwiseError, match="there is no dimension 7"):
        analysis.why("x", 7, "x", 0)


def test_the_answer_is_the_same_each_time() -> None:
    first, second = (analyzed("mixtral:tiny").to_json() for _ in range(2))
    assert first == second


def test_the_zoo_has_no_opaque_op() -> None:
    opaque = {}
    for name in zoo.names():
        for config in zoo.configs(name):
            if config.startswith("tiny"):
                analysis = analyzed(f"{name}:{config}")
                opaque[f"{name}:{config}"] = sorted({op.kind for op in analysis.opaque_ops})
    assert opaque and not any(opaque.values()), opaque


def test_a_sequence_that_is_also_scanned_in_chunks_still_matters() -> None:
    """The trips of a loop over chunks of the sequence have the sequence's color; attention must not lose it for that."""

    def loss(params, x):
        hidden = p.attention(params, x)
        chunks = hidden.reshape(p.BATCH, 4, p.SEQUENCE // 4, p.MODEL).swapaxes(0, 1)
        return jax.lax.scan(lambda total, chunk: (total + jnp.sum(chunk**2), None), 0.0, chunks)[0]

    analysis = shardwise.analyze(jax.grad(loss), p.attention_params(), p.stream())
    sequence = analysis.color_of("x", 1)
    assert sequence is not None and sequence.loop and sequence.matters
    assert analysis.bits >= 1
