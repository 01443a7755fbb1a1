"""Factor rules: which index variables of an operation can be split, and what communication that needs.

Every op is described like an einsum. A *factor* is an index variable with a size; a dimension of an operand or result is
the list of factors it is made of, major to minor. ``dot_general`` is ``(b,i,k),(b,k,j)->(b,i,j)``, a reshape of
``[6,4]`` to ``[24]`` is ``(i,j)->(i*j)``.

Conventions
- A dimension of size 0 or 1 has no factor: there is nothing to split.
- A merged dimension is identified with its major factor. A minor factor cannot be named in a PartitionSpec, so that
  :attr:`Rule.splittable` is False for it.
- A halo factor may have different sizes in different tensors (a slice, a strided convolution). Its :class:`Window` says
  which positions of one tensor a position of the other touches.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from shardwise.errors import RuleError


class Symbol(enum.Enum):
    """An enumeration whose members are hashed by identity, since they are parts of many keys: ``enum.Enum`` computes a hash in
    Python."""

    __hash__ = object.__hash__


class Kind(Symbol):
    """What happens when a mesh axis shards a factor."""

    PARALLEL = "parallel"  # in operands and results: nothing to communicate
    REDUCTION = "reduction"  # in operands only: the result is partial
    FREE = "free"  # in results only: nothing to communicate
    BLOCKED = "blocked"  # cannot be computed in parts
    HALO = "halo"  # shifted or windowed: exchange of the overlap
    INDEXED = "indexed"  # read or written at indices, by a gather or a scatter


#: Reducers of partial results; ``argmax`` and ``argmin`` need the values as well as the indices.
REDUCERS: Final = ("sum", "prod", "max", "min", "and", "or", "xor", "argmax", "argmin")


#: Why the trip dimension of a loop is blocked. All trip dimensions of one loop are one factor (see ``dims/names.py``).
TRIP: Final = "the trips of a loop run one after another"


@dataclass(frozen=True, slots=True)
class Factor:
    """One index variable of an op. ``size``: the largest of a halo factor; ``reducer``: of reductions and of indexed factors
    that are not in the result; ``reason``: why it is blocked."""

    size: int
    kind: Kind
    reducer: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Window:
    """Position ``x`` of tensor ``by`` touches the positions ``i`` of tensor ``of`` with
    ``x * stride + low <= i * dilation <= x * stride + high``. Tensors are numbered operands first, then results."""

    factor: int
    of: int
    by: int
    stride: int = 1
    low: int = 0
    high: int = 0
    dilation: int = 1


#: The factors of one dimension, major to minor; of one tensor, by dimension.
Dim = tuple[int, ...]
Tensor = tuple[Dim, ...]


@dataclass(frozen=True)
class Rule:
    """The factor rule of one op at its actual sizes. Compared by content; hashed once."""

    factors: tuple[Factor, ...]
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    windows: tuple[Window, ...] = field(default=())

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.operands + self.results

    @cached_property
    def _hash(self) -> int:
        return hash((self.factors, self.operands, self.results, self.windows))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def operand_majors(self) -> tuple[tuple[int, ...], ...]:
        """By operand and dimension: the major factor, or -1 where there is none."""
        return _majors(self.operands)

    @cached_property
    def result_majors(self) -> tuple[tuple[int, ...], ...]:
        """By result and dimension: the major factor, or -1 where there is none."""
        return _majors(self.results)

    @cached_property
    def splittable(self) -> tuple[bool, ...]:
        """By factor: whether it can be computed in parts, which needs that it is neither blocked nor minor in a dimension."""
        minor = {f for tensor in self.tensors for dim in tensor for f in dim[1:]}
        return tuple(f.kind is not Kind.BLOCKED and i not in minor for i, f in enumerate(self.factors))

    @cached_property
    def rivals(self) -> tuple[tuple[int, int], ...]:
        """Pairs of factors that one mesh axis cannot shard at once: two splittable ones, or two dimensions of one tensor."""
        groups = [[i for i, able in enumerate(self.splittable) if able]]
        groups += [sorted(m for m in majors if m >= 0) for majors in self.operand_majors + self.result_majors]
        return tuple(sorted({pair for group in groups for pair in itertools.combinations(group, 2)}))

    @cached_property
    def trip(self) -> int:
        """The factor that is the trip dimension of a loop, or -1."""
        return next((i for i, f in enumerate(self.factors) if f.reason == TRIP), -1)

    @cached_property
    def text(self) -> str:
        from shardwise.ir.notation import format_rule

        return format_rule(self)

    def __str__(self) -> str:
        return self.text


def _majors(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(dim[0] if dim else -1 for dim in tensor) for tensor in tensors)


def check_rule(rule: Rule, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> None:
    """Raises :class:`RuleError` unless ``rule`` is well formed and fits the shapes. Every rule is checked."""
    problems: list[str] = []
    shapes = [*operands, *results]
    if len(rule.operands) != len(operands) or len(rule.results) != len(results):
        raise RuleError(
            f"rule {rule} is for {len(rule.operands)} operands and {len(rule.results)} results; "
            f"the operation has {len(operands)} and {len(results)}"
        )
    windowed = {w.factor for w in rule.windows}
    in_operands: set[int] = set()
    in_results: set[int] = set()
    for t, (tensor, shape) in enumerate(zip(rule.tensors, shapes, strict=True)):
        name = f"operand {t}" if t < len(operands) else f"result {t - len(operands)}"
        if len(tensor) != len(shape):
            problems.append(f"{name} has {len(shape)} dimensions {list(shape)}, the rule gives it {len(tensor)}")
            continue
        used = [f for dim in tensor for f in dim]
        if len(set(used)) != len(used):
            problems.append(f"{name} has one factor in two places")
        (in_operands if t < len(operands) else in_results).update(used)
        for d, (dim, size) in enumerate(zip(tensor, shape, strict=True)):
            if any(rule.factors[f].kind is Kind.HALO or f in windowed for f in dim):
                if len(dim) > 1:
                    problems.append(f"{name} dimension {d}: a halo factor cannot be merged with others")
                continue
            product = math.prod(rule.factors[f].size for f in dim)
            if dim and product != size:
                problems.append(f"{name} dimension {d} has size {size}, its factors multiply to {product}")
            if not dim and size > 1:
                problems.append(f"{name} dimension {d} has size {size} but no factor")
    for i, factor in enumerate(rule.factors):
        problems += _kind_problems(letter(i), factor, i in in_operands, i in in_results)
    if problems:
        raise RuleError(f"rule {rule} does not fit: " + "; ".join(problems))


#: Whether factors of a kind are in operands, and in results.
_SIDES: Final = {
    Kind.PARALLEL: (True, True),
    Kind.REDUCTION: (True, False),
    Kind.FREE: (False, True),
    Kind.HALO: (True, True),
}


def _kind_problems(name: str, factor: Factor, in_operand: bool, in_result: bool) -> list[str]:
    wrong: list[str] = []
    if not (in_operand or in_result):
        wrong.append(f"factor {name} is in no tensor")
    expected = _SIDES.get(factor.kind)
    if expected is not None and expected != (in_operand, in_result):
        where = "operands and results" if in_operand and in_result else "operands" if in_operand else "results"
        wrong.append(f"factor {name} is {factor.kind.value} but is in {where} only")
    if factor.kind is Kind.INDEXED and not in_operand:
        wrong.append(f"factor {name} is indexed but is in no operand")
    needs_reducer = factor.kind is Kind.REDUCTION or (factor.kind is Kind.INDEXED and not in_result)
    if needs_reducer and factor.reducer not in REDUCERS:
        wrong.append(f"factor {name} needs a reducer, one of {', '.join(REDUCERS)}; it has {factor.reducer!r}")
    return wrong


_LETTERS: Final = "ijklmnopqrstuvwxyzabcdefgh"


def letter(index: int) -> str:
    """Returns the name of a factor in text: ``i, j, …, h, i1, j1, …``."""
    turn, place = divmod(index, len(_LETTERS))
    return _LETTERS[place] + (str(turn) if turn else "")
