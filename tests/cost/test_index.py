"""Numbers by key."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.cost.index import Index
from shardwise.cost.rows import Part, Parts


@pytest.mark.parametrize("shift", [0, 40])
def test_what_is_put_is_found(shift: int) -> None:
    """Shifted they all want the same place."""
    keys = np.random.default_rng(0).permutation(np.arange(1, 6000 >> shift // 10, dtype=np.uint64)) << np.uint64(shift)
    index, known = Index(), len(keys) // 2
    for own in np.array_split(np.arange(known), 7):
        index.put(keys[own[1:]], own[1:])
        index.put_one(keys[own[0]], int(own[0]))
    assert (index.find(keys[:known]) == np.arange(known)).all()
    assert (index.find(keys[known:]) == -1).all()


def test_parts_are_added_up() -> None:
    parts = Parts(4)
    one = parts.add(Part((1, 2, 3), ((np.array([0, 2]), 5), (np.array([1, 3]), -5))))
    two = parts.add(Part((10, 0, 0), ((np.array([1]), 7), (np.array([4]), -7))))
    none = parts.add(Part((0, 0, 1), ()))
    times, curves = parts.sums(np.array([[one, none], [two, none], [one, none]]))
    assert times.tolist() == [[12, 4, 6], [0, 0, 3]]
    assert curves.tolist() == [[10, 7, 17, 7], [0, 0, 0, 0]]
