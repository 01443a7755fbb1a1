"""Variants of a program: the same function, transformed to need less memory and more time.

With ``"auto"`` the planner tries more and more micro-batches, with and without rematerialization, until some variant fits and
more parts are not faster (``planner/racing.py``). A pipeline is a variant, too: its stages are a dimension that can be sharded.

Weak. A number of parts that is only better beyond twice the next smaller one is not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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
from shardwise.transforms.pipeline import pipelined
from shardwise.transforms.remat import rematerialize
from shardwise.transforms.rolled import rolled

AUTO: Final = "auto"
#: A value of ``remat``: only the gathered copies of parameters are made again.
GATHERS: Final = "gathers"
#: The most parts.
_MOST_PARTS: Final = 64


@dataclass(frozen=True, slots=True)
class Variant:
    """``microbatches``: the number of parts in which the batch is computed, one after the other; ``batch``: the paths of its
    arguments, whose first dimension is the examples. With ``stages`` the micro-batches flow through a pipeline of as many
    stages, ``circular`` times around them. ``remat``: whether loops and repeated blocks are computed again in the backward
    pass, or with ``GATHERS`` parameters are gathered again there. ``offload``: the paths of the optimizer's state, of which the
    stacks are in the memory of the host."""

    microbatches: int = 1
    batch: tuple[str, ...] = ()
    remat: bool | str = False
    offload: tuple[str, ...] = ()
    stages: int = 1
    circular: int = 1

    @property
    def bubble(self) -> float:
        """The share of ticks in which a stage of the pipeline has no micro-batch."""
        return (self.stages - 1) / (self.circular * self.microbatches + self.stages - 1)

    def lines(self) -> tuple[str, ...]:
        """Returns a description, empty for the unchanged program."""
        lines = []
        more = f" and {len(self.batch) - 1} more" if len(self.batch) > 1 else ""
        if self.stages > 1:
            around = f" {self.circular} times" if self.circular > 1 else ""
            lines.append(
                f"a pipeline of {self.stages} stages: {self.microbatches} micro-batches of {self.batch[0]}{more} flow through "
                f"them{around}, and a stage waits for {self.bubble:.0%} of the time"
            )
            lines.append(f"all {self.microbatches} micro-batches are in flight until the backward pass begins")
        elif self.microbatches > 1:
            lines.append(f"{self.microbatches} micro-batches of {self.batch[0]}{more}, one after the other")
        if self.remat == GATHERS:
            lines.append("the backward pass gathers parameters again")
        elif self.remat:
            lines.append(
                "rematerialized: loops and repeated blocks keep their carry and compute the rest again in the backward pass"
            )
        if self.offload:
            lines.append("the optimizer's stacked state is in the memory of the host, and fetched layer by layer")
        return tuple(lines)

    def __str__(self) -> str:
        circular = f"{self.circular} times " if self.circular > 1 else ""
        parts = [f"{circular}{self.stages} stages"] if self.stages > 1 else []
        parts += [f"{self.microbatches} micro-batches"] if self.microbatches > 1 else []
        again = ["parameters gathered again"] if self.remat == GATHERS else ["rematerialized"] if self.remat else []
        host = ["state in host memory"] if self.offload else []
        return ", ".join(parts + again + host) or "as it is"


#: The unchanged program.
AS_IS: Final = Variant()


@dataclass(frozen=True, slots=True)
class Wanted:
    """The requested variants: a number or ``"auto"``; true, false, ``"gathers"`` or ``"auto"``; true, false or ``"auto"``; a
    number of stages or ``"auto"``; how often micro-batches go around the stages. None is the unchanged program, which may
    gather parameters again if it does not fit otherwise."""

    microbatches: int | str | None = None
    remat: bool | str | None = None
    offload: bool | str | None = None
    stages: int | str | None = None
    circular: int = 1

    def __post_init__(self) -> None:
        count, problems = self.microbatches, []
        if count not in (None, AUTO) and not (type(count) is int and count >= 1):
            problems.append(f"microbatches is a whole number above zero or 'auto', not {count!r}")
        if self.stages not in (None, AUTO) and not (type(self.stages) is int and self.stages >= 1):
            problems.append(f"pipeline is a number of stages or 'auto', not {self.stages!r}")
        if self.piped and self.microbatches == 1:
            problems.append("a pipeline needs at least two micro-batches")
        if type(self.circular) is not int or self.circular < 1:
            problems.append(f"circular is a whole number above zero, not {self.circular!r}")
        if self.remat not in (None, False, True, GATHERS, AUTO):
            problems.append(f"remat is True, False, 'gathers' or 'auto', not {self.remat!r}")
        if self.offload not in (None, False, True, AUTO):
            problems.append(f"offload is True, False or 'auto', not {self.offload!r}")
        if problems:
            raise VariantError("; ".join(problems))

    @property
    def open(self) -> bool:
        """Whether the function may be changed as is best."""
        undecided = self.piped and self.microbatches is None
        return undecided or AUTO in (self.microbatches, self.remat, self.offload, self.stages)

    @property
    def piped(self) -> bool:
        """Whether every variant is a pipeline."""
        return isinstance(self.stages, int) and self.stages > 1

    def pipelines(self, traced: Traced, roles: Roles, sizes: Collection[int]) -> list[Variant]:
        """Returns the pipelines to try, those with fewer parts first; ``sizes``: the numbers of stages for ``"auto"``."""
        numbers = sizes if self.stages == AUTO else [self.stages] if isinstance(self.stages, int) else []
        if not (numbers := [n for n in numbers if n > 1]):
            return []
        try:
            paths, size = batch_of(traced, roles)
        except VariantError:
            if self.piped:
                raise
            return []
        remat, state = [False, True] if self.remat == AUTO else [self.remat is True], self._state(roles)
        variants = []
        for stages in numbers:
            counts = [stages * 2**k for k in range(_MOST_PARTS.bit_length()) if size % (stages * 2**k) == 0]
            if isinstance(self.microbatches, int):
                counts = [self.microbatches]
            elif not counts and self.piped:
                raise VariantError(
                    f"{stages} stages need a multiple of {stages} micro-batches to be busy, and the batch of {size} examples "
                    f"cannot be cut into {stages}: give microbatches=..."
                )
            variants += [
                Variant(count, paths, again, state, stages, self.circular) for again in remat for count in counts
            ]
        return variants

    def _state(self, roles: Roles) -> tuple[str, ...]:
        """Returns the paths of the optimizer's state if it has to be in the memory of the host."""
        state = roles.get("optimizer", ()) if self.offload is True else ()
        if self.offload is True and not state:
            raise VariantError(f"offload needs to know which arguments are the optimizer's state: {NAME_THEM}")
        return state

    def variants(self, traced: Traced, roles: Roles, offload: bool = False) -> list[Variant]:
        """Returns the variants without a pipeline to try, those with fewer parts first; with ``offload`` those that are tried
        where none of them fits."""
        if offload and self.offload != AUTO:
            return []
        state = roles.get("optimizer", ()) if offload else self._state(roles)
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
    traces: dict[tuple[int, bool | str], Traced] | None = None,
) -> Traced:
    """Traces a variant of a function. ``traces``: a cache of the function, by stages, for which its layers are loops, and
    ``remat``."""
    traces = {} if traces is None else traces
    key = stages, remat = variant.stages, variant.remat
    if (1, False) not in traces:
        traces[1, False] = trace(fn, args, kwargs, options)
    if (stages, False) not in traces:
        traces[stages, False] = rolled(traces[1, False], stages)
    if key not in traces:
        traces[key] = (gather_again if remat == GATHERS else rematerialize)(traces[stages, False])
    traced, count = traces[key], variant.microbatches
    what = f"{count} micro-batches"
    try:
        if variant.stages > 1:
            what = f"a pipeline of {variant.stages} stages"
            traced = pipelined(traced, variant.batch, count, variant.stages, variant.circular)
        elif count > 1:
            traced = microbatched(traced, variant.batch, count)
    except VariantError as error:
        raise VariantError(f"{traced.name} cannot be computed in {what}: {error}") from None
    if not variant.offload:
        return traced
    arguments = [leaf.path for leaf in traced.arguments]
    return offload(
        traced, {path for state in variant.offload for path in find_paths(state, arguments, what="argument")}
    )
