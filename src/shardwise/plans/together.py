"""Plans of several programs with one layout of the arrays that they share (``shardwise.plan_together``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwise.ir.program import Spec
from shardwise.plans.plan import Plan


@dataclass(frozen=True, repr=False)
class Together(Mapping[str, Plan]):
    """The plans by program. ``alone`` has the plan that each program would have without the others, which may be on another
    mesh; ``weights`` say how often each runs, and ``shared`` has the spec of each shared array."""

    plans: Mapping[str, Plan]
    alone: Mapping[str, Plan]
    weights: Mapping[str, float]
    shared: Mapping[str, Spec]

    def __getitem__(self, name: str) -> Plan:
        return self.plans[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def time_s(self) -> float:
        """The weighted sum of the predicted step times."""
        return self._weighted(self.plans)

    @property
    def alone_s(self) -> float:
        """The weighted sum if each program had its best plan, without the time to move arrays between layouts."""
        return self._weighted(self.alone)

    def _weighted(self, plans: Mapping[str, Plan]) -> float:
        return sum(self.weights[name] * plan.predicted.time_s for name, plan in plans.items())

    def __repr__(self) -> str:
        from shardwise.report.together_text import together_page

        return together_page(self).text()
