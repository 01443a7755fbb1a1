"""The same answer whatever the order of Python's hashes, and again in the same process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest

import shardwise
from shardwise import zoo
from shardwise.ir.program import format_program
from shardwise.zoo import registry

TARGETS = ("mixtral:tiny", "gns:tiny", "t2b:tiny,unrolled")


def digest(target: str) -> str:
    """Everything an analysis says, in short, of a program that is built and traced anew."""
    registry._built.cache_clear()
    program = zoo.parse(target)
    analysis = shardwise.analyze(program.fn, *program.args, donate_argnums=program.donate_argnums)
    told = [format_program(analysis.program), str(analysis), json.dumps(analysis.to_json())]
    told += [repr(s) for s in analysis.compatibility_sets]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


@pytest.mark.parametrize("target", TARGETS)
def test_twice_in_one_process(target: str) -> None:
    assert digest(target) == digest(target)


def test_hash_seeds_do_not_matter() -> None:
    code = f"from tests.dims.test_determinism import digest, TARGETS; print([digest(t) for t in {TARGETS!r}])"
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "4242")
    }
    assert told == {f"{[digest(t) for t in TARGETS]}\n"}
