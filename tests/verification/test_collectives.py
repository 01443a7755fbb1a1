"""Every disguise of a collective is one collective, with its kind, bytes, axes and executions."""

from __future__ import annotations

import json

from shardwise.hardware.mesh import MeshAxes
from shardwise.verification import hlo
from shardwise.verification.collectives import Collective, Form, collectives
from shardwise.verification.summary import Total, collective_json, logical_totals, totals
from tests.verification import snippets

MESH = MeshAxes(("data", "model"), (2, 4))


def read(text: str, trivial: bool = False) -> tuple[Collective, ...]:
    return collectives(hlo.read(text), MESH, trivial=trivial)


def test_plain() -> None:
    (c,) = read(snippets.EXPLICIT)
    assert (c.kind, c.form, c.axes, c.reduction) == ("all-reduce", Form.PLAIN, ("model",), "sum")
    assert (c.bytes_in, c.bytes_out, c.nbytes, c.dtype, c.runs) == (128, 128, 128, "f32", 1)
    assert c.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert c.source == ("/home/me/model.py", 12)
    assert c.loop is None and not c.branch and not c.reduce_scatter_in_disguise


def test_combined() -> None:
    (c,) = read(snippets.COMBINED)
    assert c.axes == ("data",)
    assert [(p.dtype, p.dims, p.nbytes) for p in c.parts] == [("f32", (8,), 32), ("bf16", (4, 4), 32)]
    assert c.nbytes == 64
    assert [t.nbytes for t in c.transfers()] == [32, 32]
    assert totals([c]) == (Total("all-reduce", ("data",), 1, 64, 1, 64),)
    assert logical_totals([c]) == (Total("all-reduce", ("data",), 2, 64, 2, 64),)


def test_async_pairs_count_once() -> None:
    gather, scatter, permute = read(snippets.ASYNC)
    assert (gather.kind, gather.form, gather.axes) == ("all-gather", Form.ASYNC, ("model",))
    assert (gather.bytes_in, gather.bytes_out) == (8, 32)
    assert (scatter.kind, scatter.form, scatter.axes) == ("reduce-scatter", Form.ASYNC, ("data", "model"))
    assert (scatter.bytes_in, scatter.bytes_out, scatter.reduction) == (64, 8, "max")
    assert (permute.kind, permute.axes, permute.bytes_in, permute.bytes_out) == ("collective-permute", ("data",), 8, 8)
    assert permute.pairs[0] == (0, 4)


def test_reduce_scatters_in_disguise() -> None:
    fused, sliced = read(snippets.SCATTERS)
    assert (fused.kind, fused.form, fused.axes) == ("reduce-scatter", Form.FUSED, ("model",))
    assert (fused.bytes_in, fused.bytes_out, fused.op_name) == (2048, 512, "jit(step)/grad")
    assert (sliced.kind, sliced.reduce_scatter_in_disguise) == ("all-reduce", True)
    assert [p.scattered for p in sliced.parts] == [4, 1]
    assert [p.logical_dtype for p in sliced.parts] == ["bf16", "f32"]
    assert [(t.kind, t.dtype, t.nbytes) for t in sliced.transfers()] == [
        ("reduce-scatter", "bf16", 1024),
        ("all-reduce", "f32", 2048),
    ]


def test_reductions_over_one_axis_after_another_are_one() -> None:
    found = read(snippets.ONE_BY_ONE)
    assert [c.axes for c in found] == [("model",), ("data",)]
    assert [(t.axes, t.nbytes) for c in found for t in c.transfers()] == [(("data", "model"), 32), (("data",), 16)]
    assert logical_totals(found) == (
        Total("all-reduce", ("data", "model"), 1, 32, 1, 32),
        Total("all-reduce", ("data",), 1, 16, 1, 16),
    )


def test_a_reduced_value_that_is_used_is_not_absorbed() -> None:
    text = snippets.ONE_BY_ONE.replace("%q = f32[4]{0} parameter(1)", "%q = f32[8]{0} negate(%all-reduce.1)")
    found = read(text)
    assert [t.axes for c in found for t in c.transfers()] == [("model",), ("data",), ("data",)]


def test_reduced_values_that_are_only_added_up_count_once() -> None:
    found = read(snippets.ADDED)
    assert [p.joined for c in found for p in c.parts] == [False, True]
    assert logical_totals(found) == (Total("all-reduce", ("model",), 1, 32, 1, 32),)
    assert totals(found) == (Total("all-reduce", ("model",), 2, 64, 2, 64),)


def test_reduced_values_are_not_joined_over_other_devices_or_where_one_is_used() -> None:
    others = snippets.ADDED.replace(
        "all-reduce(%q), replica_groups=[2,4]<=[8]", "all-reduce(%q), replica_groups=[1,8]<=[8]"
    )
    used = snippets.ADDED.replace(
        "%w = bf16[8]{0} parameter(2)\n  %all", "%w = bf16[8]{0} convert(%all-reduce.2)\n  %all"
    )
    product = snippets.ADDED.replace("add(%first, %b.16)", "multiply(%first, %b.16)")
    for text in (others, used, product):
        assert text != snippets.ADDED
        assert not any(p.joined for c in read(text) for p in c.parts)


def test_loops() -> None:
    (c,) = read(snippets.LOOPS)
    assert (c.runs, c.axes) == (12, None)
    assert c.loop is not None and (c.loop.name, c.loop.trips) == ("while.inner", 4)
    assert totals([c]) == (Total("all-reduce", None, 1, 16, 12, 192),)


def test_pieces_are_one_collective_run_as_often_as_the_rarest() -> None:
    (c,) = read(snippets.PIECES)
    assert (c.kind, c.form, c.axes, c.runs) == ("all-gather", Form.PIECES, ("data", "model"), 1)
    assert (c.bytes_in, c.bytes_out) == (32, 256)
    assert c.instructions == ("all-gather.1", "all-gather.2", "all-gather.3")
    assert c.op_name == "jit(step)/dot_general"


def test_windowed_product_with_a_loop() -> None:
    module = hlo.read(snippets.WINDOWED_LOOP)
    assert module.loops[0].trips == 2
    (c,) = collectives(module, MESH)
    assert (c.kind, c.form, c.axes, c.runs) == ("all-gather", Form.WINDOWED, ("model",), 1)
    assert (c.bytes_in, c.bytes_out, c.loop) == (32, 128, None)
    assert sorted(c.instructions) == ["cp-start", "cp-start.1", "cp-start.2"]


def test_windowed_scatter_takes_the_permute_after_its_loop() -> None:
    text = snippets.WINDOWED_LOOP.replace("_ag.", "_rs.").replace("collective-permute-start(%p)", "negate(%p)")
    text = text.replace("%cp-done = f32[8]{0} collective-permute-done(%cp-start)", "%cp-done = f32[8]{0} copy(%p)")
    text = text.replace(
        "  %cp-start = (f32[8]{0}, f32[8]{0}, u32[], u32[]) negate(%p)", "  %cp-start = f32[8]{0} negate(%p)"
    )
    ring = "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
    text = text.replace(
        "  ROOT %result = f32[8]{0} get-tuple-element(%while), index=1",
        "  %left.1 = f32[8]{0} get-tuple-element(%while), index=1\n"
        f"  ROOT %last = f32[8]{{0}} collective-permute(%left.1), {ring}",
    )
    (c,) = read(text)
    assert (c.kind, c.form, c.bytes_in, c.bytes_out) == ("reduce-scatter", Form.WINDOWED, 128, 32)
    assert sorted(c.instructions) == ["cp-start.1", "cp-start.2", "last"]


def test_windowed_product_without_a_loop() -> None:
    (c,) = read(snippets.WINDOWED_CHAIN)
    assert (c.kind, c.form, c.axes) == ("reduce-scatter", Form.WINDOWED, ("model",))
    assert (c.bytes_in, c.bytes_out, c.reduction) == (128, 32, "sum")
    assert len(c.instructions) == 3


def test_gathering_ring_without_a_loop() -> None:
    text = snippets.WINDOWED_CHAIN.replace("(%zeros)", "(%p)")
    text = text.replace("(%fusion.1)", "(%cp-done)").replace("(%fusion.2)", "(%cp-done.1)")
    (c,) = read(text)
    assert (c.kind, c.form, c.bytes_in, c.bytes_out) == ("all-gather", Form.WINDOWED, 32, 128)


def test_lonely_permutes_stay_permutes() -> None:
    text = snippets.WINDOWED_CHAIN.replace("dot_general", "concatenate")
    assert [c.kind for c in read(text)] == ["collective-permute"] * 3


def test_branches_and_groups_of_one() -> None:
    (c,) = read(snippets.CONDITIONAL)
    assert (c.name, c.branch) == ("all-reduce.6", True)
    alone, _ = read(snippets.CONDITIONAL, trivial=True)
    assert (alone.name, alone.axes, alone.group_size) == ("alone", (), 1)


def test_all_to_all_of_many_operands_is_one_value() -> None:
    text = """ENTRY %main (p: f32[4], q: f32[4]) -> (f32[4], f32[4]) {
  %p = f32[4]{0} parameter(0)
  %q = f32[4]{0} parameter(1)
  ROOT %all-to-all = (f32[4]{0}, f32[4]{0}) all-to-all(%p, %q), replica_groups=[4,2]<=[2,4]T(1,0)
}
"""
    (c,) = read(text)
    assert (c.kind, len(c.parts), c.bytes_in, c.bytes_out, c.axes) == ("all-to-all", 1, 32, 32, ("data",))


def test_json_is_plain_data() -> None:
    for text in (snippets.LOOPS, snippets.SCATTERS, snippets.ASYNC):
        for c in read(text):
            data = collective_json(c)
            assert json.loads(json.dumps(data)) == data
