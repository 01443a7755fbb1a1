"""The steps of reshards: every pair of shardings, executed on devices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from shardwise.capture.equations import partition_spec
from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.sharding import ArrayType, Axes, Kind, Ring, Sharding, reshard
from shardwise.spmd.collectives import emit

MESHES = ({"x": 8}, {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2})
SHAPE = (8, 16, 8)


def shardings(rank: int, mesh: MeshAxes, shape: tuple[int, ...], partial: bool) -> Iterator[Sharding]:
    """All ways to give each axis to a dimension (in every order), to none, or to a partial sum."""
    axes = range(len(mesh.sizes))
    for places in itertools.product(range(-2 if partial else -1, rank), repeat=len(axes)):
        for order in itertools.permutations(axes):
            dims: list[Axes] = [()] * rank
            for a in order:
                if places[a] >= 0:
                    dims[places[a]] += (a,)
            sizes = [np.prod([mesh.sizes[a] for a in own], dtype=int) for own in dims]
            if all(n % k == 0 for n, k in zip(shape, sizes, strict=True)):
                yield Sharding(tuple(dims), tuple(a for a in axes if places[a] == -2))


def pairs(mesh: MeshAxes, shape: tuple[int, ...]) -> list[tuple[Sharding, Sharding]]:
    sources = list(dict.fromkeys(shardings(len(shape), mesh, shape, True)))
    targets = list(dict.fromkeys(shardings(len(shape), mesh, shape, False)))
    found = []
    for s, t in itertools.product(sources, targets):
        kept = tuple(a for a in s.partial if a not in t.axes())
        found += [(s, t)] + ([(s, Sharding(t.dims, kept))] if kept else [])
    return found


def check(
    mesh: MeshAxes,
    shape: tuple[int, ...],
    chosen: list[tuple[Sharding, Sharding]],
    reducer: str,
    ring: Ring = Ring.NEVER,
) -> None:
    """All pairs in one compiled program: each device holds a block, and a part of the sum."""
    devices = jax.make_mesh(mesh.sizes, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.names))
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    combine = {"sum": np.sum, "max": np.max, "xor": np.bitwise_xor.reduce}[reducer]
    type_ = ArrayType(shape, 4.0, reducer, ring=ring)
    every = (*mesh.names,)

    def parts(source: Sharding) -> np.ndarray:
        """One addend for each device along the partial axes."""
        rng = np.random.default_rng(0)
        sizes = [mesh.sizes[a] for a in source.partial]
        return rng.integers(0, 100, (*sizes, *shape)).astype(np.int32) + array if sizes else array

    def run(*inputs: jax.Array) -> list[jax.Array]:
        found = []
        for x, (source, target) in zip(inputs, chosen, strict=True):
            now, arrays = source, [x.reshape(x.shape[len(source.partial) :])]
            for step in reshard(type_, source, target, mesh):
                assert step.hops or step.bytes_in == arrays[0].size * 4
                arrays = emit(arrays, step, now, type_, mesh)
                assert step.after is not None
                now = step.after
                if step.kind is not Kind.ALL_GATHER or step.bytes_out == arrays[0].size * 4:
                    assert step.bytes_out == arrays[0].size * 4
            assert now is target
            for a in target.partial:
                arrays = [jax.lax.psum(arrays[0], mesh.names[a])]
            found.append(arrays[0])
        return found

    def spec(sharding: Sharding, lead: bool) -> PartitionSpec:
        names = [mesh.names[a] for a in sharding.partial] if lead else []
        return PartitionSpec(*names, *partition_spec(sharding.spec(mesh)))

    inputs = [parts(s) for s, _ in chosen]
    mapped = jax.shard_map(
        run,
        mesh=devices,
        in_specs=tuple(spec(s, True) for s, _ in chosen),
        out_specs=[spec(t, False) for _, t in chosen],
        check_vma=False,
    )
    results = jax.jit(mapped)(*inputs)
    for (source, target), given, result in zip(chosen, inputs, results, strict=True):
        want = given
        for _ in source.partial:
            want = combine(want, axis=0)
        assert (np.asarray(result) == want).all(), f"{source} -> {target} over {every}"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", [SHAPE, (4, 8, 2)], ids=str)
def test_every_reshard_gives_the_same_array(mesh: dict[str, int], shape: tuple[int, ...]) -> None:
    axes = MeshAxes.of(mesh)
    every = pairs(axes, shape)
    chosen = random.Random(1).sample(every, min(len(every), 250))
    for k in range(0, len(chosen), 125):
        check(axes, shape, chosen[k : k + 125], "sum")


@pytest.mark.parametrize("reducer", ["max", "xor"])
def test_other_reducers(reducer: str) -> None:
    axes = MeshAxes.of(MESHES[1])
    every = [(s, t) for s, t in pairs(axes, SHAPE) if s.partial and not t.partial]
    check(axes, SHAPE, random.Random(2).sample(every, min(len(every), 60)), reducer)


@pytest.mark.parametrize("ring", [Ring.NEVER, Ring.ALWAYS])
def test_booleans_of_one_device_each_are_added_up_and_scattered(ring: Ring) -> None:
    """As in a lookup: every element is true on at most one device."""
    mesh, source, target = MeshAxes.of({"x": 8}), Sharding(((), ()), (0,)), Sharding(((0,), ()))
    type_ = ArrayType((8, 16), 1.0, ring=ring)
    (step,) = reshard(type_, source, target, mesh)
    assert bool(step.hops) == (ring is Ring.ALWAYS)
    holder = np.random.default_rng(0).integers(0, 16, (8, 16))  # from 8 on: no device
    parts = np.arange(8)[:, None, None] == holder
    mapped = jax.shard_map(
        lambda x: emit([x[0]], step, source, type_, mesh)[0],
        mesh=jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)),
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec("x"),
        check_vma=False,
    )
    result = jax.jit(mapped)(parts)
    assert result.dtype == bool and (np.asarray(result) == parts.any(0)).all()


def test_a_dimension_changes_axes_by_a_permute() -> None:
    mesh = MeshAxes.of({"x": 2, "y": 4})
    steps = reshard(ArrayType((64,), 4.0), Sharding(((0,),)), Sharding(((1,),)), mesh)
    assert [(s.kind, s.axes, s.nbytes) for s in steps] == [
        (Kind.SLICE, (1,), 128.0),
        (Kind.PERMUTE, (0, 1), 32.0),
        (Kind.ALL_GATHER, (0,), 64.0),
    ]


def test_a_dimension_that_both_do_not_divide_is_gathered_first() -> None:
    mesh = MeshAxes.of({"x": 2, "y": 4})
    steps = reshard(ArrayType((4,), 4.0), Sharding(((0,),)), Sharding(((1,),)), mesh)
    assert [s.kind for s in steps] == [Kind.ALL_GATHER, Kind.SLICE]


def test_scatters_that_the_compiler_does_not_have_are_rings() -> None:
    """Along a dimension in the middle, where a leading one of one element does not count, or by less than a row."""
    mesh, shape = MeshAxes.of({"x": 2, "y": 4}), (2, 8, 4, 8)
    array = ArrayType(shape, 4.0, ring=Ring.MISSING)

    def kinds(dim: int, lead: tuple[int, ...] = ()) -> list[tuple[Kind, int]]:
        source = Sharding((lead, (), (), ()), (1,))
        target = Sharding(tuple((1,) if d == dim else lead if d == 0 else () for d in range(4)))
        check(mesh, shape, [(source, target)], "sum", Ring.MISSING)
        return [(s.kind, s.hops) for s in reshard(array, source, target, mesh)]

    assert kinds(1) == kinds(3) == [(Kind.PERMUTE, 3)]
    assert kinds(1, lead=(0,)) == kinds(2) == [(Kind.REDUCE_SCATTER, 0)]


def test_reductions_take_one_axis_after_another() -> None:
    mesh = MeshAxes.of({"x": 2, "y": 4})
    steps = reshard(ArrayType((64, 8), 4.0), Sharding(((), ()), (0, 1)), Sharding(((1, 0), ())), mesh)
    assert [(s.kind, s.axes, s.nbytes) for s in steps] == [
        (Kind.REDUCE_SCATTER, (1,), 2048.0),
        (Kind.REDUCE_SCATTER, (0,), 512.0),
    ]
