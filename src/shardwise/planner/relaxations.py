"""Variants that might make a program fit, for the error that says that it does not (``shardwise.planner.infeasible``).

Each is one that a person can ask for in so many words: ``remat=True``, ``microbatches=4``, and both where neither does.
Where nobody said which arguments are the batch, it is guessed: arguments that no output replaces, with the first dimension that
most of their bytes have. A wrong guess does no harm: what cannot be computed in parts exactly is refused when it is traced, and
the error spells the guess out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from shardwise.capture.trace import Traced
from shardwise.dims.analysis import Analysis
from shardwise.errors import VariantError
from shardwise.ir.program import Program
from shardwise.planner.infeasible import Change
from shardwise.transforms.variant import Variant
from shardwise.transforms.variants import AUTO, Wanted, batch_of

_Roles = Mapping[str, str | Sequence[str]] | None


def variant_changes(
    wanted: Wanted,
    roles: _Roles,
    variant: Variant,
    traced: Traced,
    program: Program,
    analyzed: Callable[[Variant], Analysis],
) -> Iterator[Change]:
    """Changes to a variant of a function that was not asked for: the smallest of each kind first.

    Args:
      wanted, roles: what a person asked for.
      variant: what came of it.
      traced, program: the function itself.
      analyzed: makes the analysis of a variant.
    """

    def change(kind: str, what: str, other: Variant, combined: bool = False) -> Change:
        return Change(kind, what, lambda: analyzed(other), combined)

    if wanted.remat is None:
        yield change("remat", "remat=True", replace(variant, remat=True))
    if wanted.microbatches is not None:
        return
    given = (roles or {}).get("batch")
    prefixes = guessed_batch(program) if given is None else given
    said = "" if given is not None else f", roles={{'batch': {_written(prefixes)}}}"
    try:
        (first, *_), *rounds = Wanted(AUTO).rounds(traced, {"batch": prefixes})
    except VariantError:
        return
    assert first.microbatches == 1
    batch = batch_of(traced, {"batch": prefixes}).paths
    parted = [replace(variant, microbatches=own.microbatches, batch=batch) for own, *_ in rounds]
    for own in parted:
        yield change("microbatches", f"microbatches={own.microbatches}{said}", own)
    if wanted.remat is None:
        for own in parted:
            what = f"remat=True, microbatches={own.microbatches}"
            yield change("both", what, replace(own, remat=True), combined=True)


def guessed_batch(program: Program) -> tuple[str, ...]:
    """The paths of arguments that look like the batch, whole trees by the path of the tree.

    >>> import jax, shardwise
    >>> w, x = (jax.ShapeDtypeStruct(s, "float32") for s in [(8, 8), (64, 8)])
    >>> def step(w, batch):
    ...     return w - jax.grad(lambda w: ((batch["x"] @ w - batch["y"]) ** 2).sum())(w)
    >>> guessed_batch(shardwise.analyze(step, w, {"x": x, "y": x}).program)
    ('batch',)
    """
    outputs = [program.values[v].type_text for v in program.outputs]
    values = [program.values[a.value] for a in program.arguments]
    sizes: dict[int, int] = {}
    fresh = []
    for v in values:
        if v.type_text in outputs:
            outputs.remove(v.type_text)
        elif v.shape and v.shape[0] > 1:
            fresh.append(v)
            sizes[v.shape[0]] = sizes.get(v.shape[0], 0) + v.nbytes
    examples = max(sizes, key=lambda size: sizes[size], default=0)
    chosen = {v.path for v in fresh if v.shape[0] == examples}
    trees: dict[str, list[str]] = {}
    for v in values:
        trees.setdefault(v.path.partition("/")[0], []).append(v.path)
    found = [[tree] if chosen.issuperset(own) else [p for p in own if p in chosen] for tree, own in trees.items()]
    return tuple(path for own in found for path in own)


def _written(paths: str | Sequence[str]) -> str:
    return repr(paths[0]) if len(paths) == 1 else repr(list(paths))
