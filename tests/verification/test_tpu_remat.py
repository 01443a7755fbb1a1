"""Unrolled layers that are computed again take less memory by XLA's TPU compiler, too, and as much as predicted."""

from __future__ import annotations

import pytest

from shardwise.verification.compiled import tpu_environment
from tests.verification import fresh
from tests.verification.test_tpu import needs_libtpu


@needs_libtpu
@pytest.mark.slow  # three compilations for TPUs
def test_the_peak_of_unrolled_layers() -> None:
    program = "gpt:2.6b,unrolled,layers=3,batch=32,d=1280,head=40,ffn=5120"
    found = fresh.run("tests.verification.remat_rows", program, **tpu_environment())
    (_, plain), (predicted, again), (_, by_hand) = found["plain"], found["again"], found["by hand"]
    assert again < 0.7 * plain and again <= 1.02 * by_hand
    assert 0.85 * again <= predicted <= 1.15 * again
