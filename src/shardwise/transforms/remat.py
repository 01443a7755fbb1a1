"""Rematerialization: loops and repeated blocks keep their carry, and the backward pass computes the rest again.

Problem. Differentiation keeps every activation of every layer for the backward pass. They do not fit.

Idea. ``jax.checkpoint`` around the layers, applied after differentiation, where the reads of the backward pass are known.
Candidates are scans whose stacked outputs only other scans read (``transforms/scans``), and repeated blocks of a program, such
as unrolled layers (``transforms/blocks``). They have numbers, first the scans and then the families of blocks, each in the
order of the program, so that a plan can leave some of them unchanged.

Weak. All residuals of a scan or family or none; no choice of what is cheap to keep. A block is one layer, never several. A
backward pass that is written by hand is not recognized, and neither are the second and later derivatives. Scans inside of
repeated blocks are run again with the block, as a whole.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, MutableMapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from shardwise.capture import jax_internals as internals
from shardwise.capture.trace import Traced
from shardwise.errors import VariantError
from shardwise.transforms.blocks import Block, blocks_by_step, find_families
from shardwise.transforms.flat import Flat
from shardwise.transforms.scans import RematerializedScans, find_residuals, find_scans
from shardwise.transforms.trace_pair import read_atoms


def rematerialize(traced: Traced, but: Collection[int] = (), like: Traced | None = None) -> Traced:
    """Returns a traced function whose scans and repeated blocks compute again what the backward pass needs.

    The candidates in ``but``, by number from 1, are not changed. ``like`` is the same function at another size, whose
    candidates are used.
    """
    flat = Flat(traced.jaxpr)
    other = flat if like is None else Flat(like.jaxpr)
    candidates = _find_candidates(other)
    count = len(candidates.scans) + len(candidates.families)
    if not count:
        raise VariantError(
            f"{traced.name} has no loop and no repeated block whose backward pass reads more than it carries: where "
            "something is to be computed again, put jax.checkpoint around it"
        )
    numbers = range(1, count + 1)
    chosen = [k for k in numbers if k not in but]
    if not chosen or not set(but) <= set(numbers):
        raise VariantError(
            f"{traced.name} has {count} loops or repeated blocks that can compute again: all but {sorted(but)}?"
        )
    if len(flat.steps) != len(other.steps):
        raise VariantError(
            f"the function is another program for a smaller batch: {len(other.steps)} operations became {len(flat.steps)}"
        )
    scans = [k for n, k in enumerate(candidates.scans, 1) if n in chosen]
    families = [cuts for n, cuts in enumerate(candidates.families, 1 + len(candidates.scans)) if n in chosen]
    residuals = [find_residuals(flat, k, candidates.sources) for k in scans]
    program = Rematerialized(flat, RematerializedScans(flat, residuals), blocks_by_step(flat, families))
    return replace(traced, jaxpr=internals.retrace(program.run, traced.jaxpr))


def count_candidates(traced: Traced) -> int:
    """Returns how many scans and families of blocks could compute again what the backward pass needs."""
    candidates = _find_candidates(Flat(traced.jaxpr))
    return len(candidates.scans) + len(candidates.families)


class _Candidates(NamedTuple):
    """Scans by their steps, families of blocks by their cuts. ``sources``: the scans that save memory by themselves."""

    sources: list[int]
    scans: list[int]
    families: list[tuple[int, ...]]


def _find_candidates(flat: Flat) -> _Candidates:
    families = find_families(flat)
    return _Candidates(*find_scans(flat, {k for cuts in families for k in range(cuts[0], cuts[-1])}), families)


class Rematerialized:
    """A program that drops residuals, and computes them again where they are read."""

    def __init__(self, flat: Flat, scans: RematerializedScans, blocks: dict[int, list[Block]]):
        self._flat, self._scans, self._blocks = flat, scans, blocks

    def run(self, *arrays: Any) -> list[Any]:
        """Returns the outputs of the function on arrays or tracers."""
        flat = self._flat
        env: dict[int, Any] = {**flat.constants, **dict(zip(flat.inputs, arrays, strict=True))}
        for number in range(len(flat.steps)):
            for block in self._blocks.get(number, ()):
                self._recompute(block, env)
            self._step(number, env)
        return read_atoms(env, flat.outputs)

    def _step(self, number: int, env: MutableMapping[int, Any]) -> None:
        step = self._flat.steps[number]
        with ExitStack() as stack:
            for call in step.calls:
                stack.enter_context(internals.standing_at(call))
            if self._scans.changes(number):
                with internals.standing_at(step.equation):
                    results = self._scans.run(number, env)
            else:
                results = internals.bind(step.equation, read_atoms(env, step.operands))
        env.update(zip(step.results, results, strict=True))

    def _recompute(self, block: Block, env: dict[int, Any]) -> None:
        # Residuals that scans drop are None, and computed by their reader.
        values = [*(v for v in block.inputs if env[v] is not None), block.cotangent]
        with internals.standing_at(self._flat.steps[block.at].equation):
            arrays = internals.barrier([env[v] for v in values])
        local = ChainMap(dict(zip(values, arrays, strict=True)), env)
        with jax.named_scope(internals.AGAIN):
            for number in block.steps:
                self._step(number, local)
        env.update((v, local[v]) for v in (*block.dropped, block.cotangent))
