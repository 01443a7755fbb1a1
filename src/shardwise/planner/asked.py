"""What a person asked for, and the meshes that it leaves open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.capture.trace import JitOptions
from shardwise.errors import MeshError
from shardwise.hardware.layout import Placement
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import Topology
from shardwise.hardware.topology import topology as topology_of
from shardwise.ir.program import Program
from shardwise.planner.mesh import OpenMesh, meshes, placement_of
from shardwise.search.searcher import Options
from shardwise.tactics.auto import Auto
from shardwise.tactics.roles import Roles, RolesLike
from shardwise.tactics.tactic import Tactic
from shardwise.tactics.text import TacticsLike, as_tactics
from shardwise.transforms.variants import Wanted


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of ``shardwise.plan``. ``roles`` are completed by the planner from the program."""

    mesh: Any
    topology: str | Topology | Placement | None
    tactics: tuple[Tactic, ...]
    pins: Mapping[str, Any] | None
    roles: Roles
    search: Options
    allow_infeasible: bool
    jit: JitOptions
    wanted: Wanted

    @staticmethod
    def of(tactics: TacticsLike | None, roles: RolesLike | None, **options: Any) -> Asked:
        """No tactics at all, which is not an empty list of them, stands for a search over all axes."""
        paths = {role: (p,) if isinstance(p, str) else tuple(p) for role, p in (roles or {}).items()}
        return Asked(tactics=(Auto(),) if tactics is None else as_tactics(tactics), roles=paths, **options)

    @property
    def searches(self) -> bool:
        """Whether some tactic searches."""
        return any(isinstance(t, Auto) for t in self.tactics)

    @property
    def searches_all(self) -> bool:
        """Whether nothing but a search over all axes decides."""
        return not self.pins and all(isinstance(t, Auto) and not t.axes for t in self.tactics)


def check_manual_axes(program: Program, meshes: Sequence[MeshAxes]) -> None:
    """A ``shard_map`` keeps its own mesh axes: some mesh must have them, with the same sizes."""
    for op in program.ops:
        if op.kind not in ("shard_map.input", "shard_map.output"):
            continue
        used = {axis for axes in op.attribute("axes") for axis in axes}
        sizes = {name: size for name, size in op.attribute("mesh") if name in used}
        names = {name for mesh in meshes for name in mesh.names}
        if missing := sorted(sizes.keys() - names):
            raise MeshError(
                f"the shard_map at {program.source_of(op)} runs over the mesh axes {', '.join(missing)}, and the mesh of the "
                f"plan has {', '.join(sorted(names))}: name them alike, as in mesh={{{missing[0]!r}: {sizes[missing[0]]}}}"
            )
        if not any(sizes.items() <= dict(zip(m.names, m.sizes, strict=True)).items() for m in meshes):
            name = next(iter(sizes))
            raise MeshError(
                f"the shard_map at {program.source_of(op)} has {sizes[name]} devices on {name}, and the plan's mesh has "
                "another number: its body was traced for blocks of that size"
            )


def candidate_meshes(asked: Asked) -> tuple[list[Placement], bool]:
    """The meshes that could be chosen, and whether there is a choice."""
    wanted = OpenMesh.of(asked.mesh)
    if wanted is None or isinstance(asked.topology, Placement):
        return [placement_of(asked.mesh, asked.topology)], False
    if asked.topology is None:
        raise MeshError(
            "say what to plan for: mesh={'data': 4, 'model': 2}, or topology='v5e:4x4', or both"
            if asked.mesh is None
            else f"the mesh {wanted} has open sizes: give a topology as well, such as topology='v5e:4x4', or all sizes"
        )
    topology = topology_of(asked.topology) if isinstance(asked.topology, str) else asked.topology
    return list(meshes(wanted, topology, ordered=not asked.searches_all)), True
