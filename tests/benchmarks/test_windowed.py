"""Windowed products are read as one all-gather or reduce-scatter."""

from __future__ import annotations

from benchmarks.fidelity.windowed import connected, merge_windowed
from shardwise.hardware.mesh import MeshAxes
from shardwise.verification import hlo
from shardwise.verification.collectives import Collective, read_collectives
from tests.verification import snippets

MESH = MeshAxes(("data", "model"), (2, 4))


def read(text: str) -> list[Collective]:
    module = hlo.read(text)
    return merge_windowed(module, MESH, read_collectives(module, MESH))


def sizes(c: Collective) -> tuple[int, int]:
    (only,) = c.parts
    return only.bytes_in, only.bytes_out


def test_devices_that_permutes_connect() -> None:
    assert connected([(0, 1), (1, 0), (4, 5), (5, 4)]) == ((0, 1), (4, 5))


def test_windowed_product_with_a_loop() -> None:
    assert list(hlo.read(snippets.WINDOWED_LOOP).trips.values()) == [2]
    (c,) = read(snippets.WINDOWED_LOOP)
    assert (c.kind, c.form, c.axes, c.runs) == ("all-gather", "windowed", ("model",), 1)
    assert sizes(c) == (32, 128)
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
    assert (c.kind, c.form, *sizes(c)) == ("reduce-scatter", "windowed", 128, 32)
    assert sorted(c.instructions) == ["cp-start.1", "cp-start.2", "last"]


def test_windowed_product_without_a_loop() -> None:
    (c,) = read(snippets.WINDOWED_CHAIN)
    assert (c.kind, c.form, c.axes) == ("reduce-scatter", "windowed", ("model",))
    assert sizes(c) == (128, 32)
    assert len(c.instructions) == 3


def test_gathering_ring_without_a_loop() -> None:
    text = snippets.WINDOWED_CHAIN.replace("(%zeros)", "(%p)")
    text = text.replace("(%fusion.1)", "(%cp-done)").replace("(%fusion.2)", "(%cp-done.1)")
    (c,) = read(text)
    assert (c.kind, c.form, *sizes(c)) == ("all-gather", "windowed", 32, 128)


def test_lonely_permutes_stay_permutes() -> None:
    text = snippets.WINDOWED_CHAIN.replace("dot_general", "concatenate")
    assert [c.kind for c in read(text)] == ["collective-permute"] * 3
