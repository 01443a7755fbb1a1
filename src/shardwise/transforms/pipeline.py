"""Pipelines: loops over layers as loops over ticks, in each of which all stages compute, each on another micro-batch.

Problem. Layers are shared among devices, with slow links between them. A device that has some of the layers waits for those
before it. Idea. The batch is cut into ``M`` micro-batches, and the ``L`` layers into ``S`` stages. A loop over layers becomes
a loop over ``M + S - 1`` ticks: at tick ``t``, stage ``s`` computes its layers on micro-batch ``t - s``. What the loop carries
gets a leading dimension of stages, which is shifted by one from tick to tick; the layers of a stage are an inner loop, over
stacked parameters ``[L/S, S, ...]``. Nothing here is about devices. A stage is a dimension like any other, and sharding it is a
pipeline: parameters stay with their stage, the shift is a permute, and the first and last ticks, in which not all stages have
a micro-batch, are the bubble.

- *Carries* travel with their micro-batch. Sums to which layers only add stay, with one addend for each stage.
- *Stacked results with the batch*, which the backward pass reads, are stacked by tick. The backward loop runs over the same
  ticks in reverse, and so scans over them as they are. Other readers get them in the order of layers.
- *Stacked results without it*, gradients of parameters, are accumulated over the ticks where they are, layer by layer.
- *Constants with the batch* are indexed by the micro-batch of the stage.

A stage without a micro-batch computes on a copy of the first or last one, so that no number appears that was not there, and
adds nothing. Part ``k`` of the batch has the examples ``k, k + M, ...``, as in ``microbatch.py``. The last stages have fewer
layers if ``S`` does not divide ``L``; they compute copies of the last one, and drop the results.

All forward passes end before the backward pass begins (GPipe), so that the activations of all micro-batches are kept.

Weak. Only loops of the program itself, not those inside of another loop. Random numbers for the whole batch are made for every
micro-batch. Gradients are reduced over the batch in every tick.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from shardwise.capture import jax_internals as internals
from shardwise.capture.trace import Traced
from shardwise.errors import VariantError
from shardwise.ir.traits import STAGES
from shardwise.transforms.batch_roles import BatchAnalysis, BatchState, Role
from shardwise.transforms.batch_walk import moved
from shardwise.transforms.flat import Flat, Step, emit, read_atoms, spliced, values_of
from shardwise.transforms.microbatch import cut_batch
from shardwise.transforms.remat import read_elsewhere
from shardwise.transforms.rows import REDUCERS, cut_rows, joined_rows, neutral, reduced
from shardwise.transforms.schedule import Schedule, Task
from shardwise.transforms.stages import Layers, Program

#: In the loop over ticks: carries, sums of stacked results by layer, sums of carries that have left; None where there is none.
_State = tuple[list[Any], list[Any], list[Any]]


def pipelined(traced: Traced, batch: Collection[str], parts: int, stages: int, rounds: int = 1) -> Traced:
    """Returns a traced function whose loops over layers are pipelines; ``batch``: the paths of the arguments whose first
    dimension is the batch."""
    flat = Flat(traced.jaxpr)
    pipelines = _Pipelines(Program(flat, *cut_batch(traced, flat, batch, parts), stages), rounds)
    return replace(traced, jaxpr=spliced(internals.retrace(pipelines.run, traced.jaxpr)))


class _Pipelines:
    """A program with its loops over layers as pipelines. ``_by_tick``: stacked values in the layout of their loop."""

    def __init__(self, program: Program, rounds: int):
        most = max(layers.length for layers in program.layers.values())
        if rounds * program.stages > most:
            raise VariantError(f"{rounds} times {program.stages} stages need as many layers, and there are {most}")
        self._rounds = rounds
        self._program, self._flat, self._layers = program, program.flat, program.layers
        self._by_tick: dict[int, Any] = {}
        # By operand of a loop and its role there: the number of its rows, where they are the same for every part.
        self._repeated: dict[tuple[int, BatchState], int] = {}
        for layers in self._layers.values():
            states = (*layers.const_states, *layers.carry_states)
            for atom, state in zip((*layers.constants, *layers.initial), states, strict=True):
                if isinstance(atom, int) and state.role is Role.BATCH:
                    rows = program.repeated(atom, state)
                    self._repeated |= {} if rows is None else {(atom, state): rows}
        self._rows = [step.part for step in program.steps]
        self._wanted = read_elsewhere(self._flat, self._layers, {}).union(v for step in self._rows for v in step.reads)

    def run(self, *arrays: Any) -> list[Any]:
        """Returns the outputs of the function on arrays or tracers."""
        flat = self._flat
        env: dict[int, Any] = flat.constants | dict(zip(flat.inputs, arrays, strict=True))
        for is_loop, some in groupby(range(len(flat.steps)), self._layers.__contains__):
            if not is_loop:
                env |= emit([flat.steps[k] for k in some], env, self._wanted)
                continue
            for number in some:
                step = flat.steps[number]
                with step.inside_calls(), internals.standing_at(step.equation):
                    env |= self._pipelined(number, env)
        return read_atoms(env, flat.outputs)

    def _repeated_rows(self, env: Mapping[int, Any], number: int) -> _Rows:
        """Returns rows that are the same for every part."""
        needed, steps = {number}, list[Step]()
        for step in reversed(self._rows):
            if needed.intersection(step.results):
                steps.insert(0, step)
                needed.update(step.reads)
        made = {v for step in steps for v in step.results}

        def compute(*sources: Any) -> Any:
            values, given = dict[int, Any](), iter(sources)
            for step in steps:
                operands = [values[a] if isinstance(a, int) and a in made else next(given) for a in step.operands]
                with step.inside_calls():
                    values |= zip(step.results, internals.bind(step.equation, operands), strict=True)
            return values[number]

        outside = [a for step in steps for a in step.operands if not (isinstance(a, int) and a in made)]
        return _Rows(tuple(map(jnp.asarray, read_atoms(env, outside))), compute)

    def _pipelined(self, number: int, env: Mapping[int, Any]) -> dict[int, Any]:
        """Returns the results of a loop over layers."""
        layers, program = self._layers[number], self._program
        needed = set(values_of(self._flat.outputs)) | self._flat.users.keys()
        ticked = {v: self._by_tick[v] for v in values_of(layers.scanned) if number in self._tick_readers(v)}
        operands = (
            *zip(layers.constants, layers.const_states, strict=True),
            *zip(layers.initial, layers.carry_states, strict=True),
        )
        repeated = {
            (atom, state): self._repeated_rows(env, self._repeated[atom, state])
            for atom, state in operands
            if isinstance(atom, int) and (atom, state) in self._repeated
        }
        rounds = max(1, min(self._rounds, layers.length // program.stages))
        schedule = Schedule(program.analysis.parts, program.stages, rounds, layers.reverse)
        loop = _Pipeline(layers, program.analysis, schedule, repeated)
        carried, stacked = loop.run(env, ticked, needed)
        results = dict(zip(layers.carried, carried, strict=True))
        for value, state, array in zip(layers.stacked, layers.stacked_states, stacked, strict=True):
            if array is not None and state.role is Role.BATCH:
                self._by_tick[value] = array
                results[value] = loop.in_layers(array, state) if program.by_tick(value)[1] else None
            else:
                results[value] = array
        return results

    def _tick_readers(self, value: int) -> set[int]:
        return self._program.by_tick(value)[0] if value in self._by_tick else set()


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that are the same for every part, computed from values without the batch."""

    sources: tuple[Any, ...]
    compute: Callable[..., Any]

    def of_stages(self, stages: int) -> Any:
        """Returns the rows once for each stage. It is the sources that are repeated: rows without a dimension of stages could
        be sharded otherwise."""
        return jax.vmap(self.compute)(*(jnp.broadcast_to(x, (stages, *x.shape)) for x in self.sources))


class _Pipeline:
    """One loop over layers as a loop over ticks.

    Arrays are ``[stages, ...]`` and, where they differ from layer to layer of a stage, ``[layers of a stage, stages, ...]``.
    """

    def __init__(
        self,
        layers: Layers,
        analysis: BatchAnalysis,
        schedule: Schedule,
        repeated: Mapping[tuple[int, BatchState], _Rows],
    ):
        self._layers, self._analysis, self._repeated = layers, analysis, repeated
        self._schedule, self._stages = schedule, schedule.stages
        self._depth = -(-layers.length // (schedule.stages * schedule.rounds))
        self._stage = checkpoint_name(jnp.arange(schedule.stages, dtype=jnp.int32), STAGES)
        self._body = layers.body.jaxpr()
        self._outputs = internals.split_jaxpr(self._body)[0].outvars[layers.carries :]

    def run(
        self, env: Mapping[int, Any], ticked: Mapping[int, Any], needed: Collection[int]
    ) -> tuple[list[Any], list[Any]]:
        """Returns the carried and the stacked results; those with the batch are stacked by tick, those not needed are None."""
        layers = self._layers
        constants = list(map(self._constant, layers.constants, read_atoms(env, layers.constants), layers.const_states))
        entering = list(map(self._entering, layers.initial, read_atoms(env, layers.initial), layers.carry_states))
        is_ticked = [isinstance(atom, int) and atom in ticked for atom in layers.scanned]
        rows = [
            None if by_tick else self._rows(array, state)
            for by_tick, array, state in zip(is_ticked, read_atoms(env, layers.scanned), layers.row_states, strict=True)
        ]
        residuals = [ticked[v] if by_tick else None for v, by_tick in zip(layers.scanned, is_ticked, strict=True)]
        fixed = self._fixed(env) if any(layers.stacked[k] in needed for k in layers.fixed) else {}
        kept = {k for k, v in enumerate(layers.stacked) if v in needed and k not in fixed}

        def tick(state: _State, scanned: tuple[Any, list[Any]]) -> tuple[_State, tuple[list[Any], list[Any]]]:
            (carries, sums, totals), (time, residual) = state, scanned
            task = self._schedule.task(time - self._stage)
            busy, part, at = task
            carries = [
                carry if k in layers.staying else self._sent(carry, enter(time), at)
                for k, (carry, enter) in enumerate(zip(carries, entering, strict=True))
            ]
            read = [old if row is None else row(part, at) for old, row in zip(residual, rows, strict=True)]
            carries, sums, stacked = self._compute(constants, carries, sums, read, task, kept)
            leaving = busy & (self._stage == self._schedule.last)
            if at is not None:
                leaving &= at == self._schedule.last_round
            totals = [
                None if total is None else _where(leaving, REDUCERS[s.reducer][0](total, carry), total)
                for total, carry, s in zip(totals, carries, layers.carry_states, strict=True)
            ]
            batched = zip(carries, layers.carried, layers.carry_states, strict=True)
            ended = [carry if v in needed and s.role is Role.BATCH else None for carry, v, s in batched]
            return (carries, sums, totals), (ended, stacked)

        times = jnp.arange(self._schedule.ticks, dtype=jnp.int32)
        start = self._start(entering, read_atoms(env, layers.initial), needed, kept)
        (carries, sums, totals), (ended, stacked) = jax.lax.scan(
            tick, start, (times, residuals), reverse=layers.reverse
        )
        carried = [
            self._leaving(k, *arrays) if layers.carried[k] in needed else None
            for k, arrays in enumerate(zip(carries, totals, ended, strict=True))
        ]
        summed = [None if x is None else self._unstaged(x) for x in (fixed.get(k, x) for k, x in enumerate(sums))]
        return carried, [x if total is None else total for x, total in zip(stacked, summed, strict=True)]

    def in_layers(self, array: Any, state: BatchState) -> Any:
        """Returns a stacked result with the batch, in the order of layers and examples, from one by tick."""

        def ticks_of(rows: Any, stage: Any) -> Any:
            return jax.lax.dynamic_slice_in_dim(rows, stage, self._schedule.tasks)

        rows = self._schedule.by_round(jax.vmap(ticks_of, in_axes=(2, 0), out_axes=2)(array, self._stage))
        rows = jnp.moveaxis(rows, 0, 1)  # parts, rounds, layers of a stage, stages
        rows = rows.reshape(self._schedule.parts, -1, *rows.shape[3:])
        return self._unstaged(joined_rows(self._analysis, rows, moved(state, 2)))

    def _fixed(self, env: Mapping[int, Any]) -> dict[int, Any]:
        """Returns the stacked results that are the same for every micro-batch, by layer and stage."""
        layers, constants = self._layers, read_atoms(env, self._layers.constants)
        rows = [
            self._staged(jnp.asarray(array)) if s.role is Role.INVARIANT else None
            for array, s in zip(read_atoms(env, layers.scanned), layers.row_states, strict=True)
        ]

        def of_layer(xs: list[Any]) -> list[Any]:
            return layers.fixed_of([*constants, *xs])

        of_stages: Callable[..., list[Any]] = jax.vmap(of_layer, axis_size=self._stages)
        every: list[Any] = jax.vmap(of_stages, axis_size=self._schedule.rounds * self._depth)(rows)
        return dict(zip(layers.fixed, every, strict=True))

    # One tick.

    def _compute(
        self,
        constants: Sequence[Callable[[Any], Any] | _Rows],
        carries: list[Any],
        sums: list[Any],
        rows: list[Any],
        task: Task,
        kept: Collection[int],
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the carries, sums and ``kept`` stacked results of all stages after their layers."""
        layers, (busy, part, at) = self._layers, task
        # Rows that are the same for every part are computed by each layer, as the broadcasts that they are.
        given = [x if isinstance(x, _Rows) else x(part) for x in constants]
        batched = [0 if s.role is Role.BATCH else None for s in layers.const_states]
        axes = (*batched, *(0 for _ in (*carries, *rows, part)))
        body: Callable[..., list[Any]] = jax.vmap(lambda *xs: internals.evaluate(self._body, xs), in_axes=axes)

        def layer(state: tuple[list[Any], list[Any]], row: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
            (carries, sums), (number, xs) = state, row
            operands = [x.of_stages(self._stages) if isinstance(x, _Rows) else x for x in given]
            outputs = body(*operands, *carries, *xs, part)
            before = self._stage if at is None else at * self._stages + self._stage
            exists = before * self._depth + number < layers.length if self._uneven else None
            adds = busy if exists is None else busy & exists
            masks = (adds if k in layers.sums else exists for k in range(layers.carries))
            new = [_where(*three) for three in zip(masks, outputs, carries, strict=False)]
            stacked = [x if k in kept else None for k, x in enumerate(outputs[layers.carries :])]
            for k, (total, s) in enumerate(zip(sums, layers.stacked_states, strict=True)):
                if total is not None:
                    adding = partial(_added, reducer=s.reducer)
                    if at is not None:
                        of_stage = jax.vmap(adding, in_axes=(1, 0, 0, 0), out_axes=1)
                        sums[k] = of_stage(total, at * self._depth + number, stacked[k], adds)
                    else:
                        sums[k] = adding(total, number, stacked[k], adds)
                    stacked[k] = None
            return (new, sums), stacked

        numbers = jnp.arange(self._depth, dtype=jnp.int32)
        (carries, sums), stacked = jax.lax.scan(layer, (carries, sums), (numbers, rows), reverse=layers.reverse)
        return carries, sums, stacked

    def _sent(self, array: Any, entering: Any, at: Any) -> Any:
        """Returns what the stages work on next: what the stage before has, and in the first what enters, or in further rounds
        what the last has."""
        hop = -1 if self._layers.reverse else 1
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):
            shifted: Any = jnp.roll(array, hop, axis=0)
            back = shifted
        else:
            shifted = _shifted(array, hop)
            back = _shifted(array, -hop * (self._stages - 1)) if at is not None else None
        if at is not None:
            entering = _where(at == self._schedule.first_round, entering, back)
        return _where(self._stage == self._schedule.first, entering, shifted)

    # What comes in, and what goes out.

    def _constant(self, atom: Any, array: Any, state: BatchState) -> Callable[[Any], Any] | _Rows:
        """Returns the function from the stages' micro-batches to what they read."""
        if self._is_repeated(atom, state):
            return self._repeated[atom, state]
        if state.role is not Role.BATCH:
            return partial(_always, array)
        rows = cut_rows(self._analysis, jnp.asarray(array), state)
        return jax.vmap(partial(_index, rows))

    def _rows(self, array: Any, state: BatchState) -> Callable[[Any, Any], Any]:
        """Returns the function from the stages' micro-batches and rounds to what their layers scan over."""
        staged, depth = self._staged(jnp.asarray(array)), self._depth
        if state.role is Role.BATCH:
            staged = cut_rows(self._analysis, staged, moved(state, 2))

        def of_stage(rows: Any, part: Any, at: Any) -> Any:
            rows = _index(rows, part) if state.role is Role.BATCH else rows
            return rows if at is None else jax.lax.dynamic_slice_in_dim(rows, at * depth, depth)

        stages = 2 if state.role is Role.BATCH else 1
        if state.role is not Role.BATCH and self._schedule.rounds == 1:
            return lambda part, at: staged
        return lambda part, at: jax.vmap(of_stage, in_axes=(stages, 0, None if at is None else 0), out_axes=1)(
            staged, part, at
        )

    def _is_repeated(self, atom: Any, state: BatchState) -> bool:
        return isinstance(atom, int) and (atom, state) in self._repeated

    def _entering(self, atom: Any, array: Any, state: BatchState) -> Callable[[Any], Any]:
        """Returns the function from a time to what then enters the first stage, with a dimension of stages or of size one."""
        if self._is_repeated(atom, state):
            return lambda time: self._repeated[atom, state].of_stages(self._stages)
        array = jnp.asarray(array)
        if state.role is Role.BATCH:
            rows = cut_rows(self._analysis, array, state)
            return lambda time: _index(rows, self._schedule.task(time - self._schedule.first).part)[None]
        array = array[None]
        if state.role is Role.PARTIAL and state.reducer == "sum":
            first = self._schedule.part_zero
            return lambda time: jnp.where(time == first, array, jnp.zeros_like(array))
        return partial(_always, array)

    def _start(
        self,
        entering: Sequence[Callable[[Any], Any]],
        initial: Sequence[Any],
        needed: Collection[int],
        kept: Collection[int],
    ) -> _State:
        """Returns the state before the first tick: every stage has a copy of what enters first."""
        layers = self._layers
        carries, totals = [], []
        for k, (enter, array, s) in enumerate(
            zip(entering, map(jnp.asarray, initial), layers.carry_states, strict=True)
        ):
            value = array[None] if k in layers.sums else enter(self._schedule.first_tick)
            every = jnp.broadcast_to(value, (self._stages, *value.shape[1:]))
            if k in layers.sums and s.reducer == "sum":
                every = _where(self._stage == 0, every, jnp.zeros_like(every))
            carries.append(every)
            is_total = s.role is Role.PARTIAL and k not in layers.sums and layers.carried[k] in needed
            totals.append(neutral(every.shape, every.dtype, s.reducer) if is_total else None)
        shape = (self._schedule.rounds * self._depth, self._stages)
        sums = [
            neutral(shape + v.aval.shape, v.aval.dtype, s.reducer) if s.role is not Role.BATCH and k in kept else None
            for k, (v, s) in enumerate(zip(self._outputs, layers.stacked_states, strict=True))
        ]
        return carries, sums, totals

    def _leaving(self, carry: int, state: Any, total: Any, ended: Any) -> Any:
        """Returns a carried result."""
        s = self._layers.carry_states[carry]
        if ended is not None:
            rows = jax.lax.slice_in_dim(ended, self._schedule.last, self._schedule.last + self._schedule.tasks)
            return joined_rows(
                self._analysis, self._from_last(self._schedule.by_round(rows)[self._schedule.last_round], 1), s
            )
        if total is not None or carry in self._layers.sums:
            return reduced(state if total is None else total, s.reducer)
        return self._from_last(state, 0)

    def _from_last(self, array: Any, dim: int) -> Any:
        """Returns the part of the last stage, as a sum over the stages, which is a reduction where they are sharded."""
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):
            return jnp.take(array, self._schedule.last, axis=dim)
        return reduced(_where(self._stage == self._schedule.last, array, jnp.zeros_like(array), dim), "sum", dim)

    def _staged(self, array: Any) -> Any:
        """Returns an array of layers by the round and the number in the stage, and stage."""
        missing = self._schedule.rounds * self._stages * self._depth - self._layers.length
        if missing:
            array = jnp.concatenate([array, array[-missing:]])
        array = array.reshape(self._schedule.rounds, self._stages, self._depth, *array.shape[1:])
        return jnp.swapaxes(array, 1, 2).reshape(-1, self._stages, *array.shape[3:])

    def _unstaged(self, array: Any) -> Any:
        """Returns an array of layers, from one by the round and the number in the stage, and stage."""
        array = array.reshape(self._schedule.rounds, self._depth, self._stages, *array.shape[2:])
        return jnp.swapaxes(array, 1, 2).reshape(-1, *array.shape[3:])[: self._layers.length]

    @property
    def _uneven(self) -> bool:
        return self._layers.length % (self._stages * self._schedule.rounds) > 0


def _always(array: Any, _: Any) -> Any:
    return array


def _shifted(array: Any, by: int) -> Any:
    """Returns an array with its rows moved to later places, and zeros before them; by less than zero to earlier ones."""
    return jax.lax.pad(array, np.zeros((), array.dtype), [(by, -by, 0), *[(0, 0, 0)] * (array.ndim - 1)])


def _added(total: Any, number: Any, value: Any, mask: Any, reducer: str) -> Any:
    """Returns a total with something added to the row of a number, where there is a mask only there."""
    old = jax.lax.dynamic_index_in_dim(total, number, keepdims=False)
    new = REDUCERS[reducer][0](old, value)
    new = jnp.where(mask, new, old) if jnp.ndim(mask) == 0 else _where(mask, new, old)
    return jax.lax.dynamic_update_index_in_dim(total, new, number, 0)


def _index(rows: Any, part: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(rows, part, keepdims=False)


def _where(mask: Any, new: Any, old: Any, dim: int = 0) -> Any:
    """Returns a selection along the dimension of stages; all of ``new`` without a mask."""
    if mask is None:
        return new
    return jnp.where(jnp.expand_dims(mask, [d for d in range(jnp.ndim(old)) if d != dim]), new, old)
