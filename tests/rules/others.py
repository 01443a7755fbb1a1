"""Cases of transforms, linear algebra and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.lax import linalg

from tests.rules.cases import Case, array, normal, primitive_named, shape, size, trace


def fft(r: Random) -> Case:
    kind = r.choice(["FFT", "IFFT", "RFFT", "IRFFT"])
    transformed = r.randint(1, 2)
    dims = (*shape(r, 0, 1), *(r.choice([2, 3, 4]) for _ in range(transformed)))
    x = array(r, dims, "float32" if kind == "RFFT" else "complex64")
    lengths = list(dims[-transformed:])
    if kind == "IRFFT":
        lengths[-1] = 2 * (dims[-1] - 1)
    return trace("fft", lambda x: lax.fft(x, getattr(lax.FftType, kind), tuple(lengths)), x)


def _matrix(r: Random, square: bool = True) -> np.ndarray[Any, Any]:
    """A batch of well-conditioned matrices."""
    n = r.choice([2, 3, 4])
    m = n if square else r.choice([2, 3, 4])
    return normal(r, (*shape(r, 0, 2), n, m)) + 3 * np.eye(n, m, dtype=np.float32)


def _symmetric(r: Random) -> np.ndarray[Any, Any]:
    x = _matrix(r)
    return np.asarray(x @ np.swapaxes(x, -1, -2))


def _of_matrix(name: str, fn: Callable[[Any], Any], make: Callable[[Random], Any]) -> Callable[[Random], Case]:
    return lambda r: trace(name, fn, make(r))


def eigh(r: Random) -> Case:
    return trace("eigh", lambda x: linalg.eigh(x, symmetrize_input=False), _symmetric(r))


def svd(r: Random) -> Case:
    vectors = r.random() < 0.5
    return trace("svd", lambda x: linalg.svd(x, full_matrices=False, compute_uv=vectors), _matrix(r, square=False))


def eig(r: Random) -> Case:
    left, right = r.random() < 0.5, r.random() < 0.5
    fn = lambda x: linalg.eig(x, compute_left_eigenvectors=left, compute_right_eigenvectors=right)  # noqa: E731
    return trace("eig", fn, _matrix(r))


def householder_product(r: Random) -> Case:
    x = _matrix(r)
    return trace("householder_product", linalg.householder_product, x, normal(r, x.shape[:-1]))


def ormqr(r: Random) -> Case:
    x = _matrix(r)
    c = normal(r, (*x.shape[:-1], size(r)))
    return trace("ormqr", lambda a, t, c: linalg.ormqr(a, t, c), x, normal(r, x.shape[:-1]), c)


def cholesky_update(r: Random) -> Case:
    x = normal(r, (3, 3)) + 4 * np.eye(3, dtype=np.float32)
    return trace("cholesky_update", linalg.cholesky_update, np.triu(x), normal(r, (3,)))


def symmetric_product(r: Random) -> Case:
    lead, n, k = shape(r, 0, 1), size(r, 2), size(r, 2)
    a, c = normal(r, (*lead, n, k)), normal(r, (*lead, n, n))
    return trace("symmetric_product", lambda a, c: linalg.symmetric_product(a, c, beta=1.0), a, c)


def lu_pivots_to_permutation(r: Random) -> Case:
    dims = (*shape(r, 0, 2), 3)
    return trace(
        "lu_pivots_to_permutation", lambda p: linalg.lu_pivots_to_permutation(p, 4), array(r, dims, "int32", 0, 4)
    )


def qr(r: Random) -> Case:
    return trace("qr", lambda x: linalg.qr(x, full_matrices=False), _matrix(r, square=False))


def geqp3(r: Random) -> Case:
    x = _matrix(r, square=False)
    fixed = np.zeros((*x.shape[:-2], x.shape[-1]), np.int32)
    return trace("geqp3", lambda x, p: primitive_named("geqp3").bind(x, p, use_magma=None), x, fixed)


def geqrf(r: Random) -> Case:
    return trace("geqrf", primitive_named("geqrf").bind, _matrix(r, square=False))


def triangular_solve(r: Random) -> Case:
    a = _matrix(r)
    *lead, n, _ = a.shape
    left = r.random() < 0.5
    b = normal(r, (*lead, n, size(r)) if left else (*lead, size(r), n))
    lower, unit, transposed = (r.random() < 0.5 for _ in range(3))
    fn = lambda a, b: linalg.triangular_solve(  # noqa: E731
        a, b, left_side=left, lower=lower, transpose_a=transposed, unit_diagonal=unit
    )
    return trace("triangular_solve", fn, np.tril(a) if lower else np.triu(a), b)


def tridiagonal_solve(r: Random) -> Case:
    lead, n = shape(r, 0, 1), r.choice([3, 4])
    dl, d, du = normal(r, (*lead, n)), normal(r, (*lead, n)) + 4, normal(r, (*lead, n))
    dl[..., 0] = 0
    du[..., -1] = 0
    return trace("tridiagonal_solve", linalg.tridiagonal_solve, dl, d, du, normal(r, (*lead, n, size(r))))


def _keys(r: Random) -> Any:
    return jax.random.split(jax.random.key(r.randrange(100)), shape(r, 0, 2))


def random_bits(r: Random) -> Case:
    dims = shape(r)
    return trace(
        "random_bits", jax.vmap(lambda k: jax.random.bits(k, dims)), jax.random.split(jax.random.key(1), size(r))
    )


def random_gamma(r: Random) -> Case:
    if r.random() < 0.3:
        keys, a = jax.random.key(3), np.abs(normal(r, shape(r))) + 1
        return trace("random_gamma", jax.random.gamma, keys, a)
    keys = jax.random.split(jax.random.key(3), size(r))
    a = np.abs(normal(r, (*keys.shape, *shape(r, 0, 2)))) + 1
    return trace("random_gamma", jax.vmap(jax.random.gamma), keys, a)


def random_split(r: Random) -> Case:
    return trace(
        "random_split", jax.vmap(lambda k: jax.random.split(k, 4)), jax.random.split(jax.random.key(1), size(r))
    )


def random_seed(r: Random) -> Case:
    return trace("random_seed", jax.vmap(jax.random.key), array(r, (size(r),), "int32", 0, 9))


def random_fold_in(r: Random) -> Case:
    n = size(r)
    keys = jax.random.split(jax.random.key(1), n)
    return trace("random_fold_in", jax.vmap(jax.random.fold_in), keys, array(r, (n,), "uint32", 0, 9))


def random_wrap(r: Random) -> Case:
    return trace("random_wrap", jax.random.wrap_key_data, array(r, (*shape(r, 0, 2), 2), "uint32", 0, 9))


def random_unwrap(r: Random) -> Case:
    return trace("random_unwrap", jax.random.key_data, _keys(r))


def random_clone(r: Random) -> Case:
    return trace("random_clone", jax.random.clone, _keys(r))


def rng_bit_generator(r: Random) -> Case:
    dims = shape(r)
    key = array(r, (4,), "uint32", 0, 9)
    return trace("rng_bit_generator", lambda k: lax.rng_bit_generator(k, dims), key)


def rng_uniform(r: Random) -> Case:
    dims = shape(r)
    return trace("rng_uniform", lambda a, b: lax.rng_uniform(a, b, dims), np.float32(0), np.float32(1))


CASES: dict[str, Callable[[Random], Case]] = {
    "fft": fft,
    "cholesky": _of_matrix("cholesky", lambda x: linalg.cholesky(x, symmetrize_input=False), _symmetric),
    "cholesky_update": cholesky_update,
    "eig": eig,
    "eigh": eigh,
    "svd": svd,
    "lu": _of_matrix("lu", linalg.lu, _matrix),
    "lu_pivots_to_permutation": lu_pivots_to_permutation,
    "qr": qr,
    "geqp3": geqp3,
    "geqrf": geqrf,
    "hessenberg": _of_matrix("hessenberg", linalg.hessenberg, _matrix),
    "tridiagonal": _of_matrix("tridiagonal", linalg.tridiagonal, _symmetric),
    "schur": _of_matrix("schur", linalg.schur, _matrix),
    "householder_product": householder_product,
    "ormqr": ormqr,
    "symmetric_product": symmetric_product,
    "triangular_solve": triangular_solve,
    "tridiagonal_solve": tridiagonal_solve,
    "random_bits": random_bits,
    "random_clone": random_clone,
    "random_fold_in": random_fold_in,
    "random_gamma": random_gamma,
    "random_seed": random_seed,
    "random_split": random_split,
    "random_unwrap": random_unwrap,
    "random_wrap": random_wrap,
    "rng_bit_generator": rng_bit_generator,
    "rng_uniform": rng_uniform,
}
