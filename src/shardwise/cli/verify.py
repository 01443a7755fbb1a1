"""``shardwise verify``: a saved plan against the compiled program."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwise.cli import completers, options
from shardwise.errors import ShardwiseError

if TYPE_CHECKING:
    from shardwise.verification.verify import Verification


def add_command(commands: Any) -> None:
    """Registers ``verify``."""
    verify = options.add_command(
        commands,
        "verify",
        help="compile a program under a saved plan and compare with what the plan predicts",
        description="Compiles a program under a saved plan, reads the collectives of the compiled program, and sets them "
        "beside the predicted ones. On host devices it can also run both programs and compare their results.",
        examples="shardwise verify plan.json train.py:make_step --backend v5e:4x4",
    )
    options.add_plan(verify)
    options.add_target(verify)
    shown = "host (default) or a TPU topology such as v5e:4x4"
    backend = verify.add_argument("--backend", metavar="B", default="host", help=shown)
    options.completed(backend, completers.backends)
    options.add_json(verify)
    options.add_loudness(verify)
    verify.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> str:
    from shardwise.cli.targets import load_target, without_devices
    from shardwise.plans.load import load_plan

    made = load_plan(arguments.plan)
    # As many host devices as the plan needs; JAX reads this when it is imported.
    count = f"--xla_force_host_platform_device_count={made.mesh.devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {count}".strip()
    without_devices()
    from shardwise.verification.verify import verify

    target = load_target(arguments.target)
    found = verify(made, target.fn, *target.args, backend=arguments.backend, kwargs=target.kwargs)
    if not found.compiled.fits:
        raise ShardwiseError(str(found))
    return json.dumps(_data(found), indent=2) + "\n" if arguments.json else str(found)


def _data(found: Verification) -> dict[str, Any]:
    plan, compared = found.plan, found.differences
    return {
        "schema": 1,
        "function": plan.function,
        "mesh": dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        "backend": found.compiled.backend,
        "matched": found.matched,
        "collectives": [asdict(row) for row in found.rows],
        "memory": asdict(found.compiled.memory) if found.compiled.memory is not None else None,
        "outputs": None if compared is None else [asdict(d) | {"explained": d.explained} for d in compared],
    }
