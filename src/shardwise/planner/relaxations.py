"""Variants that might make a program fit, for the error that says that it does not (``shardwise.planner.infeasible``).

Each is one that a person can ask for in so many words: ``remat=True``, ``microbatches=4``, and both where neither does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from shardwise.capture.trace import Traced
from shardwise.dims.analysis import Analysis
from shardwise.errors import VariantError
from shardwise.planner.infeasible import Change
from shardwise.tactics.roles import Roles
from shardwise.transforms.variant import Variant
from shardwise.transforms.variants import AUTO, Wanted, batch_of


def variant_changes(
    wanted: Wanted,
    roles: Roles,
    variant: Variant,
    traced: Traced,
    analyzed: Callable[[Variant], Analysis],
) -> Iterator[Change]:
    """Changes to a variant of a function that was not asked for: the smallest of each kind first.

    Args:
      wanted: what a person asked for.
      roles: of the function's arguments.
      variant: what came of it.
      traced: the function itself.
      analyzed: makes the analysis of a variant.
    """

    def change(kind: str, what: str, other: Variant, combined: bool = False) -> Change:
        return Change(kind, what, lambda: analyzed(other), combined)

    if wanted.remat is None:
        yield change("remat", "remat=True", replace(variant, remat=True))
    if wanted.microbatches is not None:
        return
    try:
        batch, _ = batch_of(traced, roles)
    except VariantError:
        return
    _, *rounds = Wanted(AUTO).rounds(traced, roles)
    parted = [replace(variant, microbatches=own.microbatches, batch=batch) for own, *_ in rounds]
    for own in parted:
        yield change("microbatches", f"microbatches={own.microbatches}", own)
    if wanted.remat is None:
        for own in parted:
            what = f"remat=True, microbatches={own.microbatches}"
            yield change("both", what, replace(own, remat=True), combined=True)
