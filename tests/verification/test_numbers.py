"""Planned against plain numbers: arguments and results of every kind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import shardwise
from shardwise.interruption import in_background
from shardwise.tactics.strategies import Shard
from shardwise.verification.verify import _compare, _relative


def test_random_keys_are_compared_by_their_numbers() -> None:
    def drop(w: jax.Array, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        own, left = jax.random.split(key)
        return jnp.tanh(x @ w) * jax.random.bernoulli(own, 0.5, (8, 16)), left

    args = jnp.ones((16, 16)), jnp.ones((8, 16)), jax.random.key(0)
    plan = shardwise.plan(drop, *args, mesh={"data": 4}, tactics=[Shard("x", 0, "data")])
    verified = shardwise.verify(plan, drop, *args)
    assert verified.agrees
    assert verified.differences is not None and [d.path for d in verified.differences] == ["out/0", "out/1"]


def test_infinities_nans_and_imaginary_parts_are_compared() -> None:
    x = np.array([1.0, np.nan, np.inf, 2.0])
    assert _relative(x, x) == 0.0 and _relative(x, np.array([1.0, np.nan, np.inf, 2.1])) == pytest.approx(0.05)
    assert not _relative(x, np.array([1.0, 3.0, np.inf, 2.0])) <= 1 and not _relative(x, -x) <= 1
    assert _relative(np.array([1 + 1j]), np.array([1 - 1j])) == pytest.approx(2**0.5)


def test_axes_of_one_device_communicate_nothing() -> None:
    args = jnp.ones((8, 8)), jnp.ones((16, 8))
    for mesh in ({"data": 1}, {"data": 4, "model": 1}):
        plan = shardwise.plan(lambda w, x: x @ w, *args, mesh=mesh, tactics=["fsdp"])
        assert shardwise.verify(plan, lambda w, x: x @ w, *args).matched == 1.0


def test_a_number_that_is_rounded_to_the_next_integer_is_no_alarm() -> None:
    """The inputs are integers, which are not perturbed; sums in another order differ in the last bit, and are then rounded."""

    def quantized(n: jax.Array) -> jax.Array:
        return jnp.round((n.astype(jnp.float32) * 0.1).sum(1) * 10 - 0.5)

    n = jnp.asarray(np.random.default_rng(0).integers(0, 9, (64, 256)), jnp.int32)
    plan = shardwise.plan(quantized, n, mesh={"data": 8}, tactics=[], pins={"n": PartitionSpec(None, "data")})
    verified = shardwise.verify(plan, quantized, n)
    assert verified.differences is not None and verified.differences[0].relative > verified.differences[0].tolerance
    assert verified.agrees


def test_a_wrong_number_is_an_alarm() -> None:
    x = jnp.arange(8.0)
    plan = shardwise.plan(lambda x: x, x, mesh={"data": 8}, tactics=[])
    (right,) = _compare(plan, lambda x: [x], lambda: [x], ((x,), {}), [x], "float32")
    (wrong,) = _compare(plan, lambda x: [x], lambda: [x], ((x,), {}), [x + 0.01], "float32")
    assert right.explained and not wrong.explained


@pytest.fixture
def listening() -> Iterator[None]:
    """Python hears interruptions, also where the shell that started the tests ignores them (a background job)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listening")
def test_phases_are_shown_and_an_interruption_is_heard() -> None:
    phases: list[str] = []
    x = jnp.ones((8, 8))
    plan = shardwise.plan(lambda x: x @ x, x, mesh={"data": 8}, tactics=[])
    shardwise.verify(plan, lambda x: x @ x, x, progress=lambda phase, elapsed_s: phases.append(phase))
    assert list(dict.fromkeys(phases)) == ["compiling", "running"]
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        in_background(lambda: time.sleep(20))
    assert time.monotonic() - start < 10
