"""The verdict on a plan, in the same words in terminal, notebook and page: how long a step takes, whether it fits, how it
compares with the best named strategies, and what is sharded over what.

What a dimension is called follows from the roles of arguments and from what the program does with it
(``tactics/places.py``, ``tactics/structure.py``); what has no role is named by its path.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from shardwise.cost.uncertainty import ABOVE, upper_bytes
from shardwise.errors import ShardwiseError
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.paths import find_paths, pattern
from shardwise.ir.program import HEAVY
from shardwise.ir.rule import Kind
from shardwise.lowering.decisions import Shard
from shardwise.plans.parts import ArrayPlan
from shardwise.plans.plan import Plan
from shardwise.report.compare import Row
from shardwise.tactics.structure import inner_colors
from shardwise.tactics.tactic import Context
from shardwise.tactics.text import read_words
from shardwise.units import binary, listed, seconds

#: Baselines beside the plan.
MOST_BASELINES: Final = 3
#: How many kinds of sharding are named for a role, and the share of its bytes below which one is left out.
_MOST_KINDS: Final = 3
_LITTLE: Final = 0.01
#: The utilization from which it is said.
_LEAST_MFU: Final = 0.005
#: A dimension that this share of the bytes of all parameters has is the width of the model.
_WIDE: Final = 0.5
#: Times that differ by less are called the same.
_SAME: Final = 0.005

#: What named strategies are called in sentences; ``vocabulary`` and ``edges`` are what they shard.
_STRATEGIES: Final = {
    "pipeline": "pipeline",
    "dp": "data parallelism",
    "fsdp": "FSDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "expert": "expert parallelism",
    "context": "context parallelism",
    "megatron": "Megatron",
    "feedforward": "Megatron without heads",
    "sequence": "sequence parallelism",
}
#: Ratios from here on are not said in percent.
_TIMES: Final = 1.2

#: Mesh axes, major first.
Axes = tuple[str, ...]
#: The sharded dimensions of an array: what each is called, and its axes.
Sharded = tuple[tuple[str, Axes], ...]
#: How the arrays of a role are sharded, each way with its percentage of their elements.
Kinds = tuple[tuple[Sharded, int], ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Sentences, and the best named strategies, each at its best variant of those that were looked at."""

    headline: str
    compared: str
    sharded: str
    baselines: tuple[Row, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(line for line in (self.headline, self.compared, self.sharded) if line)


def verdict(plan: Plan) -> Verdict:
    """Returns the verdict on a plan. A loaded plan is compared with nothing until :meth:`Plan.bind`."""
    every = plan.baselines if plan.mesh.devices > 1 else ()
    distinct = {(row.time_s, row.peak_bytes, row.fits): row for row in reversed(every)}
    rows = tuple(row for row in every if row in distinct.values())[:MOST_BASELINES]
    return Verdict(_headline(plan), _compared(plan, rows), ". ".join(_sharded(plan)) + ".", rows)


def _headline(plan: Plan) -> str:
    p, evidence = plan.predicted, plan.evidence
    measured = ""
    if evidence is not None and evidence.judged.time_s is not None:
        measured = f" {seconds(evidence.judged.time_s)} by {evidence.judge}."
    mfu = f", {p.utilization:.0%} MFU" if p.utilization >= _LEAST_MFU else ""
    return f"{seconds(p.time_s)} per step{mfu}, {fits_text(plan)}.{measured}"


def fits_text(plan: Plan) -> str:
    """Returns whether a plan fits; if only the lower end of its peak does, both ends."""
    p = plan.predicted
    if not p.fits:
        return f"does not fit ({binary(p.peak_bytes)}; a device has {binary(p.usable_bytes)})"
    upper = int(p.peak_bytes * (1 + ABOVE))
    if plan.asked is not None:
        upper = upper_bytes(plan.asked.model, plan.settled.lowered, plan.settled.predicted.curve)
    if upper > p.usable_bytes:
        return f"tight ({binary(p.peak_bytes)} to {binary(upper)}; a device has {binary(p.usable_bytes)})"
    return f"fits ({binary(p.peak_bytes)} of {binary(p.usable_bytes)})"


def _compared(plan: Plan, rows: tuple[Row, ...]) -> str:
    """Returns how the plan compares with the best named strategy that fits, or with the smallest if none does."""
    if not rows:
        return ""
    p, best = plan.predicted, rows[0]
    if not best.fits:
        needs = f"the smallest, {strategy_words(best, plan.mesh)}, needs {binary(best.peak_bytes)}"
        return f"No named strategy was found that fits: {needs}."
    if not p.fits:
        return f"The best baseline ({strategy_words(best, plan.mesh)}) fits, at {seconds(best.time_s)} per step."
    ratio = best.time_s / p.time_s if p.time_s else 1.0
    saved = best.peak_bytes - p.peak_bytes
    memory = f", with {binary(saved)} less memory" if saved > _LITTLE * p.peak_bytes else ""
    if abs(ratio - 1) <= _SAME:
        return f"As fast as the best baseline ({strategy_words(best, plan.mesh)}){memory}."
    faster, times = ("faster", "fast") if ratio > 1 else ("slower", "slow")
    ratio = max(ratio, 1 / ratio)
    text = f"{ratio - 1:.0%} {faster} than" if ratio < _TIMES else f"{ratio:.2f} times as {times} as"
    return f"{text} the best baseline ({strategy_words(best, plan.mesh)}){memory}."


def strategy_words(row: Row, mesh: MeshAxes) -> str:
    """Returns a named strategy and its variant as words: ``FSDP over all 16 devices, rematerialized``."""
    if row.name == "replicated":
        texts = ["everything replicated"]
    else:
        axes_of: dict[tuple[str, ...], list[str]] = {}
        for words in read_words(row.name):
            axes_of.setdefault(words.axes, []).extend(_STRATEGIES.get(name, name) for name in words.names)
        texts = [f"{' and '.join(names)} over {axes_words(axes, mesh)}" for axes, names in axes_of.items()]
    return ", ".join([*texts, row.variant] if row.variant else texts)


# What is sharded over what.


def _sharded(plan: Plan) -> Iterator[str]:
    mesh = plan.mesh
    if not any(axes for a in plan.arguments for axes in a.spec) and not any(isinstance(d, Shard) for d in plan.choices):
        many = f"Nothing is sharded: all {mesh.devices} devices compute the same"
        yield many if mesh.devices > 1 else "One device: there is nothing to shard"
        return
    words = dimension_words(plan)
    of_params = _named_by_place(arrays_of(plan, "params"), words)
    if batch := arrays_of(plan, "batch"):
        yield _batch_text(_kinds(batch, words), mesh)
    said: dict[Kinds, list[str]] = {}
    for role, title in (("params", "Parameters"), ("optimizer", "Optimizer state"), ("cache", "Cache")):
        if arrays := arrays_of(plan, role):
            names = words if role == "cache" else of_params
            said.setdefault(_kinds(arrays, names), []).append(title)
    with_role = {a.path for role in plan.roles for a in arrays_of(plan, role)}
    rest = [a for a in plan.arguments if a.path not in with_role]
    if any(axes for a in rest for axes in a.spec):
        said.setdefault(_kinds(rest, words), []).append("Other arguments" if with_role else "Arguments")
    for kinds, titles in said.items():
        heading = " and ".join(t if k == 0 else t.lower() for k, t in enumerate(titles))
        yield f"{heading}: {'; '.join(_kind_texts(kinds, mesh))}"
    inner = list(_inner(plan, dimension_names(plan)))
    if not inner and not plan.roles and not said:
        yield "Arguments: replicated"
    yield from inner


def arrays_of(plan: Plan, role: str) -> list[ArrayPlan]:
    """Returns the arguments with a role."""
    by_path = {a.path: a for a in plan.arguments}
    paths: dict[str, None] = {}
    for prefix in plan.roles.get(role, ()):
        try:
            paths |= dict.fromkeys(find_paths(prefix, by_path))
        except ShardwiseError:  # pragma: no cover  (a plan whose arguments were replaced)
            continue
    return [by_path[path] for path in paths]


def _batch_text(kinds: Kinds, mesh: MeshAxes) -> str:
    kinds = tuple(sorted(kinds, key=lambda kind: not kind[0]))  # what is replicated last
    texts = [text.removeprefix("batch ") for text in _kind_texts(kinds, mesh)]
    return f"Batch{' ' if texts[0].startswith(('over ', 'replicated')) else ': '}{', '.join(texts)}"


def _kinds(arrays: list[ArrayPlan], names: dict[int, str]) -> Kinds:
    """Returns how the arrays of a role are sharded: the kinds with the most elements, and their percentage. A dimension
    without a name is named by its place in the largest of these arrays."""
    names = _named_by_place(arrays, names)
    elements: Counter[Sharded] = Counter()
    for a in arrays:
        elements[_named(a, names)] += math.prod(a.shape)
    total = sum(elements.values()) or 1
    return tuple((k, round(100 * n / total)) for k, n in elements.most_common(_MOST_KINDS) if n >= _LITTLE * total)


def _kind_texts(kinds: Kinds, mesh: MeshAxes) -> list[str]:
    texts = []
    for kind, percent in kinds:
        parts = [f"{name} over {axes_words(axes, mesh)}" for name, axes in kind]
        over = (", " if len(parts) > 2 else " and ").join(parts) or "replicated"
        texts.append(over + (f" ({percent}%)" if percent < 100 else ""))
    return texts


def _named(array: ArrayPlan, names: dict[int, str]) -> Sharded:
    colors = array.colors or (-1,) * len(array.shape)
    pairs = zip(array.spec, colors, strict=False)
    return tuple((names.get(c, f"dimension {d}"), axes) for d, (axes, c) in enumerate(pairs) if axes)


def axes_words(axes: Iterable[str], mesh: MeshAxes) -> str:
    """
    >>> mesh = MeshAxes(("data", "model"), (4, 2))
    >>> axes_words(["data"], mesh), axes_words(["model", "data"], mesh)
    ('data', 'all 8 devices')
    """
    axes = list(axes)
    count = math.prod(mesh.shape[axis] for axis in axes)
    return " × ".join(axes) if count < mesh.devices else f"all {mesh.devices} devices"


def _inner(plan: Plan, names: dict[int, str]) -> Iterator[str]:
    """What is decided about activations alone: colors that are sharded on an axis on which no argument has them."""
    stored = {
        (c, axis)
        for a in plan.arguments
        for axes, c in zip(a.spec, a.colors or (-1,) * len(a.spec), strict=False)
        for axis in axes
    }
    axes_of: dict[str, list[str]] = {}
    for choice in plan.choices:
        if isinstance(choice, Shard) and not any((c, choice.axis) in stored for c in choice.colors):
            name = next((names[c] for c in choice.colors if c in names), choice.what.partition(" (size")[0])
            axes_of.setdefault(name, []).append(choice.axis)
    texts = [f"{name} over {axes_words(axes, plan.mesh)}" for name, axes in axes_of.items()]
    if texts:
        yield f"Inside of the step also {listed(texts, _MOST_KINDS)}"


def dimension_names(plan: Plan) -> dict[int, str]:
    """Returns what the colors of dimensions are called: words, else their place in the largest parameter or argument."""
    params = {a.path for a in arrays_of(plan, "params")}
    arrays = sorted(plan.arguments, key=lambda a: a.path not in params)
    return _named_by_place(arrays[len(params) :], _named_by_place(arrays[: len(params)], dimension_words(plan)))


def dimension_words(plan: Plan) -> dict[int, str]:
    """Returns words for the colors of dimensions, from the roles of arguments and the structure of the program. A loaded plan
    has those of its arguments."""
    if plan.asked is None:
        return {int(color): word for color, word in plan.words.items()}
    words: dict[int, str] = {}
    for a in arrays_of(plan, "batch"):
        if a.colors and a.colors[0] >= 0:
            words.setdefault(a.colors[0], "batch")
    return (_structural(plan.asked.context) if plan.roles else {}) | words


def _named_by_place(arrays: list[ArrayPlan], words: dict[int, str]) -> dict[int, str]:
    names = dict(words)
    for a in sorted(arrays, key=lambda a: -math.prod(a.shape)):
        for d, c in enumerate(a.colors):
            if c >= 0:
                names.setdefault(c, f"{pattern(a.path)}[{d}]")
    return names


def _structural(context: Context) -> dict[int, str]:
    names: dict[int, str] = {}
    analysis, places = context.analysis, context.places

    def name(color: int, text: str) -> None:
        for c in analysis.groups[analysis.colors[color].group].colors:
            names.setdefault(c, text)

    for c in context.stages:
        name(c, "layers")
    kinds = {"sequence": places.sequences, "vocabulary": places.vocabularies}
    kinds |= {"experts": places.experts, "edges": places.edges}
    heads, spatial = _of_products(context)
    for c in sorted(spatial):
        name(c, "spatial dimension")
    for text, found in kinds.items():
        for place in found:
            color = analysis.color_of(*place)
            if color is not None:
                name(color.id, text)
    params = context.arguments(context.roles.get("params", ()))
    total = sum(v.nbytes for v in params) or 1
    nbytes: Counter[int] = Counter()
    home: dict[int, str] = {}
    for v in sorted(params, key=lambda v: -v.nbytes):
        for c in {analysis.colors[c].group: c for _, c in context.colors_of(v)}.values():
            nbytes[analysis.colors[c].group] += v.nbytes
            home.setdefault(c, pattern(v.path).rpartition("/")[0])
    inner = inner_colors(context, params)
    for c in sorted(inner & heads):
        name(c, "heads")
    inner = {c for c in inner if c not in names}
    homes = Counter(home.get(c, "") for c in {analysis.colors[c].group: c for c in inner}.values())
    for c in inner:
        if homes[home.get(c, "")] == 1:  # else its path says which
            name(c, f"inner width of {home[c]}" if home.get(c) else "inner width")
    wide = [(size, g) for g, size in nbytes.most_common() if analysis.groups[g].colors[0] not in names]
    if wide and wide[0][0] >= _WIDE * total and (len(wide) == 1 or wide[0][0] > wide[1][0]):
        name(analysis.groups[wide[0][1]].colors[0], "width")
    return names


def _of_products(context: Context) -> tuple[set[int], set[int]]:
    """Returns colors that products of two activations, batched over a dimension that no parameter has, make: those of them that
    are inner dimensions of layers are heads of attention. And the colors of windows in two dimensions, which images have."""
    analysis = context.analysis
    of_params = {c for v in context.arguments(context.roles.get("params", ())) for _, c in context.colors_of(v)}
    made: set[int] = set()
    spatial: set[int] = set()
    for op in analysis.program.ops:
        if op.rule is None or op.unit not in HEAVY or not op.results:  # a callback has no result
            continue
        color = analysis.names.factor_colors(op.id)
        every = [{f for dim in dims for f in dim} for dims in (*op.rule.operands[:2], op.rule.results[0])]
        if any(color[f] not in of_params for f in set.intersection(*every)):
            made |= {color[f] for f in every[-1]}
        halo = [c for c, f in zip(color, op.rule.factors, strict=True) if f.kind is Kind.HALO]
        spatial |= set(halo) if len(set(halo)) > 1 else set()
    return made, spatial
