"""Steps of random programs beyond dense float32: other dtypes, transforms, linear algebra, nested loops, references, kernels.

Each step returns float32 or int32. Narrow floats come from arguments: a cast of a computed value could jump under rounding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NARROW = (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float16)
INTEGERS = (jnp.int8, jnp.uint8, jnp.int16, jnp.uint32)


@jax.custom_jvp
def softsign(x: Any) -> Any:
    return x / (1 + jnp.abs(x))


@softsign.defjvp
def _softsign_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    return softsign(x), t / (1 + x * x)


@jax.custom_vjp
def scaled_sum(x: Any, w: Any) -> Any:
    return x * w.sum()


scaled_sum.defvjp(
    lambda x, w: (scaled_sum(x, w), (x, w)), lambda saved, g: (g * 0.5, jnp.full_like(saved[1], (g * saved[0]).mean()))
)


def last_square(x: Any) -> Any:
    """A well-conditioned matrix for every leading position."""
    rows = x[..., None, :] if x.ndim < 2 else x
    k = rows.shape[-2]
    return jnp.tanh(rows) @ jnp.swapaxes(jnp.tanh(rows), -1, -2) / np.float32(rows.shape[-1]) + 2 * jnp.eye(k)


class Families:
    """As ``tests.fuzz.generate.Ops``."""

    param: Any
    graded: bool

    def narrow(self, x, y, n, i, j):
        dtype, k = NARROW[i % len(NARROW)], x.shape[-1]
        w = self.param((k, 2 + j % 7), dtype)
        if j % 3 == 0 and not self.graded:
            return jax.lax.dot(self.param((3, k), dtype), w, preferred_element_type=jnp.float32)
        return x @ w.astype(jnp.float32) / np.float32(k)

    def complex(self, x, y, n, i, j):
        z = jax.lax.complex(x, jnp.cos(x))
        axis = i % x.ndim
        fns = (
            lambda: jnp.real(z * jnp.conj(z) + z),
            lambda: jnp.imag(jnp.tensordot(z, jnp.conj(z), ([axis], [axis]))),
            lambda: jnp.abs(z.sum(axis)),
            lambda: jnp.real(jnp.cumsum(z, axis)),
            lambda: jnp.angle(jnp.exp(1j * jnp.tanh(x))),
        )
        return fns[j % len(fns)]()

    def fft(self, x, y, n, i, j):
        if x.ndim > 3:
            return None
        axis, scale = i % x.ndim, np.float32(max(x.size, 1))
        fns = (
            lambda: jnp.abs(jnp.fft.fft(x, axis=axis)) ** 2 / scale,
            lambda: jnp.real(jnp.fft.ifft(x * (1 + 1j), axis=axis)),
            lambda: jnp.imag(jnp.fft.rfft(x, axis=axis)),
            lambda: jnp.fft.irfft(jax.lax.complex(x, jnp.sin(x)), axis=axis),
            lambda: jnp.real(jnp.fft.fftn(x)) / scale,
            lambda: jnp.real(jnp.fft.rfft2(x)) / scale if x.ndim > 1 else None,
            lambda: jnp.real(jnp.fft.fftn(x, axes=(0, x.ndim - 1))) / scale if x.ndim > 1 else None,
        )
        return fns[j % len(fns)]()

    def linalg(self, x, y, n, i, j):
        a = last_square(x)
        if a.shape[-1] > 8:
            return None
        b = jnp.broadcast_to(jnp.sin(jnp.arange(a.shape[-1] * 3.0)).reshape(a.shape[-1], 3), (*a.shape[:-1], 3))
        fns = (
            lambda: jnp.linalg.cholesky(a),
            lambda: jnp.linalg.solve(a, b),
            lambda: jnp.linalg.inv(a),
            lambda: jnp.linalg.slogdet(a)[1][..., None],
            lambda: jax.lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
            lambda: jnp.linalg.eigvalsh(a) if not self.graded else None,
            lambda: jnp.abs(jnp.linalg.qr(a)[1]) if not self.graded else None,
            lambda: jnp.linalg.svd(a, compute_uv=False) if not self.graded else None,
        )
        return fns[j % len(fns)]()

    def segments(self, x, y, n, i, j):
        fns = jax.ops.segment_sum, jax.ops.segment_max, jax.ops.segment_min, jax.ops.segment_prod
        count = 1 + i % 7
        index = self.param((x.shape[0],), jnp.int32) % count
        made = fns[j % (3 if self.graded else 4)](jnp.tanh(x), index, num_segments=count)
        return jnp.where(jnp.isfinite(made), made, 0.0)

    def scatter_other(self, x, y, n, i, j):
        index = self.param((1 + i % 5,), jnp.int32) % max(x.shape[0], 1)
        rows = jnp.tanh(self.param((1 + i % 5, *x.shape[1:])))
        at = x.at[index]
        if self.graded:
            return at.add(rows)
        return (at.min, at.max, at.multiply)[j % 3](rows)

    def nested(self, x, y, n, i, j):
        """A loop in a branch in a scan."""
        flag = n.ravel()[0] % 2

        def inner(c: Any, r: Any) -> Any:
            return jax.lax.fori_loop(0, 2, lambda k, z: z * 0.5 + jnp.flip(r, 0) if r.ndim else z * 0.5 + r, c)

        def row(c: Any, r: Any) -> Any:
            c = jax.lax.cond((flag + j) % 2 == 0, lambda c: inner(c, r), lambda c: c - r, c)
            return c, c * 0.5 if i % 2 else c.sum()

        carry, rows = jax.lax.scan(row, jnp.zeros(x.shape[1:], x.dtype), x)
        return carry if j % 2 else rows

    def repeat(self, x, y, n, i, j):
        """A while loop whose condition adds up what is sharded."""
        if self.graded:
            return None
        counts = jnp.abs(n) % 5

        def more(state: Any) -> Any:
            k, c, _ = state
            return (k < 3) & (c.sum() < 40)

        def body(state: Any) -> Any:
            k, c, z = state
            return k + 1, c + 1, z * 0.5 + z.mean(axis=i % z.ndim, keepdims=True)

        return jax.lax.while_loop(more, body, (0, counts, x))[2]

    def switch(self, x, y, n, i, j):
        branches = [jnp.sin, lambda z: jnp.flip(z, i % z.ndim), lambda z: z - z.mean()]
        return jax.lax.switch(jnp.abs(n.ravel()[0]) % 3, branches, x)

    def derivative(self, x, y, n, i, j):
        if j % 2:
            return softsign(x)
        return scaled_sum(x, self.param((1 + i % 7,)))

    def reference(self, x, y, n, i, j):
        total = jax.new_ref(jnp.zeros(x.shape[1:], x.dtype))

        def add(k: Any, c: Any) -> Any:
            total[...] += x[k] * 0.5
            return c

        if x.shape[0]:
            jax.lax.fori_loop(0, x.shape[0], add, 0)
        return total[...]

    def noise(self, x, y, n, i, j):
        key = jax.random.fold_in(jax.random.key(3), jnp.abs(n.ravel()[0]))
        keys = jax.random.split(key, 2)
        drawn = (
            lambda: jax.random.uniform(keys[0], x.shape),
            lambda: jax.random.bernoulli(keys[1], 0.5, x.shape).astype(x.dtype),
            lambda: jax.random.randint(key, x.shape, 0, 9).astype(x.dtype),
            lambda: jax.vmap(lambda k: jax.random.uniform(k, x.shape))(keys).sum(0),
        )
        return x + drawn[j % len(drawn)]()

    def shuffled(self, x, y, n, i, j):
        return jax.random.permutation(jax.random.key(i), x, axis=j % x.ndim)

    def convolve(self, x, y, n, i, j):
        """Batch, positions and channels from the first three dimensions."""
        if x.ndim != 3 or not x.size:
            return None
        w = self.param((1 + i % 3, x.shape[2], 1 + j % 5))
        pads = ("SAME", "VALID", [(1, 0)])[j % 3]
        strides, dilation = (1 + i % 2,), (1 + (i // 2) % 2,)
        return jax.lax.conv_general_dilated(
            x, w, strides, pads, rhs_dilation=dilation, dimension_numbers=("NWC", "WIO", "NWC")
        )

    def pool(self, x, y, n, i, j):
        if not x.size:
            return None
        window, strides = [1] * x.ndim, [1] * x.ndim
        axis = i % x.ndim
        window[axis], strides[axis] = min(2 + j % 2, x.shape[axis]), 1 + j % 2
        if j % 3 and not self.graded:
            return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, ("SAME", "VALID")[i % 2])
        return jax.lax.reduce_window(x, np.float32(0), jax.lax.add, window, strides, ("SAME", "VALID")[i % 2])

    def whole_numbers(self, x, y, n, i, j):
        """Arithmetic that wraps around, and bits."""
        m = self.param(n.shape if j % 2 else (8, 4), INTEGERS[i % len(INTEGERS)])
        axis = i % m.ndim
        zero = m.dtype.type(0)
        fns = (
            lambda: m.sum(axis, dtype=m.dtype),
            lambda: m.prod(axis, dtype=m.dtype),
            lambda: jax.lax.reduce(m, zero, jax.lax.bitwise_xor, (axis,)),
            lambda: jax.lax.reduce(m, ~zero, jax.lax.bitwise_and, (axis,)),
            lambda: jax.lax.reduce(m, zero, jax.lax.bitwise_or, (axis,)),
            lambda: jax.lax.population_count(m) + jax.lax.clz(m),
            lambda: (m << 1) ^ (m >> 2),
            lambda: jnp.cumsum(m, axis, dtype=m.dtype),
            lambda: jax.lax.dot_general(m, m, (((axis,), (axis,)), ((), ())), preferred_element_type=jnp.int32),
            lambda: jnp.sort(m, axis)[..., ::-1],
            lambda: jax.lax.bitcast_convert_type(m, jnp.uint8).astype(m.dtype),
            lambda: (m > m.max(axis, keepdims=True) // 2).all(axis),
            lambda: (m % 3 == 0).any(axis, keepdims=True),
        )
        return fns[j % len(fns)]().astype(jnp.int32)
