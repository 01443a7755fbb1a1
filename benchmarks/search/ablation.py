"""The search without parts of what it rests on, to see what each is worth.

Every ablation is a problem like any other, searched by the same methods for as many evaluations:

- *no groups*: every color is decided alone, with bits of its own;
- *no resolution*: where two dimensions of one color meet, neither is sharded;
- *no keep*: what is sharded is sharded at rest, too;
- *automap*: the decisions of Automap (``shardwise.search.automap``), without resolution. A dimension of one argument is decided
  at a time, or one argument is kept.

Costs of states without resolution are those of a program in which conflicts are left whole. Their decisions, lowered under the
whole analysis, would take side 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from shardwise.cost.model import CostModel
from shardwise.dims.analysis import Analysis
from shardwise.dims.groups import find_groups
from shardwise.lowering.decisions import Decision
from shardwise.lowering.local_cost import HardwareCost
from shardwise.search.automap import Automap
from shardwise.search.problem import Problem


@dataclass(frozen=True, slots=True)
class Ablation:
    """What is left in."""

    groups: bool = True
    resolution: bool = True
    keeps: bool = True
    kind: type[Problem] = Problem

    def problem(
        self,
        analysis: Analysis,
        cost: HardwareCost,
        base: Sequence[Decision] = (),
        axes: Sequence[str] | None = None,
    ) -> Problem:
        """The problem with what is left in."""
        if not self.resolution:
            analysis = unresolved(analysis)
        if not self.groups:
            analysis = ungrouped(analysis)
        return self.kind(CostModel.of(analysis, cost), base, axes, keeps=self.keeps)


ABLATIONS: Final[dict[str, Ablation]] = {
    "whole": Ablation(),
    "no groups": Ablation(groups=False),
    "no resolution": Ablation(resolution=False),
    "no keep": Ablation(keeps=False),
    "automap": Ablation(resolution=False, kind=Automap),
}


def ungrouped(analysis: Analysis) -> Analysis:
    """Every color and every compatibility set is a group of its own."""
    alone = find_groups(analysis.program, analysis.names, analysis.conflict_table, grouping=False)
    return replace(analysis, group_table=alone)


def unresolved(analysis: Analysis) -> Analysis:
    """No compatibility set can be resolved: dimensions in conflict stay whole."""
    table = analysis.conflict_table
    return replace(analysis, conflict_table=replace(table, consistent=np.zeros_like(table.consistent)))
