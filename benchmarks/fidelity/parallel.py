"""Which planned steps run on eight host devices (``host.py``).

Cases come in an order of breadth, so that a run that is cut short has some of every program.

Programs compute in float32 (``computing``): XLA's CPU backend has no bfloat16 for much of what they do and converts to and fro,
at a price that depends on shapes and that no profile has. Lines without ``compute`` are of bfloat16.

Two more things that host devices have and accelerators have not are kept out of the way, as no profile has them either:

- XLA's CPU backend asks the C library for the memory of every step and gives it back; the kernel then clears it page by page
  (gigabytes a step: a quarter of the time of some). Under ``TUNABLES`` it does so with large pages.
- It keeps every array in one layout and transposes gradients inside of loops. At a stride of a power of two all reads of a
  column fall into the same few lines of the cache, and an element takes six times as long. So sizes are not powers of two.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

from benchmarks.fidelity.cases import STRATEGIES, Case, Program

DEVICES: Final = 8
COMPUTE: Final = "float32"
#: Read by the C library when a process starts, so that ``python -m`` starts itself again with them.
TUNABLES: Final = "glibc.malloc.hugetlb=1"
MESHES: Final[dict[int, tuple[tuple[int, ...], ...]]] = {1: ((8,),), 2: ((2, 4), (4, 2))}
_LM: Final = (
    "dp", "fsdp", "megatron", "dp+megatron", "zero2", "fsdp+megatron", "replicated", "dp+context", "dp+megatron+sequence",
    "dp+fsdp", "dp+vocabulary",
)  # fmt: skip
_MOE: Final = (
    "dp",
    "fsdp",
    "expert",
    "expert+megatron",
    "dp+megatron",
    "megatron",
    "fsdp+megatron",
    "replicated",
    "zero2",
)
_PLAIN: Final = ("dp", "fsdp", "megatron", "dp+megatron", "zero2", "fsdp+megatron", "replicated", "dp+fsdp")
_GRAPH: Final = ("edges", "dp", "fsdp", "megatron", "edges+megatron", "replicated", "fsdp+megatron", "zero2")


def _program(name: str, strategies: tuple[str, ...], **options: Any) -> Program:
    config = options.pop("config", None)
    return Program(name, config, tuple(options.items()), strategies)


#: About 30 to 70 GFLOP a step: a tenth of a second or more on 16 cores, and eight times that where all is replicated.
FULL: Final = (
    _program("gpt", _LM, layers=2, batch=16, seq=64, d=448, heads=8, head=56, ffn=1984, vocab=4032),
    _program("mlp", _PLAIN, layers=3, batch=512, features=960, width=1984, classes=960),
    _program("t2b", _LM, layers=2, batch=16, seq=64, d=448, heads=8, head=56, ffn=992, vocab=8128),
    _program("mixtral", _MOE, layers=2, batch=16, seq=128, d=240, heads=8, kv_heads=8, head=40, ffn=496, group=128, vocab=2016),
    _program("gns", _GRAPH, layers=3, mlp_layers=3, hidden=240, latent=120, nodes=960, edges=8000, node_features=32),
    _program("vit", _PLAIN, layers=3, batch=32, image=64, patch=8, d=384, heads=8, ffn=1440, classes=1000),
)  # fmt: skip
TINY: Final = tuple(Program(p.name, "tiny", (), p.strategies) for p in FULL)


def cases(scale: str) -> Iterator[Case]:
    """Strategies by rank, each of every program, on the first mesh that has its axes; then the other meshes."""
    chosen = TINY if scale == "tiny" else FULL
    for place in range(max(map(len, MESHES.values()))):
        for rank in range(max(len(p.strategies) for p in chosen)):
            for program in chosen:
                if rank < len(program.strategies):
                    strategy = program.strategies[rank]
                    axes = STRATEGIES[strategy][0]
                    shapes = MESHES[len(axes)]
                    if place < len(shapes):
                        yield Case(program, strategy, "host", tuple(zip(axes, shapes[place], strict=True)))


@contextlib.contextmanager
def computing(dtype: str) -> Iterator[None]:
    """The zoo's programs, loaded and traced inside, compute in this type; their parameters are float32 in any case."""
    import jax
    import jax.numpy as jnp

    from shardwise import zoo

    for module in pkgutil.iter_modules(zoo.__path__):  # one that came later would keep the type of that moment
        importlib.import_module(f"{zoo.__name__}.{module.name}")
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("shardwise.zoo.") and hasattr(module, "COMPUTE"):
                stack.enter_context(mock.patch.object(module, "COMPUTE", getattr(jnp, dtype)))
        jax.clear_caches()  # JAX's traces of layers do not see that a global variable has changed
        stack.callback(jax.clear_caches)
        yield
