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
    return [tuple(total) for total in program["totals"]]


def test_data_parallel_reduces_every_gradient_once(compiled: dict[str, Any]) -> None:
    program = compiled["data parallel"]
    assert logical(program) == [("all-reduce", "data", 2, 2, 2 * D * F * 4)]


def test_megatron_reduces_once_forward(compiled: dict[str, Any]) -> None:
    program = compiled["megatron"]
    assert logical(program) == [("all-reduce", "model", 1, 1, B // 2 * D * 4)]
    (c,) = program["collectives"]
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
    assert {c["kind"] for c in program["collectives"]} == {"all-gather", "all-reduce"}


def test_reshard_is_an_all_to_all(compiled: dict[str, Any]) -> None:
    assert logical(compiled["reshard"]) == [("all-to-all", "model", 1, 1, 64 * 64 * 4 // 4)]


def test_gather_counts_the_larger_side(compiled: dict[str, Any]) -> None:
    (c,) = compiled["gather"]["collectives"]
    (part,) = c["parts"]
    assert (c["kind"], c["axes"]) == ("all-gather", ["model"])
    assert (part["bytes_in"], part["bytes_out"]) == (64 * 64, 64 * 64 * 4)


def test_scan_multiplies_by_its_trips(compiled: dict[str, Any]) -> None:
    program = compiled["scan"]
    assert logical(program) == [("all-reduce", "model", 1, L, L * B // 2 * D * 4)]
    assert program["trips"] == [L]


def test_nested_scans_multiply(compiled: dict[str, Any]) -> None:
    program = compiled["nested scans"]
    assert logical(program) == [("all-reduce", "model", 1, 3 * L, 3 * L * B // 2 * D * 4)]
    assert sorted(program["trips"]) == [3, L]


def test_unknown_trips_count_once(compiled: dict[str, Any]) -> None:
    program = compiled["while"]
    assert program["trips"] == [None]
    assert ("all-reduce", "model", 1, 1, B * D * 4) in logical(program)


def test_reduction_over_two_axes(compiled: dict[str, Any]) -> None:
    program = compiled["two axes"]
    assert logical(program) == [("all-reduce", "data", "model", 1, 1, 16)]


def test_local_program_has_none(compiled: dict[str, Any]) -> None:
    assert compiled["nothing"]["collectives"] == []


def test_memory_counts_donation(compiled: dict[str, Any]) -> None:
    memory = compiled["donated"]["memory"]
    assert memory["argument_bytes"] == memory["output_bytes"] == memory["alias_bytes"] == 64 * 64 * 4 // 2
    assert memory["peak_bytes"] == memory["argument_bytes"] + memory["temp_bytes"]


def test_too_few_devices(compiled: dict[str, Any]) -> None:
    error = compiled["too many devices"]["error"]
    assert "needs 16 host devices and this process has 8" in error
    assert "--xla_force_host_platform_device_count=16" in error and "jax_num_cpu_devices" in error
