"""Converts a jaxpr to a :class:`~shardwise.ir.program.Program`.

Calls are inlined, each with a :class:`Scope`; loops and branches become regions with link ops at their borders
(``control.py``); every other equation is one op with the rule of ``rules.registry``.

Programs are simplified as in XLA, so that costs are counted once: equal equations of one section are one op, a reshape back to
an earlier shape is no op, and dead ops are removed. One simplification is not XLA's: ``gather(convert(x))`` becomes
``convert(gather(x))`` where the conversion widens. Otherwise logits that a loss converts to float32 are stored in both dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np

from shardwise.capture import control, equations
from shardwise.capture import jax_internals as internals
from shardwise.capture.expand import called
from shardwise.capture.leaves import dtype_of, in_host_memory
from shardwise.capture.trace import Traced
from shardwise.errors import CaptureError
from shardwise.ir.collector import collector_paused
from shardwise.ir.program import Argument, Contents, Op, Origin, Program, Region, Scope, Source, Unit, Value
from shardwise.ir.rule import Factor, Rule
from shardwise.ir.rule import Kind as FactorKind
from shardwise.ir.traits import WIDER
from shardwise.rules.call import OpCall, identity
from shardwise.rules.flops import count_flops
from shardwise.rules.registry import KERNELS, find_rule

#: A scalar in the program as an operand; a dead input, output or result of a loop or branch. While a program is built, smaller
#: numbers are scalars.
NO_VALUE: Final = -1


@collector_paused()
def lower(traced: Traced) -> Program:
    """Returns the program of a traced function."""
    b = Builder(traced.name)
    jaxpr = internals.split_jaxpr(traced.jaxpr)[0]
    for var, argument in zip(jaxpr.invars, traced.arguments, strict=True):
        b.source_value("argument", var.aval, Origin.ARGUMENT, argument.path)
    inner = b.inline(traced.jaxpr, [a.value for a in traced.arguments], scope=0)
    outputs = []
    for value, var, path in zip(inner, jaxpr.outvars, traced.output_paths, strict=True):
        out = b.value(var.aval, Origin.OUTPUT, path)
        b.op("output", [value], [out], identity(internals.shape_of(var.aval)))
        outputs.append(out)
    return b.finish(traced.arguments, outputs)


@cache
def _blocked(rule: Rule) -> Rule:
    """Returns the rule with all factors blocked."""
    reason = "inside of a shard_map arrays are local"
    factors = (
        f if f.kind is FactorKind.BLOCKED else Factor(f.size, FactorKind.BLOCKED, "", reason) for f in rule.factors
    )
    return replace(rule, factors=tuple(factors))


class Builder:
    """The program under construction. ``control.py`` uses it for loops and branches."""

    def __init__(self, name: str):
        self.name = name
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.regions: list[Region] = [Region(0, "program", -1, -1, (), (), ())]
        self.scopes: list[Scope] = [Scope(0, "program", name, -1, 0)]
        self.region = 0
        self.manual = False  # inside of a shard_map, where arrays are local and all factors are blocked
        self.effects: set[int] = set()
        self._equations: list[Any] = []  # by op
        self._constants: dict[int, Any] = {}
        self._scalars: list[Any] = []
        self._sources: list[tuple[Any, int]] = []  # source information and scope of each equation
        self._call_sites = [-1]  # by scope: the source of the equation that called it
        self._source = -1
        self._scope = 0
        self._equation = -1
        self._current: Any = None
        self._section = 0
        self._numbers: dict[Any, int] = {}  # of ``_params``
        self._rules: dict[Any, tuple[Rule, dict[str, Any]]] = {}
        self._memo: dict[Any, list[int]] = {}
        self._widened: dict[tuple[int, int, int], int] = {}
        self._reshaped: dict[tuple[int, int, int], int] = {}

    # Values and ops.

    def value(self, aval: Any, origin: Origin = Origin.RESULT, path: str = "") -> int:
        if internals.is_reference(aval):
            raise CaptureError(
                f"{self.name} reads or changes a mutable array that it did not create, which cannot be planned: take an "
                "array and return the new one"
            )
        dtype, itemsize = dtype_of(aval)
        host = in_host_memory(aval)
        self.values.append(Value(len(self.values), internals.shape_of(aval), dtype, itemsize, origin, path, host))
        return len(self.values) - 1

    def op(self, kind: str, operands: Sequence[int], results: Sequence[int], rule: Rule | None, **more: Any) -> int:
        if self.manual and rule is not None and not kind.startswith("shard_map."):
            rule = _blocked(rule)
        op = Op(
            id=len(self.ops),
            kind=kind,
            operands=tuple(operands),
            results=tuple(results),
            rule=rule,
            region=self.region,
            source=self._source,
            scope=self._scope,
            equation=self._equation,
            **more,
        )
        self.ops.append(op)
        self._equations.append(self._current)
        return op.id

    def source_value(self, kind: str, aval: Any, origin: Origin, path: str = "") -> int:
        """Returns the value of an argument or a constant, with a factor per dimension."""
        value = self.value(aval, origin, path)
        self.op(kind, (), (value,), identity(self.values[value].shape, operands=0))
        return value

    def constant(self, array: Any) -> int:
        aval = array.aval if hasattr(array, "aval") else array
        if not internals.shape_of(aval) and not internals.is_reference(aval):
            self._scalars.append(array)
            return NO_VALUE - len(self._scalars)
        value = self.source_value("constant", aval, Origin.CONSTANT)
        self._constants[value] = array
        return value

    # Equations.

    def inline(self, closed: Any, args: Sequence[int], scope: int, region: int | None = None) -> list[int]:
        """Lowers the equations of a jaxpr, in the current region or another, and returns its outputs' values."""
        jaxpr, consts = internals.split_jaxpr(closed)
        inputs = [*map(self.constant, consts), *args]
        saved = self.region, self._source, self._scope, self._equation, self._current
        self.region = self.region if region is None else region

        def run(number: int, operands: list[int]) -> list[int]:
            self._scope, self._equation, self._current = scope, number, jaxpr.eqns[number]
            self._source = len(self._sources)
            self._sources.append((self._current.source_info, scope))
            return self._equation_results(jaxpr, number, operands)

        outputs = internals.interpret(
            jaxpr, inputs, run, lambda atom: self.constant(np.asarray(atom.val, atom.aval.dtype))
        )
        self.region, self._source, self._scope, self._equation, self._current = saved
        return outputs

    def _equation_results(self, jaxpr: Any, number: int, operands: list[int]) -> list[int]:
        equation = jaxpr.eqns[number]
        name = equation.primitive.name
        inner = called(jaxpr, number)
        if inner is not None:
            return self._call(equation, inner, operands)
        if name in control.LOWERINGS:
            return control.LOWERINGS[name](self, equation, operands)
        if equations.is_identity(equation):
            return operands
        params = self._params(equation)
        key = self._key(equation, params, operands)
        simpler = self._simplified(equation, operands, key)
        if simpler is not None:
            return simpler
        results = [self.value(var.aval) for var in equation.outvars]
        if name == "optimization_barrier":
            for operand, result in zip(operands, results, strict=True):
                self.op(name, [operand], [result], identity(self.values[result].shape))
            return results
        rule, more = self._rule(equation, params)
        op_operands, op_results = self._narrow_gather(equation, operands, results)
        op = self.op(name, op_operands, op_results, rule, **more)
        if op_results is not results:
            self.op("convert_element_type", op_results, results, identity(self.values[results[0]].shape))
        if equation.effects:
            self.effects.add(op)
        self._memoize(equation, operands, results, rule, key)
        return results

    # Simplifications. They apply within a section: a region, or a remat with a barrier in it.

    def _simplified(self, equation: Any, operands: list[int], key: Any) -> list[int] | None:
        """Returns the earlier values that an equation computes again; None if it computes something new."""
        if key in self._memo:
            return self._memo[key]
        if equations.only_reshapes(equation):
            before = self._reshaped.get((self.region, self._section, operands[0]), NO_VALUE)
            if before >= 0 and self.values[before].shape == internals.shape_of(equation.outvars[0].aval):
                return [before]
        return None

    def _narrow_gather(self, equation: Any, operands: list[int], results: list[int]) -> tuple[list[int], list[int]]:
        """Returns the operands and results of an op. A gather from a widened array reads the array before widening."""
        if equation.primitive.name == "gather":
            narrow = self._widened.get((self.region, self._section, operands[0]))
            if narrow is not None and equations.fills_alike(equation, self.values[narrow].dtype):
                number, like = len(self.values), self.values[narrow]
                self.values.append(
                    replace(like, id=number, shape=self.values[results[0]].shape, origin=Origin.RESULT, path="")
                )
                return [narrow, *operands[1:]], [number]
        return operands, results

    def _memoize(self, equation: Any, operands: list[int], results: list[int], rule: Rule, key: Any) -> None:
        """Stores the results with which later equations can be simplified."""
        # Two results with a dimension that no operand has could be sharded differently.
        if key is not None and not any(f.kind is FactorKind.FREE for f in rule.factors):
            self._memo[key] = results
        if equations.only_reshapes(equation):
            self._reshaped[self.region, self._section, results[0]] = operands[0]
        if equation.primitive.name == "convert_element_type" and operands[0] >= 0:
            old, new = self.values[operands[0]].dtype, self.values[results[0]].dtype
            if "float" in old and new in WIDER.get(old, ()):
                self._widened[self.region, self._section, results[0]] = operands[0]

    def _params(self, equation: Any) -> int:
        """Returns a number for the primitive and parameters of an equation; -1 if a parameter cannot be hashed."""
        try:
            key = (equation.primitive, frozenset(equation.params.items()))
            return self._numbers.setdefault(key, len(self._numbers))
        except TypeError:
            return -1

    def _key(self, equation: Any, params: int, operands: list[int]) -> Any:
        """Returns a key that is equal for equal equations of one section; None if they cannot be compared."""
        if params < 0 or equation.effects or equation.primitive.name == "optimization_barrier":
            return None
        scalars = [a for a, v in zip(equation.invars, operands, strict=True) if v < 0]
        if not all(map(internals.is_literal, scalars)):  # arguments of a call
            return None
        literals = tuple((a.aval.dtype, internals.is_weak(a.aval), str(a.val)) for a in scalars)
        return self.region, self._section, params, literals, *[max(v, NO_VALUE) for v in operands]

    def _call(self, equation: Any, jaxpr: Any, operands: list[int]) -> list[int]:
        name, params = equation.primitive.name, equation.params
        kind = f"written out {name}" if name in control.LOWERINGS else name
        kind = "remat" if name in internals.REMAT else kind
        has_barrier = kind == "remat" and equations.has_barrier(equation)
        label = params.get("name") or getattr(internals.split_jaxpr(jaxpr)[0].debug_info, "func_name", "")
        scope = self.new_scope(kind, str(label), has_barrier)
        outer = self._section
        if has_barrier:
            self._section = scope
        results = self.inline(jaxpr, operands, scope)
        self._section = outer
        return results

    def new_scope(self, kind: str, name: str, has_barrier: bool = False) -> int:
        scope = Scope(len(self.scopes), kind, name, self._scope, self.region, has_barrier)
        self.scopes.append(scope)
        self._call_sites.append(self._source)
        return scope.id

    def _rule(self, equation: Any, params: int) -> tuple[Rule, dict[str, Any]]:
        """Returns the rule of an equation, and other fields of its op."""
        operands = tuple([internals.shape_of(v.aval) for v in equation.invars])
        results = tuple([internals.shape_of(v.aval) for v in equation.outvars])
        dtypes = tuple([dtype_of(v.aval)[0] for v in equation.invars])
        key = (self.manual, params, operands, results, dtypes)
        if key in self._rules:
            return self._rules[key]
        call = OpCall(equation.primitive.name, equation.params, operands, results, dtypes)
        rule, opaque = find_rule(call, equations.kernel_name(equation), equations.stated_rule(equation))
        flops, unit = count_flops(call, rule)
        if opaque or call.kind in KERNELS:
            flops, unit = equations.kernel_flops(equation), Unit.KERNEL
        attributes = equations.equation_attributes(equation)
        if opaque:
            attributes += (("kernel", equations.kernel_name(equation)),)
        more = {"flops": flops, "unit": unit, "opaque": "" if self.manual else opaque, "attributes": attributes}
        if params >= 0:
            self._rules[key] = rule, more
        return rule, more

    # The end.

    def finish(self, arguments: tuple[Argument, ...], outputs: Sequence[int]) -> Program:
        """Returns the program without dead ops and values; the others get new numbers, except arguments, which are first."""
        alive = self._alive()
        live = [op for op in self.ops if op.id in alive]
        op_ids = {op.id: k for k, op in enumerate(live)}
        used = {v for op in live for v in (*op.operands, *(op.results if op.rule is not None else ()))}
        value_ids = {v: k for k, v in enumerate(sorted(v for v in used if v >= 0))}
        members: dict[int, list[int]] = {}
        for op in live:
            members.setdefault(op.region, []).append(op_ids[op.id])

        def new(values: Sequence[int]) -> tuple[int, ...]:
            return tuple([value_ids.get(v, NO_VALUE) for v in values])

        operands = ((k, n, v) for k, op in enumerate(live) for n, v in enumerate(op.operands))
        return Program(
            self.name,
            values=tuple(
                Value(k, v.shape, v.dtype, v.itemsize, v.origin, v.path, v.host)  # faster than replace
                for k, v in enumerate(self.values[number] for number in value_ids)
            ),
            ops=tuple(
                Op(
                    id=k,
                    kind=op.kind,
                    operands=new(op.operands),
                    results=new(op.results),
                    rule=op.rule,
                    region=op.region,
                    source=op.source,
                    scope=op.scope,
                    equation=op.equation,
                    flops=op.flops,
                    unit=op.unit,
                    regions=op.regions,
                    links=tuple([op_ids[link] for link in op.links if link in alive]),
                    opaque=op.opaque,
                    attributes=op.attributes,
                )
                for k, op in enumerate(live)
            ),
            regions=tuple(
                replace(
                    r,
                    owner=op_ids.get(r.owner, -1),
                    inputs=new(r.inputs),
                    outputs=new(r.outputs),
                    ops=tuple(members.get(r.id, ())),
                )
                for r in self.regions
            ),
            scopes=tuple(self.scopes),
            arguments=arguments,
            outputs=new(outputs),
            sources=cache(self._resolver()),
            contents=Contents(
                tuple(self._equations[op.id] for op in live),
                {value_ids[v]: array for v, array in self._constants.items() if v in value_ids},
                {(k, n): self._scalars[NO_VALUE - 1 - v] for k, n, v in operands if v < NO_VALUE},
            ),
        )

    def _alive(self) -> set[int]:
        """Returns the ops that an output or an effect depends on, and all arguments; an unused carry is dead."""
        producers: dict[int, int] = {}
        for op in self.ops:
            if op.rule is not None:
                producers.update((v, op.id) for v in op.results)
        owner_of = {region.id: region.owner for region in self.regions}
        alive: set[int] = set()
        stack = [op.id for op in self.ops if op.kind in ("output", "argument") or op.id in self.effects]
        while stack:
            k = stack.pop()
            if k in alive:
                continue
            alive.add(k)
            op = self.ops[k]
            stack += [producers[v] for v in op.operands if v >= 0 and producers[v] not in alive]
            owner = op.attribute("owner", owner_of[op.region])
            if owner >= 0:
                stack.append(owner)
        return alive

    def _resolver(self) -> Callable[[int], Source]:
        """Returns the function from the number of a source to the user's line."""
        sources, scopes, call_sites = self._sources, self.scopes, self._call_sites

        def name_stack(index: int) -> str:
            """Returns the name stack of an equation; that of a called jaxpr starts at the call."""
            info, scope = sources[index]
            outer = name_stack(call_sites[scope]) if call_sites[scope] >= 0 else ""
            return "/".join(filter(None, (outer, equations.name_stack(info))))

        def resolve(index: int) -> Source:
            if index < 0:
                return Source()
            info, scope = sources[index]
            site, name = call_sites[scope], scopes[scope].name
            names = name_stack(index)
            frame, library = equations.user_frame(info)
            # A jitted function of JAX is traced once: its lines are those of its first caller.
            if site >= 0 and (frame is None or (name and name in library)):
                return resolve(site)
            return Source(names=names) if frame is None else Source(frame.file_name, frame.line_num, names)

        return resolve
