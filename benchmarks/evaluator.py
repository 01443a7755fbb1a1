"""``make bench-evaluator``: how fast states are evaluated, and that tables agree with the specification.

Random states: up to eight decisions, groups of the analysis on random axes with random sides, in random order, in batches.
*New* is the rate while the tables are still empty, *later* that after ``Target.before`` other states, *unseen* that of states
then that were not drawn before (short ones recur), *known* the rate for states whose rows are there. Seconds are those of the
process. The table is printed and written to docs/benchmarks/evaluator.md.
"""

from __future__ import annotations

import itertools
import os
import platform
import random
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from shardwise import __version__, zoo
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.cost.model import CostModel
from shardwise.dims.analysis import analyze_program
from shardwise.evaluator.evaluator import Evaluator
from shardwise.evaluator.locality import shard, space_of
from shardwise.hardware.layout import place
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import topology
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.structure import Structure

TABLE = Path(__file__).parent.parent / "docs" / "benchmarks" / "evaluator.md"
BATCH, DEPTH, SIDES = 4096, 8, 4
#: States of which the rate is measured while the tables are empty.
FIRST = 1024


@dataclass(frozen=True)
class Target:
    """A program of the zoo, the bars, and how many states are evaluated before the rate of others is measured."""

    name: str
    config: str | None
    options: tuple[tuple[str, bool], ...]
    build_bar_s: float | None
    rate_bar: float | None
    before: int

    @property
    def label(self) -> str:
        words = [self.name, *([self.config] if self.config else [])]
        return ":".join(words) + (", unrolled" if ("scan", False) in self.options else "")


TARGETS = (
    Target("t7b", None, (), 1.0, 20_000, 1 << 18),
    Target("mixtral", None, (), None, None, 1 << 16),
    Target("llama3", "405b", (), None, None, 1 << 16),
    Target("gpt", "39b", (("scan", False),), 10.0, 2_000, 1 << 14),
)


def build(target: Target) -> tuple[Evaluator, float]:
    """The evaluator on v5e:4x4, and the seconds that building it took, tracing and analysis not counted."""
    program = zoo.load(target.name, target.config, **dict(target.options))
    options = JitOptions(donate_argnums=program.donate_argnums)
    analysis = analyze_program(lower(trace(program.fn, program.args, {}, options)))
    mesh = MeshAxes.of({"data": 4, "model": 4})
    start = time.process_time()
    structure = Structure.of(analysis)
    model = CostModel(structure, HardwareCost(place(mesh, topology("v5e:4x4"))))
    space = space_of(structure, mesh)
    sides = [list(itertools.islice(itertools.product((0, 1), repeat=len(bits)), SIDES)) for bits in space.bits]
    actions = [shard(space, u, axis, s) for u in range(len(space.units)) for axis in mesh.names for s in sides[u]]
    return Evaluator(model, space, actions), time.process_time() - start


def random_states(evaluator: Evaluator, count: int, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        taken: dict[int, int] = {}
        for n in rng.sample(range(len(evaluator.actions)), min(rng.randint(0, DEPTH), len(evaluator.actions))):
            taken.setdefault(evaluator.actions[n].slot, n)
        found.append(tuple(taken.values()))
    return found


def rate(evaluator: Evaluator, states: list[tuple[int, ...]], seconds: float = 0.0) -> float:
    """States a second, in batches; over and over for at least so many seconds."""
    start, done = time.process_time(), 0
    while not done or time.process_time() - start < seconds:
        for k in range(0, len(states), BATCH):
            evaluator.evaluate(states[k : k + BATCH])
        done += len(states)
    return done / (time.process_time() - start)


def measure(target: Target, checks: int = 3) -> tuple[str, bool]:
    """A row of the table, and whether the bars hold."""
    evaluator, build_s = build(target)
    first = random_states(evaluator, FIRST, 0)
    new, seen = rate(evaluator, first), set(first)
    for seed in range(1, 1 + target.before // BATCH):
        states = random_states(evaluator, BATCH, seed)
        evaluator.evaluate(states)
        seen.update(states)
    others = random_states(evaluator, 2 * BATCH, 1 << 20)
    fresh = [state for state in random_states(evaluator, 2 * BATCH, 1 << 21) if state not in seen]
    later, known = rate(evaluator, others), rate(evaluator, others, 3.0)
    fresh = list(dict.fromkeys(state for state in fresh if state not in set(others)))
    unseen = rate(evaluator, fresh)
    states = first[:checks] + fresh[:checks]
    costs = evaluator.evaluate(states)
    start = time.process_time()
    equal = all(costs[k] == evaluator.model.evaluate(evaluator.lowered(state)) for k, state in enumerate(states))
    plain_ms = (time.process_time() - start) / len(states) * 1e3
    well = equal and build_s <= (target.build_bar_s or 1e9) and later >= (target.rate_bar or 0)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    bars = f"{target.build_bar_s:g} s, {target.rate_bar:,.0f}" if target.build_bar_s and target.rate_bar else ""
    ops, shape = len(evaluator.model.structure.program.ops), evaluator.shape()
    row = (
        f"| {target.label} | {ops:,} | {shape} | {build_s:.2f} s | {new:,.0f} | {target.before:,} | {later:,.0f} "
        f"| {unseen:,.0f} | {known:,.0f} | {plain_ms:,.0f} ms | {'yes' if equal else 'NO'} | {memory:.1f} GiB | {bars} |"
    )
    print(row, flush=True)
    return row, well


def main() -> int:
    rows, well = zip(*(measure(target) for target in TARGETS), strict=True)
    where = f"{platform.machine()}, {os.cpu_count()} cores (one is used), Python {platform.python_version()}"
    text = f"""# Evaluating states

`make bench-evaluator` on {where}, Shardwise {__version__}.
v5e:4x4, mesh 4 × 4; random states of up to {DEPTH} decisions, in batches of {BATCH:,}. Columns from *new* to *known* are
states a second. *New*: the first {FIRST:,}. *Later*: of {2 * BATCH:,} others, after as many as the column before says; the
bars are held against it. *Unseen*: then, of those only that were never drawn before: many short states were. *Known*:
states whose rows are there. *Plain*: one state by the specification. *Equal*: to the picosecond and to the block. What
limits *known* is the adding up of memory curves (points × tables numbers a state); what limits *new* is Python, which works
out what is found nowhere; what limits *later* are the levels of ops that rest on each other, each some calls of NumPy, and
Python for what is still new. A search evaluates a few thousand states, 16 at a time: it goes at the rate of *new*. An
exhaustive one comes to *later*. Seconds are CPU seconds.

| program | ops | tables, classes, points | build | new | after | later | unseen | known | plain | equal | process | bars |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""
    TABLE.write_text(text + "\n".join(rows) + "\n")
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
