"""A plan as code to paste: a runnable file with the mesh, nested PartitionSpecs and what applies them; or logical axis rules.

Equal subtrees, such as repeated layers and the moments beside the parameters, are written once. Everything that comes from a
program (paths, names of axes) is written by ``repr``, so that it stays text.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import resources
from itertools import groupby
from typing import Any, Final

from jinja2 import Template

from shardwise.errors import PlanError
from shardwise.ir.paths import pattern
from shardwise.plans.parts import ArrayPlan
from shardwise.plans.plan import Plan
from shardwise.report.logical import Names, in_comment, logical_rules
from shardwise.report.plan_text import literal, spec_call
from shardwise.report.verdict import arrays_of

STYLES: Final = ("jax", "flax", "maxtext")
#: Specs from which an equal subtree gets a name.
_FEWEST: Final = 3
_WIDTH: Final = 118
#: Arrays of one subtree are on one line up to this column, their key apart.
_FLAT: Final = 92

#: Specs by the parts of their paths. Where a path is both an array and a subtree, the spec of the array has the key "".
Tree = dict[str, Any]


def code_text(plan: Plan, style: str = "jax", file: str = "plan.json", constraints: bool = True) -> str:
    """See :meth:`Plan.code`; ``constraints`` take a while for a large program."""
    if style not in STYLES:
        raise PlanError(f"the style of the code is one of {', '.join(STYLES)}, not {style!r}")
    if style == "jax":
        return _jax_text(plan, file, _constraints(plan) if constraints else [])
    rules = logical_rules(plan, None)
    lines, (names, state) = _comment(plan), _apart_from_state(plan, rules.names)
    if style == "flax":
        lines += ["from flax import linen as nn", "", *_listing("rules = (", map(repr, rules.rules), ")"), ""]
        lines += ["# The logical axes of arrays; None: the dimension is not sharded.", *state]
        lines += _listing("names = {", (f"{path!r}: {own!r}" for path, own in names.items()), "}")
        lines += ["", "", "def spec_of(path):", "    return nn.logical_to_mesh_axes(names[path], rules)"]
    else:
        lines += ["# The names in the rules are of this plan: replace each by that of your model."]
        lines += [f"mesh_axes: {json.dumps(list(plan.mesh.names))}", "logical_axis_rules:"]
        lines += [f"  - {json.dumps(list(rule))}" for rule in rules.rules]
        lines += ["# The logical axes of arrays; null: the dimension is not sharded.", *state]
        by_pattern = dict.fromkeys((pattern(path), own) for path, own in names.items())
        lines += [f"#   {json.dumps(path)}: {json.dumps(list(own))}" for path, own in by_pattern]
    lines += [f"# not as planned: {in_comment(text)}" for text in rules.others]
    if rules.others:
        lines.append("# These rules do not give the whole plan; the style jax does.")
    return "\n".join(lines) + "\n"


def _listing(first: str, rows: Iterable[str], last: str) -> list[str]:
    return [first, *(f"    {row}," for row in rows), last]


def _apart_from_state(plan: Plan, names: dict[str, Names]) -> tuple[dict[str, Names], list[str]]:
    """Returns the names without those of optimizer state that is sharded as its parameter is, and a comment that says so."""
    roots = sorted(plan.roles.get("params", ()), key=len)
    ends = {(a.path.removeprefix(f"{root}/"), names[a.path]) for a in arrays_of(plan, "params") for root in roots}
    kept = {path: own for path, own in names.items() if own}
    for path in [a.path for a in arrays_of(plan, "optimizer")]:
        parts = path.split("/")
        if any(("/".join(parts[k:]), names[path]) in ends for k in range(1, len(parts))):
            kept.pop(path, None)
    comment = "# Optimizer state that is not here has those of its parameters."
    return kept, [comment] if len(kept) < len(names) else []


def _comment(plan: Plan) -> list[str]:
    """Returns what the plan is for, in comments."""
    version = plan.versions.get("shardwise", "?")
    head = f"Shardings of {plan.function} on {plan.mesh} ({plan.predicted.hardware}), by Shardwise {version}."
    return [f"# {row}" for line in (head, *plan.verdict.lines) for row in textwrap.wrap(in_comment(line), _WIDTH - 2)]


def _jax_text(plan: Plan, file: str, constraints: list[str]) -> str:
    names = _Names()
    trees = {"IN_SPECS": _tree(plan.arguments), "OUT_SPECS": _tree(plan.outputs)}
    for tree in trees.values():
        names.count(tree)
    body = [line for name, tree in trees.items() for line in ("", *names.assigned(name, tree))]
    roots = list(dict.fromkeys(a.path.partition("/")[0] for a in plan.arguments))
    donated = {a.path.partition("/")[0] for a in plan.arguments if a.donated}
    order = list(plan.device_order) if list(plan.device_order) != list(range(plan.mesh.devices)) else []
    host = tuple(a.path for a in plan.arguments if a.host)
    head = [
        *_comment(plan),
        "#",
        *_use(roots, donated),
        "import jax",
        "import numpy as np",
        "from jax.sharding import AxisType, Mesh, NamedSharding",
        "from jax.sharding import PartitionSpec as P",
        "",
        f"PLAN = {literal(file)}  # the plan itself, which plan.save(...) or --output wrote",
        f"MESH = {_braced((literal(name), str(size)) for name, size in plan.mesh.shape.items())}",
        f"ARGUMENTS = {tuple(roots)!r}",
    ]
    if order:
        head.append(f"DEVICE_ORDER = {order!r}  # neighbors in the mesh are neighbors on the links")
    if host:
        head.append(f"IN_HOST_MEMORY = {host!r}")
    if plan.compiler_options:
        head.append(f"COMPILER_OPTIONS = {dict(plan.compiler_options)!r}  # planned() passes them on")
    template = resources.files("shardwise.report").joinpath("templates/code.py.txt").read_text("utf-8")
    used = Template(template, trim_blocks=True).render(order=order, host=host)
    return "\n".join([*head, *names.lines, *body, "", "", used.rstrip("\n"), *constraints]) + "\n"


def _use(roots: list[str], donated: set[str]) -> list[str]:
    """Returns how the file is used, in comments."""
    plain = all(root.isidentifier() for root in roots)
    named = ", ".join(f"{root}={root}" for root in roots) if plain else "**dict(zip(ARGUMENTS, args))"
    numbers = [k for k, root in enumerate(roots) if root in donated]
    jitted = "step, in_shardings=tuple(shardings(mesh, **args).values())"
    lines = [
        "mesh = make_mesh()",
        f"args = place(mesh, {named})",
        "run = planned(step, *args.values(), mesh=mesh)  # collective by collective",
        "results = run(*args.values())",
        "",
        "Without Shardwise, where XLA's partitioner decides about the inside of the step:",
        "",
        f"run = jax.jit({jitted}{f', donate_argnums={tuple(numbers)}' if numbers else ''})",
    ]
    comments = [f"#     {line}" if line and not line.startswith("Without") else f"# {line}".rstrip() for line in lines]
    return ["# How to use it:", "#", *comments]


def _constraints(plan: Plan) -> list[str]:
    lines = [
        "",
        "# Without Shardwise, these constraints belong inside the function (jax.lax.with_sharding_constraint):",
    ]
    for c in plan.constraints:
        what = {"used": f"operand {c.index}", "computed": "the computed result"}.get(c.place, "the result")
        lines.append(f"#   {in_comment(c.source)}: {what} of {in_comment(c.op)} {list(c.shape)}: {spec_call(c.spec)}")
    return lines if plan.constraints else []


def _tree(arrays: Iterable[ArrayPlan]) -> Tree:
    tree: Tree = {}
    for a in arrays:
        *parents, last = a.path.split("/")
        node = tree
        for part in parents:
            below = node.setdefault(part, {})
            if not isinstance(below, dict):
                below = node[part] = {"": below}
            node = below
        if isinstance(node.get(last), dict):
            node[last][""] = spec_call(a.spec)
        else:
            node[last] = spec_call(a.spec)
    return tree


class _Names:
    """Names for equal subtrees: ``lines`` assigns those that are there more than once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._uses: Counter[str] = Counter()
        self._name_of: dict[str, str] = {}
        self._place_of: dict[str, tuple[int, str]] = {}

    def count(self, tree: Tree, depth: int = 0, again: bool = False) -> None:
        """Counts equal subtrees. Of their keys the outermost one names them: ``params`` rather than ``mu``."""
        for name, child in tree.items():
            if isinstance(child, dict):
                key = repr(child)
                self._uses[key] += not again
                known = self._place_of.get(key)
                if known is None or depth < known[0]:
                    self._place_of[key] = depth, name
                    self.count(child, depth + 1, again or known is not None)

    def assigned(self, name: str, tree: Tree) -> list[str]:
        """Returns the lines that assign a tree to a name."""
        text = self._lines(tree, 0)
        return [f"{name} = {text[0]}", *text[1:]]

    def _lines(self, tree: Tree, depth: int) -> list[str]:
        if all(isinstance(child, str) for child in tree.values()):
            flat = _braced((literal(key), child) for key, child in tree.items())
            if len(flat) + 4 * depth <= _FLAT:
                return [flat]
        inner, pad = [], "    " * (depth + 1)
        for keys, child in _runs(tree):
            shown = self._child(keys[0], child, depth + 1)
            if len(keys) > 2 and len(shown) == 1 and (made := _comprehension(keys)):
                inner.append(f"{pad}**{{{made[0]}: {shown[0]} for k in {made[1]}}},")
                continue
            for key in keys:
                rest = shown[1:]
                inner.append(f"{pad}{literal(key)}: {shown[0]}" + ("" if rest else ","))
                inner += rest[:-1] + ([f"{rest[-1]},"] if rest else [])
        return ["{", *inner, "    " * depth + "}"]

    def _child(self, key: str, child: Any, depth: int) -> list[str]:
        if not isinstance(child, dict):
            return [child]
        text = repr(child)
        if self._uses[text] < 2 or _count(child) < _FEWEST:
            return self._lines(child, depth)
        if text not in self._name_of:
            assigned = self._lines(child, 0)
            base = re.sub(r"\W+|^(?=\d)", "_", self._place_of[text][1], flags=re.ASCII).strip("_").upper() or "LAYER"
            base = "LAYER" if base.strip("_").isdigit() else base
            taken = {*self._name_of.values(), "P", "PLAN", "MESH", "ARGUMENTS", "IN_SPECS", "OUT_SPECS"}
            taken |= {"DEVICE_ORDER", "COMPILER_OPTIONS", "IN_HOST_MEMORY"}
            name, number = base, 2
            while name in taken:
                name, number = f"{base}_{number}", number + 1
            self._name_of[text] = name
            self.lines += ["", f"{name} = {assigned[0]}", *assigned[1:]]
        return [self._name_of[text]]


def _braced(items: Iterable[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in items) + "}"


def _runs(tree: Tree) -> Iterator[tuple[list[str], Any]]:
    """Returns keys that follow each other, differ in a number alone and have equal children, with the child."""
    rows = ((key, child, pattern(f"/{key}"), repr(child)) for key, child in tree.items())
    for _, run in groupby(rows, key=lambda row: row[2:]):
        same = list(run)
        yield [key for key, *_ in same], same[0][1]


def _comprehension(keys: list[str]) -> tuple[str, str] | None:
    """
    >>> _comprehension(["Block_0", "Block_1", "Block_2"]), _comprehension(["0", "2", "4"]), _comprehension(["a{", "b{"])
    (('f"Block_{k}"', 'range(0, 3)'), ('f"{k}"', '(0, 2, 4)'), None)
    """
    parts = [re.fullmatch(r"([A-Za-z_.-]*)(0|[1-9]\d*)", key, re.ASCII) for key in keys]
    found = [(p[1], int(p[2])) for p in parts if p]
    if len(found) != len(keys) or len({start for start, _ in found}) > 1:
        return None
    numbers = [number for _, number in found]
    text = str(tuple(numbers))
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        text = f"range({numbers[0]}, {numbers[-1] + 1})"
    return f'f"{found[0][0]}{{k}}"', text


def _count(tree: Tree) -> int:
    return sum(_count(child) if isinstance(child, dict) else 1 for child in tree.values())
