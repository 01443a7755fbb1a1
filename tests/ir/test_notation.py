"""The text form of rules: what is written can be read back, and what cannot be read says why."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import RuleError
from shardwise.ir.notation import format_rule, parse_rule
from shardwise.ir.rule import REDUCERS, Factor, Kind, Rule, check_rule


@st.composite
def rules(draw: st.DrawFn) -> tuple[Rule, list[tuple[int, ...]], list[tuple[int, ...]]]:
    """A well-formed rule: factors of every kind, merged at random into dimensions of one or two tensors a side."""
    factors: list[Factor] = []
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from([Kind.PARALLEL, Kind.REDUCTION, Kind.FREE, Kind.BLOCKED, Kind.INDEXED]))
        reducer = draw(st.sampled_from(REDUCERS)) if kind is Kind.REDUCTION else "sum" if kind is Kind.INDEXED else ""
        reason = "stated by its rule" if kind is Kind.BLOCKED else ""
        factors.append(Factor(draw(st.integers(2, 5)), kind, reducer, reason))
    needs_operand = {Kind.PARALLEL, Kind.REDUCTION, Kind.BLOCKED, Kind.INDEXED}
    needs_result = {Kind.PARALLEL, Kind.FREE}

    def tensor(members: list[int]) -> tuple[tuple[int, ...], ...]:
        dims: list[tuple[int, ...]] = []
        for f in draw(st.permutations(members)):
            if dims and draw(st.integers(0, 3)) == 0:
                dims[-1] = (*dims[-1], f)
            else:
                dims.append((f,))
            if draw(st.integers(0, 5)) == 0:
                dims.append(())
        return tuple(dims)

    numbers = range(len(factors))
    operand = tensor([f for f in numbers if factors[f].kind in needs_operand])
    second = tensor([f for f in numbers if factors[f].kind is Kind.PARALLEL and draw(st.booleans())])
    result = tensor([f for f in numbers if factors[f].kind in needs_result])
    # Numbered as they are met, which is how reading numbers them.
    order = {f: k for k, f in enumerate(dict.fromkeys(f for t in (operand, second, result) for d in t for f in d))}
    tensors = [tuple(tuple(order[f] for f in dim) for dim in t) for t in (operand, second, result)]
    ordered = tuple(factors[f] for f in order)
    rule = Rule(ordered, tuple(tensors[:2]), tuple(tensors[2:]))

    def shape(t: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
        sizes = []
        for dim in t:
            size = 1
            for f in dim:
                size *= ordered[f].size
            sizes.append(size)
        return tuple(sizes)

    return rule, [shape(t) for t in tensors[:2]], [shape(t) for t in tensors[2:]]


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(rules())
def test_what_is_written_is_read_back(drawn: tuple[Rule, list[tuple[int, ...]], list[tuple[int, ...]]]) -> None:
    rule, operands, results = drawn
    check_rule(rule, operands, results)
    assert parse_rule(format_rule(rule), operands, results) == rule


def test_ellipsis_counts_from_the_right() -> None:
    rule = parse_rule("(...,n),(...,n)->(...); sum n", [(5, 2, 3), (2, 3)], [(5, 2)])
    assert str(rule) == "(i,j,k),(j,k)->(i,j); sum k"


def test_size_one_has_no_factor() -> None:
    assert str(parse_rule("(i,j),(i,j)->(i,j)", [(4, 3), (4, 1)], [(4, 3)])) == "(i,j),(i,1)->(i,j)"


def test_halo_sizes_may_differ() -> None:
    rule = parse_rule("(i)->(i); halo i", [(8,)], [(5,)])
    assert rule.factors[0] == Factor(8, Kind.HALO)


def test_sizes_are_divided_out_or_stated() -> None:
    assert parse_rule("(i*j)->(i,j)", [(6,)], [(2, 3)]).factors[1].size == 3
    assert [f.size for f in parse_rule("(i*j)->(i*j); sizes i=2", [(6,)], [(6,)]).factors] == [2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(i)", "expected exactly one '->'"),
        ("i->i", "is not a list of tensors such as (i,k),(k,j)"),
        ("(i)->(i); blocked j", "j named after ';' but in no tensor"),
        ("(i)->(i); often i", "'often' is not a kind"),
        ("(i,j)->(i)", "a tensor of 2 dimensions for one of shape [6]"),
        ("(i*j)->(i*j)", "are not known; add a clause such as '; sizes i=2'"),
        ("(i*j)->(i*j); sizes i", "'i' is not a size such as i=2"),
        ("(i*j)->(i*j); sizes i=4", "are not known"),
        ("(...,...)->(i)", "does not fit a tensor of shape [6]"),
        ("(-)->(i)", "'-' is not a factor name"),
    ],
)
def test_what_cannot_be_read_says_why(text: str, message: str) -> None:
    with pytest.raises(RuleError) as raised:
        parse_rule(text, [(6,)], [(6,)])
    assert message in str(raised.value)
