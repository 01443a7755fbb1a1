"""Several processes: the same plan for the same number of them, an interrupt that leaves none behind, and a search all the same
where there can be none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.cli.main import main
from shardwise.cost.decisions import Shard
from shardwise.errors import DecisionError
from shardwise.plans.plan import Plan
from shardwise.search import crew as crew_module
from shardwise.search.crew import Crew, CrewError, StoppedError
from shardwise.search.mesh import _Lanes
from shardwise.search.methods import METHODS
from shardwise.search.problem import Problem
from shardwise.search.result import Budget, Ended, Improvement
from shardwise.search.roots import Roots
from shardwise.search.tasks import Desk, Done, Program, Task
from tests.search.test_infeasible import cost, trained
from tests.search.test_plan_search import planned, shapes, step

OPEN: dict[str, Any] = {"topology": "v5e:2x2", "donate_argnums": (0, 1), "budget_evals": 200}


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes that a test starts, on two cores at least; none is left afterwards."""
    made: list[subprocess.Popen[bytes]] = []

    class Watched(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(crew_module.subprocess, "Popen", Watched)
    monkeypatch.setattr(crew_module, "cores", lambda: 2)
    yield made
    assert all(process.returncode is not None for process in made)


def opened(**asked: Any) -> Plan:
    return shardwise.plan(step, *shapes(4096, 512), **{**OPEN, **asked})


def test_the_same_workers_find_the_same_plan(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Improvement] = []
    plans = [planned(workers=2, progress=lambda made, share: seen.append(made)) for _ in range(2)]
    assert len(started) == 4 and plans[0].to_json() == plans[1].to_json()
    assert plans[0].search is not None and planned().search is not None and seen
    assert plans[0].predicted.time_s <= 1.01 * planned().predicted.time_s
    monkeypatch.setattr(crew_module, "cores", lambda: 1)
    assert planned(workers=2).to_json() == plans[0].to_json() and len(started) == 5, "on one core, too"


def test_meshes_side_by_side(started: list[Any]) -> None:
    plans = [opened(workers=2) for _ in range(2)]
    assert len(started) == 4 and plans[0].to_json() == plans[1].to_json()
    log, alone = plans[0].search, opened().search
    assert log is not None and alone is not None
    assert {str(m.mesh) for m in log.meshes} == {str(m.mesh) for m in alone.meshes} and len(log.meshes) > 1
    assert plans[0].predicted.time_s <= 1.01 * opened().predicted.time_s
    counts = [i.evaluations for i in log.improvements]
    assert counts == sorted(counts) and log.evaluations <= 200 + 2 * len(log.meshes)


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_a_method_without_a_seed_needs_no_others(method: str, started: list[Any]) -> None:
    assert planned(method=method, workers=2).to_json() == planned(method=method).to_json() and not started


def test_jit_has_workers(started: list[Any]) -> None:
    made = shardwise.jit(step, mesh={"x": 4}, topology="v5e:2x2", budget_evals=60, workers=2, donate_argnums=(0, 1))
    assert made._asked.search.workers == 2


@pytest.mark.parametrize("plan", [planned, opened])
def test_an_interrupt_keeps_the_best_and_leaves_nothing_behind(plan: Any, started: list[Any]) -> None:
    seen: list[Improvement] = []

    def stop(improvement: Improvement, share: float) -> None:
        seen.append(improvement)
        if len(seen) == 2:
            raise KeyboardInterrupt

    found = plan(workers=2, progress=stop)
    assert found.search is not None and found.search.ended is Ended.INTERRUPTED and len(started) == 2
    # A report of the other process may be on its way already.
    assert found.notes[0].startswith("the search was interrupted") and len(seen) in (2, 3)


def test_an_error_of_a_progress_callback_ends_it(started: list[Any]) -> None:
    def wrong(improvement: Improvement, share: float) -> None:
        raise ZeroDivisionError

    for plan in (planned, opened):
        with pytest.raises(ZeroDivisionError):
            plan(workers=2, progress=wrong)


SCRIPT = """
import shardwise
from shardwise.search import crew
from tests.search.test_plan_search import shapes, step

crew.cores = lambda: 2

def say(improvement, share):
    for hand in crew.Crew.current()._hands:
        print("worker", hand.process.pid, flush=True)

plan = shardwise.plan(step, *shapes(4096, 512), mesh={"x": 2, "y": 2}, topology="v5e:2x2", budget_s=600, workers=2,
                      method="random", progress=say)
print("ended", plan.search.ended.name, flush=True)
"""


def running(pid: int) -> bool:
    """Whether there is such a process that is not just waiting to be taken note of."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_script_that_is_interrupted_or_killed(how: signal.Signals, tmp_path: Path) -> None:
    """It has no guard around its main part; the signal goes to all of its group, as Ctrl-C does."""
    (tmp_path / "script.py").write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
    )
    assert process.stdout is not None
    workers: set[int] = set()
    while len(workers) < 2:
        word, number = process.stdout.readline().split()
        assert word == "worker"
        workers.add(int(number))
    assert all(map(running, workers))
    os.killpg(process.pid, how)
    rest, _ = process.communicate(timeout=60)
    assert ("ended INTERRUPTED" in rest) is (how is signal.SIGINT)
    assert process.returncode == (0 if how is signal.SIGINT else -signal.SIGKILL)
    end = time.monotonic() + 20
    while any(map(running, workers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(running, workers))


@pytest.mark.parametrize("program", ["/nowhere/python", "/bin/false"])
@pytest.mark.parametrize("plan", [planned, opened])
def test_where_none_can_be_started_one_searches(plan: Any, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", program)
    with pytest.warns(RuntimeWarning, match="a process .*; the search is made in one process"):
        found = plan(workers=2)
    assert found.to_json() == plan().to_json()


def test_one_that_dies_is_not_waited_for(started: list[Any]) -> None:
    def kill(improvement: Improvement, share: float) -> None:
        started[0].kill()

    for plan in (planned, opened):
        started.clear()
        with pytest.warns(
            RuntimeWarning, match=r"a process (ended with -9|cannot be reached).*; the search is made in one"
        ):
            assert plan(workers=2, progress=kill).predicted.fits


def test_a_program_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(message: Any) -> bytes:
        raise TypeError("cannot pickle a module")

    monkeypatch.setattr(crew_module, "dumped", refuse)
    with pytest.warns(
        RuntimeWarning, match="the program cannot be sent: cannot pickle a module; the search is made in one"
    ):
        planned(workers=2)


def test_a_worker_does_without_jax() -> None:
    code = "import shardwise.search.worker, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("workers", [0, -1, "abc", 1.5, True, None])
def test_workers_that_cannot_be(workers: Any) -> None:
    with pytest.raises(
        shardwise.ShardwiseError, match=f"workers is a whole number of processes above zero, not {workers!r}"
    ):
        planned(workers=workers)


def test_the_command_line_has_workers(started: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "zoo:mlp:tiny", "--topology", "v5e:2x2", "--mesh", "data=4", "--evaluations", "60", "--workers"]
    assert (
        main([*words, "0"]) == 1
        and "workers is a whole number of processes above zero, not 0" in capsys.readouterr().err
    )
    assert main([*words, "2"]) == 0 and len(started) == 2 and "Found by mcts: " in capsys.readouterr().out


def task(method: str = "mcts", **asked: Any) -> Task:
    return Task(-1, 0, 0, cost(x=2, y=2), (), ("x", "y"), method, 0, Budget(600, **asked))


def test_a_lane_finds_what_one_finds_here() -> None:
    problem = Problem(trained(), cost(x=2, y=2), axes=("x", "y"))
    here = METHODS["mcts"](problem, Budget(600, evaluations=100))
    with Crew(2) as crew, crew.lane(1):
        made, log = Roots(crew, trained(), task(evaluations=100), lambda *said: None, lambda seconds: None).search()
    assert made.found.best == here.best and made.found.evaluations == here.evaluations
    assert made.decisions == problem.decisions(here.best.state) and made.found.ended is here.ended
    assert [(i.evaluations, i.best) for i, _, _ in log] == [(i.evaluations, i.best) for i in here.log]


def test_roots_share_the_evaluations() -> None:
    with Crew(3) as crew:
        made, log = Roots(crew, trained(), task("random", evaluations=100), lambda *said: None, lambda s: None).search()
    assert made.found.evaluations == 100 and made.found.ended is Ended.EVALUATIONS
    ranks = [rank for _, rank, _ in log]
    assert ranks == sorted(ranks, reverse=True) and all(i.evaluations <= 100 for i, _, _ in log)


def test_errors_come_back_as_they_are() -> None:
    with Crew(2) as crew, crew.lane(0):
        twice = Shard((0,), "x", ((0, 0),)), Shard((1,), "x", ((0, 1),))
        with pytest.raises(DecisionError, match="bit 0 is given both sides"):
            crew.search(trained(), [replace(task(), base=twice)], lambda message: None)
        with pytest.raises(CrewError, match="KeyError: 'nothing'"):
            crew.search(trained(), [task("nothing")], lambda message: None)
        crew.stop()
        with pytest.raises(StoppedError):
            crew.search(trained(), [task()], lambda message: None)


def test_who_comes_again_pays_for_no_state_twice_unless_forgotten() -> None:
    desk, sent = Desk(), list[Any]()
    desk.take(Program(-1, trained()))
    for _ in range(2):
        desk.do(task("greedy"), sent.append)
    desk.forget(0)
    desk.do(task("greedy"), sent.append)
    first, again, forgotten = (m.found.evaluations for m in sent if isinstance(m, Done))
    assert first == forgotten > again == 0


def test_a_mesh_stays_in_its_lane_as_long_as_none_has_more() -> None:
    lanes = _Lanes()
    assert lanes.assign(range(5), 2) == [[0, 2, 4], [1, 3]]
    assert lanes.assign([4, 1, 3], 2) == [[4], [1, 3]]
    assert lanes.assign([1, 3], 2) == [[3], [1]]
