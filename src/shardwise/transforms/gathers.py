"""Parameters are gathered again for the backward pass.

Problem. A parameter that is stored in shards is gathered for its product of the forward pass. Where layers are unrolled, the
backward pass reads the same copy, and all copies are alive at the turn between the passes, as if no parameter were sharded.
Loops over layers do not have this problem: the loop of the backward pass gathers again.

Idea. A barrier stands between a parameter and its readers in the backward pass. Behind it the parameter is another value, which
is gathered separately, as in PyTorch's ``fully_shard(reshard_after_forward=True)``. The barrier also has a cotangent that is
ready a few products earlier, so that XLA does not gather at the start of the program.

Weak. All parameters or none. Layers that are not in the program itself but in a loop's body are left as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from shardwise.capture import jax_internals as internals
from shardwise.capture.trace import Traced
from shardwise.errors import VariantError
from shardwise.transforms.blocks import Block, cotangent_at
from shardwise.transforms.flat import Flat, spliced
from shardwise.transforms.remat import rematerialized

_PRODUCTS: Final = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general"})
_VIEWS: Final = frozenset({"convert_element_type", "copy", "reshape", "squeeze", "transpose"})
#: A copy is kept if less than this share of all products is computed between its reads.
_FAR: Final = 1 / 8
#: The number of products before the first one that reads a parameter again, from which on it can be gathered.
_AHEAD: Final = 4


def gather_again(traced: Traced) -> Traced:
    """Returns a traced function whose backward pass reads parameters behind barriers."""
    flat = Flat(traced.jaxpr)
    blocks = find_barriers(flat)
    if not blocks:
        raise VariantError(
            f"{traced.name} has no parameter that products of the forward and of the backward pass read far apart"
        )
    return replace(traced, jaxpr=spliced(internals.retrace(rematerialized(flat, (), blocks), traced.jaxpr)))


def find_barriers(flat: Flat) -> dict[int, list[Block]]:
    """Returns, by step, the parameters that are read behind a barrier from there on."""
    products = [k for k, step in enumerate(flat.steps) if step.name in _PRODUCTS]
    before = [0]  # by step: how many products come before it
    for step in flat.steps:
        before.append(before[-1] + (step.name in _PRODUCTS))
    barriers: dict[int, list[int]] = {}
    for value in _parameters(flat):
        users = flat.users.get(value, ())
        forward = [k for k in users if not flat.steps[k].is_backward and flat.steps[k].name in _PRODUCTS]
        backward = [k for k in users if flat.steps[k].is_backward and flat.steps[k].name in _PRODUCTS | _VIEWS]
        if forward and backward and before[backward[0]] - before[forward[-1]] > max(_AHEAD, _FAR * len(products)):
            early = products[max(before[backward[0]] - _AHEAD, before[forward[-1]])]
            at = next((at for at in (early, backward[0]) if cotangent_at(flat, at) is not None), None)
            if at is not None:
                barriers.setdefault(at, []).append(value)
    blocks: dict[int, list[Block]] = {}
    for at, values in barriers.items():
        cotangent = cotangent_at(flat, at)
        assert cotangent is not None
        blocks[at] = [Block(at, (), tuple(values), (), cotangent)]
    return blocks


def _parameters(flat: Flat) -> list[int]:
    """Returns the arguments, and views of them that the forward pass makes."""
    values = dict.fromkeys(flat.inputs)
    for step in flat.steps:
        if step.name in _VIEWS and not step.is_backward and all(v in values for v in step.reads):
            values |= dict.fromkeys(step.results)
    return list(values)
