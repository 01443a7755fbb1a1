"""Which values reach memory, who reads them, and in what order kernels run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardwise
from shardwise.cost.clusters import Clusters, Role, kernel_order
from shardwise.cost.kernels import kernels
from tests.dims import programs as p


def clusters(fn: Callable[..., Any], *args: Any, library: bool = False) -> Clusters:
    return Clusters(shardwise.analyze(fn, *args).program, library)


def stored(c: Clusters) -> list[str]:
    """The ops whose results are stored, without arguments and outputs, in the order of the program."""
    ops = (op for op in c.program.schedule if op.kind not in ("argument", "output", "constant"))
    return [op.kind for op in ops if any(v >= 0 and c.base[v] == v and c.stored[v] for v in op.results)]


def test_only_the_end_of_a_chain_is_stored() -> None:
    assert stored(clusters(lambda x: jnp.tanh(x * 2.0) + 1.0, p.shape(64, 128))) == ["add"]


def test_a_view_is_its_operand() -> None:
    c = clusters(lambda x, w: (x @ w).reshape(32, 2, 128).T, p.shape(64, 128), p.shape(128, 128))
    product = next(op for op in c.program.ops if op.kind == "dot_general")
    views = [op for op in c.program.ops if c.roles[op.id] is Role.VIEW]
    assert len(views) == 2
    assert {c.base[v] for op in views for v in op.results} == {product.results[0]}
    assert stored(c) == ["dot_general"]


def test_what_stands_in_a_barrier_is_stored_once() -> None:
    def fn(x):
        y = jnp.tanh(x)
        return lax.optimization_barrier(y) * 2.0

    assert stored(clusters(fn, p.shape(64, 128))) == ["tanh", "mul"]


def test_a_product_takes_its_epilogue() -> None:
    c = clusters(lambda x, w, y: x @ w + y, p.shape(64, 128), p.shape(128, 256), p.shape(64, 256))
    assert stored(c) == ["add"]


def test_a_second_product_is_stored() -> None:
    c = clusters(lambda x, w, y, z: x @ w + y @ z, *[p.shape(128, 128)] * 4)
    assert stored(c) == ["dot_general", "add"]


def test_a_chain_with_several_uses_is_made_again_from_the_product() -> None:
    """Exponentials of a softmax, however dear, come from the scores every time."""
    c = clusters(lambda x, w: jax.nn.softmax(x @ w) @ w.T, p.shape(64, 128), p.shape(128, 128))
    assert "exp" not in stored(c)
    assert stored(c)[0] == "dot_general"


@pytest.mark.parametrize("scan", [True, False])
def test_masked_scores_are_stored_alike_inside_and_outside_of_loops(scan: bool) -> None:
    """For one product masked and in float32, for the several of a backward pass as the product returns them."""

    def layer(x: Any, w: Any) -> Any:
        scores = jnp.einsum("bsd,btd->bst", x @ w, x).astype(jnp.float32)
        masked = jnp.where(jnp.tril(jnp.ones((256, 256), bool)), scores, -1e30)
        return jnp.einsum("bst,btd->bsd", jax.nn.softmax(masked, axis=-1).astype(x.dtype), x)

    def forward(x: Any, ws: Any) -> Any:
        if scan:
            return lax.scan(lambda x, w: (jax.checkpoint(layer, prevent_cse=False)(x, w), None), x, ws)[0]
        for w in ws:
            x = jax.checkpoint(layer)(x, w)
        return x

    def masked(fn: Callable[..., Any]) -> list[bool]:
        """Of each softmax: are its masked scores stored?"""
        c = clusters(fn, p.shape(4, 256, 128, dtype="bfloat16"), p.shape(2, 128, 128, dtype="bfloat16"))
        return [c.stored[c.base[op.operands[0]]] for op in c.program.schedule if op.kind == "reduce_max"]

    layers = 1 if scan else 2
    assert masked(forward) == [True] * layers
    step = jax.value_and_grad(lambda x, ws: jnp.sum(forward(x, ws).astype(jnp.float32)))
    assert masked(step) == [True] * layers + [False] * layers


def test_what_reads_two_arrays_is_not_made_again() -> None:
    def fn(x, y, w):
        z = x + y
        return z @ w, jnp.sin(z)

    assert "add" in stored(clusters(fn, *[p.shape(128, 128)] * 3))
    assert "add" not in stored(clusters(lambda x, w: fn(x, 1.0, w), *[p.shape(128, 128)] * 2))


def test_a_gather_wants_its_operand_but_others_look_through() -> None:
    """Logits lie as the product made them and, for the labels' gather, scaled."""

    def loss(x, w, labels):
        logits = (x @ w).astype(jnp.float32) * 0.5
        chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - chosen[:, 0])

    c = clusters(
        loss, p.shape(64, 128, dtype="bfloat16"), p.shape(128, 512, dtype="bfloat16"), p.shape(64, dtype="int32")
    )
    product, wide = (next(op.results[0] for op in c.program.ops if op.kind == k) for k in ("dot_general", "gather"))
    (gather,) = (op for op in c.program.ops if op.results[:1] == (wide,))
    logits = c.base[gather.operands[0]]
    assert c.stored[product] and c.stored[logits] and c.through[logits]
    (maximum,) = (op for op in c.program.ops if op.kind == "reduce_max")
    assert product in c.reads[maximum.id] and logits not in c.reads[maximum.id]
    assert logits in c.reads[gather.id]


def test_a_scatter_into_zeros_joins_the_sum_it_goes_to() -> None:
    def fn(w, x, indices, rows):
        return x.T @ w + jnp.zeros((128, 64)).at[indices].add(rows)

    c = clusters(fn, p.shape(256, 64), p.shape(256, 128), p.shape(16, dtype="int32"), p.shape(16, 64))
    (total,) = (op.id for op in c.program.ops if c.roles[op.id] is Role.UPDATE)
    assert c.program.ops[total].kind in ("add", "add_any")
    assert stored(c).count("scatter-add") == 0
    assert "dot_general" in stored(c)


def test_a_pad_at_the_edges_is_made_in_its_only_use() -> None:
    def once(x, y):
        return jnp.pad(x, ((0, 64), (0, 0))) + y

    def twice(x, w):
        padded = jnp.pad(x, ((0, 64), (0, 0)))
        return jnp.sin(padded), padded * w

    args = p.shape(64, 128), p.shape(128, 128)
    assert stored(clusters(once, *args)) == ["add"]
    assert stored(clusters(twice, *args))[0] == "pad"


def test_a_concatenation_is_not_made_again_in_each_use() -> None:
    def twice(x, y):
        both = jnp.concatenate([x, y]) * 2.0
        return jnp.sin(both).sum(), jnp.cos(both).sum()

    args = p.shape(64, 128), p.shape(64, 128)
    assert stored(clusters(twice, *args))[0] == "mul"
    assert "concatenate" not in stored(clusters(lambda x, y: jnp.sin(jnp.concatenate([x, y])).sum(), *args))


def test_a_product_without_a_sum_is_a_multiplication() -> None:
    """The gradients of each example in DP-SGD: an outer product, which is made where it is read."""

    def fn(x, y):
        outer = jnp.einsum("bi,bj->bij", x, y)
        norms = jnp.sum(outer**2, (1, 2))
        return jnp.sum(outer * norms[:, None, None], 0)

    c = clusters(fn, p.shape(64, 128), p.shape(64, 256))
    (product,) = (op for op in c.program.ops if op.kind == "dot_general")
    assert c.roles[product.id] is Role.ELEMENTWISE and "dot_general" not in stored(c)
    assert not any(kernel.products for kernel in kernels(c))


def test_a_pad_between_elements_is_a_kernel_but_on_gpus() -> None:
    def fn(x, y):
        return lax.pad(x, 0.0, ((0, 1, 1), (0, 0, 0))) + y

    args = p.shape(64, 128), p.shape(128, 128)
    assert stored(clusters(fn, *args)) == ["pad", "add"]
    assert stored(clusters(fn, *args, library=True)) == ["add"]


def test_products_of_a_library_read_and_write_whole_arrays() -> None:
    def fn(x, w, y):
        return jnp.tanh(x) @ w + y

    args = p.shape(64, 128), p.shape(128, 256), p.shape(64, 256)
    assert stored(clusters(fn, *args)) == ["add"]
    assert stored(clusters(fn, *args, library=True)) == ["tanh", "dot_general", "add"]


def test_on_gpus_gathers_make_what_they_read_and_scatters_are_kernels() -> None:
    def loss(x, w, labels):
        logits = (x @ w).astype(jnp.float32) * 0.5
        picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked)

    args = p.shape(64, 128, dtype="bfloat16"), p.shape(128, 512, dtype="bfloat16"), p.shape(64, dtype="int32")
    made = [clusters(loss, *args, library=library) for library in (False, True)]
    assert [wide_logits(c) for c in made] == [["mul"], []]
    made = [clusters(jax.grad(loss), *args, library=library) for library in (False, True)]
    assert [wide_logits(c) for c in made] == [[], ["add_any"]]
    assert [Role.UPDATE in c.roles for c in made] == [False, True]


def wide_logits(c: Clusters) -> list[str]:
    """What makes the stored arrays of float32[64,512]."""
    values = (v for v in c.program.values if (v.shape, v.dtype) == ((64, 512), "float32") and c.stored[v.id])
    return [c.program.ops[c.program.definitions[v.id][0]].kind for v in values if c.base[v.id] == v.id]


def order(c: Clusters) -> list[str]:
    return [c.program.ops[k].kind for k in kernel_order(c, 0, frozenset())]


def test_what_frees_memory_runs_as_soon_as_it_can() -> None:
    """Two arrays are sorted and then reduced; each is reduced before the other is made."""

    def fn(x, y):
        a, b = jnp.sort(x), jnp.sort(y)
        return jnp.sum(a), jnp.sum(b)

    assert order(clusters(fn, *[p.shape(128, 128)] * 2)) == ["sort", "reduce_sum", "sort", "reduce_sum"]


def test_what_is_made_of_arguments_waits_for_its_use() -> None:
    def fn(x, w, table):
        narrow = table.astype(jnp.bfloat16)
        return narrow[jnp.argmax(x @ w, axis=1)]

    kinds = order(clusters(fn, p.shape(64, 64), p.shape(64, 64), p.shape(512, 64)))
    assert kinds.index("argmax") < kinds.index("convert_element_type") < kinds.index("gather")
