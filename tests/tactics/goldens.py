"""The specs that named strategies give the arguments of transformers, as text.

``python -m tests.tactics.goldens`` writes ``tests/tactics/goldens/*.txt`` anew. Review the difference: every line should be
what a practitioner would write. Parameters of repeated layers are one line (``*`` for their numbers). Moments are left out, as
they follow the parameters except under ZeRO; so are arguments that nothing shards. Small arguments, which a plan keeps
replicated, are shown as the strategy shards them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from shardwise import zoo
from shardwise.capture.trace import JitOptions
from shardwise.errors import DecisionError
from shardwise.lowering.decisions import State
from shardwise.lowering.lowered import Lowered
from shardwise.planner.inquiry import Inquiry, Variants
from shardwise.planner.mesh import placement_of
from shardwise.tactics.roles import complete_roles
from shardwise.tactics.tactic import decide
from shardwise.tactics.text import as_tactics
from shardwise.transforms.variants import AS_IS
from tests.programs import mixtures
from tests.programs.codings import experts_by_scatter, fused_projections, latent_attention
from tests.programs.equinox_programs import attention_block
from tests.programs.flax_programs import linen_language_model, nnx_language_model
from tests.programs.haiku_programs import penzai_llama, stacked_attention

FOLDER: Final = Path(__file__).parent / "goldens"
MESH: Final = {"data": 4, "model": 4}
STRATEGIES: Final = (
    "dp:data",
    "fsdp:data",
    "fsdp:data+model",
    "zero1:data",
    "zero2:data",
    "megatron:model",
    "dp:data,megatron:model",
    "megatron:model,dp:data",
    "dp:data,megatron:model,sequence:model",
    "dp:data,feedforward:model,sequence:model",
    "fsdp:data,megatron:model",
    "dp:data,megatron:model,vocabulary:model",
    "dp:data,context:model",
    "expert:model,dp:data+model",
)
_ZOO: Final = (
    "t2b:2b,layers=2 t7b:7b,layers=2 gpt:2.6b,layers=2 gpt:2.6b,layers=2,unrolled llama3:8b,layers=2 mixtral:8x7b,layers=2 "
    "deepseek:671b,layers=4,batch=64 t5:3b,layers=2 vit:l16,layers=2 itx:prefill,layers=2 itx:step,layers=2"
).split()


def _zoo(target: str) -> Callable[[], tuple[Any, tuple[Any, ...]]]:
    def build() -> tuple[Any, tuple[Any, ...]]:
        program = zoo.parse(target)
        return program.fn, program.args

    return build


PROGRAMS: Final[dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]]] = {
    **{re.sub(r"\W+", "-", target): _zoo(target) for target in _ZOO},
    "linen-language-model": linen_language_model,
    "nnx-language-model": nnx_language_model,
    "equinox-attention": attention_block,
    "haiku-layer-stack": stacked_attention,
    "penzai-llama": lambda: penzai_llama(False),
    "latent-attention": latent_attention,
    "fused-projections": fused_projections,
    "experts-by-scatter": experts_by_scatter,
    "experts-and-heads-under-vmap": lambda: mixtures.training(
        mixtures.vmapped_heads, mixtures.all_experts, {"attention": mixtures.HEADS, "mlp": mixtures.EXPERTS}
    ),
    "sorted-experts-block-diagonal-heads": lambda: mixtures.training(
        mixtures.block_diagonal_heads,
        mixtures.sorted_by_expert,
        {"attention": mixtures.BLOCKS, "mlp": mixtures.EXPERTS},
        scanned=True,
    ),
    "few-key-value-heads": lambda: mixtures.training(
        mixtures.few_key_value_heads, mixtures.dense, {"attention": mixtures.FEW, "mlp": mixtures.DENSE}
    ),
    "few-flat-heads": lambda: mixtures.training(
        mixtures.few_flat_heads, mixtures.dense, {"attention": mixtures.FEW_FLAT, "mlp": mixtures.DENSE}, scanned=True
    ),
    "grouped-queries": lambda: mixtures.training(
        mixtures.grouped_queries, mixtures.dense, {"attention": mixtures.FEW_FLAT, "mlp": mixtures.DENSE}
    ),
}


def text(name: str) -> str:
    """The golden of one program."""
    fn, args = PROGRAMS[name]()
    captured = Variants(fn, args, {}, JitOptions())[AS_IS]
    roles = complete_roles(captured.analysis, None)
    inquiry = captured.inquiry(placement_of(MESH, "v5e:4x4"), roles)
    optimizer = {value.path for value in inquiry.context.arguments(roles.get("optimizer", ()))}
    lines = []
    for strategy in STRATEGIES:
        lines.append(strategy)
        hidden = set() if strategy.startswith("zero") else optimizer
        lines += [f"  {line}" for line in _specs(inquiry, strategy, hidden)]
    return "\n".join(lines) + "\n"


def _specs(inquiry: Inquiry, strategy: str, hidden: set[str]) -> list[str]:
    """One line for each argument that is sharded."""
    mesh, program = inquiry.context.mesh, inquiry.analysis.program
    try:
        decisions = decide(inquiry.context, as_tactics(strategy))
    except DecisionError as error:
        return [f"does not apply: {error}"]
    lowered = Lowered(inquiry.model.structure, State(mesh, tuple(decisions)), inquiry.cost)
    lines: dict[str, None] = {}
    for value in (program.values[a.value] for a in program.arguments if a.path not in hidden):
        spec = lowered.storage[value.id].spec(mesh)
        if any(spec):
            sizes = zip(value.shape, spec, strict=True)
            dims = ", ".join(f"{size}/{'·'.join(axes)}" if axes else str(size) for size, axes in sizes)
            lines[f"{re.sub(r'(?<![^/_])[0-9]+(?![^/])', '*', value.path)} [{dims}]"] = None
    return list(lines) or ["nothing is sharded"]


if __name__ == "__main__":
    for program in PROGRAMS:
        (FOLDER / f"{program}.txt").write_text(text(program))
