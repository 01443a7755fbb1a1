"""Facts about a program are computed once for a plan, whatever the number of meshes, searches and questions, and are freed with
it."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest

import shardwise
from shardwise.cost.model import CostModel
from shardwise.evaluator.evaluator import Evaluator
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.structure import Structure
from shardwise.tactics.baselines import Combinations
from shardwise.transforms import variants
from tests.planner.test_plan_search import shapes, small_memory, step


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what is built while a test runs."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str, label: str) -> None:
        build = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[label] += 1
            return build(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(Structure, "__init__", "structures")
    count(CostModel, "__init__", "models")
    count(variants, "trace", "traces")
    return counts


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"x": 4}},
        {"mesh": {"x": 2, "y": 2}, "tactics": "dp:x,auto:y"},
        {"mesh": {"x": 4}, "tactics": "fsdp"},
        {},
        {"mesh": {"x": None, "y": None}, "tactics": "dp:x,megatron:y"},
    ],
    ids=str,
)
def test_one_structure_and_one_cost_model(built: Counter[str], options: dict[str, Any]) -> None:
    plan = shardwise.plan(step, *shapes(), topology="v5e:2x2", budget_evals=20, **options)
    assert built == {"structures": 1, "models": 1, "traces": 1}
    assert plan.baselines and plan.effects and plan.what_if(without=1)
    assert built == {"structures": 1, "models": 1, "traces": 1}
    plan.what_if(topology="h100:4")
    assert built["structures"] == 1 and built["models"] == 2, "other devices have other kernels"


def test_one_for_each_variant(built: Counter[str]) -> None:
    tight = small_memory("v5e:2x2", 150 * 2**20)
    plan = shardwise.plan(step, *shapes(), topology=tight, microbatches="auto", budget_evals=80)
    assert plan.predicted.fits and plan.search is not None
    count = len(plan.search.variants)
    assert count > 1 and built == {"structures": count, "models": count, "traces": 1}


def test_a_plan_is_freed_with_its_last_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: not when the garbage collector comes, which takes a fifth of the time of a short search to free it."""
    made: list[weakref.ref[Any]] = []
    for owner in (Structure, CostModel, Lowered, Evaluator, Combinations):

        def build(self: Any, *args: Any, init: Any = owner.__init__, **kwargs: Any) -> None:
            made.append(weakref.ref(self))
            init(self, *args, **kwargs)

        monkeypatch.setattr(owner, "__init__", build)

    def alive() -> set[str]:
        return {type(ref()).__name__ for ref in made if ref() is not None}

    enabled = gc.isenabled()
    gc.disable()
    try:
        plan = shardwise.plan(step, *shapes(), topology="v5e:2x2", mesh={"x": 2, "y": 2}, budget_evals=20)
        assert plan.baselines and plan.effects
        assert alive() >= {"Structure", "CostModel", "Evaluator", "Combinations"}
        del plan
        assert not alive()
    finally:
        if enabled:
            gc.enable()
