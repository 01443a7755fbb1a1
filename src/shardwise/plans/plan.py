"""A plan: how every input and output is sharded, what is stated inside, and what that is predicted to move.

A plan is plain data. It is saved as JSON that is the same byte for byte for the same plan, and loading one checks everything
and executes nothing. A plan that was made in this process also holds the trees of its function's arguments and results, so
that it can be given to ``jax.jit``; one that was loaded gets them from the function it is applied to.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from shardwise.cost.predict import Predicted
from shardwise.errors import PlanError
from shardwise.hardware.mesh import MeshAxes
from shardwise.plans.search_log import SearchLog
from shardwise.plans.variant import AS_IS, Variant

SCHEMA: Final = 4

#: Mesh axes by dimension, major first.
Spec = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """An argument or output: where it is, what it is, how it is sharded."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    donated: bool = False


@dataclass(frozen=True, slots=True)
class StatedConstraint:
    """A sharding stated inside the program, at ``source``: of value ``number`` as it is ``stored``; of operand ``index`` where
    op ``number`` has it ``used``; of its result ``index`` as it is ``computed``."""

    place: str
    number: int
    index: int
    op: str
    source: str
    shape: tuple[int, ...]
    spec: Spec


@dataclass(frozen=True, slots=True)
class PredictedCollective:
    """A collective that the plan implies: bytes on one device for one execution, and how often it runs."""

    kind: str
    axes: tuple[str, ...]
    nbytes: float
    times: float
    op: str
    source: str
    value: str


@dataclass(frozen=True)
class Plan:
    """How a function is split over a mesh. Made by :func:`shardwise.plan`.

    ``placement`` says on which links each mesh axis lies, and ``device_order`` has the numbers of the devices in the mesh's
    shape, where a topology was given. ``search`` says how the plan was found, where it was. ``variant`` is what the function is
    turned into first; the plan is one of the result, with the function's own arguments and outputs.
    """

    function: str
    fingerprint: str
    mesh: MeshAxes
    arguments: tuple[ArrayPlan, ...]
    outputs: tuple[ArrayPlan, ...]
    constraints: tuple[StatedConstraint, ...]
    collectives: tuple[PredictedCollective, ...]
    predicted: Predicted
    decisions: tuple[str, ...]
    notes: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    placement: tuple[str, ...] = ()
    device_order: tuple[int, ...] = ()
    search: SearchLog | None = None
    variant: Variant = AS_IS
    trees: Any = field(default=None, compare=False, repr=False)

    def spec(self, path: str) -> Spec:
        """The sharding of an argument or output by path."""
        for array in (*self.arguments, *self.outputs):
            if array.path == path:
                return array.spec
        import difflib

        near = difflib.get_close_matches(path, [a.path for a in (*self.arguments, *self.outputs)], n=3, cutoff=0.4)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise PlanError(f"the plan has no argument or output {path!r}{hint}")

    def moved(self) -> dict[tuple[str, tuple[str, ...]], tuple[int, float]]:
        """By kind and axes: the number of collectives in the program, and the bytes that one device moves in a step."""
        counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        nbytes: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for c in self.collectives:
            counts[c.kind, c.axes] += 1
            nbytes[c.kind, c.axes] += int(c.nbytes * c.times)
        return {key: (counts[key], float(nbytes[key])) for key in sorted(counts)}

    # For people.

    def explain(self, path: str) -> str:
        """How an argument or output is sharded, and what moves because of it, with source lines."""
        from shardwise.report.plan_text import explain_text

        self.spec(path)
        return explain_text(self, path)

    def diff(self, other: Plan) -> str:
        """What differs between two plans: decisions, specs, bytes moved."""
        from shardwise.report.plan_text import diff_text

        return diff_text(self, other)

    def code(self) -> str:
        """The specs and constraints as Python to paste into a model."""
        from shardwise.report.plan_text import code_text

        return code_text(self)

    # Under jax.jit.

    @property
    def in_specs(self) -> Any:
        """PartitionSpecs in the structure of ([positional arguments], keyword arguments)."""
        return self._tree(0, self.arguments)

    @property
    def out_specs(self) -> Any:
        """PartitionSpecs in the structure of the function's result."""
        return self._tree(1, self.outputs)

    def in_shardings(self, mesh: Any) -> Any:
        """NamedShardings on a real mesh, in the structure of :attr:`in_specs`."""
        return self._tree(0, self.arguments, mesh)

    def out_shardings(self, mesh: Any) -> Any:
        """NamedShardings on a real mesh, in the structure of the function's result."""
        return self._tree(1, self.outputs, mesh)

    def restore_args(self, mesh: Any) -> Any:
        """``jax.ShapeDtypeStruct``s with shardings, in the structure of :attr:`in_specs`: what checkpoint libraries restore
        into."""
        from shardwise.rewrite.apply import placed_shape

        return self._trees()[0].unflatten([placed_shape(a, mesh) for a in self.arguments])

    def init(self, fn: Any, *args: Any, of: str, mesh: Any = None) -> Any:
        """Runs ``fn(*args)``, which makes the arguments under the path ``of``, so that they are made already sharded."""
        from shardwise.rewrite.apply import init_sharded, make_mesh

        return init_sharded(self, fn, args, of, make_mesh(self.mesh, order=self.device_order) if mesh is None else mesh)

    def _trees(self) -> Any:
        if self.trees is None:
            raise PlanError(
                "a loaded plan does not know the structure of its arguments: use plan.jit(fn), or plan.spec(path)"
            )
        return self.trees

    def _tree(self, which: int, arrays: tuple[ArrayPlan, ...], mesh: Any = None) -> Any:
        from shardwise.rewrite.apply import named_sharding, to_partition_spec

        leaves = [to_partition_spec(a.spec) if mesh is None else named_sharding(a, mesh) for a in arrays]
        return self._trees()[which].unflatten(leaves)

    def jit(self, fn: Any, mesh: Any = None, **options: Any) -> Any:
        """``fn`` computed as planned, under ordinary ``jax.jit``, on the given mesh or on the devices that are there.

        ``options`` are ``static_argnums``, ``static_argnames``; donation is the plan's.
        """
        from shardwise.capture.trace import JitOptions
        from shardwise.rewrite.apply import PlannedFunction, check_mesh, make_mesh

        mesh = make_mesh(self.mesh, order=self.device_order) if mesh is None else mesh
        check_mesh(self, mesh)
        return PlannedFunction(self, fn, mesh, JitOptions(**options))

    def apply(self, fn: Any, mesh: Any = None, **options: Any) -> Any:
        """``fn`` with the plan's constraints inside, to be given to a ``jax.jit`` of your own."""
        return self.jit(fn, mesh, **options).inline

    # JSON.

    def to_json(self) -> str:
        """The plan as JSON text."""
        data = {
            "schema": SCHEMA,
            "function": self.function,
            "fingerprint": self.fingerprint,
            "versions": dict(self.versions),
            "mesh": dict(zip(self.mesh.names, self.mesh.sizes, strict=True)),
            "placement": list(self.placement),
            "device_order": list(self.device_order),
            "search": self.search.to_json() if self.search is not None else None,
            "variant": self.variant.to_json(),
            "decisions": list(self.decisions),
            "notes": list(self.notes),
            "predicted": self.predicted.to_json(),
            "arguments": [asdict(a) for a in self.arguments],
            "outputs": [asdict(a) for a in self.outputs],
            "constraints": [asdict(c) for c in self.constraints],
            "collectives": [asdict(c) for c in self.collectives],
        }
        return json.dumps(data, indent=1, ensure_ascii=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan. The file is complete or not there: it is written beside and renamed."""
        _write(path, self.to_json())

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Writes the predicted step as a trace that chrome://tracing and Perfetto show: compute, communication, memory."""
        _write(path, json.dumps(self.predicted.timeline()))

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as one HTML page that needs no network: figures, table, source lines, memory, mesh, search."""
        from shardwise.report.html import page_html

        _write(path, page_html(self))

    def __str__(self) -> str:
        from shardwise.report.plan_text import plan_text

        return plan_text(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook shows: the same text as a terminal."""
        printer.text(str(self))


def _write(path: str | os.PathLike[str], text: str) -> None:
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise PlanError(f"cannot write {target}: {error.strerror}") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise PlanError(f"cannot write {target}: {error.strerror}") from None
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """What the person has set, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
