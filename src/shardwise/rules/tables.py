"""Rules that are plain data: linear algebra, transforms and random numbers, in the notation of ``ir/notation.py``.

A table's entry may have several forms for several numbers of operands or results; the first that fits the ranks is used.
"""

from __future__ import annotations

from typing import Final

#: Each matrix is factorised as a whole; leading dimensions are a batch.
LINEAR_ALGEBRA: Final[dict[str, tuple[str, ...]]] = {
    "cholesky": ("(...,n,m)->(...,n,m); blocked n m",),
    "cholesky_update": ("(...,n,m),(...,k)->(...,n,m); blocked n m k",),
    "eig": (
        "(...,n,m)->(...,w),(...,a,b),(...,c,d); blocked n m w a b c d",
        "(...,n,m)->(...,w),(...,a,b); blocked n m w a b",
        "(...,n,m)->(...,w); blocked n m w",
    ),
    "eigh": (
        "(...,n,m)->(...,a,b),(...,w); blocked n m w a b",
        "(...,n,m)->(...,w); blocked n m w",
    ),
    "geqrf": ("(...,n,m)->(...,n,m),(...,k); blocked n m k",),
    "geqp3": ("(...,n,m),(...,p)->(...,n,m),(...,p),(...,k); blocked n m k p",),
    "hessenberg": ("(...,n,m)->(...,n,m),(...,k); blocked n m k",),
    "householder_product": ("(...,n,m),(...,k)->(...,n,m); blocked n m k",),
    "ormqr": ("(...,n,m),(...,k),(...,p,q)->(...,p,q); blocked n m k p q",),
    "lu": ("(...,n,m)->(...,n,m),(...,k),(...,p); blocked n m k p",),
    "lu_pivots_to_permutation": ("(...,k)->(...,p); blocked k p",),
    "qr": (
        "(...,n,m)->(...,a,b),(...,c,d),(...,p); blocked n m a b c d p",
        "(...,n,m)->(...,a,b),(...,c,d); blocked n m a b c d",
    ),
    "schur": (
        "(...,n,m)->(...,a,b),(...,c,d); blocked n m a b c d",
        "(...,n,m)->(...,a,b); blocked n m a b",
    ),
    "svd": (
        "(...,n,m)->(...,k),(...,a,b),(...,c,d); blocked n m k a b c d",
        "(...,n,m)->(...,k); blocked n m k",
    ),
    "symmetric_product": ("(...,n,m),(...,a,b)->(...,c,d); blocked n m a b c d",),
    "tridiagonal": ("(...,n,m)->(...,n,m),(...,d),(...,e),(...,t); blocked n m d e t",),
    "tridiagonal_solve": ("(...,n),(...,n),(...,n),(...,n,k)->(...,n,k); blocked n",),
}

#: The leading dimensions of keys are a batch; the shape that each key fills is made position by position.
RANDOM: Final[dict[str, tuple[str, ...]]] = {
    "random_seed": ("(...)->(...)",),
    "random_fold_in": ("(...),(...)->(...)",),
}
