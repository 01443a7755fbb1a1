"""Decisions, and the state that an ordered list of them makes (design, section 6). ``what`` describes a decision for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from shardwise.errors import DecisionError
from shardwise.hardware.mesh import MeshAxes


@dataclass(frozen=True, slots=True)
class Shard:
    """These colors are sharded on a mesh axis. ``sides``: for bits of the analysis, which side keeps the axis, 0 or 1.
    ``padded``: dimensions of inner values that the axis does not divide are padded (``shardwise.lowering.padding``)."""

    colors: tuple[int, ...]
    axis: str
    sides: tuple[tuple[int, int], ...] = ()
    what: str = field(default="", compare=False)
    padded: bool = False

    def __str__(self) -> str:
        return f"{self.what or _numbered('color', self.colors) + ' padded' * self.padded} over {self.axis}"


@dataclass(frozen=True, slots=True)
class Keep:
    """These values are stored replicated on an axis, although their color is sharded on it; ``why``: the planner's reason."""

    values: tuple[int, ...]
    axis: str
    what: str = field(default="", compare=False)
    why: str = field(default="", compare=False)

    def __str__(self) -> str:
        reason = f": {self.why}" if self.why else ""
        return f"{self.what or _numbered('value', self.values)} replicated on {self.axis}{reason}"


@dataclass(frozen=True, slots=True)
class Pin:
    """A value is stored with these axes by dimension; None is for a dimension that other decisions may shard. ``colors`` are
    those of the dimensions (-1 for none): they get the pinned axes too, so that the rest of the program follows. Without
    colors the rest need not follow, as a search decides."""

    value: int
    spec: tuple[tuple[str, ...] | None, ...]
    colors: tuple[int, ...]
    what: str = field(default="", compare=False)

    def __str__(self) -> str:
        spec = ", ".join("open" if axes is None else "·".join(axes) or "-" for axes in self.spec)
        return f"{self.what or _numbered('value', (self.value,))} pinned to [{spec}]"


Decision = Shard | Keep | Pin


def _numbered(what: str, numbers: tuple[int, ...]) -> str:
    """
    >>> _numbered("color", (3,)), _numbered("color", (3, 5))
    ('color 3', 'colors 3, 5')
    """
    return f"{what}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


@dataclass(frozen=True)
class State:
    """An ordered list of decisions on a mesh, in the form that the rules read."""

    mesh: MeshAxes
    decisions: tuple[Decision, ...]
    order: tuple[tuple[int, int], ...] = field(init=False)  # (color, axis) in the order given
    given: dict[int, tuple[tuple[int, int], ...]] = field(init=False)  # by color: its places in the order, and the axes
    kept: tuple[frozenset[int], ...] = field(init=False)  # by axis: the values that are replicated on it
    sides: dict[tuple[int, int], int] = field(init=False)  # (bit, axis) -> side
    pinned: dict[int, tuple[tuple[int, ...] | None, ...]] = field(init=False)  # value -> axes by dimension
    padded: frozenset[tuple[int, int]] = field(init=False)  # (color, axis) whose uneven dimensions are padded

    def __post_init__(self) -> None:
        order: dict[tuple[int, int], None] = {}
        kept: list[frozenset[int]] = [frozenset() for _ in self.mesh.names]
        sides: dict[tuple[int, int], int] = {}
        pinned: dict[int, tuple[tuple[int, ...] | None, ...]] = {}
        padded: set[tuple[int, int]] = set()
        for decision in self.decisions:
            if isinstance(decision, Pin):
                spec = tuple(None if axes is None else tuple(map(self.mesh.index, axes)) for axes in decision.spec)
                if pinned.setdefault(decision.value, spec) != spec:
                    raise DecisionError(f"value {decision.value} is pinned to two shardings")
                colored = zip(decision.colors, spec, strict=False)
                order.update(((c, axis), None) for c, axes in colored if c >= 0 for axis in axes or ())
                continue
            axis = self.mesh.index(decision.axis)
            if isinstance(decision, Keep):
                kept[axis] = kept[axis] | _as_set(decision.values) if kept[axis] else _as_set(decision.values)
                continue
            for bit, side in decision.sides:
                if sides.setdefault((bit, axis), side) != side:
                    raise DecisionError(f"bit {bit} is given both sides on axis {decision.axis!r}")
            order.update(((color, axis), None) for color in decision.colors)
            if decision.padded:
                padded.update((color, axis) for color in decision.colors)
        given: dict[int, tuple[tuple[int, int], ...]] = {}
        for rank, (color, axis) in enumerate(order):
            given[color] = (*given.get(color, ()), (rank, axis))
        object.__setattr__(self, "order", tuple(order))
        object.__setattr__(self, "given", given)
        object.__setattr__(self, "kept", tuple(kept))
        object.__setattr__(self, "sides", sides)
        object.__setattr__(self, "pinned", pinned)
        object.__setattr__(self, "padded", frozenset(padded))

    def kept_on(self, value: int) -> frozenset[int]:
        """The axes on which a decision keeps a value replicated."""
        return frozenset([axis for axis, values in enumerate(self.kept) if value in values])

    def axes_of(self, color: int) -> tuple[int, ...]:
        return tuple([axis for _, axis in self.given.get(color, ())])


@lru_cache(maxsize=64)
def _as_set(values: tuple[int, ...]) -> frozenset[int]:
    """The values of a decision, which many states have."""
    return frozenset(values)
