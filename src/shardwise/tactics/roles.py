"""Which arguments are the batch, the parameters, the optimizer's state, a cache: inferred from structure, never from names.

- An argument *comes back* if an output replaces it (``shardwise.dims.replaced``).
- The *batch* has one color in its first dimension that no loop runs over: of these dimensions of all arguments, the one that
  most products have; where no argument comes back, and no gradient is taken then, one that no product contracts. A color of
  arguments that come back is not the batch's if a product contracts it: the gradient of a parameter sums over the batch, and
  no parameter has the batch's dimension; where there is no other, it may be the one that most gradients sum over. Nor is one
  that every product of such an argument contracts (a frozen weight). One of which all arguments come back (the experts of a
  layer, the networks of an ensemble) is, only if there is no other. Arrays that are addressed by the batch, and added up by
  the same indices (nodes of a graph, by its edges), belong to it, and so do other examples over which gradients of parameters
  are summed. Where examples are drawn inside of the program, the batch is what they are drawn from (``tactics.drawn``). Where
  there is no such color, or only arguments that come back have it, the batch may be one example, ``[1, sequence]`` of integers
  or ``[1, sequence, width]``: then it is the color behind the dimension of size one.
- *Params* are floating-point arguments that come back, without the batch's dimension, and influence both an output that
  replaces no argument, and a product before they are updated: moments reach products of the same step through parameters that
  they changed (two networks that are trained in turn, several updates in a loop). So are those that do not come back
  (inference, frozen layers): the operands of products, also quantized ones, tables that a gather looks into, and arguments
  that have only dimensions of these.
- A *cache* comes back and has the batch's dimension; integers that do are the batch, as the tokens that a decoding step returns
  for the next one. The *optimizer* is whatever else comes back, where there are params; where none of them comes back it is
  a cache (the pages of a decoding step).

Weak: the batch of a step that maps over its examples one by one is not found. A table of positions that is added to
activations is no parameter of an inference step: only its name tells it from a mask.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final

from shardwise.dims.analysis import Analysis
from shardwise.dims.replaced import depends_on, is_floating
from shardwise.ir.paths import find_paths, trees
from shardwise.ir.program import HEAVY, Op, Value
from shardwise.ir.rule import Kind
from shardwise.ir.traits import ADDING_SCATTERS, IN_PLACE, WRITE_PARTS
from shardwise.tactics.drawn import drawn_rows

#: Roles in the order in which they are shown.
ROLES: Final = ("batch", "params", "optimizer", "cache")
#: Types of weights that are multiplied by a scale.
_QUANTIZED: Final = ("int2", "int4", "int8", "uint2", "uint4", "uint8")
#: By role: the paths of its arguments, as users write them.
RolesLike = Mapping[str, str | Sequence[str]]
#: The same, by paths of arguments or of trees of them.
Roles = dict[str, tuple[str, ...]]
#: What errors say where a role is needed that no argument has.
NAME_THEM: Final = (
    "the structure of the program does not show it, so name them, as in plan(..., roles={'batch': 'path'})"
)


def complete_roles(analysis: Analysis, stated: RolesLike | None) -> Roles:
    """Returns the roles of a program's arguments: those that are stated, and others inferred from its structure.

    >>> import jax, shardwise
    >>> def step(state, x):
    ...     loss, g = jax.value_and_grad(lambda w: ((x @ w) ** 2).sum())(state["w"])
    ...     mean = 0.9 * state["mean"] + g
    ...     return {"w": state["w"] - mean, "mean": mean}, loss
    >>> w, x = (jax.ShapeDtypeStruct(s, "float32") for s in [(16, 8), (512, 16)])
    >>> analysis = shardwise.analyze(step, {"w": w, "mean": w}, x)
    >>> complete_roles(analysis, None)
    {'batch': ('x',), 'params': ('state/w',), 'optimizer': ('state/mean',)}
    >>> complete_roles(analysis, {"params": "state"})
    {'batch': ('x',), 'params': ('state',)}
    """
    arguments = analysis.program.named_paths[0]
    roles: dict[str, list[str]] = {}
    for role, asked in (stated or {}).items():
        several = (asked,) if isinstance(asked, str) else asked
        roles[role] = [path for one in several for path in find_paths(one, arguments, what="argument")]
    taken = {path for paths in roles.values() for path in paths}
    inferred = {} if {"batch", "params"} <= roles.keys() else _Inference(analysis).roles()
    for role, paths in inferred.items():
        roles.setdefault(role, [path for path in paths if path not in taken])
    order = [role for role in dict.fromkeys((*ROLES, *roles)) if roles.get(role)]
    return {role: tuple(trees(roles[role], arguments)) for role in order}


class _Inference:
    """Infers roles. A set of arguments is an integer, of which bit k is argument number k.

    ``leading`` are the colors in which the batch is looked for (``Analysis.leading_colors``), ``single`` those of arguments
    that may be one example; ``pairs``, by argument, the output that replaces it; ``returned`` the colors of these arguments.
    """

    def __init__(self, analysis: Analysis):
        self.analysis, self.program, self.colors = analysis, analysis.program, analysis.value_colors
        self.arguments = [self.program.values[a.value] for a in self.program.arguments]
        self.heavy = [op for op in self.program.ops if op.unit in HEAVY and op.rule is not None]
        self.leading = analysis.leading_colors
        self.pairs = analysis.replaced_by
        self.depends = depends_on(self.program)
        self.before = depends_on(self.program, self.pairs)
        self.returned = {c for v in self.pairs for c in self.colors[v]}
        self.single = self._single()
        self.leading = self.leading | self.single

    def _single(self) -> dict[int, int]:
        """Returns the colors behind a first dimension of size one, of arguments that do not come back, if one of these is the
        batch's: where no other is found, or one of arguments that come back alone, or only floats have it, and integers a
        dimension of size one."""
        behind = {v.id: self._behind_one(v) for v in self.arguments if v.id not in self.pairs}
        single, color = {v: c for v, c in behind.items() if c >= 0}, self._batch_color()
        fed = [
            v for v in self.arguments if v.id not in self.pairs and color is not None and self.leading[v.id] == color
        ]
        counted = any(not is_floating(self.program.values[v]) for v in single)
        if not single or (fed and not (counted and all(map(is_floating, fed)))):
            return {}
        leading, self.leading = self.leading, self.leading | single
        color = self._batch_color()
        self.leading = leading
        return single if color in single.values() else {}

    def _behind_one(self, value: Value) -> int:
        """Returns the color behind a first dimension of size one that could count examples, -1 where there is none."""
        if len(value.shape) < 2 + is_floating(value) or value.shape[0] != 1:
            return -1
        return next((c for c in self.colors[value.id][1:] if c >= 0), -1)

    def _argument(self, value: int) -> int:
        """Returns the argument that a value is, or is a view of; -1 if there is none."""
        return self.program.argument_of.get(value, -1)

    @staticmethod
    def reaching(values: Iterable[int], depends: Mapping[int, int]) -> int:
        """Returns the arguments that some of these values depend on."""
        return functools.reduce(operator.or_, (depends.get(v, 0) for v in values), 0)

    def _batch_color(self) -> int | None:
        contracted = {c for op in self.heavy for c, kind in self._kinds(op) if kind is Kind.REDUCTION}
        leading = [c for v in self.arguments if (c := self.leading[v.id]) >= 0]
        products = Counter(c for op in self.heavy for c in set(self.analysis.names.factor_colors(op.id)))
        shown = {self.colors[o][0] for o in self.program.outputs if self.colors[o]}
        conflicting = set(self.analysis.names.color[self.analysis.conflict_table.first].tolist())
        new = {self.leading[v.id] for v in self.arguments if v.id not in self.pairs and self._trains}
        fed = {self.leading[v.id] for v in self.arguments if self._is_fed(v)}

        def rank(color: int) -> tuple[bool, bool, bool, int, bool, bool, bool, int]:
            plain = (color not in contracted, color in shown, color not in conflicting)
            return (
                color in new,
                color in fed,
                not self.pairs and plain[0],
                products[color],
                *plain,
                leading.count(color),
            )

        no_batch = {c for c in contracted if c in self.returned} | self._contracted_alone()
        able = [c for c in dict.fromkeys(leading) if products[c] and c not in no_batch]
        able = able or [c for c in dict.fromkeys(leading) if c in self._summed_by_most]
        able = able or [c for c in self.drawn if c in contracted]
        return max(able, key=rank) if able else None

    @cached_property
    def drawn(self) -> dict[int, set[int]]:
        """By color of rows that are drawn from arguments: the leading colors of these arguments."""
        return drawn_rows(self.analysis)

    @cached_property
    def _summed_by_most(self) -> set[int]:
        """The colors over which more than half of the arguments that products update are summed: gradients of parameters are
        summed over the batch, and arguments with the batch's dimension are few beside them."""
        updated, counts = 0, Counter[int]()
        for argument, output in self.pairs.items():
            products = self._updating_products(output)
            summed = {c for op in products for c, kind in self._kinds(op) if kind is Kind.REDUCTION}
            counts.update(summed - set(self.colors[argument]))
            updated += bool(products)
        return {c for c, count in counts.items() if 2 * count > updated}

    def _updating_products(self, output: int) -> list[Op]:
        """Returns the products from which an output is computed element by element, also in another order of dimensions."""
        program, dims = self.program, Counter(c for c in self.colors[output] if c >= 0)
        seen, left, products = {output}, [output], dict[int, Op]()
        while left:
            op = program.ops[program.definitions[left.pop()][0]]
            if op.unit in HEAVY:
                products[op.id] = op
                continue
            new = {v for v in op.operands if v >= 0 and Counter(c for c in self.colors[v] if c >= 0) == dims}
            left += new - seen
            seen |= new
        return [op for op in products.values() if op.rule is not None]

    @cached_property
    def _written(self) -> set[int]:
        """The arguments that are written into a part of another one, as a new example is."""
        parts = (op.operands[WRITE_PARTS[op.kind]] for op in self.program.ops if op.kind in IN_PLACE)
        alone = [self.depends.get(v, 0) for v in parts]
        return {self.arguments[bits.bit_length() - 1].id for bits in alone if bits.bit_count() == 1}

    @cached_property
    def _trains(self) -> bool:
        """Returns whether something is added to an argument that comes back, as an update to a parameter. Positions and other
        integers are counted without training."""
        definitions, ops = self.program.definitions, self.program.ops
        pairs = ((a, o) for a, o in self.pairs.items() if is_floating(self.program.values[a]))
        makers = ((a, ops[definitions[ops[definitions[o][0]].operands[0]][0]]) for a, o in pairs)
        return any(op.kind in ("add", "add_any", "sub") and a in map(self._argument, op.operands) for a, op in makers)

    def _is_fed(self, value: Value) -> bool:
        """Returns whether an argument is new in every step. Integers that come back are fed in again: the tokens of a decoding
        step."""
        return value.id not in self.pairs or not is_floating(value)

    def _contracted_alone(self) -> set[int]:
        """Returns the leading colors of arguments of products, all of which contract them."""
        contracts: dict[int, bool] = {}
        for op in self.heavy:
            kinds = self._kinds(op)
            for argument, dims in zip(
                map(self._argument, op.operands), op.rule.operands if op.rule else (), strict=False
            ):
                for color, kind in {kinds[f] for dim in dims for f in dim if argument >= 0}:
                    if color == self.leading[argument]:
                        contracts[color] = contracts.get(color, True) and kind is Kind.REDUCTION
        return {color for color, alone in contracts.items() if alone}

    def _kinds(self, op: Op) -> list[tuple[int, Kind]]:
        """Returns the colors of an op's factors, and their kinds."""
        assert op.rule is not None
        kinds = (f.kind for f in op.rule.factors)
        return list(zip(self.analysis.names.factor_colors(op.id), kinds, strict=True))

    def _batch_colors(self) -> set[int]:
        """Returns the batch's color, those of further batches, and those from which it gathers and to which it scatters."""
        batch_color = self._batch_color()
        if batch_color is None:
            return set()
        reads: set[tuple[int, int]] = set()  # (addressed, by what)
        writes: set[tuple[int, int]] = set()
        for op in self.program.ops:
            if op.rule is None or op.kind not in ("gather", *ADDING_SCATTERS):
                continue
            kinds = self._kinds(op)
            by = {kinds[f][0] for dim in op.rule.operands[1] for f in dim}
            by -= {kinds[f][0] for dim in op.rule.operands[0] for f in dim}  # each example looks into itself
            addressed = {c for c, kind in kinds if kind is Kind.INDEXED}
            (reads if op.kind == "gather" else writes).update((a, b) for a in addressed for b in by - addressed)
        colors = {batch_color, *self._further_batches(batch_color)}
        for pair in map(set, sorted(reads & writes)):
            if pair & colors and not pair & self.returned:
                colors |= pair
        return colors.union(*(self.drawn[c] for c in colors & self.drawn.keys()))

    def _further_batches(self, batch_color: int) -> set[int]:
        """Returns the leading colors over which gradients of parameters are summed, but not together with the batch's: those of
        other examples (unlabeled ones, points on a boundary). A color that other arguments have further inside (a sequence,
        which a mask begins with) is none."""
        fed = [v for v in self.arguments if v.id not in self.pairs]
        inside = {c for v in fed for c in self.colors[v.id] if c != self.leading[v.id]}
        new = {self.leading[v.id] for v in fed} - inside - self.returned - {batch_color, -1} | self.drawn.keys()
        further: set[int] = set()
        for op in self.heavy if new and self._trains else ():
            kinds = self._kinds(op)
            summed = {c for c, kind in kinds if kind is Kind.REDUCTION}
            made = [c for v in op.results for c in self.colors[v] if c >= 0]
            if made and batch_color not in summed and self.returned.issuperset(made):
                further |= summed & new
        return further

    def roles(self) -> dict[str, list[str]]:
        """Returns the paths of the arguments by role."""
        batch_colors = self._batch_colors()
        outputs = [o for o in self.program.outputs if o not in self.pairs.values()]
        losses = self.reaching(outputs, self.depends)
        products = self.reaching((v for op in self.heavy for v in op.operands), self.before)
        roles: dict[str, list[str]] = {role: [] for role in ROLES}
        able = self.single or self.leading
        first = {v.id: able.get(v.id, -1) in batch_colors for v in self.arguments}
        examples = set[int]().union(*(self.drawn[c] for c in batch_colors & self.drawn.keys()))
        fed = {v.id for v in self.arguments if first[v.id] and (self._is_fed(v) or self.leading[v.id] in examples)}
        frozen = self._frozen(batch_colors)
        for k, v in enumerate(self.arguments):
            if v.id in fed or (first[v.id] and not fed):
                roles["batch"].append(v.path)
            elif v.id not in self.pairs:
                if v.id in frozen:
                    roles["params"].append(v.path)
            elif not self.single and batch_colors & set(self.colors[v.id]):
                roles["cache"].append(v.path)
            elif is_floating(v) and products >> k & 1 and (losses >> k & 1 or not losses & products):
                roles["params"].append(v.path)
            else:
                roles["optimizer"].append(v.path)
        if not any(v.id in self.pairs for v in self.arguments if v.path in roles["params"]):
            roles["cache"] += roles["optimizer"] if roles["params"] else []
            roles["optimizer"] = []
        return roles

    def _frozen(self, batch_colors: set[int]) -> set[int]:
        """Returns the arguments that look like parameters, also quantized: they lack the batch's dimension and share those of
        products."""
        weights = [v for v in self.arguments if v.shape and (is_floating(v) or v.dtype.startswith(_QUANTIZED))]
        able = [v for v in weights if not batch_colors & set(self.colors[v.id])]
        looked_into = [op.operands[0] for op in self.program.ops if op.kind == "gather"]
        multiplied = {v for op in self.heavy for v in op.operands}
        used = {self._argument(v) for v in (*multiplied, *looked_into)}
        able = [v for v in able if v.id in used or v.id not in self._written]
        used_colors = {c for v in able if v.id in used for c in self.colors[v.id]}
        if batch_colors:  # what is computed from weights alone, as it is where they are quantized, or read in loops
            values = (*multiplied, *looked_into)
            used_colors |= {c for v in values if batch_colors.isdisjoint(self.colors[v]) for c in self.colors[v]}
        trips = {-1, *self.analysis.names.color[self.analysis.names.trip].tolist()}
        return {v.id for v in able if set(self.colors[v.id]) - trips and set(self.colors[v.id]) <= used_colors | trips}
