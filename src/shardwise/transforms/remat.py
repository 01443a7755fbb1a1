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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from shardwise.capture import jax_internals as internals
from shardwise.capture.trace import Traced
from shardwise.errors import VariantError
from shardwise.ir.traits import REMATERIALIZED
from shardwise.transforms.blocks import Block, blocks_by_step, find_families
from shardwise.transforms.flat import Flat, read_atoms
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
    return replace(traced, jaxpr=internals.retrace(run, traced.jaxpr))


def rematerialized(
    flat: Flat, residuals: Sequence[Residuals], blocks: Mapping[int, Sequence[Block]]
) -> Callable[..., list[Any]]:
    """Returns a function on arrays that drops residuals of scans and blocks, and computes them again where they are read."""
    scans = RematerializedScans(flat, residuals)

    def run_step(number: int, env: Mapping[int, Any]) -> Iterator[tuple[int, Any]]:
        """Returns the results of a step by value."""
        step = flat.steps[number]
        if scans.changes(number):
            with step.inside_calls(), internals.standing_at(step.equation):
                results = scans.run(number, env)
        else:
            results = step.run(env)
        return zip(step.results, results, strict=True)

    def recompute(block: Block, env: dict[int, Any]) -> dict[int, Any]:
        """Returns what the backward pass reads of a block: dropped values, and the block's inputs behind the barrier."""
        # Residuals that scans drop are None, and computed by their reader.
        values = [*(v for v in block.inputs if env[v] is not None), block.cotangent]
        with internals.standing_at(flat.steps[block.at].equation):
            behind = dict(zip(values, internals.barrier([env[v] for v in values]), strict=True))
        computed: dict[int, Any] = {}
        local = ChainMap(computed, behind, env)
        with jax.named_scope(REMATERIALIZED):
            for number in block.steps:
                computed.update(run_step(number, local))
        return behind | {v: computed[v] for v in block.dropped}

    def run(*arrays: Any) -> list[Any]:
        env: dict[int, Any] = flat.constants | dict(zip(flat.inputs, arrays, strict=True))
        behind: dict[int, Any] = {}  # what the backward pass reads instead
        backward = ChainMap(behind, env)
        for number, step in enumerate(flat.steps):
            for block in blocks.get(number, ()):
                behind.update(recompute(block, env))
            env.update(run_step(number, backward if step.is_backward else env))
        return read_atoms(env, flat.outputs)

    return run
