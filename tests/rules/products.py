"""Cases of products: ``dot_general``, ragged and scaled products, convolutions."""

from __future__ import annotations

from random import Random

import jax.numpy as jnp
from jax import lax

from tests.rules.cases import Case, array, dtype, permutation, size, trace


def dot_general(r: Random) -> Case:
    """Any number of batch, contracted and free dimensions, in any order on either side."""
    batch = [size(r) for _ in range(r.randint(0, 2))]
    contract = [size(r) for _ in range(r.randint(0, 2))]
    sides, places = [], []
    for _ in range(2):
        free = [size(r) for _ in range(r.randint(0, 2))]
        named = [*batch, *contract, *free]
        order = permutation(r, len(named))
        sides.append([named[i] for i in order])
        at = {i: d for d, i in enumerate(order)}
        shared = len(batch) + len(contract)
        places.append(([at[i] for i in range(len(batch), shared)], [at[i] for i in range(len(batch))]))
    numbers = tuple(zip(*places, strict=True))
    kind = dtype(r, ("float32", "int32", "bfloat16", "complex64"))
    left, right = (array(r, s, kind, -2, 3) for s in sides)
    return trace("dot_general", lambda a, b: lax.dot_general(a, b, numbers), left, right)


def ragged_dot_general(r: Random) -> Case:
    """The three modes: the ragged dimension is free, contracted, or a batch dimension."""
    mode = r.choice(["free", "contracted", "batch"])
    groups, m, k, n = size(r, 2), size(r, 2), size(r), size(r)
    batched = r.random() < 0.5
    b = [size(r)] * batched
    lead = len(b)
    batch = list(range(lead))
    if mode == "free":
        left, right = [*b, m, k], [*b, groups, k, n]
        dots, ragged, group = (([lead + 1], [lead + 1]), (batch, batch)), [lead], [lead]
        rows = m
    elif mode == "contracted":
        left, right = [*b, m, k], [*b, k, n]
        dots, ragged, group = (([lead + 1], [lead]), (batch, batch)), [lead + 1], []
        rows = k
    else:
        left, right = [m, 2, k], [m, k, n]
        dots, ragged, group, b = (([2], [1]), ([0], [0])), [0], [], []
        rows = m
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=dots, lhs_ragged_dimensions=ragged, rhs_group_dimensions=group
    )
    sizes = jnp.asarray([rows // groups] * (groups - 1) + [rows - rows // groups * (groups - 1)], jnp.int32)
    if b and r.random() < 0.5:
        sizes = jnp.broadcast_to(sizes, (*b, groups))
    return trace(
        "ragged_dot_general",
        lambda x, y, s: lax.ragged_dot_general(x, y, s, numbers),
        array(r, left, low=-2, high=3),
        array(r, right, low=-2, high=3),
        sizes,
    )


def scaled_dot(r: Random) -> Case:
    """Operands scaled in blocks of two along the contracted dimension."""
    b, m, n, blocks = size(r), size(r), size(r), size(r, 2)
    k = 2 * blocks
    numbers = (((2,), (1,)), ((0,), (0,)))
    args = [array(r, s, "float8_e4m3fn", -2, 3) for s in ((b, m, k), (b, k, n))]
    args += [array(r, s, "float8_e8m0fnu", 1, 3) for s in ((b, m, blocks), (b, blocks, n))]

    def product(x: object, y: object, s: object, t: object) -> object:
        return lax.scaled_dot(x, y, lhs_scale=s, rhs_scale=t, dimension_numbers=numbers)

    return trace("scaled_dot", product, *args)


def convolution(r: Random) -> Case:
    """One to three spatial dimensions, any order of dimensions, stride, padding, both dilations, both kinds of group."""
    space = r.choice([1, 1, 2, 2, 3])
    feature_groups = r.choice([1, 1, 2, 3])
    batch_groups = r.choice([1, 2]) if feature_groups == 1 else 1
    batch, features, channels = size(r) * batch_groups, size(r), size(r) * feature_groups * batch_groups
    # A "kernel" wider than the result is the shape of a weight gradient.
    gradient = r.random() < 0.3
    taps = [r.randint(5, 6) if gradient else r.randint(1, 3) for _ in range(space)]
    image = [r.randint(7, 8) if gradient else r.randint(4, 7) for _ in range(space)]
    plain = gradient or r.random() < 0.3
    stride = [1 if plain else r.randint(1, 2) for _ in range(space)]
    lhs_dilation = [1 if plain else r.randint(1, 2) for _ in range(space)]
    rhs_dilation = [1 if plain else r.randint(1, 2) for _ in range(space)]
    padding = [(r.randint(0, 1), r.randint(0, 2)) if r.random() < 0.7 else (-1, 0) for _ in range(space)]
    orders = [permutation(r, space + 2) for _ in range(3)]
    numbers = lax.ConvDimensionNumbers(*orders)

    def laid(dims: list[int], order: tuple[int, ...]) -> list[int]:
        out = [0] * len(dims)
        for value, place in zip(dims, order, strict=True):
            out[place] = value
        return out

    lhs = array(r, laid([batch, features * feature_groups, *image], orders[0]), low=1, high=4)
    rhs = array(r, laid([channels, features, *taps], orders[1]), low=1, high=3)
    return trace(
        "conv_general_dilated",
        lambda x, y: lax.conv_general_dilated(
            x, y, stride, padding, lhs_dilation, rhs_dilation, numbers, feature_groups, batch_groups
        ),
        lhs,
        rhs,
    )


CASES = {
    "dot_general": dot_general,
    "ragged_dot_general": ragged_dot_general,
    "scaled_dot": scaled_dot,
    "conv_general_dilated": convolution,
}
