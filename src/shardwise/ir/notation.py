"""The text form of factor rules, read and written.

    (b,i,k),(b,k,j)->(b,i,j); sum k
    (i*j)->(i,j)
    (...,n,m)->(...,n,m); blocked n m
    (v,d),(s)->(s,d); indexed v

Before the semicolon: operands, an arrow, results; a tensor is a list of dimensions in parentheses, a dimension is one
factor, a product ``i*j`` (major to minor), or ``1``. ``...`` are leading dimensions that all tensors having it
share. After each semicolon: a kind and the factors it applies to. The kinds are ``blocked``, ``halo``, ``indexed``, and
the reducers of :data:`~shardwise.ir.rule.REDUCERS`. A factor without a kind is parallel (or free, if only in results).
Where the size of a factor does not follow from the shapes, as in ``(i*j)->(i*k,l)``, a last clause states it: ``sizes i=2``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

from shardwise.errors import RuleError
from shardwise.ir.rule import REDUCERS, Factor, Kind, Rule, Tensor, check_rule, letter

_FACTOR = re.compile(r"[A-Za-z_][A-Za-z_0-9]*$")


#: The factor names of every dimension of every tensor; kinds and reducers, and sizes, by factor name.
_Tensors = list[list[list[str]]]
_Kinds = dict[str, tuple[Kind, str]]
_Sizes = dict[str, int]


def read_rule(text: str) -> tuple[_Tensors, _Tensors, _Kinds, _Sizes]:
    """Returns the operands, results, kinds and sizes that a rule states. Without shapes only its syntax is checked.

    >>> read_rule("(i,k),(k,j)->(i,j)")
    ([[['i'], ['k']], [['k'], ['j']]], [[['i'], ['j']]], {}, {})
    """
    head, *clauses = [part.strip() for part in text.split(";")]
    if head.count("->") != 1:
        raise RuleError(f"rule {text!r}: expected exactly one '->' between operands and results")
    left, right = (_tensors(side, text) for side in head.split("->"))
    return left, right, *_clauses(clauses, text)


def parse_rule(text: str, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> Rule:
    """Reads a rule in the notation above for tensors of these shapes, and checks it.

    >>> print(parse_rule("(i,k),(k,j)->(i,j); sum k", [(8, 4), (4, 6)], [(8, 6)]))
    (i,j),(j,k)->(i,k); sum j
    """
    left, right, kinds, stated = read_rule(text)
    if len(left) != len(operands) or len(right) != len(results):
        raise RuleError(
            f"rule {text!r} is for {len(left)} operands and {len(right)} results; "
            f"the operation has {len(operands)} and {len(results)}"
        )
    shapes = [*operands, *results]
    dims = [_expand(names, shape, text) for names, shape in zip(left + right, shapes, strict=True)]
    sizes = _sizes(dims, shapes, stated, text)
    names = dict.fromkeys(n for tensor in dims for dim in tensor for n in dim if sizes[n] > 1)
    order = {name: i for i, name in enumerate(names)}
    unknown = sorted(set(kinds) - set(sizes))
    if unknown:
        raise RuleError(f"rule {text!r}: {', '.join(unknown)} named after ';' but in no tensor")
    in_operands = {n for tensor in dims[: len(left)] for dim in tensor for n in dim}
    factors = []
    for name in order:
        kind, reducer = kinds.get(name, (Kind.PARALLEL if name in in_operands else Kind.FREE, ""))
        if kind is Kind.INDEXED and not reducer:
            reducer = "sum"
        factors.append(Factor(sizes[name], kind, reducer, "stated by its rule" if kind is Kind.BLOCKED else ""))
    tensors = tuple(tuple(tuple(order[n] for n in dim if n in order) for dim in tensor) for tensor in dims)
    rule = Rule(tuple(factors), tensors[: len(left)], tensors[len(left) :])
    check_rule(rule, operands, results)
    return rule


def format_rule(rule: Rule) -> str:
    """Writes a rule in the notation that :func:`parse_rule` reads (windows are not part of the text)."""

    def tensor(t: Tensor) -> str:
        return "(" + ",".join("*".join(letter(f) for f in dim) or "1" for dim in t) + ")"

    head = ",".join(map(tensor, rule.operands)) + "->" + ",".join(map(tensor, rule.results))
    clauses: dict[str, list[str]] = {}
    for i, factor in enumerate(rule.factors):
        if factor.kind in (Kind.PARALLEL, Kind.FREE):
            continue
        word = factor.reducer if factor.kind is Kind.REDUCTION else factor.kind.value
        clauses.setdefault(word, []).append(letter(i))
    unknown = _unknown_sizes(rule)
    if unknown:
        clauses["sizes"] = [f"{letter(i)}={rule.factors[i].size}" for i in unknown]
    return "; ".join([head] + [f"{word} {' '.join(names)}" for word, names in clauses.items()])


def _unknown_sizes(rule: Rule) -> list[int]:
    """Returns the factors whose size does not follow from the shapes: all but one of those that are only in one product."""
    dims = [dim for tensor in rule.tensors for dim in tensor]
    known = {dim[0] for dim in dims if len(dim) == 1}
    unknown: list[int] = []
    for dim in dims:
        new = [f for f in dim if f not in known]
        unknown += new[:-1]
        known.update(new)
    return sorted(unknown)


def _tensors(side: str, text: str) -> _Tensors:
    side = side.replace(" ", "")
    if not side:
        return []
    if not re.fullmatch(r"\([^()]*\)(,\([^()]*\))*", side):
        raise RuleError(f"rule {text!r}: {side!r} is not a list of tensors such as (i,k),(k,j)")
    tensors = []
    for inner in re.findall(r"\(([^()]*)\)", side):
        dims = [dim.split("*") if dim != "1" else [] for dim in inner.split(",")] if inner else []
        for name in (n for dim in dims for n in dim):
            if name != "..." and not _FACTOR.match(name):
                raise RuleError(f"rule {text!r}: {name!r} is not a factor name")
        tensors.append(dims)
    return tensors


def _expand(dims: list[list[str]], shape: tuple[int, ...], text: str) -> list[list[str]]:
    if ["..."] in dims:
        at = dims.index(["..."])
        extra = len(shape) - (len(dims) - 1)
        if extra < 0 or ["..."] in dims[at + 1 :]:
            raise RuleError(f"rule {text!r} does not fit a tensor of shape {list(shape)}")
        # Counted from the right, as NumPy broadcasts.
        dims = dims[:at] + [[f"batch{extra - 1 - i}"] for i in range(extra)] + dims[at + 1 :]
    if len(dims) != len(shape):
        raise RuleError(f"rule {text!r} has a tensor of {len(dims)} dimensions for one of shape {list(shape)}")
    return dims


_KINDS: Final = {k.value: (k, "") for k in (Kind.BLOCKED, Kind.HALO, Kind.INDEXED)} | {
    reducer: (Kind.REDUCTION, reducer) for reducer in REDUCERS
}


def _clauses(clauses: Sequence[str], text: str) -> tuple[_Kinds, _Sizes]:
    """Returns the kinds and the sizes of factors that the clauses of a rule state."""
    kinds: _Kinds = {}
    sizes: _Sizes = {}
    for clause in clauses:
        word, *items = clause.replace(",", " ").split() or [""]
        if word == "sizes":
            for item in items:
                name, _, size = item.partition("=")
                if not (_FACTOR.match(name) and size.isdigit()):
                    raise RuleError(f"rule {text!r}: {item!r} is not a size such as i=2")
                sizes[name] = int(size)
        elif word in _KINDS:
            kinds.update((name, _KINDS[word]) for name in items)
        else:
            raise RuleError(f"rule {text!r}: {word!r} is not a kind; use one of {', '.join(_KINDS)}")
    return kinds, sizes


def _sizes(dims: _Tensors, shapes: Sequence[tuple[int, ...]], stated: _Sizes, text: str) -> _Sizes:
    """Returns the size of each factor: its largest as a dimension alone, else the stated one, else what others leave."""
    sizes = dict(stated)
    merged: list[tuple[list[str], int]] = []
    for tensor, shape in zip(dims, shapes, strict=True):
        for d, (dim, size) in enumerate(zip(tensor, shape, strict=True)):
            if len(dim) == 1:
                sizes[dim[0]] = max(size, sizes.get(dim[0], 0))
                if size == 1:
                    tensor[d] = []
            elif dim:
                merged.append((dim, size))
    for dim, size in merged:
        unknown = [n for n in dim if n not in sizes]
        product = math.prod(sizes[n] for n in dim if n in sizes)
        if len(unknown) > 1 or (unknown and size % max(product, 1)):
            raise RuleError(
                f"rule {text!r}: the sizes of {'*'.join(dim)} in a dimension of {size} are not known; "
                f"add a clause such as '; sizes {dim[0]}=2'"
            )
        sizes.update(dict.fromkeys(unknown, size // max(product, 1)))
    return sizes
