"""Rematerialisation: what is repeated keeps what it carries, and the backward pass computes the rest again.

The problem: differentiation keeps every activation of every layer for the backward pass. They do not fit.

The idea is ``jax.checkpoint`` around the layers, done after differentiation, where what the backward pass reads is known. There
are two finders: scans whose stacks only other scans read (``transforms/scans``), and blocks of a program that repeat
themselves, layers that are unrolled (``transforms/blocks``). What is found has a number, first the scans and then the families
of blocks, each in the order of the program, so that a plan can leave some of them alone.

Weak: of each scan and family all residuals or none; no choice of what is cheap to keep. A block is one layer, never several. A
backward pass that is written by hand is not known as one, and neither are the second and later derivatives. Scans inside of
repeated blocks are run again with the block, as a whole.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import jax

from shardwise.capture import jax_internals as internals
from shardwise.capture.trace import Traced
from shardwise.errors import VariantError
from shardwise.transforms.blocks import Block, blocks_by_step, find_families
from shardwise.transforms.flat import Flat
from shardwise.transforms.paired import read_atoms
from shardwise.transforms.scans import ScansAgain, find_residuals, find_scans


def rematerialised(traced: Traced, but: Collection[int] = (), like: Traced | None = None) -> Traced:
    """A traced function whose scans and repeated blocks compute again what the backward pass needs.

    Of those that can, in their order from 1, the ones in ``but`` are left alone. ``like`` is the same function at another size,
    whose choice is taken over.
    """
    flat = Flat(traced.jaxpr)
    other = flat if like is None else Flat(like.jaxpr)
    found = _Found.of(other)
    if not len(found):
        raise VariantError(
            f"{traced.name} has no loop and no repeated block whose backward pass reads more than it carries: where "
            "something is to be computed again, put jax.checkpoint around it"
        )
    left = [k for k in range(1, len(found) + 1) if k not in but]
    if not left or not set(but) <= set(range(1, len(found) + 1)):
        raise VariantError(
            f"{traced.name} has {len(found)} loops or repeated blocks that can compute again: all but {sorted(but)}?"
        )
    if len(flat.steps) != len(other.steps):
        raise VariantError(
            f"the function is another program for a smaller batch: {len(other.steps)} operations became {len(flat.steps)}"
        )
    scans = [found.scans[k - 1] for k in left if k <= len(found.scans)]
    families = [found.families[k - 1 - len(found.scans)] for k in left if k > len(found.scans)]
    residuals = [find_residuals(flat, k, found.sources) for k in scans]
    again = Again(flat, ScansAgain(flat, residuals), blocks_by_step(flat, families))
    return replace(traced, jaxpr=internals.retrace(again.run, traced.jaxpr))


def rematerialisable(traced: Traced) -> int:
    """How many scans and families of blocks could compute again what the backward pass needs."""
    return len(_Found.of(Flat(traced.jaxpr)))


@dataclass(frozen=True, slots=True)
class _Found:
    """Scans by their steps, families of blocks by their cuts. ``sources``: the scans that would do if they were alone."""

    sources: list[int]
    scans: list[int]
    families: list[tuple[int, ...]]

    @staticmethod
    def of(flat: Flat) -> _Found:
        families = find_families(flat)
        return _Found(*find_scans(flat, {k for cuts in families for k in range(cuts[0], cuts[-1])}), families)

    def __len__(self) -> int:
        return len(self.scans) + len(self.families)


class Again:
    """A program that leaves residuals out, and computes them again where they are read."""

    def __init__(self, flat: Flat, scans: ScansAgain, blocks: dict[int, list[Block]]):
        self._flat, self._scans, self._blocks = flat, scans, blocks

    def run(self, *arrays: Any) -> list[Any]:
        """The function on arrays or tracers."""
        flat = self._flat
        env: dict[int, Any] = {**dict(flat.held), **dict(zip(flat.inputs, arrays, strict=True))}
        for number in range(len(flat.steps)):
            for block in self._blocks.get(number, ()):
                self._compute_again(block, env)
            self._step(number, env)
        return read_atoms(env, flat.outputs)

    def _step(self, number: int, env: MutableMapping[int, Any]) -> None:
        step = self._flat.steps[number]
        with ExitStack() as stack:
            for call in step.calls:
                stack.enter_context(internals.standing_at(call))
            if self._scans.concerns(number):
                with internals.standing_at(step.equation):
                    results = self._scans.run(number, env)
            else:
                results = internals.bind(step.equation, read_atoms(env, step.operands))
        env.update(zip(step.results, results, strict=True))

    def _compute_again(self, block: Block, env: dict[int, Any]) -> None:
        given = [v for v in block.given if env[v] is not None]  # what scans leave out is None, and made by who reads it
        tied = [*given, block.cotangent]
        with internals.standing_at(self._flat.steps[block.at].equation):
            held = internals.barrier([env[v] for v in tied])
        own = ChainMap(dict(zip(tied, held, strict=True)), env)
        with jax.named_scope(internals.AGAIN):
            for number in block.steps:
                self._step(number, own)
        env.update((v, own[v]) for v in (*block.dropped, block.cotangent))
