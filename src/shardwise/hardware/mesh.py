"""The mesh in planning: named axes with sizes, in order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from shardwise.errors import MeshError

#: More devices than any machine has; XLA counts them in 32 bits.
_MOST_DEVICES: Final = 2**24


@dataclass(frozen=True, slots=True)
class MeshAxes:
    """Axis names and sizes, major axis first.

    >>> MeshAxes.of({"data": 4, "model": 2}).devices
    8
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(mesh: Any) -> MeshAxes:
        """Returns the axes of a ``jax.sharding.Mesh`` or ``AbstractMesh``, a mapping of sizes, or another ``MeshAxes``."""
        if isinstance(mesh, MeshAxes):
            return mesh
        names, sizes = getattr(mesh, "axis_names", None), getattr(mesh, "axis_sizes", None)
        if names is None or sizes is None:
            if not isinstance(mesh, Mapping):
                raise MeshError(
                    f"a mesh is a jax.sharding.Mesh, an AbstractMesh or a dict such as {{'data': 4, 'model': 2}}; "
                    f"got {type(mesh).__name__}"
                )
            names, sizes = tuple(mesh), tuple(mesh.values())
        problems = [f"axis {n!r} is not a name" for n in names if not isinstance(n, str) or not n]
        problems += [
            f"axis {n!r} has size {s!r}, not a positive whole number"
            for n, s in zip(names, sizes, strict=True)
            if isinstance(s, bool) or not isinstance(s, int) or s < 1
        ]
        if not problems and math.prod(sizes) > _MOST_DEVICES:
            problems.append(f"it has {math.prod(sizes):,} devices, more than {_MOST_DEVICES:,}")
        if problems:
            raise MeshError("the mesh cannot be used: " + "; ".join(problems))
        return MeshAxes(tuple(names), tuple(int(s) for s in sizes))

    def splits(self, other: MeshAxes) -> bool:
        """Are these the axes of another mesh, some of them split in two (``Placement.split``)?

        >>> MeshAxes(("data", "model_0", "model_1"), (4, 2, 8)).splits(MeshAxes(("data", "model"), (4, 16)))
        True
        """
        left = list(self.shape.items())
        for name, size in other.shape.items():
            if left[:1] == [(name, size)]:
                del left[0]
            elif [n for n, _ in left[:2]] == [f"{name}_0", f"{name}_1"] and left[0][1] * left[1][1] == size:
                del left[:2]
            else:
                return False
        return not left

    @property
    def shape(self) -> dict[str, int]:
        """Sizes by name, as ``jax.sharding.Mesh`` has them."""
        return dict(zip(self.names, self.sizes, strict=True))

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    def pieces(self, axes: Iterable[int]) -> int:
        """How many blocks some axes make, by number."""
        return math.prod([self.sizes[a] for a in axes])

    def index(self, axis: str) -> int:
        if axis not in self.names:
            raise MeshError(f"the mesh has no axis {axis!r}; its axes are {', '.join(self.names) or 'none'}")
        return self.names.index(axis)

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in self.shape.items()) or "one device"


def spec_problems(path: str, shape: tuple[int, ...], spec: tuple[tuple[str, ...], ...], mesh: MeshAxes) -> list[str]:
    """Returns the problems of a spec: unknown axes, an axis twice, too many dimensions, sizes that do not divide."""
    name = path or "a constraint"
    problems = []
    if len(spec) > len(shape):
        return [f"{name} has {len(shape)} dimensions, its spec {len(spec)}"]
    used: list[str] = []
    for d, axes in enumerate(spec):
        pieces = 1
        for axis in axes:
            if axis not in mesh.names:
                problems.append(f"{name}[{d}]: the mesh has no axis {axis!r} (it has {', '.join(mesh.names)})")
                continue
            if axis in used:
                problems.append(f"{name}[{d}]: axis {axis!r} is used twice")
            used.append(axis)
            pieces *= mesh.sizes[mesh.index(axis)]
        if shape[d] % pieces:
            problems.append(f"{name}[{d}]: size {shape[d]} does not divide by {pieces} ({', '.join(axes)})")
    return problems
