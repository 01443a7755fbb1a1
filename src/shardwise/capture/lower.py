"""From a jaxpr to a :class:`~shardwise.ir.program.Program`.

Calls are inlined, each leaving a :class:`Scope`; loops and branches become regions with link ops at their borders (see
``control.py``); everything else is one op with the rule that ``rules.registry`` gives it.

Programs are simplified as XLA does it, so that costs are counted once: equal equations of one section are one op, a reshape
back to an earlier shape is no op, and dead ops are removed. One simplification is not XLA's: ``gather(convert(x))`` becomes
``convert(gather(x))`` where the conversion widens. Otherwise logits that a loss converts to float32 are stored in both dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from shardwise.capture import control, equations
from shardwise.capture import jax_internals as internals
from shardwise.capture.expand import called
from shardwise.capture.trace import Traced
from shardwise.errors import CaptureError
from shardwise.ir.collector import collector_paused
from shardwise.ir.program import Argument, Op, Origin, Program, Region, Scope, Source, Sources, Unit, Value
from shardwise.ir.rule import Factor, Rule
from shardwise.ir.rule import Kind as FactorKind
from shardwise.ir.traits import WIDER
from shardwise.rules.call import OpCall, pointwise
from shardwise.rules.flops import count_flops
from shardwise.rules.registry import KERNELS, Found, find_rule
from shardwise.rules.shape import free_results

#: An operand that is a scalar literal.
LITERAL = -1
#: A dead input, output or result of a loop or branch; these are counted by position.
DEAD = -1

_Attributes = tuple[tuple[str, Any], ...]


@collector_paused
def lower(traced: Traced) -> Program:
    """Builds the program of a traced function."""
    b = Builder(traced.name)
    jaxpr, consts = internals.split_jaxpr(traced.jaxpr)
    arguments = []
    for var, leaf in zip(jaxpr.invars, traced.leaves, strict=True):
        value = b.source_value("argument", var.aval, Origin.ARGUMENT, leaf.path)
        arguments.append(Argument(value, leaf.path, leaf.donated, leaf.spec))
    constants = [b.constant(c) for c in consts]
    inner = b.inline(jaxpr, constants, [a.value for a in arguments], scope=0)
    outputs = []
    for value, var, path in zip(inner, jaxpr.outvars, traced.output_paths, strict=True):
        out = b.value(var.aval, Origin.OUTPUT, path)
        b.op("output", [value], [out], b.identity(internals.shape_of(var.aval), 1))
        outputs.append(out)
    return b.finish(arguments, outputs)


@cache
def _blocked(rule: Rule) -> Rule:
    """Returns the rule with all factors blocked."""
    reason = "inside of a shard_map arrays are local"
    kept = (f if f.kind is FactorKind.BLOCKED else Factor(f.size, FactorKind.BLOCKED, "", reason) for f in rule.factors)
    return replace(rule, factors=tuple(kept))


class Builder:
    """The program under construction. ``control.py`` uses it for loops and branches."""

    def __init__(self, name: str):
        self.name = name
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.regions: list[Region] = [Region(0, "program", -1, -1, (), (), ())]
        self.scopes: list[Scope] = [Scope(0, "program", name, -1, -1, 0)]
        self.region = 0
        self.effects: set[int] = set()
        self._sources: list[tuple[Any, int]] = []
        self._source = -1
        self._scope = 0
        self._equation = -1
        self._manual = False
        self._rules: dict[Any, tuple[Found, float, Unit]] = {}
        self._section = 0
        self._memo: dict[Any, tuple[list[int], tuple[int, int]]] = {}
        self.repeats: dict[tuple[int, int], tuple[int, int]] = {}
        self.undone: set[tuple[int, int]] = set()
        self._widened: dict[tuple[int, int, int], int] = {}
        self._reshaped: dict[tuple[int, int, int], int] = {}
        self._identities: dict[tuple[tuple[int, ...], int, int], Rule] = {}

    # Values and ops.

    def value(self, aval: Any, origin: Origin = Origin.RESULT, path: str = "") -> int:
        dtype, itemsize = internals.dtype_of(aval)
        self.values.append(Value(len(self.values), internals.shape_of(aval), dtype, itemsize, origin, path))
        return len(self.values) - 1

    def op(self, kind: str, operands: Sequence[int], results: Sequence[int], rule: Rule | None, **more: Any) -> int:
        if self._manual and rule is not None and not kind.startswith("shard_map."):
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
        return op.id

    def source_value(self, kind: str, aval: Any, origin: Origin, path: str = "") -> int:
        """Returns the value of an argument or a constant, with a factor per dimension."""
        value = self.value(aval, origin, path)
        self.op(kind, (), (value,), free_results(OpCall(kind, {}, (), (self.values[value].shape,))))
        return value

    def constant(self, array: Any) -> int:
        aval = array.aval if hasattr(array, "aval") else array
        if not internals.shape_of(aval):
            return LITERAL
        return self.source_value("constant", aval, Origin.CONSTANT)

    def identity(self, shape: tuple[int, ...], results: int, operands: int = 1) -> Rule:
        """Returns the elementwise rule of ``operands`` inputs and ``results`` outputs of one shape."""
        key = (shape, results, operands)
        if key not in self._identities:
            self._identities[key] = pointwise(OpCall("identity", {}, (shape,) * operands, (shape,) * results))
        return self._identities[key]

    # Equations.

    def inline(self, jaxpr: Any, consts: Sequence[int], args: Sequence[int], scope: int) -> list[int]:
        """Lowers the equations of an open jaxpr in place and returns its outputs' values."""
        env: dict[Any, int] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        saved = self._source, self._scope, self._equation
        for number, equation in enumerate(jaxpr.eqns):
            self._scope, self._equation = scope, number
            self._source = len(self._sources)
            self._sources.append((equation.source_info, scope))
            operands = [self._read(env, atom) for atom in equation.invars]
            env.update(zip(equation.outvars, self._equation_results(jaxpr, number, operands), strict=True))
        self._source, self._scope, self._equation = saved
        return [self._read(env, atom) for atom in jaxpr.outvars]

    def _read(self, env: dict[Any, int], atom: Any) -> int:
        if not internals.is_literal(atom):
            return env[atom]
        return self.constant(atom.val) if internals.shape_of(atom.aval) else LITERAL

    def _equation_results(self, jaxpr: Any, number: int, operands: list[int]) -> list[int]:
        equation = jaxpr.eqns[number]
        name = equation.primitive.name
        if any(internals.is_reference(atom) for atom in (*equation.invars, *equation.outvars)):
            raise CaptureError(
                f"{self.name} reads or changes a mutable array that it did not make itself ({name} of a reference), which "
                "cannot be planned: take an array and return the new one"
            )
        inner = called(jaxpr, number)
        if inner is not None:
            return self._call(equation, inner, operands)
        if name in control.LOWERINGS:
            return control.LOWERINGS[name](self, equation, operands)
        if equations.is_identity(equation):
            return operands
        key = self._key(equation, operands)
        simpler = self._simplified(equation, operands, key)
        if simpler is not None:
            return simpler
        results = [self.value(var.aval) for var in equation.outvars]
        if name == "optimization_barrier":
            for k, (operand, result) in enumerate(zip(operands, results, strict=True)):
                rule = self.identity(self.values[result].shape, 1)
                self.op(name, (operand,), (result,), rule, attributes=(("position", k),))
            return results
        found, flops, unit = self._rule(equation)
        attributes = equations.equation_attributes(equation)
        if found.opaque:
            attributes += (("kernel", equations.kernel_name(equation)),)
        op_operands, op_results = self._narrow_gather(equation, operands, results)
        op = self.op(
            name,
            op_operands,
            op_results,
            found.rule,
            flops=flops,
            unit=unit,
            opaque="" if self._manual else found.opaque,
            attributes=attributes,
        )
        if op_results is not results:
            self.op("convert_element_type", op_results, results, self.identity(self.values[results[0]].shape, 1))
        if equation.effects:
            self.effects.add(op)
        self._memoize(equation, operands, results, found.rule, key)
        return results

    # Simplifications. They hold within a section: a region, or a remat with a barrier in it.

    def _simplified(self, equation: Any, operands: list[int], key: Any) -> list[int] | None:
        """Returns the earlier values that an equation computes again; None if it computes something new."""
        place = (self._scope, self._equation)
        if key in self._memo:
            results, self.repeats[place] = self._memo[key]
            return results
        before = self._reshaped.get((self.region, self._section, operands[0] if operands else LITERAL), LITERAL)
        shape = internals.shape_of(equation.outvars[0].aval) if equation.outvars else ()
        if before != LITERAL and equations.only_reshapes(equation) and self.values[before].shape == shape:
            self.undone.add(place)
            return [before]
        return None

    def _narrow_gather(self, equation: Any, operands: list[int], results: list[int]) -> tuple[list[int], list[int]]:
        """Returns the operands and results of an op. A gather from a widened array reads the array before widening."""
        narrow = self._widened.get((self.region, self._section, operands[0] if operands else LITERAL))
        if equation.primitive.name != "gather" or narrow is None:
            return operands, results
        if not equations.fills_alike(equation, self.values[narrow].dtype):
            return operands, results
        return [narrow, *operands[1:]], [self._retyped(results[0], narrow)]

    def _memoize(self, equation: Any, operands: list[int], results: list[int], rule: Rule, key: Any) -> None:
        """Stores the results with which later equations can be simplified."""
        name = equation.primitive.name
        # Two results with a dimension that no operand has could be sharded differently.
        if key is not None and not any(f.kind is FactorKind.FREE for f in rule.factors):
            self._memo[key] = results, (self._scope, self._equation)
        place = (self.region, self._section, results[0] if results else LITERAL)
        if equations.only_reshapes(equation):
            self._reshaped[place] = operands[0]
        if name == "convert_element_type" and operands[0] >= 0 and self._is_widening(operands[0], results[0]):
            self._widened[place] = operands[0]

    def _is_widening(self, value: int, result: int) -> bool:
        old, new = self.values[value].dtype, self.values[result].dtype
        return "float" in old and new in WIDER.get(old, ())

    def _retyped(self, value: int, like: int) -> int:
        """Returns a new value with the shape of one and the dtype of another."""
        other = self.values[like]
        new = replace(self.values[value], id=len(self.values), dtype=other.dtype, itemsize=other.itemsize)
        self.values.append(new)
        return len(self.values) - 1

    def _key(self, equation: Any, operands: list[int]) -> Any:
        """Returns a key that is equal for equal equations of one section; None if they cannot be compared."""
        if equation.effects or equation.primitive.name == "optimization_barrier":
            return None
        scalars = [a for a, v in zip(equation.invars, operands, strict=True) if v == LITERAL]
        if not all(map(internals.is_literal, scalars)):  # arguments of a call
            return None
        literals = tuple((str(a.aval), str(a.val)) for a in scalars)
        key = (
            self.region,
            self._section,
            equation.primitive,
            *operands,
            literals,
            tuple(sorted(equation.params.items())),
        )
        try:
            hash(key)
        except TypeError:  # a parameter that cannot be hashed
            return None
        return key

    def _call(self, equation: Any, jaxpr: Any, operands: list[int]) -> list[int]:
        name = equation.primitive.name
        inner, consts = internals.split_jaxpr(jaxpr)
        attributes: _Attributes = ()
        if name in internals.REMAT:
            params = equation.params
            attributes = tuple((k, params[k]) for k in ("differentiated", "prevent_cse") if k in params)
        kind = "remat" if name in internals.REMAT else f"written out {name}" if name in control.LOWERINGS else name
        label = equation.params.get("name") or getattr(inner.debug_info, "func_name", "")
        scope = self.new_scope(kind, str(label), attributes)
        outer = self._section
        if self.scopes[scope].has_barrier:
            self._section = scope
        results = self.inline(inner, [self.constant(c) for c in consts], operands, scope)
        self._section = outer
        return results

    def new_scope(self, kind: str, name: str, attributes: _Attributes = ()) -> int:
        scope = Scope(len(self.scopes), kind, name, self._scope, self._equation, self.region, attributes)
        self.scopes.append(scope)
        return scope.id

    def _rule(self, equation: Any) -> tuple[Found, float, Unit]:
        shapes = tuple((internals.shape_of(v.aval), internals.dtype_of(v.aval)[0]) for v in equation.invars)
        results = tuple((internals.shape_of(v.aval), internals.dtype_of(v.aval)[0]) for v in equation.outvars)
        key: Any = (equation.primitive.name, shapes, results, tuple(equation.params.values()))
        try:
            cached = self._rules.get(key)
        except TypeError:  # a parameter that cannot be hashed
            key, cached = None, None
        if cached is not None:
            return cached
        call = OpCall(
            equation.primitive.name,
            equation.params,
            tuple(s for s, _ in shapes),
            tuple(s for s, _ in results),
            tuple(d for _, d in shapes),
        )
        found = find_rule(call, equations.kernel_name(equation), equations.stated_rule(equation))
        flops, unit = count_flops(call, found.rule)
        if found.opaque or call.kind in KERNELS:
            flops, unit = equations.kernel_flops(equation), Unit.KERNEL
        if key is not None:
            self._rules[key] = found, flops, unit
        return found, flops, unit

    @contextmanager
    def manually(self) -> Iterator[None]:
        """Blocks the factors of everything that is lowered inside: its arrays are local."""
        outer, self._manual = self._manual, True
        yield
        self._manual = outer

    # Regions.

    def in_region(
        self, kind: str, owner: int, trips: int, known: bool, body: Callable[[], tuple[list[int], list[int]]]
    ) -> int:
        """Runs ``body`` (which returns inputs and outputs) with its ops in a new region, and returns the region."""
        region = Region(len(self.regions), kind, self.region, owner, (), (), (), trips, known)
        self.regions.append(region)
        outer, self.region = self.region, region.id
        inputs, outputs = body()
        self.region = outer
        self.regions[region.id] = replace(region, inputs=tuple(inputs), outputs=tuple(outputs))
        return region.id

    # The end.

    def finish(self, arguments: Sequence[Argument], outputs: Sequence[int]) -> Program:
        alive = self._alive()
        op_ids = {op.id: k for k, op in enumerate(op for op in self.ops if op.id in alive)}
        used = {v for op in self.ops if op.id in alive and op.rule is not None for v in (*op.operands, *op.results)}
        used |= {v for op in self.ops if op.id in alive for v in op.operands}
        used.discard(LITERAL)
        value_ids = {v: k for k, v in enumerate(sorted(used))}
        value_ids[LITERAL] = LITERAL
        ops = tuple(
            replace(
                op,
                id=op_ids[op.id],
                operands=tuple(value_ids[v] for v in op.operands),
                results=tuple(value_ids.get(v, DEAD) for v in op.results),
                links=tuple(op_ids[k] for k in op.links if k in alive),
            )
            for op in self.ops
            if op.id in alive
        )
        members: dict[int, list[int]] = {}
        for op in ops:
            members.setdefault(op.region, []).append(op.id)
        regions = tuple(
            replace(
                r,
                owner=op_ids.get(r.owner, -1),
                inputs=tuple(value_ids.get(v, DEAD) for v in r.inputs),
                outputs=tuple(value_ids.get(v, DEAD) for v in r.outputs),
                ops=tuple(members.get(r.id, ())),
            )
            for r in self.regions
        )
        values = tuple(replace(self.values[v], id=k) for v, k in value_ids.items() if v != LITERAL)
        return Program(
            self.name,
            values,
            ops,
            regions,
            tuple(self.scopes),
            tuple(replace(a, value=value_ids[a.value]) for a in arguments),
            tuple(value_ids[v] for v in outputs),
            Sources(self._resolver(), len(self._sources)),
            self.repeats,
            frozenset(self.undone),
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
            stack += [producers[v] for v in op.operands if v != LITERAL and producers[v] not in alive]
            owner = op.attribute("owner", owner_of[op.region])
            if owner >= 0:
                stack.append(owner)
        return alive

    def _resolver(self) -> Callable[[int], Source]:
        sources, scopes = self._sources, self.scopes
        call_sites = self._call_sites()

        def name_stack(index: int) -> str:
            """Returns the name stack of an equation; that of a called jaxpr starts at the call."""
            info, scope = sources[index]
            outer = name_stack(call_sites[scope]) if call_sites[scope] >= 0 else ""
            return "/".join(filter(None, (outer, equations.name_stack(info))))

        def resolve(index: int) -> Source:
            info, scope = sources[index]
            library: list[str] = []
            names = name_stack(index)
            for frame, is_library in equations.frames(info):
                if is_library:
                    library.append(frame.function)
                    continue
                # A jitted function of JAX is traced once: its lines are those of its first caller.
                called = scopes[scope]
                site = call_sites[scope]
                if site >= 0 and any(called.name and f.split(".")[-1] == called.name for f in library):
                    return resolve(site)
                return Source(frame.file, frame.line, frame.function, names)
            return resolve(call_sites[scope]) if call_sites[scope] >= 0 else Source(names=names)

        return resolve

    def _call_sites(self) -> list[int]:
        """Returns, for every scope, the source entry of the equation that called it."""
        entries: dict[tuple[int, int], int] = {}
        counts: dict[int, int] = {}
        for index, (_, scope) in enumerate(self._sources):
            number = counts.get(scope, 0)
            counts[scope] = number + 1
            entries[scope, number] = index
        return [entries.get((s.parent, s.equation), -1) for s in self.scopes]
