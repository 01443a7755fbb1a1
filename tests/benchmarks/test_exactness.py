"""The page of exactness, from made-up records."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.exactness import page, rows, shares


def record(
    name: str, predicted: float, compiled: float, peak: float, allocated: int = 100, **more: Any
) -> dict[str, Any]:
    return {
        "case": name,
        "predicted_bytes": [["all-gather", ["data"], predicted]],
        "compiled_bytes": [["all-gather", ["data"], compiled]],
        "memory": {"allocated": allocated},
        "predicted_peak": peak,
    } | more


def test_shares_are_by_kind_and_axes() -> None:
    one = record("x", 100.0, 50.0, 1)
    assert shares(one) == (0.5, ("all-gather over data 0 MB predicted, 0 MB compiled",))
    other = one | {"compiled_bytes": [["all-reduce", ["data"], 100.0]]}
    assert shares(other)[0] == 0.0
    assert shares(one | {"predicted_bytes": [], "compiled_bytes": []}) == (1.0, ())
    swapped = one | {
        "predicted_bytes": [["all-gather", ["a", "b"], 1.0]],
        "compiled_bytes": [["all-gather", ["b", "a"], 1.0]],
    }
    assert shares(swapped)[0] == 1.0, "the order of axes does not count"


def test_refused_programs_are_compared_with_what_they_need() -> None:
    (row,) = rows([record("x", 1.0, 1.0, 50, oom={"needed": 200})])
    assert row.refused and row.ratio == pytest.approx(0.25)


def test_the_page_names_what_is_off() -> None:
    fine, wide, low = record("a v5e:4x4", 1, 1, 99), record("b v5e:4x4", 1, 3, 99), record("c v5e:4x4", 1, 1, 80)
    text = page([fine, wide, low, {"case": "d v5e:4x4", "error": "gave up"}, record("optax: e", 1, 1, 1, 1)])
    assert "99% of bytes as predicted: 2 of 3" in text and "more than 10% low: 1" in text
    assert "| b v5e:4x4 | 33.3% |" in text and "| c v5e:4x4 | 0.000 | 0.000 | 0.80 |" in text
    assert "d v5e:4x4 (gave up)" in text and "## Programs of other packages" in text
