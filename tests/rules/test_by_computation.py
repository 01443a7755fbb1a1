"""Every rule is right by computation: cut along a factor, run the parts, combine as the factor's kind says, compare.

``pytest -m slow`` draws ten times as many examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shardwise.ir.rule import Kind
from shardwise.rules.registry import RULES
from tests.rules import jax_tools
from tests.rules.blocked import BLOCKED, WHY
from tests.rules.cases import Case
from tests.rules.generators import CASES, NO_CASE
from tests.rules.harness import check_case
from tests.rules.others import CASES as OTHERS
from tests.rules.pointwise import CASES as POINTWISE
from tests.rules.together import compiled_together

#: Examples per generator where the usual number is too few or too slow.
_EXAMPLES = {
    **dict.fromkeys(POINTWISE, 2),
    **dict.fromkeys(OTHERS, 4),
    "conv_general_dilated": 24,
    "dot_general": 16,
    "gather": 16,
    "igamma": 1,
    "igamma_grad_a": 1,
    "igammac": 1,
    "random_bits": 2,
    "random_gamma": 2,
    "regularized_incomplete_beta": 1,
    "reshape": 20,
    "scatter": 12,
    "scatter-add": 12,
}
_USUAL = 6


@pytest.fixture(autouse=True, scope="module")
def quick_compiler() -> Iterator[None]:
    """Thousands of small programs are compiled and each runs once."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def _check(case: Case) -> None:
    for factor in case.rule.factors:
        if factor.kind is Kind.BLOCKED:
            assert factor.reason in BLOCKED.get(case.name, ()), f"{case} blocks a factor because {factor.reason!r}"
    check_case(case)


def _draw(label: str, examples: int, check: Callable[[Case], None]) -> None:
    """Explains nothing and replays nothing: the failing case is printed, and drawing is derandomized."""

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def run(r: Random) -> None:
        check(CASES[label](r))

    run()


def _check_all(label: str, examples: int) -> None:
    """All drawn cases, compiled together; one by one where one of them fails, to find the smallest that does."""
    cases: list[Case] = []
    _draw(label, examples, cases.append)
    try:
        for case in compiled_together(cases):
            _check(case)
    except Exception:
        _draw(label, examples, _check)
        raise


@pytest.mark.parametrize("label", CASES)
def test_rule_is_right_by_computation(label: str) -> None:
    _check_all(label, _EXAMPLES.get(label, _USUAL))


@pytest.mark.slow  # ten times as many examples as the test above
@pytest.mark.parametrize("label", CASES)
def test_rule_is_right_by_computation_more_examples(label: str) -> None:
    _check_all(label, 10 * _EXAMPLES.get(label, _USUAL))


def test_every_rule_has_a_case() -> None:
    covered = {label.split("/")[0] for label in CASES}
    known = set(RULES) & jax_tools.all_primitives()
    missing = known - covered - set(NO_CASE)
    assert not missing, f"no case in tests/rules for {sorted(missing)}"
    assert not covered & set(NO_CASE), "listed as having no case, but has one"


def test_every_blocked_reason_is_explained() -> None:
    given_reasons = {reason for reasons in BLOCKED.values() for reason in reasons}
    assert given_reasons == set(WHY)
