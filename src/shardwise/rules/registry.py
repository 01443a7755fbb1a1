"""Which rule belongs to which primitive, and the door for users' own.

A primitive has a rule, or it is one of the few *opaque* ones, listed here with the reason, or it is unknown. Opaque and
unknown ones get the safe rule (every dimension whole) and are reported. Control flow and calls are not here: capture takes
them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from shardwise.errors import RuleError
from shardwise.ir.notation import parse_rule
from shardwise.ir.rule import Rule, check_rule
from shardwise.ir.traits import SCATTERS
from shardwise.rules import contraction, indexing, reduction, shape, transforms
from shardwise.rules.attention import fused_attention
from shardwise.rules.call import OpCall, opaque, passing, pointwise
from shardwise.rules.elementwise import ELEMENTWISE, PASSING
from shardwise.rules.kernels import pallas_rule
from shardwise.rules.tables import LINEAR_ALGEBRA, RANDOM

RuleFunction = Callable[[OpCall], Rule | str | None]


def _first_form(forms: tuple[str, ...]) -> Callable[[OpCall], Rule]:
    def rule(call: OpCall) -> Rule:
        for text in forms:
            left, right = text.split(";")[0].split("->")
            if left.count("(") == len(call.operands) and right.count("(") == len(call.results):
                return parse_rule(text, call.operands, call.results)
        raise RuleError(f"{call.kind}: no form for {len(call.operands)} operands and {len(call.results)} results")

    return rule


RULES: Final[dict[str, Callable[[OpCall], Rule]]] = {
    **dict.fromkeys(ELEMENTWISE, pointwise),
    **dict.fromkeys(PASSING, passing),
    **{name: _first_form(forms) for name, forms in {**LINEAR_ALGEBRA, **RANDOM}.items()},
    **{name: reduction.simple_reducer(reducer) for name, reducer in reduction.REDUCERS_BY_KIND.items()},
    **dict.fromkeys(reduction.CUMULATIVE, reduction.cumulative),
    **dict.fromkeys(SCATTERS, indexing.scatter),
    **dict.fromkeys(
        ["reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add"],
        reduction.reduce_window,
    ),
    **dict.fromkeys(["select_and_scatter", "select_and_scatter_add"], reduction.select_and_scatter),
    "approx_top_k": reduction.top_k,
    "bitcast_convert_type": shape.bitcast_convert_type,
    "broadcast_in_dim": shape.broadcast_in_dim,
    "broadcast_to": shape.broadcast_to,
    "concatenate": shape.concatenate,
    "conv_general_dilated": contraction.conv_general_dilated,
    "dot_general": contraction.dot_general,
    "dynamic_slice": indexing.dynamic_slice,
    "dynamic_update_slice": indexing.dynamic_update_slice,
    "fft": transforms.fft,
    "gather": indexing.gather,
    "iota": shape.free_results,
    "iota_2x32_shape": transforms.iota_2x32_shape,
    "pad": shape.pad,
    "ragged_dot_general": contraction.ragged_dot_general,
    "random_bits": transforms.keys_then_shape,
    "random_gamma": transforms.random_gamma,
    "random_split": transforms.keys_then_shape,
    "random_unwrap": transforms.key_data,
    "random_wrap": transforms.key_data,
    "reduce": reduction.generic_reduce,
    "reshape": shape.reshape,
    "rev": shape.rev,
    "rng_bit_generator": transforms.rng_bit_generator,
    "rng_uniform": shape.free_results,
    "scaled_dot": contraction.scaled_dot,
    "slice": shape.slice_,
    "sort": reduction.sort,
    "split": shape.split,
    "squeeze": shape.squeeze,
    "stack": shape.stack,
    "tie": shape.tie,
    "tile": shape.tile,
    "top_k": reduction.top_k,
    "transpose": shape.transpose,
    "triangular_solve": transforms.triangular_solve,
    "unstack": shape.unstack,
}

#: Kernels whose rule is derived from their parameters, or None where that finds nothing to split. Their FLOPs are those of
#: :func:`shardwise.capture.equations.kernel_flops`.
KERNELS: Final[dict[str, Callable[[OpCall], Rule | None]]] = {
    **dict.fromkeys(
        """dot_product_attention_fwd dot_product_attention_fwd_wrapper dot_product_attention_bwd
        dot_product_attention_bwd_wrapper""".split(),
        fused_attention,
    ),
    "pallas_call": pallas_rule,
    "shardwise_kernel": lambda call: call.params["rule"],
}

_KERNEL: Final = "an opaque kernel: register_rule can describe it"
_CALLBACK: Final = "calls Python on the host"
_MANUAL: Final = "a collective: its place is inside shard_map"
_SYMBOLIC: Final = "symbolic shapes, for export only"
_STATE: Final = "reads or writes a mutable reference"
_INSIDE: Final = "stands inside of Pallas kernels only"
_ORDER: Final = "orders effects, holds no data"

#: Primitives with the safe rule on purpose, and why; those of :data:`KERNELS` where no rule can be derived.
OPAQUE: Final[dict[str, str]] = {
    **dict.fromkeys(
        """call_exported cudnn_fusion custom_partitioning ffi_call mosaic_gpu_p mpmd_map pallas_call scaled_matmul
        scaled_matmul_wrapper tpu_custom_call dot_product_attention_fwd dot_product_attention_fwd_wrapper
        dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fp8_fwd
        dot_product_attention_fp8_fwd_wrapper dot_product_attention_fp8_bwd
        dot_product_attention_fp8_bwd_wrapper""".split(),
        _KERNEL,
    ),
    **dict.fromkeys(
        "buffer_callback check debug_callback debug_print inspect_sharding io_callback pure_callback".split(), _CALLBACK
    ),
    **dict.fromkeys(
        """all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start all_gather_start
        all_to_all all_to_all_done all_to_all_start axis_index pbroadcast pbroadcast_done pbroadcast_dynamic
        pbroadcast_start pgather pmax pmin ppermute ppermute_done ppermute_start precv psend psum psum_done psum_invariant
        psum_invariant_start psum_start ragged_all_to_all reduce_scatter reduce_scatter_done reduce_scatter_start
        unreduced_pmax unreduced_pmin unreduced_psum unreduced_psum_start unreduced_reduce_scatter
        unreduced_reduce_scatter_start""".split(),
        _MANUAL,
    ),
    **dict.fromkeys("dim_as_value dimension_size shape_assertion".split(), _SYMBOLIC),
    **dict.fromkeys("addupdate core_map freeze get new_ref run_scoped run_state swap".split(), _STATE),
    **dict.fromkeys("bitcast max_contiguous repeat roll".split(), _INSIDE),
    **dict.fromkeys("after_all create_token program_order".split(), _ORDER),
    "custom_lin": "stands in programs that are being differentiated, never in finished ones",
    "dce_sink": "keeps its operand alive and computes nothing",
    "platform_index": "a scalar that names the platform",
    "stage": "puts a host value on the device",
    "unreachable": "never runs",
    "xla_pmap": "a manual region of the old kind",
}

_registered: dict[str, RuleFunction] = {}


@dataclass(frozen=True, slots=True)
class Found:
    """A rule, and why it is the safe one if it is."""

    rule: Rule
    opaque: str = ""


def register_rule(primitive: Any, rule: str | RuleFunction) -> None:
    """Tells Shardwise how a primitive or kernel of yours may be split.

    Args:
      primitive: a JAX primitive or its name. A kernel inside ``pallas_call``, ``ffi_call``, ``custom_partitioning`` or
        another opaque call is named ``"pallas_call:my_kernel"``.
      rule: the rule in the notation ``"(b,i,k),(b,k,j)->(b,i,j); sum k"``, or a function of an :class:`OpCall` that
        returns such a text, a :class:`Rule`, or None where it does not apply.

    Registering again replaces the earlier rule. Built-in rules can be replaced too.

    >>> import shardwise
    >>> shardwise.register_rule("my_attention", "(b,s,h,k),(b,t,h,k),(b,t,h,v)->(b,s,h,v); blocked t k")
    """
    name = primitive if isinstance(primitive, str) else getattr(primitive, "name", None)
    if not isinstance(name, str) or not name:
        raise RuleError(f"register_rule: expected a primitive or its name, got {primitive!r}")
    if isinstance(rule, str):
        if rule.split(";")[0].count("->") != 1:
            raise RuleError(f"register_rule({name!r}): rule {rule!r} has no single '->' between operands and results")
        _registered[name] = lambda call: rule
    elif callable(rule):
        _registered[name] = rule
    else:
        raise RuleError(f"register_rule({name!r}): a rule is a text or a function of an OpCall, got {rule!r}")


def unregister_rule(primitive: Any) -> None:
    """Takes a rule registered with :func:`register_rule` back; the built-in one, if any, holds again.

    >>> register_rule("my_kernel", "(i,j)->(i,j)")
    >>> unregister_rule("my_kernel")
    """
    _registered.pop(primitive if isinstance(primitive, str) else getattr(primitive, "name", ""), None)


def is_known(kind: str) -> bool:
    """Is there a rule for a primitive, a user's for it or for one of its kernels, or is it opaque on purpose?"""
    return kind in RULES or kind in KERNELS or kind in OPAQUE or any(name.split(":")[0] == kind for name in _registered)


def find_rule(call: OpCall, kernel: str = "", stated: str | None = None) -> Found:
    """The rule of an op: a user's for the kernel, a user's for the primitive, one the op states itself (in our notation),
    ours, one derived from a kernel, or the safe one."""
    for name in (f"{call.kind}:{kernel}" if kernel else "", call.kind):
        if name in _registered:
            found = _from_user(name, call)
            if found is not None:
                return Found(found)
    if stated is not None:
        try:
            return Found(parse_rule(stated, call.operands, call.results))
        except RuleError as error:
            reason = f"the rule it states does not fit ({error}): register_rule can replace it"
            return Found(opaque(call, reason), reason)
    if call.kind in RULES:
        return Found(RULES[call.kind](call))
    derived = KERNELS[call.kind](call) if call.kind in KERNELS else None
    if derived is not None:
        return Found(derived)
    reason = OPAQUE.get(call.kind, "no rule is known for this primitive: register_rule can add one")
    return Found(opaque(call, reason), reason)


def _from_user(name: str, call: OpCall) -> Rule | None:
    try:
        found = _registered[name](call)
        if isinstance(found, str):
            found = parse_rule(found, call.operands, call.results)
        elif found is not None:
            check_rule(found, call.operands, call.results)
    except RuleError as error:
        shapes = f"operands {[list(s) for s in call.operands]}, results {[list(s) for s in call.results]}"
        raise RuleError(f"the rule registered for {name!r} does not fit {shapes}: {error}") from None
    return found
