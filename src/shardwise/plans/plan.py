"""A plan: the shardings of all arguments and outputs, the decisions behind them, and the predicted cost.

A plan is plain data. It is saved as JSON that is the same byte for byte for the same plan, and loading one checks everything
and executes nothing. A plan made in this process also has the trees of its function's arguments and results, which
``jax.jit`` needs; a loaded plan gets them from :meth:`Plan.bind`. Each method has an example, and does its work elsewhere.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from shardwise.cost.predict import Predicted
from shardwise.errors import PlanError
from shardwise.files import write_whole
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.paths import find_path
from shardwise.lowering.decisions import Decision, Keep
from shardwise.lowering.sharded_program import ShardedProgram
from shardwise.plans.codec import digest, encode, saved_fields
from shardwise.plans.evidence import Evidence
from shardwise.plans.execution import Execution
from shardwise.plans.parts import ArrayPlan, PredictedCollective, ScheduleStep, StatedConstraint
from shardwise.plans.search_log import SearchLog
from shardwise.tactics.roles import Roles
from shardwise.transforms.variants import AS_IS, Variant

if TYPE_CHECKING:
    from shardwise.capture.trace import Call
    from shardwise.planner.what_if import Effect, WhatIf, Which
    from shardwise.report.compare import Row
    from shardwise.report.logical import Rules
    from shardwise.report.verdict import Verdict

SCHEMA: Final = 13


@dataclass(frozen=True, repr=False)
class Plan(Execution):
    """How a function is sharded over a mesh. Made by :func:`shardwise.plan`.

    ``choices`` are the decisions of tactics or of a search, and ``small`` those that keep small arguments replicated.
    ``placement`` has the links of each mesh axis, and ``device_order`` the numbers of the devices in the mesh's shape, both for
    a topology. ``search`` is the log of the search, if there was one. ``variant`` is the transformation of the function that
    was planned; arguments and outputs are the function's own. ``roles`` has the paths
    of the arguments that are the batch, the parameters, the optimizer's state or a cache, stated or inferred; ``static`` the
    numbers and names of static arguments. ``sharded`` is how every op is computed in the device-local program. ``schedule`` has
    the cost after each tactic, if there were several. ``compiler_options`` are options of XLA's compiler, which :meth:`jit`
    passes on. ``evidence`` has what :func:`shardwise.tune` compiled or ran; a plan without it is a prediction.

    The examples of its methods continue from here:

    >>> import jax, shardwise
    >>> w, x = (jax.ShapeDtypeStruct(s, "float32") for s in [(64, 64), (4096, 64)])
    >>> step = lambda w, x: w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).sum())(w)
    >>> plan = shardwise.plan(step, w, x, mesh={"data": 4}, topology="v5e:2x2", tactics="dp")
    >>> print(*plan.decisions)
    x[0] (size 4,096) over data

    And for one device, which every machine has:

    >>> one = shardwise.plan(step, w, x, mesh={"data": 1}, tactics="dp")
    """

    function: str
    fingerprint: str
    mesh: MeshAxes
    arguments: tuple[ArrayPlan, ...]
    outputs: tuple[ArrayPlan, ...]
    sharded: ShardedProgram
    collectives: tuple[PredictedCollective, ...]
    predicted: Predicted
    notes: tuple[str, ...]
    versions: Mapping[str, str]
    placement: tuple[str, ...] = ()
    device_order: tuple[int, ...] = ()
    search: SearchLog | None = None
    variant: Variant = AS_IS
    choices: tuple[Decision, ...] = ()
    small: tuple[Keep, ...] = ()
    roles: Roles = field(default_factory=dict)
    static: tuple[int | str, ...] = ()
    schedule: tuple[ScheduleStep, ...] = ()
    compiler_options: Mapping[str, str] = field(default_factory=dict)
    evidence: Evidence | None = None
    #: What the dimensions of a loaded plan are called, by color; see ``_content``.
    words: Mapping[str, str] = field(default_factory=dict, compare=False)
    # Not saved: the trees of arguments and results, the traced function, its Inquiry, its call, and a real mesh.
    trees: Any = field(default=None, compare=False)
    jaxpr: Any = field(default=None, compare=False)
    asked: Any = field(default=None, compare=False)
    call: Call | None = field(default=None, compare=False)
    tied: Any = field(default=None, compare=False)

    @property
    def _plan(self) -> Plan:
        return self

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """All decisions: first those of tactics or of a search, then those for small arguments. As text, each says which
        dimensions it shards over which axis.

        >>> [(type(decision).__name__, decision.axis, str(decision)) for decision in plan.decisions]
        [('Shard', 'data', 'x[0] (size 4,096) over data')]
        """
        return *self.choices, *self.small

    def array(self, path: str) -> ArrayPlan:
        """Returns an argument or output by path: ``params/mlp/up``, a unique ending (``mlp/up``), or a pattern (``*/mlp/up``).

        >>> plan.array("x").shape
        (4096, 64)
        """
        arguments, outputs = ({a.path: a for a in arrays} for arrays in (self.arguments, self.outputs))
        return (outputs | arguments)[find_path(path, arguments, outputs)]

    def moved(self) -> dict[tuple[str, tuple[str, ...]], tuple[int, float]]:
        """By kind and axes: the number of collectives in the program, and the bytes that one device moves in a step.

        >>> plan.moved()
        {('all-reduce', ('data',)): (1, 16384.0)}
        """
        counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        nbytes: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for c in self.collectives:
            counts[c.kind, c.axes] += 1
            nbytes[c.kind, c.axes] += int(c.nbytes * c.times)
        return {key: (counts[key], float(nbytes[key])) for key in sorted(counts)}

    @cached_property
    def constraints(self) -> tuple[StatedConstraint, ...]:
        """The constraints under which XLA's own partitioner arrives at the plan's shardings: those of ``jit(...,
        partitioner="xla")`` and of ``code``. Empty for a loaded plan.

        >>> plan.constraints
        ()
        """
        from shardwise.partitioner.constraints import stated_constraints

        if self.asked is None or self.jaxpr is None:
            return ()
        return stated_constraints(self.settled.lowered, self.jaxpr)

    @cached_property
    def settled(self) -> Any:
        """The lowered program, and its prediction with all rows.

        >>> plan.settled.predicted.time_s == plan.predicted.time_s
        True
        """
        return self.inquiry.settle(self.choices)

    # For people.

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict in sentences: step time, MFU, how tightly it fits, how it compares with the best named strategies, which
        are its ``baselines``, and what is sharded over what.

        >>> plan.verdict.sharded
        'Batch over all 4 devices. Parameters: replicated.'
        """
        from shardwise.report.verdict import verdict

        return verdict(self)

    @cached_property
    def insights(self) -> tuple[str, ...]:
        """What stands out, in sentences: what the peak consists of, what would lower it, and where the time goes. Each change
        was checked with the cost model. Empty for a loaded plan.

        >>> plan.insights[0].startswith("Peak memory: ")
        True
        """
        from shardwise.report.insights import insights

        return insights(self)

    def summary(self, width: int = 80) -> str:
        """Returns the plan on one screen: what is sharded over which axes, time, memory, the longest collectives, the search.

        >>> print(plan.summary().splitlines()[0])
        <lambda> on data 4: v5e:2x2
        """
        from shardwise.report.plan_text import plan_page

        return plan_page(self, width).text()

    def explain(self, path: str) -> str:
        """How an argument or output is sharded, and what moves because of it, with source lines.

        >>> print(plan.explain("x").splitlines()[0])
        x  float32[4096/data, 64]
        """
        from shardwise.report.plan_text import explain_text

        return explain_text(self, self.array(path))

    def program(self, width: int = 120) -> str:
        """Returns the device-local program, which :meth:`jit` executes, as text: every op with the shapes of its blocks, every
        collective where it runs, and source lines. A loaded plan has one after :meth:`bind`.

        >>> print(next(line for line in plan.program(80).splitlines() if line.startswith(">")))
        > %9.a  f32[64,64]         = psum(%9, data)                            16.00 KiB
        """
        from shardwise.report.program_text import program_text

        return program_text(self.inquiry.analysis.program, self.sharded, width)

    def diff(self, other: Plan) -> str:
        """Returns what differs between two plans: decisions, specs, bytes moved.

        >>> replicated = shardwise.plan(step, w, x, mesh={"data": 4}, topology="v5e:2x2", tactics=[])
        >>> print(plan.diff(replicated).splitlines()[0])
        - x[0] (size 4,096) over data
        """
        from shardwise.report.difference import diff_text

        return diff_text(self, other)

    def code(self, style: str = "jax", file: str = "plan.json") -> str:
        """Returns a Python file: the mesh, nested PartitionSpecs of arguments and outputs, and functions that place arguments
        and run the step as planned.

        Args:
          style: ``"jax"``; ``"flax"``, logical axis rules and the names of sharded dimensions; ``"maxtext"``, the same as the
            YAML of a MaxText configuration.
          file: where the plan is saved.

        >>> "IN_SPECS" in plan.code(), "logical_to_mesh_axes" in plan.code("flax")
        (True, True)
        """
        from shardwise.report.code import code_text

        return code_text(self, style, file)

    def rules(self, names: Mapping[str, Sequence[str | None]] | None = None) -> Rules:
        """Returns the specs as rules from logical axes to mesh axes, as Flax and MaxText have them.

        Args:
          names: by path of an argument, the names of its dimensions in the model. Without them, sharded dimensions get names
            that say what they are.

        >>> plan.rules({"x": ("batch", "embed"), "w": ("embed", "mlp")}).rules
        (('batch', 'data'), ('embed', None), ('mlp', None))
        """
        from shardwise.report.logical import logical_rules

        return logical_rules(self, names)

    # Questions.

    def bind(self, fn: Any, /, *args: Any, kwargs: Mapping[str, Any] | None = None) -> Plan:
        """Returns the plan with its function, so that :meth:`what_if`, :attr:`effects`, :attr:`in_specs`, :meth:`verify` and a
        complete :meth:`report` work for a loaded plan. Arguments are as in :func:`shardwise.plan`.

        >>> plan.save("plan.json")
        >>> shardwise.load_plan("plan.json").bind(step, w, x).in_specs == plan.in_specs
        True
        """
        from shardwise.planner.bind import bound

        return bound(self, fn, args, kwargs or {})

    @property
    def inquiry(self) -> Any:
        """The program and the hardware of the plan.

        >>> plan.inquiry.analysis.program.name
        '<lambda>'
        """
        return self._known("asked")

    def _known(self, name: str) -> Any:
        """Returns ``trees``, ``asked`` or ``call``; raises for a loaded plan, which does not have them."""
        if (value := getattr(self, name)) is None:
            what = {"trees": "the structure of its arguments", "asked": "its program", "call": "its function"}[name]
            raise PlanError(f"a loaded plan does not know {what}: plan.bind(fn, *args) gives one that does")
        return value

    def what_if(
        self,
        *tactics: Any,
        without: Which = (),
        pins: Mapping[str, Any] | None = None,
        topology: str | None = None,
    ) -> WhatIf:
        """Returns the predicted cost with other decisions, and the causes of the difference. Nothing is searched.

        Args:
          tactics: applied after the plan's decisions; objects, or text such as ``"megatron:model"``.
          without: decisions of the plan to leave out: some of :attr:`choices`, their numbers from 1, or words of their text.
          pins: as in :func:`shardwise.plan`; they come first, and replace the plan's pins of the same values.
          topology: other devices for the same mesh.

        >>> asked = plan.what_if(without=1)
        >>> asked.after.time_s > asked.before.time_s, [spec.path for spec in asked.specs]
        (True, ['x'])
        """
        from shardwise.planner.what_if import what_if

        return what_if(self, tactics, without, pins, topology)

    @cached_property
    def effects(self) -> tuple[Effect, ...]:
        """For each decision, the predicted cost without it; empty for a loaded plan.

        >>> [effect.time_s > plan.predicted.time_s for effect in plan.effects]
        [True]
        """
        from shardwise.planner.what_if import effects

        return effects(self) if self.asked is not None else ()

    @cached_property
    def baselines(self) -> tuple[Row, ...]:
        """The predicted cost of the named strategies on the same mesh, in all combinations, the best first: the rows of
        :func:`shardwise.compare`. Where variants are open, each is at the best of those that were looked at. Empty for a loaded
        plan, and where no arguments have a role.

        >>> [row.name for row in plan.baselines][:1]
        ['dp:data']
        """
        from shardwise.report.compare import baseline_row, mirrored

        if self.asked is None or not self.asked.roles:
            return ()
        rows = [baseline_row(b, variant or self.variant) for variant, b in self.asked.best_baselines]
        return mirrored(rows, self.mesh)

    # JSON.

    def to_json(self) -> str:
        """Returns the plan as JSON text.

        >>> import json
        >>> json.loads(plan.to_json())["mesh"]
        {'data': 4}
        """
        data = self._content()
        return json.dumps({"schema": SCHEMA, "digest": self.digest} | data, indent=1, ensure_ascii=False) + "\n"

    @cached_property
    def digest(self) -> str:
        """A digest of everything that is saved: two plans are the same if their digests are.

        >>> one.digest == shardwise.plan(step, w, x, mesh={"data": 1}, tactics="dp").digest != plan.digest
        True
        """
        try:
            return digest(self._content())
        except ValueError as error:
            raise PlanError(f"the plan of {self.function!r} cannot be written: {error}") from None

    def _content(self) -> dict[str, Any]:
        from shardwise.report.verdict import dimension_words

        colors = {c for a in (*self.arguments, *self.outputs) for c in a.colors}
        words = {str(c): word for c, word in sorted(dimension_words(self).items()) if c in colors}
        fields = {name: encode(getattr(self, name)) for name in saved_fields(Plan)}
        return {"schema": SCHEMA, "words": words} | fields

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file, which is replaced as a whole or not at all.

        >>> plan.save("plan.json")
        >>> shardwise.load_plan("plan.json") == plan
        True
        """
        write_whole(path, self.to_json(), PlanError)

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Writes the predicted step as a trace that chrome://tracing and Perfetto show: compute, communication, memory.

        >>> plan.timeline("step.json")
        """
        write_whole(path, json.dumps(self.predicted.timeline()), PlanError)

    def report(self, path: str | os.PathLike[str], command: str = "", title: str = "") -> None:
        """Writes the plan as one HTML page that needs no network: verdict, pictures of the program, of the step, of memory and
        of other plans, and code. ``title`` names the program (by default the function), ``command`` is what made the page.

        >>> plan.report("plan.html")
        """
        from shardwise.report.html import page_html

        write_whole(path, page_html(self, command, title), PlanError)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Returns a plan that :meth:`save` wrote; ``shardwise.load_plan`` is the same.

        >>> plan.save("plan.json")
        >>> shardwise.Plan.load("plan.json") == plan
        True
        """
        from shardwise.plans.load import load_plan

        return load_plan(path)

    def __reduce__(self) -> Any:
        """A pickled or copied plan is what :meth:`save` writes: it goes to other processes without the program."""
        from shardwise.plans.load import read_plan

        return read_plan, (json.loads(self.to_json()),)

    def __repr__(self) -> str:
        from shardwise.units import binary, seconds

        p = self.predicted
        return f"<Plan of {self.function} on {self.mesh}: step time {seconds(p.time_s)}, {binary(p.peak_bytes)}>"

    def __str__(self) -> str:
        from shardwise.report.plan_text import plan_page

        return plan_page(self, every=True).text()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        from shardwise.report.html import notebook_html
        from shardwise.report.plan_text import plan_page

        return notebook_html(plan_page(self, every=True))
