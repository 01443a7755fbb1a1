"""Wide ResNet-50 in Flax nnx: bottleneck blocks, batch normalization with running statistics.

The statistics are an additional argument and result, after the usual ones:
`step(params, opt_state, batch, stats) -> (params, opt_state, loss, stats)`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from .layers import COMPUTE, cross_entropy
from .modules import split
from .program import Config, ZooProgram
from .specs import Tree, image_batch, moments, optimizer, program


def build(config: Config) -> ZooProgram:
    graph, params, stats = split(partial(WideResNet, config), nnx.Param, nnx.BatchStat)
    batch = image_batch(config.batch, config.image, config.classes)
    adam = optimizer()

    def loss_fn(params: Tree, batch: Tree, stats: Tree) -> tuple[jax.Array, Tree]:
        # A copy: batch normalization writes to the statistics, and these belong to the caller's trace.
        model = nnx.merge(graph, params, stats, copy=True)
        loss = cross_entropy(model(batch["images"]), batch["labels"])
        return loss, nnx.state(model, nnx.BatchStat)

    def step(params: Tree, opt_state: Tree, batch: Tree, stats: Tree) -> tuple[Tree, Tree, jax.Array, Tree]:
        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch, stats)
        updates, opt_state = adam.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, stats

    def loss(params: Tree, batch: Tree, stats: Tree) -> jax.Array:
        return loss_fn(params, batch, stats)[0]

    if not config.train:
        return program(loss, params=params, batch=batch, state=stats)
    return program(step, (0, 1, 3), params=params, optimizer=moments(params), batch=batch, state=stats)


_norm = partial(nnx.BatchNorm, use_running_average=False, momentum=0.9, dtype=COMPUTE)


class Bottleneck(nnx.Module):
    """A 3x3 convolution between two 1x1 ones, and a shortcut."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int, rngs: nnx.Rngs) -> None:
        conv = partial(nnx.Conv, use_bias=False, dtype=COMPUTE, rngs=rngs)
        norm = partial(_norm, rngs=rngs)
        self.reduce, self.reduce_norm = conv(inputs, inner, (1, 1)), norm(inner)
        self.middle, self.middle_norm = conv(inner, inner, (3, 3), (stride, stride)), norm(inner)
        self.expand, self.expand_norm = conv(inner, outputs, (1, 1)), norm(outputs)
        projects = stride != 1 or inputs != outputs
        self.shortcut = conv(inputs, outputs, (1, 1), (stride, stride)) if projects else None
        self.shortcut_norm = norm(outputs) if projects else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.reduce_norm(self.reduce(x)))
        y = nnx.relu(self.middle_norm(self.middle(y)))
        y = self.expand_norm(self.expand(y))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return nnx.relu(x + y)


class WideResNet(nnx.Module):
    """Logits `[b, classes]` of `images[b, height, width, 3]`."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.remat = config.remat
        self.stem = nnx.Conv(3, config.channels, (7, 7), (2, 2), use_bias=False, dtype=COMPUTE, rngs=rngs)
        self.stem_norm = _norm(config.channels, rngs=rngs)
        blocks = []
        inputs = config.channels
        for stage, count in enumerate(config.stages):
            features = config.channels * 2**stage
            for i in range(count):
                stride = 2 if stage and not i else 1
                blocks.append(Bottleneck(inputs, features * config.width, features * 4, stride, rngs))
                inputs = features * 4
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(inputs, config.classes, dtype=COMPUTE, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        run = nnx.remat(Bottleneck.__call__) if self.remat else Bottleneck.__call__
        x = nnx.relu(self.stem_norm(self.stem(images)))
        x = nnx.max_pool(x, (3, 3), (2, 2), padding="SAME")  # type: ignore[no-untyped-call]
        for block in self.blocks:
            x = run(block, x)
        return self.head(jnp.mean(x, axis=(1, 2)))
