"""What crosses slices is read as collectives over mesh axes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.hardware.mesh import MeshAxes
from shardwise.verification import hlo
from shardwise.verification.collectives import Collective, read_collectives
from shardwise.verification.slices import Slices

MESH = MeshAxes(("stage", "chip"), (2, 2))
DEVICES = [SimpleNamespace(id=100000 * (k + 1) + j, slice_index=k) for k in range(2) for j in range(2)]
TEXT = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %t = token[] after-all()
  %send = (f32[8]{0}, u32[], token[]) send(%p, %t), channel_id=3, is_host_transfer=true, frontend_attributes={SAME}
  %recv = (f32[16]{0}, u32[], token[]) recv(%t), channel_id=2, is_host_transfer=true, frontend_attributes={SAME}
  %send-done = token[] send-done(%send), channel_id=3, is_host_transfer=true
  %recv-done = (f32[16]{0}, token[]) recv-done(%recv), channel_id=2, is_host_transfer=true
  ROOT %r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=%add
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %call = f32[8]{0} call(%p), to_apply=%body
}
"""


def read(target: str, kind: str, devices: Any) -> tuple[Collective, ...]:
    same = (
        '{_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="x_0",'
        f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}'
    )
    return read_collectives(hlo.read(TEXT.replace("{SAME}", same)), MESH, Slices.of(devices))


@pytest.mark.parametrize(
    "target, kind, read_as",
    [
        ('"{1,2}x{0:1}"', "ALL_GATHER", ("all-gather", ("stage",), 2)),
        ("{{100000,200000},{100001,200001}}", "ALL_TO_ALL", ("all-to-all", ("stage",), 2)),
        ("{{100000->200000},{100001->200001}}", "ONE_TO_ONE", ("collective-permute", ("stage",), 1)),
        ("{{100001->200000}}", "ONE_TO_ONE", ("collective-permute", ("stage", "chip"), 1)),
    ],
)
def test_a_send_and_a_recv_are_one_collective(target: str, kind: str, read_as: Any) -> None:
    across, inside = read(target, kind, DEVICES)
    assert (across.kind, across.axes, across.group_size) == read_as
    assert (across.form, across.nbytes, across.parts[0].bytes_in) == ("slices", 64, 32)
    assert (inside.kind, inside.axes, inside.nbytes) == ("all-reduce", ("chip",), 32)


def test_slices_are_found_in_any_order_of_devices() -> None:
    mixed = [DEVICES[k] for k in (2, 3, 0, 1)]
    across, inside = read("{{100000->200000},{100001->200001}}", "ONE_TO_ONE", mixed)
    assert across.pairs == ((2, 0), (3, 1)) and inside.axes == ("chip",)


def test_one_slice_has_no_slices() -> None:
    assert Slices.of(DEVICES[:2]) is None
