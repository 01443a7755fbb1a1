"""Plans and compares one program; run by ``python -m corpus``, each in a separate process.

Times are CPU seconds of the process, which depend little on how busy the machine is.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from corpus.registry import Case, Program

#: Host devices are planned for as such, and once more for the smallest memory, which shards as much as possible.
HOST_PLANS: Final = {
    "time": {"topology": "cpu:8"},
    "memory": {"topology": "v5e:2x4", "objective": "memory", "budget_evals": 150},
}
TPU: Final = "v5e:4x4"


def small_environment() -> dict[str, str]:
    """Returns the environment of a process with eight host devices, in which XLA compiles quickly (``tests/conftest.py``)."""
    import tests.conftest  # noqa: F401

    return dict(os.environ)


def full_environment() -> dict[str, str]:
    from shardwise.verification.compiled import tpu_environment

    return dict(os.environ) | tpu_environment()


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Returns a result and its CPU seconds, with nothing traced or compiled before."""
    import jax

    jax.clear_caches()
    start = time.process_time()
    result = function()
    return result, round(time.process_time() - start, 3)


def _built(program: Program, sizes: Any) -> Case:
    import jax
    import numpy as np

    import shardwise

    # Planning once imports what planning needs, which is not part of a program's time.
    shardwise.plan(lambda x: x, jax.ShapeDtypeStruct((8,), np.float32), mesh={"data": 8}, tactics=[])
    warnings.simplefilter("ignore")  # those of other packages, while they are imported and traced
    return program.build(**sizes)


def _traced(case: Case, args: Any) -> dict[str, Any]:
    return {"trace_s": _timed(lambda: case.jit(case.fn).trace(*args))[1]}


def run_small(program: Program) -> dict[str, Any]:
    """Plans a program with small sizes for eight host devices, runs it, and compares every output with plain ``jit``."""
    import jax

    import shardwise

    case = _built(program, program.small)
    args = jax.block_until_ready(case.make())
    record = _traced(case, args)
    plans = {}
    for name, options in HOST_PLANS.items():
        plan = partial(shardwise.plan, case.fn, *args, donate_argnums=case.donate, **options)
        plans[name], plan_s = _timed(plan)
        record[name] = {"plan_s": plan_s} | _compared(plans[name], case, args)
    record["ops"] = len(plans["time"].sharded.factors)
    for name, jitted in {"plain": case.jit(case.fn), "planned": plans["time"].jit(case.fn)}.items():
        inputs = jax.block_until_ready(jax.tree.map(lambda x: x.copy(), args))
        record[f"{name}_first_call_s"] = _timed(lambda f=jitted, x=inputs: jax.block_until_ready(f(*x)))[1]
    return record


def _compared(plan: Any, case: Case, args: Any) -> dict[str, Any]:
    import shardwise

    found = shardwise.verify(plan, case.fn, *args)
    differences = found.differences or ()
    return {
        "sharded": sum(any(a.spec) for a in (*plan.arguments, *plan.outputs)),
        "arrays": len(plan.arguments) + len(plan.outputs),
        "collectives": sum(int(count) for count, _ in plan.moved().values()),
        "difference": max((d.relative for d in differences), default=0.0),
        "sensitivity": max((d.sensitivity for d in differences), default=0.0),
        "agrees": found.agrees,
        "unexplained": [
            f"{d.path}: {d.relative:.2g}, tolerance {d.tolerance:.2g}, sensitivity {d.sensitivity:.2g}"
            for d in differences
            if not d.explained
        ][:3],
    }


def run_full(program: Program) -> dict[str, Any]:
    """Plans a program with full sizes for v5e:4x4 from shapes, and compiles it with XLA's TPU compiler."""
    import jax

    import shardwise
    from shardwise.hardware.topology import topology

    case = _built(program, program.full)
    args = jax.eval_shape(case.make)
    record: dict[str, Any] = _traced(case, args)
    options = {"donate_argnums": case.donate, "remat": "auto", "allow_infeasible": True}
    plan, plan_s = _timed(partial(shardwise.plan, case.fn, *args, topology=TPU, **options))
    predicted = plan.predicted
    record |= {
        "plan_s": plan_s,
        "mesh": str(plan.mesh),
        "argument_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args)),
        "fits": predicted.fits,
        "predicted_peak": predicted.peak_bytes,
        "predicted_s": predicted.time_s,
        "predicted_compute_s": predicted.compute_s,
    }
    found, compile_s = _timed(partial(shardwise.verify, plan, case.fn, *args, backend=TPU))
    compiled = found.compiled
    record |= {
        "compile_s": compile_s,
        "refused": compiled.out_of_memory[:300],
        "predicted_bytes": sum(r.predicted_bytes for r in found.rows),
        "compiled_bytes": sum(r.compiled_bytes for r in found.rows),
        "matched": round(found.matched, 4),
        "compiled_peak": compiled.memory.peak_bytes if compiled.memory else None,
        "compiled_compute_s": compiled.estimated_cycles / topology(TPU).profile.clock_hz,
    }
    return record
