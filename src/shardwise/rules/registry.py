"""The rule of each primitive, and the registry of users' rules.

A primitive has a rule, or it is one of the few *opaque* ones, listed here with the reason, or it is unknown. Opaque and unknown
ones get the safe rule (every dimension blocked) and are reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from shardwise.errors import RuleError
from shardwise.ir.notation import parse_rule
from shardwise.ir.rule import Rule, check_rule
from shardwise.ir.traits import MANUAL, SCATTERS
from shardwise.rules import contraction, indexing, reduction, shape, transforms
from shardwise.rules.call import OpCall, RuleBuilder, build_rule, opaque, passing, pointwise
from shardwise.rules.kernels import fused_attention, pallas_rule
from shardwise.rules.tables import ELEMENTWISE, LINEAR_ALGEBRA, PASSING

RuleFunction = Callable[[OpCall], Rule | str | None]

#: Functions with the name of their primitive, by module.
_BY_NAME: Final = {
    contraction: "conv_general_dilated dot_general ragged_dot_general scaled_dot",
    indexing: "dynamic_slice dynamic_update_slice gather",
    reduction: "reduce_window select_and_scatter sort top_k",
    shape: """broadcast_in_dim broadcast_to concatenate pad reshape rev split squeeze stack tie tile transpose
        unstack""",
    transforms: "fft random_gamma rng_bit_generator triangular_solve",
}

RULES: Final[dict[str, Callable[[RuleBuilder], None]]] = {
    **{name: getattr(module, name) for module, names in _BY_NAME.items() for name in names.split()},
    **dict.fromkeys(ELEMENTWISE, pointwise),
    **dict.fromkeys(PASSING, passing),
    **dict.fromkeys(["iota", "iota_2x32_shape", "random_seed", "rng_uniform"], pointwise),
    **dict.fromkeys(["random_bits", "random_fold_in", "random_split"], transforms.random_numbers),
    **dict.fromkeys(["bitcast_convert_type", "random_unwrap", "random_wrap"], shape.parts_of_elements),
    **dict.fromkeys(LINEAR_ALGEBRA, transforms.linear_algebra),
    **dict.fromkeys(reduction.REDUCERS_BY_KIND, reduction.reduce_axes),
    **dict.fromkeys(reduction.CUMULATIVE, reduction.cumulative),
    **dict.fromkeys(SCATTERS, indexing.scatter),
    **dict.fromkeys("reduce_window_sum reduce_window_max reduce_window_min".split(), reduction.reduce_window),
    "approx_top_k": reduction.top_k,
    "select_and_gather_add": reduction.reduce_window,
    "select_and_scatter_add": reduction.select_and_scatter,
    "slice": shape.slice_,
}

#: Kernels whose rule is derived from their parameters; it is None where nothing can be split. Their FLOPs are those of
#: :func:`shardwise.capture.equations.kernel_flops`.
KERNELS: Final[dict[str, Callable[[OpCall], Rule | None]]] = {
    **dict.fromkeys(
        """dot_product_attention_fwd dot_product_attention_fwd_wrapper dot_product_attention_bwd
        dot_product_attention_bwd_wrapper""".split(),
        lambda call: build_rule(fused_attention, call),
    ),
    "pallas_call": pallas_rule,
    "shardwise_kernel": lambda call: call.params["rule"],
}

#: Primitives with the safe rule on purpose, by reason; those of :data:`KERNELS` where no rule can be derived.
_OPAQUE_BY_REASON: Final = {
    "an opaque kernel: register_rule can describe it": """
        call_exported cudnn_fusion custom_partitioning ffi_call mosaic_gpu_p mpmd_map scaled_matmul scaled_matmul_wrapper
        tpu_custom_call dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper dot_product_attention_fp8_bwd
        dot_product_attention_fp8_bwd_wrapper """
    + " ".join(KERNELS),
    "calls Python on the host": """
        buffer_callback check debug_callback debug_print inspect_sharding io_callback pure_callback""",
    "a collective: its place is inside shard_map": " ".join(MANUAL)
    + """
        all_gather_done all_gather_reduced all_gather_reduced_start all_gather_start all_to_all_done all_to_all_start
        axis_index pbroadcast pbroadcast_done pbroadcast_dynamic pbroadcast_start pgather ppermute_done ppermute_start
        precv psend psum_done psum_invariant_start psum_start ragged_all_to_all reduce_scatter_done reduce_scatter_start
        unreduced_pmax unreduced_pmin unreduced_psum unreduced_psum_start unreduced_reduce_scatter
        unreduced_reduce_scatter_start""",
    "symbolic shapes, for export only": "dim_as_value dimension_size shape_assertion",
    "reads or writes a mutable reference": "addupdate core_map freeze get new_ref run_scoped run_state swap",
    "only used inside of Pallas kernels": "bitcast max_contiguous repeat roll",
    "orders effects and has no data": "after_all create_token program_order",
    "only in programs that are being differentiated": "custom_lin",
    "keeps its operand alive and computes nothing": "dce_sink",
    "a scalar that names the platform": "platform_index",
    "puts a host value on the device": "stage",
    "never runs": "unreachable",
    "a manual region of the old kind": "xla_pmap",
}
OPAQUE: Final = {name: reason for reason, names in _OPAQUE_BY_REASON.items() for name in names.split()}

_registered: dict[str, RuleFunction] = {}


def register_rule(primitive: Any, rule: str | RuleFunction) -> None:
    """Registers the rule of a primitive or kernel: how it may be split.

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
    """Removes a rule registered with :func:`register_rule`; the built-in one, if any, applies again.

    >>> register_rule("my_kernel", "(i,j)->(i,j)")
    >>> unregister_rule("my_kernel")
    """
    _registered.pop(primitive if isinstance(primitive, str) else getattr(primitive, "name", ""), None)


def is_known(kind: str) -> bool:
    """Returns whether a primitive or one of its kernels has a rule, or is opaque on purpose."""
    return kind in RULES or kind in OPAQUE or any(name.split(":")[0] == kind for name in _registered)


def find_rule(call: OpCall, kernel: str = "", stated: str | None = None) -> tuple[Rule, str]:
    """Returns the rule of an op: a user's for the kernel or the primitive, the one that it states itself, the built-in or a
    derived one, or the safe one with the reason for it."""
    for name in (f"{call.kind}:{kernel}" if kernel else "", call.kind):
        rule = _from_user(name, call) if name in _registered else None
        if rule is not None:
            return rule, ""
    if stated is not None:
        try:
            return parse_rule(stated, call.operands, call.results), ""
        except RuleError as error:
            reason = f"the rule it states does not fit ({error}): register_rule can replace it"
            return opaque(call, reason), reason
    if call.kind in RULES:
        return build_rule(RULES[call.kind], call), ""
    derived = KERNELS[call.kind](call) if call.kind in KERNELS else None
    if derived is not None:
        return derived, ""
    reason = OPAQUE.get(call.kind, "no rule is known for this primitive: register_rule can add one")
    return opaque(call, reason), reason


def _from_user(name: str, call: OpCall) -> Rule | None:
    try:
        rule = _registered[name](call)
        if isinstance(rule, str):
            rule = parse_rule(rule, call.operands, call.results)
        elif rule is not None:
            check_rule(rule, call.operands, call.results)
    except RuleError as error:
        shapes = f"operands {[list(s) for s in call.operands]}, results {[list(s) for s in call.results]}"
        raise RuleError(f"the rule registered for {name!r} does not fit {shapes}: {error}") from None
    return rule
