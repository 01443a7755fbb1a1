"""Rules of users: by text and by function, for primitives and for kernels, and what happens to those nobody knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir

import shardwise
from shardwise.errors import RuleError
from shardwise.ir.rule import Kind
from shardwise.rules import registry
from shardwise.rules.call import OpCall, RuleBuilder
from shardwise.rules.registry import find_rule

PRODUCT = OpCall("my_product", {}, ((8, 4), (4, 6)), ((8, 6),))


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Rules registered by a test, or by a doctest, are gone after it."""
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


@pytest.fixture
def product() -> Any:
    """A primitive with an abstract evaluation and nothing that could be looked into."""
    p = jex_core.Primitive("my_product")

    @p.def_abstract_eval
    def _(x: Any, y: Any) -> Any:
        return jax.core.ShapedArray((x.shape[0], y.shape[1]), x.dtype)

    mlir.register_lowering(p, mlir.lower_fun(lambda x, y: x @ y, multiple_results=False))
    return p


def _analyze(primitive: Any) -> shardwise.Analysis:
    x, y = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 6), "float32")
    return shardwise.analyze(lambda x, y: primitive.bind(jnp.sin(x), y), x, y)


def test_text_by_name() -> None:
    shardwise.register_rule("my_product", "(i,k),(k,j)->(i,j); sum k")
    assert str(find_rule(PRODUCT)[0]) == "(i,j),(j,k)->(i,k); sum j"


def test_function_by_primitive(product: Any) -> None:
    def rule(call: OpCall) -> Any:
        assert call.operands == ((8, 4), (4, 6))
        b = RuleBuilder(call)
        b.add([(0, 0), (call.out(), 0)])
        b.add([(1, 1), (call.out(), 1)])
        b.reduce([(0, 1), (1, 0)], "sum")
        return b.build()

    shardwise.register_rule(product, rule)
    assert str(find_rule(PRODUCT)[0]) == "(i,k),(k,j)->(i,j); sum k"


def test_function_may_return_text_or_pass() -> None:
    shardwise.register_rule(
        "my_product", lambda call: "(i,k),(k,j)->(i,j); blocked k" if len(call.results) == 1 else None
    )
    assert find_rule(PRODUCT)[0].factors[1].kind is Kind.BLOCKED
    pair = OpCall("my_product", {}, ((8,),), ((8,), (8,)))
    assert "no rule is known" in find_rule(pair)[1]


def test_kernel_name_comes_before_primitive() -> None:
    call = OpCall("pallas_call", {}, ((8, 4),), ((8, 4),))
    shardwise.register_rule("pallas_call:scale", "(i,j)->(i,j)")
    assert find_rule(call, "scale")[0].factors[0].kind is Kind.PARALLEL
    assert find_rule(call, "other")[1]
    shardwise.register_rule("pallas_call", "(i,j)->(i,j); blocked j")
    assert not find_rule(call, "other")[1]
    assert find_rule(call, "scale")[0].factors[1].kind is Kind.PARALLEL


def test_replacing_and_unregistering() -> None:
    sine = OpCall("sin", {}, ((8, 4),), ((8, 4),))
    shardwise.register_rule("sin", "(i,j)->(i,j); blocked i j")
    shardwise.register_rule("sin", "(i,j)->(i,j); blocked j")
    assert [f.kind for f in find_rule(sine)[0].factors] == [Kind.PARALLEL, Kind.BLOCKED]
    shardwise.unregister_rule("sin")
    assert [f.kind for f in find_rule(sine)[0].factors] == [Kind.PARALLEL, Kind.PARALLEL]
    shardwise.unregister_rule("sin")  # once more does nothing


@pytest.mark.parametrize(
    ("primitive", "rule", "message"),
    [
        (17, "(i)->(i)", "expected a primitive or its name, got 17"),
        ("", "(i)->(i)", "expected a primitive or its name"),
        ("p", "(i),(i)", "no single '->' between operands and results"),
        ("p", "(i)->(i)->(i)", "no single '->'"),
        ("p", 3, "a rule is a text or a function of an OpCall, got 3"),
    ],
)
def test_wrong_registrations(primitive: Any, rule: Any, message: str) -> None:
    with pytest.raises(RuleError, match=message.replace("(", r"\(")):
        shardwise.register_rule(primitive, rule)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("(i)->(i)", "is for 1 operands and 1 results; the operation has 2 and 1"),
        ("(i,k),(k)->(i,j)", "a tensor of 1 dimensions for one of shape [4, 6]"),
        ("(i,k),(k,j)->(i,j)", "factor j is parallel but is in operands only"),
        ("(i,k),(k,j)->(i,j); mean k", "'mean' is not a kind; use one of blocked, halo"),
        ("(i,k),(k,j)->(j,i); sum k", "operand 1 dimension 1 has size 6, its factors multiply to 8"),
        ("(i,k),(k,j)->(i,j); sum z", "z named after ';' but in no tensor"),
        ("(i,2x),(k,j)->(i,j)", "'2x' is not a factor name"),
        ("(a*b,k),(k,j)->(a*b,j); sum k", "add a clause such as '; sizes a=2'"),
    ],
)
def test_rules_that_do_not_fit_say_where(rule: str, message: str) -> None:
    shardwise.register_rule("my_product", rule)
    with pytest.raises(RuleError) as raised:
        find_rule(PRODUCT)
    assert message in str(raised.value)
    assert "the rule registered for 'my_product' does not fit operands [[8, 4], [4, 6]]" in str(raised.value)


def test_primitive_of_ones_own_end_to_end(product: Any) -> None:
    shardwise.register_rule(product, "(i,k),(k,j)->(i,j); sum k")
    analysis = _analyze(product)
    assert not analysis.opaque_ops
    assert sorted(c.size for c in analysis.colors) == [4, 6, 8]


def test_unknown_primitive_is_safe_and_reported(product: Any) -> None:
    analysis = _analyze(product)
    assert [op.kind for op in analysis.opaque_ops] == ["my_product"]
    rule, reason = find_rule(PRODUCT)
    assert {f.kind for f in rule.factors} == {Kind.BLOCKED}
    assert "register_rule can add one" in reason


def _partitioned(fn: Any, rule: str, **more: Any) -> Any:
    partitioned = custom_partitioning(fn)
    partitioned.def_partition(partition=lambda *args: None, sharding_rule=rule, **more)
    return partitioned


def _rule_of(fn: Any, *shapes: tuple[int, ...]) -> Any:
    arguments = [jax.ShapeDtypeStruct(s, "float32") for s in shapes]
    program = shardwise.analyze(fn, *arguments).program
    (op,) = [op for op in program.ops if op.kind == "custom_partitioning"]
    return op


def test_custom_partitioning_states_its_rule() -> None:
    fn = _partitioned(lambda x, y: x @ y, "i j, j k -> i k", reduction_factors=("j",))
    op = _rule_of(fn, (8, 4), (4, 6))
    assert str(op.rule) == "(i,j),(j,k)->(i,k); sum j"
    assert not op.opaque


def test_custom_partitioning_with_compound_and_batch_factors() -> None:
    fn = _partitioned(lambda x: x.reshape(*x.shape[:-1], 2, 3), "... (i j) -> ... i j", need_replication_factors=("j",))
    assert str(_rule_of(fn, (4, 6)).rule) == "(i,j*k)->(i,j,k); blocked k"
    fn = _partitioned(lambda x: x.reshape(2, 3, 6), "(i j) (k l) -> i j (k l)", k=2, l=3)
    assert str(_rule_of(fn, (6, 6)).rule) == "(i*j,k*l)->(i,j,k*l); sizes k=2"


def test_custom_partitioning_factor_of_operands_only_is_blocked() -> None:
    fn = _partitioned(lambda x: x[:, 0], "i j -> i")
    assert str(_rule_of(fn, (8, 4)).rule) == "(i,j)->(i); blocked j"


def test_custom_partitioning_without_a_readable_rule_is_reported() -> None:
    fn = _partitioned(lambda x: x, lambda *args: "i j -> i j")  # type: ignore[arg-type]
    assert _rule_of(fn, (8, 4)).opaque
    fn = _partitioned(lambda x: x, "i j k -> i j k")
    assert "the rule it states does not fit" in _rule_of(fn, (8, 4)).opaque
