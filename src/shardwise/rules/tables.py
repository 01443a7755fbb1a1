"""Rules that are plain data: elementwise primitives, and linear algebra."""

from __future__ import annotations

from typing import Final

#: Primitives that compute nothing: each operand is the result of the same number.
PASSING: Final = tuple(
    """copy create_linear device_put empty empty2 from_edtype full_to_shard layout_constraint multiple_of name
    optimization_barrier pin preduced pvary random_clone reduced_vary_cast reduced_vary_cast_p relayout remove_memory_space
    reshard shard_to_full sharding_constraint stop_gradient to_edtype unpin vary_unreduced_cast vary_unreduced_cast_p
    with_memory_space_constraint xla_metadata_value""".split()
)

#: Functions that reduce an angle exactly first, whatever its size (``lgamma`` has a sine in it). Hardware profiles say how many
#: times as long as other transcendental functions they take (``Profile.angle_factor``).
ANGLES: Final = ("cos", "lgamma", "sin", "tan")

#: Elementwise primitives, with the vector operations per element that the roofline counts.
ELEMENTWISE: Final[dict[str, int]] = {
    # Arithmetic and comparison.
    **dict.fromkeys(
        """abs add add_any and atan2 ceil clamp clz complex conj convert_element_type div eq eq_to floor ge gt imag
        integer_pow is_finite le le_to lt lt_to max min mul mulhi ne neg nextafter not one_minus_square or polynomial
        population_count real reciprocal reduce_precision rem round select_n shift_left shift_right_arithmetic
        shift_right_logical sign sqrt square sub xor""".split(),
        1,
    ),
    # Transcendental functions: a short polynomial.
    **dict.fromkeys(
        """acos acosh asin asinh atan atanh cbrt cosh erf erf_inv erfc exp exp2 expm1 log log1p log2 logistic pow rsqrt sinh
        tanh""".split(),
        10,
    ),
    **dict.fromkeys(ANGLES, 10),
    # Series and iterations per element.
    **dict.fromkeys(
        """bessel_i0e bessel_i1e digamma igamma igamma_grad_a igammac polygamma regularized_incomplete_beta
        zeta""".split(),
        400,
    ),
    # Hashes per element.
    **dict.fromkeys("threefry2x32 threefry4x32 philox2x32 philox4x32".split(), 120),
    **dict.fromkeys([*PASSING, "shard_alike"], 0),
}

#: The dimensions of matrices and vectors by letter, behind the batch dimensions. Each matrix is factorized or solved as a
#: whole, so that its dimensions are blocked; those with capitals are independent. The first form with the op's numbers of
#: operands and results applies.
LINEAR_ALGEBRA: Final[dict[str, tuple[str, ...]]] = {
    "cholesky": ("nm->nm",),
    "cholesky_update": ("nm,k->nm",),
    "eig": ("nm->w,ab,cd", "nm->w,ab", "nm->w"),
    "eigh": ("nm->ab,w", "nm->w"),
    "geqrf": ("nm->nm,k",),
    "geqp3": ("nm,p->nm,p,k",),
    "hessenberg": ("nm->nm,k",),
    "householder_product": ("nm,k->nm",),
    "ormqr": ("nm,k,pq->pq",),
    "lu": ("nm->nm,k,p",),
    "lu_pivots_to_permutation": ("k->p",),
    "qr": ("nm->ab,cd,p", "nm->ab,cd"),
    "schur": ("nm->ab,cd", "nm->ab"),
    "svd": ("nm->k,ab,cd", "nm->k"),
    "symmetric_product": ("nm,ab->cd",),
    "tridiagonal": ("nm->nm,d,e,t",),
    "tridiagonal_solve": ("n,n,n,nK->nK",),
}
