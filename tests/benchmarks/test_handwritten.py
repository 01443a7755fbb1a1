"""The hand-written programs of the benchmark compute what the plain ones do, on eight host devices."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from benchmarks.fidelity.parallel import computing
from benchmarks.handwritten import CASES, HOW, Scatter, check, native, page, ring
from shardwise.verification.compiled import make_mesh
from shardwise.zoo.registry import config_of

LLAMA = partial(config_of, "llama3", "tiny", layers=1)
MIXTRAL = config_of("mixtral", "tiny", layers=1)
STEP = partial(config_of, "itx", "tiny-step")


@pytest.mark.parametrize(
    ("name", "config", "scatter"),
    [
        ("FSDP, 1,024 wide", LLAMA(), ring),
        ("context, 1 x 8,192 tokens", LLAMA(batch=1), native),
        ("context, 4 x 8,192 tokens", LLAMA(batch=4), ring),
        ("experts", MIXTRAL, native),
        ("decode, layers scanned", STEP(), native),
        ("decode, layers unrolled", STEP(scan=False), native),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hand_written_programs_compute_what_the_plain_ones_do(name: str, config: Any, scatter: Scatter) -> None:
    case = CASES[name]
    sizes = dict(zip(case.mesh, (2, 4), strict=True))
    with computing("float32"):
        assert check(replace(case, config=config, mesh=sizes), make_mesh(sizes), scatter) < 1e-5


def test_the_page_compares_with_the_faster_hand_written_program() -> None:
    times = dict(zip(HOW, (0.020, 0.010, 0.011), strict=True))
    records = {
        ("experts", how): {"compiled": {"time_s": s, "serial_s": 2 * s, "peak": 2**30}} for how, s in times.items()
    }
    row = next(line for line in page(records).splitlines() if line.startswith("| experts |"))
    assert row == "| experts | 20.0 (40.0), 1.00 | 10.0 (20.0), 1.00 | 11.0 (22.0), 1.00 | 1.100 |"
