"""Numbers by key."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.evaluator.index import Index


@pytest.mark.parametrize("shift", [0, 40])
def test_what_is_put_is_found(shift: int) -> None:
    """Shifted they all want the same place."""
    keys = np.random.default_rng(0).permutation(np.arange(1, 6000 >> shift // 10, dtype=np.uint64)) << np.uint64(shift)
    index, known = Index(), len(keys) // 2
    for number in range(known):
        index.put_one(keys[number], number)
    assert (index.find(keys[:known]) == np.arange(known)).all()
    assert (index.find(keys[known:]) == -1).all()
