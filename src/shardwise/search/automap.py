"""The decisions of Automap, as a baseline for the search.

Automap (Schaarschmidt et al., 2021; Alabed et al., 2022, within PartIR) searches by MCTS over arguments: an action shards one
dimension of one argument on one axis, and the rest of the program follows by propagation; or it keeps an argument whole
("atomic"); or it infers shardings of the arguments that are left ("infer-rest"). There are no named strategies, no groups of
equal layers, and no resolution of conflicts.

Here a dimension is its color, which is what propagation reaches. "Infer-rest" is the step of ``shardwise.search.rest``, and the
tree is ``shardwise.search.mcts`` with its climbing, without seeds.

Where it deviates: a conflict inside a color, which Automap leaves unsharded, takes its first side, unless the analysis has no
resolutions (``benchmarks/search/ablation.py``). Weak, as Automap is: each layer of an unrolled program is decided separately.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import ClassVar

from shardwise.dims.analysis import Group
from shardwise.dims.groups import find_groups
from shardwise.search.problem import Problem, decided_groups, kept_alone


class Automap(Problem):
    """Decides on the dimensions of arguments one by one."""

    seeded: ClassVar = False

    def _groups(self, only: Collection[int] | None) -> list[Group]:
        analysis = self.analysis
        colors = find_groups(analysis.program, analysis.names, analysis.conflict_table, grouping=False)
        arguments = {a.value for a in analysis.program.arguments} if only is None else only
        alone = decided_groups(replace(analysis, group_table=colors), arguments)
        return [replace(group, bits=()) for group in alone]

    def _keep_sets(self, only: Collection[int] | None) -> tuple[tuple[int, ...], ...]:
        replaced, others = kept_alone(self.analysis, only)
        return (*replaced, *others)
