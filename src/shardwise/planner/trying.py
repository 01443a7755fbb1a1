"""A function's variants, tried: which of them fits at the least cost.

A variant computes the same in micro-batches, or computes again what its backward pass needs (``transforms/variants``). The one
that changes least is searched first; only if that does not fit are others looked at, shortly, and the best of them searched to
the end. Those that provably cannot fit are passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

from shardwise.capture.lower import lower
from shardwise.capture.trace import Traced
from shardwise.dims.analysis import Analysis, analyze_program
from shardwise.errors import PlanError, VariantError
from shardwise.planner.deciding import Asked, Decided, decide_asked, least_peak
from shardwise.planner.inquiry import Inquiry, Settled, decisions_words
from shardwise.planner.mesh import RACE_S, OpenMesh
from shardwise.plans.search_log import SearchLog, VariantTried
from shardwise.search.result import Ended, Improvement
from shardwise.search.searcher import SETTLED, Options
from shardwise.transforms.remat import count_candidates
from shardwise.transforms.variant import Variant
from shardwise.transforms.variants import AUTO, trace_variant

#: Into how many parts a budget is cut for a first look at a variant.
_LOOKS: Final = 8


class Captured(NamedTuple):
    """A variant of the function, traced and analysed."""

    variant: Variant
    traced: Traced
    analysis: Analysis


def capture_variant(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked, variant: Variant
) -> Captured:
    traced = trace_variant(fn, args, kwargs, asked.jit, variant)
    analysis = analyze_program(lower(traced))
    if not analysis.program.arguments:
        raise PlanError(f"{traced.name} has no array arguments: there is nothing to shard")
    return Captured(variant, traced, analysis)


class Attempt(NamedTuple):
    """What came out for a variant."""

    captured: Captured
    made: Decided
    log: SearchLog | None
    inquiry: Inquiry
    settled: Settled

    @property
    def rank(self) -> tuple[bool, float]:
        predicted = self.settled.predicted
        return not predicted.fits, predicted.time_s if predicted.fits else predicted.peak_bytes

    @property
    def interrupted(self) -> bool:
        return self.log is not None and self.log.ended is Ended.INTERRUPTED

    @property
    def tried(self) -> VariantTried:
        p = self.settled.predicted
        return VariantTried(str(self.captured.variant), p.time_s, p.peak_bytes, p.fits)


def attempted(captured: Captured, asked: Asked) -> Attempt:
    made, log = decide_asked(captured.analysis, replace(asked, search=_worded(captured.analysis, asked.search)))
    inquiry = Inquiry(captured.analysis, made.cost, asked.roles)
    return Attempt(captured, made, log, inquiry, inquiry.settle(made.decisions))


def _worded(analysis: Analysis, search: Options) -> Options:
    """Whoever is told of improvements is told in words, too."""
    progress = search.progress
    if not callable(progress):
        return search

    def told(made: Improvement, share: float) -> None:
        known = made.decisions or not made.best.state  # other processes tell no decisions
        progress(replace(made, words=decisions_words(analysis, made.decisions)) if known else made, share)

    return replace(search, progress=told)


def best_variant(
    plain: Captured, captured: Callable[[Variant], Captured], asked: Asked
) -> tuple[Attempt, tuple[VariantTried, ...]]:
    """The variant that changes least, if that fits; else the fastest that does. All that could fit are looked at, on the mesh
    of the best so far, and the best is searched to the end."""
    tries = _Tries(lambda variant: plain if variant == plain.variant else captured(variant))
    (first, *others), *rounds = asked.wanted.rounds(plain.traced, asked.roles)
    best = tries.attempt(first, asked)
    if best is not None and (best.settled.predicted.fits or best.interrupted):
        return best, tuple(tries.tried)
    quick = replace(asked, search=_first_look(asked))
    whole = True
    for variants in (others, *rounds):
        better, refused = False, tries.refused
        for variant in variants:
            fits = best is not None and best.settled.predicted.fits
            found = tries.attempt(variant, quick if best is None or not fits else _on(quick, best))
            if found is None:
                continue
            if best is None or found.rank < best.rank:
                best, better, whole = found, True, not fits
            if found.interrupted:
                return tries.counted(found if found is best else best._replace(log=found.log)), tuple(tries.tried)
        fits = best is not None and best.settled.predicted.fits
        impossible = variants is not others and tries.refused - refused == len(variants)
        if impossible or (fits and not better):
            break
    if best is None:
        best = tries.smallest(asked)
    elif best.settled.predicted.fits and asked.wanted.remat == AUTO:
        fewer = _with_loops_left(best, tries, quick, count_candidates(plain.traced))
        best, whole = fewer, whole and fewer is best
    if best.log is not None and not best.interrupted and not (whole and best.log.ended in SETTLED):
        best = min(tries.search(best.captured, asked), best, key=lambda one: one.rank)
    return tries.counted(best), tuple(tries.tried)


def _with_loops_left(best: Attempt, tries: _Tries, asked: Asked, loops: int) -> Attempt:
    """With one loop after another that need not compute anything again, as far as that fits and is faster."""
    for number in range(1, loops + 1):
        variant = best.captured.variant
        if not variant.remat or len(variant.but) + 1 == loops or best.interrupted:
            break
        found = tries.attempt(replace(variant, but=(*variant.but, number)), _on(asked, best))
        if found is not None and found.rank < best.rank:
            best = found
        elif found is not None and found.interrupted:
            best = best._replace(log=found.log)
    return best


def _on(asked: Asked, found: Attempt) -> Asked:
    """The same on the mesh, and on the links, of what was found."""
    return replace(asked, mesh=None, topology=found.made.cost.placement)


class _Tries:
    """Variants that were tried: those that could not be made, those that cannot fit, and what was found for the others."""

    def __init__(self, capture: Callable[[Variant], Captured]):
        self._capture = capture
        self.tried: list[VariantTried] = []
        self.refused = 0
        self._hopeless: list[tuple[int, Captured]] = []
        self._evaluations = 0

    def attempt(self, variant: Variant, asked: Asked) -> Attempt | None:
        """None where it cannot be made, or cannot fit."""
        try:
            captured = self._capture(variant)
        except VariantError as error:
            self.refused += 1
            self.tried.append(VariantTried(str(variant), why=str(error)))
            return None
        least, usable = least_peak(captured.analysis, asked)
        if least > usable:
            self._hopeless.append((least, captured))
            self.tried.append(VariantTried(str(variant), peak_bytes=least))
            return None
        found = self.search(captured, asked)
        self.tried.append(found.tried)
        return found

    def search(self, captured: Captured, asked: Asked) -> Attempt:
        found = attempted(captured, asked)
        self._evaluations += found.log.evaluations if found.log is not None else 0
        return found

    def smallest(self, asked: Asked) -> Attempt:
        """What is found for the variant that needs the least, where none can fit."""
        if not self._hopeless:
            raise VariantError("; ".join(dict.fromkeys(t.why for t in self.tried)))
        return self.search(min(self._hopeless, key=lambda one: one[0])[1], asked)

    def counted(self, attempt: Attempt) -> Attempt:
        """With the evaluations of all."""
        if attempt.log is None:
            return attempt
        return attempt._replace(log=replace(attempt.log, evaluations=self._evaluations))


def _first_look(asked: Asked) -> Options:
    """An eighth of the budget; where there is none, a quarter of the seconds that a plan has by default."""
    search = asked.search
    if search.budget_s is None and search.budget_evals is None:
        whole = search.budget(RACE_S) if OpenMesh.of(asked.mesh) is not None else search.budget()
        return replace(search, budget_s=whole.seconds / 4)
    seconds = None if search.budget_s is None else search.budget_s / _LOOKS
    return replace(search, budget_s=seconds, budget_evals=search.budget_evals and -(-search.budget_evals // _LOOKS))
