"""The cost of a collective on the links of its mesh axes: ``time = alpha_s + nbytes * s_per_byte``, exactly linear.

``nbytes`` is the larger side on one device: the result of an all-gather, the operand of a reduce-scatter, either side of the
others; for a halo, the bytes to one neighbor; for a hop, those to the next member of a ring. A collective over mesh axes uses
*runs* of devices (``shardwise.hardware.layout.Run``): rings, lines (a torus axis without wrap-around) and switches, of n
members with one-way rate b and step latency a. N is the product of the members of a tier.

Seconds per byte of one tier:

| kind | ring | line | switch | several runs of a tier |
|---|---|---|---|---|
| all-gather, reduce-scatter | (N−1)/N / 2b | (N−1)/N / b | (N−1)/N / b | rates add: every link works at once |
| all-reduce | twice | twice | twice | a reduce-scatter and an all-gather |
| all-to-all | (n²−[n odd])/8n / b | ⌊n/2⌋⌈n/2⌉/n / b | (n−1)/n / b | the slowest: all move at once |
| collective-permute | max(1, n/8) / b | max(1, n/4) / b | 1 / b | the slowest |
| halo, hop | 1 / b | 1 / b | 1 / b | the slowest |

Derivations. A device of a ring receives (N−1)/N of the result through two links, the end of a line through one. In an
all-to-all each device sends nbytes/n to each other one: on a ring the mean distance n/4 fills 2n directed links evenly; on a
line the middle link carries ⌊n/2⌋⌈n/2⌉ messages. For a permutation it is the mean load of the middle link under a random
permutation, and never less than one shard.

Two tiers: an all-gather goes over the outer tier first, with a shard of the inner one, so an outer tier's bytes are divided
by the members of the tiers inside it; a reduce-scatter goes over the inner tier first. An all-to-all pays every tier in full, a
permutation and a halo the slowest tier.

All of it is divided by the fraction of the links' rate that the kind reaches (``Profile.efficiency``), 1 unless measured.

Where the compiler has no reduce-scatters (``Profile.scatters``, ``_scatters``), one costs as much as an all-reduce.

Latency: once a collective (``Profile.collective_s``) plus, for every run, its steps: ⌊n/2⌋ on a ring, n−1 on a line,
⌈log₂ n⌉ on a switch; twice for an all-reduce; one step for a halo, and for a hop, but on a line its ends are n−1 apart.

Rates that add over several torus axes follow "How to Scale Your Model" (jax-ml.github.io/scaling-book/sharding). Weak:
twisted tori count as plain ones, and collectives that run at the same time do not affect each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from shardwise.errors import HardwareError
from shardwise.hardware.layout import Placement, Run
from shardwise.hardware.profile import COLLECTIVES

KINDS: Final = ("slice", *COLLECTIVES, "hop")
#: Reductions over so few devices can always be scattered.
_FEW: Final = 4


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """A cost that is linear in bytes."""

    alpha_s: float
    s_per_byte: float

    def time_s(self, nbytes: float) -> float:
        return self.alpha_s + nbytes * self.s_per_byte


FREE: Final = AlphaBeta(0.0, 0.0)


def collective(kind: str, axes: Iterable[int | str], placement: Placement) -> AlphaBeta:
    """Returns the cost of a collective over mesh axes, by name or number; a slice, or a group of one device, is free.

    >>> from shardwise.hardware.layout import place
    >>> from shardwise.hardware.topology import topology
    >>> placement = place({"data": 4, "model": 4}, topology("v5e:4x4"))
    >>> f"{collective('all-gather', ['model'], placement).time_s(60e6) * 1e3:.3f} ms"
    '1.004 ms'
    """
    if kind not in KINDS:
        raise HardwareError(f"{kind!r} is no collective; there are {', '.join(KINDS)}")
    runs = placement.runs(axes)
    if kind == "slice" or not runs:
        return FREE
    profile = placement.topology.profile
    if kind == "reduce-scatter" and not (profile.scatters and _scatters(runs, placement)):
        kind = "all-reduce"
    tiers = [list(group) for _, group in itertools.groupby(sorted(runs, key=lambda r: r.tier), key=lambda r: r.tier)]
    alpha_s = profile.collective_s + sum(_latency_s(kind, run) for run in runs)
    return AlphaBeta(alpha_s, _s_per_byte(kind, tiers) / profile.link_share(kind))


def _scatters(runs: tuple[Run, ...], placement: Placement) -> bool:
    """Has the compiler a reduce-scatter over these runs? XLA's TPU compiler has none over all devices of a torus of three
    dimensions, or of two that are equally long (tests/verification/test_tpu.py)."""
    if len(runs) < 2 or any(run.kind == "switch" for run in runs):
        return True
    sizes = [run.size for run in runs]
    return math.prod(sizes) < max(placement.mesh.devices, _FEW + 1) or (len(sizes) == 2 and sizes[0] != sizes[1])


def _s_per_byte(kind: str, tiers: list[list[Run]]) -> float:
    if kind in ("all-gather", "reduce-scatter", "all-reduce"):
        total, inside = 0.0, 1
        for runs in tiers:
            members = math.prod(run.size for run in runs)
            rate = sum(run.bytes_per_s * (2 if run.kind == "ring" else 1) for run in runs)
            total += (members - 1) / members / rate / inside
            inside *= members
        return 2 * total if kind == "all-reduce" else total
    slowest = [max(_load(kind, run) / run.bytes_per_s for run in runs) for runs in tiers]
    return sum(slowest) if kind == "all-to-all" else max(slowest)


def _load(kind: str, run: Run) -> float:
    """Returns how many times the bytes of one device use the busiest link."""
    n = run.size
    if kind in ("halo", "hop"):
        return 1.0
    if kind == "collective-permute":
        return {"ring": max(1.0, n / 8), "line": max(1.0, n / 4), "switch": 1.0}[run.kind]
    return {"ring": (n * n - n % 2) / (8 * n), "line": (n // 2) * (n - n // 2) / n, "switch": (n - 1) / n}[run.kind]


def _latency_s(kind: str, run: Run) -> float:
    n = run.size
    steps = {"ring": n // 2, "line": n - 1, "switch": math.ceil(math.log2(n))}[run.kind]
    if kind == "halo" or (kind == "hop" and run.kind != "line"):
        steps = 1
    return run.latency_s * steps * (2 if kind == "all-reduce" else 1)
