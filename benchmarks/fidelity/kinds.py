"""Small programs of many kinds, part of the fit set of ``benchmarks.fidelity.corpus``: what people write in JAX beside
transformers. A program is a function of arrays; its decorator has their types, as ``f32[8,4]``; those of scalars are ``i32[]``,
and a name before the type makes the arrays of a dictionary. ``kinds_more.py`` has the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jax import lax

from corpus.registry import Case, Program

_DTYPES: Final = {"f32": "float32", "bf16": "bfloat16", "i32": "int32", "u32": "uint32", "u8": "uint8", "i8": "int8"}
PROGRAMS: Final[dict[str, Program]] = {}
Array = jax.Array
Dict = dict[str, Any]


def struct(text: str) -> jax.ShapeDtypeStruct:
    """The type of an argument.

    >>> struct("bf16[8,4]")
    ShapeDtypeStruct(shape=(8, 4), dtype=bfloat16)
    """
    match = re.fullmatch(r"(\w+)\[([\d,]*)\]", text)
    assert match is not None, text
    return jax.ShapeDtypeStruct(tuple(int(d) for d in match[2].split(",") if d), _DTYPES[match[1]])


def kind(
    *types: str | dict[str, str], donate: tuple[int, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function of arrays of these types."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        name = fn.__name__.replace("_", "-")

        def make() -> tuple[Any, ...]:
            return tuple(jax.tree.map(lambda t: jnp.zeros(struct(t).shape, struct(t).dtype), t) for t in types)

        PROGRAMS[name] = Program(
            f"kind {name}", "shardwise", "infer", "fit", name, lambda: Case(fn, make, donate), {}, {}
        )
        return fn

    return register


def trained(loss: Callable[..., Array], params: Any, *batch: Any, rate: float = 1e-2) -> Any:
    """Parameters after one step of gradient descent, and the loss."""
    value, gradients = jax.value_and_grad(loss)(params, *batch)
    return jax.tree.map(lambda p, g: p - rate * g, params, gradients), value


def convolved(x: Array, w: Array, stride: int = 1, groups: int = 1) -> Array:
    """``[batch, ..., channels]`` with a kernel ``[..., in, out]``."""
    space = "XYZ"[: x.ndim - 2]
    dims = (f"N{space}C", f"{space}IO", f"N{space}C")
    return lax.conv_general_dilated(
        x, w, (stride,) * (x.ndim - 2), "SAME", dimension_numbers=dims, feature_group_count=groups
    )


# Images.


@kind("f32[4096,96,96,3]", "f32[4096]")
def color_jitter(images: Array, strength: Array) -> Array:
    x = images * (1 + strength[:, None, None, None])
    mean = x.mean((1, 2, 3), keepdims=True)
    x = (x - mean) * 1.3 + mean
    gray = (x * jnp.array([0.299, 0.587, 0.114])).sum(-1, keepdims=True)
    return jnp.clip(gray + 0.7 * (x - gray), 0, 1)


@kind("u8[4096,96,96,3]", "u32[2]")
def crop_and_flip(images: Array, key: Array) -> Array:
    first, second = jax.random.split(jax.random.wrap_key_data(key))
    at = jax.random.randint(first, (4096, 2), 0, 16)
    crop = jax.vmap(lambda x, o: lax.dynamic_slice(x, (o[0], o[1], 0), (80, 80, 3)))(images, at)
    flip = jax.random.bernoulli(second, 0.5, (4096, 1, 1, 1))
    return jnp.where(flip, crop[:, :, ::-1], crop).astype(jnp.float32) / 255 - 0.5


@kind("f32[1024,128,128,3]")
def gaussian_blur(images: Array) -> Array:
    window = jnp.exp(-((jnp.arange(7) - 3.0) ** 2) / 4)
    rows, columns = window[:, None], window[None]
    x = convolved(images, jnp.broadcast_to(rows[:, :, None, None], (7, 1, 1, 3)), groups=3)
    return convolved(x, jnp.broadcast_to(columns[:, :, None, None], (1, 7, 1, 3)), groups=3)


@kind("f32[512,64,64,3]", "f32[512]")
def rotate_images(images: Array, angle: Array) -> Array:
    def one(image: Array, a: Array) -> Array:
        y, x = jnp.meshgrid(jnp.arange(64.0) - 32, jnp.arange(64.0) - 32, indexing="ij")
        at = [jnp.cos(a) * y - jnp.sin(a) * x + 32, jnp.sin(a) * y + jnp.cos(a) * x + 32]
        turned = [jax.scipy.ndimage.map_coordinates(image[..., c], at, order=1) for c in range(3)]
        return jnp.stack(turned, -1)

    return jax.vmap(one)(images, angle)


@kind("f32[1024,128,128,3]")
def resize_images(images: Array) -> Array:
    return jax.image.resize(images, (1024, 96, 96, 3), "bilinear")


@kind("f32[2048,224,224,3]", "f32[768,1024]")
def patch_embedding(images: Array, w: Array) -> Array:
    x = images.reshape(2048, 14, 16, 14, 16, 3).transpose(0, 1, 3, 2, 4, 5).reshape(2048, 196, 768)
    return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)


@kind("f32[1024,64,64,48]")
def pixel_shuffle(x: Array) -> Array:
    return x.reshape(1024, 64, 64, 4, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(1024, 256, 256, 3)


# Convolutions with few channels.


@kind(
    {"a": "f32[3,3,1,16]", "b": "f32[3,3,16,32]", "c": "f32[1568,128]", "d": "f32[128,10]"},
    "f32[8192,28,28,1]",
    "i32[8192]",
    donate=(0,),
)
def digit_classifier(params: Dict, images: Array, labels: Array) -> Any:
    def loss(p: Dict) -> Array:
        x = jax.nn.relu(convolved(images, p["a"], 2))
        x = jax.nn.relu(convolved(x, p["b"], 2)).reshape(8192, 1568)
        logits = jax.nn.relu(x @ p["c"]) @ p["d"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return trained(loss, params)


@kind("f32[512,16000,1]", {"a": "f32[64,1,32]", "b": "f32[9,32,64]", "c": "f32[9,64,64]"})
def audio_convolutions(waves: Array, p: Dict) -> Array:
    x = jax.nn.relu(convolved(waves, p["a"], 8))
    x = jax.nn.relu(convolved(x, p["b"], 4))
    return convolved(x, p["c"], 2).mean(1)


@kind("bf16[512,56,56,96]", {"up": "bf16[1,1,96,384]", "deep": "bf16[3,3,1,384]", "down": "bf16[1,1,384,96]"})
def inverted_bottleneck(x: Array, p: Dict) -> Array:
    y = jax.nn.relu6(convolved(x, p["up"]))
    y = jax.nn.relu6(convolved(y, p["deep"], groups=384))
    return x + convolved(y, p["down"])


@kind("f32[64,48,48,48,4]", {"a": "f32[3,3,3,4,16]", "b": "f32[3,3,3,16,16]", "c": "f32[1,1,1,16,2]"}, donate=(1,))
def voxel_segmentation(x: Array, params: Dict) -> Any:
    def loss(p: Dict) -> Array:
        y = jax.nn.relu(convolved(x, p["a"]))
        y = jax.nn.relu(convolved(y, p["b"]))
        return jnp.square(convolved(y, p["c"])).mean()

    return trained(loss, params)


@kind(
    {
        "e": "f32[4,4,3,32]",
        "f": "f32[4,4,32,64]",
        "m": "f32[4096,64]",
        "d": "f32[32,4096]",
        "g": "f32[4,4,64,32]",
        "h": "f32[4,4,32,3]",
    },
    "f32[1024,32,32,3]",
    "u32[2]",
    donate=(0,),
)
def image_vae(params: Dict, images: Array, key: Array) -> Any:
    def loss(p: Dict) -> Array:
        x = jax.nn.silu(convolved(images, p["e"], 2))
        x = jax.nn.silu(convolved(x, p["f"], 2)).reshape(1024, 4096) @ p["m"]
        mean, log_var = x[:, :32], x[:, 32:]
        noise = jax.random.normal(jax.random.wrap_key_data(key), mean.shape)
        y = ((mean + noise * jnp.exp(0.5 * log_var)) @ p["d"]).reshape(1024, 8, 8, 64)
        y = jax.nn.silu(lax.conv_transpose(y, p["g"], (2, 2), "SAME"))
        y = lax.conv_transpose(y, p["h"], (2, 2), "SAME")
        divergence = -0.5 * (1 + log_var - mean**2 - jnp.exp(log_var)).sum(-1)
        return (jnp.square(y - images).sum((1, 2, 3)) + divergence).mean()

    return trained(loss, params)


@kind("f32[512,64,64,64]", "f32[64]", "f32[64]")
def group_normalization(x: Array, scale: Array, bias: Array) -> Array:
    y = x.reshape(512, 64, 64, 8, 8)
    y = (y - y.mean((1, 2, 4), keepdims=True)) * lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-5)
    return jax.nn.silu(y.reshape(x.shape) * scale + bias)


# Rollouts, physics, integrators.


@kind("f32[262144,4]", {"a": "f32[4,32]", "b": "f32[32,2]"}, "u32[2]")
def cart_pole(state: Array, p: Dict, key: Array) -> Any:
    def step(carry: Any, key: Array) -> Any:
        x, v, angle, speed = jnp.moveaxis(carry, -1, 0)
        action = jax.random.categorical(key, jnp.tanh(carry @ p["a"]) @ p["b"])
        force = jnp.where(action == 1, 10.0, -10.0)
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        inner = (force + 0.05 * speed**2 * sin) / 1.1
        turning = (9.8 * sin - cos * inner) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        push = inner - 0.05 * turning * cos / 1.1
        new = jnp.stack([x + 0.02 * v, v + 0.02 * push, angle + 0.02 * speed, speed + 0.02 * turning], -1)
        over = (jnp.abs(new[:, 0]) > 2.4) | (jnp.abs(new[:, 2]) > 0.2)
        return jnp.where(over[:, None], 0.0, new), (carry, action, over)

    return lax.scan(step, state, jax.random.split(jax.random.wrap_key_data(key), 100))


@kind("i32[65536,16,16]", "i32[65536,2]", "u32[2]")
def grid_world(board: Array, place: Array, key: Array) -> Any:
    moves = jnp.array([[0, 1], [1, 0], [0, -1], [-1, 0]])

    def step(carry: Any, key: Array) -> Any:
        board, place = carry
        action = jax.random.randint(key, (65536,), 0, 4)
        new = jnp.clip(place + moves[action], 0, 15)
        here = jax.vmap(lambda b, p: b[p[0], p[1]])(board, new)
        board = jax.vmap(lambda b, p: b.at[p[0], p[1]].set(0))(board, new)
        return (board, new), (here > 0).astype(jnp.float32)

    return lax.scan(step, (board, place), jax.random.split(jax.random.wrap_key_data(key), 50))


@kind("f32[1048576,4]")
def double_pendulum(state: Array) -> Array:
    def slope(s: Array) -> Array:
        a, b, u, v = (s[:, k] for k in range(4))
        cos, sin = jnp.cos(a - b), jnp.sin(a - b)
        left = (-(v**2) * sin - u**2 * sin * cos + 9.8 * (jnp.sin(b) * cos - 2 * jnp.sin(a))) / (2 - cos**2)
        right = (2 * u**2 * sin + v**2 * sin * cos + 19.6 * (jnp.sin(a) * cos - jnp.sin(b))) / (2 - cos**2)
        return jnp.stack([u, v, left, right], -1)

    def step(_: Any, s: Array) -> Array:
        k1 = slope(s)
        k2 = slope(s + 0.005 * k1)
        k3 = slope(s + 0.005 * k2)
        k4 = slope(s + 0.01 * k3)
        return s + 0.01 / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    return lax.fori_loop(0, 100, step, state)


@kind("f32[8192,3]", "f32[8192,3]", "f32[8192]")
def all_pairs_gravity(x: Array, v: Array, mass: Array) -> Any:
    def force(x: Array) -> Array:
        apart = x[None] - x[:, None]
        return (apart * (mass / ((apart**2).sum(-1) + 1e-3) ** 1.5)[..., None]).sum(1)

    def step(_: Any, carry: Any) -> Any:
        x, v = carry
        v = v + 0.01 * force(x)
        return x + 0.01 * v, v

    return lax.fori_loop(0, 5, step, (x, v))


@kind("f32[4096,4096]")
def heat_equation(u: Array) -> Array:
    def step(_: Any, u: Array) -> Array:
        around = jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 1, 1) + jnp.roll(u, -1, 1)
        return u + 0.1 * (around - 4 * u)

    return lax.fori_loop(0, 20, step, u)


@kind("f32[8,192,192,192]", "f32[8,192,192,192]", donate=(0, 1))
def wave_equation(u: Array, before: Array) -> Any:
    middle = u[:, 1:-1, 1:-1, 1:-1]
    around = u[:, 2:, 1:-1, 1:-1] + u[:, :-2, 1:-1, 1:-1] + u[:, 1:-1, 2:, 1:-1] + u[:, 1:-1, :-2, 1:-1]
    around += u[:, 1:-1, 1:-1, 2:] + u[:, 1:-1, 1:-1, :-2]
    new = 2 * middle - before[:, 1:-1, 1:-1, 1:-1] + 0.2 * (around - 6 * middle)
    return jnp.pad(new, ((0, 0), (1, 1), (1, 1), (1, 1))), u


@kind("u8[64,1024,1024]")
def game_of_life(board: Array) -> Array:
    def step(_: Any, b: Array) -> Array:
        padded = jnp.pad(b, ((0, 0), (1, 1), (1, 1))).astype(jnp.int32)
        around = sum(padded[:, i : i + 1024, j : j + 1024] for i in range(3) for j in range(3) if (i, j) != (1, 1))
        return ((around == 3) | ((around == 2) & (b > 0))).astype(jnp.uint8)

    return lax.fori_loop(0, 8, step, board)


@kind("f32[1048576,3]", "f32[1048576,3]", "f32[64,3]", "f32[64]")
def ray_spheres(start: Array, ray: Array, center: Array, radius: Array) -> Any:
    ray = ray / jnp.linalg.norm(ray, axis=-1, keepdims=True)
    to = start[:, None] - center
    b, c = (to * ray[:, None]).sum(-1), (to**2).sum(-1) - radius**2
    root = b**2 - c
    at = jnp.where(root > 0, -b - jnp.sqrt(jnp.maximum(root, 1e-6)), jnp.inf)
    nearest, first = at.min(-1), at.argmin(-1)
    point = start + nearest[:, None] * ray
    normal = (point - center[first]) / radius[first][:, None]
    return jnp.where(jnp.isfinite(nearest), jnp.maximum((normal * ray).sum(-1), 0), 0), point


@kind("f32[4194304,4]", "f32[4194304,3]")
def quaternion_rotation(q: Array, x: Array) -> Array:
    q = q / jnp.linalg.norm(q, axis=-1, keepdims=True)
    w, u = q[:, :1], q[:, 1:]
    return x + 2 * jnp.cross(u, jnp.cross(u, x) + w * x)
