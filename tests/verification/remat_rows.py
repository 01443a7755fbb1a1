"""``python -m tests.verification.remat_rows PROGRAM``: the peak of a program of the zoo, unrolled, under FSDP on v5e:4x4, as it
is, rematerialized, and with ``jax.checkpoint`` by hand: predicted, and as XLA's TPU compiler has it."""

from __future__ import annotations

import json
import sys

import shardwise
from shardwise import zoo
from shardwise.tactics.strategies import FSDP


def peaks(text: str, remat: bool) -> tuple[int, int]:
    program = zoo.parse(text)
    plan = shardwise.plan(
        program.fn,
        *program.args,
        mesh={"data": 16},
        topology="v5e:4x4",
        tactics=[FSDP("data")],
        roles={"batch": "batch", "params": "params"},
        donate_argnums=program.donate_argnums,
        remat=remat,
    )
    memory = shardwise.verify(plan, program.fn, *program.args, backend="v5e:4x4").compiled.memory
    assert memory is not None
    return plan.predicted.peak_bytes, memory.peak_bytes


def main(text: str) -> None:
    cases = {"plain": (text, False), "again": (text, True), "by hand": (f"{text},remat", False)}
    print(json.dumps({name: peaks(*case) for name, case in cases.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
