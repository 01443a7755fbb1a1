"""Cases of gather, scatter and dynamic slices, as NumPy indexing and ``vmap`` make them and as ``lax`` allows them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode as Mode

from tests.rules.cases import Case, array, dtype, shape, size, trace

_ELEMENTS = ("float32", "int32", "bfloat16")


def _mode(r: Random) -> Any:
    return r.choice([Mode.CLIP, Mode.FILL_OR_DROP, Mode.PROMISE_IN_BOUNDS])


def _indices(r: Random, dims: tuple[int, ...], n: int, mode: Any) -> np.ndarray[Any, Any]:
    """Positions in a dimension of ``n``; some lie outside where the mode says what that means."""
    inside = mode == Mode.PROMISE_IN_BOUNDS
    return array(r, dims, "int32", 0 if inside else -2, n if inside else n + 2)


def _dims(r: Random, numbers: dict[str, Any], operand: tuple[int, ...], index: tuple[int, ...]) -> dict[str, Any]:
    """Draws what a gather and a scatter have in common: which dimensions are batched, indexed, collapsed."""
    batching = numbers["batching"]
    indexed = sorted(set(range(len(operand))) - set(batching))
    # An empty index vector is legal, but XLA's CPU compiler drops the updates of such a scatter.
    order = r.sample(indexed, r.randint(1, len(indexed)))
    sizes = []
    for d, n in enumerate(operand):
        sizes.append(1 if d in batching or r.random() < 0.4 else n if r.random() < 0.7 else r.randint(1, n))
    collapsed = [d for d in indexed if sizes[d] == 1 and r.random() < 0.7]
    return {"map": tuple(order), "sizes": tuple(sizes), "collapsed": tuple(collapsed)}


def _drawn(r: Random) -> dict[str, Any]:
    """Operand, indices and dimension numbers of a random gather, which are those of a random scatter too."""
    operand = shape(r, 1, 3, least=2)
    batches = r.choice([0, 0, 1])
    batching = tuple(sorted(r.sample(range(len(operand)), min(batches, len(operand) - 1))))
    more = shape(r, 0, 2)
    index_batching, lead = [], list(more)
    for d in batching:
        at = r.randint(0, len(lead))
        lead.insert(at, operand[d])
        index_batching.append(at)
    common = _dims(r, {"batching": batching}, operand, tuple(lead))
    mode = _mode(r)
    parts = []
    for d in common["map"]:
        limit = operand[d] - common["sizes"][d] + 1
        parts.append(_indices(r, tuple(lead), limit, mode))
    indices = np.stack(parts, -1) if parts else np.zeros((*lead, 0), np.int32)
    kept = [d for d in range(len(operand)) if d not in (*common["collapsed"], *batching)]
    rank = len(lead) + len(kept)
    window = tuple(sorted(r.sample(range(rank), len(kept))))
    return {
        **common, "operand": operand, "batching": batching, "index_batching": tuple(index_batching), "kept": kept,
        "indices": indices, "lead": lead, "window": window, "mode": mode,
    }  # fmt: skip


def gather(r: Random) -> Case:
    g = _drawn(r)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=g["window"],
        collapsed_slice_dims=g["collapsed"],
        start_index_map=g["map"],
        operand_batching_dims=g["batching"],
        start_indices_batching_dims=g["index_batching"],
    )
    fill = r.choice([None, 7])
    return trace(
        "gather",
        lambda x, i: lax.gather(x, i, numbers, g["sizes"], mode=g["mode"], fill_value=fill),
        array(r, g["operand"], dtype(r, _ELEMENTS)),
        g["indices"],
    )


def gather_as_written(r: Random) -> Case:
    """Indexing as people write it."""
    x = array(r, shape(r, 2, 3, least=2))
    n = x.shape[0]
    index = _indices(r, shape(r, 1, 2), n, Mode.PROMISE_IN_BOUNDS)
    along = _indices(r, (*x.shape[:-1], 2), x.shape[-1], Mode.PROMISE_IN_BOUNDS)
    forms: list[Callable[[], Case]] = [
        lambda: trace("gather", lambda x, i: x[i], x, index),
        lambda: trace("gather", lambda x, i: x[:, i], x, np.minimum(index, x.shape[1] - 1)),
        lambda: trace("gather", lambda x, i: jnp.take(x, i, axis=0), x, index),
        lambda: trace("gather", lambda x, i: jnp.take_along_axis(x, i, axis=-1), x, along),
        lambda: trace("gather", jax.vmap(lambda x, i: x[i]), x, np.zeros((n, 3), np.int32)),
        lambda: trace("gather", lambda x, i: x[i, jnp.minimum(i, x.shape[1] - 1)], x, index),
    ]
    return r.choice(forms)()


def _scatter(name: str) -> Callable[[Random], Case]:
    fn = getattr(lax, name.replace("-", "_"))

    def case(r: Random) -> Case:
        g = _drawn(r)
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=g["window"],
            inserted_window_dims=g["collapsed"],
            scatter_dims_to_operand_dims=g["map"],
            operand_batching_dims=g["batching"],
            scatter_indices_batching_dims=g["index_batching"],
        )
        lead, kept = iter(g["lead"]), iter(g["kept"])
        rank = len(g["lead"]) + len(g["kept"])
        dims = [g["sizes"][next(kept)] if u in g["window"] else next(lead) for u in range(rank)]
        kind = dtype(r, ("float32", "int32"))
        return trace(
            name,
            lambda x, i, u: fn(x, i, u, numbers, mode=g["mode"]),
            array(r, g["operand"], kind),
            g["indices"],
            array(r, dims, kind, -2, 3),
        )

    return case


def scatter_as_written(r: Random) -> Case:
    x = array(r, shape(r, 2, 3, least=2))
    index = _indices(r, (size(r),), x.shape[0], Mode.PROMISE_IN_BOUNDS)
    rows = array(r, (len(index), *x.shape[1:]))
    forms: list[Callable[[], Case]] = [
        lambda: trace("scatter-add", lambda x, i, u: x.at[i].add(u), x, index, rows),
        lambda: trace("scatter-mul", lambda x, i, u: x.at[i].mul(u), x, index, rows),
        lambda: trace("scatter-max", lambda x, i, u: x.at[i].max(u), x, index, rows),
        lambda: trace("scatter", lambda x, i, u: x.at[i].set(u), x, index, rows),
        lambda: trace("scatter-add", lambda u, i: jax.ops.segment_sum(u, i, 5), rows, index),
        lambda: trace("scatter-add", jax.vmap(lambda x, i: x.at[i].add(1)), x, np.zeros((x.shape[0], 3), np.int32)),
        lambda: trace("scatter-add", lambda x, i: jax.grad(lambda x: x[i].sum())(x), x, index),
    ]
    return r.choice(forms)()


def dynamic_slice(r: Random) -> Case:
    x = array(r, shape(r))
    sizes = [n if r.random() < 0.5 else r.randint(1, n) for n in x.shape]
    starts = [array(r, (), "int32", -2, 8) for _ in sizes]
    return trace("dynamic_slice", lambda x, *s: lax.dynamic_slice(x, s, sizes), x, *starts)


def dynamic_update_slice(r: Random) -> Case:
    x = array(r, shape(r))
    update = array(r, [n if r.random() < 0.5 else r.randint(1, n) for n in x.shape], low=10, high=20)
    starts = [array(r, (), "int32", -2, 8) for _ in x.shape]
    return trace("dynamic_update_slice", lambda x, u, *s: lax.dynamic_update_slice(x, u, s), x, update, *starts)


SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
CASES = {
    "gather": gather,
    "gather/written": gather_as_written,
    **{n: _scatter(n) for n in SCATTERS if hasattr(lax, n.replace("-", "_"))},
    "scatter/written": scatter_as_written,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
}
