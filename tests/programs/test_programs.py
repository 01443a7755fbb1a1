"""Programs nobody here wrote are captured and analysed, and the analysis says what it should."""

import json
import warnings

import jax
import jax.numpy as jnp
import pytest

import shardwise
from tests.ir.verify import check_program

from .program import Fact, Program, apart, conflicts, deciding_groups, exactly, loop, no_conflict, one_color, shape
from .table import PAGE, PROGRAMS, page


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_program(program: Program) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other packages' own, while they are imported and traced
        warnings.filterwarnings("error", module="shardwise")
        function, arguments = program.build()
        analysis = shardwise.analyze(function, *arguments)
    check_program(analysis.program)
    assert len(analysis.program.arguments) > 0
    unexpected = {op.kind: op.opaque for op in analysis.opaque_ops if op.kind not in program.opaque}
    assert not unexpected

    problems = []
    for fact in program.facts:
        try:
            fact.check(analysis)
        except AssertionError as error:
            problems.append(f"{fact.text}\n    {error}")
    assert not problems, "\n".join(problems)

    data = json.loads(json.dumps(analysis.to_json()))
    assert data["counts"]["colors"] == len(analysis.colors) == len(data["colors"])
    text = str(analysis)
    assert text.startswith(f"{analysis.program.name}: ")
    assert all(op.kind in text for op in analysis.opaque_ops)


def test_list_is_long_and_written_down() -> None:
    assert len(PROGRAMS) >= 16
    assert len({p.name for p in PROGRAMS}) == len(PROGRAMS)
    assert len({p.package for p in PROGRAMS}) >= 10
    assert all(p.facts for p in PROGRAMS)
    assert PAGE.read_text() == page(), "run python -m tests.programs.table"


@pytest.mark.parametrize(
    "fact",
    [
        one_color("x[0]", "x[1]"),
        apart("x[1]", "w[0]"),
        exactly("x[1]"),
        exactly("x[0]", "w[1]"),
        exactly("s[0]"),
        loop("x[0]"),
        deciding_groups(2),
        conflicts(1, 1, "x[0]"),
        one_color("y*[0]"),
    ],
    ids=lambda fact: fact.text,
)
def test_fact_can_fail(fact: Fact) -> None:
    def function(x: jax.Array, w: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x @ w, jnp.cumsum(s)

    analysis = shardwise.analyze(function, shape(8, 4), shape(4, 6), shape(5))
    with pytest.raises(AssertionError):
        fact.check(analysis)


@pytest.mark.parametrize(
    "fact", [no_conflict(), conflicts(2, 2, "w[0]"), conflicts(1, 1, "x[0]")], ids=lambda f: f.text
)
def test_fact_about_conflicts_can_fail(fact: Fact) -> None:
    analysis = shardwise.analyze(lambda x, w: (x @ w) @ w, shape(8, 4), shape(4, 4))
    conflicts(1, 1, "w[0]").check(analysis)
    with pytest.raises(AssertionError):
        fact.check(analysis)
