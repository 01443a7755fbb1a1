"""Finalists, the cache, lost compiles, and the choice among verdicts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

import shardwise
from shardwise.cost.memory import BLOCK
from shardwise.cost.model import Cost
from shardwise.errors import InfeasibleError
from shardwise.plans.evidence import Correction, Judged
from shardwise.tuning import compiling, finalists, judges
from shardwise.tuning import tune as tuning

SHAPES = [jax.ShapeDtypeStruct(s, "float32") for s in [(256, 256), (4096, 256)]]


def step(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).sum())(w)


class Scripted:
    """A judge with prepared verdicts, by the number of the finalist."""

    name = "a script"

    def __init__(self, *verdicts: Judged):
        self.verdicts = verdicts
        self.seen: list[judges.Finalist] = []

    def judge(self, finalists: Any, hopeless: Any, phase: Any) -> Iterator[tuple[int, Judged]]:
        self.seen += finalists
        yield from enumerate(self.verdicts[: len(finalists)])


def tuned(monkeypatch: pytest.MonkeyPatch, judge: Any, **options: Any) -> shardwise.Plan:
    monkeypatch.setattr(tuning, "find_judge", lambda *_: judge)
    return shardwise.tune(step, *SHAPES, topology="v5e:2x2", budget_evals=100, **options)


def test_the_fastest_that_is_not_refused_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    judge = Scripted(Judged(0.1, refused="out of memory"), Judged(0.3, 10), Judged(0.2, 20))
    plan = tuned(monkeypatch, judge, finalists=3)
    assert plan.evidence is not None and plan.evidence.chosen == 2 and plan.evidence.judged.time_s == 0.2
    assert "Judged by a script" in str(plan) and "out of memory" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert shardwise.load_plan(tmp_path / "plan.json") == plan


def test_all_refused_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfeasibleError, match="refuses all"):
        tuned(monkeypatch, Scripted(*[Judged(refused="out of memory")] * 9), finalists=2)


def test_finalists_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Scripted(*[Judged(1.0, 1)] * 9)
    tuned(monkeypatch, judge, finalists=4)
    assert len(judge.seen) > 1
    specs = {(f.plan.mesh, tuple(a.spec for a in f.plan.arguments), f.plan.choices) for f in judge.seen}
    assert len(specs) == len(judge.seen)
    assert any(f.name != "found" for f in judge.seen)


def job(timeout_s: float = 60.0) -> compiling.Job:
    return compiling.Job(b"no program", False, "v5e:2x2", {"data": 4}, (), {}, timeout_s)


def test_a_failure_of_the_compiler_is_a_result() -> None:
    assert "failed" in compiling.run_job(job())


def test_a_time_out_is_a_result() -> None:
    assert compiling.run_job(job(0.01)) == {"failed": "not compiled in 0.01 s"}


def test_the_cache_keeps_verdicts_and_no_failures(tmp_path: Path) -> None:
    cache = compiling.Cache(tmp_path / "folder")
    cache.put("a", {"cycles": 1})
    cache.put("b", {"failed": "a crash"})
    assert (cache.get("a"), cache.get("b")) == ({"cycles": 1}, None)
    (tmp_path / "folder" / "c.json").write_text('{"cyc')
    assert cache.get("c") is None


def test_two_writers_do_not_disturb_each_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda k: compiling.Cache(tmp_path).put("same", {"cycles": k}), range(50)))
    assert json.loads((tmp_path / "same.json").read_text())["cycles"] in range(50)
    assert [p.name for p in tmp_path.iterdir()] == ["same.json"]


def test_devices_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = shardwise.tune(step, *SHAPES, mesh={"data": 1}, finalists=2, budget_evals=20, judge="devices")
    assert plan.evidence is not None
    times = [t.judged.time_s for t in plan.evidence.tried if t.judged.time_s is not None]
    assert plan.evidence.judged.time_s == min(times) > 0


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="finalist"):
        shardwise.tune(step, *SHAPES, finalist=2)


class Slow:
    """A judge for which compute takes a multiple of what is predicted, and arrays a multiple of their memory."""

    name = "a slow judge"

    def __init__(self, compute: float, memory: float = 1.0):
        self.compute, self.memory = compute, memory
        self.rounds: list[list[str]] = []

    def judge(self, finalists: Any, hopeless: Any, phase: Any) -> Iterator[tuple[int, Judged]]:
        self.rounds.append([f.plan.summary() for f in finalists])
        for number, finalist in enumerate(finalists):
            p = finalist.plan.predicted
            compute_s = p.compute_s * self.compute
            yield (
                number,
                Judged(compute_s + p.time_s - p.compute_s, int(p.peak_bytes * self.memory), compute_s=compute_s),
            )


class Costed:
    """As much of a candidate as learning reads."""

    def __init__(self, compute_ps: int, comm_ps: int, peak_blocks: int):
        inquiry = SimpleNamespace(model=SimpleNamespace(usable_blocks=100))
        self.decided = SimpleNamespace(total=Cost(compute_ps, comm_ps, 0, peak_blocks), inquiry=inquiry)


def test_factors_are_medians_of_what_was_judged() -> None:
    one, other = Costed(1000, 100, 50), Costed(2000, 0, 100)
    verdicts = [Judged(3.1e-9, 25 * BLOCK, compute_s=3e-9), Judged(2e-9, 100 * BLOCK, compute_s=2e-9)]
    assert finalists.learned(list(zip([one, other], verdicts, strict=True))) == Correction(2.0, 0.75)
    assert finalists.learned([(one, Judged(2.2e-9))]) == Correction(2.0, 1.0), "without compute, the whole step"
    assert finalists.learned([(one, Judged(refused="out of memory"))]) == Correction()


def test_candidates_are_ranked_again() -> None:
    """Where compute takes half as long, one that communicates less wins; where memory is less, one fits that did not."""
    judged, quiet, large = Costed(1000, 400, 50), Costed(1300, 200, 50), Costed(900, 200, 150)
    ranked = [judged, quiet, large]

    def after(found: Correction, best_s: float) -> list[Any]:
        return finalists.promising(ranked, [judged], found, best_s, count=2)

    assert after(Correction(), 1400e-12) == []
    assert after(Correction(compute=0.5), 900e-12) == [quiet]
    assert after(Correction(memory=0.5), 1400e-12) == [large]
    assert after(Correction(compute=0.5, memory=0.5), 900e-12) == [large, quiet]


def test_further_finalists_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """All candidates are expected to be faster, and none is judged twice."""
    monkeypatch.setattr(tuning, "promising", lambda ranked, judged, *_: [c for c in ranked if c not in judged][:1])
    judge = Slow(compute=3.0, memory=0.5)
    plan = tuned(monkeypatch, judge, finalists=1)
    assert plan.evidence is not None and len(judge.rounds) == 3 == len(plan.evidence.tried)
    assert plan.evidence.correction.compute == pytest.approx(3, rel=1e-3)
    assert "Learned for this program: compute × 3.00, memory × 0.50 of what is predicted" in str(plan)
    assert len({name for names in judge.rounds for name in names}) == 3


def test_a_judge_that_agrees_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Slow(compute=1.0)
    plan = tuned(monkeypatch, judge, finalists=2)
    assert len(judge.rounds) == 1 and plan.evidence is not None and plan.evidence.chosen == 0
