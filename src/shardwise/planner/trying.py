"""The choice among the variants of a function: the fastest that fits.

A variant computes the same in micro-batches, or computes again what its backward pass needs (``transforms/variants``). The one
that changes least is searched first; only if that does not fit do others get a short search, and the best of them a long one.
Those that provably cannot fit are not searched.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from shardwise.dims.analysis import Analysis
from shardwise.errors import VariantError
from shardwise.planner.captured import Captured, Variants
from shardwise.planner.deciding import Asked, decide_asked, least_peak
from shardwise.planner.inquiry import Settled, decisions_text
from shardwise.planner.mesh import OpenMesh
from shardwise.planner.racing import RACE_S, Decided
from shardwise.plans.search_log import SearchLog, VariantTried
from shardwise.search.result import Ended, Improvement
from shardwise.search.searcher import SETTLED, Options
from shardwise.transforms.variant import AS_IS, Variant

#: The part of a budget that a short search of a variant has.
_SHORT_SEARCHES: Final = 8


class Attempt(NamedTuple):
    """The result for one variant."""

    captured: Captured
    decided: Decided
    log: SearchLog | None
    settled: Settled

    @property
    def rank(self) -> tuple[bool, float]:
        """Smaller is better."""
        predicted = self.settled.predicted
        return not predicted.fits, predicted.time_s if predicted.fits else predicted.peak_bytes

    @property
    def fits(self) -> bool:
        return self.settled.predicted.fits

    @property
    def interrupted(self) -> bool:
        return self.log is not None and self.log.ended is Ended.INTERRUPTED


def attempted(captured: Captured, asked: Asked) -> Attempt:
    """Decides for one variant."""
    search = _with_text(captured.analysis, asked.search)
    decided, log = decide_asked(captured, replace(asked, search=search))
    return Attempt(captured, decided, log, decided.inquiry.settle(decided.decisions))


def _with_text(analysis: Analysis, search: Options) -> Options:
    """Options whose progress callback gets the decisions as text, too."""
    progress = search.progress
    if not callable(progress):
        return search

    def report(improvement: Improvement, share: float) -> None:
        progress(replace(improvement, words=decisions_text(analysis, improvement.decisions)), share)

    return replace(search, progress=report)


def best_variant(variants: Variants, asked: Asked) -> tuple[Attempt, tuple[VariantTried, ...]]:
    """The variant that changes least, if that fits; else the fastest that does. All that could fit get a short search, on the
    mesh of the best so far, and the best a long one."""
    tries = _Tries(variants)
    (first, *others), *rounds = asked.wanted.rounds(variants[AS_IS].traced, asked.roles)
    best = tries.attempt(first, asked)
    if best is not None and (best.fits or best.interrupted):
        return best, tuple(tries.tried)
    short = replace(asked, search=_short_search(asked))
    any_mesh = True  # whether the best was searched on every mesh
    for variants_of_round in (others, *rounds):
        improved, refused = False, tries.refused
        for variant in variants_of_round:
            fits = best is not None and best.fits
            attempt = tries.attempt(variant, short if best is None or not fits else _on_mesh(short, best))
            if attempt is None:
                continue
            if best is None or attempt.rank < best.rank:
                best, improved, any_mesh = attempt, True, not fits
            if attempt.interrupted:
                return tries.counted(best._replace(log=attempt.log)), tuple(tries.tried)
        all_refused = variants_of_round is not others and tries.refused - refused == len(variants_of_round)
        if all_refused or (best is not None and best.fits and not improved):
            break
    if best is None:
        best = tries.smallest(asked)
    if best.log is not None and not best.interrupted and not (any_mesh and best.log.ended in SETTLED):
        best = min(tries.search(best.captured, asked), best, key=lambda one: one.rank)
    return tries.counted(best), tuple(tries.tried)


def _on_mesh(asked: Asked, attempt: Attempt) -> Asked:
    return replace(asked, mesh=None, topology=attempt.decided.inquiry.cost.placement)


class _Tries:
    """The variants tried so far: how many are not possible, those that cannot fit, and the evaluations of all searches."""

    def __init__(self, variants: Variants):
        self._variants = variants
        self.tried: list[VariantTried] = []
        self.refused = 0
        self._too_large: list[tuple[int, Captured]] = []
        self._evaluations = 0

    def attempt(self, variant: Variant, asked: Asked) -> Attempt | None:
        """Searches a variant; None if it is not possible, or cannot fit."""
        try:
            captured = self._variants[variant]
        except VariantError as error:
            self.refused += 1
            self.tried.append(VariantTried(str(variant), why=str(error)))
            return None
        least, usable = least_peak(captured, asked)
        if least > usable:
            self._too_large.append((least, captured))
            self.tried.append(VariantTried(str(variant), peak_bytes=least))
            return None
        attempt = self.search(captured, asked)
        predicted = attempt.settled.predicted
        self.tried.append(VariantTried(str(variant), predicted.time_s, predicted.peak_bytes, predicted.fits))
        return attempt

    def search(self, captured: Captured, asked: Asked) -> Attempt:
        attempt = attempted(captured, asked)
        self._evaluations += attempt.log.evaluations if attempt.log is not None else 0
        return attempt

    def smallest(self, asked: Asked) -> Attempt:
        """Searches the variant with the smallest bound, where none can fit."""
        if not self._too_large:
            raise VariantError("; ".join(dict.fromkeys(t.why for t in self.tried)))
        return self.search(min(self._too_large, key=lambda one: one[0])[1], asked)

    def counted(self, attempt: Attempt) -> Attempt:
        """The attempt with the evaluations of all searches in its log."""
        if attempt.log is None:
            return attempt
        return attempt._replace(log=replace(attempt.log, evaluations=self._evaluations))


def _short_search(asked: Asked) -> Options:
    """An eighth of the budget; where there is none, a quarter of the seconds that a plan has by default."""
    search = asked.search
    if search.budget_s is None and search.budget_evals is None:
        budget = search.budget(RACE_S) if OpenMesh.of(asked.mesh) is not None else search.budget()
        return replace(search, budget_s=budget.seconds / 4)
    seconds = None if search.budget_s is None else search.budget_s / _SHORT_SEARCHES
    evaluations = search.budget_evals and -(-search.budget_evals // _SHORT_SEARCHES)
    return replace(search, budget_s=seconds, budget_evals=evaluations)
