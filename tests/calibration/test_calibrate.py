"""Profiles from readings that were made up, and the command ``shardwise hardware calibrate`` around them; nothing is timed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.calibration import calibrate as module
from shardwise.calibration.calibrate import KINDS, Calibration, Machine, Measured, Reading, calibrate, to_toml
from shardwise.cli import hardware as cli
from shardwise.cli.main import main
from shardwise.cost.compute import stream_s
from shardwise.errors import HardwareError
from shardwise.hardware.collectives import collective
from shardwise.hardware.layout import place
from shardwise.hardware.load import load_profile, nearest_profile
from shardwise.hardware.profile import Profile
from shardwise.hardware.topology import topology

HOST = Machine("cpu", "cpu", 2, "0.9.0", memory_bytes=8 << 30)
H100_LINKS = {
    "latency.collective_s": 6.6e-6,
    "links.NVLink.latency_s": 1.9e-6,
    "links.NVLink.bytes_per_s": 4.5e11,
}
H200 = Machine("NVIDIA H200", "gpu", 1, "0.9.0", memory_bytes=112 << 30)


def collectives(topology_text: str) -> list[Reading]:
    """Times that the formulas give for a topology, of reduce-scatters that are such."""
    where = topology(topology_text)
    where = dataclasses.replace(where, profile=dataclasses.replace(where.profile, scatters=True))
    placement = place({"d": where.devices}, where)
    costs = {kind: collective(kind, ["d"], placement) for kind in KINDS}
    sizes = [2.0**k for k in (12, 16, 20, 24)]
    return [Reading(kind, f"{size}", size, cost.time_s(size)) for kind, cost in costs.items() for size in sizes]


def readings() -> list[Reading]:
    read = {"matrix.bf16": 7e14, "matrix.f32": 3.5e14, "vector": 3e13}
    found = [Reading(what, "", rate, 1.0) for what, rate in read.items()] + [Reading("launch", "", 1.0, 2e-6)]
    return found + [Reading("memory", f"{arrays} arrays", arrays * 4e8, arrays * 1e-4) for arrays in (2, 3, 4)]


def of(machine: Machine, *others: Reading) -> Calibration:
    return calibrate(Measured(machine, (*readings(), *others), (), 1.0), "ours")


@pytest.fixture
def found() -> Calibration:
    return of(HOST, *collectives("cpu:2"))


def test_the_file_loads_and_has_every_figure_with_its_source(found: Calibration, tmp_path: Path) -> None:
    profile = found.write(tmp_path / "ours.toml")
    assert [p.name for p in tmp_path.iterdir()] == ["ours.toml"]
    assert profile == load_profile(str(tmp_path / "ours.toml")) and profile.name == "ours"
    for figure, _ in cli.figures(found.data):
        assert profile.source(figure) != "not stated", figure
    by_whom = "shardwise hardware calibrate with jax 0.9.0 on cpu"
    assert profile.source("matrix.f32") == profile.source("latency.collective_s") == f"measured by {by_whom}"
    assert profile.source("memory.bytes") == f"measured by {by_whom}"
    assert profile.source("matrix.tile").startswith("taken from profile cpu: ")
    assert dict(profile.matrix_flops_per_s).keys() == {"f32", "bf16"}, "rates of other machines are left out"
    assert topology(f"{tmp_path / 'ours.toml'}:2").devices == 2


def test_the_fit_of_links_inverts_the_formulas() -> None:
    """Times that the formulas give lead back to the figures they were made with."""
    links, error = module._fit_links(collectives("h100:8"), 8, load_profile("h100"))
    assert error is not None and error < 1e-9
    assert links == pytest.approx(H100_LINKS | {f"efficiency.{kind}": 1.0 for kind in KINDS})
    assert module._fit_links([], 1, load_profile("h100")) == ({}, None)
    assert module._fit_links(collectives("h100:8x2"), 16, load_profile("h100")) == ({}, None), "two tiers"


def test_kinds_have_rates_of_their_own() -> None:
    """The fastest kind has the links' rate, the others a share of it."""
    shares = {
        "all-reduce": 0.5,
        "all-gather": 1.0,
        "reduce-scatter": 0.25,
        "all-to-all": 0.2,
        "collective-permute": 0.8,
    }
    h100 = load_profile("h100")
    slower = dataclasses.replace(h100, efficiency=tuple(shares.items()), scatters=True)
    where = dataclasses.replace(topology("h100:8"), profile=slower)
    read = [
        Reading(kind, "", size, collective(kind, ["d"], place({"d": 8}, where)).time_s(size))
        for kind in KINDS
        for size in (1024.0, 2.0**22)
    ]
    links, error = module._fit_links(read, 8, h100)
    assert error is not None and error < 1e-9
    assert links == pytest.approx(H100_LINKS | {f"efficiency.{kind}": share for kind, share in shares.items()})


def test_small_collectives_without_the_products_between() -> None:
    between = Reading("between", "", 1.0, 3e-4)
    shown = Reading("all-gather", "", 1024.0, 5e-4, between=True)
    lost = Reading("all-reduce", "", 1024.0, 3.01e-4, between=True)
    large = Reading("all-gather", "", 2.0**22, 1e-3)
    assert module._without_products([between, shown, lost, large]) == [
        dataclasses.replace(shown, time_s=pytest.approx(2e-4)),
        large,
    ]


def test_costs_of_operands_and_transposed_reads(tmp_path: Path) -> None:
    """Both lead back to the rates they were made with; where nothing more is seen there is no figure."""
    thin = [Reading("thin", str(n), n * 1e9, n * 1e9 / 3.5e14 + n * 4e6 / 2e10, n * 1e6) for n in (1.0, 2.0)]
    straight, transposed = (Reading(w, "", 12e6, t, 1e6) for w, t in (("straight", 1e-3), ("transposed", 3e-3)))
    profile = of(HOST, *thin, straight, transposed).write(tmp_path / "ours.toml")
    assert profile.operand_bytes_per_s == pytest.approx(2e10, rel=1e-3)
    assert profile.transposed_bytes_per_s == pytest.approx(2e9, rel=1e-3) and profile.transposes
    same = of(HOST, straight, dataclasses.replace(transposed, time_s=1e-3)).write(tmp_path / "ours.toml")
    assert not same.transposes and same.operand_bytes_per_s == float("inf")


def test_a_compiler_that_turns_what_it_gathers(tmp_path: Path) -> None:
    turning = profile_of(dataclasses.replace(HOST, minor_copies=True), tmp_path)
    assert turning.minor_copies and turning.source("minor_copies").startswith("measured by ")
    assert not profile_of(HOST, tmp_path).minor_copies


def test_a_compiler_without_reduce_scatters(tmp_path: Path) -> None:
    """What the machine's compiler does is kept, and the links are fitted to real reduce-scatters all the same."""
    without = of(dataclasses.replace(HOST, scatters=False), *collectives("h100:2"))
    assert without.links_error == pytest.approx(0.0, abs=1e-9)
    profile = without.write(tmp_path / "ours.toml")
    assert not profile.scatters and profile.source("reduce_scatter").startswith("measured by ")
    assert of(dataclasses.replace(HOST, scatters=True)).write(tmp_path / "ours.toml").scatters
    assert profile_of(HOST, tmp_path).scatters is load_profile("cpu").scatters is False, "the base's"
    asked = dataclasses.replace(H200, scatters=False)
    assert profile_of(asked, tmp_path).scatters, "a known device keeps its profile's"


@pytest.mark.parametrize("name", ["v5e", "v3", "h100"])
def test_kernels_over_arrays_take_as_long_as_the_cost_model_says(name: str) -> None:
    """What the base has for elements is not counted as bytes."""
    base, count = load_profile(name), 1e8
    sizes = [4.0 * arrays * count for arrays in (2, 3, 4)]
    read = [Reading("memory", str(size), size, stream_s(size, count, 0.0, base), count) for size in sizes]
    others = [r for r in readings() if r.what != "memory"]
    assert module._figures([*others, *read], base, True)["memory.efficiency"] == pytest.approx(base.memory_efficiency)


def test_elements_explain_at_most_half_of_the_time() -> None:
    """A host may be faster than the elements per second that are estimated for hosts in general."""
    read = Reading("memory", "", 8e8, 1e-3, 1e8)
    others = [r for r in readings() if r.what != "memory"]
    figures = module._figures([*others, read], load_profile("cpu"), False)
    assert figures["memory.bytes_per_s"] == pytest.approx(8e8 / 0.5e-3)


def test_a_known_device_keeps_its_peaks() -> None:
    """Efficiency is the share of the shipped peak; of another type the product of figure and efficiency is what was read."""
    h200 = load_profile("h200")
    figures = module._figures(readings(), h200, True)
    assert "matrix.bf16" not in figures and "memory.bytes_per_s" not in figures
    assert figures["matrix.efficiency"] == pytest.approx(7e14 / 9.9e14)
    assert figures["matrix.f32"] * figures["matrix.efficiency"] == pytest.approx(3.5e14)
    assert figures["memory.efficiency"] == pytest.approx(4e12 / 4.8e12)
    faster = module._figures([*readings(), Reading("matrix.bf16", "", 4e15, 1.0)], h200, True)
    assert faster["matrix.efficiency"] == 1.0 and faster["matrix.bf16"] == pytest.approx(2.35e15)


def profile_of(machine: Machine, folder: Path) -> Profile:
    return of(machine).write(folder / "ours.toml")


def test_memory_of_a_gpu(tmp_path: Path) -> None:
    """A device with a shipped profile keeps its memory; of another one the limit that JAX has counts."""
    shipped, kept = load_profile("h200"), profile_of(H200, tmp_path)
    assert (kept.memory_bytes, kept.usable_share) == (shipped.memory_bytes, shipped.usable_share)
    assert kept.source("memory.usable_share").startswith("taken from profile h200: ")
    other = profile_of(Machine("NVIDIA L4", "gpu", 1, "0.9.0", memory_bytes=18 << 30), tmp_path)
    assert (other.memory_bytes, other.usable_share) == (18 << 30, 1.0)
    assert other.source("memory.usable_share").startswith("measured by ")


def test_kinds_of_devices_find_their_profiles() -> None:
    assert nearest_profile("NVIDIA H200", "gpu") == ("h200", True)
    assert nearest_profile("NVIDIA A100-SXM4-80GB", "gpu") == ("a100-80", True)
    assert nearest_profile("NVIDIA H200 MIG 1g.18gb", "gpu") == ("a100-40", False)
    assert nearest_profile("NVIDIA GeForce RTX 4090", "gpu") == ("a100-40", False)
    assert nearest_profile("TPU v4", "tpu") == ("v4", True)
    assert nearest_profile("cpu", "cpu") == ("cpu", False)


def test_odd_texts_survive_the_file(found: Calibration, tmp_path: Path) -> None:
    odd = 'H200 "die 2"\\ ×8'
    data = found.data | {"title": odd}
    (tmp_path / "odd.toml").write_text(to_toml(data), encoding="utf-8")
    assert load_profile(str(tmp_path / "odd.toml")).title == odd


def measuring(monkeypatch: pytest.MonkeyPatch, measure: Callable[..., Measured]) -> None:
    """Puts a function in the place of the one that needs JAX."""
    stand_in = types.ModuleType("shardwise.calibration.measure")
    stand_in.measure = measure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shardwise.calibration.measure", stand_in)


def test_outputs_that_cannot_be_written(
    found: Calibration, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> Measured:
        raise AssertionError("nothing is measured if the result cannot be kept")

    measuring(monkeypatch, never)
    (tmp_path / "folder.toml").mkdir()
    wrong = {"missing/x.toml": "there is no folder", "folder.toml": "it is a folder", "x.json": "ends in .toml"}
    for name, why in wrong.items():
        assert main(["hardware", "calibrate", "--output", str(tmp_path / name)]) == 1
        captured = capsys.readouterr()
        assert not captured.out and why in captured.err and captured.err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["folder.toml"]
    with pytest.raises(HardwareError, match="clock_hz is missing"):
        Calibration({k: v for k, v in found.data.items() if k != "clock_hz"}, None, ()).write(tmp_path / "odd.toml")
    # A disk that is full when the file is renamed.
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(HardwareError, match="No space left on device"):
        found.write(tmp_path / "full.toml")
    assert [p.name for p in tmp_path.iterdir()] == ["folder.toml"]


def test_the_command(
    found: Calibration, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[object] = []
    noted = Measured(
        HOST, (*readings(), *collectives("cpu:2")), notes=("matrix.f64 was not measured: " + "words " * 20,), time_s=1.0
    )
    measuring(monkeypatch, lambda *given, say: asked.append(given) or noted)
    assert main(["hardware", "calibrate", "--devices", "2", "--name", "ours"]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines() if "SHARDWISE_HARDWARE_PATH" not in line)
    assert "matrix.f32 " in out and "Written to ours.toml." in out and "--topology ours:2" in out
    assert "\nnote: matrix.f64 was not measured" in out
    assert main(["hardware", "calibrate", "--devices", "2", "--json", "--output", "other.toml"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert asked == [(2,), (2,)]
    assert data["file"] == "other.toml" and data["measured"]["machine"]["devices"] == 2
    assert data["measured"]["readings"][0].keys() == {"what", "size", "work", "time_s", "elements", "between"}
    assert main(["hardware", "show", "other.toml"]) == 0


def test_help_does_not_wait_for_jax() -> None:
    code = "import sys\nfrom shardwise.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit('jax' in sys.modules or 'shardwise.calibration.calibrate' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
