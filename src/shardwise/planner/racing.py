"""The race between arms: which mesh and which variant of the program is the best.

The problem: every mesh, and every variant that computes the same in micro-batches or again in the backward pass, needs a
search, and there are dozens of them.

The idea: a bandit with optimism. All meshes get a *look*: the best of the named strategies there, without a search. Then arms
are searched, the best first, shortly and then thoroughly. An arm is searched as long as it could win: as long as the fastest of
its states would be the best, if it gained as much from a search as the luckiest arm so far did, in time and in memory. A second
search of an arm gains less than its first, so the gains of both are kept apart. As long as there were few searches, more is
hoped for (``_HOPED``): one arm says little about the others. If the first two searches save nothing, strategies suit the
program.

Variants change the program, so the one that changes least comes first, and arms are searched shortly before another variant
gets a look. It gets one only if a state was seen that does not fit, whose arguments alone do, and that could be faster than the
best that fits in as many micro-batches as it needs (``Arm.candidates``); or to rematerialize what fits, if storing takes longer
than computing again. On a given mesh rematerialized ones come last if they are expected to be slower. If it is proven that
nothing fits as it is, such states are looked for on the best mesh once something else fits: that takes less time than a look at
micro-batches.

Everything is counted in evaluations, so that the result does not depend on the machine. Weak: gains of arms may differ, and
micro-batches are not looked at where they would be faster without needing less memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final, NamedTuple

from shardwise.errors import ShardwiseError, VariantError
from shardwise.hardware.layout import Placement
from shardwise.lowering.decisions import Pin
from shardwise.planner.arms import Arm, Decided, Gains, again_ps, best_placement, suited
from shardwise.planner.asked import Asked, candidate_meshes, with_manual_axes, with_stages
from shardwise.planner.inquiry import Captured, Rival, Settled, Variants, decisions_text
from shardwise.planner.mesh import carried_names, carried_over, outer_sizes, splits
from shardwise.planner.race_log import failure, search_log, variant_tried
from shardwise.plans.search_log import SearchLog, VariantTried
from shardwise.search.bounds import finest, peak_bound
from shardwise.search.run import Budget
from shardwise.search.searcher import Journal
from shardwise.transforms.variants import AS_IS, GATHERS, Variant

_RANK: Final = attrgetter("best.rank")
#: The patience of a short search (``Budget``), and the share of a budget that all short searches have.
_SHORT: Final = 2.0
_SHORT_SHARE: Final = 0.5
#: Meshes on which a further variant is looked at.
_MOST_MESHES: Final = 3
#: The share of time that a search on an open mesh is assumed to save as long as there were few: by whether it is thorough, the
#: share, and how many. Nothing is assumed if the best takes less than ``_FAR`` times as long as perfect scaling, and the number
#: is smaller by ``_IN_VAIN`` as long as no search has saved ``_ANY``.
_HOPED: Final = {False: (0.5, 4), True: (0.02, 3)}
_FAR: Final = 1.3
_IN_VAIN: Final = 2
_ANY: Final = 0.001
#: The share of memory that a thorough search is assumed to save after a short one, where memory is the goal: of five programs
#: one saved as much, and the others 0% to 5%.
_SMALLER: Final = 0.1
#: A variant must promise to be faster by this.
_LITTLE: Final = 0.005
#: Micro-batches are looked at if they are expected to be slower than the best by less, since the expectation may be too high;
#: more of them than are needed, as long as the last number of them is slower than the best by less.
_NEAR: Final = 0.01
#: The share of time above that of perfect scaling from which parts of mesh axes are tried.
_IMPERFECT: Final = 0.05


class Hopeless(Exception):
    """It is proven that nothing fits: at least this many bytes of a device are needed."""

    def __init__(self, least_bytes: int):
        self.least_bytes = least_bytes


class Outcome(NamedTuple):
    """The winner: its variant, decisions and settled plan, with the log of the searches and the variants that were tried."""

    captured: Captured
    decided: Decided
    settled: Settled
    log: SearchLog | None
    tried: tuple[VariantTried, ...]


def choose(variants: Variants, asked: Asked, anyway: bool = True) -> Outcome:
    """Runs the race. Where it is proven that nothing fits it returns a small plan ``anyway``, or raises Hopeless."""
    return Race(variants, asked).run(anyway)


@dataclass
class Race:
    """The arms of a race, and after :meth:`run` what was found on each."""

    variants: Variants
    asked: Asked
    arms: list[Arm] = field(default_factory=list)
    failed: dict[Placement, ShardwiseError] = field(default_factory=dict)
    tried: dict[Variant, VariantTried] = field(default_factory=dict)
    hopeless: dict[Variant, float] = field(default_factory=dict)  # memory needed at least, as a share of what there is
    every: list[Variant] = field(default_factory=list)  # that was asked for

    def __post_init__(self) -> None:
        self.placed, self.is_open = candidate_meshes(self.asked)
        self.asked = with_stages(self.asked, self.placed)
        self.journal = Journal(self.asked.search, decisions_text)
        self._short: set[Arm] = set()  # arms that had a search, short or thorough
        self._full: set[Arm] = set()
        again = Gains(memory=_SMALLER) if self.asked.search.goal.memory else Gains()
        self._gains = {False: Gains(), True: again}  # by whether an arm was searched before

    def run(self, anyway: bool) -> Outcome:
        wanted, traced, roles = self.asked.wanted, self.variants[AS_IS].traced, self.asked.roles
        pipelines = wanted.pipelines(traced, roles, sorted(set[int]().union(*map(outer_sizes, self.placed))))
        first, *others = pipelines[:1] if wanted.piped else wanted.variants(traced, roles)
        self.every = [first, *others, *pipelines, *wanted.variants(traced, roles, offload=True)]
        self.placed = with_manual_axes(self.variants[first].analysis.program, self.placed)
        try:
            self.look(first, self.placed)
            if wanted.piped:
                self.pipe(pipelines[1:])
            smallest = self.asked.search.goal.memory
            if smallest and others:  # any variant may be the smallest, so none takes the whole budget first
                self.search(short=True)
            else:
                self.search()
                self._split_axes([first])
            if (wanted.open or smallest or self._limit_ps() == math.inf) and not self.journal.interrupted:
                tried = dict(self.tried)
                for some in self._in_turn(others):
                    self.vary(some)
                if all(arm.captured.variant in self.hopeless for arm in self.arms):  # only to know what to expect
                    self.arms, self.tried = [], self.tried | tried
                if not wanted.piped:
                    self.pipe(pipelines)
                self.search()
                found = dict.fromkeys(arm.captured.variant for arm in sorted(self.arms, key=_RANK))
                self._split_axes(variant for variant in found if variant != first or (smallest and others))
            if self._limit_ps() == math.inf and not self.journal.interrupted:
                self.vary(wanted.variants(traced, roles, offload=True))
                self.search()
            if not self.arms and not self.failed:
                if not anyway:
                    raise Hopeless(min(self.tried[variant].peak_bytes or 0 for variant in self.hopeless))
                self.look(min(self.hopeless, key=self.hopeless.__getitem__), self.placed, anyway=True)
                self.search()
            if not self.arms:
                raise failure(self.failed)
        except KeyboardInterrupt:
            if self.best_arm is None:
                raise
            self.journal.interrupted = True
        winner = self._winner()
        return self.outcome(winner, winner.best)

    def _split_axes(self, variants: Iterable[Variant]) -> None:
        """Searches some variants on meshes with a split axis, starting from what was found on the given mesh."""
        looked: list[Arm] = []
        for variant in variants:
            if not self.journal.interrupted and self._could_gain_by_splits(variant):
                parts = splits(self.placed[0], self.variants[variant].analysis.groups)
                self.placed += [placement for placement in parts if placement not in self.placed]
                looked += self.look(variant, parts)
        if looked:
            for arm in [arm for arm in self.arms if arm in self._short | self._full]:
                self._carry_over(arm)
            self.search()

    def _could_gain_by_splits(self, variant: Variant) -> bool:
        """Is the mesh given, not by axes that somebody uses by name, and a step that could win far from perfect scaling?"""
        program = self.variants[AS_IS].analysis.program
        by_name = self.is_open or self.asked.topology is None or not self.asked.searches_all
        by_name = by_name or any(op.kind.startswith("shard_map.") for op in program.ops)
        arms = [arm for arm in self.arms if arm.captured.variant == variant and variant not in self.hopeless]
        arms = [arm for arm in arms if arm.best.total.time_ps / arm.scaling < self._limit_ps()]
        return not by_name and any(not arm.best.fits or arm.scaling > 1 + _IMPERFECT for arm in arms)

    # Looking and searching.

    @property
    def best_arm(self) -> Arm | None:
        return min(self.arms, key=_RANK, default=None)

    def look(self, variant: Variant, placed: Sequence[Placement], anyway: bool = False) -> list[Arm]:
        """Applies the tactics to a variant, without searches; not if nothing can fit, unless ``anyway``."""
        new: list[Arm] = []
        quick = len(self.placed) > 1 or self.asked.wanted.open
        captured = self.variants[variant]
        if not anyway and self._is_hopeless(captured):
            return new
        for number, placement in enumerate(placed):
            if self.journal.interrupted:
                break
            self.journal.stage = f"looking at mesh {number + 1} of {len(placed)}" if len(placed) > 1 else ""
            try:
                arm = Arm(captured, placement, self.asked, self.journal, quick)
            except ShardwiseError as error:
                self.failed.setdefault(placement, error)  # that of the program itself, not of its micro-batches
                continue
            new.append(arm)
            self.arms.append(arm)
        self._note(variant)
        return new

    def _is_hopeless(self, captured: Captured) -> bool:
        """Is it proven that a variant fits on no mesh?"""
        model = captured.inquiry(self.placed[0], self.asked.roles).model
        bound = peak_bound(model, mesh=finest(self.placed[0].mesh.devices) if self.is_open else None).peak_bytes
        if bound <= model.cost.profile.usable_bytes:
            return False
        self.hopeless[captured.variant] = bound / model.cost.profile.usable_bytes
        self.tried[captured.variant] = variant_tried(captured.variant, peak_bytes=bound)
        return True

    def search(self, short: bool = False) -> None:
        """Searches the arms that could win, the best first: shortly where there are several, then thoroughly. ``short``: not
        thoroughly."""
        if not self.asked.searches or not self.arms:
            return
        if len(self.arms) > 1 or short:
            self._search(self._short, short=True)
        if not short:
            self._search(self._full, short=False)
        for arm in self.arms:
            self._note(arm.captured.variant)

    def _search(self, done: set[Arm], short: bool) -> None:
        left = [arm for arm in self.arms if arm not in done]
        while left:
            self.journal.stage = f"{len(left)} of {len(self.arms)} meshes left" if len(self.arms) > 1 else ""
            best, shared = self.best_arm, self.journal.budget
            assert best is not None
            if self.journal.interrupted or (shared.empty and best.best.ended):
                return
            left.remove(arm := min(left, key=_RANK))
            if arm is best or self._could_win(arm, best.best, done):
                self._search_arm(arm, short)
                done.add(arm)

    def _search_arm(self, arm: Arm, short: bool) -> None:
        budget = self.journal.budget.part(1)
        if short:
            evaluations = math.ceil(budget.evaluations * _SHORT_SHARE / len(self.arms))
            budget = replace(budget, evaluations=evaluations, patience=min(_SHORT, budget.patience))
        before, again = arm.best, arm in self._short
        self._gains[again].note(before, arm.search(budget, quick=short))
        self._short.add(arm)
        self._carry_over(arm)

    def _carry_over(self, arm: Arm) -> None:
        """Finer meshes start from what was found: sharding over two axes is sharding over their product."""
        mesh, decisions = arm.placement.mesh, arm.best.decisions
        for other in self.arms if self.asked.searches_all else ():
            if other.captured is arm.captured and not other.hopeless:
                other.start_from(carried_over(decisions, mesh, other.placement.mesh))

    def _could_win(self, arm: Arm, best: Decided, done: set[Arm]) -> bool:
        if arm.hopeless:
            return False
        usable = arm.inquiry.model.usable_blocks
        share, few = _HOPED[done is self._full]
        few -= 0 if any(gains.time > _ANY for gains in self._gains.values()) else _IN_VAIN
        is_far = self.best_arm is not None and self.best_arm.scaling > _FAR
        least = share if len(done) < few and self.is_open and is_far else 0.0
        hoped = (self._gains[arm in self._short].applied(cost, least) for _, cost in arm.states())
        return any(best.goal.rank(cost, usable) < best.rank for cost in hoped)

    # Variants.

    def _in_turn(self, others: Sequence[Variant]) -> list[list[Variant]]:
        """Further variants in the order in which they are looked at. On a given mesh rematerialized ones come last if
        micro-batches are expected to be faster than what is computed again lets them be."""
        rest = [v for v in others if v.remat is not True]
        again = [v for v in others if v.remat is True]
        counts = {v.microbatches for v in rest}
        if self.is_open or not again or counts <= {1} or self._limit_ps() < math.inf or self.asked.search.goal.memory:
            return [list(others)]
        as_is = [arm for arm in self.arms if arm.captured.variant == AS_IS] or self.look(AS_IS, self.placed[:1], True)
        for arm in as_is:
            every = (c for gathers in (False, True) for c in arm.candidates(math.inf, gathers))
            expected = min((c.in_parts_ps for c in every if c.microbatches in counts), default=math.inf)
            if expected < min(cost.time_ps for _, cost in arm.states()) + again_ps(self.variants, arm):
                return [rest, again]
        return [list(others)]

    def vary(self, others: Sequence[Variant]) -> None:
        """Looks at further variants, with and without remat, as long as one could be faster than what fits."""
        like = [arm for arm in self.arms if any(arm.captured.variant.offload == other.offload for other in others)]
        like = [arm for arm in like if arm.captured.variant.microbatches == 1] or like
        last: dict[bool | str, list[Arm]] = {False: like}  # the arms of the variant that was looked at last
        stopped: set[bool | str] = set()
        for variant in others:
            if self.asked.searches and any(arm.captured.variant not in self.hopeless for arm in self.arms):
                self._search(self._short, short=True)  # what fits already is the limit for further variants
            remat = variant.remat
            if not remat and not variant.offload and not last[False] and self._limit_ps() < math.inf:
                last[False] = self.look(AS_IS, self._best_meshes()[:1], anyway=True)
            arms = last.get(remat) or last.get(GATHERS) or last[False]
            if remat in stopped or variant.microbatches < self._needed(variant, last.get(remat, [])):
                continue
            placed = self._promising(arms, remat) if arms else self._best_meshes()
            near = self._near_best(arms) if not placed and variant.microbatches > 2 else []
            try:
                looked = self.look(variant, placed or near) if placed or near else []
            except VariantError as error:
                if remat != GATHERS:  # it is only for programs with unrolled layers
                    self.tried[variant] = variant_tried(variant, why=str(error))
                looked, placed, near = [], [], []
            if not placed and not near:
                stopped.add(remat)
            elif looked:
                last[remat] = looked
            for arm in looked if near else ():
                arm.search(Budget(evaluations=0), quick=False)  # all named strategies
            if self.journal.interrupted:
                return

    def pipe(self, pipelines: Sequence[Variant]) -> None:
        """Looks at pipelines, with more and more micro-batches as long as a look gets better, and searches the best."""
        last = {(arm.captured.variant.stages, arm.captured.variant.remat): arm.best.rank for arm in self.arms}
        stopped: set[tuple[int, bool | str]] = set()
        for variant in pipelines:
            kind = variant.stages, variant.remat
            able = None if self.asked.wanted.piped else [p for p in self.placed if variant.stages in outer_sizes(p)]
            placed = self._best_meshes(able)
            if kind in stopped or not placed or self.journal.interrupted:
                continue
            try:
                looked = self.look(variant, placed)
            except VariantError as error:
                self.tried[variant] = variant_tried(variant, why=str(error))
                stopped.add(kind)
                continue
            ranks = [arm.best.rank for arm in looked]
            if ranks and kind in last and min(ranks) >= last[kind]:
                stopped.add(kind)
            elif ranks:
                last[kind] = min(ranks)
        new = set(self.arms) - self._short
        piped = [arm for arm in self.arms if arm in new and arm.captured.variant.stages > 1 and not arm.hopeless]
        if piped and self.asked.searches and not self.journal.interrupted:
            self._search_arm(min(piped, key=_RANK), short=True)

    def _best_meshes(self, among: Sequence[Placement] | None = None) -> list[Placement]:
        best = dict.fromkeys(arm.placement for arm in sorted(self.arms, key=_RANK))
        chosen = [p for p in best if among is None or p in among]
        return chosen[:_MOST_MESHES] or list(self.placed if among is None else among)

    def _limit_ps(self) -> float:
        """The time that another variant has to beat; infinite as long as nothing fits."""
        best = self.best_arm
        return best.best.total.time_ps * (1 - _LITTLE) if best and best.best.fits else math.inf

    def _near_best(self, arms: Sequence[Arm]) -> list[Placement]:
        """The best meshes if one of some arms is near the best of all and computes less than with fewer parts: more parts than
        are needed are sometimes faster, as what fits into on-chip memory takes less time."""
        limit = (1 + _NEAR) * self._limit_ps()
        near = [arm for arm in arms if arm.best.fits and arm.best.total.time_ps < limit]
        return self._best_meshes() if any(map(self._computes_less, near)) else []

    def _computes_less(self, arm: Arm) -> bool:
        """Is the compute of an arm's best shorter than all that was seen with fewer micro-batches on its mesh?"""

        def is_fewer(other: Variant, than: Variant) -> bool:
            return other.microbatches < than.microbatches and (other.remat is True) == (than.remat is True)

        same = [a for a in self.arms if a.placement == arm.placement]
        fewer = [a for a in same if is_fewer(a.captured.variant, arm.captured.variant)]
        least = min((cost.compute_ps for a in fewer for _, cost in a.states()), default=math.inf)
        return arm.best.total.compute_ps < least * (1 - _LITTLE)

    def _needed(self, variant: Variant, arms: Sequence[Arm]) -> float:
        """The fewest micro-batches in which a state could fit that is faster than the best so far."""
        # The bound does not count copies of parameters.
        bounded = (False, GATHERS) if variant.remat == GATHERS else (variant.remat,)
        same = [v for v in self.hopeless if v.remat in bounded and v.offload == variant.offload]
        counts = [v.microbatches * self.hopeless[v] for v in same]
        limit = (1 + _NEAR) * self._limit_ps()
        parts = [c.microbatches for arm in arms for c in arm.candidates(limit) if c.in_parts_ps < limit]
        return max([*counts, min(parts, default=0)])

    def _promising(self, arms: Sequence[Arm], remat: bool | str) -> list[Placement]:
        """The meshes of some arms that could be the fastest in micro-batches, or rematerialized if they are not yet, a few."""
        if self.asked.search.goal.memory:  # as long as the last variant needed less memory than those before it
            return self._best_meshes() if self.best_arm in arms else []
        fastest: dict[Placement, float] = {}
        limit = (1 + _NEAR) * self._limit_ps()
        for arm in arms:
            gathers = remat == GATHERS != arm.captured.variant.remat
            same = arm.captured.variant.remat == remat or gathers  # gathering again saves memory, not time
            found: list[float] = [c.in_parts_ps if same else c.time_ps for c in arm.candidates(limit, gathers)]
            if remat is True and not same and (again := again_ps(self.variants, arm)):
                # What fits is faster if it takes longer to store than to compute again.
                found += [cost.time_ps - stored for _, cost in arm.states() if (stored := arm.stored_ps(cost))]
                found = [time + again for time in found]
            time = min(found, default=limit)
            if time < limit:
                fastest[arm.placement] = min(time, fastest.get(arm.placement, time))
        return sorted(fastest, key=fastest.__getitem__)[:_MOST_MESHES]

    def _note(self, variant: Variant) -> None:
        """Notes the best that was found for a variant, or that it is proven not to fit on the given mesh, split or not."""
        arms = [arm for arm in self.arms if arm.captured.variant == variant]
        if not arms or variant in self.hopeless:
            return
        everywhere = {arm.placement for arm in arms}.union(self.failed).issuperset(self.placed)
        if not self.is_open and everywhere and all(arm.hopeless for arm in arms):
            self.tried[variant] = variant_tried(variant, peak_bytes=min(arm.least_bytes for arm in arms))
            return
        self.tried[variant] = variant_tried(variant, min(arms, key=_RANK).best)

    # The result.

    def least_bytes(self, placement: Placement) -> int | None:
        """The memory that every plan on a mesh needs at least, in all variants that were asked for; None if it is not proven
        that none fits. What proves it of a variant proves it also where parameters are gathered again."""
        arms = [arm for arm in self.arms if arm.placement == placement and arm.hopeless]
        least = {variant: int(share * arm.usable_bytes) for arm in arms for variant, share in self.hopeless.items()}
        least |= {arm.captured.variant: arm.least_bytes for arm in arms}
        possible = [v for v in self.every if v not in self.tried or self.tried[v].peak_bytes is not None]
        every = [v if v in least else replace(v, remat=v.remat is True) for v in possible]
        return min((least[v] for v in every), default=None) if all(v in least for v in every) else None

    def outcome(self, arm: Arm, best: Decided) -> Outcome:
        """What is planned with decisions on an arm: the winner's, or those of a finalist."""
        if self.is_open and not self.journal.interrupted:
            best = best_placement(arm.captured, self.asked, best)
        placement = best.inquiry.cost.placement
        mesh = placement.mesh
        best = replace(best, inquiry=best.inquiry.beside(self._rivals(arm, placement)))
        by_name = self.asked.mesh is not None or not self.asked.searches_all
        if self.is_open and not by_name and not any(isinstance(d, Pin) for d in best.decisions):
            names = carried_names(best.inquiry.context, best.decisions)
            inquiry, decisions = best.inquiry.renamed(best.decisions, names)
            best = replace(best, inquiry=inquiry, decisions=decisions)
        elif not self.is_open and self.asked.searches_all:
            best = suited(best)
        settled = best.inquiry.settle(best.decisions)
        tried = tuple(self.tried.values()) if self.asked.wanted.open or len(self.tried) > 1 else ()
        log = search_log(self, best, mesh) if self.asked.searches or self.is_open else None
        return Outcome(arm.captured, best, settled, log, tried)

    def _rivals(self, winner: Arm, placement: Placement) -> Iterator[Rival]:
        """The other variants on the winner's mesh that were looked at."""
        for arm in self.arms:
            if arm.placement == winner.placement and arm is not winner and not arm.hopeless:
                yield Rival(arm.captured.variant, arm.captured.inquiry(placement, self.asked.roles), arm.quick)

    def _winner(self) -> Arm:
        """The best arm; one on the mesh as it was given, if a split axis gains next to nothing."""
        arm, given = self.best_arm, self.placed[0]
        assert arm is not None
        if self.asked.search.goal.memory and arm.best.fits:
            arm = self._fastest_of_smallest(arm)
        if not self.is_open and arm.placement != given:
            same = [a for a in self.arms if a.placement == given and a.best.rank[0] == arm.best.rank[0]]
            plain = min(same, key=_RANK, default=arm)
            slower = self.asked.search.goal.memory and plain.best.total.time_ps * (1 - _LITTLE) > arm.best.total.time_ps
            if plain.best.rank[1] * (1 - _LITTLE) <= arm.best.rank[1] and not slower:
                return plain
        return arm

    def _fastest_of_smallest(self, best: Arm) -> Arm:
        """The fastest of the arms whose peaks equal the smallest."""
        usable = best.inquiry.model.usable_blocks
        most = self.asked.search.goal.most_blocks((arm.best.total for arm in self.arms), usable)
        small = [arm for arm in self.arms if not arm.best.rank[0] and arm.best.total.peak_blocks <= most]
        return min(small, key=lambda arm: arm.best.total.time_ps, default=best)
