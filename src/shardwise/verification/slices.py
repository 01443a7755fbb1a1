"""Collectives between slices, as the TPU compiler writes them.

A program for several slices is one for the devices of a slice, whose numbers its replica groups have. The compiler does what
crosses slices hierarchically: an all-reduce is a reduce-scatter inside of slices, an all-reduce across them and an all-gather
inside. What crosses slices is a pair of ``send`` and ``recv`` with one rendezvous, whose attributes name the kind and the
devices: ``{1,2}x{0:7}`` are the devices of equal number in two slices, ``{{100000,200000},…}`` groups of device ids, and
``{{100000->200000},…}`` pairs of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardwise.verification.hlo import Instruction, Module
from shardwise.verification.replica_groups import Groups

_TYPE: Final = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_TARGET: Final = re.compile(r'_xla_megascale_target=("[^"]*"|\{\{.*?\}\})')
_RENDEZVOUS: Final = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_KINDS: Final = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}


@dataclass(frozen=True, slots=True)
class Slices:
    """The positions in the mesh of the devices of each slice, and those by device id."""

    positions: tuple[tuple[int, ...], ...]
    by_id: dict[int, int]

    @staticmethod
    def of(devices: Sequence[Any]) -> Slices | None:
        """Returns the slices of a mesh's devices, None where there is one."""
        numbers = [getattr(device, "slice_index", 0) for device in devices]
        if len(set(numbers)) < 2:
            return None
        slices = (tuple(p for p, n in enumerate(numbers) if n == number) for number in sorted(set(numbers)))
        return Slices(tuple(slices), {device.id: p for p, device in enumerate(devices)})

    def everywhere(self, groups: Groups) -> tuple[tuple[int, ...], ...]:
        """Returns groups of numbers in a slice as groups of positions, in all slices."""
        return tuple(tuple(one[number] for number in group) for one in self.positions for group in groups)

    def across(self, received: Instruction) -> tuple[Groups, bool]:
        """Returns the groups of what a ``recv`` takes from other slices, and whether they are pairs."""
        match = _TARGET.search(received.attributes)
        target = match[1] if match else ""
        if pairs := re.findall(r"(\d+)->(\d+)", target):
            return tuple((self.by_id[int(a)], self.by_id[int(b)]) for a, b in pairs), True
        if target.startswith("{"):
            listed = re.findall(r"\{([\d,]+)\}", target)
            return tuple(tuple(self.by_id[int(number)] for number in one.split(",")) for one in listed), False
        products = re.findall(r"\{([\d,]+)\}x", target)
        slices = [[self.positions[int(number) - 1] for number in one.split(",")] for one in products]
        return tuple(group for some in slices for group in zip(*some, strict=True)), False


def kind_across(instruction: Instruction) -> str:
    """Returns the kind of collective that a ``recv`` is a part of, empty for one that is not between slices."""
    match = _TYPE.search(instruction.attributes) if instruction.opcode == "recv" else None
    return _KINDS.get(match[1], "") if match else ""


def sent(module: Module, received: Instruction) -> Instruction:
    """Returns the ``send`` of a ``recv``; the ``recv`` itself if there is none."""
    meeting = _RENDEZVOUS.search(received.attributes)
    others = module.computations[received.computation].instructions if meeting else ()
    return next((i for i in others if i.opcode == "send" and meeting and meeting[0] in i.attributes), received)
