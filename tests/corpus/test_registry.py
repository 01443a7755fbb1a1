"""The corpus can be listed without its packages; its halves are even, and its page is that of its results."""

from __future__ import annotations

from collections import Counter

import pytest

from corpus import page, registry
from corpus.registry import KINDS, Case, program, programs


def test_list_is_long_and_even() -> None:
    every = programs()
    assert len(every) >= 40
    assert len({p.package for p in every}) >= 18
    counts = Counter((p.kind, p.split) for p in every)
    for kind in KINDS:  # programs that were added after the split are in the fit set
        assert -1 <= counts[kind, "fit"] - counts[kind, "test"] <= 2
    packages = Counter(p.package for p in every)
    for package in (name for name, count in packages.items() if count >= 4):
        assert {p.split for p in every if p.package == package} == {"fit", "test"}
    assert all(p.what and p.small and p.full for p in every)


def test_page_is_that_of_the_results() -> None:
    assert page.PAGE.read_text() == page.page(), "run python -m corpus page"
    names = {p.name for p in programs()}
    assert set(page.load()) <= names, "results of programs that are not in the corpus"


@pytest.mark.parametrize(
    ("kind", "split", "problem"),
    [("train", "both", "split"), ("play", "fit", "kind"), ("train", "fit", "two programs")],
)
def test_wrong_registrations_are_refused(kind: str, split: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_PROGRAMS", {"taken": None} if problem == "two programs" else {})

    def taken() -> Case:
        """A program."""
        raise NotImplementedError

    with pytest.raises(ValueError, match=problem):
        program("package", kind, split, {}, {})(taken)


def test_failures_have_reasons() -> None:
    good = {"agrees": True, "unexplained": []}
    bad = {"agrees": False, "unexplained": ["out: 0.5, tolerance 0.0001, sensitivity 1e-05"]}
    assert page.failure({"time": good, "memory": good}) is None
    assert page.failure({"error": "RuleError: no"}) == "RuleError: no"
    assert "other numbers: out: 0.5" in str(page.failure({"time": good, "memory": bad}))
    assert "said to fit" in str(page.failure({"fits": True, "refused": "RESOURCE_EXHAUSTED", "predicted_peak": 1e9}))
    assert page.failure({"fits": False, "refused": "RESOURCE_EXHAUSTED", "predicted_peak": 1e9}) is None
