"""Rematerialization: loops and repeated blocks keep their carry, and the backward pass computes the rest again.

Problem. Differentiation keeps every activation of every layer for the backward pass. They do not fit. Idea. ``jax.checkpoint``
around the layers, applied after differentiation, where the reads of the backward pass are known. Candidates are scans whose
stacked outputs only other scans read (``transforms/scans``), and repeated blocks, such as unrolled layers
(``transforms/blocks``).

Weak. All candidates or none. A block is one layer, never several. A backward pass that is written by hand is
not recognized, and neither are the second and later derivatives. Scans inside of repeated blocks are run again with the block.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any, cast

import jax
import numpy as np

from shardwise.capture import jax_internals as internals
from shardwise.capture.trace import Traced
from shardwise.errors import VariantError
from shardwise.ir.traits import REMATERIALIZED
from shardwise.transforms.blocks import Block, blocks_by_step, find_families
from shardwise.transforms.flat import Flat, Step, emit, read_atoms, spliced, values_of
from shardwise.transforms.scans import RematerializedScans, Residuals, find_residuals, find_scans


def rematerialize(traced: Traced) -> Traced:
    """Returns a traced function that computes again what the backward pass needs."""
    flat = Flat(traced.jaxpr)
    families = find_families(flat)
    sources, scans = find_scans(flat, {k for cuts in families for k in range(cuts[0], cuts[-1])})
    if not scans and not families:
        raise VariantError(
            f"{traced.name} has no loop and no repeated block whose backward pass reads more than it carries: where "
            "something is to be computed again, put jax.checkpoint around it"
        )
    residuals = [find_residuals(flat, k, sources) for k in scans]
    run = rematerialized(flat, residuals, blocks_by_step(flat, families))
    return replace(traced, jaxpr=spliced(internals.retrace(run, traced.jaxpr)))


def rematerialized(
    flat: Flat, residuals: Sequence[Residuals], blocks: Mapping[int, Sequence[Block]]
) -> Callable[..., list[Any]]:
    """Returns a function on arrays that drops residuals of scans and blocks, and computes them again where they are read."""
    scans = RematerializedScans(flat, residuals)
    changed = {k for k in range(len(flat.steps)) if scans.changes(k)}
    wanted = read_elsewhere(flat, changed, blocks)

    def run_steps(numbers: Iterable[int], env: Mapping[int, Any], again: Mapping[int, int]) -> dict[int, Any]:
        """Returns the values of some steps that others read; ``again``: what backward steps read instead of a value."""
        values: dict[int, Any] = {}
        local = ChainMap(values, cast(dict[int, Any], env))
        for is_changed, some in groupby(numbers, changed.__contains__):
            if not is_changed:
                values |= emit([_reading(flat.steps[k], again) for k in some], local, wanted)
                continue
            for number in some:
                step = flat.steps[number]
                behind = {v: local[n] for v, n in again.items()} if step.is_backward else {}
                with step.inside_calls(), internals.standing_at(step.equation):
                    values |= zip(step.results, scans.run(number, ChainMap(behind, local)), strict=True)
        return values

    def recompute(block: Block, env: Mapping[int, Any]) -> tuple[dict[int, int], dict[int, Any]]:
        """Returns new numbers of a block's inputs behind the barrier, and the values of these and of what it drops."""
        # Residuals that scans drop are None, and computed by their reader.
        inputs = [*(v for v in block.inputs if env[v] is not None), block.cotangent]
        with internals.standing_at(flat.steps[block.at].equation):
            behind = dict(zip(inputs, jax.lax.optimization_barrier([env[v] for v in inputs]), strict=True))
        with jax.named_scope(REMATERIALIZED):
            computed = run_steps(block.steps, ChainMap(behind, cast(dict[int, Any], env)), {})
        again = {v: flat.new(v) for v in inputs}
        values = {again[v]: array for v, array in behind.items()}
        return again, values | {v: computed[v] for v in block.dropped}

    def run(*arrays: Any) -> list[Any]:
        env: dict[int, Any] = flat.constants | dict(zip(flat.inputs, arrays, strict=True))
        again: dict[int, int] = {}
        for first, end in pairwise(sorted({0, *blocks, len(flat.steps)})):
            for block in blocks.get(first, ()):
                numbers, values = recompute(block, env)
                again |= numbers
                env |= values
            env |= run_steps(range(first, end), env, again)
        return read_atoms(env, flat.outputs)

    return run


def read_elsewhere(flat: Flat, changed: Collection[int], blocks: Mapping[int, Sequence[Block]]) -> set[int]:
    """Returns the values that are read outside of the stretch of steps in which they are computed."""
    breaks = np.zeros(len(flat.steps) + 1, np.int64)
    breaks[[*blocks, *changed, *(k + 1 for k in changed)]] = 1
    stretch = np.cumsum(breaks)
    every = [block for some in blocks.values() for block in some]
    wanted = {v for b in every for v in (*b.inputs, *b.dropped, b.cotangent)} | set(values_of(flat.outputs))
    for v, maker in flat.producer.items():
        if any(stretch[k] != stretch[maker] for k in flat.users.get(v, ())):
            wanted.add(v)
    return wanted


def _reading(step: Step, again: Mapping[int, int]) -> Step:
    """Returns a step of the backward pass with other operands."""
    if not step.is_backward or not any(v in again for v in step.reads):
        return step
    return replace(step, operands=tuple(again.get(v, v) if isinstance(v, int) else v for v in step.operands))
