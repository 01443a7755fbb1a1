"""Compiled HLO text as data: computations, instructions, callers, and how often each computation runs.

Problem. ``compiled.as_text()`` is the only complete record of the compiled program. The text prints each loop body once,
nests collectives in fusions and asynchronous wrappers, and on TPUs leaves out the trip counts of loops.

Idea. Computations form an acyclic graph whose edges carry a multiplicity (a loop body runs once per trip), so the number of
runs of a computation is a sum over its callers. Trip counts come from ``known_trip_count`` where the backend writes it, and
otherwise from the loop's condition (``dataflow.py``).

Of a conditional the branch with the most estimated cycles counts as executed, as in our own cost model; where there are no
estimates all branches do.

Weak. A loop of unknown trip count counts as one trip. Only text with ``%`` before names, which JAX prints, is read.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardwise.errors import HloError
from shardwise.verification.dataflow import trip_count

_COMPUTATION: Final = re.compile(r"^(ENTRY )?%([\w.\-]+) [^\n]*\{\n(.*?)\n\}[^\n]*(?=\n\n|\n*\Z)", re.M | re.S)
#: An instruction may span several lines (a kernel's metadata).
_NEXT_INSTRUCTION: Final = re.compile(r"\n(?=\s+(?:ROOT )?%?[\w.\-]+ = )")
#: Parentheses nest where operands are printed with the layouts of tuples.
_INSTRUCTION: Final = re.compile(
    r"\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>.+?) (?P<opcode>[a-z][\w\-]*)"
    r"\((?P<arguments>(?:[^()]++|\((?:[^()]++|\((?:[^()]++|\([^()]*+\))*+\))*+\))*+)\)(?:, )?(?P<attributes>.*)",
    re.S,
)
_BITS: Final = re.compile(r"(?:bf|[a-z]+?)(\d+)")
_ARRAY: Final = re.compile(r"\b([a-z][a-z0-9]*)\[([^\]]*)\]")
_NAME: Final = re.compile(r"%([\w.\-]+)")
_OP_NAME: Final = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CYCLES: Final = re.compile(r'"estimated_cycles":"(\d+)"')
#: Attributes that name computations which run as part of the instruction.
_CALLS: Final = re.compile(
    r"\b(?:(?:calls|to_apply|true_computation|false_computation|body|condition)=(%[\w.\-]+)"
    r"|(?:branch_computations|called_computations|calls)=\{([^}]*)\})"
)


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a (possibly tuple) shape, with the sizes of one device."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bits(self) -> int:
        return bits(self.dtype)

    @property
    def nbytes(self) -> int:
        return math.ceil(math.prod(self.dims) * self.bits / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@functools.cache
def bits(dtype: str) -> int:
    """Returns the number of bits of one element.

    >>> bits("bf16"), bits("f8e4m3fn"), bits("pred"), bits("token")
    (16, 8, 8, 0)
    """
    match = _BITS.match(dtype)
    return 8 if dtype == "pred" else int(match.group(1)) if match else 0


@functools.lru_cache(maxsize=4096)
def arrays(shape: str) -> tuple[Array, ...]:
    """Returns the arrays of a shape in order, with tuples flattened and without layouts and comments.

    >>> [str(a) for a in arrays("(f32[8,4]{1,0:T(8,128)}, /*index=1*/u32[]{:S(2)})")]
    ['f32[8,4]', 'u32[]']
    """
    return tuple(
        Array(dtype, tuple(int(d.lstrip("<= ")) for d in dims.split(",") if d.strip()))
        for dtype, dims in _ARRAY.findall(shape)
    )


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation: ``name = shape opcode(arguments), attributes``.

    ``operands`` are the names in ``arguments``, defined in the same computation. Attributes stay text until they are read.
    """

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
        """Computations that run with this instruction. The ``-done`` half of a pair repeats their names."""
        if self.opcode.endswith(("-done", "-update")):
            return ()
        return tuple(name for texts in _CALLS.findall(self.attributes) for name in _NAME.findall("".join(texts)))

    @property
    def op_name(self) -> str:
        match = _OP_NAME.search(self.attributes)
        return match.group(1) if match else ""

    @property
    def estimated_cycles(self) -> int:
        """The TPU compiler's estimate for one run, 0 where there is none."""
        match = _CYCLES.search(self.attributes) if "estimated_cycles" in self.attributes else None
        return int(match.group(1)) if match else 0

    def attribute(self, key: str) -> str:
        """Returns the computation, number or braced text after ``key=``, or ``""``."""
        value = r"(%[\w.\-]+|\{\{.*?\}\}|\{[^}]*\}|[^,\s]+)"
        match = re.search(rf"(?<![\w.]){re.escape(key)}={value}", self.attributes)
        return match.group(1).lstrip("%") if match else ""


class Computation:
    """Instructions in order of execution, with lookups of definitions and users by name."""

    def __init__(self, name: str, instructions: Sequence[Instruction]):
        self.name, self.instructions = name, tuple(instructions)
        self.by_name = {i.name: i for i in instructions}
        self.root = next((i for i in instructions if i.root), instructions[-1])
        self._users: dict[str, list[Instruction]] = {}
        for i in instructions:
            for operand in dict.fromkeys(i.operands):
                self._users.setdefault(operand, []).append(i)

    def users(self, name: str) -> Sequence[Instruction]:
        return self._users.get(name, ())

    def parameter(self, number: int) -> Instruction | None:
        text = str(number)
        return next((i for i in self.instructions if i.opcode == "parameter" and i.arguments == text), None)


class Module:
    """A compiled program.

    ``trips`` has the trip count of every ``while`` instruction, ``None`` where it is only known at run time. ``runs`` counts
    how often each computation runs in one call of the program.
    """

    def __init__(self, entry: str, computations: dict[str, Computation]):
        self.entry, self.computations = entry, computations
        self.callers: dict[str, list[Instruction]] = {name: [] for name in computations}
        for i in self.instructions():
            for name in i.called:
                self.callers[name].append(i)
        self.trips = {i: trip_count(self, i) for i in self.instructions() if i.opcode == "while"}
        self._cycles: dict[str, int] = {}
        self.runs = {entry: 1}
        for name in computations:
            self._count_runs(name)

    def _count_runs(self, name: str) -> int:
        if name not in self.runs:
            total = 0
            for caller in self.callers[name]:
                trips = self.trips.get(caller)
                times = 1 if trips is None else trips
                times += caller.opcode == "while" and caller.attribute("condition") == name
                if caller.opcode == "conditional":
                    longest = max(caller.called, key=self._own_cycles)
                    times = int(name == longest or not self._own_cycles(longest))
                total += times * self._count_runs(caller.computation)
            self.runs[name] = total
        return self.runs[name]

    def _own_cycles(self, name: str) -> int:
        """The estimated cycles of one run of a computation."""
        if name not in self._cycles:
            total = 0
            for i in self.computations[name].instructions:
                inside = [self._own_cycles(c) for c in i.called] if i.opcode != "fusion" else []
                times = (self.trips[i] or 1) if i.opcode == "while" else 1
                total += i.estimated_cycles + times * (
                    max(inside, default=0) if i.opcode == "conditional" else sum(inside)
                )
            self._cycles[name] = total
        return self._cycles[name]

    def instructions(self) -> Iterator[Instruction]:
        for computation in self.computations.values():
            yield from computation.instructions

    def operand(self, instruction: Instruction, index: int = 0) -> Instruction | None:
        if index >= len(instruction.operands):
            return None
        return self.computations[instruction.computation].by_name.get(instruction.operands[index])

    @property
    def estimated_cycles(self) -> int:
        """The sum of the compiler's estimates over all runs, 0 where the backend has none. A fusion's estimate covers the
        instructions inside it."""
        fused = {name for name, callers in self.callers.items() if any(c.opcode == "fusion" for c in callers)}
        outside = (i for i in self.instructions() if i.computation not in fused)
        return sum(i.estimated_cycles * self.runs[i.computation] for i in outside)


def read(text: str) -> Module:
    """Reads compiled HLO text.

    >>> module = read("HloModule m\\n\\nENTRY %main (p: f32[8]) -> f32[8] {\\n  ROOT %p = f32[8]{0} parameter(0)\\n}\\n")
    >>> module.entry, module.runs
    ('main', {'main': 1})
    """
    computations: dict[str, Computation] = {}
    entry = ""
    for is_entry, name, body in _COMPUTATION.findall(text):
        entry = name if is_entry else entry
        computations[name] = Computation(name, [_instruction(line, name) for line in _NEXT_INSTRUCTION.split(body)])
    if not entry:
        raise HloError("the text has no ENTRY computation: pass what compiled.as_text() returns for one device program")
    return Module(entry, computations)


def _instruction(text: str, computation: str) -> Instruction:
    match = _INSTRUCTION.match(text)
    if not match:
        raise HloError(f"an instruction of %{computation} cannot be read: {text.strip()[:200]}")
    fields: dict[str, Any] = match.groupdict() | {"root": bool(match["root"])}
    return Instruction(operands=tuple(_NAME.findall(match["arguments"])), computation=computation, **fields)
