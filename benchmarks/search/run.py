"""``python -m benchmarks.search.run``: what the search finds, beside the best of the named strategies that it starts from.

A case is a program of the zoo at full size on a topology, with a mesh of two axes that lies on its links. Where nothing fits
the devices, neither the search's plan nor any strategy, the next of ``variants`` is tried: layers rematerialized, then ever
smaller batches. A line of ``results.jsonl`` is one case; known cases are not run again, so that a run can be stopped and gone
on with. ``--only TEXT`` for some of them, ``--again`` to run known ones anew, ``--processes N`` for N at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.search.parallel import in_processes

RESULTS: Final = Path(__file__).parent / "results.jsonl"
MESHES: Final = {
    "v3:2x4": (4, 4),
    "v5e:4x4": (4, 4),
    "v5p:4x4x4": (16, 4),
    "a100:8": (2, 4),
    "h100:8x4": (4, 8),
}
PROGRAMS: Final = (
    "mlp:full", "gns:full", "itx:decode", "itx:prefill", "itx:step", "dlrm:full", "t2b:2b", "t7b:7b", "gpt:2.6b", "gpt:6.7b",
    "mixtral:8x7b", "llama3:8b", "vit:l16", "vit:h14", "ssm:2.8b", "t5:3b", "t5:11b", "llama3:70b", "gpt:39b", "wresnet:1b",
    "unet:full", "wresnet:4b", "llama3:405b",
)  # fmt: skip
_SMALLEST_BATCH: Final = 4


@dataclass(frozen=True, slots=True)
class Record:
    """A case: what the search found, and the best expert. Times in seconds, memory in bytes.

    ``least_s`` is what the program computes on one device, over the number of devices: no plan takes less."""

    program: str
    topology: str
    mesh: tuple[int, ...]
    options: dict[str, Any]
    actions: int
    found_s: float
    found_bytes: int
    found_fits: bool
    found: list[str]
    evaluations: int
    search_s: float
    ended: str
    expert: str
    expert_s: float
    expert_fits: bool
    usable_bytes: int
    least_s: float

    @property
    def arithmetic(self) -> bool:
        """Is the best expert so close to the least that nothing could be faster by a tenth?"""
        return self.expert_fits and self.expert_s <= 1.1 * self.least_s

    @property
    def ratio(self) -> float:
        """The expert's time over that of the found plan; more than 1 is better than the expert."""
        return self.expert_s / self.found_s


def variants(name: str, config: str) -> Iterator[dict[str, Any]]:
    """Options of a program, from full size to smaller steps."""
    from shardwise import zoo

    yield {}
    batch = _batch(zoo.load(name, config))
    remat: dict[str, Any] = {}
    try:
        zoo.load(name, config, remat=True)
        remat = {"remat": True}
        yield remat
    except zoo.ZooError:
        pass
    while batch > _SMALLEST_BATCH:
        batch //= 4
        try:
            zoo.load(name, config, batch=batch, **remat)
        except zoo.ZooError:
            return
        yield {**remat, "batch": batch}


def _batch(program: Any) -> int:
    import jax

    leaves = jax.tree.leaves(program.args[program.roles.index("batch")])
    return max((leaf.shape[0] for leaf in leaves if leaf.shape), default=1)


def run(case: tuple[str, str], evaluations: int, seed: int) -> Record:
    """A program on a topology, in the first variant that something fits."""
    target, topology = case
    name, _, config = target.partition(":")
    record = None
    for options in variants(name, config):
        record = _run(target, options, topology, evaluations, seed)
        if record.found_fits or record.expert_fits:
            break
    assert record is not None
    return record


def _run(target: str, options: dict[str, Any], topology: str, evaluations: int, seed: int) -> Record:
    from shardwise import zoo
    from shardwise.capture.lower import lower
    from shardwise.capture.trace import JitOptions, trace
    from shardwise.cost.model import CostModel
    from shardwise.dims.analysis import analyze_program
    from shardwise.hardware.layout import place
    from shardwise.hardware.mesh import MeshAxes
    from shardwise.hardware.topology import topology as topology_of
    from shardwise.lowering.local_cost import HardwareCost
    from shardwise.planner.inquiry import described
    from shardwise.search.mcts import mcts
    from shardwise.search.problem import Problem
    from shardwise.search.run import Budget
    from shardwise.tactics.baselines import Combinations
    from shardwise.tactics.tactic import Context

    name, _, config = target.partition(":")
    program = zoo.load(name, config, **options)
    start = time.perf_counter()
    traced = trace(program.fn, program.args, {}, JitOptions(donate_argnums=program.donate_argnums))
    analysis = analyze_program(lower(traced))
    sizes = MESHES[topology]
    mesh = MeshAxes.of(dict(zip(("a", "b"), sizes, strict=True)))
    cost = HardwareCost(place(mesh, topology_of(topology)))
    model = CostModel.of(analysis, cost)
    roles: dict[str, tuple[str, ...]] = {role: (role,) for role in program.roles if role in ("batch", "params")}
    combinations = Combinations(Context(analysis, mesh, cost, roles), mesh.names)
    problem = Problem(model, extra=combinations.decisions)
    problem.start_from(combinations.seeds(problem, quick=False))
    found = mcts(problem, Budget(math.inf, evaluations), seed)
    decisions = problem.decisions(found.best.state)
    final = found.best.cost
    search_s = time.perf_counter() - start
    expert = min((b for b in combinations.costed(problem) if b.applies), key=lambda b: b.rank)
    assert expert.cost is not None
    return Record(
        target,
        topology,
        sizes,
        options,
        len(problem.actions),
        final.time_s,
        final.peak_bytes,
        problem.fits(final),
        [str(described(analysis, d)) for d in decisions],
        found.evaluations,
        search_s,
        found.ended.name.lower(),
        expert.name,
        expert.cost.time_s,
        expert.fits,
        problem.model.usable_blocks * 512,
        problem.cost(()).compute_ps * 1e-12 / mesh.devices,
    )


def load(path: Path = RESULTS) -> list[Record]:
    lines = path.read_text().splitlines() if path.exists() else []
    rows = (json.loads(line) for line in lines if line.strip())
    return [Record(**(row | {"mesh": tuple(row["mesh"])})) for row in rows]


def save(records: list[Record], path: Path = RESULTS) -> None:
    order = {program: k for k, program in enumerate(PROGRAMS)}
    records = sorted(records, key=lambda r: (order.get(r.program, len(order)), list(MESHES).index(r.topology)))
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(asdict(r)) + "\n" for r in records))
    new.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose 'program topology' has this text")
    parser.add_argument("--again", action="store_true", help="run cases that are known already")
    parser.add_argument(
        "--evaluations", type=int, default=1000, help="the budget of one search: the same on any machine"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    known = {(r.program, r.topology): r for r in load(given.results)}
    cases = [
        (program, topology)
        for program in reversed(PROGRAMS)  # the longest first
        for topology in MESHES
        if given.only in f"{program} {topology}" and ((program, topology) not in known or given.again)
    ]
    one = partial(run, evaluations=given.evaluations, seed=given.seed)
    for case, record in in_processes(one, cases, given.processes):
        known[case] = record
        save(list(known.values()), given.results)
        fit = f"{'fits' if record.found_fits else 'OVER'}, expert {'fits' if record.expert_fits else 'OVER'}"
        times = f"{record.found_s * 1e3:9.2f} ms against {record.expert_s * 1e3:9.2f} ({record.expert})"
        print(f"{case[0]:14} {case[1]:10} {record.options} {fit}: {times}, x{record.ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
