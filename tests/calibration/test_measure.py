"""Tiny measurements on host devices: readings of every kind, and a profile of them that loads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from shardwise.calibration import measure as module
from shardwise.calibration.calibrate import KINDS, Measured, calibrate
from shardwise.calibration.measure import measure
from shardwise.calibration.timing import Scale
from shardwise.errors import HardwareError
from shardwise.hardware.load import load_profile

TINY = Scale(
    types=("f32", "bf16"),
    products=((64, 64),),
    thin=((16, 64),),
    stream_bytes=1 << 20,
    arrays=6,
    vector_elements=1 << 10,
    collective_bytes=(1 << 12, 1 << 16),
    target_s=1e-3,
    limit_s=0.02,
    repeats=2,
)


@pytest.fixture(scope="module")
def measured() -> Measured:
    return measure(devices=2, scale=TINY)


def test_readings_are_positive_and_of_every_kind(measured: Measured) -> None:
    assert all(math.isfinite(r.time_s) and r.time_s > 0 and r.work > 0 for r in measured.readings)
    kinds = {r.what for r in measured.readings}
    plain = {"memory", "thin", "straight", "transposed", "vector", "launch", "between"}
    assert kinds == {"matrix.f32", "matrix.bf16", *plain, *KINDS}
    assert not measured.notes


def test_kernels_over_arrays_vary_in_their_inputs(measured: Measured) -> None:
    count = (1 << 20) // 2 // 4  # two devices share the bytes
    assert [r.work / 4 / count for r in measured.readings if r.what == "memory"] == [2, 3, 4]


def test_the_machine_tells(measured: Measured) -> None:
    machine = measured.machine
    assert (machine.device_kind, machine.platform, machine.devices) == ("cpu", "cpu", 2)
    assert machine.memory_bytes == module._host_bytes() // 2


def test_a_profile_of_the_readings_loads(measured: Measured, tmp_path: Path) -> None:
    profile = calibrate(measured, "ours").write(tmp_path / "ours.toml")
    rates = [profile.memory_bytes_per_s, profile.vector_flops_per_s]
    rates += [rate for _, rate in profile.matrix_flops_per_s] + [profile.links[0].bytes_per_s, profile.elements_per_s]
    assert all(math.isfinite(x) and x > 0 for x in (*rates, profile.launch_s))
    assert 0 < profile.matrix_efficiency <= 1 and 0 < profile.memory_efficiency <= 1
    assert profile.source("matrix.f32").startswith("measured by shardwise hardware calibrate with jax ")


def test_one_device_keeps_the_links_of_the_base(tmp_path: Path) -> None:
    alone = calibrate(measure(devices=1, scale=TINY), "alone")
    profile = alone.write(tmp_path / "alone.toml")
    assert alone.links_error is None and profile.links == load_profile("cpu").links
    assert profile.source("links.memory.bytes_per_s").startswith("taken from profile cpu: ")


def test_more_devices_than_there_are() -> None:
    with pytest.raises(HardwareError, match="4096 devices were requested and JAX has 8"):
        measure(devices=4096, scale=TINY)
