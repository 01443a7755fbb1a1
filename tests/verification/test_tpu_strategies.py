"""The strategies of design section 6, compiled by XLA for TPUs where libtpu is installed: the textbook's collectives, and
at least 95% of the bytes as predicted. A small one is in every run; the rest is slow."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.verification.compiled import tpu_environment
from tests.verification import fresh
from tests.verification.strategy_rows import ROWS, large_kinds
from tests.verification.test_tpu import needs_libtpu

QUICK = ("fsdp, small",)


@pytest.fixture(scope="module")
def quick() -> dict[str, Any]:
    return fresh.run("tests.verification.strategy_rows", *QUICK, **tpu_environment())


def check(name: str, found: dict[str, Any]) -> None:
    assert found["matched"] >= 0.95, found["text"]
    assert large_kinds(found["bytes"]) <= ROWS[name].kinds, found["text"]


@needs_libtpu
@pytest.mark.parametrize("name", QUICK)
def test_a_few(name: str, quick: dict[str, Any]) -> None:
    check(name, quick[name])
    assert {"all-gather", "reduce-scatter", "collective-permute"} <= large_kinds(quick[name]["bytes"])


@needs_libtpu
@pytest.mark.slow  # each is a compilation for TPUs
@pytest.mark.parametrize("name", [name for name in ROWS if name not in QUICK])
def test_all(name: str) -> None:
    found = fresh.run("tests.verification.strategy_rows", name, **tpu_environment())[name]
    check(name, found)
    if name == "megatron, wide":
        # Two reductions a layer forward, two backward, two layers.
        assert found["runs"]["all-reduce model"] == 2 * (2 + 2), found["text"]
