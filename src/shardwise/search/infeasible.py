"""What is said where nothing fits: how far the best is from fitting, what takes the memory, and what to try."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from shardwise.cost.predict import Predicted
from shardwise.search.result import Ended

#: How many of the tensors alive at the peak are named.
_NAMED: Final = 6

#: Ends of a search that was cut short.
_SHORT: Final = (Ended.SECONDS, Ended.EVALUATIONS, Ended.INTERRUPTED)


def does_not_fit(
    predicted: Predicted, arguments_bytes: int, devices: int, ended: Ended, evaluations: int, others: Sequence[str] = ()
) -> str:
    """The message for the state with the smallest peak that was found.

    Args:
      predicted: what that state is predicted to take.
      arguments_bytes: what the arguments take of it on one device.
      devices: how many there are.
      ended, evaluations: why the search stopped, and after how much; one that was cut short might have found more.
      others: lines about other meshes that were tried.
    """
    peak, limit = predicted.peak_bytes, predicted.usable_bytes
    lines = [
        f"no plan was found that fits: the smallest peak is {size(peak)} a device, and {predicted.hardware} has "
        f"{size(limit)} a device",
        "largest at the peak:",
    ]
    lines += [f"  {size(a.nbytes):>10}  {a.label}" for a in predicted.alive[:_NAMED]]
    if others:
        lines += ["on other meshes:", *(f"  {line}" for line in others)]
    more = f"more devices (at least {math.ceil(devices * peak / limit)}, if all of it can be split further)"
    inner = ["jax.checkpoint (remat) around the layers", "micro-batches, or a smaller batch"]
    at_rest = ["parameters or optimizer moments in bfloat16"]
    ways = [*at_rest, more, *inner] if 2 * arguments_bytes > peak else [*inner, more, *at_rest]
    if ended in _SHORT:
        ways.insert(0, f"a longer search (budget_s, budget_evals): {ended.value} after {evaluations:,} evaluations")
    lines += [f"the arguments take {size(arguments_bytes)} of it; what to try:", *(f"  {way}" for way in ways)]
    lines.append("allow_infeasible=True gives this plan all the same")
    return "\n".join(lines)


def size(nbytes: float) -> str:
    """
    >>> size(3 * 2**30), size(1536), size(12)
    ('3.00 GiB', '1.50 KiB', '12 B')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes > 0.999 * 2**power:
            return f"{nbytes / 2**power:.2f} {unit}"
    return f"{nbytes:.0f} B"
