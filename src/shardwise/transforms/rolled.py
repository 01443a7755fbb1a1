"""Unrolled layers as loops: the same program, with a scan over stacked operands for each stack of layers.

Problem. Pipelines cut loops over layers, and a model may call its layers one by one. Idea. Unrolled layers are stretches of the
program that repeat, in the forward pass and in the backward pass (``blocks.py`` finds them). Such a stretch is a loop if its
blocks have the same equations, and if each operand is in all of them one of these:

- a result of the same equation of the block, or of the block before: the latter is carried;
- the same value from outside: a constant;
- another value from outside: these are stacked, and the loop scans over the stack. Literals may differ too.

What is read outside of a block is stacked, and a later loop over exactly these values scans over the stack as it is: the
backward pass over what the forward pass keeps. Loops of the backward pass run in reverse, so that parameters are stacked once.

Weak. Parameters are stacked in every step, which copies them. They have to be separate arrays for each layer: slices of one
stacked array at fixed positions are other equations in each block.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.capture import jax_internals as internals
from shardwise.capture.leaves import dtype_of
from shardwise.capture.trace import Traced
from shardwise.transforms.blocks import PRODUCTS, repetitions, text_of
from shardwise.transforms.flat import Atom, Flat, Step, emit, read_atoms, spliced, values_of

#: An operand in all blocks: ``own`` or ``before``, with the place of a result in a block (of the latter also what the first
#: block reads), ``constant``, with its atom, or ``scanned``, with the values in the order of the loop.
_Operand = tuple[str, Any]


def rolled(traced: Traced, least: int) -> Traced:
    """Returns a traced function with its unrolled layers, if they are at ``least`` as many, as loops."""
    flat = Flat(traced.jaxpr)
    stretches = (
        s for backward in (False, True) for s in repetitions(text_of(flat, backward)) if s[1] - s[0] >= least * s[2]
    )
    found = (_Loop(flat, *stretch) for stretch in stretches)
    loops = {loop.first: loop for loop in found if loop.is_loop}
    forward, backward = (sorted(n.length for n in loops.values() if n.reverse == r) for r in (False, True))
    if not forward or backward not in ([], forward):
        return traced
    inside = {k for loop in loops.values() for k in range(loop.first, loop.end)}
    made = {values for loop in loops.values() for values in loop.stacks}
    wanted = {v for loop in loops.values() for v in loop.reads(made)}.union(values_of(flat.outputs))
    wanted.update(v for k, step in enumerate(flat.steps) if k not in inside for v in step.reads)

    def run(*arrays: Any) -> list[Any]:
        env: dict[int, Any] = flat.constants | dict(zip(flat.inputs, arrays, strict=True))
        stacks: dict[tuple[int, ...], Any] = {}
        outside: list[Step] = []
        for k, step in enumerate(flat.steps):
            if k in loops:
                env |= emit(outside, env, wanted)
                outside.clear()
                env |= loops[k].run(env, stacks, wanted)
            elif k not in inside:
                outside.append(step)
        env |= emit(outside, env, wanted)
        return read_atoms(env, flat.outputs)

    return replace(traced, jaxpr=spliced(internals.retrace(run, traced.jaxpr)))


class _Loop:
    """A stretch of steps that repeats; ``is_loop``: whether it can be a loop, of layers that have a product."""

    def __init__(self, flat: Flat, first: int, end: int, period: int):
        self._flat, self._period, self.length = flat, period, (end - first) // period
        self.first = min(range(first, end - self.length * period + 1), key=self._bytes_across)
        self.end = self.first + self.length * period
        self._steps = flat.steps[self.first : self.first + period]
        self.reverse = self._steps[0].is_backward
        self.is_loop = any(step.name in PRODUCTS for step in self._steps) and all(map(self._is_same, range(period)))
        found = [self._operands(k) for k in range(period)] if self.is_loop else []
        self.is_loop &= not any(None in operands for operands in found)
        self._operands_of = [[o for o in operands if o is not None] for operands in found]
        every = [o for operands in self._operands_of for o in operands]
        self._carried = list(dict.fromkeys(o[1] for o in every if o[0] == "before"))
        self._scanned = list(dict.fromkeys(o[1] for o in every if o[0] == "scanned"))
        results = [(k, r) for k, step in enumerate(self._steps) for r in range(len(step.results))]
        self._stacked = [place for place in results if self.is_loop and self._leaves(*place)]

    @property
    def stacks(self) -> list[tuple[int, ...]]:
        """The values that each of its stacked results has, in the order of the loop."""
        return [self._in_order([step.results[r] for step in self._in_all(k)]) for k, r in self._stacked]

    def reads(self, made: Collection[tuple[int, ...]]) -> set[int]:
        """Returns the values from outside that it reads one by one: those of stacks that are ``made`` it reads as a stack."""
        every = [o for operands in self._operands_of for o in operands]
        alone = {atom for kind, atom in every if kind == "constant" and isinstance(atom, int)}
        stacked = (v for values in self._scanned if values not in made for v in values)
        return alone.union((v for *_, v in self._carried), stacked)

    def _bytes_across(self, first: int) -> float:
        """Returns the bytes that pass from the first block to the second where the blocks begin at a step."""
        flat, cut = self._flat, first + self._period
        made = (v for step in flat.steps[first:cut] for v in step.results)
        return sum(flat.nbytes(v) for v in made if any(cut <= k < cut + self._period for k in flat.users.get(v, ())))

    def _is_inside(self, value: int) -> bool:
        return self.first <= self._flat.producer.get(value, -1) < self.end

    def _in_all(self, number: int) -> list[Step]:
        return self._flat.steps[self.first + number : self.end : self._period]

    def _is_same(self, number: int) -> bool:
        """Returns whether a step has the same equation in all blocks, without an effect."""
        first, *others = (step.equation for step in self._in_all(number))
        return not first.effects and all(_equal(first, other) for other in others)

    def _operands(self, number: int) -> list[_Operand | None]:
        """Returns the operands of a step of the block, None for those that no loop can have."""
        return [self._operand(atoms) for atoms in zip(*(step.operands for step in self._in_all(number)), strict=True)]

    def _operand(self, atoms: Sequence[Atom]) -> _Operand | None:
        first, second, *others = (self._place(block, atom) for block, atom in enumerate(atoms))
        if any(other != second for other in others):
            return None
        if second is not None and second[0] == 0:
            return ("own", second[1:]) if first == second else None
        if first is not None or all(np.array_equal(_of(a), _of(atoms[0])) for a in atoms):
            return None if first is not None else ("constant", atoms[0])
        values = [a if isinstance(a, int) else self._new(a) for a in atoms]
        types = [(internals.shape_of(t), dtype_of(t)) for t in map(self._flat.types.__getitem__, values)]
        if any(t != types[0] for t in types):
            return None
        if second is None:
            return "scanned", self._in_order(values)
        return ("before", (*second[1:], values[0])) if second[0] == 1 else None

    def _place(self, block: int, atom: Atom) -> tuple[int, int, int] | None:
        """Returns how many blocks before one an atom is computed, at which step and result; None if it is from outside."""
        if not isinstance(atom, int) or not self._is_inside(atom):
            return None
        number = self._flat.producer[atom]
        maker, step = divmod(number - self.first, self._period)
        return block - maker, step, self._flat.steps[number].results.index(atom)

    def _new(self, literal: Any) -> int:
        """Returns the number of a value for a literal."""
        self._flat.types.append(literal.aval)
        self._flat.constants[len(self._flat.types) - 1] = jnp.asarray(literal.val, literal.aval.dtype)
        return len(self._flat.types) - 1

    def _in_order(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(reversed(values) if self.reverse else values)

    def _leaves(self, step: int, result: int) -> bool:
        """Returns whether a result is read outside of the loop in any block, other than what the last one carries on."""
        values = [one.results[result] for one in self._in_all(step)]
        if any((step, result) == carried[:2] for carried in self._carried):
            values = values[:-1]
        users = (k for v in values for k in self._flat.users.get(v, ()))
        outputs = values_of(self._flat.outputs)
        return any(not self.first <= k < self.end for k in users) or not set(values).isdisjoint(outputs)

    def run(
        self, env: Mapping[int, Any], stacks: dict[tuple[int, ...], Any], wanted: Collection[int]
    ) -> dict[int, Any]:
        """Returns the ``wanted`` results of all blocks. ``stacks``: by values those that exist already."""
        for values in self._scanned:
            if values not in stacks:
                stacks[values] = jnp.stack([jnp.asarray(env[v]) for v in values])

        def block(carries: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            made: list[list[Any]] = []
            given = dict(zip((*self._carried, *self._scanned), (*carries, *rows), strict=True))
            for step, operands in zip(self._steps, self._operands_of, strict=True):
                values = [
                    made[what[0]][what[1]]
                    if kind == "own"
                    else read_atoms(env, [what])[0]
                    if kind == "constant"
                    else given[what]
                    for kind, what in operands
                ]
                with step.inside_calls():
                    made.append(internals.bind(step.equation, values))
            return [made[k][r] for k, r, _ in self._carried], [made[k][r] for k, r in self._stacked]

        start, rows = [env[v] for _, _, v in self._carried], [stacks[values] for values in self._scanned]
        with internals.standing_at(self._steps[0].equation):
            ended, stacked = jax.lax.scan(block, start, rows, length=self.length, reverse=self.reverse)
            results = {self._in_all(k)[-1].results[r]: x for (k, r, _), x in zip(self._carried, ended, strict=True)}
            for values, array in zip(self.stacks, stacked, strict=True):
                stacks[values] = array
                results |= {v: array[n] for n, v in enumerate(values) if v in wanted and v not in results}
        return results


def _of(atom: Atom) -> Any:
    """Returns what tells an atom from others: the number of a value, the array of a literal."""
    return ("value", atom) if isinstance(atom, int) else atom.val


def _equal(one: Any, other: Any) -> bool:
    """Returns whether two equations are of one primitive with the same parameters."""
    a, b = one.params, other.params
    if one.primitive is not other.primitive or a.keys() != b.keys():
        return False
    return all(a[key] is b[key] or (type(a[key]) is type(b[key]) and str(a[key]) == str(b[key])) for key in a)
