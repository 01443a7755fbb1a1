"""Functions of angles take longer where the hardware profile says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from shardwise.hardware.load import load_profile
from tests.cost.test_compute import predicted, seconds
from tests.dims import programs as p


@pytest.mark.parametrize(("name", "factor"), [("v5e", 16.0), ("h100", 1.0), ("cpu", 1.0)])
def test_sines_take_as_often_as_long_as_other_functions_as_the_profile_says(name: str, factor: float) -> None:
    device = replace(
        load_profile(name), memory_bytes_per_s=1e30, elements_per_s=1e30, launch_s=0.0, vector_flops_per_s=1e9
    )

    def time_s(fn: Any) -> float:
        return sum(seconds(predicted(fn, [p.shape(64, 128)]), device))

    assert time_s(jnp.sin) == time_s(jnp.cos) == pytest.approx(factor * time_s(jnp.exp))
