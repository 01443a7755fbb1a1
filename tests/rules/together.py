"""The ops that the checks of many cases run, compiled as one program: compiling an op alone takes longer than checking a rule.

The checks are run first on zeros, which shows the shapes and parameters that they ask for. What is not foreseen that way, since
it depends on results, is compiled alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from tests.rules.cases import Array, Case
from tests.rules.harness import check_factor

#: Ops in one program.
_OPS = 8


@dataclass(frozen=True)
class _Op:
    """A primitive with parameters, and operands to try it on."""

    primitive: Any
    params: Mapping[str, Any]
    operands: list[Any]

    def run(self, operands: Sequence[Any]) -> list[Any]:
        results = self.primitive.bind(*operands, **self.params)
        return list(results) if self.primitive.multiple_results else [results]

    @functools.cached_property
    def zeros(self) -> list[Array]:
        return [np.zeros(x.shape, x.dtype) for x in jax.eval_shape(self.run, self.operands)]


@dataclass(frozen=True)
class _Recorded(Case):
    """A case whose results are zeros, and which notes what is run."""

    ops: dict[Any, _Op] = field(default_factory=dict)

    def run(self, operands: Sequence[Array] | None = None, params: Mapping[str, Any] | None = None) -> list[Array]:
        operands = self.operands if operands is None else operands
        params = self.params if params is None else params
        op = _Op(self.primitive, params, list(operands))
        return self.ops.setdefault(self.signature(operands, params), op).zeros


def compiled_together(cases: Sequence[Case]) -> list[Case]:
    """The cases, with the ops that their checks run compiled together."""
    ops: dict[Any, _Op] = {}
    for case in cases:
        recorded = _Recorded(case.primitive, case.params, case.operands, case.call, case.rule, ops=ops)
        for index in range(len(case.rule.factors)):
            with contextlib.suppress(Exception):  # zeros need not agree; an error that counts comes again
                check_factor(recorded, index)
    compiled: dict[Any, Callable[..., list[Any]]] = {}
    known = list(ops.items())
    for some in (dict(known[k : k + _OPS]) for k in range(0, len(known), _OPS)):
        program = _Together(list(some.values()))
        compiled |= {signature: functools.partial(program, k) for k, signature in enumerate(some)}
    return [replace(case, compiled=compiled) for case in cases]


class _Together:
    """Ops as one program. One of them is asked for at a time; the others compute on the operands that they were tried on."""

    def __init__(self, ops: Sequence[_Op]) -> None:
        self.operands = jax.device_put([op.operands for op in ops])
        self.program = jax.jit(lambda inputs: [op.run(xs) for op, xs in zip(ops, inputs, strict=True)])

    def __call__(self, number: int, operands: Sequence[Any]) -> list[Any]:
        inputs = [*self.operands[:number], list(operands), *self.operands[number + 1 :]]
        return self.program(inputs)[number]
