"""The named strategies on the compiled program: bytes by kind and axes, on host devices, as predicted."""

from __future__ import annotations

import pytest

import shardwise
from shardwise import zoo
from shardwise.tactics.strategies import FSDP, ContextParallel, DataParallel, EdgeSharding, Megatron, ZeRO2
from shardwise.verification.verify import Verification

SEQUENCE = ("batch/inputs", 1)


def verified(target: str, mesh: dict[str, int], *tactics) -> Verification:
    program = zoo.parse(target)
    plan = shardwise.plan(
        program.fn, *program.args, mesh=mesh, tactics=tactics, roles={"batch": "batch", "params": "params"}
    )
    return shardwise.verify(plan, program.fn, *program.args)


@pytest.mark.parametrize(
    ("target", "mesh", "tactics", "least"),
    [
        ("t2b:tiny", {"data": 8}, [DataParallel("data")], 0.999),
        ("t2b:tiny", {"data": 8}, [FSDP("data")], 0.98),
        ("t2b:tiny", {"data": 8}, [ZeRO2("data")], 0.98),
        ("t2b:tiny", {"data": 2, "seq": 4}, [DataParallel("data"), ContextParallel("seq", SEQUENCE)], 0.999),
        # XLA's CPU compiler does not reassociate the reductions of dq·Wq + dk·Wk + dv·Wv; its TPU compiler does.
        ("t2b:tiny", {"data": 2, "model": 4}, [DataParallel("data"), Megatron("model")], 0.85),
        ("gns:tiny", {"edge": 8}, [EdgeSharding("edge", ("batch/edges", 0))], 0.95),
    ],
    ids=["data parallel", "fsdp", "zero2", "context parallel", "megatron", "edges"],
)
def test_compiled_as_predicted(target: str, mesh: dict[str, int], tactics, least: float) -> None:
    found = verified(target, mesh, *tactics)
    assert found.matched >= least, str(found)


def test_kinds_of_the_textbook() -> None:
    def kinds(found: Verification) -> set[str]:
        large = max(r.compiled_bytes for r in found.rows)
        return {r.kind for r in found.rows if r.compiled_bytes > 0.01 * large}

    assert kinds(verified("t2b:tiny", {"data": 8}, DataParallel("data"))) == {"all-reduce"}
    assert kinds(verified("t2b:tiny", {"data": 8}, FSDP("data"))) <= {"all-gather", "reduce-scatter", "all-to-all"}


def test_constraints_are_a_handful() -> None:
    program = zoo.parse("t2b:tiny")
    where = {"mesh": {"data": 8}, "roles": {"batch": "batch", "params": "params"}}
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
