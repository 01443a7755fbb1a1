"""Placing meshes: which axis lies where, in what order devices stand, and what does not fit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import MeshError
from shardwise.hardware.layout import place, placements
from shardwise.hardware.topology import topology

TOPOLOGIES = ["v5e:4x4", "v5e:16x16", "2*v5e:4x8", "v5p:4x4x4", "v3:2x4", "h100:8x4", "v5e:6x6", "cpu:12"]


@pytest.mark.parametrize(
    ("text", "sizes", "lines"),
    [
        ("v5e:4x4", (4, 4), ["a 4: ICI x 4", "b 4: ICI y 4"]),
        ("v5e:4x4", (16,), ["a 16: ICI x 4 × ICI y 4"]),
        ("v5p:4x4x4", (4, 16), ["a 4: ICI x 4", "b 16: ICI y 4 × ICI z 4"]),
        ("v5p:4x4x4", (16, 4), ["a 16: ICI x 4 × ICI y 4", "b 4: ICI z 4"]),
        ("h100:8x8", (8, 8), ["a 8: InfiniBand 8", "b 8: NVLink 8"]),
        ("h100:8x8", (16, 4), ["a 16: InfiniBand 8 × NVLink 8 in pieces of 2", "b 4: NVLink 8 in pieces of 4"]),
        ("2*v5e:16x16", (32, 16), ["a 32: DCN 2 × ICI x 16", "b 16: ICI y 16"]),
        ("v3:2x4", (4, 4), ["a 4: ICI y 4", "b 4: ICI x 2 × chip 2"]),
        (
            "v5e:16x16",
            (16, 4, 4),
            ["a 16: ICI x 16", "b 4: ICI y 16 in pieces of 4 at distance 4", "c 4: ICI y 16 in pieces of 4"],
        ),
        ("v5e:4x4", (1, 16, 1), ["a 1: one device", "b 16: ICI x 4 × ICI y 4", "c 1: one device"]),
    ],
)
def test_default_placements(text: str, sizes: tuple[int, ...], lines: list[str]) -> None:
    placement = place(dict(zip("abc", sizes, strict=False)), topology(text))
    assert list(placement.lines()) == lines


def test_order_row_by_row() -> None:
    """Devices are numbered with x fastest, as libtpu does; data lies on x and model on y."""
    order = place({"data": 2, "model": 4}, topology("v5e:2x4")).order()
    np.testing.assert_array_equal(order, [[0, 2, 4, 6], [1, 3, 5, 7]])


def test_order_of_a_chip_of_two_cores() -> None:
    """Two cores a chip are neighbours in number, and model takes them."""
    order = place({"data": 4, "model": 2}, topology("v3:2x2")).order()
    np.testing.assert_array_equal(order, [[0, 1], [4, 5], [2, 3], [6, 7]])


def test_order_of_a_split_axis() -> None:
    order = place({"a": 2, "b": 4}, topology("cpu:8")).order()
    np.testing.assert_array_equal(order, [[0, 1, 2, 3], [4, 5, 6, 7]])


def test_order_of_nodes_is_the_plain_one() -> None:
    np.testing.assert_array_equal(place({"a": 4, "b": 8}, topology("h100:8x4")).order(), np.arange(32).reshape(4, 8))


@pytest.mark.parametrize(
    ("mesh", "text", "problem"),
    [
        ({"a": 4, "b": 2}, "v5e:4x4", "has 8 devices and v5e:4x4 has 16: its sizes must multiply to 16"),
        ({"a": 3}, "h100:8", "has 3 devices and h100:8 has 8: its sizes must multiply to 8"),
        ({"a": 0}, "h100:8", "not a positive whole number"),
    ],
)
def test_meshes_that_do_not_fit(mesh: dict[str, int], text: str, problem: str) -> None:
    with pytest.raises(MeshError) as caught:
        place(mesh, topology(text))
    assert problem in str(caught.value)


def test_placements_are_different_and_the_default_is_first() -> None:
    found = placements({"a": 8, "b": 8}, topology("h100:8x8"))
    assert found[0] == place({"a": 8, "b": 8}, topology("h100:8x8"))
    assert [p.lines()[0] for p in found if "pieces" not in str(p)] == ["a 8: InfiniBand 8", "a 8: NVLink 8"]
    assert len({p.segments for p in found}) == len(found)
    assert len(placements({"a": 4, "b": 4, "c": 4, "d": 4}, topology("v5e:16x16"), limit=5)) == 5


@st.composite
def meshes(draw: st.DrawFn) -> tuple[dict[str, int], str]:
    text = draw(st.sampled_from(TOPOLOGIES))
    left, sizes = topology(text).devices, []
    for _ in range(draw(st.integers(0, 2))):
        size = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        sizes.append(size)
        left //= size
    return dict(zip("abc", [*sizes, left], strict=False)), text


@settings(max_examples=60, deadline=None)
@given(meshes())
def test_every_placement_uses_every_device_once(case: tuple[dict[str, int], str]) -> None:
    mesh, text = case
    place_ = topology(text)
    for placement in placements(mesh, place_, limit=6):
        order = placement.order()
        assert order.shape == tuple(mesh.values())
        assert sorted(order.reshape(-1)) == list(range(place_.devices))
        for m, size in enumerate(mesh.values()):
            assert math.prod(s.size for s in placement.segments[m]) == size
            assert math.prod(run.size for run in placement.runs([m])) == size
        assert math.prod(run.size for run in placement.runs(mesh)) == place_.devices
    assert placements(mesh, place_, limit=6) == placements(mesh, place_, limit=6)
