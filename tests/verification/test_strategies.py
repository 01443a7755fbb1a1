"""The named strategies on the compiled program: bytes by kind and axes, on host devices, as predicted."""

from __future__ import annotations

import functools
import math

import pytest

import shardwise
from shardwise import zoo
from shardwise.hardware.layout import ideal
from shardwise.hardware.mesh import MeshAxes
from shardwise.tactics.strategies import FSDP, DataParallel
from shardwise.verification.verify import Verification
from tests.verification.strategy_rows import ROWS, bytes_by_kind, large_kinds

#: Compiled for TPUs only: too wide for this machine's memory, a mesh of more devices, or one of fewer.
HOST = [name for name in ROWS if name not in ("megatron, wide", "fsdp, megatron", "fsdp, small")]


@functools.cache
def verified(name: str) -> Verification:
    return ROWS[name].verified(8, "host")


@pytest.mark.parametrize("name", HOST)
def test_compiled_as_predicted(name: str) -> None:
    found = verified(name)
    assert found.matched >= 0.99, str(found)
    assert large_kinds(bytes_by_kind(found)) <= ROWS[name].kinds, str(found)


def test_fsdp_moves_no_more_than_the_textbook() -> None:
    """Parameters gathered forward and backward in the dtype they are used in, gradients scattered once."""
    found = verified("fsdp")
    arguments = found.plan.arguments
    parameters = sum(math.prod(a.shape) * 2 for a in arguments if a.path.startswith("params") and len(a.shape) > 1)
    kinds = bytes_by_kind(found)
    scattered = kinds.get("reduce-scatter", 0.0) + kinds.get("collective-permute", 0.0)
    assert kinds["all-gather"] <= 2 * parameters and scattered <= parameters, (kinds, parameters)


def test_constraints_are_a_handful() -> None:
    program = zoo.parse("t2b:tiny")
    where = {"topology": ideal(MeshAxes.of({"data": 8}), "v5e"), "roles": {"batch": "batch", "params": "params"}}
    for tactic, most in ((DataParallel("data"), 0), (FSDP("data"), 5)):
        plan = shardwise.plan(program.fn, *program.args, tactics=[tactic], **where)
        assert len(plan.constraints) <= most, plan.constraints


def test_a_run_is_compared_too() -> None:
    program = zoo.parse("mlp:tiny")
    args = program.make_args(0)
    plan = shardwise.plan(program.fn, *args, mesh={"data": 8}, tactics=[DataParallel("data")], roles={"batch": "batch"})
    found = shardwise.verify(plan, program.fn, *args)
    assert found.differences is not None and len(found.differences) == len(plan.outputs)
    loss = next(d for d in found.differences if d.path == "out/2")
    assert loss.relative < 1e-4
    assert found.agrees
    assert "as predicted" in str(found)
