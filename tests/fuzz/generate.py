"""Random programs and random decision lists.

A program is a list of steps over a growing list of values. A step that needs a parameter asks for one, and the program gets one
argument more. Nothing in a program jumps under rounding: conditions, masks and indices come from integers, and where a gradient
is taken, ties before a maximum or a sort are broken by a ramp.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from shardwise.dims.analysis import Analysis
from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.decisions import Decision, Keep, Shard
from shardwise.lowering.local_cost import HardwareCost
from tests.fuzz.families import Families

SIZES = (2, 3, 4, 6, 8, 12, 16, 24)
#: Sizes that few meshes divide; 0 is drawn now and then.
ODD = (1, 3, 5, 7)
ELEMENTS = 3072
RANK = 4

Shape = tuple[int, ...]
Step = tuple[str, int, int, int, int]
Param = Callable[..., Any]


def _axis(x: Any, i: int) -> int:
    return i % x.ndim


def _ramp(x: Any, graded: bool) -> Any:
    return x + 0.37 * jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape) if graded else x


def _size(i: int, limit: int) -> int:
    fitting = [s for s in SIZES if s <= limit] or [1]
    return fitting[i % len(fitting)]


def _room(*kept: int) -> int:
    return ELEMENTS // max(int(np.prod(kept)), 1)


class Ops(Families):
    """One method for each kind of step: (x, y, n, i, j) to a new value or None; x and y float, n integer."""

    def __init__(self, param: Param, graded: bool):
        self.param, self.graded = param, graded

    def dot(self, x, y, n, i, j):
        pairs = [(d, e) for d in range(x.ndim) for e in range(y.ndim) if x.shape[d] == y.shape[e]]
        if not pairs:
            return self.linear(x, y, n, i, j)
        d, e = pairs[i % len(pairs)]
        rest = [(f, g) for f, g in pairs if f != d and g != e]
        batch = [rest[j % len(rest)]] if rest and j % 2 == 0 else []
        dims = (([d], [e]), ([f for f, _ in batch], [g for _, g in batch]))
        return jax.lax.dot_general(x, y, dims) / np.float32(np.sqrt(x.shape[d]))

    def linear(self, x, y, n, i, j):
        axis = _axis(x, i)
        k = x.shape[axis]
        w = self.param((k, _size(j, min(_room(*x.shape) * k, ELEMENTS // k))))
        return jnp.moveaxis(jnp.tensordot(x, w, ([axis], [0])), -1, axis) / np.float32(np.sqrt(k))

    def einsum(self, x, y, n, i, j):
        """Several contracted dimensions at once."""
        if x.ndim < 2:
            return None
        a = _axis(x, i)
        b = (a + 1 + j % (x.ndim - 1)) % x.ndim
        k = x.shape[a] * x.shape[b]
        w = self.param((x.shape[b], x.shape[a], _size(i + j, ELEMENTS // k)))
        return jnp.tensordot(x, w, ([a, b], [1, 0])) / np.float32(np.sqrt(k))

    def outer(self, x, y, n, i, j):
        return jnp.tensordot(x, y, 0) if x.ndim + y.ndim <= RANK else None

    def unary(self, x, y, n, i, j):
        fns = (jnp.tanh, jnp.sin, jax.nn.sigmoid, lambda z: z * 0.5 - 1, jnp.square, lambda z: jnp.exp(-z * z))
        return fns[i % len(fns)](x)

    def binary(self, x, y, n, i, j):
        if x.shape != y.shape:
            return self.broadcasted(x, y, n, i, j)
        fns = (jnp.add, jnp.multiply, jnp.subtract, lambda a, b: a / (1 + b * b), lambda a, b: jnp.hypot(a, 1 + b * b))
        return fns[i % len(fns)](x, y)

    def broadcasted(self, x, y, n, i, j):
        """With a parameter along some of the dimensions."""
        w = self.param(tuple(s if (i >> d) & 1 else 1 for d, s in enumerate(x.shape)))
        return x * w if j % 2 else x + w

    def expand(self, x, y, n, i, j):
        axis = i % (x.ndim + 1)
        shape = (*x.shape[:axis], _size(j, _room(*x.shape)), *x.shape[axis:])
        return jnp.broadcast_to(jnp.expand_dims(x, axis), shape)

    def transpose(self, x, y, n, i, j):
        return x.transpose([*range(x.ndim)][::-1] if j % 2 else np.roll(np.arange(x.ndim), i + 1))

    def merge(self, x, y, n, i, j):
        axis = _axis(x, i)
        return x.reshape(*x.shape[: axis - 1], -1, *x.shape[axis + 1 :]) if axis else None

    def split(self, x, y, n, i, j):
        axis = _axis(x, i)
        s = x.shape[axis]
        parts = [p for p in (2, 3, 4, 6, 8) if s % p == 0 and p < s]
        return x.reshape(*x.shape[:axis], parts[j % len(parts)], -1, *x.shape[axis + 1 :]) if parts else None

    def resplit(self, x, y, n, i, j):
        """Merged and split at another place."""
        if x.ndim < 2:
            return None
        axis = 1 + i % (x.ndim - 1)
        size = x.shape[axis - 1] * x.shape[axis]
        parts = [p for p in SIZES if size % p == 0]
        return x.reshape(*x.shape[: axis - 1], parts[j % len(parts)], -1, *x.shape[axis + 1 :]) if parts else None

    def reduce(self, x, y, n, i, j):
        axis = _axis(x, i)
        if j % 4 == 1:
            x = _ramp(x, self.graded)
        return (jnp.sum, jnp.max, jnp.mean, jnp.var)[j % 4](x, axis, keepdims=j % 3 == 0)

    def softmax(self, x, y, n, i, j):
        return jax.nn.softmax(x, _axis(x, i))

    def layer_norm(self, x, y, n, i, j):
        axis = _axis(x, i)
        centred = x - x.mean(axis, keepdims=True)
        scale = self.param((1,) * axis + (x.shape[axis],) + (1,) * (x.ndim - axis - 1))
        return centred * jax.lax.rsqrt((centred**2).mean(axis, keepdims=True) + 0.1) * scale

    def concatenate(self, x, y, n, i, j):
        axis = _axis(x, i)
        fits = x.ndim == y.ndim and all(x.shape[d] == y.shape[d] for d in range(x.ndim) if d != axis)
        other = y if fits else x * 2 if j % 2 else self.param((*x.shape[:axis], _size(j, 6), *x.shape[axis + 1 :]))
        return jnp.concatenate([x, other] if j % 3 else [other, x], axis)

    def slice(self, x, y, n, i, j):
        axis = _axis(x, i)
        s = x.shape[axis]
        start, stride = (0, s // 2, s // 4, 1)[j % 4] % s, 1 + (j % 3 == 0)
        stop = max(start + 1, s - (j % 5 == 0) * (s // 4))
        return jax.lax.slice_in_dim(x, start, stop, stride, axis)

    def pad(self, x, y, n, i, j):
        widths = [(0, 0, 0)] * x.ndim
        widths[_axis(x, i)] = ((1, 1, 0), (0, 4, 0), (2, 0, 0), (0, 0, 1), (1, -1, 0))[j % 5]
        return jax.lax.pad(x, np.float32(0.25), widths)

    def flip(self, x, y, n, i, j):
        return jnp.flip(x, _axis(x, i))

    def roll(self, x, y, n, i, j):
        return jnp.roll(x, j + 1, _axis(x, i))

    def cumsum(self, x, y, n, i, j):
        axis = _axis(x, i)
        return jax.lax.cumsum(x, axis, reverse=j % 2 == 0) / np.float32(x.shape[axis])

    def sort(self, x, y, n, i, j):
        return jnp.sort(_ramp(x, self.graded), _axis(x, i))

    def gather(self, x, y, n, i, j):
        axis = _axis(x, i)
        return jnp.take(x, n % x.shape[axis], axis, mode=("clip", "fill", "wrap")[j % 3])

    def along(self, x, y, n, i, j):
        """An index of its own for every element."""
        axis = _axis(x, i)
        order = self.param(x.shape, jnp.int32)
        return jnp.take_along_axis(x, order % x.shape[axis], axis)

    def scatter(self, x, y, n, i, j):
        axis = _axis(x, i)
        count = _size(j, 16)
        index = self.param((x.shape[axis],), jnp.int32) % count
        return jax.ops.segment_sum(jnp.moveaxis(x, axis, 0), index, num_segments=count)

    def scatter_into(self, x, y, n, i, j):
        axis = _axis(x, i)
        index = self.param((_size(j, 8),), jnp.int32) % x.shape[axis]
        rows = self.param((index.shape[0], *x.shape[:axis], *x.shape[axis + 1 :]))
        return jnp.moveaxis(jnp.moveaxis(x, axis, 0).at[index].add(rows), 0, axis)

    def update(self, x, y, n, i, j):
        axis = _axis(x, i)
        s = x.shape[axis]
        block = self.param((*x.shape[:axis], max(s // 2, 1), *x.shape[axis + 1 :]))
        start = n.ravel()[0] % s if j % 2 else min(j, s // 2)
        return jax.lax.dynamic_update_slice_in_dim(x, block, start, axis)

    def dynamic_slice(self, x, y, n, i, j):
        """Starts are in bounds: XLA merges a slice of a slice, and clamps the sum of their starts where JAX clamps each."""
        axis = _axis(x, i)
        s = x.shape[axis]
        size = max(s // 2, 1)
        return jax.lax.dynamic_slice_in_dim(x, jnp.minimum(n.ravel()[0] % s, s - size), size, axis)

    def where(self, x, y, n, i, j):
        mask = self.param(x.shape if j % 2 else x.shape[-1:], jnp.int32) % 3 > 0
        return jnp.where(mask, x, y if y.shape == x.shape else 0.5)

    def causal(self, x, y, n, i, j):
        if x.ndim < 2:
            return None
        rows, columns = (jnp.arange(s) for s in x.shape[-2:])
        return jnp.where(rows[:, None] + i % 3 >= columns, x, -1.0)

    def layers(self, x, y, n, i, j):
        """A scan over stacked parameters, the carry on one of the dimensions contracted."""
        axis = _axis(x, i)
        k = x.shape[axis]
        w = self.param((2 + j % 3, k, k))

        def layer(h, w):
            h = jnp.tanh(jnp.moveaxis(jnp.tensordot(h, w, ([axis], [0])), -1, axis) / np.float32(np.sqrt(k)) + h)
            return h, h.sum(axis)

        h, rows = jax.lax.scan(jax.checkpoint(layer) if j % 2 else layer, x, w, reverse=j % 3 == 0)
        return h if j % 4 else rows

    def recur(self, x, y, n, i, j):
        """A scan over the leading dimension."""
        if x.ndim < 2:
            return None

        def row(h, r):
            h = 0.5 * h + (jnp.flip(r, -1) if j % 2 else jnp.cos(r))
            return h, h * r

        h, rows = jax.lax.scan(row, jnp.zeros(x.shape[1:], x.dtype), x)
        return rows if j % 3 else h

    def fori(self, x, y, n, i, j):
        size = x.shape[0]
        return jax.lax.fori_loop(0, 3, lambda k, z: z.at[k % size].mul(0.5) + jnp.roll(z, 1, _axis(z, i)) * 0.1, x)

    def cond(self, x, y, n, i, j):
        axis = _axis(x, i)
        w = self.param((x.shape[axis],) * 2)
        return jax.lax.cond(
            n.ravel()[0] % 2 == j % 2,
            lambda z: jnp.moveaxis(jnp.tensordot(z, w, ([axis], [0])), -1, axis),
            lambda z: jnp.flip(z, 0) + 1,
            x,
        )

    def remat(self, x, y, n, i, j):
        k = x.shape[-1]
        a, b = self.param((k, _size(i, 16))), self.param((_size(i, 16), k))
        return jax.checkpoint(lambda z, a, b: z + jnp.tanh(z @ a) @ b * 0.2)(x, a, b)

    def attention(self, x, y, n, i, j):
        if x.ndim < 2:
            return None
        k = x.shape[-1]
        q, r, v = (x @ self.param((k, k)) / np.float32(k) for _ in range(3))
        return jax.nn.softmax(q @ jnp.swapaxes(r, -1, -2), -1) @ v

    def integers(self, x, y, n, i, j):
        """An integer value from an integer value; ``apply`` hands x = n."""
        axis = _axis(n, i)
        made = (
            lambda: jnp.cumsum(n, axis),
            lambda: n * 3 + 1,
            lambda: jnp.sort(n, axis),
            lambda: jnp.argsort(n, axis),
            lambda: n.sum(axis),
            lambda: jnp.argmax(n, axis).astype(jnp.int32),
            lambda: n.max(axis, keepdims=True),
            lambda: jnp.flip(n, axis),
            lambda: jnp.outer(n.ravel(), n.ravel()) if n.size <= 32 else n.ravel(),
            lambda: jnp.bincount(n.ravel() % 8, length=8),
        )[j % 10]()
        return made.astype(jnp.int32) % 1009


KINDS = [k for k in (*vars(Ops), *vars(Families)) if callable(getattr(Ops, k)) and not k.startswith("_")]
#: Kinds that appear more often than others.
COMMON = "dot dot dot linear binary unary merge split transpose reduce".split()


@dataclass(frozen=True)
class Drawn:
    """A random program; ``form`` says how it is wrapped: bit 0 gradient, bit 1 remat of the whole, bit 2 arguments are donated,
    and some are results too."""

    shapes: tuple[Shape, ...]
    steps: tuple[Step, ...]
    form: int

    @property
    def donated(self) -> bool:
        return bool(self.form & 4)

    @property
    def graded(self) -> bool:
        return bool(self.form & 1)

    def run(self, param: Param) -> list[Any]:
        """The values that no later step takes."""
        floats, ints = [param(s) for s in self.shapes], [param((6,), jnp.int32)]
        used: dict[int, Any] = {}  # by number; held, or a later value could get the number of one that is gone
        made: list[Any] = []
        ops = Ops(param, self.graded)
        for kind, a, b, i, j in self.steps:
            x, y = (floats[-1 - k % min(len(floats), 5)] for k in (a, b))
            n = ints[-1 - b % min(len(ints), 2)]
            if n.ndim == 0:
                n = n[None]
            if x.ndim == 0:
                x = x.reshape(1)
            if kind == "reference" and self.form & 2:  # JAX does not differentiate them in a remat
                continue
            if 0 in (x.size, y.size, n.size) and not self._is_defined(kind, (x, y, n), i, j):
                continue
            new = getattr(ops, kind)(x, y, n, i, j)
            if new is None or new.ndim > RANK or new.size > ELEMENTS or (new.size == 0 and x.size and n.size):
                continue
            used |= {id(v): v for v in (x, y, n)}
            (floats if new.dtype == jnp.float32 else ints).append(new)
            made.append(new)
        results = [v for v in made if id(v) not in used] or made
        return [*results, floats[0], floats[0], ints[0]] if self.donated else results

    def _is_defined(self, kind: str, arrays: tuple[Any, ...], i: int, j: int) -> bool:
        """Does plain JAX compile a step, and its gradient where one is taken? Some ops are not defined for empty arrays."""

        def total(x: Any, y: Any, n: Any) -> Any:
            ops = Ops(lambda shape, dtype=jnp.float32: jnp.full(shape, x.sum() + y.sum()).astype(dtype), self.graded)
            new = getattr(ops, kind)(x, y, n, i, j)
            return jnp.float32(0) if new is None else new.sum().astype(jnp.float32)

        tried = jax.value_and_grad(total, (0, 1)) if self.graded else total
        try:
            jax.jit(tried).lower(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays))
        except Exception:
            return False
        return True

    def function(self) -> tuple[Callable[..., Any], list[Any]]:
        """The function and the shapes of its arguments."""
        asked: list[Any] = []

        def ask(shape: Shape, dtype: Any = jnp.float32) -> Any:
            asked.append(jax.ShapeDtypeStruct(shape, dtype))
            return jnp.zeros(shape, dtype)

        jax.eval_shape(lambda: self.run(ask))

        def plain(*args: Any) -> list[Any]:
            there = iter(args)
            return self.run(lambda *_: next(there))

        if self.form & 2:
            plain = jax.checkpoint(plain)
        if not self.graded:
            return plain, asked

        def loss(floats: list[Any], others: list[Any]) -> tuple[Any, list[Any]]:
            first, second = iter(floats), iter(others)
            values = plain(*[next(first) if s.dtype == jnp.float32 else next(second) for s in asked])
            total = jnp.float32(0)
            for v in values:
                if v.dtype == jnp.float32:
                    total += jnp.mean(v * jnp.cos(jnp.arange(v.size, dtype=jnp.float32).reshape(v.shape)))
            return total, [v for v in values if v.dtype != jnp.float32]

        def graded(*args: Any) -> Any:
            floats = [a for a in args if a.dtype == jnp.float32]
            return jax.value_and_grad(loss, has_aux=True)(floats, [a for a in args if a.dtype != jnp.float32])

        return graded, asked


def arguments(shapes: Sequence[Any], seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=s.shape).astype(s.dtype)
        if jnp.issubdtype(s.dtype, jnp.floating)
        else rng.integers(0, 24, s.shape).astype(s.dtype)
        for s in shapes
    ]


def draw(number: int) -> Drawn:
    """The random program of a number. Most are small, so that they compile quickly."""
    rng = random.Random(number)

    def shape() -> Shape:
        sizes = [rng.choice((*SIZES, 8, 8, 16, 4, *ODD)) for _ in range(rng.randint(1, 3))]
        sizes[0] = 0 if rng.random() < 0.02 else sizes[0]
        return tuple(sizes) if np.prod(sizes) <= ELEMENTS else tuple(sizes[:2])

    count = rng.choice((1, 2, 2, 3, 3, 4, 6))
    steps = [(rng.choice(KINDS + COMMON), *(rng.randrange(64) for _ in range(4))) for _ in range(count)]
    form = rng.choice((0, 0, 0, 0, 1, 1, 3, 4))
    return Drawn(tuple(shape() for _ in range(rng.randint(1, 2))), tuple(steps), form)


drawn_programs = st.integers(0, 2**20).map(draw)


def with_rings(mesh: MeshAxes) -> HardwareCost:
    """The costs of devices on which small arrays travel in rings of permutes as large ones do."""
    placement = HardwareCost.of(mesh).placement
    where = placement.topology
    profile = replace(where.profile, collective_s=0.0, rings=True)
    return HardwareCost(replace(placement, topology=replace(where, profile=profile)))


def random_decisions(analysis: Analysis, mesh: MeshAxes, seed: int) -> list[Decision]:
    """Groups on random axes with random sides, half of them padded, and now and then a value that is kept whole."""
    rng = random.Random(seed)
    groups = [g for g in analysis.groups if g.matters]
    made: list[Decision] = []
    for axis in mesh.names:
        for group in rng.sample(groups, min(len(groups), rng.randint(1, 4))):
            made.append(Shard(group.colors, axis, tuple((bit, rng.randint(0, 1)) for bit in group.bits)))
    rng.shuffle(made)
    while rng.random() < 0.3:
        values = analysis.program.arguments if rng.random() < 0.7 else ()
        value = rng.choice(values).value if values else rng.choice(analysis.program.values).id
        made.insert(rng.randint(0, len(made)), Keep((value,), rng.choice(mesh.names)))
    return [replace(d, padded=rng.random() < 0.5) if isinstance(d, Shard) else d for d in made]
