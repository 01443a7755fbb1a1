"""Programs compiled for TPU topologies, where libtpu is installed; and what is said where it is not."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwise
from shardwise.cost.compute import stream_s
from shardwise.cost.layouts import narrow_rows
from shardwise.errors import CompileError
from shardwise.hardware.collectives import collective
from shardwise.hardware.layout import place
from shardwise.hardware.load import load_profile
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import topology
from shardwise.lowering.sharding import ArrayType, Kind, Ring, Sharding, reshard
from shardwise.verification.compiled import make_mesh, tpu_environment
from tests.verification import fresh
from tests.verification.host_programs import B, D, F, L
from tests.verification.tpu_programs import COPIED, NARROW, ON_CHIP, SINES, STREAM, STREAMED

LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(not LIBTPU, reason='needs libtpu: pip install "shardwise[tpu]"')


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    return fresh.run("tests.verification.tpu_programs", **tpu_environment())


def logical(program: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [tuple(total) for total in program["totals"]]


@pytest.mark.skipif(LIBTPU, reason="libtpu is installed")
def test_missing_libtpu_is_said() -> None:
    with pytest.raises(CompileError, match=r'pip install "shardwise\[tpu\]"'):
        make_mesh({"data": 16}, "v5e:4x4")


@needs_libtpu
def test_data_parallel(compiled: dict[str, Any]) -> None:
    assert logical(compiled["data parallel"]) == [("all-reduce", "data", "model", 2, 2, 2 * D * F * 4)]


@needs_libtpu
def test_trips_are_found_in_the_condition(compiled: dict[str, Any]) -> None:
    program = compiled["scan"]
    assert logical(program) == [("all-reduce", "model", 1, L, L * B // 4 * D * 4)]
    assert program["trips"] == [L]
    assert program["estimated_cycles"] > 0


@needs_libtpu
def test_fused_reduce_scatter(compiled: dict[str, Any]) -> None:
    (c,) = compiled["reduce-scatter"]["collectives"]
    assert (c["kind"], c["form"], c["axes"]) == ("reduce-scatter", "fused", ["model"])
    (part,) = c["parts"]
    assert (part["bytes_in"], part["bytes_out"]) == (4096 * 256 * 4, 1024 * 256 * 4)


@needs_libtpu
def test_where_the_compiler_has_no_reduce_scatter_a_ring_is_emitted(compiled: dict[str, Any]) -> None:
    mesh = MeshAxes.of({"model": 4})
    for size, dim, native in compiled["scatters"]:
        whole = Sharding.whole(len(size))
        target = Sharding(tuple((0,) if d == dim else () for d in range(len(size))))
        array = ArrayType(tuple(size), 2.0, ring=Ring.MISSING)
        (step,) = reshard(array, Sharding(whole.dims, (0,)), target, mesh)
        assert (step.kind is Kind.REDUCE_SCATTER) == native, (size, dim)


@needs_libtpu
def test_over_all_of_a_symmetric_torus_the_compiler_has_no_reduce_scatter(compiled: dict[str, Any]) -> None:
    """``shardwise.hardware.collectives``: one costs as much as an all-reduce there."""
    for backend, sizes, native in compiled["whole"]:
        mesh = dict(zip(("data", "model")[-len(sizes) :], sizes, strict=True))
        placement = place(MeshAxes.of(mesh), topology(backend))
        scatter, reduce = (collective(kind, ["model"], placement) for kind in ("reduce-scatter", "all-reduce"))
        assert (scatter.s_per_byte < reduce.s_per_byte) == native, (backend, sizes)


@needs_libtpu
def test_images_have_batch_and_features_minor(compiled: dict[str, Any]) -> None:
    """``shardwise.cost.layouts``: not the order that pads least, where there are fewer examples than lanes."""
    for layouts in compiled["images"]:
        inner = [layout for layout in layouts if layout == [0, 3]]
        assert len(inner) > len(layouts) / 2, layouts  # the rest are copies of the argument


@needs_libtpu
def test_batched_products_have_other_dimensions_minor(compiled: dict[str, Any]) -> None:
    """``shardwise.cost.layouts``: 27 x 27 scores are padded to 32 x 128, although 128 examples would pad nothing."""
    layouts = compiled["scores"]
    assert sum(layout == [1, 2] for layout in layouts) > len(layouts) / 2, layouts


@needs_libtpu
def test_few_rows_take_the_time_of_whole_registers(compiled: dict[str, Any]) -> None:
    """``shardwise.cost.layouts``: the part of the time that is by element grows, that by byte does not."""
    profile = load_profile("v5e")
    for (few, _), (cycles, full) in zip(STREAMED, compiled["streamed"], strict=True):
        ratio, elements = narrow_rows(few, 2, profile.vector_tile), math.prod(few)
        times = [stream_s(4.0 * elements, share * elements, 0.0, profile) for share in (ratio, 1.0)]
        assert cycles / full == pytest.approx(times[0] / times[1], rel=0.1)


@needs_libtpu
def test_streams_cost_by_the_byte_and_by_the_element(compiled: dict[str, Any]) -> None:
    """``shardwise.cost.compute``: bfloat16, and a row times a matrix, which the matrix unit does not compute."""
    profile, elements = load_profile("v5e"), math.prod(STREAM)
    time_s = stream_s(4.0 * elements, elements, 0.0, profile)
    assert [cycles / profile.clock_hz for cycles in compiled["streams"]] == pytest.approx([time_s] * 2, rel=0.1)


@needs_libtpu
@pytest.mark.parametrize("name", SINES)
def test_sines_take_as_long_as_the_compiler_estimates(compiled: dict[str, Any], name: str) -> None:
    """``vector.angle_factor`` of the profile."""
    x = jax.ShapeDtypeStruct(STREAM, "float32")
    time_s = shardwise.plan(SINES[name], x, mesh={"data": 1}, topology="v5e:1x1").predicted.compute_s
    assert compiled["sines"][name] / load_profile("v5e").clock_hz == pytest.approx(time_s, rel=0.1)


@needs_libtpu
@pytest.mark.parametrize("name", NARROW)
def test_what_may_be_padded_or_copied_is_not_said_to_fit(compiled: dict[str, Any], name: str) -> None:
    """``shardwise.cost.uncertainty``: with a byte less than the compiler needs a plan is tight, or does not fit."""
    fn, size, rows = NARROW[name]
    args = (jax.ShapeDtypeStruct(size, jnp.float32), jax.ShapeDtypeStruct(rows, jnp.int32))
    asked: dict[str, Any] = {"topology": "v5e:1x1", "allow_infeasible": True}
    plan = shardwise.plan(fn, *args, memory_limit=compiled["narrow"][name] - 1, **asked)
    assert not plan.predicted.fits or any(note.startswith("tight") for note in plan.notes), plan.predicted
    roomy = shardwise.plan(fn, *args, memory_limit=4 * compiled["narrow"][name], **asked)
    assert not any(note.startswith("tight") for note in roomy.notes), roomy.notes


@needs_libtpu
@pytest.mark.parametrize("name", COPIED)
def test_row_major_copies_of_lookups_are_predicted(compiled: dict[str, Any], name: str) -> None:
    """``shardwise.cost.copies``."""
    fn, size, rows = COPIED[name]
    args = (jax.ShapeDtypeStruct(size, jnp.float32), jax.ShapeDtypeStruct(rows, jnp.int32))
    plan = shardwise.plan(fn, *args, topology="v5e:1x1", allow_infeasible=True)
    assert plan.predicted.peak_bytes == pytest.approx(compiled["copied"][name], rel=0.15)


@needs_libtpu
def test_temporaries_that_fit_on_the_chip_take_no_memory(compiled: dict[str, Any]) -> None:
    """``shardwise.cost.model.in_use``: the arrays of 16 MiB between the products."""
    fn, size, rows = ON_CHIP
    args = (jax.ShapeDtypeStruct(size, jnp.float32), jax.ShapeDtypeStruct(rows, jnp.int32))
    plan = shardwise.plan(fn, *args, topology="v5e:1x1")
    assert plan.predicted.peak_bytes == pytest.approx(compiled["on chip"], rel=0.05)


@needs_libtpu
def test_gathers_drawn_out_over_fusions_count_once(compiled: dict[str, Any]) -> None:
    assert logical(compiled["gathers"]) == [("all-gather", "data", "model", 3, 3, 3 * 512 * 512 * 2)]


@needs_libtpu
def test_sums_over_slices_are_hierarchical(compiled: dict[str, Any]) -> None:
    """A quarter crosses slices, after a reduce-scatter inside and before an all-gather."""
    size = 1024 * 512 * 4
    assert logical(compiled["slices"]) == [
        ("all-gather", "data", 1, 1, 4 * size),
        ("all-gather", "model", 1, 3, 3 * size),
        ("all-reduce", "data", 1, 3, 3 * size // 4),
        ("collective-permute", "data", 1, 3, 3 * size),
        ("reduce-scatter", "model", 1, 3, 3 * size),
    ]
    forms = {(c["kind"], c["form"]) for c in compiled["slices"]["collectives"] if c["axes"] == ["data"]}
    assert forms == {(kind, "slices") for kind in ("all-gather", "all-reduce", "collective-permute")}


@needs_libtpu
def test_callbacks_with_results_of_several_ranks_are_lowered(compiled: dict[str, Any]) -> None:
    """As in the error checks of Equinox. JAX alone cannot lower them under ``shard_map``."""
    assert compiled["received"] == 2


def test_out_of_memory_is_a_result(compiled: dict[str, Any]) -> None:
    program = compiled["too large"]
    assert not program["fits"]
    assert "hbm" in program["out_of_memory"].lower()


@needs_libtpu
def test_meshes_and_topologies_that_cannot_be(compiled: dict[str, Any]) -> None:
    count, layout, unknown, name = compiled["errors"]
    assert count == "v5e:4x4 has 16 devices, the mesh data 4 has 4"
    assert layout.startswith("the mesh a 8 × b 8 cannot be laid out on v5p:4x4x4")
    assert "does not know the topology 'v99:2x2'" in unknown
    assert "use 'host' or a TPU topology" in name


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "count"),
    [("splash in shard_map gradient", 1), pytest.param("", 8, marks=pytest.mark.slow)],  # eight compilations for TPUs
)
def test_attention_kernels_compile_with_the_predicted_collectives(name: str, count: int) -> None:
    found = fresh.run("tests.verification.tpu_kernels", **tpu_environment(), KERNELS=name)
    assert len(found) == count and any(moved > 0 for _, moved in found.values())
    assert {name: share for name, (share, _) in found.items() if share < 0.95} == {}
