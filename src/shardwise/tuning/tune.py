"""``shardwise.tune``: search, then let a compiler or devices judge a short list of finalists, and keep the best."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

import jax

from shardwise.errors import InfeasibleError, PlanError
from shardwise.interruption import interruptible
from shardwise.ir.collector import collector_paused
from shardwise.planner.asked import Asked
from shardwise.planner.devices import under_explicit
from shardwise.planner.inquiry import Variants
from shardwise.planner.planning import asked_of, plan, plan_of, with_devices, with_progress
from shardwise.planner.racing import Race
from shardwise.plans.evidence import Correction, Evidence, Judged, Tried
from shardwise.plans.plan import Plan
from shardwise.tactics.roles import complete_roles
from shardwise.transforms.variants import AS_IS
from shardwise.tuning.compiling import Cache
from shardwise.tuning.finalists import Candidate, candidates, learned, promising, select, smaller
from shardwise.tuning.judges import Finalist, Judge, Phase, TpuCompiler, find_judge

#: A finalist is left out if even this share of its shortest predicted step time, with all communication overlapped, is longer
#: than the best judged one. An estimate: predictions of programs that nothing was fitted to can be further off.
_SURE: Final = 0.75
#: The most rounds of finalists.
_ROUNDS: Final = 3
JUDGES: Final = ("auto", "compiler", "devices")


def tune(
    fn: Callable[..., Any],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    finalists: int = 6,
    judge: str = "auto",
    compiler_options: Mapping[str, str] | None = None,
    executor: Executor | None = None,
    jobs: int | None = None,
    timeout_s: float = 900.0,
    cache: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Plan:
    """Plans a function as :func:`shardwise.plan` does, compiles or runs the best few plans, and returns the best of those.

    The finalists differ in kind: what the search found on all meshes and in all variants, from fast to small, and the best
    named strategies. What the first ones show about the predictions for this program ranks all plans again, and those that are
    now expected to be faster than the best are judged too. ``plan.evidence`` has the figures of all of them; a plan that was
    refused for memory is never returned.

    Args:
      fn, args, kwargs: as in :func:`shardwise.plan`.
      finalists: how many plans are judged in the first round; there are at most two more, half as large.
      judge: ``"devices"`` runs them on ``jax.devices()``, with random data in rounds that take turns; ``"compiler"`` compiles
        them for a TPU topology, without a TPU (needs ``shardwise[tpu]``). ``"auto"`` takes the devices if they are those that
        the plan is for.
      compiler_options: options of XLA's compiler, for all finalists and for ``plan.jit``.
      executor: any ``concurrent.futures.Executor`` for the compiles. By default they run here, each in its own process.
      jobs: how many compile at once. By default half as many as there are cores, or with an executor all.
      timeout_s: the longest time of one compile; a finalist that takes longer is lost.
      cache: the folder with the results of earlier compiles. By default that of the environment variable ``SHARDWISE_CACHE``,
        or one in the user's cache folder.
      **options: the options of :func:`shardwise.plan`. A ``progress`` that has a method ``phase`` is also told what is done.

    >>> import jax, shardwise
    >>> w, x = (jax.ShapeDtypeStruct(s, "float32") for s in [(64, 64), (4096, 64)])
    >>> plan = shardwise.tune(lambda w, x: x @ w, w, x, mesh={"data": 1}, finalists=2, budget_evals=20)
    >>> plan.evidence.judge, plan.evidence.judged.usable
    ('1 host devices', True)
    """
    if unknown := sorted(options.keys() - (plan.__kwdefaults__ or {}).keys()):
        raise TypeError(f"tune() got an unexpected keyword argument {unknown[0]!r}")
    if judge not in JUDGES:
        raise PlanError(f"judge is one of {', '.join(map(repr, JUDGES))}, not {judge!r}")
    if not isinstance(finalists, int) or finalists < 1:
        raise PlanError(f"finalists is a whole number above zero, not {finalists!r}")
    defaults = {name: value for name, value in (plan.__kwdefaults__ or {}).items() if name != "kwargs"}
    asked = with_devices(asked_of(**defaults | options))
    if asked.objective == "devices":
        raise PlanError("tune judges plans for one number of devices: plan(objective='devices') finds it")
    workers = jobs or (max(1, (os.cpu_count() or 2) // 2) if executor is None else finalists)
    with contextlib.ExitStack() as stack:
        stack.enter_context(interruptible())
        asked = stack.enter_context(with_progress(asked))
        pool = executor or stack.enter_context(ThreadPoolExecutor(workers))  # each job starts a process
        compiler = lambda backend: TpuCompiler(backend, pool, workers, timeout_s, Cache(cache))  # noqa: E731
        return _Tuning(fn, args, kwargs or {}, asked, dict(compiler_options or {})).run(finalists, judge, compiler)


@dataclass
class _Tuning:
    """One call of ``tune``."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    asked: Asked
    options: Mapping[str, str]
    correction: Correction = field(default_factory=Correction)
    interrupted: bool = False

    def run(self, count: int, how: str, compiler: Callable[[str], Judge]) -> Plan:
        asked = self.asked
        with collector_paused(), under_explicit(asked.mesh):
            self.variants = Variants(self.fn, self.args, dict(self.kwargs), asked.jit)
            self.asked = asked = replace(asked, roles=complete_roles(self.variants[AS_IS].analysis, asked.roles))
            self.race = Race(self.variants, asked)
            best = plan_of(self.variants, asked, self.race.run(anyway=True))
            ranked = candidates(self.race)
        if self.race.journal.interrupted or not best.predicted.fits:
            return best
        placement = best.inquiry.cost.placement
        devices = list(asked.mesh.devices.flat) if isinstance(asked.mesh, jax.sharding.Mesh) else None
        judge = find_judge(how, placement.topology, placement.mesh.devices, compiler, devices)
        chosen = select(ranked, count)
        judged: list[tuple[Candidate, Finalist, Judged]] = []
        for _ in range(_ROUNDS):
            judged += self._judge(judge, chosen, _fastest_s(judged))
            before, best_s = [c for c, _, _ in judged], _fastest_s(judged)
            if math.isinf(best_s):
                chosen = smaller(ranked, before, count)
            elif asked.search.goal.memory:
                break
            else:
                found = learned([(c, verdict) for c, _, verdict in judged])
                chosen = promising(ranked, before, found, best_s, math.ceil(count / 2))
                self.correction = found if chosen else self.correction
            if not chosen or self.interrupted:
                break
        return self._best(judge, [(finalist, verdict) for _, finalist, verdict in judged])

    def _finalist(self, candidate: Candidate) -> Finalist:
        outcome = self.race.outcome(candidate.arm, candidate.decided)
        planned = replace(plan_of(self.variants, self.asked, outcome), compiler_options=self.options)
        new = dict(zip(candidate.arm.placement.mesh.names, planned.mesh.names, strict=True))
        name = re.sub(r"(?<=[:+])[^,+]+", lambda axis: new[axis[0]], candidate.name)
        return Finalist(name, planned, outcome.captured.traced, outcome.captured.analysis.program)

    def _judge(
        self, judge: Judge, chosen: Sequence[Candidate], best_s: float
    ) -> list[tuple[Candidate, Finalist, Judged]]:
        with collector_paused(), under_explicit(self.asked.mesh):
            finalists = [self._finalist(candidate) for candidate in chosen]
        verdicts = self._verdicts(judge, finalists, best_s)
        return list(zip(chosen, finalists, verdicts, strict=True))

    def _verdicts(self, judge: Judge, finalists: Sequence[Finalist], best_s: float) -> list[Judged]:
        """The verdicts of all finalists. Those that cannot be the fastest, or are left when a person interrupts, have none."""
        found: dict[int, Judged] = {}
        share = _SURE * self.correction.compute

        def hopeless(finalist: Finalist) -> bool:
            return not self.asked.search.goal.memory and finalist.plan.predicted.overlapped_s * share > best_s

        left_out = "not judged: even if all its communication were overlapped, it would be slower than the best"
        try:
            for number, verdict in judge.judge(finalists, hopeless, self._phase):
                found[number] = verdict = self._limited(verdict)
                if verdict.usable and verdict.time_s is not None:
                    best_s = min(best_s, verdict.time_s)
        except KeyboardInterrupt:
            if not any(verdict.usable for verdict in found.values()):
                raise
            left_out, self.interrupted = "not judged: interrupted", True
        return [found.get(number, Judged(detail=left_out)) for number in range(len(finalists))]

    def _limited(self, verdict: Judged) -> Judged:
        limit = self.asked.memory_limit
        if limit is None or verdict.peak_bytes is None or verdict.peak_bytes <= limit:
            return verdict
        return replace(verdict, refused=f"its peak memory is {verdict.peak_bytes:,} bytes, above memory_limit")

    @property
    def _phase(self) -> Phase:
        phase: Phase = getattr(self.asked.search.progress, "phase", lambda text, seconds: None)
        return phase

    def _rank(self, verdict: Judged) -> tuple[float, ...]:
        """Smaller is better."""
        if not verdict.usable or verdict.time_s is None:
            return (math.inf,)
        goal = self.asked.search.goal
        if not goal.memory:
            return 0.0, verdict.time_s
        late = verdict.time_s > goal.step_time_s
        return (1.0, verdict.time_s) if late else (0.0, float(verdict.peak_bytes or 0), verdict.time_s)

    def _best(self, judge: Judge, judged: Sequence[tuple[Finalist, Judged]]) -> Plan:
        tried = tuple(_tried(judged))
        chosen = min(range(len(judged)), key=lambda k: self._rank(judged[k][1]))
        finalist, verdict = judged[chosen]
        if not verdict.usable:
            lines = [f"  {t.text}: {t.judged.refused or t.judged.detail}" for t in tried]
            raise InfeasibleError("\n".join([f"{judge.name} refuses all {len(tried)} finalists:", *lines]))
        return replace(finalist.plan, evidence=Evidence(judge.name, tried, chosen, self.correction))


def _fastest_s(judged: Sequence[tuple[Candidate, Finalist, Judged]]) -> float:
    return min((v.time_s for _, _, v in judged if v.usable and v.time_s is not None), default=math.inf)


def _tried(judged: Sequence[tuple[Finalist, Judged]]) -> Iterator[Tried]:
    for finalist, verdict in judged:
        one = finalist.plan
        p = one.predicted
        yield Tried(
            finalist.name, one.mesh, str(one.variant), p.time_s, p.peak_bytes, verdict, dict(one.compiler_options)
        )
