"""Reading plans back: every problem of a file is found and said at once; nothing in it is executed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardwise.cost.predict import read_predicted
from shardwise.errors import MeshError, PlanError, QueryError
from shardwise.hardware.mesh import MeshAxes, spec_problems
from shardwise.ir.paths import find_paths
from shardwise.lowering.sharded_program import read_sharded
from shardwise.plans.choices import read_choices
from shardwise.plans.colors import read_colors
from shardwise.plans.plan import SCHEMA, ArrayPlan, Plan, PredictedCollective
from shardwise.plans.search_log import read_search
from shardwise.transforms.variant import read_variant


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Loads a plan that :meth:`Plan.save` wrote.

    >>> import jax, shardwise, tempfile
    >>> plan = shardwise.plan(lambda x: 2 * x, jax.ShapeDtypeStruct((8,), "float32"), mesh={"data": 4}, tactics=[])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plan.save(f"{folder}/plan.json")
    ...     shardwise.load_plan(f"{folder}/plan.json") == plan
    True
    """
    file = Path(path)
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"cannot read {file}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{file} is not a plan: it is no complete JSON ({error})") from None
    return read_plan(data, str(file))


def read_plan(data: Any, where: str = "the plan") -> Plan:
    """A plan from parsed JSON."""
    if not isinstance(data, dict) or "schema" not in data:
        raise PlanError(f"{where} is not a plan")
    if data["schema"] != SCHEMA:
        raise PlanError(
            f"{where} has schema {data['schema']!r}; this version of Shardwise reads schema {SCHEMA}: plan again"
        )
    problems: list[str] = []
    reader = _Reader(data, problems)
    mesh = reader.mesh()
    made: dict[str, Any] = {
        "function": reader.text("function"),
        "fingerprint": reader.text("fingerprint"),
        "notes": tuple(reader.texts("notes")),
        "static": reader.static(),
        "placement": tuple(reader.texts("placement")),
        "arguments": reader.rows("arguments", _array),
        "outputs": reader.rows("outputs", _array),
        "collectives": reader.rows("collectives", _collective),
    }
    try:
        made["predicted"] = read_predicted(data["predicted"])
    except (KeyError, TypeError, ValueError) as error:
        problems.append(f"predicted: {type(error).__name__} {error}")
    try:
        made["search"] = read_search(data["search"])
    except (KeyError, TypeError, ValueError, MeshError) as error:
        problems.append(f"search: {type(error).__name__} {error}")
    try:
        made["choices"] = read_choices(data["choices"], mesh.names if mesh is not None else ())
    except (KeyError, TypeError, ValueError) as error:
        problems.append(f"choices: {type(error).__name__} {error}")
    try:
        made["small"] = read_choices(data["small"], mesh.names if mesh is not None else ())
    except (KeyError, TypeError, ValueError) as error:
        problems.append(f"small: {type(error).__name__} {error}")
    try:
        made["colors"] = read_colors(data["colors"], mesh.names if mesh is not None else ())
    except (KeyError, TypeError, ValueError) as error:
        problems.append(f"colors: {type(error).__name__} {error}")
    try:
        made["roles"] = _roles(data["roles"], [a.path for a in made["arguments"]])
    except (KeyError, TypeError, ValueError, QueryError) as error:
        problems.append(f"roles: {type(error).__name__} {error}")
    try:
        made["variant"] = read_variant(data["variant"], [a.path for a in made["arguments"]])
    except (KeyError, TypeError, ValueError) as error:
        problems.append(f"variant: {type(error).__name__} {error}")
    try:
        made["sharded"] = read_sharded(data["sharded"], mesh) if mesh is not None else None
    except (KeyError, TypeError, ValueError) as error:
        problems.append(f"sharded: {type(error).__name__} {error}")
    order = data.get("device_order")
    if not isinstance(order, list) or (order and sorted(map(str, order)) != sorted(map(str, range(len(order))))):
        problems.append("device_order: expected every device once, by number")
    elif order and mesh is not None and len(order) != mesh.devices:
        problems.append(f"device_order: {len(order)} devices for a mesh of {mesh.devices}")
    else:
        made["device_order"] = tuple(int(n) for n in order)
    versions = data.get("versions")
    if not isinstance(versions, dict) or not all(isinstance(v, str) for v in versions.values()):
        problems.append("versions: expected a mapping of texts")
        versions = {}
    if not problems and mesh is not None:
        for array in (*made["arguments"], *made["outputs"]):
            problems += spec_problems(getattr(array, "path", ""), array.shape, array.spec, mesh)
    if problems or mesh is None:
        shown = problems[:12] + ([f"and {len(problems) - 12} more"] if len(problems) > 12 else [])
        raise PlanError(f"{where} cannot be used:\n" + "\n".join(f"  {p}" for p in shown))
    return Plan(mesh=mesh, versions=tuple(versions.items()), **made)


class _Reader:
    def __init__(self, data: dict[str, Any], problems: list[str]):
        self.data, self.problems = data, problems

    def text(self, key: str) -> str:
        value = self.data.get(key)
        if not isinstance(value, str):
            self.problems.append(f"{key}: expected a text")
            return ""
        return value

    def texts(self, key: str) -> list[str]:
        value = self.data.get(key)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            self.problems.append(f"{key}: expected a list of texts")
            return []
        return value

    def static(self) -> tuple[int | str, ...]:
        value = self.data.get("static")
        if not isinstance(value, list) or not all(type(v) in (int, str) for v in value):
            self.problems.append("static: expected numbers and names of arguments")
            return ()
        return tuple(value)

    def mesh(self) -> MeshAxes | None:
        try:
            return MeshAxes.of(self.data.get("mesh"))
        except MeshError as error:
            self.problems.append(f"mesh: {error}")
            return None

    def rows(self, key: str, read: Callable[[dict[str, Any]], Any]) -> tuple[Any, ...]:
        value = self.data.get(key)
        if not isinstance(value, list):
            self.problems.append(f"{key}: expected a list")
            return ()
        found = []
        for k, row in enumerate(value):
            try:
                found.append(read(row))
            except (KeyError, TypeError, ValueError) as error:
                self.problems.append(f"{key}[{k}]: {type(error).__name__} {error}")
        return tuple(found)


def _spec(value: Any) -> tuple[tuple[str, ...], ...]:
    spec = tuple(tuple(axes) for axes in value)
    if not all(isinstance(a, str) for axes in spec for a in axes):
        raise ValueError("axes of a spec are texts")
    return spec


def _shape(value: Any) -> tuple[int, ...]:
    shape = tuple(value)
    if not all(isinstance(s, int) and s >= 0 for s in shape):
        raise ValueError("a shape is a list of sizes")
    return shape


def _roles(data: Any, arguments: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Every path must be one of an argument."""
    roles = {str(role): tuple(str(path) for path in paths) for role, paths in data.items()}
    for path in (path for paths in roles.values() for path in paths):
        find_paths(path, arguments, what="argument")
    return roles


def _array(row: dict[str, Any]) -> ArrayPlan:
    colors = tuple(int(c) for c in row["colors"])
    figures = _shape(row["shape"]), str(row["dtype"]), _spec(row["spec"]), bool(row["donated"]), colors
    return ArrayPlan(str(row["path"]), *figures)


def _collective(row: dict[str, Any]) -> PredictedCollective:
    axes = tuple(str(a) for a in row["axes"])
    texts = (str(row[key]) for key in ("op", "source", "value"))
    return PredictedCollective(str(row["kind"]), axes, float(row["nbytes"]), float(row["times"]), *texts)
