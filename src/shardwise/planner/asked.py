"""What a person asked for, and the meshes that it leaves open."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from shardwise.capture.trace import JitOptions
from shardwise.errors import MeshError, PlanError
from shardwise.hardware.layout import Placement
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import Topology
from shardwise.hardware.topology import topology as topology_of
from shardwise.ir.program import Program
from shardwise.planner.mesh import OpenMesh, meshes, placement_of
from shardwise.search.goal import FASTEST, Goal
from shardwise.search.searcher import Options
from shardwise.tactics.auto import Auto
from shardwise.tactics.roles import Roles, RolesLike
from shardwise.tactics.strategies import Pipeline
from shardwise.tactics.tactic import Tactic
from shardwise.tactics.text import TacticsLike, as_tactics
from shardwise.transforms.variants import AUTO, Wanted

OBJECTIVES: Final = ("time", "memory", "devices")
_UNITS: Final = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of ``shardwise.plan``. ``roles`` are completed by the planner from the program; ``memory_limit`` is in bytes,
    and ``search`` has the goal of the search. ``at_hand``: no topology was given, and the devices are those of JAX."""

    mesh: Any
    topology: Topology | Placement | None
    tactics: tuple[Tactic, ...]
    roles: Roles
    search: Options
    objective: str = "time"
    step_time_s: float | None = None
    memory_limit: int | None = None
    pins: Mapping[str, Any] | None = None
    allow_infeasible: bool = False
    jit: JitOptions = field(default_factory=JitOptions)
    wanted: Wanted = field(default_factory=Wanted)
    at_hand: bool = False

    @staticmethod
    def of(
        search: Options,
        topology: str | Topology | Placement | None = None,
        tactics: TacticsLike | None = None,
        roles: RolesLike | None = None,
        objective: str = "time",
        step_time_s: float | None = None,
        memory_limit: int | str | None = None,
        **options: Any,
    ) -> Asked:
        """No tactics at all, which is not an empty list of them, stands for a search over all axes."""
        _check_objective(objective, step_time_s)
        paths = {role: (p,) if isinstance(p, str) else tuple(p) for role, p in (roles or {}).items()}
        goal = Goal(True, step_time_s or math.inf) if objective == "memory" else FASTEST
        return Asked(
            topology=topology_of(topology) if isinstance(topology, str) else topology,
            tactics=(Auto(),) if tactics is None else as_tactics(tactics),
            roles=paths,
            search=replace(search, goal=goal),
            objective=objective,
            step_time_s=step_time_s,
            memory_limit=None if memory_limit is None else read_bytes(memory_limit),
            **options,
        )

    @property
    def searches(self) -> bool:
        """Whether some tactic searches."""
        return any(isinstance(t, Auto) for t in self.tactics)

    @property
    def searches_all(self) -> bool:
        """Whether nothing but a search over all axes decides."""
        return not self.pins and all(isinstance(t, Auto) and not t.axes and not t.only for t in self.tactics)


def _check_objective(objective: str, step_time_s: float | None) -> None:
    if objective not in OBJECTIVES:
        raise PlanError(f"objective is one of {', '.join(map(repr, OBJECTIVES))}, not {objective!r}")
    if step_time_s is None:
        return
    is_number = isinstance(step_time_s, int | float) and not isinstance(step_time_s, bool)
    if not is_number or not 0 < step_time_s < math.inf:
        raise PlanError(f"step_time_s is a number of seconds above zero, not {step_time_s!r}")
    if objective == "time":
        raise PlanError(
            "step_time_s is the longest step time for objective='memory' or 'devices'; with objective='time' the plan is the "
            "fastest that is found"
        )


def read_bytes(text: int | str) -> int:
    """Returns a number of bytes.

    >>> read_bytes("12GiB"), read_bytes("1.5 GB"), read_bytes(4096)
    (12884901888, 1500000000, 4096)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", str(text).lower())
    units = _UNITS if isinstance(text, str) else {"": 1}  # 12 in a command is no 12 bytes
    size = int(float(match[1]) * units.get(match[2], 0)) if match else 0
    if size < 1 or isinstance(text, bool):
        raise PlanError(f"memory_limit is a number of bytes, or text such as '12GiB', not {text!r}")
    return size


def with_stages(asked: Asked, placed: Sequence[Placement]) -> Asked:
    """The same with the number of stages, and of micro-batches, that the tactic ``Pipeline`` asks for."""
    pipelines = [t for t in asked.tactics if isinstance(t, Pipeline)]
    if not pipelines:
        return asked
    axes = [name for t in pipelines for name in t.axes]
    sizes = {math.prod(p.mesh.sizes[p.mesh.index(name)] for name in axes or p.mesh.names) for p in placed}
    if len(sizes) > 1:
        raise MeshError(
            f"Pipeline over {', '.join(axes) or 'all axes'}: the number of stages has to be known, give the sizes of these axes"
        )
    (stages,) = sizes
    if asked.wanted.stages not in (None, AUTO, stages):
        raise PlanError(f"pipeline={asked.wanted.stages}, but the axes of Pipeline have {stages} devices")
    parts = next((t.microbatches for t in pipelines if t.microbatches), asked.wanted.microbatches)
    circular = max(t.circular for t in pipelines)
    return replace(asked, wanted=replace(asked.wanted, stages=stages, microbatches=parts, circular=circular))


def with_manual_axes(program: Program, placed: Sequence[Placement]) -> list[Placement]:
    """The meshes that have the axes of all ``shard_map``s of a program, with the sizes for which their bodies were traced: sums
    and sizes over axes may be in a body whose arrays are not sharded over them."""
    for op in program.ops:
        if op.kind not in ("shard_map.input", "shard_map.output"):
            continue
        sizes = {name: size for name, size in op.attribute("mesh") if size > 1}
        names = {name for p in placed for name in p.mesh.names}
        if missing := sorted(sizes.keys() - names):
            raise MeshError(
                f"the shard_map at {program.source_of(op)} runs over the mesh axes {', '.join(missing)}, and the mesh of the "
                f"plan has {', '.join(sorted(names))}: name them alike, as in mesh={sizes}"
            )
        placed = [p for p in placed if sizes.items() <= p.mesh.shape.items()]
        if not placed:
            raise MeshError(
                f"the shard_map at {program.source_of(op)} has the axes {MeshAxes.of(sizes)}, and the plan's mesh has other "
                "sizes: its body was traced for blocks of that size"
            )
    return list(placed)


def candidate_meshes(asked: Asked) -> tuple[list[Placement], bool]:
    """The meshes that could be chosen, and whether there is a choice."""
    wanted = OpenMesh.of(asked.mesh)
    is_open = wanted is not None and not isinstance(asked.topology, Placement)
    if wanted is None or isinstance(asked.topology, Placement):
        placed = [placement_of(asked.mesh, asked.topology)]
    else:
        assert asked.topology is not None, "an open mesh is one of a topology"
        placed = list(meshes(wanted, asked.topology, ordered=not asked.searches_all))
    if (limit := asked.memory_limit) is None:
        return placed, is_open
    profile = placed[0].topology.profile
    if limit > profile.memory_bytes:
        raise PlanError(
            f"memory_limit is {limit:,} bytes, which is more than the {profile.memory_bytes:,} of {profile.name}"
        )
    return [p.limited(limit) for p in placed], is_open
