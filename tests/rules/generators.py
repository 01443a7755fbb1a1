"""All case generators, by the primitive they are for. ``name/variant`` is a second generator for ``name``."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.rules import indices, movements, others, pointwise, products, reductions
from tests.rules.cases import Case, primitive_named

_OF_PALLAS = ("remove_memory_space", "multiple_of", "reciprocal", "broadcast_to")
FAMILIES = (pointwise, products, reductions, movements, indices, others)
CASES: dict[str, Callable[[Random], Case]] = {
    label: case
    for family in FAMILIES
    for label, case in family.CASES.items()
    # Importing Pallas brings some that only its kernels have.
    if primitive_named(label.split("/")[0]) is not None and label not in _OF_PALLAS
}

#: Primitives with a rule and no case, and why.
NO_CASE = {
    **dict.fromkeys(["create_linear", "pin", "unpin"], "made for kernels' buffers, no CPU lowering"),
    **dict.fromkeys(["from_edtype", "to_edtype"], "made while extended dtypes are lowered, after tracing"),
    **dict.fromkeys(["layout_constraint", "relayout"], "names a device's memory layout, not a value"),
    **dict.fromkeys(_OF_PALLAS, "made inside of Pallas kernels"),
    **dict.fromkeys(
        [
            "pvary",
            "preduced",
            "reduced_vary_cast",
            "reduced_vary_cast_p",
            "vary_unreduced_cast",
            "vary_unreduced_cast_p",
        ],
        "casts inside of shard_map, where a part already is what runs",
    ),
    **dict.fromkeys(["full_to_shard", "shard_to_full"], "casts at the border of shard_map"),
    "reshard": "needs a mesh with explicit axes; computes nothing",
    **dict.fromkeys(["shard_alike", "with_memory_space_constraint"], "says where, and computes nothing"),
    **dict.fromkeys(["empty2", "xla_metadata_value"], "made inside of JAX's own transformations; computes nothing"),
    "iota_2x32_shape": "two halves of one counter, made inside of the random generators",
    "select_and_scatter": "no function of JAX makes it; its derivative form select_and_scatter_add is tested",
}
