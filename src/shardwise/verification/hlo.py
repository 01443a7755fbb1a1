"""Compiled HLO text as data: computations, instructions, callers, and how often each computation runs.

Problem. ``compiled.as_text()`` is the only complete record of the compiled program. The text prints each loop body once,
nests collectives in fusions and asynchronous wrappers, and on TPUs leaves out the trip counts of loops.

Idea. Computations form an acyclic graph whose edges carry a multiplicity (a loop body runs once per trip), so the number of
runs of a computation is a sum over its callers. Trip counts come from ``known_trip_count`` where the backend writes it, and
otherwise from the loop's condition (``trip_count.py``).

Weak. All branches of a conditional count as executed. A loop of unknown trip count counts as one trip. Only text with ``%``
before names, which JAX prints, is read.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from shardwise.errors import HloError
from shardwise.verification.trip_count import trip_count

_HEADER: Final = re.compile(r"(ENTRY )?%([\w.\-]+) .*\{$")
_STARTS: Final = re.compile(r"\s+(?:ROOT )?%?[\w.\-]+ = ")
_TRIP_COUNT: Final = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BITS: Final = re.compile(r"(?:bf|[a-z]+?)(\d+)")
_ARRAY: Final = re.compile(r"\b([a-z][a-z0-9]*)\[([^\]]*)\]")
_NAME: Final = re.compile(r"%([\w.\-]+)")
_OP_NAME: Final = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CYCLES: Final = re.compile(r'"estimated_cycles":"(\d+)"')
#: Attributes that name computations which run as part of the instruction.
_CALLS: Final = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_CALL_LISTS: Final = re.compile(r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}")


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a (possibly tuple) shape, with the sizes of one device."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.ceil(math.prod(self.dims) * bits(self.dtype) / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@functools.cache
def bits(dtype: str) -> int:
    """Returns the number of bits of one element.

    >>> bits("bf16"), bits("f8e4m3fn"), bits("pred"), bits("token")
    (16, 8, 8, 0)
    """
    if dtype == "pred":
        return 8
    match = _BITS.match(dtype)
    return int(match.group(1)) if match else 0


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
        """Computations that run with this instruction, except loops. The ``-done`` half of a pair repeats their names."""
        if self.opcode.endswith(("-done", "-update")):
            return ()
        lists = (name for inner in _CALL_LISTS.findall(self.attributes) for name in _NAME.findall(inner))
        return (*_CALLS.findall(self.attributes), *lists)

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


@dataclass(frozen=True, slots=True)
class Computation:
    """Instructions in order of execution, with lookups of definitions and users by name."""

    name: str
    instructions: tuple[Instruction, ...]
    by_name: dict[str, Instruction] = field(repr=False, compare=False)
    used_by: dict[str, list[Instruction]] = field(repr=False, compare=False)

    @staticmethod
    def of(name: str, instructions: Sequence[Instruction]) -> Computation:
        used_by: dict[str, list[Instruction]] = {}
        for i in instructions:
            for operand in dict.fromkeys(i.operands):
                used_by.setdefault(operand, []).append(i)
        return Computation(name, tuple(instructions), {i.name: i for i in instructions}, used_by)

    @property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.root), self.instructions[-1])

    def users(self, name: str) -> Sequence[Instruction]:
        return self.used_by.get(name, ())

    def parameter(self, number: int) -> Instruction | None:
        text = str(number)
        return next((i for i in self.instructions if i.opcode == "parameter" and i.arguments == text), None)


@dataclass(frozen=True, slots=True)
class Module:
    """A compiled program.

    ``trips`` has the trip count of every ``while`` instruction, ``None`` where it is only known at run time. ``runs`` counts
    how often each computation runs in one call of the program.
    """

    entry: str
    computations: dict[str, Computation]
    callers: dict[str, tuple[Instruction, ...]]
    trips: dict[Instruction, int | None]
    runs: dict[str, int]

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
    entry, name, body = "", "", list[Instruction]()
    for line in _logical_lines(text):
        if name:
            if line.startswith("}"):
                computations[name] = Computation.of(name, body)
                name, body = "", []
            elif line.strip():
                body.append(_parse_instruction(line, name))
        elif line.endswith("{") and (header := _HEADER.match(line)):
            name = header.group(2)
            entry = name if header.group(1) else entry
    if not entry:
        raise HloError("the text has no ENTRY computation: pass what compiled.as_text() returns for one device program")
    trips: dict[Instruction, int | None] = {}
    callers: dict[str, list[Instruction]] = {name: [] for name in computations}
    for i in (i for computation in computations.values() for i in computation.instructions):
        inner = i.called
        if i.opcode == "while":
            inner += (i.attribute("body"), i.attribute("condition"))
            annotated = _TRIP_COUNT.search(i.attributes)
            trips[i] = int(annotated.group(1)) if annotated else trip_count(computations, i)
        for name in inner:
            callers[name].append(i)
    runs = {entry: 1}

    def count_runs(name: str) -> int:
        if name not in runs:
            total = 0
            for caller in callers[name]:
                times = trips.get(caller, 1)
                times = 1 if times is None else times
                times += caller.opcode == "while" and caller.attribute("condition") == name
                total += times * count_runs(caller.computation)
            runs[name] = total
        return runs[name]

    all_callers = {name: tuple(instructions) for name, instructions in callers.items()}
    return Module(entry, computations, all_callers, trips, {name: count_runs(name) for name in computations})


def _logical_lines(text: str) -> Iterator[str]:
    """Yields the lines of a module, with an instruction that spans several (a kernel's metadata) joined into one.

    >>> list(_logical_lines("a {\\n  %x = f32[] custom-call(), attributes={m={\\nk\\n}}\\n}"))
    ['a {', '  %x = f32[] custom-call(), attributes={m={ k }}', '}']
    """
    pending = ""
    for line in text.splitlines():
        starts = _STARTS.match(line)
        if pending and not starts:
            pending += " " + line.strip()
        else:
            if pending:
                yield pending
            pending = line if starts else ""
            if not pending:
                yield line
        if pending and pending.count("{") <= pending.count("}"):
            yield pending
            pending = ""
    if pending:
        yield pending


def _parse_instruction(line: str, computation: str) -> Instruction:
    left, _, right = line.strip().partition(" = ")
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
        root=left.startswith("ROOT "),
    )


def _closing(text: str, start: int) -> int:
    """Returns the position where the parenthesis that opens at ``start`` closes."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)
