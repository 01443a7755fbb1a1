"""The reader of HLO text: lines, loops, executions, sources."""

from __future__ import annotations

import pytest

from shardwise.errors import HloError
from shardwise.verification import hlo
from shardwise.verification.hlo import Array, arrays
from tests.verification import snippets


def test_shapes() -> None:
    shape = "(bf16[8,512]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/s4[3]{0}, pred[]{:T(512)}, f32[<=8,2]{1,0}, token[])"
    found = arrays(shape)
    assert found[:3] == (Array("bf16", (8, 512)), Array("s4", (3,)), Array("pred", ()))
    assert [a.nbytes for a in found] == [8192, 2, 1, 64, 0]


def test_instruction_with_tuple_shape_and_comments() -> None:
    module = hlo.read(snippets.COMBINED)
    reduce = module.computations["main"].root
    assert reduce.opcode == "all-reduce"
    assert reduce.operands == ("p", "q")
    assert [str(a) for a in reduce.arrays] == ["f32[8]", "bf16[4,4]"]


def test_nested_loops_multiply() -> None:
    module = hlo.read(snippets.LOOPS)
    assert {loop.name: trips for loop, trips in module.trips.items()} == {"while.inner": 4, "while.outer": 3}
    assert module.runs["inner_body"] == 12
    assert module.runs["inner_condition"] == 15
    assert module.runs["advance"] == 12


def test_unknown_trips_count_once() -> None:
    text = snippets.LOOPS.replace('"known_trip_count":{"n":"3"}', "")
    module = hlo.read(text)
    assert {loop.name: trips for loop, trips in module.trips.items()} == {"while.inner": 4, "while.outer": None}
    assert module.runs["inner_body"] == 4


@pytest.mark.parametrize(
    ("old", "new", "trips"),
    [
        ("direction=LT", "direction=LE", 5),
        ("direction=LT", "direction=NE", 4),
        ("direction=LT", "direction=GT", None),
        ("constant(9)", "constant(8)", 4),
        ("constant(9)", "constant(1)", 0),
        ("constant(2)", "constant(-2)", None),
        ("%nine = s32[] constant(9)", "%nine = s32[] custom-call(%o)", None),
        ("%copied = s32[] copy(%start)", "%copied = s32[] custom-call(%o)", None),
        ("fusion(%k.1, %limit.1)", "fusion(%limit.1, %k.1)", None),
    ],
)
def test_trips_of_the_inner_loop(old: str, new: str, trips: int | None) -> None:
    assert old in snippets.LOOPS
    module = hlo.read(snippets.LOOPS.replace(old, new))
    assert next(t for loop, t in module.trips.items() if loop.name == "while.inner") == trips


def test_comparison_the_other_way_round() -> None:
    text = snippets.LOOPS.replace("fusion(%k.1, %limit.1)", "fusion(%limit.1, %k.1)")
    module = hlo.read(text.replace("direction=LT", "direction=GT"))
    assert next(t for loop, t in module.trips.items() if loop.name == "while.inner") == 4


def test_cycles_are_summed_over_runs() -> None:
    assert hlo.read(snippets.PIECES).estimated_cycles == 4 * 100 + 7
    assert hlo.read(snippets.LOOPS).estimated_cycles == 0


def test_branches() -> None:
    module = hlo.read(snippets.CONDITIONAL)
    assert module.runs["yes"] == module.runs["no"] == 1


@pytest.mark.parametrize(("line", "longer"), [("ROOT %n = f32[8]{0} parameter(0)", "no"), ("to_apply=%add\n}", "yes")])
def test_the_branch_with_the_most_cycles_runs(line: str, longer: str) -> None:
    estimate = ', backend_config={"estimated_cycles":"5"}'
    text = snippets.CONDITIONAL.replace(line, line.removesuffix("\n}") + estimate + "\n}" * line.endswith("}"), 1)
    module = hlo.read(text)
    assert {name: module.runs[name] for name in ("yes", "no")} == {"yes": 0, "no": 0} | {longer: 1}
    assert module.estimated_cycles == 5


@pytest.mark.parametrize("text", ["", "HloModule empty", "module @jit_step {\n}"])
def test_text_without_entry(text: str) -> None:
    with pytest.raises(HloError, match="no ENTRY computation"):
        hlo.read(text)


def test_line_that_cannot_be_read() -> None:
    with pytest.raises(HloError, match="%main cannot be read: %p is not a line"):
        hlo.read("ENTRY %main (p: f32[]) -> f32[] {\n  %p is not a line\n}")
