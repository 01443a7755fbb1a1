"""Shardy agrees: the factor rules of the StableHLO that a primitive becomes are compared with ours, factor by factor.

Every difference is listed below with its justification, written ``ours / Shardy's``. A difference that is not listed fails,
and so does a listed one that no longer occurs.
"""

from __future__ import annotations

from random import Random

import jax
import pytest

from shardwise.rules.registry import RULES
from tests.rules.cases import Case
from tests.rules.generators import CASES
from tests.rules.shardy import ShardyRule, differences, shardy_rules

SEEDS = range(12)
_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])

#: The op to compare, where the primitive becomes several, and how our tensors stand in it.
MAIN: dict[str, tuple[str, tuple[int, ...] | None]] = {
    "argmax": ("reduce", (0, 0, 1, 1)),  # values and their positions
    "argmin": ("reduce", (0, 0, 1, 1)),
    "approx_top_k": ("custom_call", (0, 0, 1, 2)),
    "clamp": ("clamp", None),
    "random_unwrap": ("none", None),  # the constraint on a key's words is no computation
    "random_wrap": ("none", None),
    "split": ("none", None),
    "stack": ("none", None),
    "gather": ("gather", None),
    "scatter": ("scatter", None),
    "select_and_gather_add": ("reduce_window", (1, 0, 2, 2)),
    "select_and_scatter_add": ("select_and_scatter", (1, 0, 2)),
}

_HALO_ONE = "one position is left of the dimension: nothing remains to shard, so the operand is gathered"
_SCAN = "the window of a running total is the whole dimension: a halo that wide is a gather"
_LOOKED = "the same thing with a name of its own: masked lookup and a sum; the cost model needs to tell them apart"
_WRITTEN = "the same thing with a name of its own: each part takes the updates that fall into it"
_WINDOW_ONE = "an update of one position falls into one part, whichever it is; Shardy asks for the whole"
_APART = "in and out have different sizes and nothing in common; Shardy joins them and stops propagation there"
_SCALAR = "a scalar operand is broadcast before the op"
_WHOLE = "every number out needs every number in; Shardy leaves the custom call's matrix open and XLA gathers it"

_POOL = {"halo / pass": "dilation or padding alone moves positions too; Shardy looks at window and stride only"}
_RUNNING = {"blocked / halo": _SCAN}
_SUMMED = {"indexed / pass": _WRITTEN, "indexed / blocked": _WINDOW_ONE}

DIFFERENCES: dict[str, dict[str, str]] = {
    "conv_general_dilated": {
        "blocked / size one": "the same: Shardy gives the taps of a kernel no factor that can be split"
    },
    **dict.fromkeys(["reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"], _POOL),
    "select_and_scatter_add": {
        "halo / blocked+halo, apart": "a window's choice needs its neighbours only; Shardy asks for the whole source"
    },
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _RUNNING),
    "approx_top_k": {
        "blocked / pass": "the best of a part need not be among the best: candidates are gathered and compared once more",
    },
    "reshape": {
        "blocked / pass": "a factor on one side only: splitting it takes a gather, which is what blocked says",
        "blocked / pass+pass": "the common part is minor, where no PartitionSpec can name it",
    },
    "slice": {"blocked / halo": _HALO_ONE},
    "pad": {
        "halo / pass": "equal sizes do not mean equal positions: cutting one off in front and adding one behind is a shift"
    },
    "concatenate": {
        "halo / blocked": "every position comes from one position, a shift that the windows state; Shardy asks for the whole"
    },
    "clamp": {"other tensors": _SCALAR},
    "reduce": {"blocked / reduction": "no collective computes a combiner of the program's own"},
    "gather": {"indexed / reduction": _LOOKED, "blocked, apart / blocked": _APART},
    "gather/written": {"indexed / reduction": _LOOKED},
    **dict.fromkeys(["scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"], _SUMMED),
    "scatter-sub": {
        **_SUMMED,
        "reduction / blocked": "parts that start from zero add up; Shardy does not know subtraction as a combiner",
    },
    "scatter/written": {"indexed / pass": _WRITTEN},
    "dynamic_slice": {"blocked, apart / blocked": _APART},
    "dynamic_update_slice": {"indexed / pass": _WRITTEN},
    "fft": {"blocked, apart / blocked": _APART},
    "sort": {"blocked, apart / blocked": "positions in a sorted dimension are not those before; Shardy joins them"},
    "eigh": {"blocked, apart / pass": _WHOLE},
    "triangular_solve": {
        "pass / blocked": "right-hand sides are solved for one by one; Shardy asks for all of them",
        "blocked / blocked, apart": "unknowns and right-hand sides have the same positions; both say that they stay whole",
        "blocked, apart / blocked": "the matrix is whole either way, whatever it is joined with",
    },
}

#: Where the Shardy of another JAX says something else than that of 0.10.
_BEFORE_0_10 = {
    "indexed / pass": _WRITTEN,
    "blocked / pass": "a window may lie across the border of two parts; later versions of Shardy block it too",
}
_BLOCKED_WRITERS = {"blocked / reduction": "parts do not know who wrote last; later versions of Shardy block it too"}
OLDER: dict[str, dict[str, str]] = {
    "scatter": {**_BEFORE_0_10, **_BLOCKED_WRITERS},
    **dict.fromkeys(["scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"], _BEFORE_0_10),
}
NEWER: dict[str, dict[str, str]] = {
    "conv_general_dilated": {"blocked / halo": "a kernel's taps are few: gathering them costs nothing"},
    "dynamic_update_slice": {
        "indexed / halo": _WRITTEN,
        "blocked / halo": "the update may fall on any part, so that every part needs all of it",
    },
    "pad": {},
    "reshape": {
        "blocked, apart / halo": "positions that a reshape cuts across move anywhere: a gather, not a neighbour's overlap",
        "blocked / blocked+pass": "the common part is minor, where no PartitionSpec can name it",
    },
}

_MANY = "becomes several ops, none of them the main one"
_CHLO = "stays a CHLO op, for which Shardy has no rule"
_NOTHING = "computes nothing: there is no op"
_NO_TPU = "has no lowering for TPUs"
_RANDOM = "becomes a hash of many elementwise ops around an iota, on keys that are two words"
_SLICES = "becomes a slice or copy per part, each like the primitive slice or concatenate"

NOT_COMPARABLE: dict[str, str] = {
    **dict.fromkeys(
        """acos acosh asin asinh atan atanh bessel_i1e cosh digamma erf erf_inv erfc lgamma log2 mulhi nextafter
        one_minus_square polygamma ragged_dot_general sinh square top_k zeta""".split(),
        _CHLO,
    ),
    **dict.fromkeys(
        """bessel_i0e cholesky_update conj exp2 igamma igamma_grad_a igammac integer_pow logistic lu
        lu_pivots_to_permutation ormqr philox2x32 philox4x32 polynomial qr regularized_incomplete_beta scaled_dot svd
        symmetric_product threefry2x32 threefry4x32 tridiagonal_solve""".split(),
        _MANY,
    ),
    **dict.fromkeys(
        "copy device_put empty iota name optimization_barrier rng_uniform stop_gradient tie".split(), _NOTHING
    ),
    **dict.fromkeys("eig geqp3 hessenberg schur tridiagonal".split(), _NO_TPU),
    **dict.fromkeys(
        """random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap random_wrap
        rng_bit_generator""".split(),
        _RANDOM,
    ),
    **dict.fromkeys("split stack tile unstack".split(), _SLICES),
}


def _main(case: Case, rules: list[ShardyRule]) -> ShardyRule | None:
    named, _ = MAIN.get(case.name, ("", None))
    found = [r for r in rules if any(r.tensors)]
    if named:
        found = [r for r in found if r.op.split(".")[-1] == named]
    elif case.name != "broadcast_in_dim":
        found = [r for r in found if r.op != "stablehlo.broadcast_in_dim"]
    return found[0] if len(found) == 1 else None


def _found(label: str) -> set[str] | None:
    """All differences over some drawn cases, or None where no case has one op to compare with."""
    found: set[str] = set()
    compared = False
    for seed in SEEDS:
        case = CASES[label](Random(seed))
        if not case.rule.factors:
            continue
        try:
            main = _main(case, shardy_rules(case))
        except NotImplementedError:
            continue
        if main is not None:
            compared = True
            found |= differences(case, main, MAIN.get(case.name, ("", None))[1])
    return found if compared else None


@pytest.mark.parametrize("label", CASES)
def test_shardy_agrees(label: str) -> None:
    found = _found(label)
    if label in NOT_COMPARABLE:
        assert found is None, f"{label} can be compared: {found}"
        return
    assert found is not None, f"{label} is no single op: list it as not comparable, or name its main op"
    changed = OLDER if _VERSION < (0, 10) else NEWER if _VERSION >= (0, 11) else {}
    listed = set(changed.get(label, DIFFERENCES.get(label, {})))
    assert found - listed == set(), "differences that are not listed"
    assert listed - found == set(), "listed differences that do not occur"


def test_lists_name_rules() -> None:
    labels = set(DIFFERENCES) | set(NOT_COMPARABLE)
    assert {label.split("/")[0] for label in labels} <= set(RULES)
