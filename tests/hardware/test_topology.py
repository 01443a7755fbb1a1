"""Topology texts: what they mean, and what is wrong with one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import HardwareError
from shardwise.hardware.profile import LinkTier
from shardwise.hardware.topology import topology


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("v5e:4x4", "v5e:4x4 (16 devices: x 4, y 4)"),
        (" V5E:4×4 ", "v5e:4x4 (16 devices: x 4, y 4)"),
        ("v5e:8x16", "v5e:8x16 (128 devices: x 8, y 16 ring)"),
        ("v5p:4x4x4", "v5p:4x4x4 (64 devices: x 4 ring, y 4 ring, z 4 ring)"),
        ("v5p:2x2x4", "v5p:2x2x4 (16 devices: x 2, y 2, z 4)"),
        ("v4:4x8", "v4:4x8x1 (32 devices: x 4, y 8)"),
        ("v3:2x4", "v3:2x4 (16 devices: chip 2, x 2, y 4)"),
        ("v3:32x16", "v3:32x16 (1024 devices: chip 2, x 32 ring, y 16)"),
        ("2*v5e:16x16", "2*v5e:16x16 (512 devices: x 16 ring, y 16 ring, dcn 2)"),
        ("h100:8x8", "h100:8x8 (64 devices: nvlink 8, infiniband 8)"),
        ("8*h100:8", "h100:8x8 (64 devices: nvlink 8, infiniband 8)"),
        ("a100:8", "a100-40:8 (8 devices: nvlink 8)"),
        ("a100-80:16", "a100-80:8x2 (16 devices: nvlink 8, infiniband 2)"),
        ("a100-80", "a100-80:1 (1 device)"),
        ("16 v5e", "v5e:4x4 (16 devices: x 4, y 4)"),
        ("16 v3", "v3:2x4 (16 devices: chip 2, x 2, y 4)"),
        ("512 v5e", "2*v5e:16x16 (512 devices: x 16 ring, y 16 ring, dcn 2)"),
        ("v5litepod-16", "v5e:4x4 (16 devices: x 4, y 4)"),
        ("tpu-v5-lite:2x2", "v5e:2x2 (4 devices: x 2, y 2)"),
        ("v4-32", "v4:2x2x4 (16 devices: x 2, y 2, z 4)"),
        ("v5p-8", "v5p:2x2x1 (4 devices: x 2, y 2)"),
        ("v3-8", "v3:2x2 (8 devices: chip 2, x 2, y 2)"),
        ("v6e-256", "v6e:16x16 (256 devices: x 16 ring, y 16 ring)"),
        ("v5e", "v5e:1x1 (1 device)"),
        ("cpu:8", "cpu:8 (8 devices: memory 8)"),
    ],
)
def test_texts(text: str, shown: str) -> None:
    place = topology(text)
    assert str(place) == shown
    assert topology(place.text) == place


@pytest.mark.parametrize(
    ("count", "shape"), [(4, "2x2"), (8, "2x4"), (16, "4x4"), (32, "4x8"), (64, "8x8"), (128, "8x16"), (256, "16x16")]
)
def test_natural_shapes_of_v5e_are_those_of_the_cloud(count: int, shape: str) -> None:
    """https://cloud.google.com/tpu/docs/v5e"""
    assert topology(f"v5litepod-{count}").text == f"v5e:{shape}"


@pytest.mark.parametrize(
    ("cores", "shape"), [(8, "2x2x1"), (16, "2x2x2"), (64, "2x4x4"), (128, "4x4x4"), (256, "4x4x8"), (1024, "8x8x8")]
)
def test_natural_shapes_of_v5p_are_those_of_the_cloud(cores: int, shape: str) -> None:
    """https://cloud.google.com/tpu/docs/v5p"""
    assert topology(f"v5p-{cores}").text == f"v5p:{shape}"


def test_the_two_cores_of_a_chip_share_its_links() -> None:
    chip, x, _ = topology("v3:2x4").axes
    assert x.bytes_per_s == 1e11 / 2 and chip.bytes_per_s == 1e11
    assert topology("v5e:4x4").axes[0].bytes_per_s == 4.5e10


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("v5x:4x4", "did you mean v5p or v5e?"),
        ("v5e:", "is not a shape"),
        ("v5e:axb", "'axb' is not a shape; write v5e:4x4"),
        ("v5e:4x4x4", "it has 3 dimensions; its shapes have 2 dimensions of ICI"),
        ("v5e:32x8", "ICI links at most 16x16, not 32x8"),
        ("v5e:32x8x2", "ICI links at most 16x16, not 32x8"),
        ("h100:16x2", "NVLink links at most 8, not 16"),
        ("h100:8x2x2", "it has 3 dimensions"),
        ("2*h100:8x2", "there are no links between 2 such groups"),
        ("0*v5e:4x4", "every size is at least 1"),
        ("v5e:0x4", "every size is at least 1"),
        ("v5e-0", "at least one device is needed"),
        ("3 v3", "one chip of v3 counts 2, and 3 is not a multiple"),
        ("13 h100", "make no regular shape"),
        ("2*512 v5e", "are 2 slices already"),
        ("", "unknown hardware ''"),
        ("a100x8", "did you mean a100:8?"),
    ],
)
def test_bad_texts(text: str, problem: str) -> None:
    with pytest.raises(HardwareError) as caught:
        topology(text)
    assert problem in str(caught.value)


def test_a_profile_file_in_a_topology(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('title = "Mine"\nbase = "v5e"\n')
    place = topology(f"{path}:4x4")
    assert place.devices == 16 and place.profile.title == "Mine"
    assert topology(place.text) == place


@pytest.mark.parametrize(
    ("wrap", "shape", "largest", "rings"),
    [
        ("always", (2, 3, 4), (), (False, True, True)),
        ("never", (16,), (), (False,)),
        ("whole", (16, 32), (16, 32), (True, True)),
        ("whole", (8, 32), (32, 32), (False, True)),
        ("cubes of 4", (4, 8, 12), (), (True, True, True)),
        ("cubes of 4", (2, 4, 4), (), (False, False, False)),
        ("at least 16", (15, 16, 32), (), (False, True, True)),
    ],
)
def test_wrap_rules(wrap: str, shape: tuple[int, ...], largest: tuple[int, ...], rings: tuple[bool, ...]) -> None:
    tier = LinkTier(name="wire", kind="torus", bytes_per_s=1e9, latency_s=1e-6, wrap=wrap, largest=largest)
    assert tier.rings(shape) == rings


@given(st.sampled_from(["v2", "v3", "v4", "v5e", "v5p", "v6e"]), st.integers(1, 256))
def test_any_number_of_chips_that_fits_is_kept(name: str, chips: int) -> None:
    try:
        place = topology(f"{name}:{chips}")
    except HardwareError as error:
        assert "make no regular shape" in str(error)
        return
    assert place.devices == chips * place.profile.devices_per_chip
    assert math.prod(axis.size for axis in place.axes) == place.devices
