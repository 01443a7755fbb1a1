"""A diffusion U-Net in Flax nnx, in PartIR's shape: 9 residual blocks down, 12 up, one attention between.

Every block on the way down, the first convolution and both downsamplings leave a skip; the way up has one block
for each of those twelve. The time and the noise are drawn inside the step.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from .layers import COMPUTE
from .modules import module_training
from .program import Config, ZooProgram, require_divisible
from .specs import Tree, integers, normal

TIMESTEPS = 1000


def build(config: Config) -> ZooProgram:
    require_divisible("image by downsampling", config.image, 2 ** (config.levels - 1))
    require_divisible("channels by norm groups", config.channels, config.norm_groups)
    require_divisible("channels by heads", config.channels << config.levels - 1, config.heads)
    batch = {"images": normal(config.batch, config.image, config.image, 3), "seed": integers(below=2**31 - 1)}
    return module_training(config, partial(UNet, config), loss, batch)


def loss(model: "UNet", batch: Tree) -> jax.Array:
    """Mean squared error of the predicted noise, at random times of a cosine schedule."""
    images = batch["images"]
    time_key, noise_key = jax.random.split(jax.random.key(batch["seed"]))
    times = jax.random.randint(time_key, images.shape[:1], 0, TIMESTEPS)
    noise = jax.random.normal(noise_key, images.shape)
    angle = (times / TIMESTEPS * jnp.pi / 2)[:, None, None, None]
    predicted = model(jnp.cos(angle) * images + jnp.sin(angle) * noise, times)
    return jnp.mean(jnp.square(predicted.astype(jnp.float32) - noise))


def time_features(times: jax.Array, size: int) -> jax.Array:
    """Sines and cosines of `times[b]` at `size / 2` frequencies."""
    angles = times[:, None] * 10_000.0 ** (-jnp.arange(size // 2) / (size // 2))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class ResidualBlock(nnx.Module):
    """Two convolutions; the time embedding is added between them."""

    def __init__(self, config: Config, inputs: int, outputs: int, rngs: nnx.Rngs) -> None:
        norm = partial(nnx.GroupNorm, num_groups=config.norm_groups, dtype=COMPUTE, rngs=rngs)
        conv = partial(nnx.Conv, dtype=COMPUTE, rngs=rngs)
        self.first_norm = norm(inputs)
        self.first = conv(inputs, outputs, (3, 3))
        self.time = nnx.Linear(4 * config.channels, outputs, dtype=COMPUTE, rngs=rngs)
        self.second_norm = norm(outputs)
        self.second = conv(outputs, outputs, (3, 3))
        self.shortcut = conv(inputs, outputs, (1, 1)) if inputs != outputs else None

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        y = self.first(nnx.silu(self.first_norm(x)))
        y = y + self.time(nnx.silu(time))[:, None, None, :]
        y = self.second(nnx.silu(self.second_norm(y)))
        return y + (x if self.shortcut is None else self.shortcut(x))


class Attention(nnx.Module):
    """Self-attention over all pixels."""

    def __init__(self, config: Config, features: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.GroupNorm(features, num_groups=config.norm_groups, dtype=COMPUTE, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(
            config.heads, features, dtype=COMPUTE, deterministic=True, decode=False, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        b, height, width, c = x.shape
        y = self.attend(self.norm(x).reshape(b, height * width, c))
        return jnp.add(x, y.reshape(x.shape))


class UNet(nnx.Module):
    """Predicts the noise in `images[b, height, width, 3]` at `times[b]`."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.remat = config.remat
        self.channels = config.channels
        conv = partial(nnx.Conv, dtype=COMPUTE, rngs=rngs)
        linear = partial(nnx.Linear, dtype=COMPUTE, rngs=rngs)
        block = partial(ResidualBlock, config, rngs=rngs)
        wide = 4 * config.channels
        self.time_in, self.time_out = linear(config.channels, wide), linear(wide, wide)
        self.stem = conv(3, config.channels, (3, 3))

        skips = [config.channels]
        down: list[nnx.Module] = []
        features = config.channels
        for level in range(config.levels):
            for _ in range(config.blocks):
                down.append(block(features, config.channels << level))
                features = config.channels << level
                skips.append(features)
            if level < config.levels - 1:
                down.append(conv(features, features, (3, 3), (2, 2)))
                skips.append(features)
        self.down = nnx.List(down)

        self.middle_in, self.middle_out = block(features, features), block(features, features)
        self.attention = Attention(config, features, rngs)

        up: list[nnx.Module] = []
        for level in reversed(range(config.levels)):
            for _ in range(config.blocks + 1):
                up.append(block(features + skips.pop(), config.channels << level))
                features = config.channels << level
            if level:
                up.append(conv(features, features, (3, 3)))
        self.up = nnx.List(up)

        self.final_norm = nnx.GroupNorm(features, num_groups=config.norm_groups, dtype=COMPUTE, rngs=rngs)
        self.final = conv(features, 3, (3, 3))

    def __call__(self, images: jax.Array, times: jax.Array) -> jax.Array:
        run = nnx.remat(ResidualBlock.__call__) if self.remat else ResidualBlock.__call__
        time = self.time_out(nnx.silu(self.time_in(time_features(times, self.channels))))
        x = self.stem(images)
        skips = [x]
        for part in self.down:
            x = run(part, x, time) if isinstance(part, ResidualBlock) else part(x)
            skips.append(x)
        x = run(self.middle_out, self.attention(run(self.middle_in, x, time)), time)
        for part in self.up:
            if isinstance(part, ResidualBlock):
                x = run(part, jnp.concatenate([x, skips.pop()], axis=-1), time)
            else:
                b, height, width, c = x.shape
                x = part(jax.image.resize(x, (b, 2 * height, 2 * width, c), "nearest"))
        return self.final(nnx.silu(self.final_norm(x)))
