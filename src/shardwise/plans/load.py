"""Loading plans: all problems of a file are reported at once, and nothing in it is executed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.errors import PlanError, ShardwiseError
from shardwise.hardware.mesh import spec_problems
from shardwise.ir.paths import find_paths
from shardwise.lowering.decisions import State
from shardwise.lowering.sharded_program import ShardedProgram, read_sharded
from shardwise.plans.codec import decode, digest, parse_json, saved_fields
from shardwise.plans.plan import SCHEMA, Plan
from shardwise.transforms.variants import GATHERS


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Loads a plan that :meth:`Plan.save` wrote.

    >>> import jax, shardwise
    >>> plan = shardwise.plan(lambda x: 2 * x, jax.ShapeDtypeStruct((8,), "float32"), mesh={"data": 4}, tactics=[])
    >>> plan.save("plan.json")
    >>> shardwise.load_plan("plan.json") == plan
    True
    """
    file = Path(path)
    try:
        data = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise PlanError(f"{file} is not a plan: it is no complete JSON ({error})") from None
    return read_plan(data, str(file))


def read_plan(data: Any, where: str = "the plan") -> Plan:
    """Returns a plan from parsed JSON."""
    if not isinstance(data, dict) or "schema" not in data:
        raise PlanError(f"{where} is not a plan")
    if data["schema"] != SCHEMA:
        raise PlanError(
            f"{where} has schema {data['schema']!r}; this version of Shardwise reads schema {SCHEMA}: plan again"
        )
    _check_unchanged(data, where)
    problems: list[str] = []
    values: dict[str, Any] = {}
    try:
        values["words"] = {
            str(int(c)): word for c, word in decode(dict[str, str], data.get("words", {}), "words").items()
        }
    except ValueError as error:
        problems.append(str(error))
    for name, (_, kind) in saved_fields(Plan).items():
        try:
            if name not in data:
                problems.append(f"{name} is missing")
            elif kind is not ShardedProgram:
                values[name] = decode(kind, data[name], name)
            elif "mesh" in values:
                values[name] = read_sharded(data[name], values["mesh"])
        except (ShardwiseError, AttributeError, KeyError, TypeError, ValueError) as error:
            problems.append(str(error) if str(error).startswith(name) else f"{name}: {error}")
    plan = None if problems else Plan(**values)
    if plan is not None:
        problems += _problems(plan)
    if plan is None or problems:
        shown = problems[:12] + ([f"and {len(problems) - 12} more"] if len(problems) > 12 else [])
        raise PlanError(f"{where} cannot be used:\n" + "\n".join(f"  {p}" for p in shown))
    return plan


def _check_unchanged(data: dict[str, Any], where: str) -> None:
    """Raises if the content is not the one that was saved. The parts of a plan depend on one another: changed by hand it would
    describe another program than it runs."""
    try:
        same = digest({key: value for key, value in data.items() if key != "digest"}) == data.get("digest")
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where} cannot be used: {error}") from None
    if not same:
        raise PlanError(
            f"{where} was changed after it was saved: plan again, with pins or tactics for what must differ"
        )


def _problems(plan: Plan) -> Iterator[str]:
    """Yields contradictions between the parts of a plan."""
    mesh, order, batch = plan.mesh, plan.device_order, plan.variant.batch
    for arrays in (plan.arguments, plan.outputs):
        for path, count in Counter(a.path for a in arrays).items():
            if count > 1:
                yield f"{path} is there {count} times"
        for array in arrays:
            yield from spec_problems(array.path, array.shape, array.spec, mesh)
            if min(array.shape, default=0) < 0 or len(array.colors) not in (0, len(array.shape)):
                yield f"{array.path}: expected sizes that are not negative, and a color for each dimension"
    if plan.predicted.usable_bytes < 1:
        yield "predicted.usable_bytes: expected at least one byte"
    if sorted(order) != list(range(len(order))):
        yield "device_order: expected every device once, by number"
    elif order and len(order) != mesh.devices:
        yield f"device_order: {len(order)} devices for a mesh of {mesh.devices}"
    if plan.variant.remat not in (False, True, GATHERS):
        yield f"variant: remat is true, false or {GATHERS!r}"
    if min(plan.variant.stages, plan.variant.circular) < 1 or (plan.variant.stages > 1 and not batch):
        yield "variant: expected at least one stage and one time around, and with several stages several micro-batches"
    if plan.variant.microbatches < 1 or (plan.variant.microbatches > 1) != bool(batch):
        yield "variant: expected at least one micro-batch, and with more than one the arguments that are split"
    try:
        for path in (*batch, *(path for paths in plan.roles.values() for path in paths)):
            find_paths(path, [a.path for a in plan.arguments], what="argument")
        State(mesh, plan.decisions)
    except ShardwiseError as error:
        yield str(error)
