"""Which variants of a program the race looks at, and what it expects of micro-batches."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwise
from shardwise import zoo
from shardwise.cost.memory import BLOCK
from shardwise.planner.arms import Arm
from shardwise.planner.asked import Asked, candidate_meshes
from shardwise.planner.inquiry import Variants
from shardwise.planner.planning import asked_of
from shardwise.planner.race_log import search_log
from shardwise.planner.racing import Race, choose
from shardwise.plans.search_log import NOT_FOUND
from shardwise.search.searcher import Journal
from shardwise.transforms.variants import AS_IS, Variant
from shardwise.units import binary


def asked_for(options: dict[str, Any]) -> Asked:
    defaults = {name: value for name, value in (shardwise.plan.__kwdefaults__ or {}).items() if name != "kwargs"}
    return asked_of(**defaults | options)


def arm_of(program: zoo.ZooProgram, options: dict[str, Any], memory_limit: str) -> Arm:
    """The unchanged program on devices with less memory."""
    asked = asked_for(options | {"memory_limit": memory_limit})
    captured = Variants(program.fn, program.args, {}, asked.jit)[AS_IS]
    return Arm(captured, candidate_meshes(asked)[0][0], asked, Journal(asked.search), quick=True)


_HIGH = pytest.mark.xfail(strict=True, reason="6% high: reductions of all devices of a torus are whole all-reduces")


@pytest.mark.parametrize(
    ("strategy", "share", "scan"),
    [
        pytest.param("fsdp:data", 0.97, True, marks=_HIGH),
        ("fsdp:data", 0.97, False),
        ("dp:data", 0.7, True),
        ("dp:data", 0.8, False),
    ],
)
def test_the_time_of_a_state_in_micro_batches_is_known_before_they_are_traced(
    strategy: str, share: float, scan: bool
) -> None:
    """Data parallelism needs so many that a device has one example in each: products of few rows take longer, and they are most
    of the step."""
    program = zoo.load("gpt", "2.6b", layers=2, batch=256, scan=scan)
    options: dict[str, Any] = {"mesh": {"data": 16}, "topology": "v5e:4x4", "tactics": strategy}
    options |= {"roles": {"batch": "batch", "params": "params"}, "donate_argnums": program.donate_argnums}
    (candidate,) = arm_of(program, options, "5GiB").candidates(math.inf)
    plan = shardwise.plan(program.fn, *program.args, microbatches=candidate.microbatches, **options)
    assert candidate.microbatches > 1
    assert share * plan.predicted.time_s < candidate.in_parts_ps * 1e-12 < 1.03 * plan.predicted.time_s


def test_gathering_again_is_not_expected_to_save_less_memory_than_it_does() -> None:
    program = zoo.load("gpt", "2.6b", layers=6, batch=16, scan=False)
    options: dict[str, Any] = {"mesh": {"data": 16}, "topology": "v5e:4x4", "tactics": "fsdp:data"}
    options |= {"roles": {"batch": "batch", "params": "params"}, "donate_argnums": program.donate_argnums}
    arm = arm_of(program, options, "2GiB")
    (in_parts,), (again,) = arm.candidates(math.inf), arm.candidates(math.inf, gathers=True)
    (repeated,) = arm._repeated.values()
    plain = shardwise.plan(program.fn, *program.args, **options).predicted
    found = shardwise.plan(program.fn, *program.args, remat="gathers", **options).predicted
    assert in_parts.microbatches == 4 and again.microbatches == 1
    assert again.in_parts_ps == again.time_ps <= found.time_s * 1e12
    assert plain.peak_bytes - BLOCK * repeated.copies.max() <= found.peak_bytes < plain.peak_bytes


def test_gathered_copies_are_not_expected_to_shrink_in_micro_batches() -> None:
    """Two micro-batches would fit if all temporaries shrank in proportion."""
    program = zoo.load("gpt", "2.6b", layers=6, batch=64, scan=False)
    options: dict[str, Any] = {"mesh": {"data": 16}, "topology": "v5e:4x4", "tactics": "fsdp:data"}
    options |= {"roles": {"batch": "batch", "params": "params"}, "donate_argnums": program.donate_argnums}
    (candidate,) = arm_of(program, options, "3.3GiB").candidates(math.inf)
    two = shardwise.plan(program.fn, *program.args, microbatches=2, **options)
    assert candidate.microbatches == 4 and two.predicted.peak_bytes > 3.3 * 2**30


def test_what_is_slower_rematerialized_is_not_looked_at() -> None:
    """The products that are computed again take longer than the collectives of micro-batches."""
    program = zoo.load("gpt", "39b", layers=2, scan=False)
    options: dict[str, Any] = {"mesh": {"data": 8}, "topology": "v5p:2x2x2", "donate_argnums": program.donate_argnums}
    options |= {"memory_limit": "70GiB", "tactics": "fsdp:data", "microbatches": "auto", "remat": "auto"}
    options |= {"roles": {"batch": "batch", "params": "params"}}
    asked = asked_for(options)
    outcome = choose(Variants(program.fn, program.args, {}, asked.jit), asked)
    assert outcome.decided.fits and outcome.captured.variant.microbatches > 1
    assert not any("remat" in tried.variant for tried in outcome.tried)
    again = asked_for(options | {"microbatches": None, "remat": True})
    slower = choose(Variants(program.fn, program.args, {}, again.jit), again).decided
    assert slower.fits and outcome.decided.total.time_ps < slower.total.time_ps


@pytest.mark.parametrize(
    ("target", "topology", "remat"),
    [("vit:l16,layers=2,batch=128", "h100:8", True), ("llama3:8b,layers=2,batch=8,seq=2048", "v5p:2x2x2", False)],
)
def test_what_fits_is_rematerialized_where_that_is_faster(target: str, topology: str, remat: bool) -> None:
    """What the loop over layers stores in the forward pass takes longer to write and to read than to compute again."""
    program = zoo.parse(target)
    options: dict[str, Any] = {"mesh": {"data": 8}, "topology": topology, "donate_argnums": program.donate_argnums}
    options |= {"tactics": "fsdp:data", "roles": {"batch": "batch", "params": "params"}}
    times = [
        shardwise.plan(program.fn, *program.args, remat=again, **options).predicted.time_s for again in (False, True)
    ]
    plan = shardwise.plan(program.fn, *program.args, remat="auto", **options)
    assert (times[1] < times[0]) == remat and plan.predicted.time_s == min(times)


def test_the_error_of_a_micro_batch_does_not_replace_that_of_the_program() -> None:
    """With two micro-batches of two examples there is no batch dimension any more."""
    args = [jax.ShapeDtypeStruct(s, "float32") for s in [(64, 64), (2, 64)]]
    with pytest.raises(shardwise.ShardwiseError, match="no argument has the path 'w/nope'"):
        shardwise.plan(
            lambda w, x: w - 0.1 * x.T @ (x @ w),
            *args,
            mesh={"data": 2, "model": 2},
            tactics="dp:data,auto:model@w/nope",
            roles={"batch": "x", "params": "w"},
            microbatches="auto",
        )


def looped(w: jax.Array, x: jax.Array) -> jax.Array:
    """A step whose activations take more memory than its weights."""

    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0] ** 2)

    return w - 0.1 * jax.grad(loss)(w)


def test_it_is_said_not_to_fit_only_with_a_proof() -> None:
    """Below the bound of the program as it is, above it where no plan is found, and where one fits."""
    args = [jax.ShapeDtypeStruct(s, "float32") for s in [(8, 256, 256), (16384, 256)]]
    where: dict[str, Any] = {"mesh": {"x": 4}, "topology": "v5e:2x2", "roles": {"batch": "x", "params": "w"}}
    asked = asked_for(where)
    captured = Variants(looped, tuple(args), {}, asked.jit)[AS_IS]
    least = Arm(captured, candidate_meshes(asked)[0][0], asked, Journal(asked.search), quick=True).least_bytes
    said = {}
    for limit in (least - 2**20, least + 2**10):
        plan = shardwise.plan(
            looped, *args, memory_limit=limit, microbatches="auto", remat="auto", budget_evals=100, **where
        )
        assert plan.predicted.fits and plan.search is not None
        first = plan.search.variants[0]
        (said[limit],) = (note for note in plan.notes if note.startswith("unchanged, "))
        assert first.variant == "as it is" and not first.fits and first.proven == (limit < least)
        assert (first.why == NOT_FOUND) == (limit > least)
    proof, none = said.values()
    assert proof == f"unchanged, the program does not fit: at least {binary(least)} per device"
    assert none.startswith("unchanged, no plan was found that fits: ") and none.endswith(
        "(not proven, and not fully searched)"
    )


def test_a_mesh_is_said_not_to_fit_only_if_all_variants_are_proven_not_to() -> None:
    args = [jax.ShapeDtypeStruct(s, "float32") for s in [(8, 256, 256), (16384, 256)]]
    where: dict[str, Any] = {"topology": "v5e:2x2", "roles": {"batch": "x", "params": "w"}, "memory_limit": 2**21}
    asked = asked_for({**where, "remat": "auto", "budget_evals": 20})
    race = Race(Variants(looped, tuple(args), {}, asked.jit), asked)
    race.run(anyway=True)
    usable = race.arms[0].usable_bytes
    for placement in race.placed:
        least = race.least_bytes(placement)
        assert least is not None and least > usable
    race.every.append(Variant(microbatches=2, batch=("x",)))  # nobody has looked at it
    assert all(race.least_bytes(placement) is None for placement in race.placed)
    rows = search_log(race, race.arms[0].best, race.arms[0].placement.mesh).meshes
    assert rows and all(row.why == NOT_FOUND and not row.proven for row in rows)


def test_micro_batches_are_looked_at_only_if_they_could_win() -> None:
    """Neither program fits as it is, which is proven, and both fit rematerialized."""

    def tried(name: str, config: str, topology: str, devices: int) -> tuple[list[str], str, int]:
        program = zoo.load(name, config)
        options: dict[str, Any] = {"topology": topology, "donate_argnums": program.donate_argnums}
        options |= {"mesh": {"fsdp": devices}, "microbatches": "auto", "remat": "auto"}
        plan = shardwise.plan(program.fn, *program.args, **options)
        assert plan.search is not None and plan.predicted.fits
        return [t.variant for t in plan.search.variants], str(plan.variant), len(plan.mesh.names)

    assert tried("t2b", "2b", "v5e:2x4", 8) == (["as it is", "rematerialized"], "rematerialized", 1)
    # The axis is split though the program as it is fits on no mesh.
    assert tried("llama3", "8b", "v5e:4x4", 16)[1:] == ("32 micro-batches, rematerialized", 2)
