"""Scores of compiled plans: what counts as a win, a loss and a refusal."""

from __future__ import annotations

import itertools
import math

from benchmarks.scoreboard import PICTURE, Score, compiled_s, page, picture, scores, summary


def test_gain_over_the_fastest_named_strategy() -> None:
    score = Score("a", "test", {"search": 2.0, "fsdp": 3.0, "dp": 4.0})
    assert score.baseline == "fsdp" and score.gain == 1.5


def test_refused_strategies_cannot_win() -> None:
    alone = Score("a", "test", {"search": 2.0, "dp": math.inf})
    lost = Score("b", "test", {"search": math.inf, "dp": 2.0})
    assert math.isinf(alone.gain) and lost.gain == 0 and lost.refused
    text = summary([alone, lost, Score("c", "test", {"search": 1.0, "dp": 1.02})])
    assert "in 2 (67%)" in text and "1 fit by the found plan alone" in text and "1 found plans are refused" in text


def test_recorded_programs_have_scores_of_both_sets() -> None:
    found = scores()
    assert {s.split for s in found} == {"test", "fit"}
    assert all(a.gain <= b.gain for a, b in itertools.pairwise(found))
    assert page(found).count("| gain |") == 2


def test_a_refused_record_takes_forever() -> None:
    assert math.isinf(compiled_s({"oom": {}, "mesh": {"data": 16}}))


def test_the_picture_is_that_of_the_records() -> None:
    some = [s for s in scores() if s.split == "test"]
    assert PICTURE.read_text() == picture(some), "python -m benchmarks.scoreboard draws it anew"
    shown = picture(
        [Score("a<b", "test", {"search": 1.0, "dp": 4.0}), Score("c", "test", {"search": math.inf, "dp": 1.0})]
    )
    assert "a&lt;b" in shown and ">4.00<" in shown and "refused for memory" in shown
