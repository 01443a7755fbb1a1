"""What ``shardwise.tune`` found out about a plan and its rivals: compiled or measured figures, beside the predicted ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.hardware.mesh import MeshAxes


@dataclass(frozen=True, slots=True)
class CompiledMoves:
    """Collectives of a compiled program of one kind over the same axes, which are none where the groups are no product of mesh
    axes: their number, and bytes of one device in a step."""

    kind: str
    axes: tuple[str, ...]
    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on a plan. ``refused`` says why it cannot be used (memory, a crash of the compiler, a time-out). Without a
    time and not refused, it was left out, and ``detail`` says why."""

    time_s: float | None = None
    peak_bytes: int | None = None
    collectives: tuple[CompiledMoves, ...] = ()
    refused: str = ""
    detail: str = ""
    compute_s: float | None = None

    @property
    def usable(self) -> bool:
        return self.time_s is not None and not self.refused


@dataclass(frozen=True, slots=True)
class Tried:
    """A finalist: ``name`` is ``found`` or that of a named strategy; predicted figures and the verdict."""

    name: str
    mesh: MeshAxes
    variant: str
    predicted_s: float
    predicted_bytes: int
    judged: Judged
    compiler_options: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The finalist in a few words."""
        variant = "" if self.variant == "as it is" else f", {self.variant}"
        options = "".join(f", {name}={value}" for name, value in self.compiler_options.items())
        return f"{self.name} on {self.mesh}{variant}{options}"


@dataclass(frozen=True, slots=True)
class Correction:
    """What the judge found over what was predicted, for this program: the factors of compute time and of peak memory."""

    compute: float = 1.0
    memory: float = 1.0


@dataclass(frozen=True, slots=True)
class Evidence:
    """The finalists in the order in which they were judged, the number of the chosen one, what judged them, and by what factors
    predictions were corrected before the last round of finalists was chosen."""

    judge: str
    tried: tuple[Tried, ...]
    chosen: int
    correction: Correction = field(default_factory=Correction)

    @property
    def judged(self) -> Judged:
        """The verdict on the plan itself."""
        return self.tried[self.chosen].judged
