"""Small arguments stay whole, and the plan says so."""

from __future__ import annotations

import shardwise
from shardwise import zoo
from shardwise.tactics.strategies import FSDP
from tests.dims.programs import shape


def fsdp(target: str, **more) -> shardwise.Plan:
    program = zoo.parse(target)
    roles = {"batch": "batch", "params": "params"}
    return shardwise.plan(program.fn, *program.args, mesh={"data": 8}, tactics=[FSDP("data")], roles=roles, **more)


def test_norms_stay_whole_with_their_moments() -> None:
    plan = fsdp("t2b:layers=2")
    norms = [a for a in (*plan.arguments, *plan.outputs) if a.path.endswith("norm")]
    assert len(norms) == 3 * 3 * 2 and not any(axes for a in norms for axes in a.spec)
    assert any("small" in str(d) for d in plan.small)
    assert plan.array("params/embed").spec == ((), ("data",))
    gathered = [c for c in plan.collectives if c.kind == "all-gather"]
    assert min(c.nbytes for c in gathered) > 60_000


def test_a_pin_is_stronger() -> None:
    plan = fsdp("t2b:layers=2", pins={"params/final_norm": ("data",)})
    assert plan.array("params/final_norm").spec == (("data",),)


def test_what_is_not_a_thousandth_is_not_small() -> None:
    def fn(w, x):
        return x @ w

    plan = shardwise.plan(
        fn, shape(16, 16), shape(32, 16), mesh={"data": 8}, tactics=[FSDP("data")], roles={"batch": "x", "params": "w"}
    )
    assert any(plan.array("w").spec)
