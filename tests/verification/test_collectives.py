"""Every form of a collective is read as one collective, with its kind, bytes, axes and executions."""

from __future__ import annotations

from shardwise.hardware.mesh import MeshAxes
from shardwise.verification import hlo
from shardwise.verification.collectives import Collective, Part, Total, read_collectives, totals
from tests.verification import snippets

MESH = MeshAxes(("data", "model"), (2, 4))


def read(text: str) -> tuple[Collective, ...]:
    return read_collectives(hlo.read(text), MESH)


def part(c: Collective) -> Part:
    (only,) = c.parts
    return only


def test_plain() -> None:
    (c,) = read(snippets.EXPLICIT)
    assert (c.kind, c.form, c.axes) == ("all-reduce", "plain", ("model",))
    assert (part(c).bytes_in, part(c).bytes_out, c.nbytes, c.dtype, c.runs) == (128, 128, 128, "f32", 1)
    assert (c.group_size, c.op_name) == (4, "jit(step)/dot_general")
    assert part(c).kind == "all-reduce"


def test_combined() -> None:
    (c,) = read(snippets.COMBINED)
    assert c.axes == ("data",)
    assert [(p.dtype, p.nbytes) for p in c.parts] == [("f32", 32), ("bf16", 32)]
    assert c.nbytes == 64
    assert [p.logical_bytes for p in c.parts] == [32, 32]
    assert totals([c]) == {("all-reduce", ("data",)): Total(2, 2, 64)}


def test_async_pairs_count_once() -> None:
    scatter, gather, permute = read(snippets.ASYNC)
    assert (gather.kind, gather.form, gather.axes) == ("all-gather", "async", ("model",))
    assert (part(gather).bytes_in, part(gather).bytes_out) == (8, 32)
    assert (scatter.kind, scatter.form, scatter.axes) == ("reduce-scatter", "async", ("data", "model"))
    assert (part(scatter).bytes_in, part(scatter).bytes_out) == (64, 8)
    assert (permute.kind, permute.axes) == ("collective-permute", ("data",))
    assert (part(permute).bytes_in, part(permute).bytes_out) == (8, 8)
    assert permute.pairs[0] == (0, 4)


def test_reduce_scatters_as_fusions_and_as_sliced_all_reduces() -> None:
    fused, sliced = read(snippets.SCATTERS)
    assert (fused.kind, fused.form, fused.axes) == ("reduce-scatter", "fused", ("model",))
    assert (part(fused).bytes_in, part(fused).bytes_out, fused.op_name) == (2048, 512, "jit(step)/grad")
    assert sliced.kind == "all-reduce"
    assert [p.logical_dtype for p in sliced.parts] == ["bf16", "f32"]
    assert [(p.kind, p.logical_bytes) for p in sliced.parts] == [("reduce-scatter", 1024), ("all-reduce", 2048)]


def test_loops() -> None:
    (c,) = read(snippets.LOOPS)
    assert (c.runs, c.axes) == (12, None)
    assert totals([c]) == {("all-reduce", None): Total(1, 12, 192)}


def test_pieces_are_one_collective_run_as_often_as_the_rarest() -> None:
    (c,) = read(snippets.PIECES)
    assert (c.kind, c.form, c.axes, c.runs) == ("all-gather", "pieces", ("data", "model"), 1)
    assert (part(c).bytes_in, part(c).bytes_out) == (32, 256)
    assert c.instructions == ("all-gather.1", "all-gather.2", "all-gather.3")
    assert c.op_name == "jit(step)/dot_general"


def test_branches_and_groups_of_one() -> None:
    (c,) = read(snippets.CONDITIONAL)
    assert (c.name, c.runs, c.group_size) == ("all-reduce.6", 1, 2)


def test_all_to_all_of_many_operands_is_one_value() -> None:
    text = """ENTRY %main (p: f32[4], q: f32[4]) -> (f32[4], f32[4]) {
  %p = f32[4]{0} parameter(0)
  %q = f32[4]{0} parameter(1)
  ROOT %all-to-all = (f32[4]{0}, f32[4]{0}) all-to-all(%p, %q), replica_groups=[4,2]<=[2,4]T(1,0)
}
"""
    (c,) = read(text)
    assert (c.kind, part(c).bytes_in, part(c).bytes_out, c.axes) == ("all-to-all", 32, 32, ("data",))
