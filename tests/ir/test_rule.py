"""The type checker of rules, and what is derived from a rule."""

from __future__ import annotations

import pytest

from shardwise.errors import RuleError
from shardwise.ir.notation import parse_rule
from shardwise.ir.rule import TRIP, Factor, Kind, Rule, Window, check_rule, letter

P = Factor(4, Kind.PARALLEL)


def _wrong(rule: Rule, operands: list[tuple[int, ...]], results: list[tuple[int, ...]]) -> str:
    with pytest.raises(RuleError) as raised:
        check_rule(rule, operands, results)
    return str(raised.value)


def test_a_good_rule_passes() -> None:
    check_rule(Rule((P,), (((0,),),), (((0,),),)), [(4,)], [(4,)])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule((P,), (((0,),), ()), (((0,),),)), "is for 2 operands and 1 results; the operation has 1 and 1"),
        (Rule((P,), (((0,), ()),), (((0,),),)), "operand 0 has 1 dimensions [4], the rule gives it 2"),
        (Rule((Factor(2, Kind.PARALLEL),), (((0, 0),),), (((0,),),)), "operand 0 has one factor in two places"),
        (Rule((Factor(3, Kind.PARALLEL),), (((0,),),), (((0,),),)), "has size 4, its factors multiply to 3"),
        (Rule((), ((()),), ((()),)), "the rule gives it 0"),
        (Rule((), (((),),), (((),),)), "operand 0 dimension 0 has size 4 but no factor"),
        (Rule((P, P), (((0,),),), (((0,),),)), "factor j is in no tensor"),
        (Rule((Factor(4, Kind.FREE),), (((0,),),), (((0,),),)), "factor i is free but is in operands and results"),
        (Rule((Factor(4, Kind.BLOCKED), P), (((0,),),), (((1,),),)), "factor j is parallel but is in results only"),
        (Rule((Factor(4, Kind.INDEXED), P), (((1,),),), (((0,),),)), "factor i is indexed but is in no operand"),
    ],
)
def test_a_wrong_rule_says_what_is_wrong(rule: Rule, message: str) -> None:
    assert message in _wrong(rule, [(4,)], [(4,)])


def test_reductions_need_a_reducer() -> None:
    rule = Rule((Factor(4, Kind.REDUCTION, "mean"),), (((0,),),), ((),))
    assert "needs a reducer, one of sum, prod" in _wrong(rule, [(4,)], [()])
    looked_into = Rule((Factor(4, Kind.INDEXED),), (((0,),),), ((),))
    assert "needs a reducer" in _wrong(looked_into, [(4,)], [()])


def test_halos_are_not_merged() -> None:
    rule = Rule((Factor(2, Kind.HALO), Factor(2, Kind.PARALLEL)), (((0, 1),),), (((0, 1),),))
    assert "a halo factor cannot be merged" in _wrong(rule, [(4,)], [(4,)])


def test_all_problems_are_named_at_once() -> None:
    rule = Rule((Factor(3, Kind.PARALLEL), Factor(2, Kind.FREE)), (((0,),),), (((0,),),))
    message = _wrong(rule, [(4,)], [(5,)])
    assert "size 4" in message and "size 5" in message and "factor j is in no tensor" in message


def test_minor_and_blocked_factors_are_not_splittable() -> None:
    rule = parse_rule("(i*j,k)->(i,j,k); blocked k", [(6, 4)], [(2, 3, 4)])
    assert rule.splittable == (True, False, False)
    assert rule.operand_majors == ((0, 2),)
    assert rule.result_majors == ((0, 1, 2),)


def test_rivals_are_what_one_axis_cannot_shard_at_once() -> None:
    product = parse_rule("(i,k),(k,j)->(i,j); sum k", [(8, 4), (4, 6)], [(8, 6)])
    assert product.rivals == ((0, 1), (0, 2), (1, 2))
    stacked = parse_rule("(i,j)->(i,j); blocked i", [(2, 3)], [(2, 3)])
    assert stacked.rivals == ((0, 1),)


def test_rules_are_equal_by_content() -> None:
    make = lambda: Rule((P,), (((0,),),), (((0,),),), (Window(0, 0, 1),))  # noqa: E731
    assert make() == make() and hash(make()) == hash(make())
    assert make() != Rule((P,), (((0,),),), (((0,),),))


def test_trip_is_found_by_its_reason() -> None:
    assert Rule((P, Factor(4, Kind.BLOCKED, reason=TRIP)), (((0,), (1,)),), (((0,),),)).trip == 1
    assert Rule((P,), (((0,),),), (((0,),),)).trip == -1


def test_letters_do_not_run_out() -> None:
    assert [letter(i) for i in (0, 17, 18, 25, 26, 52)] == ["i", "z", "a", "h", "i1", "i2"]
    assert len({letter(i) for i in range(200)}) == 200
