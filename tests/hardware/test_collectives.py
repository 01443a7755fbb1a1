"""Costs of collectives: by hand for each kind of link, and the directions in which they may move."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import HardwareError
from shardwise.hardware.collectives import KINDS, AlphaBeta, collective
from shardwise.hardware.layout import Placement, place, placements
from shardwise.hardware.topology import topology
from shardwise.lowering.sharding import Kind

V = 1e9


def on(text: str, *sizes: int) -> Placement:
    return place(dict(zip("abc", sizes, strict=False)), topology(text))


def bytes_s(kind: str, axes: str, placement: Placement) -> float:
    """Seconds of 1 GB without the latency."""
    return V * collective(kind, axes, placement).s_per_byte


def test_kinds_are_those_of_the_lowering() -> None:
    assert {kind.value for kind in Kind} | {"halo", "hop"} == set(KINDS)


def test_a_line_of_four() -> None:
    """v5e:4x4 has no wrap-around: 4.5e10 bytes/s one way."""
    line = on("v5e:4x4", 4, 4)
    assert bytes_s("all-gather", "b", line) == pytest.approx(V * 3 / 4 / 4.5e10)
    assert bytes_s("reduce-scatter", "b", line) == pytest.approx(V * 3 / 4 / 4.5e10)
    assert bytes_s("all-reduce", "b", line) == pytest.approx(V * 6 / 4 / 4.5e10)
    assert bytes_s("all-to-all", "b", line) == pytest.approx(V * (2 * 2 / 4) / 4.5e10)
    assert bytes_s("collective-permute", "b", line) == pytest.approx(V / 4.5e10)
    assert bytes_s("halo", "b", line) == pytest.approx(V / 4.5e10)
    assert collective("all-gather", "b", line).alpha_s == pytest.approx(1e-6 + 3 * 1e-6)
    assert collective("all-reduce", "b", line).alpha_s == pytest.approx(1e-6 + 6 * 1e-6)
    assert collective("halo", "b", line).alpha_s == pytest.approx(2e-6)


def test_a_ring_of_sixteen() -> None:
    """Both directions work: twice the rate of a line, and half as many steps."""
    ring = on("v5e:16x16", 16, 16)
    assert bytes_s("all-gather", "b", ring) == pytest.approx(V * 15 / 16 / 9e10)
    assert bytes_s("all-reduce", "b", ring) == pytest.approx(V * 30 / 16 / 9e10)
    assert bytes_s("all-to-all", "b", ring) == pytest.approx(V * 16 / 8 / 4.5e10)
    assert bytes_s("collective-permute", "b", ring) == pytest.approx(V * 2 / 4.5e10)
    assert bytes_s("halo", "b", ring) == pytest.approx(V / 4.5e10)
    assert collective("all-gather", "b", ring).alpha_s == pytest.approx(1e-6 + 8 * 1e-6)


def test_a_hop_of_a_ring_is_a_permute_to_a_neighbor() -> None:
    """On a line the last member sends to the first, which is three links away."""
    line, ring = on("v5e:4x4", 4, 4), on("v5e:16x16", 16, 16)
    assert bytes_s("hop", "b", line) == pytest.approx(V / 4.5e10) == bytes_s("hop", "b", ring)
    assert collective("hop", "b", line).alpha_s == pytest.approx(1e-6 + 3 * 1e-6)
    assert collective("hop", "b", ring).alpha_s == pytest.approx(1e-6 + 1e-6)


@pytest.mark.parametrize(
    ("text", "sizes", "scatters"),
    [("v5e:4x4", (16,), False), ("v5e:4x4", (2, 8), True), ("v5e:2x4", (8,), True), ("v5e:2x2", (4,), True)],
)
def test_no_reduce_scatter_over_all_of_a_square(text: str, sizes: tuple[int, ...], scatters: bool) -> None:
    placement = on(text, *sizes)
    axis = "abc"[len(sizes) - 1]
    times = [bytes_s(kind, axis, placement) for kind in ("reduce-scatter", "all-reduce")]
    assert times[0] == pytest.approx(times[1] / (2 if scatters else 1))


def test_several_torus_axes_at_once() -> None:
    """Rates add in gathers: the links of y and z both work. The slowest axis counts in an all-to-all."""
    cube = on("v5p:4x4x4", 4, 16)
    assert bytes_s("all-gather", "b", cube) == pytest.approx(V * 15 / 16 / (2 * 2 * 9e10))
    assert bytes_s("all-gather", "ab", cube) == pytest.approx(V * 63 / 64 / (3 * 2 * 9e10))
    assert bytes_s("all-to-all", "b", cube) == pytest.approx(V * 4 / 8 / 9e10)
    assert collective("all-gather", "b", cube).alpha_s == pytest.approx(1e-6 + 2 * 2e-6)


def test_an_odd_ring() -> None:
    """Each of 5 sends a fifth to the 4 others, at distances 1, 1, 2 and 2; 10 directed links share that evenly."""
    cube = topology("v5p:4x4x4")
    five = dataclasses.replace(cube, axes=(dataclasses.replace(cube.axes[0], size=5),))
    ring = place({"a": 5}, five)
    assert bytes_s("all-to-all", "a", ring) == pytest.approx(5 * V / 5 * (1 + 1 + 2 + 2) / 10 / 9e10)
    assert bytes_s("all-gather", "a", ring) == pytest.approx(V * 4 / 5 / 18e10)


def test_a_split_ring() -> None:
    """Of a ring of 16 cut into 4 × 4 the inner piece is a line of neighbours; the outer is a ring whose groups share links."""
    split = on("v5e:16x16", 16, 4, 4)
    assert bytes_s("all-gather", "c", split) == pytest.approx(V * 3 / 4 / 4.5e10)
    assert bytes_s("all-gather", "b", split) == pytest.approx(V * 3 / 4 / (2 * 4.5e10 / 4))
    assert bytes_s("all-gather", "bc", split) == bytes_s("all-gather", "a", split)
    assert collective("halo", "b", split).alpha_s == pytest.approx(1e-6 + 4 * 1e-6)


def test_a_switch() -> None:
    node = on("h100:8", 2, 4)
    assert bytes_s("all-gather", "ab", node) == pytest.approx(V * 7 / 8 / 4.5e11)
    assert bytes_s("all-gather", "a", node) == pytest.approx(V / 2 / 4.5e11)
    assert bytes_s("all-to-all", "ab", node) == pytest.approx(V * 7 / 8 / 4.5e11)
    assert bytes_s("collective-permute", "b", node) == pytest.approx(V / 4.5e11)
    assert collective("all-gather", "ab", node).alpha_s == pytest.approx(6.6e-6 + 3 * 1.9e-6)


def test_two_tiers_of_switches() -> None:
    """Inside the node everything, between nodes an eighth of it."""
    cluster = on("h100:8x4", 32)
    inner, outer = V * 7 / 8 / 4.5e11, V / 8 * 3 / 4 / 5e10
    assert bytes_s("all-gather", "a", cluster) == pytest.approx(inner + outer)
    assert bytes_s("all-reduce", "a", cluster) == pytest.approx(2 * (inner + outer))
    assert bytes_s("all-to-all", "a", cluster) == pytest.approx(V * 7 / 8 / 4.5e11 + V * 3 / 4 / 5e10)
    assert bytes_s("collective-permute", "a", cluster) == pytest.approx(V / 5e10)
    assert collective("all-gather", "a", cluster).alpha_s == pytest.approx(6.6e-6 + 3 * 1.9e-6 + 2 * 4e-6)


def test_slices_over_the_data_centre() -> None:
    slices = on("2*v5e:16x16", 2, 256)
    assert bytes_s("all-reduce", "a", slices) == pytest.approx(2 * V / 2 / 3.125e9)
    both = V * 255 / 256 / (4 * 4.5e10) + V / 256 / 2 / 3.125e9
    assert bytes_s("all-gather", "ab", slices) == pytest.approx(both)


def test_two_cores_a_chip() -> None:
    """The cores share the chip's links: 5e10 each."""
    v3 = on("v3:2x4", 4, 2, 2)
    assert v3.lines() == ("a 4: ICI y 4", "b 2: ICI x 2", "c 2: chip 2")
    assert bytes_s("all-gather", "c", v3) == pytest.approx(V / 2 / 1e11)
    assert bytes_s("all-gather", "a", v3) == pytest.approx(V * 3 / 4 / 5e10)
    assert bytes_s("all-gather", "ac", v3) == pytest.approx(V / 2 / 1e11 + V / 2 * 3 / 4 / 5e10)


def test_free_and_unknown() -> None:
    line = on("v5e:4x4", 1, 16)
    assert collective("slice", "b", line) == collective("all-gather", "a", line) == AlphaBeta(0, 0)
    assert collective("all-reduce", [], line).time_s(V) == 0
    with pytest.raises(HardwareError, match="'broadcast' is no collective; there are slice, all-gather"):
        collective("broadcast", "b", line)


def test_names_and_numbers_mean_the_same() -> None:
    cube = on("v5p:4x4x4", 4, 16)
    assert collective("all-to-all", ["b", "a"], cube) == collective("all-to-all", [0, 1], cube)


CASES = [
    ("v5e:4x4", (2, 8)),
    ("v5e:16x16", (8, 4, 8)),
    ("v5p:4x4x8", (8, 16)),
    ("v3:2x4", (4, 4)),
    ("2*v5e:8x16", (16, 16)),
    ("h100:8x4", (2, 16)),
    ("cpu:6", (2, 3)),
]
SETS = [(0,), (1,), (0, 1)]


def changed(placement: Placement, rate: float = 1, latency: float = 1, axis: int | None = None) -> Placement:
    axes = tuple(
        dataclasses.replace(a, bytes_per_s=a.bytes_per_s * rate, latency_s=a.latency_s * latency)
        if axis is None or k == axis
        else a
        for k, a in enumerate(placement.topology.axes)
    )
    return dataclasses.replace(placement, topology=dataclasses.replace(placement.topology, axes=axes))


@settings(max_examples=150, deadline=None)
@given(
    case=st.sampled_from(CASES),
    kind=st.sampled_from(KINDS),
    axes=st.sampled_from(SETS),
    which=st.integers(0, 31),
    nbytes=st.floats(0, 1e11),
    more=st.floats(0, 1e11),
    factor=st.floats(1, 100),
    axis=st.integers(0, 2),
)
def test_directions(
    case: tuple[str, tuple[int, ...]],
    kind: str,
    axes: tuple[int, ...],
    which: int,
    nbytes: float,
    more: float,
    factor: float,
    axis: int,
) -> None:
    """More bandwidth is never slower, more latency never faster, more bytes never faster; on any link, in any placement."""
    text, sizes = case
    options = placements(dict(zip("abc", sizes, strict=False)), topology(text))
    placement = options[which % len(options)]
    time_s = collective(kind, axes, placement).time_s(nbytes)
    assert time_s >= 0
    assert collective(kind, axes, placement).time_s(nbytes + more) >= time_s
    assert collective(kind, axes, changed(placement, rate=factor, axis=axis)).time_s(nbytes) <= time_s * (1 + 1e-12)
    assert collective(kind, axes, changed(placement, latency=factor, axis=axis)).time_s(nbytes) >= time_s * (1 - 1e-12)


@settings(max_examples=60, deadline=None)
@given(case=st.sampled_from(CASES), axes=st.sampled_from(SETS), nbytes=st.floats(1, 1e11))
def test_relations_between_kinds(case: tuple[str, tuple[int, ...]], axes: tuple[int, ...], nbytes: float) -> None:
    """An all-reduce is a reduce-scatter and an all-gather, but for one start; an all-gather is no slower than a permute. Where
    the compiler makes no reduce-scatters, one is an all-reduce."""
    text, sizes = case
    placement = place(dict(zip("abc", sizes, strict=False)), topology(text))
    costs = {kind: collective(kind, axes, placement) for kind in KINDS}
    assert costs["reduce-scatter"] in (costs["all-gather"], costs["all-reduce"])
    if not placement.topology.profile.scatters:
        assert costs["reduce-scatter"] == costs["all-reduce"]
    assert costs["all-reduce"].s_per_byte == pytest.approx(2 * costs["all-gather"].s_per_byte)
    start = placement.topology.profile.collective_s
    assert costs["all-reduce"].alpha_s == pytest.approx(2 * costs["all-gather"].alpha_s - start)
    assert costs["halo"].time_s(nbytes) <= costs["hop"].time_s(nbytes) * (1 + 1e-12)
    assert costs["hop"].time_s(nbytes) <= costs["collective-permute"].time_s(nbytes) * (1 + 1e-12)


def test_a_ring_is_never_slower_than_a_line() -> None:
    line = on("v5e:4x4", 4, 4)
    axes = tuple(dataclasses.replace(a, wrap=True) for a in line.topology.axes)
    ring = dataclasses.replace(line, topology=dataclasses.replace(line.topology, axes=axes))
    for kind, sets in itertools.product(KINDS, SETS):
        assert collective(kind, sets, ring).time_s(V) <= collective(kind, sets, line).time_s(V)
