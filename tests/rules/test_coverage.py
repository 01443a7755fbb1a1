"""Every primitive of this JAX has a rule, is taken apart by capture, or stands on the short list of opaque ones."""

from __future__ import annotations

import functools
import subprocess
import sys

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp

import shardwise
from shardwise.capture import control, expand
from shardwise.capture import jax_internals as internals
from shardwise.rules import registry
from shardwise.rules.tables import ELEMENTWISE, PASSING

#: What JAX itself defines, asked in a process of its own: libraries that other tests import add primitives of theirs.
_ENUMERATE = """
import jax, jax.nn, jax.numpy, jax.random, jax.scipy, jax.export, jax.experimental.pallas
import jax.experimental.custom_partitioning, jax.experimental.checkify, jax.experimental.scheduling_groups
from tests.rules import jax_tools
print(*sorted(jax_tools.all_primitives()))
"""

#: Names with a rule that the JAX at hand may not know: other supported versions do (0.9, 0.10, 0.12 were looked at).
OTHER_VERSIONS = set(
    """full_to_shard log2 mulhi one_minus_square ormqr philox2x32 philox4x32 polynomial reduced_vary_cast
    reduced_vary_cast_p relayout remove_memory_space scaled_dot shard_to_full stack threefry4x32 unstack
    vary_unreduced_cast vary_unreduced_cast_p xla_metadata_value""".split()
)
#: Names with a rule that stand in jaxprs but are registered only when a submodule is imported, or never lowered.
NOT_ENUMERATED = {"select_and_scatter", "rng_uniform", "shard_alike"}


@functools.cache
def _primitives() -> frozenset[str]:
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", _ENUMERATE], capture_output=True, text=True, check=True)
    return frozenset(run.stdout.split())


def test_every_primitive_is_accounted_for() -> None:
    known = {*registry.RULES, *registry.OPAQUE, *control.LOWERINGS, *internals.CALLS, *expand.EXPANDED}
    assert len(_primitives()) > 200
    assert not _primitives() - known, f"no rule, no reason: {sorted(_primitives() - known)}"


def test_no_primitive_is_accounted_for_twice() -> None:
    tables = [set(registry.RULES), set(registry.OPAQUE), set(control.LOWERINGS), set(internals.CALLS)]
    for k, table in enumerate(tables):
        for other in tables[k + 1 :]:
            assert not table & other


def test_rules_are_for_primitives_that_exist() -> None:
    unknown = set(registry.RULES) - _primitives() - OTHER_VERSIONS - NOT_ENUMERATED
    assert not unknown, f"no supported JAX has {sorted(unknown)}"
    assert set(PASSING) <= set(ELEMENTWISE)


def test_opaque_ones_have_reasons() -> None:
    assert all(registry.OPAQUE.values())
    assert len(set(registry.OPAQUE.values())) < 20, "the list is meant to be short"


def test_primitive_that_is_plain_jax_code_needs_no_rule() -> None:
    """Libraries give functions the form of a primitive; what they compute is looked into."""
    primitive = jex_core.Primitive("twice_sine")
    primitive.def_abstract_eval(lambda x: x)
    primitive.def_impl(lambda x: 2 * jnp.sin(x))
    analysis = shardwise.analyze(primitive.bind, jax.ShapeDtypeStruct((4, 6), "float32"))
    assert not analysis.opaque_ops
    assert {"sin", "mul"} <= {op.kind for op in analysis.program.ops}
