"""The parts of a plan: plain values."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.predict import Moved

#: Mesh axes by dimension, major first.
Spec = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """An argument or output and its sharding. Dimensions of the same color need the same sharding; -1 stands for no color.
    ``host``: whether it is in the memory of the host."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    donated: bool = False
    colors: tuple[int, ...] = ()
    host: bool = False


@dataclass(frozen=True, slots=True)
class StatedConstraint:
    """A sharding constraint inside the program, at ``source``: value ``number`` as it is ``stored``, operand ``index`` of op
    ``number`` as it is ``used``, or its result as ``computed``."""

    place: str
    number: int
    index: int
    op: str
    source: str
    shape: tuple[int, ...]
    spec: Spec


@dataclass(frozen=True, slots=True)
class PredictedCollective:
    """A collective of the plan: bytes on one device for one execution, and the number of executions in a step."""

    kind: str
    axes: tuple[str, ...]
    nbytes: float
    times: float
    op: str
    source: str
    value: str


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    """The predicted cost after a tactic of a schedule. ``collectives`` are all that the program has then."""

    tactic: str
    time_s: float
    peak_bytes: int
    fits: bool
    collectives: tuple[Moved, ...]
