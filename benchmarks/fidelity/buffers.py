"""The compiler's own assignment of buffers, from the dump that libtpu writes before it generates code.

``XLA_FLAGS=--xla_dump_to=FOLDER --xla_dump_hlo_as_text --xla_dump_hlo_as_proto`` leaves an ``HloProto`` with the buffer
assignment, also where the program does not fit. Two figures come from it:

- ``allocated``: what the program takes in HBM, arguments and the heap of temporaries with its gaps. This is what the compiler
  compares with the memory there is ("Ran out of memory ... (23.19G) exceeds available HBM");
- ``peak``: arguments, and the most bytes alive on the heap at once: ``memory_analysis().peak_memory_in_bytes`` to the byte,
  except where more lies in VMEM than on the heap, which that figure then takes for the heap. Values that share a place, such
  as a loop's state and what updates it, count once.

The protocol buffers are decoded by hand (numbers of fields as in ``xla/service/hlo.proto``), as their Python classes come only
with much larger packages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

_BUFFER_ASSIGNMENT: Final = 3
_ALLOCATION, _TRACE, _EVENT = 3, 4, 1
_HBM: Final = 0


@dataclass(frozen=True, slots=True)
class Allocation:
    """A block of memory; ``buffers`` are the numbers of the values in it with their bytes, ``offsets`` with their places."""

    index: int
    size: int
    color: int
    thread_local: bool
    parameter: bool
    live_out: bool
    buffers: dict[int, int] = field(repr=False)
    offsets: dict[int, int] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Assignment:
    """All allocations, and for every heap the order in which buffers come and go: number, and whether it comes."""

    allocations: tuple[Allocation, ...]
    traces: tuple[tuple[tuple[int, bool], ...], ...]

    def figures(self) -> dict[str, int]:
        """Bytes in HBM."""
        own = [a for a in self.allocations if a.color == _HBM and not a.thread_local]
        heaps = {a.index for a, _ in self._heaps()}
        fixed = sum(a.size for a in own if a.index not in heaps)
        return {
            "peak": fixed + sum(_highest(trace, a)[0] for a, trace in self._heaps()),
            "allocated": sum(a.size for a in own),
            "argument": sum(a.size for a in own if a.parameter),
            "output": sum(a.size for a in own if a.live_out),
            "alias": sum(a.size for a in own if a.live_out and a.parameter),
            "heap": sum(a.size for a, _ in self._heaps()),
        }

    def at_peak(self) -> dict[int, int]:
        """The buffers on the heap when it is fullest, with their bytes, largest first."""
        alive: dict[int, int] = {}
        for allocation, trace in self._heaps():
            alive |= _highest(trace, allocation)[1]
        return dict(sorted(alive.items(), key=lambda item: (-item[1], item[0])))

    def _heaps(self) -> Iterator[tuple[Allocation, tuple[tuple[int, bool], ...]]]:
        """The traced allocations in HBM. A trace's own number of its allocation is not the final one."""
        home = {buffer: a for a in self.allocations for buffer in a.buffers}
        for trace in self.traces:
            homes = Counter(home[buffer].index for buffer, _ in trace if buffer in home)
            if homes:
                index = homes.most_common(1)[0][0]
                allocation = next(a for a in self.allocations if a.index == index)
                if allocation.color == _HBM:
                    yield allocation, trace


def _highest(trace: tuple[tuple[int, bool], ...], home: Allocation) -> tuple[int, dict[int, int]]:
    """The most bytes alive at once, and the buffers that are: of those that share a place one, which counts once."""
    alive: dict[int, list[int]] = {}
    now = peak = 0
    at_peak: list[int] = []
    for buffer, comes in trace:
        sharing = alive.setdefault(home.offsets.get(buffer, -1 - buffer), [])
        size = home.buffers.get(buffer, 0)
        if comes:
            now += 0 if sharing else size
            sharing.append(buffer)
        elif buffer in sharing:
            sharing.remove(buffer)
            now -= 0 if sharing else size
        if now > peak:
            peak = now
            at_peak = [own[0] for own in alive.values() if own]
    return peak, {buffer: home.buffers.get(buffer, 0) for buffer in at_peak}


def read_assignment(path: Path) -> Assignment:
    """The buffer assignment of an ``HloProto`` file."""
    data = dict(_fields(path.read_bytes())).get(_BUFFER_ASSIGNMENT)
    if not isinstance(data, bytes):
        raise ValueError(f"{path} has no buffer assignment")
    allocations, traces = [], []
    for number, value in _fields(data):
        if number == _ALLOCATION:
            allocations.append(_allocation(value))
        elif number == _TRACE:
            events = [dict(_fields(e)) for n, e in _fields(value) if n == _EVENT]
            # Kinds: 0 allocated, 1 freed, 2 shared with another buffer.
            traces.append(tuple((e.get(2, 0), e.get(1, 0) != 1) for e in events))
    return Assignment(tuple(allocations), tuple(traces))


def _allocation(data: bytes) -> Allocation:
    once: dict[int, Any] = {}
    buffers: dict[int, int] = {}
    offsets: dict[int, int] = {}
    for number, value in _fields(data):
        if number == 9:
            assigned = dict(_fields(value))
            buffers[assigned.get(1, 0)] = assigned.get(3, 0)
            offsets[assigned.get(1, 0)] = assigned.get(2, 0)
        else:
            once[number] = value
    thread_local, parameter, live_out = (bool(once.get(n, 0)) for n in (3, 5, 7))
    return Allocation(
        once.get(1, 0), once.get(2, 0), once.get(8, 0), thread_local, parameter, live_out, buffers, offsets
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a message: an int, or bytes of a string, a message or a fixed number.

    >>> list(_fields(bytes([8, 150, 1, 18, 2, 104, 105])))
    [(1, 150), (2, b'hi')]
    """
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        kind = tag & 7
        if kind == 0:
            value, place = _varint(data, place)
            yield tag >> 3, value
            continue
        length = {1: 8, 5: 4}.get(kind)
        if length is None:
            length, place = _varint(data, place)
        yield tag >> 3, data[place : place + length]
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, place


def names(text: str, assignment: Assignment) -> dict[int, tuple[str, str]]:
    """Name and shape of every buffer, from the text form of the assignment.

    Where two values meet (``phi``: the elements of a loop's state) the name of another value of the same size in the same
    place says more: the update that the body makes, or what the loop starts with.
    """
    pattern = r"value: <(\d+) (\S+) @\d+> \(size=\d+,offset=\d+\): (.*)"
    found = {int(number): (name, shape) for number, name, shape in re.findall(pattern, text)}
    for a in assignment.allocations:
        same = {(a.offsets[b], a.buffers[b]): found[b] for b in a.buffers if b in found}
        for b in a.buffers:
            if b not in found and (a.offsets[b], a.buffers[b]) in same:
                found[b] = same[a.offsets[b], a.buffers[b]]
    return found
