"""Compiled HLO text as data: computations, instructions, who calls whom, how often everything runs.

Problem. ``compiled.as_text()`` is the one place where the compiler says what it did. The text prints each loop body once,
hides collectives inside fusions and asynchronous wrappers, and on TPUs leaves out the trip counts of loops.

Idea. Computations form an acyclic graph whose edges carry a multiplicity (a loop body runs as often as the loop trips), so
the runs of a computation are a sum over its callers. Trip counts come from ``known_trip_count`` where the backend writes it,
otherwise from the condition: ``compare(element, limit)`` with the element's first value and its step. The step matters: a
windowed product advances its counter by two.

Weak. Branches of a conditional all count as executed. A loop whose trips cannot be found counts as one trip and its
``trips`` is ``None``. Only the text with ``%`` before names, which JAX prints, is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from shardwise.errors import HloError
from shardwise.verification.instructions import Computation, Instruction, parse_instruction
from shardwise.verification.trips import trip_count

_HEADER: Final = re.compile(r"(ENTRY )?%([\w.\-]+) .*\{$")
_TRIP_COUNT: Final = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True, slots=True)
class Loop:
    """A ``while`` instruction; ``trips`` is ``None`` where they are not known before it runs."""

    name: str
    computation: str
    body: str
    condition: str
    trips: int | None
    op_name: str


@dataclass(frozen=True, slots=True)
class Module:
    """A compiled program. ``runs`` counts how often each computation runs in one call of the program."""

    entry: str
    computations: dict[str, Computation]
    loops: tuple[Loop, ...]
    runs: dict[str, int]
    callers: dict[str, tuple[Instruction, ...]]
    sources: dict[int, tuple[str, int]] = field(repr=False)

    def instructions(self) -> Iterator[Instruction]:
        for computation in self.computations.values():
            yield from computation.instructions

    def operand(self, instruction: Instruction, index: int = 0) -> Instruction | None:
        if index >= len(instruction.operands):
            return None
        return self.computations[instruction.computation].by_name.get(instruction.operands[index])

    def enclosing_loop(self, computation: str) -> Loop | None:
        """The innermost loop around a computation, through fusions and calls."""
        bodies = {loop.body: loop for loop in self.loops}
        seen = set()
        while computation not in bodies and computation not in seen and self.callers.get(computation):
            seen.add(computation)
            computation = self.callers[computation][0].computation
        return bodies.get(computation)

    def in_branch(self, computation: str) -> bool:
        """Whether a computation runs only if a conditional takes its branch."""
        seen = set()
        while computation not in seen and self.callers.get(computation):
            seen.add(computation)
            caller = self.callers[computation][0]
            if caller.opcode == "conditional":
                return True
            computation = caller.computation
        return False

    def source(self, instruction: Instruction) -> tuple[str, int]:
        """File and line of the user's program, ``("", 0)`` where the compiler kept none."""
        frame = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        if frame:
            return self.sources.get(int(frame.group(1)), ("", 0))
        file = re.search(r'source_file="([^"]*)"', instruction.attributes)
        line = re.search(r"source_line=(\d+)", instruction.attributes)
        return (file.group(1), int(line.group(1)) if line else 0) if file else ("", 0)

    @property
    def estimated_cycles(self) -> int:
        """The compiler's estimates summed, loop bodies as often as they run; 0 where the backend gives none.

        A fusion's estimate covers what is inside it.
        """
        fused = {name for name, callers in self.callers.items() if any(c.opcode == "fusion" for c in callers)}
        return sum(
            i.estimated_cycles * self.runs[name]
            for name, computation in self.computations.items()
            if name not in fused
            for i in computation.instructions
        )


#: The start of an instruction in a computation's body.
_STARTS: Final = re.compile(r"\s+(?:ROOT )?%?[\w.\-]+ = ")


def _joined(text: str) -> Iterator[str]:
    """The lines of a module, those of an instruction that goes on over several (a kernel's metadata) as one.

    >>> list(_joined("a {\\n  %x = f32[] custom-call(), attributes={m={\\nk\\n}}\\n}"))
    ['a {', '  %x = f32[] custom-call(), attributes={m={ k }}', '}']
    """
    held = ""
    for line in text.splitlines():
        if held and not _STARTS.match(line):
            held += " " + line.strip()
        else:
            if held:
                yield held
            held = line if _STARTS.match(line) else ""
            if not held:
                yield line
        if held and held.count("{") <= held.count("}"):
            yield held
            held = ""
    if held:
        yield held


def read(text: str) -> Module:
    """Read compiled HLO text.

    >>> module = read("HloModule m\\n\\nENTRY %main (p: f32[8]) -> f32[8] {\\n  ROOT %p = f32[8]{0} parameter(0)\\n}\\n")
    >>> module.entry, module.runs
    ('main', {'main': 1})
    """
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {}
    table: dict[int, str] = {}
    entry, name, body = "", "", list[Instruction]()
    for line in _joined(text):
        if name:
            if line.startswith("}"):
                computations[name] = Computation.of(name, body)
                name, body = "", []
            elif line.strip():
                body.append(parse_instruction(line, name))
        elif line.endswith("{") and (header := _HEADER.match(line)):
            name = header.group(2)
            entry = name if header.group(1) else entry
        elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif line[:1].isdigit():
            number, _, rest = line.partition(" ")
            table[int(number)] = rest
    if not entry:
        raise HloError(
            "the text has no ENTRY computation: pass what compiled.as_text() returns, for one device program"
        )
    loops = tuple(_loops(computations))
    callers = _callers(computations)
    return Module(entry, computations, loops, _runs(entry, computations, loops, callers), callers, _sources(tables))


def _sources(tables: dict[str, dict[int, str]]) -> dict[int, tuple[str, int]]:
    """Innermost user line of every stack frame."""

    def numbers(text: str) -> dict[str, int]:
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}

    files = {key: value.strip('"') for key, value in tables.get("FileNames", {}).items()}
    locations = {key: numbers(value) for key, value in tables.get("FileLocations", {}).items()}
    sources = {}
    for frame, value in tables.get("StackFrames", {}).items():
        location = locations.get(numbers(value).get("file_location_id", -1), {})
        sources[frame] = (files.get(location.get("file_name_id", -1), ""), location.get("line", 0))
    return sources


def _callers(computations: dict[str, Computation]) -> dict[str, tuple[Instruction, ...]]:
    callers: dict[str, list[Instruction]] = {name: [] for name in computations}
    for computation in computations.values():
        for instruction in computation.instructions:
            inner = instruction.called
            if instruction.opcode == "while":
                inner += (instruction.attribute("body"), instruction.attribute("condition"))
            for name in inner:
                callers[name].append(instruction)
    return {name: tuple(found) for name, found in callers.items()}


def _runs(
    entry: str,
    computations: dict[str, Computation],
    loops: tuple[Loop, ...],
    callers: dict[str, tuple[Instruction, ...]],
) -> dict[str, int]:
    trips = {(loop.computation, loop.name): 1 if loop.trips is None else loop.trips for loop in loops}
    runs = {entry: 1}

    def count(name: str) -> int:
        if name not in runs:
            total = 0
            for caller in callers[name]:
                times = trips.get((caller.computation, caller.name), 1)
                times += caller.opcode == "while" and caller.attribute("condition") == name
                total += times * count(caller.computation)
            runs[name] = total
        return runs[name]

    return {name: count(name) for name in computations}


def _loops(computations: dict[str, Computation]) -> Iterator[Loop]:
    for computation in computations.values():
        for i in computation.instructions:
            if i.opcode == "while":
                known = _TRIP_COUNT.search(i.attributes)
                trips = int(known.group(1)) if known else trip_count(computations, i)
                yield Loop(i.name, computation.name, i.attribute("body"), i.attribute("condition"), trips, i.op_name)
