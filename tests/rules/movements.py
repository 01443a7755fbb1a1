"""Cases of primitives that move elements: reshape, broadcast, transpose, slices, padding, concatenation."""

from __future__ import annotations

from random import Random

import jax
import jax.numpy as jnp
from jax import lax

from tests.rules.cases import Case, Shape, array, dtype, permutation, shape, size, trace

ANY = ("float32", "int32", "bfloat16", "bool", "complex64")


def _split(r: Random, n: int) -> list[int]:
    """A random way to write ``n`` as a product, with ones thrown in."""
    out = []
    while n > 1:
        divisor = r.choice([d for d in range(2, n + 1) if n % d == 0])
        out.append(divisor)
        n //= divisor
    for _ in range(r.randint(0, 1)):
        out.insert(r.randint(0, len(out)), 1)
    return out


def reshape(r: Random) -> Case:
    """Splits, merges and mixtures: any two shapes with the same number of elements."""
    n = r.choice([6, 8, 12, 24, 24, 36])
    source, target = _split(r, n), _split(r, n)
    if source == target:
        target = [*target, 1]
    return trace("reshape", lambda x: lax.reshape(x, target), array(r, source, dtype(r, ANY)))


def broadcast_in_dim(r: Random) -> Case:
    target = shape(r, 1, 4)
    kept = sorted(r.sample(range(len(target)), r.randint(0, len(target))))
    source = [r.choice([1, target[d]]) for d in kept]
    if source == list(target):  # nothing to do: JAX leaves the op out
        target, kept = (2, *target), [d + 1 for d in kept]
    return trace("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, target, kept), array(r, source, dtype(r, ANY)))


def transpose(r: Random) -> Case:
    x = array(r, shape(r, 1, 4), dtype(r, ANY))
    order = permutation(r, x.ndim)
    return trace("transpose", lambda x: lax.transpose_p.bind(x, permutation=order), x)


def squeeze(r: Random) -> Case:
    dims = [*shape(r, 1, 3), 1]
    r.shuffle(dims)
    ones = [d for d, s in enumerate(dims) if s == 1]
    dropped = r.sample(ones, r.randint(1, len(ones)))
    return trace("squeeze", lambda x: lax.squeeze(x, dropped), array(r, dims))


def slice_(r: Random) -> Case:
    dims = shape(r, 1, 3)
    starts, limits, strides = [], [], []
    for n in dims:
        start = r.randint(0, n - 1) if r.random() < 0.6 else 0
        starts.append(start)
        limits.append(r.randint(start + 1, n) if r.random() < 0.6 else n)
        strides.append(r.randint(1, 2))
    if starts == [0] * len(dims) and limits == list(dims) and strides == [1] * len(dims):
        starts[0], dims = 1, (dims[0] + 1, *dims[1:])
        limits[0] = dims[0]
    return trace("slice", lambda x: lax.slice(x, starts, limits, strides), array(r, dims, low=1))


def pad(r: Random) -> Case:
    dims = shape(r, 1, 3, least=2)
    config = [(0, 0, 0) if r.random() < 0.4 else (r.randint(-1, 2), r.randint(0, 2), r.randint(0, 2)) for _ in dims]
    return trace("pad", lambda x, v: lax.pad(x, v, config), array(r, dims, low=1), array(r, ()))


def rev(r: Random) -> Case:
    dims = shape(r)
    axes = r.sample(range(len(dims)), r.randint(1, len(dims)))
    return trace("rev", lambda x: lax.rev(x, axes), array(r, dims))


def _along(dims: Shape, axis: int, n: int) -> Shape:
    return (*dims[:axis], n, *dims[axis + 1 :])


def concatenate(r: Random) -> Case:
    dims = shape(r)
    axis = r.randrange(len(dims))
    parts = [array(r, _along(dims, axis, size(r))) for _ in range(r.randint(1, 3))]
    return trace("concatenate", lambda *xs: lax.concatenate_p.bind(*xs, dimension=axis), *parts)


def split(r: Random) -> Case:
    dims = shape(r)
    axis = r.randrange(len(dims))
    sizes = [size(r) for _ in range(r.randint(2, 3))]
    x = array(r, _along(dims, axis, sum(sizes)))
    return trace("split", lambda x: lax.split(x, sizes, axis), x)


def stack(r: Random) -> Case:
    dims = shape(r)
    parts = [array(r, dims) for _ in range(r.randint(2, 3))]
    axis = r.randint(0, len(dims))
    return trace("stack", lambda *xs: jnp.stack(xs, axis), *parts)


def unstack(r: Random) -> Case:
    dims = shape(r)
    axis = r.randrange(len(dims))
    return trace("unstack", lambda x: jnp.unstack(x, axis=axis), array(r, dims))


def tile(r: Random) -> Case:
    x = array(r, shape(r))
    reps = [size(r, 1, 3) for _ in range(x.ndim)]
    return trace("tile", lambda x: lax.tile(x, reps), x)


def bitcast_convert_type(r: Random) -> Case:
    """To a type as wide, narrower (a dimension more) or wider (a dimension less)."""
    target = r.choice(["int32", "uint8", "int16", "float64", "int64"])
    with jax.enable_x64(True):
        dims = shape(r, 1, 2)
        if target in ("float64", "int64"):
            dims = (*dims, 2)
        return trace("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, target), array(r, dims))


def iota(r: Random) -> Case:
    dims = shape(r)
    axis = r.randrange(len(dims))
    return trace("iota", lambda: lax.broadcasted_iota(dtype(r, ("int32", "float32")), dims, axis))


def select_n(r: Random) -> Case:
    dims = shape(r)
    whole = r.random() < 0.6
    if r.random() < 0.5:
        which, cases = array(r, dims if whole else (), "bool"), 2
    else:
        which, cases = array(r, dims if whole else (), "int32", 0, 3), 3
    return trace("select_n", lax.select_n, which, *(array(r, dims) for _ in range(cases)))


def clamp(r: Random) -> Case:
    dims = shape(r)
    low, high = (array(r, dims if r.random() < 0.5 else (), low=k, high=k + 3) for k in (-3, 0))
    return trace("clamp", lax.clamp, low, array(r, dims), high)


def empty(r: Random) -> Case:
    dims = shape(r)
    return trace("empty", lambda: lax.empty(dims, "float32"))


CASES = {
    "reshape": reshape,
    "broadcast_in_dim": broadcast_in_dim,
    "transpose": transpose,
    "squeeze": squeeze,
    "slice": slice_,
    "pad": pad,
    "rev": rev,
    "concatenate": concatenate,
    "split": split,
    "stack": stack,
    "unstack": unstack,
    "tile": tile,
    "bitcast_convert_type": bitcast_convert_type,
    "iota": iota,
    "select_n": select_n,
    "clamp": clamp,
    "empty": empty,
}
