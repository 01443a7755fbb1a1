"""``python -m benchmarks.handwritten``: generated device-local programs against hand-written ones, compiled for v5e:4x4.

Each case is a program of the zoo under tactics, and beside the generated program what one would write by hand for the same
strategy and the same mathematics: a function of local blocks under ``jax.shard_map``, with collectives of ``jax.lax``. XLA's
TPU compiler compiles both, and they are timed as in ``benchmarks.partitioners``. Results are appended to
``benchmarks/handwritten.jsonl``.

The hand-written programs gather weights in the compute type where a layer needs them, and again in the backward pass; gradients
are reduced in the compute type, one mesh axis after another, by ``psum_scatter`` or by rings of permutes; the optimizer updates
local shards.

``--table`` writes the page from what is recorded, ``--only TEXT`` chooses cases by name, ``--how generated`` one of the
programs, ``--again`` compiles what is recorded already. The file is long because the programs share their helpers and are best
read one below the other.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import partitioners
from benchmarks.partitioners import MESH, TOPOLOGY
from shardwise.tactics.strategies import FSDP, ContextParallel, DataParallel, ExpertParallel, Megatron, Shard
from shardwise.zoo import decoder, itx, mixtral
from shardwise.zoo.layers import attention, cast, cross_entropy, rms_norm, rope, run_layers
from shardwise.zoo.program import Config
from shardwise.zoo.registry import config_of
from shardwise.zoo.specs import optimizer

RECORDS: Final = Path(__file__).with_suffix(".jsonl")
PAGE: Final = Path(__file__).parent.parent / "docs" / "benchmarks" / "handwritten.md"
HEAD: Final = [
    "# Generated programs against hand-written ones",
    "",
    "Written by `make bench-handwritten`: the device-local program that Shardwise generates from tactics, and what one would "
    f"write by hand for the same strategy with `jax.shard_map`, compiled by XLA's TPU compiler for {TOPOLOGY} without a TPU. "
    "By hand, gradients are reduced into shards by `psum_scatter`, or by rings of `ppermute`. Cells show the step time in ms "
    "(in brackets everything one after another) and the compiler's peak memory in GiB. Compute is the compiler's estimate of "
    "cycles, in which scatters have none; collectives are timed by our link formulas, those beside compute only as far as "
    "they last longer. The ratio is the time of the generated program over that of the faster hand-written one.",
    "",
]
_ROPE_BASE: Final = config_of("llama3", "8b").rope_base
Tree = Any
Axes = tuple[str, ...]
Scatter = Callable[[jax.Array, str, int], jax.Array]
Written = tuple[Callable[..., Any], Tree, Tree]


# What the hand-written programs share.


def native(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """The sum of ``x`` over a mesh axis, of which each device keeps a block."""
    return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def ring(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """The same by permutes, which run beside compute where reduce-scatters do not."""
    count, index = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    size = x.shape[dim] // count

    def part(hop: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, jnp.mod(index - 1 - hop, count) * size, size, dim)

    total = part(0)
    for hop in range(1, count):
        total = jax.lax.ppermute(total, axis, [(k, (k + 1) % count) for k in range(count)]) + part(hop)
    return total


@dataclass(frozen=True, slots=True)
class Sharded:
    """How an array is sharded: on one dimension over some mesh axes, or on none. Its gradient is summed over ``axes``."""

    axes: Axes
    over: Axes = ()
    dim: int = 0
    scatter: Scatter = native

    def gather(self, x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, self.over, axis=self.dim, tiled=True) if self.over else x

    def reduce(self, gradient: jax.Array) -> jax.Array:
        """A reduce-scatter over two axes of a torus compiles to an all-reduce, so there is one for each axis."""
        for axis in self.over:
            gradient = self.scatter(gradient, axis, self.dim)
        rest = tuple(axis for axis in self.axes if axis not in self.over)
        return jax.lax.psum(gradient, rest) if rest else gradient


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered(x: jax.Array, sharded: Sharded) -> jax.Array:
    """The blocks of all devices; for the backward pass they are kept."""
    return sharded.gather(x)


gathered.defvjp(lambda x, sharded: (sharded.gather(x), None), lambda sharded, _, g: (sharded.reduce(g),))


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def product(pattern: str, x: jax.Array, w: jax.Array, sharded: Sharded) -> jax.Array:
    """The einsum of ``x`` and a gathered weight, which is gathered again in the backward pass."""
    return jnp.einsum(pattern, x, sharded.gather(w))


def _product_backward(pattern: str, sharded: Sharded, saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    dx, dw = jax.vjp(partial(jnp.einsum, pattern), x, sharded.gather(w))[1](gradient)
    return dx, sharded.reduce(dw)


product.defvjp(lambda pattern, x, w, sharded: (product(pattern, x, w, sharded), (x, w)), _product_backward)


def shared(tree: Tree, axes: Axes) -> Tree:
    """Parameters that every device has; their gradients are summed."""
    return jax.tree.map(lambda x: gathered(x, Sharded(axes)), tree)


def exchanged_lookup(embed: jax.Array, tokens: jax.Array, axes: Axes) -> jax.Array:
    """Rows of an embedding whose columns are sharded. Devices look up their columns of all tokens and exchange them."""
    everyone = jax.lax.all_gather(tokens, axes, axis=0, tiled=True)
    columns = cast(jnp.take(embed, everyone, axis=0))
    return jax.lax.all_to_all(columns, axes, split_axis=0, concat_axis=2, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def shared_lookup(embed: jax.Array, tokens: jax.Array, axes: Axes) -> jax.Array:
    """Rows of an embedding that every device has. The rows of its gradient are gathered and added on every device."""
    return cast(jnp.take(embed, tokens, axis=0))


def _lookup_backward(axes: Axes, saved: Any, gradient: jax.Array) -> tuple[jax.Array, None]:
    embed, tokens = saved
    rows, everyone = (jax.lax.all_gather(x, axes, axis=0) for x in (gradient, tokens))
    return jnp.zeros_like(embed).at[everyone].add(rows.astype(embed.dtype)), None


shared_lookup.defvjp(lambda embed, t, axes: (shared_lookup(embed, t, axes), (embed, t)), _lookup_backward)


def attend(p: Tree, x: jax.Array, multiply: Any, base: float, first: Any = 0, spread: Any = None) -> jax.Array:
    """Attention of the positions from ``first`` on. ``spread`` makes keys and values of all positions of this device's."""
    positions = first + jnp.arange(x.shape[1])
    q = rope(multiply("bsd,dhk->bshk", x, p["q"]), positions, base)
    k = rope(multiply("bsd,dgk->bsgk", x, p["k"]), positions, base)
    v = multiply("bsd,dgk->bsgk", x, p["v"])
    k, v = (spread(k), spread(v)) if spread else (k, v)
    mask = positions[:, None] >= jnp.arange(k.shape[1])
    return multiply("bshk,hkd->bsd", attention(q, k, v, mask=mask), p["o"])


def dense_layer(p: Tree, x: jax.Array, multiply: Any, first: Any = 0, spread: Any = None) -> jax.Array:
    """As ``decoder.layer``."""
    x = x + attend(p["attention"], rms_norm(x, p["attention_norm"]), multiply, _ROPE_BASE, first, spread)
    y, p = rms_norm(x, p["mlp_norm"]), p["mlp"]
    hidden = jax.nn.silu(multiply("bsd,df->bsf", y, p["gate"])) * multiply("bsd,df->bsf", y, p["up"])
    return x + multiply("bsf,fd->bsd", hidden, p["down"])


def final_loss(params: Tree, x: jax.Array, targets: jax.Array, sharded: Sharded) -> jax.Array:
    """This device's part of the mean over all tokens."""
    x = rms_norm(x, shared(params["final_norm"], sharded.axes))
    # Without a batch dimension, which may be one here: the compiler then makes a select of the gradient's scatter.
    logits = product("td,dv->tv", x.reshape(-1, x.shape[-1]), cast(params["head"]), sharded)
    return cross_entropy(logits, targets.reshape(-1)) / jax.lax.axis_size(sharded.axes)


def training(loss_fn: Callable[[Tree, Tree], jax.Array], axes: Axes, params: Tree, batch: Tree) -> Written:
    """A step on local shards from this device's part of the loss, and from the specs of parameters and batch."""
    adam = optimizer()

    def step(params: Tree, opt_state: Tree, batch: Tree) -> tuple[Tree, Tree, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = adam.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.psum(loss, axes)

    moments, *others = adam.init({})
    state = (moments._replace(count=P(), mu=params, nu=params), *others)
    return step, (params, state, batch), (params, state, P())


# FSDP: the batch and every matrix over all chips.


def fsdp(config: Config, axes: Axes, scatter: Scatter) -> Written:
    """A step from the loss of this device's sequences."""
    rows = Sharded(axes, axes, 0, scatter)
    layer = partial(dense_layer, multiply=partial(product, sharded=rows))
    layers = {"attention": P(None, axes), "attention_norm": P(), "mlp": P(None, axes), "mlp_norm": P()}
    specs = {"embed": P(None, axes), "layers": layers, "final_norm": P(), "head": P(axes)}

    def loss(params: Tree, batch: Tree) -> jax.Array:
        own = {k: cast(v) if layers[k] != P() else shared(v, axes) for k, v in params["layers"].items()}
        x = run_layers(layer, own, exchanged_lookup(params["embed"], batch["inputs"], axes))
        return final_loss(params, x, batch["targets"], rows)

    return training(loss, axes, specs, P(axes))


# Context parallelism: the sequence over the mesh axes that the batch does not need, parameters on every chip.


def context(config: Config, axes: Axes, scatter: Scatter) -> Written:
    """A step from the loss of this device's positions. Keys and values are gathered."""
    sequence = axes if config.batch == 1 else axes[1:]
    spread = partial(gathered, sharded=Sharded(sequence, sequence, 1, scatter))

    def layer(p: Tree, x: jax.Array) -> jax.Array:
        return dense_layer(p, x, jnp.einsum, jax.lax.axis_index(sequence) * x.shape[1], spread)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        layers = {k: v if k.endswith("norm") else cast(v) for k, v in params["layers"].items()}
        x = run_layers(layer, shared(layers, axes), shared_lookup(params["embed"], batch["inputs"], axes))
        return final_loss(params, x, batch["targets"], Sharded(axes))

    return training(loss, axes, P(), P(axes[: -len(sequence)] or None, sequence))


# Expert parallelism: experts over the last axis, each expert's matrices over the first, everything else as in FSDP.


def expert(config: Config, axes: Axes, scatter: Scatter) -> Written:
    """A step from the loss of this device's sequences. Tokens go to their experts and back by all-to-all."""
    shard, home = axes
    rows, inner = Sharded(axes, axes, 0, scatter), Sharded((shard,), (shard,), 1, scatter)
    layers = {"attention": P(None, axes), "experts": P(None, home, shard)}
    layers |= dict.fromkeys(("attention_norm", "moe_norm", "router"), P())
    specs = {"embed": P(None, axes), "layers": layers, "final_norm": P(), "head": P(axes)}

    def experts(router: jax.Array, p: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As ``mixtral.dispatched_experts``, with this device's part of the load-balancing loss of all tokens."""
        groups = x.reshape(-1, config.group, config.d)
        logits = groups.astype(jnp.float32) @ router
        top, chosen = jax.lax.top_k(logits, config.chosen)
        gates = jax.nn.softmax(top, axis=-1)
        first = jax.lax.pmean(jnp.mean(jax.nn.one_hot(chosen[..., 0], config.experts), axis=(0, 1)), axes)
        share = jnp.mean(jax.nn.softmax(logits, axis=-1), axis=(0, 1)) / jax.lax.axis_size(axes)
        balance = config.experts * jnp.sum(share * first)

        chosen = jax.nn.one_hot(chosen, config.experts, dtype=jnp.int32)
        n, m, c, e = chosen.shape
        by_choice = chosen.transpose(0, 2, 1, 3).reshape(n, c * m, e)
        place = (jnp.cumsum(by_choice, axis=1) - 1).reshape(n, c, m, e).transpose(0, 2, 1, 3)
        seat = cast(jax.nn.one_hot(jnp.sum(place * chosen, axis=-1), mixtral.capacity(config)))
        dispatch = jnp.einsum("nmce,nmcq->nmeq", cast(chosen), seat)
        combine = jnp.einsum("nmc,nmce,nmcq->nmeq", cast(gates), cast(chosen), seat)

        sent = jnp.einsum("nmeq,nmd->enqd", dispatch, groups)
        sent = jax.lax.all_to_all(sent, home, split_axis=0, concat_axis=1, tiled=True)
        hidden = jax.nn.silu(product("enqd,edf->enqf", sent, p["gate"], inner))
        hidden = hidden * product("enqd,edf->enqf", sent, p["up"], inner)
        outputs = product("enqf,efd->enqd", hidden, p["down"], inner)
        outputs = jax.lax.all_to_all(outputs, home, split_axis=1, concat_axis=0, tiled=True)
        return jnp.einsum("nmeq,enqd->nmd", combine, outputs).reshape(x.shape), balance

    def layer(p: Tree, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, balance = carry
        y = rms_norm(x, p["attention_norm"])
        x = x + attend(p["attention"], y, partial(product, sharded=rows), config.rope_base)
        y, extra = experts(p["router"], p["experts"], rms_norm(x, p["moe_norm"]))
        return x + y, balance + extra

    def loss(params: Tree, batch: Tree) -> jax.Array:
        own = {k: cast(v) if layers[k] != P() else shared(v, axes) for k, v in params["layers"].items()}
        carry = exchanged_lookup(params["embed"], batch["inputs"], axes), jnp.zeros(())
        x, balance = run_layers(layer, own, carry)
        return final_loss(params, x, batch["targets"], rows) + config.aux_weight * balance / config.layers

    return training(loss, axes, specs, P(axes))


# Decoding: the batch and the cache over the first axis, heads, hidden units and the vocabulary over the last.


def decode(config: Config, axes: Axes, scatter: Scatter) -> Written:
    """One step of decoding."""
    data, model = axes
    own = dict.fromkeys(itx.layer_spec(config), P())
    own |= {"q": P(None, model), "o": P(model), "up": P(None, model), "down": P(model)}

    def layered(specs: dict[str, P]) -> Tree:
        return {k: P(None, *spec) for k, spec in specs.items()} if config.scan else (specs,) * config.layers

    params = {"embed": P(), "layers": layered(own), "final_norm": P(), "head": P(None, model)}
    cache = layered({"k": P(data), "v": P(data)})

    def layer(p: Tree, cache: Tree, x: jax.Array, position: jax.Array) -> tuple[jax.Array, Tree]:
        """As ``itx.layer``, for this device's heads and hidden units."""
        y = rms_norm(x, p["attention_norm"])
        positions = position + jnp.arange(1)
        q = rope(jnp.einsum("bsd,dhk->bshk", y, p["q"]), positions)
        k = rope(jnp.einsum("bsd,dk->bsk", y, p["k"])[:, :, None, :], positions)[:, :, 0, :]
        v = jnp.einsum("bsd,dk->bsk", y, p["v"])
        keys = jax.lax.dynamic_update_slice_in_dim(cache["k"], k, position, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(cache["v"], v, position, axis=1)
        scores = jnp.einsum("bshk,btk->bhst", q, keys).astype(jnp.float32) * config.head**-0.5
        scores = jnp.where(jnp.arange(config.seq + config.generate) <= position, scores, -1e30)
        y = jnp.einsum("bhst,btk->bshk", cast(jax.nn.softmax(scores, axis=-1)), values)
        x = x + jax.lax.psum(jnp.einsum("bshk,hkd->bsd", y, p["o"]), model)
        hidden = jax.nn.gelu(jnp.einsum("bsd,df->bsf", rms_norm(x, p["mlp_norm"]), p["up"]))
        return x + jax.lax.psum(jnp.einsum("bsf,fd->bsd", hidden, p["down"]), model), {"k": keys, "v": values}

    def step(params: Tree, cache: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        x, position = jnp.take(params["embed"], batch["tokens"][:, None], axis=0), batch["position"]
        if config.scan:
            x, cache = jax.lax.scan(lambda x, pc: layer(*pc, x, position), x, (params["layers"], cache))
        else:
            filled = []
            for p, one in zip(params["layers"], cache, strict=True):
                x, one = layer(p, one, x, position)
                filled.append(one)
            cache = tuple(filled)
        logits = (rms_norm(x[:, -1], params["final_norm"]) @ params["head"]).astype(jnp.float32)
        # The best of this device's part of the vocabulary; among equals the first wins, as in argmax.
        best, at = jnp.max(logits, axis=-1), jnp.argmax(logits, axis=-1).astype(jnp.int32)
        at = at + jax.lax.axis_index(model) * logits.shape[-1]
        return jax.lax.pmin(jnp.where(best == jax.lax.pmax(best, model), at, config.vocab), model), cache

    return step, (params, cache, {"tokens": P(data), "position": P()}), (P(data), cache)


# The cases.


@dataclass(frozen=True, slots=True)
class Case:
    """A module of the zoo, a configuration, a mesh, the tactics, and the function that makes the hand-written program."""

    module: Any
    config: Config
    mesh: dict[str, int]
    tactics: tuple[Any, ...]
    write: Callable[..., Any]

    @property
    def program(self) -> Any:
        return self.module.build(self.config)

    def handwritten(self, mesh: Any, scatter: Scatter) -> Any:
        """``jax.jit`` of the hand-written program."""
        local, ins, outs = self.write(self.config, tuple(self.mesh), scatter)
        run = jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
        places = [jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs) for specs in (ins, outs)]
        return jax.jit(run, in_shardings=places[0], out_shardings=places[1], donate_argnums=self.program.donate_argnums)


def _llama(**sizes: int) -> Config:
    return config_of("llama3", "8b", vocab=32768, **sizes)


_SMALL: Final = _llama(layers=4, batch=32, seq=1024, d=1024, heads=16, kv_heads=16, head=64, ffn=4096)
_GROUPED: Final = _llama(layers=4, batch=16, seq=2048, d=2048, heads=32, kv_heads=8, head=64, ffn=8192)
_LONG: Final = _llama(layers=2, batch=1, seq=8192, d=1024, heads=8, kv_heads=8, head=128, ffn=4096)
_LONG_WIDE: Final = _llama(layers=2, batch=4, seq=8192, d=2048, heads=16, kv_heads=8, head=128, ffn=8192)
_MIXTRAL: Final = config_of("mixtral", "8x7b", layers=2, batch=16, seq=2048)
_STEP: Final = config_of("itx", "step", layers=8, batch=512)
_FSDP: Final = (FSDP("data"), FSDP("model"))
_EXPERT: Final = (FSDP("model"), ExpertParallel("data", ("params/layers/experts/gate", 1)), FSDP("data"))
_DECODE: Final = (DataParallel("data"), Megatron("model"), Shard("params/head", 1, "model"))


def _context(axis: str) -> tuple[ContextParallel, ...]:
    return tuple(ContextParallel(axis, (f"batch/{name}", 1)) for name in ("inputs", "targets"))


#: The hand-written programs by name, with how they reduce gradients into shards.
SCATTER: Final = {"native": native, "rings": ring}
HOW: Final = (*SCATTER, "generated")
CASES: Final = {
    "FSDP, 1,024 wide": Case(decoder, _SMALL, MESH, _FSDP, fsdp),
    "FSDP, 2,048 wide": Case(decoder, _GROUPED, MESH, _FSDP, fsdp),
    "context, 1 x 8,192 tokens": Case(decoder, _LONG, MESH, (*_context("data"), *_context("model")), context),
    "context, 4 x 8,192 tokens": Case(decoder, _LONG_WIDE, MESH, (DataParallel("data"), *_context("model")), context),
    "experts": Case(mixtral, _MIXTRAL, {"model": 4, "data": 4}, _EXPERT, expert),
    "decode, layers scanned": Case(itx, _STEP, MESH, _DECODE, decode),
    "decode, layers unrolled": Case(
        itx, config_of("itx", "step", layers=8, batch=512, scan=False), MESH, _DECODE, decode
    ),
}


#: Options for compiling what runs once, on the host.
QUICK: Final = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def check(case: Case, mesh: Any, scatter: Scatter) -> float:
    """The largest difference between the results of the hand-written program and the plain one, relative to each array.

    To be called with the zoo computing in float32. Adam's second moments start above zero: from zero the first step is the sign
    of the gradient, and where the gradient is nothing but rounding its sign is too.
    """
    program = case.program
    args = list(
        jax.device_get(program.make_args(0))
    )  # NumPy computes with them: JAX would compile a program for each shape
    if "optimizer" in program.roles:
        moments, *others = args[1]
        args[1] = (moments._replace(nu=jax.tree.map(lambda x: x + x.dtype.type(0.01), moments.nu)), *others)
    # The hand-written program comes second, as it takes over the buffers of its arguments.
    runs = [step.lower(*args).compile(QUICK) for step in (jax.jit(program.fn), case.handwritten(mesh, scatter))]
    pairs = zip(*(jax.tree.leaves(jax.device_get(run(*args))) for run in runs), strict=True)
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(a))) for a, b in pairs)


# Compiling, and the page.


def child(name: str, how: str, folder: Path) -> None:
    """Compiles one program of a case and writes its figures into ``result.json``."""
    from shardwise.hardware.layout import place
    from shardwise.hardware.mesh import MeshAxes
    from shardwise.hardware.topology import topology
    from shardwise.verification.compiled import make_mesh

    case = CASES[name]
    program, mesh, outcome = case.program, make_mesh(case.mesh, TOPOLOGY), {}
    if how in SCATTER:
        lowered = case.handwritten(mesh, SCATTER[how]).lower(*program.args)
    else:
        plan = partitioners.planned(program, case.mesh, tactics=list(case.tactics))
        outcome["predicted"] = {"time_s": plan.predicted.time_s, "peak": plan.predicted.peak_bytes}
        lowered = partitioners.lowered_plan(program, plan, mesh)
    placement = place(MeshAxes.of(case.mesh), topology(TOPOLOGY))
    partitioners.finish(outcome | partitioners.compiled_figures(lowered, mesh, placement, folder), folder)


def page(records: dict[tuple[str, str], dict[str, Any]]) -> str:
    """The table of the latest records."""
    lines, ratios = [*HEAD, "| program | by hand | by hand, rings | generated | ratio |", "|---|---|---|---|---|"], []
    for name in CASES:
        found = [records.get((name, how)) for how in HOW]
        known = [r["compiled"]["time_s"] if r and "compiled" in r else math.inf for r in found]
        ratio = known[-1] / min(known[:-1])
        ratios += [ratio] if 0 < ratio < math.inf else []
        lines.append(f"| {' | '.join([name, *map(partitioners._figures, found)])} | {ratio:.3f} |")
    if ratios:
        lines += ["", f"Geometric mean of the ratios: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    given = partitioners.arguments("benchmarks.handwritten", __doc__, HOW)
    if given.child:
        child(given.child[0], given.child[1], Path(given.child[2]))
    # Decoding has no gradients to reduce.
    cases = [(name, how) for name in CASES for how in HOW if how != "rings" or CASES[name].write is not decode]
    partitioners.collect(given, cases, RECORDS, "benchmarks.handwritten")
    PAGE.write_text(page(partitioners.load(RECORDS)))
    print(PAGE.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
