"""The collectives of an emitted program, read from its jaxpr."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from shardwise.capture import jax_internals as internals
from shardwise.capture.leaves import dtype_of
from shardwise.plans.plan import Plan

KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}

#: Kind, axes in the order of names, bytes of the larger side on one device, how often it runs.
Found = tuple[str, tuple[str, ...], float, float]


def emitted(jaxpr: Any) -> Counter[Found]:
    """How often each collective stands in a jaxpr, with those of bodies and branches."""
    found: Counter[Found] = Counter()
    _read(internals.split_jaxpr(jaxpr)[0], 1.0, found)
    return found


def _read(jaxpr: Any, times: float, found: Counter[Found]) -> None:
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name in KINDS:
            axes = params.get("axes", params.get("axis_name"))
            names = tuple(sorted((axes,) if isinstance(axes, str) else axes))
            for x, y in zip(equation.invars, equation.outvars, strict=True):
                found[KINDS[name], names, max(_bytes(x), _bytes(y)), times] += 1
        inner = times * params["length"] if name == "scan" else times
        for value in params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, internals.Jaxpr | internals.ClosedJaxpr):
                    _read(internals.split_jaxpr(part)[0], inner, found)


def _bytes(variable: Any) -> float:
    return float(np.prod(variable.aval.shape, dtype=np.int64) * dtype_of(variable.aval)[1])


def predicted(plan: Plan) -> Counter[Found]:
    """How often each collective was predicted."""
    return Counter((c.kind, tuple(sorted(c.axes)), float(c.nbytes), float(c.times)) for c in plan.collectives)
