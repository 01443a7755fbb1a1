"""The lines of HLO text: ``name = shape opcode(operands), attributes``.

Names, opcodes and operands are read at once; attributes stay text until asked for, since most are never looked at.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from shardwise.errors import HloError

_BITS: Final = re.compile(r"(?:bf|[a-z]+?)(\d+)")
_ARRAY: Final = re.compile(r"\b([a-z][a-z0-9]*)\[([^\]]*)\]")
_NAME: Final = re.compile(r"%([\w.\-]+)")
_CYCLES: Final = re.compile(r'"estimated_cycles":"(\d+)"')
#: Attributes that name computations which run as part of the instruction.
_CALLS: Final = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_CALL_LISTS: Final = re.compile(r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
#: Ops whose result is their first operand's value.
PASSING: Final = frozenset({"copy", "convert", "bitcast", "reshape", "copy-start", "copy-done", "optimization-barrier"})


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a (possibly tuple) shape, as one device holds it."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.ceil(math.prod(self.dims) * bits(self.dtype) / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@functools.cache
def bits(dtype: str) -> int:
    """Bits of one element.

    >>> bits("bf16"), bits("f8e4m3fn"), bits("pred"), bits("token")
    (16, 8, 8, 0)
    """
    if dtype == "pred":
        return 8
    found = _BITS.match(dtype)
    return int(found.group(1)) if found else 0


@functools.lru_cache(maxsize=4096)
def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a shape in order, tuples flattened; layouts and comments are left out.

    >>> [str(a) for a in arrays("(f32[8,4]{1,0:T(8,128)}, /*index=1*/u32[]{:S(2)})")]
    ['f32[8,4]', 'u32[]']
    """
    return tuple(
        Array(dtype, tuple(int(d.lstrip("<= ")) for d in dims.split(",") if d.strip()))
        for dtype, dims in _ARRAY.findall(shape)
    )


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line. ``operands`` are names in the same computation; ``arguments`` the raw text between the parentheses."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    computation: str
    root: bool

    @property
    def arrays(self) -> tuple[Array, ...]:
        return arrays(self.shape)

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that run with this instruction, loops apart. The ``-done`` half of a pair names them again."""
        if self.opcode.endswith(("-done", "-update")):
            return ()
        lists = (name for inner in _CALL_LISTS.findall(self.attributes) for name in _NAME.findall(inner))
        return (*_CALLS.findall(self.attributes), *lists)

    @property
    def op_name(self) -> str:
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def estimated_cycles(self) -> int:
        """The TPU compiler's own estimate for one run, 0 where it gives none."""
        found = _CYCLES.search(self.attributes) if "estimated_cycles" in self.attributes else None
        return int(found.group(1)) if found else 0

    def attribute(self, key: str) -> str:
        """The computation, number or braced text that ``key=`` introduces, or ``""``."""
        found = re.search(
            rf"(?<![\w.]){re.escape(key)}=(%[\w.\-]+|\{{\{{.*?\}}\}}|\{{[^}}]*\}}|[^,\s]+)", self.attributes
        )
        return found.group(1).lstrip("%") if found else ""


@dataclass(frozen=True, slots=True)
class Computation:
    """A list of instructions in the order of execution, with its names and their uses looked up."""

    name: str
    instructions: tuple[Instruction, ...]
    by_name: dict[str, Instruction] = field(repr=False, compare=False)
    used_by: dict[str, tuple[Instruction, ...]] = field(repr=False, compare=False)

    @staticmethod
    def of(name: str, instructions: Sequence[Instruction]) -> Computation:
        used_by: dict[str, list[Instruction]] = {}
        for i in instructions:
            for operand in dict.fromkeys(i.operands):
                used_by.setdefault(operand, []).append(i)
        by_name = {i.name: i for i in instructions}
        return Computation(name, tuple(instructions), by_name, {key: tuple(users) for key, users in used_by.items()})

    @property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.root), self.instructions[-1])

    def users(self, name: str) -> tuple[Instruction, ...]:
        return self.used_by.get(name, ())

    def parameter(self, number: int) -> Instruction | None:
        text = str(number)
        return next((i for i in self.instructions if i.opcode == "parameter" and i.arguments == text), None)


def parse_instruction(line: str, computation: str) -> Instruction:
    left, _, right = line.strip().partition(" = ")
    root = left.startswith("ROOT ")
    end = _closing(right, 0) + 1 if right.startswith("(") else right.find(" ")
    start = right.find("(", end)
    if not right or end <= 0 or start < 0:
        raise HloError(f"an instruction of %{computation} cannot be read: {line.strip()[:200]}")
    close = _closing(right, start)
    arguments = right[start + 1 : close]
    return Instruction(
        name=left.removeprefix("ROOT ").lstrip("%"),
        opcode=right[end:start].strip(),
        shape=right[:end],
        operands=tuple(_NAME.findall(arguments)),
        arguments=arguments,
        attributes=right[close + 1 :].lstrip(", "),
        computation=computation,
        root=root,
    )


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at ``start`` closes."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return found.start()
    return len(text)
