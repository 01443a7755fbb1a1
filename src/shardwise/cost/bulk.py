"""Rows of tables for many new states at once.

What the terms of a class read of a state are facts with a number each (``shardwise.cost.outcomes``). The sum of a class's
facts finds its part, what its terms cost; the sum of the parts' keys finds the row, or else they are added up
(``shardwise.cost.rows``). Only a part of which the facts were not met together is worked out by the specification.

What limits the speed: while little is known, Python; later the levels of ops that rest on each other, each some calls of NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from shardwise.cost.decisions import State
from shardwise.cost.facets import Facet
from shardwise.cost.index import Array, Index, Sums
from shardwise.cost.keys import Action, Keys
from shardwise.cost.locality import Locality
from shardwise.cost.lowering import Known
from shardwise.cost.model import CostModel, Term, TermKind
from shardwise.cost.outcomes import Batch, Outcomes
from shardwise.cost.rows import Class, Parts, Rows

_SEED: Final = 20261117


class Bulk:
    """For the tables of an evaluator, each a sequence of classes. New rows are added to ``rows``."""

    def __init__(
        self,
        model: CostModel,
        locality: Locality,
        known: Known,
        actions: Sequence[Action],
        tables: Sequence[Sequence[Class]],
        rows: Rows,
    ):
        self._model, self._space, self._actions = model, locality.space, actions
        self._tables, self._rows = tables, rows
        self._outcomes = Outcomes(model, locality, known)
        self._facts = [Sums.of([list(dict.fromkeys([0, *self._read(own.term)])) for own in table]) for table in tables]
        rng = np.random.default_rng(_SEED)
        self._salts = [rng.integers(0, 2**64, (len(table), 1), dtype=np.uint64) for table in tables]
        self._keys = Keys(self._space, actions, self._outcomes.masks(), _SEED + 1)
        self._index, self._parts = Index(), Parts(model.life.points)

    def _read(self, term: Term) -> Iterator[int]:
        """The facts that a term reads."""
        program, known = self._model.structure.program, self._outcomes
        if term.kind is TermKind.PASS:
            work = self._model.work[term.number]
            for k in term.ops:
                yield known.computes(k, Facet("product" if k in work.products else "local"))
            for edge in (*work.inner, *([work.returned] if work.returned else [])):
                yield known.computes(edge.maker, Facet("taken", edge.result))
                yield known.computes(edge.user, Facet("brought", edge.operand))
            if work.turned:
                yield known.computes(work.turned.maker, Facet("made", work.turned.result))
            if work.returned:
                yield known.computes(work.returned.user, Facet("taken"))
                yield known.lies(program.ops[work.returned.user].results[0])
        elif term.kind is TermKind.HALO:
            yield known.computes(term.number, Facet("way"))
        else:
            yield known.lies(term.number)
            maker, result = program.definitions[term.number]
            for k in term.ops:
                if k == maker:
                    yield known.computes(k, Facet("made", result))
                for operand, v in enumerate(program.ops[k].operands):
                    if v == term.number:
                        yield known.computes(k, Facet("need", operand))

    def rows(self, taken: Array, missing: Array) -> Array:
        """Rows by state and table, as far as they are missing."""

        def state(n: int) -> State:
            decisions = [self._actions[k].decision for k in taken[n].tolist() if k < len(self._actions)]
            return State(self._space.mesh, (*self._space.base, *decisions))

        batch = self._outcomes.find(state, np.ascontiguousarray(self._keys(taken).T))
        found = np.zeros(missing.shape, np.int32)
        for table in np.flatnonzero(missing.any(axis=0)).tolist():
            states = np.flatnonzero(missing[:, table])
            found[states, table] = self._rows_of(table, batch, states)
        batch.close()
        return found

    def _rows_of(self, table: int, batch: Batch, states: Array) -> Array:
        """The rows of a table for some states, from its parts."""
        classes, salts = self._tables[table], self._salts[table]

        def part(n: int) -> int:
            own, state = divmod(n, len(states))
            lowered = batch.lowered(int(states[state]))
            return self._parts.add(classes[own].part(self._model.figures(lowered, classes[own].term)))

        parts = self._index.look(self._facts[table](batch.facts, states) + salts, part)
        keys = self._parts.keys[parts].sum(axis=0) + salts[0]
        found = self._index.find(keys)
        missing = np.flatnonzero(found < 0)
        if len(missing):
            new, first, which = np.unique(keys[missing], return_index=True, return_inverse=True)
            sums = self._parts.sums(parts[:, missing[first]])
            added = np.array([self._rows.add(*own) for own in zip(*sums, strict=True)])
            self._index.put(new, added)
            found[missing] = added[which]
        return found
