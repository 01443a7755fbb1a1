"""Programs compiled for eight host devices: the collectives are the ones that thinking predicts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.verification import fresh
from tests.verification.host_programs import B, D, F, L


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    return fresh.run("tests.verification.host_programs", XLA_FLAGS="--xla_force_host_platform_device_count=8")


def logical(program: dict[str, Any]) -> list[tuple[Any, ...]]:
    return sorted((t["kind"], *t["axes"], t["count"], t["runs"], t["run_bytes"]) for t in program["logical_totals"])


def test_data_parallel_reduces_every_gradient_once(compiled: dict[str, Any]) -> None:
    program = compiled["data parallel"]
    assert logical(program) == [("all-reduce", "data", 2, 2, 2 * D * F * 4)]
    assert {c["reduction"] for c in program["collectives"]} == {"sum"}


def test_megatron_reduces_once_forward(compiled: dict[str, Any]) -> None:
    program = compiled["megatron"]
    assert logical(program) == [("all-reduce", "model", 1, 1, B // 2 * D * 4)]
    (c,) = program["collectives"]
    assert c["source"]["file"].endswith("host_programs.py")
    assert c["op_name"].endswith("dot_general")


def test_widened_reduction_counts_16_bits(compiled: dict[str, Any]) -> None:
    assert logical(compiled["megatron in 16 bits"]) == [("all-reduce", "model", 1, 1, B // 2 * D * 2)]


def test_fsdp_gathers_parameters_and_scatters_gradients(compiled: dict[str, Any]) -> None:
    """The host has no reduce-scatter of its own: it is an all-reduce that is sliced. The first weight is not needed whole
    in the backward pass, and the second one's gather is shared by both passes."""
    program = compiled["fsdp"]
    assert logical(program) == [
        ("all-gather", "data", 2, 2, 2 * D * F * 4),
        ("reduce-scatter", "data", 2, 2, 2 * D * F * 4),
    ]
    assert {t["kind"] for t in program["totals"]} == {"all-gather", "all-reduce"}
    assert "really reduce-scatters" in program["text"]


def test_reshard_is_an_all_to_all(compiled: dict[str, Any]) -> None:
    assert logical(compiled["reshard"]) == [("all-to-all", "model", 1, 1, 64 * 64 * 4 // 4)]


def test_gather_counts_the_larger_side(compiled: dict[str, Any]) -> None:
    (c,) = compiled["gather"]["collectives"]
    assert (c["kind"], c["axes"], c["bytes_in"], c["bytes_out"]) == ("all-gather", ["model"], 64 * 64, 64 * 64 * 4)


def test_scan_multiplies_by_its_trips(compiled: dict[str, Any]) -> None:
    program = compiled["scan"]
    assert logical(program) == [("all-reduce", "model", 1, L, L * B // 2 * D * 4)]
    assert program["collectives"][0]["loop"]["trips"] == L


def test_nested_scans_multiply(compiled: dict[str, Any]) -> None:
    program = compiled["nested scans"]
    assert logical(program) == [("all-reduce", "model", 1, 3 * L, 3 * L * B // 2 * D * 4)]
    assert program["collectives"][0]["loop"]["trips"] == L


def test_unknown_trips_are_said(compiled: dict[str, Any]) -> None:
    program = compiled["while"]
    assert program["loops_of_unknown_trips"] == 1
    assert ("all-reduce", "model", 1, 1, B * D * 4) in logical(program)
    assert "Loops of unknown length, counted as one trip: 1" in program["text"]


def test_reduction_over_two_axes(compiled: dict[str, Any]) -> None:
    program = compiled["two axes"]
    assert logical(program) == [("all-reduce", "data", "model", 1, 1, 16)]
    assert program["collectives"][0]["reduction"] == "max"


def test_dimensions_reduced_one_by_one_are_one_reduction(compiled: dict[str, Any]) -> None:
    program = compiled["two dimensions"]
    assert sorted((c["kind"], *c["axes"]) for c in program["collectives"]) == [
        ("all-reduce", "data"),
        ("all-reduce", "model"),
    ]
    assert logical(program) == [("all-reduce", "data", "model", 1, 1, 16)]


def test_local_program_has_none(compiled: dict[str, Any]) -> None:
    assert compiled["nothing"]["collectives"] == []
    assert "No collectives" in compiled["nothing"]["text"]


def test_memory_counts_donation(compiled: dict[str, Any]) -> None:
    memory = compiled["donated"]["memory"]
    assert memory["argument_bytes"] == memory["output_bytes"] == memory["alias_bytes"] == 64 * 64 * 4 // 2
    assert memory["peak_bytes"] == memory["argument_bytes"] + memory["temp_bytes"]


def test_too_few_devices(compiled: dict[str, Any]) -> None:
    error = compiled["too many devices"]["error"]
    assert "needs 16 host devices and this process has 8" in error
    assert "--xla_force_host_platform_device_count=16" in error and "jax_num_cpu_devices" in error


def test_text_fits_a_terminal(compiled: dict[str, Any]) -> None:
    for program in compiled.values():
        assert all(len(line) <= 80 for line in program.get("text", "").splitlines())
    assert compiled["scan"]["text"].splitlines()[0] == "Compiled for host, mesh data 2 × model 4"
