"""``shardwise.kernel``: functions of users that are one op, and are called on local blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwise
from shardwise.errors import RuleError
from shardwise.ir.program import Unit
from shardwise.tactics.strategies import Shard
from tests.spmd.test_kernels import BOTH, check, grad, kernels, normal, product, struct


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


ATTEND = shardwise.kernel(attend, "(b,s,h,k),(b,t,h,k),(b,t,h,v)->(b,s,h,v); blocked s; blocked t")
MULTIPLY = shardwise.kernel(lambda x, y: product(x, y), "(i,k),(k,j)->(i,j); blocked k")
ADD_UP = shardwise.kernel(lambda x, y: x @ y, "(i,k),(k,j)->(i,j); sum k")


def test_a_wrapped_function_is_one_op() -> None:
    (op,) = kernels(ATTEND, *[struct(4, 8, 4, 16)] * 3, kind="shardwise_kernel")
    assert str(op.rule) == "(i,j,k,l),(i,m,k,l),(i,m,k,n)->(i,j,k,n); blocked j l m"
    assert (op.flops, op.unit) == (4 * 4 * 4 * 8 * 8 * 16, Unit.KERNEL)
    (op,) = kernels(MULTIPLY, struct(64, 16), struct(16, 32), kind="shardwise_kernel")
    assert op.flops == 2 * 64 * 16 * 32


def test_a_wrapped_function_is_called_on_local_blocks() -> None:
    args = [normal(4, 8, 4, 16, seed=k) for k in range(3)]
    split = Shard("q", 0, "data"), Shard("q", 2, "model")

    def around(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return ATTEND(2 * q, k, v) + 1

    assert not check(around, args, BOTH, *split).moved()
    assert not check(grad(ATTEND), args, BOTH, *split).moved()
    for a, b in zip(grad(ATTEND)(*args), grad(attend)(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_wrapped_kernel_has_other_blocks_on_other_shapes() -> None:
    """Here no grid is divided: each device makes the grid of its shapes, even where whole blocks would not do."""
    assert not check(MULTIPLY, (normal(64, 16), normal(16, 32)), BOTH, Shard("x", 0, "data")).moved()


def test_wrapped_functions_under_vmap_scan_and_remat() -> None:
    args = [normal(2, 4, 8, 4, 16, seed=k) for k in range(3)]
    split = Shard("q", 1, "data"), Shard("q", 0, "model")
    assert not check(grad(jax.vmap(ATTEND)), args, BOTH, *split).moved()

    def shared(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.vmap(ATTEND, in_axes=(1, None, None), out_axes=2)(q, k, v)

    q, k, v = normal(4, 2, 8, 4, 16), args[1][0], args[2][0]
    want = jnp.stack([attend(q[:, n], k, v) for n in range(2)], 2)
    np.testing.assert_allclose(shared(q, k, v), want, rtol=1e-5, atol=1e-5)

    def repeated(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        again = jax.checkpoint(lambda x: ATTEND(x, k, v))
        return jax.lax.scan(lambda x, _: (again(x), None), q, None, length=3)[0]

    flat = [x[0] for x in args]
    assert not check(grad(repeated), flat, BOTH, Shard("q", 0, "data"), Shard("q", 2, "model")).moved()


def test_sums_of_wrapped_functions_are_reduced() -> None:
    args = normal(8, 16), normal(16, 8)
    plan = check(ADD_UP, args, {"data": 4}, Shard("x", 1, "data"))
    assert [kind for kind, _ in plan.moved()] == ["all-reduce"]

    def both(x: jax.Array, y: jax.Array) -> Any:
        return jax.grad(lambda x, y: (ADD_UP(x, y) ** 2).sum(), (0, 1))(x, y)

    # The sum over k of the result is no sum in the gradients.
    assert [kind for kind, _ in check(both, args, {"data": 4}, Shard("x", 1, "data")).moved()] == ["all-reduce"]


def test_integers_have_no_gradient() -> None:
    def look(table: jax.Array, rows: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        return table[rows] * scale[:, None], rows + 1

    wrapped = shardwise.kernel(look, "(v,d),(b),(b)->(b,d),(b)")

    def gradients(table: jax.Array, rows: jax.Array, scale: jax.Array) -> Any:
        loss = lambda table, scale: (wrapped(table, rows, scale)[0] ** 2).sum()  # noqa: E731
        return jax.grad(loss, (0, 1))(table, scale)

    args = normal(5, 16), jnp.arange(8, dtype=jnp.int32) % 5, normal(8)
    assert not check(wrapped, args, BOTH, Shard("rows", 0, "data"), Shard("table", 1, "model")).moved()
    check(gradients, args, BOTH, Shard("rows", 0, "data"), Shard("table", 1, "model"))
    want = jax.grad(lambda t, s: (look(t, args[1], s)[0] ** 2).sum(), (0, 1))(args[0], args[2])
    for a, b in zip(gradients(*args), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_gradients_of_gradients() -> None:
    def third(multiply: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jax.grad(lambda x: (multiply(x, x) ** 3).sum())(x).sum())(x)

    x = normal(4, 4)
    np.testing.assert_allclose(third(ADD_UP, x), third(jnp.matmul, x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("(b),(b)", "of attend: rule .* expected exactly one '->'"),
        ("(i)->(i); halo i", "of attend: .*i cannot be halo or indexed"),
        ("(i)->(i); mean i", "of attend: .*'mean' is not a kind"),
        (3, "of attend: a rule is a text"),
    ],
)
def test_wrong_rules_are_found_when_wrapping(rule: Any, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        shardwise.kernel(attend, rule)


def test_rules_that_do_not_fit_are_found_when_called() -> None:
    x = jnp.ones((2, 8, 4, 16))
    with pytest.raises(RuleError, match=r"of attend: its rule does not fit operands \[\[2, 8, 4, 16\].*for 2 operands"):
        shardwise.kernel(attend, "(b,s,h,k),(b,t,h,k)->(b,s,h,k)")(x, x, x)
    with pytest.raises(RuleError, match="of attend: its arguments are arrays"):
        ATTEND([x], x, x)


def test_a_function_that_does_not_follow_its_rule_is_found_when_planned() -> None:
    fixed = shardwise.kernel(lambda x: jnp.ones((8, 8)) + 0 * x.sum(), "(i,j)->(i,j)")
    plan = shardwise.plan(fixed, normal(8, 8), mesh={"data": 4}, tactics=[Shard("x", 0, "data")])
    with pytest.raises(
        RuleError, match=r"on blocks \[\[2, 8\]\] it returns \[\[8, 8\]\], by its rule \(i,j\)->\(i,j\)"
    ):
        plan.jit(fixed)(normal(8, 8))
