"""Variants of a program: the same function, transformed to need less memory and more time.

With ``"auto"`` the planner tries more and more micro-batches, with and without rematerialization, until some variant fits and
more parts are not faster (``planner/racing.py``).

Weak. A number of parts that is only better beyond twice the next smaller one is not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from shardwise.capture import jax_internals as internals
from shardwise.capture.trace import JitOptions, Traced, trace
from shardwise.errors import VariantError
from shardwise.ir.paths import find_paths
from shardwise.tactics.roles import NAME_THEM, Roles
from shardwise.transforms.gathers import gather_again
from shardwise.transforms.microbatch import microbatched
from shardwise.transforms.offload import offload
from shardwise.transforms.remat import rematerialize

AUTO: Final = "auto"
#: A value of ``remat``: only the gathered copies of parameters are made again.
GATHERS: Final = "gathers"
#: The most parts.
_MOST_PARTS: Final = 64


@dataclass(frozen=True, slots=True)
class Variant:
    """``microbatches``: the number of parts in which the batch is computed, one after the other; ``batch``: the paths of its
    arguments, whose first dimension is the examples. ``remat``: whether loops and repeated blocks are computed again in the
    backward pass, or with ``GATHERS`` parameters are gathered again there. ``offload``: the paths of the optimizer's state, of
    which the stacks are in the memory of the host."""

    microbatches: int = 1
    batch: tuple[str, ...] = ()
    remat: bool | str = False
    offload: tuple[str, ...] = ()

    def lines(self) -> tuple[str, ...]:
        """Returns a description, empty for the unchanged program."""
        lines = []
        if self.microbatches > 1:
            more = f" and {len(self.batch) - 1} more" if len(self.batch) > 1 else ""
            lines.append(f"{self.microbatches} micro-batches of {self.batch[0]}{more}, one after the other")
        if self.remat == GATHERS:
            lines.append("the backward pass gathers parameters again")
        elif self.remat:
            lines.append("loops and repeated blocks keep their carry, and compute the rest again")
        if self.offload:
            lines.append("the optimizer's stacked state is in the memory of the host, and fetched layer by layer")
        return tuple(lines)

    def __str__(self) -> str:
        parts = [f"{self.microbatches} micro-batches"] if self.microbatches > 1 else []
        again = ["parameters gathered again"] if self.remat == GATHERS else ["rematerialized"] if self.remat else []
        host = ["state in host memory"] if self.offload else []
        return ", ".join(parts + again + host) or "as it is"


#: The unchanged program.
AS_IS: Final = Variant()


@dataclass(frozen=True, slots=True)
class Wanted:
    """The requested variants: a number or ``"auto"``; true, false, ``"gathers"`` or ``"auto"``; true, false or ``"auto"``. None
    is the unchanged program, which may gather parameters again if it does not fit otherwise."""

    microbatches: int | str | None = None
    remat: bool | str | None = None
    offload: bool | str | None = None

    def __post_init__(self) -> None:
        count, problems = self.microbatches, []
        if count not in (None, AUTO) and not (type(count) is int and count >= 1):
            problems.append(f"microbatches is a whole number above zero or 'auto', not {count!r}")
        if self.remat not in (None, False, True, GATHERS, AUTO):
            problems.append(f"remat is True, False, 'gathers' or 'auto', not {self.remat!r}")
        if self.offload not in (None, False, True, AUTO):
            problems.append(f"offload is True, False or 'auto', not {self.offload!r}")
        if problems:
            raise VariantError("; ".join(problems))

    @property
    def open(self) -> bool:
        """Whether the function may be changed as is best."""
        return AUTO in (self.microbatches, self.remat, self.offload)

    def variants(self, traced: Traced, roles: Roles, offload: bool = False) -> list[Variant]:
        """Returns the variants to try, those with fewer parts first; with ``offload`` those that are tried where none of them
        fits."""
        if offload and self.offload != AUTO:
            return []
        state = roles.get("optimizer", ()) if offload or self.offload is True else ()
        if self.offload is True and not state:
            raise VariantError(f"offload needs to know which arguments are the optimizer's state: {NAME_THEM}")
        if offload and not state:
            return []
        open_remat: dict[bool | str | None, list[bool | str]] = {None: [False, GATHERS], AUTO: [False, GATHERS, True]}
        remat = open_remat.get(self.remat) or [self.remat or False]
        counts, paths = [1], tuple[str, ...]()
        if self.microbatches not in (None, 1):
            try:
                paths, size = batch_of(traced, roles)
                powers = [2**k for k in range(_MOST_PARTS.bit_length()) if size % 2**k == 0]
                counts = [self.microbatches] if isinstance(self.microbatches, int) else powers
            except VariantError:
                if self.microbatches != AUTO:
                    raise
        return [Variant(count, paths if count > 1 else (), again, state) for count in counts for again in remat]


def batch_of(traced: Traced, roles: Roles) -> tuple[tuple[str, ...], int]:
    """Returns the paths of the arguments that have the batch according to the roles, and its number of examples."""
    prefixes = roles.get("batch", ())
    if not prefixes:
        raise VariantError(f"micro-batches need to know which arguments are the batch: {NAME_THEM}")
    variables = internals.split_jaxpr(traced.jaxpr)[0].invars
    shapes = {leaf.path: internals.shape_of(v.aval) for leaf, v in zip(traced.arguments, variables, strict=True)}
    under = dict.fromkeys(path for asked in prefixes for path in find_paths(asked, shapes, what="argument"))
    arrays = {path: shapes[path] for path in under if shapes[path]}
    if not arrays:
        raise VariantError(f"the batch, {' and '.join(under)}, has no dimension that counts examples")
    sizes = {shape[0] for shape in arrays.values()}
    if len(sizes) > 1:
        shown = ", ".join(f"{path} {list(shape)}" for path, shape in list(arrays.items())[:6])
        raise VariantError(f"the first dimension of the batch's arguments must count its examples; they are {shown}")
    return tuple(arrays), sizes.pop()


def trace_variant(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: JitOptions,
    variant: Variant,
    traces: dict[bool | str, Traced] | None = None,
) -> Traced:
    """Traces a variant of a function. ``traces``: a cache of the function, by ``remat``."""
    traces = {} if traces is None else traces
    if False not in traces:
        traces[False] = trace(fn, args, kwargs, options)
    if variant.remat not in traces:
        traces[variant.remat] = (gather_again if variant.remat == GATHERS else rematerialize)(traces[False])
    traced, count = traces[variant.remat], variant.microbatches
    try:
        traced = microbatched(traced, variant.batch, count) if count > 1 else traced
    except VariantError as error:
        raise VariantError(f"{traced.name} cannot be computed in {count} micro-batches: {error}") from None
    if not variant.offload:
        return traced
    arguments = [leaf.path for leaf in traced.arguments]
    return offload(
        traced, {path for state in variant.offload for path in find_paths(state, arguments, what="argument")}
    )
