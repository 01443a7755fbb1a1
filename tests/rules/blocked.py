"""Why a factor is blocked: for each primitive that blocks one, the reasons its rule may give, each with the long version.

A factor that is blocked for a reason not listed here fails the tests, and so does a primitive that is not here.
"""

from __future__ import annotations

from shardwise.rules.tables import LINEAR_ALGEBRA

#: What a rule says -> what that means.
WHY = {
    "factorizing or solving needs the complete matrix": "every step needs the ones before it",
    "each unknown needs those solved before it": "substitution runs through the matrix from one end to the other",
    "every frequency needs every position": "a part of the positions gives no part of the frequencies",
    "the words of one key": "a key is hashed as one; no one shards two words",
    "each position derives a key from its flat index": "the sampler splits its key over the flattened shape",
    "the bytes of one element": "they are converted as one",
    "only waited for": "the value is not read",
    "the reshape cuts across this dimension": "no position of one shape's dimension is a position of the other's",
    "the new dimension numbers the operands": "each operand is one position of it",
    "the dimension becomes separate results": "each result is one position of it",
    "the other side of the window has size one": "one result position reads it, or one position is spread over all",
    "a small slice of a dimension is not sharded with the rest": "less than a sixteenth: it means something else",
    "each position needs all positions before it": "a part cannot start before the part before it ends",
    "an element may move anywhere in the sorted dimension": "a sorted part is no part of the sorted whole",
    "the largest elements may be anywhere in the dimension": "the best of a part need not be among the best",
    "a window narrower than the dimension may start anywhere in it": "it may lie across the border of two parts",
    "an index vector is read as one": "its components together say where",
    "the last of several writers wins": "parts do not know which of them wrote last",
    "the slice may start anywhere": "it may lie across the border of two parts",
    "the update may fall on any part": "a part of the update does not belong to a part of the operand",
    "rows find their group by the running sum of the group sizes": "a part of the rows does not start at the first group",
    "the contracted dimension is scaled in blocks": "a part must begin and end at a block's border",
    "every tap of the result needs all positions of the window": "all of the wide dimension is summed into each tap",
    "no collective computes the program's combiner": "no collective computes it",
    "the taps of a kernel slide over all positions of the input": "a part of the taps sums a part of every result",
}

_HALO = ("the other side of the window has size one",)

BLOCKED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(LINEAR_ALGEBRA, ("factorizing or solving needs the complete matrix",)),
    "triangular_solve": ("each unknown needs those solved before it",),
    "fft": ("every frequency needs every position",),
    "random_wrap": ("the words of one key",),
    "random_unwrap": ("the words of one key",),
    "rng_bit_generator": ("the words of one key",),
    "random_gamma": ("each position derives a key from its flat index",),
    "bitcast_convert_type": ("the bytes of one element",),
    "tie": ("only waited for",),
    "reshape": ("the reshape cuts across this dimension",),
    "stack": ("the new dimension numbers the operands",),
    "unstack": ("the dimension becomes separate results",),
    **dict.fromkeys(
        ["slice", "pad", "concatenate", "split"], (*_HALO, "a small slice of a dimension is not sharded with the rest")
    ),
    **dict.fromkeys(["reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"], _HALO),
    **dict.fromkeys(["select_and_gather_add", "select_and_scatter_add"], _HALO),
    **dict.fromkeys(
        ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], ("each position needs all positions before it",)
    ),
    "reduce": ("no collective computes the program's combiner",),
    "sort": ("an element may move anywhere in the sorted dimension",),
    **dict.fromkeys(["top_k", "approx_top_k"], ("the largest elements may be anywhere in the dimension",)),
    **dict.fromkeys(
        ["gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"],
        (
            "a window narrower than the dimension may start anywhere in it",
            "an index vector is read as one",
            "the last of several writers wins",
        ),
    ),
    "dynamic_slice": ("the slice may start anywhere",),
    "dynamic_update_slice": ("the update may fall on any part",),
    "ragged_dot_general": ("rows find their group by the running sum of the group sizes",),
    "scaled_dot": ("the contracted dimension is scaled in blocks",),
    "conv_general_dilated": (
        "every tap of the result needs all positions of the window",
        "the taps of a kernel slide over all positions of the input",
        *_HALO,
    ),
}
