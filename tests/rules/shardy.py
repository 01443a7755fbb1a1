"""Shardy's factor rules, read from the StableHLO of one primitive, and the comparison with ours."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import jax

from shardwise.ir.rule import Kind, Rule
from tests.rules import jax_tools
from tests.rules.cases import Case

_PIPELINE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
_RULE = re.compile(r"#sdy\.op_sharding_rule<\((.*?)\)->\((.*?)\)(?: \{([^}]*)\})?((?: \w+=\{[^}]*\})*)(?:, custom)?>")
_OP = re.compile(r"\"?((?:stablehlo|chlo|sdy|mhlo)\.[a-z_0-9]+)\"?")
_FACTOR = re.compile(r"[a-z](?:_\d+)?")

#: Tensor by tensor, dimension by dimension: the factors, major to minor.
Tensors = list[list[list[str]]]


@dataclass(frozen=True)
class ShardyRule:
    op: str
    tensors: Tensors
    sizes: dict[str, int]
    special: dict[str, str]

    def word(self, factor: str) -> str:
        return self.special.get(factor, "pass")


def shardy_rules(case: Case) -> list[ShardyRule]:
    """The rules of all ops that the case's primitive becomes on a TPU, where most primitives stay one op."""
    traced = jax.jit(lambda *xs: case.primitive.bind(*xs, **case.params)).trace(*case.operands)
    text = jax_tools.run_shardy(traced.lower(lowering_platforms=("tpu",)), _PIPELINE)
    found, open_ops = [], []
    for line in text.splitlines():
        names = _OP.findall(line)
        if names and line.rstrip().endswith("({"):  # an op with a region: its rule stands where the region ends
            open_ops.append(names[0])
        match = _RULE.search(line)
        closes = line.strip().startswith("})")
        op = open_ops.pop() if closes and open_ops else names[0] if names else ""
        if match:
            found.append(_parse(op, match))
    return found


def _parse(op: str, match: re.Match[str]) -> ShardyRule:
    operands, results, sizes, more = match.groups()
    tensors = [_tensor(t) for side in (operands, results) for t in re.findall(r"\[(.*?)\]", side)]
    special = {}
    words = {"reduction": "reduction", "need_replication": "blocked", "permutation": "halo"}
    for key, names in re.findall(r"(\w+)=\{([^}]*)\}", more or ""):
        if key in words:
            special.update((name.strip(), words[key]) for name in names.split(","))
    pairs = [pair.split("=") for pair in (sizes or "").split(", ") if pair]
    return ShardyRule(op, tensors, {k: int(v) for k, v in pairs}, special)


def _tensor(text: str) -> list[list[str]]:
    return [_FACTOR.findall(dim) for dim in text.split(",")] if text.strip() else []


_WORDS = {Kind.PARALLEL: "pass", Kind.FREE: "pass"}


def differences(case: Case, theirs: ShardyRule, order: Iterable[int] | None = None) -> set[str]:
    """Where the two rules disagree, each as ``ours / theirs``.

    Tensors of rank zero are left out on both sides (initial values, index scalars); ``order`` says which of our tensors
    stands where in theirs.
    """
    ours = _ours(case.rule)
    shapes = [*case.call.operands, *case.call.results]
    numbers = list(order) if order is not None else range(len(shapes))
    mine = [(ours[t], shapes[t]) for t in numbers if shapes[t]]
    their = [t for t in theirs.tensors if t]
    if len(mine) != len(their) or any(len(a) != len(b) for (a, _), b in zip(mine, their, strict=True)):
        return {"other tensors"}
    my_places: dict[str, set[tuple[int, int]]] = {}
    their_places: dict[str, set[tuple[int, int]]] = {}
    met: dict[str, set[str]] = {}
    found = set()
    for t, ((tensor, shape), other) in enumerate(zip(mine, their, strict=True)):
        for d, (dim, twin) in enumerate(zip(tensor, other, strict=True)):
            twin = [f for f in twin if theirs.sizes[f] > 1]
            if shape[d] <= 1:
                continue
            if len(dim) != len(twin):
                found.add(f"{_kinds(case.rule, dim)} / {'+'.join(theirs.word(f) for f in twin) or 'size one'}")
                continue
            for f, g in zip(dim, twin, strict=True):
                my_places.setdefault(f, set()).add((t, d))
                their_places.setdefault(g, set()).add((t, d))
                met.setdefault(f, set()).add(g)
    for f, twins in met.items():
        (word,) = {_kinds(case.rule, [f])}
        other = "+".join(sorted({theirs.word(g) for g in twins}))
        places = {p for g in twins for p in their_places[g]}
        if len(twins) > 1:
            found.add(f"{word} / {other}, apart")
        elif places != my_places[f]:
            found.add(f"{word}, apart / {other}")
        elif word != other:
            found.add(f"{word} / {other}")
    return found


def _ours(rule: Rule) -> Tensors:
    return [[[str(f) for f in dim] for dim in tensor] for tensor in rule.tensors]


def _kinds(rule: Rule, dim: Iterable[str]) -> str:
    return "+".join(_WORDS.get(rule.factors[int(f)].kind, rule.factors[int(f)].kind.value) for f in dim) or "size one"
