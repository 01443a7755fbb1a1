"""Finalists, the cache, lost compiles, and the choice among verdicts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest

import shardwise
from shardwise.errors import InfeasibleError
from shardwise.plans.evidence import Judged
from shardwise.tuning import compiling, judges
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
