"""Replica groups in every spelling, and the axes they mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import HloError
from shardwise.hardware.mesh import MeshAxes
from shardwise.verification.replica_groups import (
    group_axes,
    is_hop,
    parse_groups,
    replica_groups,
    source_target_pairs,
    spanned_axes,
)

MESH = MeshAxes(("data", "model"), (2, 4))
ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ROWS),
        ("{}", (tuple(range(8)),)),
        ("[2,4]<=[8]", ROWS),
        ("[4,2]<=[2,4]T(1,0)", COLUMNS),
        ("[1,8]<=[8]", (tuple(range(8)),)),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ROWS),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0','axis_1'}", COLUMNS),
        ("mesh['a'=2,'b'=4] {'a','b'}", (tuple(range(8)),)),
        ("mesh['a'=8] {'a':(1)2}", COLUMNS),
        ("mesh['a'=8] {'a':(2)4}", ROWS),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", COLUMNS),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
        ("@mesh<a=2,b=4> {b}", ROWS),
    ],
)
def test_spellings(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert parse_groups(text, 8) == groups
    assert replica_groups(f"channel_id=1, replica_groups={text}, to_apply=%add", 8) == groups


def test_unknown_spelling_is_an_error() -> None:
    with pytest.raises(HloError, match="unknown notation: tiles"):
        parse_groups("tiles{1}", 8)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (ROWS, ("model",)),
        (COLUMNS, ("data",)),
        ((tuple(range(8)),), ("data", "model")),
        (((3, 2, 1, 0), (7, 5, 6, 4)), ("model",)),
        (((0, 1), (2, 3), (4, 5), (6, 7)), None),
        (tuple((d,) for d in range(8)), ()),
        (((0, 1, 2, 9), (4, 5, 6, 7)), None),
    ],
)
def test_axes_of_groups(groups: tuple[tuple[int, ...], ...], axes: tuple[str, ...] | None) -> None:
    assert group_axes(groups, MESH) == axes


def test_axes_of_size_one_are_not_named() -> None:
    mesh = MeshAxes(("pod", "data", "model"), (1, 2, 4))
    assert group_axes(COLUMNS, mesh) == ("data",)
    assert group_axes((tuple(range(8)),), mesh) == ("data", "model")


def test_permutes() -> None:
    found = source_target_pairs("channel_id=1, source_target_pairs={{0,1},{1,0},{4,5},{5,4}}, metadata={}")
    assert found == ((0, 1), (1, 0), (4, 5), (5, 4))
    assert spanned_axes(found, MESH) == ("model",)
    assert spanned_axes([(0, 4), (1, 5)], MESH) == ("data",)
    assert spanned_axes([(0, 5)], MESH) == ("data", "model")
    assert spanned_axes([(0, 0)], MESH) == ()
    assert spanned_axes([(0, 8)], MESH) is None


def test_hops_of_rings() -> None:
    """Every device sends to the next along ``model``, the last to the first."""
    mesh = MeshAxes.of({"data": 2, "model": 4})
    ring = [(d * 4 + k, d * 4 + (k + 1) % 4) for d in range(2) for k in range(4)]
    assert is_hop(ring, mesh) and is_hop([(k, (k + 1) % 8) for k in range(8)], mesh)
    assert not is_hop(ring[:-1], mesh), "one does not send"
    assert not is_hop([(a, d) for d, a in ring[:4]] + ring[4:], mesh), "one of the rings turns the other way"
    assert not is_hop([(k, (k + 2) % 8) for k in range(8)], mesh)


@given(st.lists(st.integers(2, 4), min_size=1, max_size=4), st.data())
def test_every_set_of_axes_is_found_again(sizes: list[int], data: st.DataObject) -> None:
    """Groups written over the mesh's axes are named by just these axes, in the mesh spelling and in full."""
    letters = "abcd"[: len(sizes)]
    chosen = data.draw(st.lists(st.sampled_from(letters), unique=True))
    mesh = MeshAxes(tuple(letters), tuple(sizes))
    axes = ",".join(f"'{n}'={s}" for n, s in zip(letters, sizes, strict=True))
    groups = parse_groups(f"mesh[{axes}] {{{','.join(repr(c) for c in chosen)}}}", mesh.devices)
    assert sorted(d for group in groups for d in group) == list(range(mesh.devices))
    assert group_axes(groups, mesh) == tuple(sorted(chosen))
    full = "{" + ",".join("{" + ",".join(map(str, g)) + "}" for g in groups) + "}"
    assert parse_groups(full, mesh.devices) == groups
