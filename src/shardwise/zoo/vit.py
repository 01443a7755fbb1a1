"""Vision transformers (arXiv 2010.11929) in Flax nnx: patch convolution, learned positions, mean pooling."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from .layers import COMPUTE, attention, cross_entropy, run_layers
from .modules import module_training
from .program import Config, ZooProgram, require_divisible
from .specs import Tree, image_batch


def build(config: Config) -> ZooProgram:
    require_divisible("image by patch", config.image, config.patch)
    require_divisible("d by heads", config.d, config.heads)
    batch = image_batch(config.batch, config.image, config.classes)
    return module_training(config, partial(ViT, config), loss, batch)


def loss(model: "ViT", batch: Tree) -> jax.Array:
    """Cross entropy over the classes."""
    return cross_entropy(model(batch["images"]), batch["labels"])


class Block(nnx.Module):
    """Self-attention and MLP, each after a LayerNorm."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        d, heads, head = config.d, config.heads, config.d // config.heads
        norm = partial(nnx.LayerNorm, d, dtype=COMPUTE, rngs=rngs)
        project = partial(nnx.LinearGeneral, d, (heads, head), dtype=COMPUTE, rngs=rngs)
        self.attention_norm = norm()
        self.query, self.key, self.value = project(), project(), project()
        self.out = nnx.LinearGeneral((heads, head), d, axis=(-2, -1), dtype=COMPUTE, rngs=rngs)
        self.mlp_norm = norm()
        self.up = nnx.Linear(d, config.ffn, dtype=COMPUTE, rngs=rngs)
        self.down = nnx.Linear(config.ffn, d, dtype=COMPUTE, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.attention_norm(x)
        x = x + self.out(attention(self.query(y), self.key(y), self.value(y)))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class ViT(nnx.Module):
    """The model. Scanned blocks are one `Block` whose variables have a leading layer dimension."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.remat = config.remat
        size = (config.patch, config.patch)
        self.patches = nnx.Conv(3, config.d, size, size, padding="VALID", dtype=COMPUTE, rngs=rngs)
        tokens = (config.image // config.patch) ** 2
        self.positions = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (tokens, config.d)))
        if config.scan:
            keys = jax.random.split(rngs.params(), config.layers)
            self.blocks: Block | nnx.List[Block] = nnx.vmap(lambda key: Block(config, nnx.Rngs(key)))(keys)
        else:
            self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.final_norm = nnx.LayerNorm(config.d, dtype=COMPUTE, rngs=rngs)
        self.head = nnx.Linear(config.d, config.classes, dtype=COMPUTE, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.positions[...].astype(x.dtype)
        if isinstance(self.blocks, Block):
            states: Tree = nnx.state(self.blocks)
            graph = nnx.graphdef(self.blocks)
        else:
            states = tuple(nnx.state(block) for block in self.blocks)
            graph = nnx.graphdef(self.blocks[0])
        x = run_layers(lambda state, x: nnx.merge(graph, state)(x), states, x, remat=self.remat)
        return self.head(jnp.mean(self.final_norm(x), axis=1))
