"""Programs compiled for TPU topologies, without a TPU; prints what the reader finds in each."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardwise
from shardwise.errors import CompileError
from shardwise.verification.compiled import make_mesh
from tests.verification.compiling import compile_step
from tests.verification.host_programs import STACKED, STACKED_SPECS, W, X, gradient, layers, shape

GRID = {"data": 4, "model": 4}


def scattered(x: jax.Array, y: jax.Array) -> jax.Array:
    return y + jax.lax.with_sharding_constraint(jnp.sum(x, 0), P("model"))


def gathered(weights: Any, x: jax.Array) -> jax.Array:
    """Every device holds 1/16 of a weight and of the batch."""
    for w in weights:
        x = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), P(("data", "model")))
    return x


def scattered_along(dim: int) -> Any:
    """A sum over ``model`` that each device keeps a part of, along one dimension."""

    def run(x: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(x, "model", scatter_dimension=dim, tiled=True)

    return run


def over_slices(x: jax.Array) -> jax.Array:
    """In a loop a shift from slice to slice, and sums over all devices."""

    def trip(_: Any, x: jax.Array) -> jax.Array:
        return jax.lax.psum(jax.lax.ppermute(jnp.sin(x), "data", [(0, 1), (1, 2), (2, 3)]), ("data", "model")) / 8

    return jnp.sin(jax.lax.all_gather(jnp.sin(jax.lax.fori_loop(0, 3, trip, x)), "data", axis=1, tiled=True))


def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
    """The middle one of three images is neither an argument nor a result."""
    for _ in range(2):
        x = jnp.tanh(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return x.sum((1, 2))


def scored(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The scores are neither an argument nor a result."""
    return jnp.einsum("bst,btd->bsd", jax.nn.softmax(jnp.einsum("bsd,btd->bst", q, k)), v)


def checked(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Python is called in a branch, and returns arrays of several ranks."""
    like = (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((8,), x.dtype))
    total = x.sum(0)
    return jax.lax.cond(total[0] > 0, lambda v: jax.pure_callback(lambda v: (1, v), like, v), lambda v: (0, v), total)


def rows_of(table: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.tanh(table[rows])


def summed_rows(values: jax.Array, rows: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(values * 2, rows, 2**14)


def chosen(tables: jax.Array, rows: jax.Array) -> jax.Array:
    """One row of each example's table."""
    return jax.vmap(lambda table, row: table[row])(tables, rows)


def squared(x: jax.Array, rows: jax.Array) -> jax.Array:
    """The first product is read by the second, and the second once more after it."""
    y = x @ x
    return jnp.sum(jnp.tanh(y) @ y * rows[:, None], 0)


def pixels(images: jax.Array, rows: jax.Array) -> jax.Array:
    return jax.vmap(lambda image, row: image[row, row])(images, rows)


def decomposed(matrices: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.linalg.cholesky(matrices) * rows[0]


def solved(matrices: jax.Array, rows: jax.Array) -> jax.Array:
    return jax.scipy.linalg.solve_triangular(matrices, jnp.ones((*matrices.shape[:-1], 8)), lower=True) * rows[0]


def in_order(x: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.sort(x, -1) + rows[0]


def added_up(x: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.cumsum(x, -1) * rows[0]


#: Gathers and scatters of narrow rows, decompositions, a sort and a cumulative sum: the shapes of an array of floats and of one
#: of integers.
NARROW: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "rows of 3": (rows_of, (2**16, 3), (2**18,)),
    "rows of 16": (rows_of, (2**16, 16), (2**18,)),
    "rows of 64": (rows_of, (2**16, 64), (2**18,)),
    "sums of rows of 16": (summed_rows, (2**18, 16), (2**18,)),
    "rows of each table": (chosen, (2**12, 33, 64), (2**12,)),
    "pixels": (pixels, (64, 64, 64, 3), (64, 64, 64)),
    "elements": (rows_of, (2**18,), (2**18, 5)),
    "decompositions": (decomposed, (2**18, 8, 8), (8,)),
    "solutions": (solved, (2**14, 64, 64), (8,)),
    "sorted rows": (in_order, (2**16, 1024), (8,)),
    "sums of rows": (added_up, (2**16, 1024), (8,)),
}
#: Lookups whose arrays are copied to row-major order, too large for on-chip memory; and a program whose temporaries fit there.
COPIED: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "rows of 64": (rows_of, (2**20, 64), (2**20,)),
    "rows of each table": (chosen, (2**16, 33, 64), (2**16,)),
    "elements": (rows_of, (2**16,), (2**20, 8)),
}
ON_CHIP: tuple[Any, tuple[int, ...], tuple[int, ...]] = (squared, (2**11, 2**11), (2**11,))


def minor_dimensions(text: str, shape: str) -> list[list[int]]:
    """The two minor dimensions of all arrays of a shape in a compiled program."""
    return [sorted(map(int, order.split(",")[:2])) for order in re.findall(rf"\[{shape}\]\{{([\d,]+):", text)]


def streamed_cycles(text: str) -> int:
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text)))


#: Images by number of examples and features, and arrays that are streamed: few rows, and as many elements in eight rows.
IMAGES = ((16, 64), (128, 64))
STREAM = (4096, 4096)
#: Kernels of one array of one device that compute by the element.
SINES: dict[str, Any] = {"sine": lambda x: jnp.sin(x) * 2, "cosine": lambda x: jnp.cos(x) * 2}
STREAMED = (((16384, 2, 128), (4096, 8, 128)), ((8192, 4, 128), (4096, 8, 128)), ((4096, 8, 128), (4096, 8, 128)))

#: Sizes and the dimension that is scattered.
SCATTERS = (
    ((8, 16, 64, 256), 0),
    ((2, 16, 64, 256), 1),
    ((1, 16, 64, 256), 1),
    ((2, 16, 64, 256), 2),
    ((2, 16, 64, 512), 3),
    ((2, 16, 64, 1024), 3),
    ((64, 512), 1),
    ((64, 1024), 1),
    ((64, 512), 0),
)
#: Topologies and the meshes on them over whose last axis is scattered.
WHOLE = (("v5e:4x4", (16,)), ("v5e:4x4", (2, 8)), ("v5e:4x4", (4, 4)), ("v5e:2x4", (8,)), ("v5p:2x2x2", (8,)))
WIDE = tuple(shape(512, 512, dtype=jnp.bfloat16) for _ in range(3))

PROGRAMS: dict[str, dict[str, Any]] = {
    "data parallel": dict(
        fn=gradient, args=(W, X), in_shardings=((P(), P()), P(("data", "model"))), out_shardings=P(), backend="v5e:4x4"
    ),
    "scan": dict(
        fn=layers,
        args=(STACKED, X),
        in_shardings=(STACKED_SPECS, P("data")),
        out_shardings=P("data"),
        backend="v5e:4x4",
    ),
    "reduce-scatter": dict(
        fn=scattered,
        args=(shape(64, 4096, 256), shape(4096, 256)),
        in_shardings=(P("model"), P("model")),
        out_shardings=P("model"),
        backend="v5e:4x4",
    ),
    "gathers": dict(
        fn=gathered,
        args=(WIDE, shape(4096, 512, dtype=jnp.bfloat16)),
        in_shardings=((P(("data", "model")),) * 3, P(("data", "model"))),
        out_shardings=P(("data", "model")),
        backend="v5e:4x4",
    ),
    "slices": dict(
        fn=lambda x: jax.shard_map(over_slices, in_specs=P(), out_specs=P(), check_vma=False)(x),
        args=(shape(1024, 512),),
        backend="4*v5e:2x2",
    ),
    "too large": dict(
        fn=lambda x: (x @ x.T).sum(),
        args=(shape(400_000, 40_000),),
        in_shardings=P("data"),
        out_shardings=P(),
        mesh={"data": 4},
        backend="v5e:2x2",
    ),
}


def main() -> None:
    results: dict[str, Any] = {}
    for name, program in PROGRAMS.items():
        results[name] = compile_step(**{"mesh": GRID} | program)
    mesh = make_mesh(GRID, "v5e:4x4")
    for size, dim in SCATTERS:
        run = jax.shard_map(scattered_along(dim), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        text = jax.jit(run).lower(shape(*size, dtype=jnp.bfloat16)).compile().as_text()
        native = " all-reduce(" not in text or "all-reduce-scatter" in text
        results.setdefault("scatters", []).append([size, dim, native])
    for backend, sizes in WHOLE:
        placed = make_mesh(dict(zip(("data", "model")[-len(sizes) :], sizes, strict=True)), backend)
        run = jax.shard_map(scattered_along(0), mesh=placed, in_specs=P(), out_specs=P(), check_vma=False)
        text = jax.jit(run).lower(shape(1024, 1024)).compile().as_text()
        native = " all-reduce(" not in text or "all-reduce-scatter" in text
        results.setdefault("whole", []).append([backend, sizes, native])
    alone = jax.sharding.SingleDeviceSharding(mesh.devices.flat[0])

    def compiled_text(fn: Any, *sizes: tuple[int, ...]) -> str:
        args = [jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=alone) for size in sizes]
        return str(jax.jit(fn).lower(*args).compile().as_text())

    for count, features in IMAGES:
        text = compiled_text(convolved, (count, 16, 16, features), (3, 3, features, features))
        results.setdefault("images", []).append(minor_dimensions(text, f"{count},16,16,{features}"))
    scores = compiled_text(scored, (128, 27, 128), (128, 27, 128), (128, 27, 128))
    results["scores"] = minor_dimensions(scores, "128,27,27")
    results["streamed"] = [[streamed_cycles(compiled_text(lambda x: x * 2 + 1, s)) for s in pair] for pair in STREAMED]
    wide = [jax.ShapeDtypeStruct(STREAM, dtype, sharding=alone) for dtype in (jnp.float32, jnp.bfloat16)]
    sines = {name: jax.jit(fn).lower(wide[0]).compile().as_text() for name, fn in SINES.items()}
    results["sines"] = {name: streamed_cycles(text) for name, text in sines.items()}
    row = jax.ShapeDtypeStruct(STREAM[:1], jnp.float32, sharding=alone)
    streams = [((lambda x: x * 2 + 1), wide[1:]), ((lambda x, r: r @ x), (wide[0], row))]
    results["streams"] = [streamed_cycles(jax.jit(fn).lower(*args).compile().as_text()) for fn, args in streams]
    plan = shardwise.plan(checked, shape(64, 8), mesh=GRID, topology="v5e:4x4", tactics=[]).on_mesh(mesh)
    results["received"] = plan.jit(checked).lower(shape(64, 8)).as_text().count("stablehlo.recv")

    def taken(fn: Any, size: tuple[int, ...], rows: tuple[int, ...]) -> int:
        dtypes = ((size, jnp.float32), (rows, jnp.int32))
        args = [jax.ShapeDtypeStruct(s, dtype, sharding=alone) for s, dtype in dtypes]
        m = jax.jit(fn).lower(*args).compile().memory_analysis()
        return int(m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes)

    results["narrow"] = {name: taken(*program) for name, program in NARROW.items()}
    results["copied"] = {name: taken(*program) for name, program in COPIED.items()}
    results["on chip"] = taken(*ON_CHIP)
    for mesh, backend in (
        ({"data": 4}, "v5e:4x4"),
        ({"a": 8, "b": 8}, "v5p:4x4x4"),
        ({"a": 4}, "v99:2x2"),
        ({}, "gpu"),
    ):
        try:
            compile_step(jnp.sin, (X,), mesh=mesh, backend=backend)
        except CompileError as error:
            results.setdefault("errors", []).append(str(error))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
