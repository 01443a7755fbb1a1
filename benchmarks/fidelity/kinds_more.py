"""More small programs of many kinds: lookups, sorts, linear algebra, probability, learning (``kinds.py``)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks.fidelity.kinds import Array, Dict, kind, trained

# Lookups, segments, sorts.


@kind("f32[1000000,32]", "i32[65536,20]", "f32[32,64]")
def embedding_bag(table: Array, ids: Array, w: Array) -> Array:
    return jax.nn.relu(table[ids].sum(1) @ w)


@kind("f32[16777216]", "i32[16777216]")
def binned_means(values: Array, bins: Array) -> Array:
    total = jax.ops.segment_sum(values, bins, 4096)
    return total / jnp.maximum(jax.ops.segment_sum(jnp.ones_like(values), bins, 4096), 1)


@kind("f32[65536,64]", "i32[524288]", "i32[524288]", {"w": "f32[64,64]", "a": "f32[128]"})
def graph_attention(nodes: Array, senders: Array, receivers: Array, p: Dict) -> Array:
    h = nodes @ p["w"]
    score = jax.nn.leaky_relu(jnp.concatenate([h[senders], h[receivers]], -1) @ p["a"])
    top = jax.ops.segment_max(score, receivers, 65536)
    weight = jnp.exp(score - top[receivers])
    total = jax.ops.segment_sum(weight, receivers, 65536)
    return jax.ops.segment_sum(h[senders] * (weight / total[receivers])[:, None], receivers, 65536)


@kind("f32[8192,64]", "f32[65536,64]", "i32[65536]")
def nearest_neighbors(queries: Array, points: Array, labels: Array) -> Array:
    distance = (queries**2).sum(-1)[:, None] - 2 * queries @ points.T + (points**2).sum(-1)
    _, near = lax.top_k(-distance, 16)
    return jax.nn.one_hot(labels[near], 10).sum(1).argmax(-1)


@kind("f32[16384,1000]")
def row_quantiles(x: Array) -> Array:
    ordered = jnp.sort(x, -1)
    return ordered[:, jnp.array([100, 250, 500, 750, 900])].mean(0)


@kind("f32[512,32000]", "u32[2]")
def nucleus_sampling(logits: Array, key: Array) -> Array:
    ordered = jnp.sort(logits, -1)[:, ::-1]
    below = jnp.cumsum(jax.nn.softmax(ordered), -1) < 0.9
    least = jnp.where(below, ordered, jnp.inf).min(-1, keepdims=True)
    return jax.random.categorical(jax.random.wrap_key_data(key), jnp.where(logits < least, -1e9, logits))


@kind("f32[131072,20]", "i32[64,63]", "f32[64,63]", "f32[64,64]")
def boosted_trees(x: Array, feature: Array, threshold: Array, leaf: Array) -> Array:
    def tree(f: Array, t: Array, values: Array) -> Array:
        node = jnp.zeros(131072, jnp.int32)
        for _ in range(6):
            right = jnp.take_along_axis(x, f[node][:, None], 1)[:, 0] > t[node]
            node = 2 * node + 1 + right
        return values[node - 63]

    return lax.map(lambda p: tree(*p), (feature, threshold, leaf)).sum(0)


@kind("f32[4096,512]", "i32[4096,512]")
def permuted_rows(x: Array, order: Array) -> Array:
    first = jnp.take_along_axis(x, jnp.argsort(order, -1), 1)
    return jnp.cumsum(first, -1) / (1 + jnp.arange(512))


@kind("i32[65536,128]", "f32[1024,256]")
def one_hot_lookup(ids: Array, table: Array) -> Array:
    hot = jax.nn.one_hot(ids[:, :8], 1024, dtype=jnp.bfloat16)
    return jnp.einsum("bnv,vd->bd", hot, table.astype(jnp.bfloat16))


@kind("i32[4194304]", "i32[4194304]", "f32[4194304]")
def confusion_matrix(label: Array, guess: Array, weight: Array) -> Array:
    return jnp.einsum("ni,nj,n->ij", jax.nn.one_hot(label, 16), jax.nn.one_hot(guess, 16), weight)


# Sums, random numbers.


@kind("f32[67108864]", "f32[67108864]")
def regression_metrics(x: Array, y: Array) -> Any:
    error = x - y
    return {
        "mse": (error**2).mean(),
        "mae": jnp.abs(error).mean(),
        "r2": 1 - (error**2).sum() / ((y - y.mean()) ** 2).sum(),
        "corr": ((x - x.mean()) * (y - y.mean())).mean() / (x.std() * y.std()),
        "top": jnp.abs(error).max(),
    }


@kind("f32[8192,8192]")
def running_sums(x: Array) -> Array:
    total = jnp.cumsum(x, -1)
    return (total[:, 64:] - total[:, :-64]) / 64 - lax.cummax(x, axis=1)[:, 64:]


@kind("f32[256,4096,64]", "f32[256,4096,64]")
def linear_recurrence(a: Array, b: Array) -> Array:
    def join(first: Any, second: Any) -> Any:
        return first[0] * second[0], second[0] * first[1] + second[1]

    return lax.associative_scan(join, (jax.nn.sigmoid(a), b), axis=1)[1]


@kind("u32[2]", "f32[4096,8192]")
def random_masks(key: Array, x: Array) -> Array:
    first, second, third = jax.random.split(jax.random.wrap_key_data(key), 3)
    noise = jax.random.normal(first, x.shape)
    keep = jax.random.bernoulli(second, 0.9, x.shape)
    return jnp.where(keep, (x + 0.1 * noise) / 0.9, 0) + jax.random.uniform(third, x.shape)


@kind("u32[2]", "f32[1048576]", "f32[1048576]")
def option_prices(key: Array, spot: Array, strike: Array) -> Any:
    def step(price: Array, key: Array) -> Any:
        price = price * jnp.exp(0.0001 + 0.01 * jax.random.normal(key, price.shape))
        return price, price.mean()

    price, means = lax.scan(step, spot, jax.random.split(jax.random.wrap_key_data(key), 64))
    return jnp.maximum(price - strike, 0).mean(), means


# Linear algebra, transforms.


@kind("f32[2097152,3,3]", "f32[2097152,3]")
def small_inverses(a: Array, b: Array) -> Array:
    rows = [jnp.cross(a[:, (k + 1) % 3], a[:, (k + 2) % 3]) for k in range(3)]
    determinant = (a[:, 0] * rows[0]).sum(-1)
    return jnp.einsum("nij,ni->nj", jnp.stack(rows, 1), b) / determinant[:, None]


@kind("f32[8192,24,24]", "f32[8192,24]")
def small_cholesky(a: Array, b: Array) -> Array:
    spd = a @ a.mT + 24 * jnp.eye(24)
    factor = jnp.linalg.cholesky(spd)
    return jax.scipy.linalg.cho_solve((factor, True), b[..., None])[..., 0]


@kind("f32[16384,4]", "f32[16384,4,4]", "f32[16384,100,2]", "f32[4,4]", "f32[2,4]")
def kalman_filter(mean: Array, cov: Array, seen: Array, f: Array, h: Array) -> Any:
    def step(carry: Any, y: Array) -> Any:
        m, c = carry
        m, c = m @ f.T, f @ c @ f.T + 0.1 * jnp.eye(4)
        s = h @ c @ h.T + jnp.eye(2)
        gain = c @ h.T @ _inverse_2(s)
        m = m + jnp.einsum("nij,nj->ni", gain, y - m @ h.T)
        return (m, c - gain @ h @ c), m

    return lax.scan(step, (mean, cov), jnp.moveaxis(seen, 1, 0))


def _inverse_2(s: Array) -> Array:
    a, b, c, d = s[:, 0, 0], s[:, 0, 1], s[:, 1, 0], s[:, 1, 1]
    return jnp.stack([jnp.stack([d, -b], -1), jnp.stack([-c, a], -1)], 1) / (a * d - b * c)[:, None, None]


@kind("f32[2048,4096]", "f32[4096]")
def long_convolution(x: Array, filter: Array) -> Array:
    spectrum = jnp.fft.rfft(x, 8192) * jnp.fft.rfft(filter, 8192)
    return jnp.fft.irfft(spectrum, 8192)[:, :4096]


@kind("f32[64,512,512]")
def poisson_solver(rhs: Array) -> Array:
    k = jnp.fft.fftfreq(512) * 2 * jnp.pi
    square = k[:, None] ** 2 + k**2
    return jnp.fft.ifft2(jnp.fft.fft2(rhs) / jnp.where(square == 0, 1, -square)).real


@kind("f32[64,64]", "f32[65536,64]")
def power_iteration(a: Array, x: Array) -> Array:
    def step(_: Any, x: Array) -> Array:
        y = x @ a
        return y / jnp.linalg.norm(y, axis=-1, keepdims=True)

    return lax.fori_loop(0, 30, step, x)


@kind("f32[1048576]", "f32[1048576]")
def newton_roots(a: Array, x: Array) -> Array:
    def step(carry: Any) -> Any:
        x, k, _ = carry
        new = x - (x**3 - a) / (3 * x**2 + 1e-6)
        return new, k + 1, jnp.abs(new - x).max()

    return lax.while_loop(lambda c: (c[1] < 50) & (c[2] > 1e-6), step, (x, 0, jnp.float32(1)))[0]


# Probability.


@kind("f32[262144,16]", "f32[64,16]", "f32[64,16]", "f32[64]")
def gaussian_mixture(x: Array, mean: Array, scale: Array, weight: Array) -> Any:
    z = (x[:, None] - mean) / scale
    log_p = -0.5 * (z**2).sum(-1) - jnp.log(scale).sum(-1) + jax.nn.log_softmax(weight)
    share = jax.nn.softmax(log_p)
    total = share.sum(0)
    new = share.T @ x / total[:, None]
    return new, share.T @ x**2 / total[:, None] - new**2, total, jax.nn.logsumexp(log_p, -1).mean()


@kind("f32[1048576,32]", "f32[256,32]")
def k_means(x: Array, centers: Array) -> Array:
    nearest = ((centers**2).sum(-1) - 2 * x @ centers.T).argmin(-1)
    total = jax.ops.segment_sum(x, nearest, 256)
    return total / jnp.maximum(jax.ops.segment_sum(jnp.ones(len(x)), nearest, 256), 1)[:, None]


@kind("f32[4096,128,32]", "f32[32,32]")
def hidden_markov(scores: Array, links: Array) -> Array:
    def step(alpha: Array, s: Array) -> Any:
        new = jax.nn.logsumexp(alpha[:, :, None] + links, 1) + s
        return new, new.max(-1)

    alpha, _ = lax.scan(step, scores[:, 0], jnp.moveaxis(scores, 1, 0))
    return jax.nn.logsumexp(alpha, -1).mean()


@kind({"a": "f32[6,16,128]", "b": "f32[6,128,128]", "c": "f32[6,128,32]"}, "f32[262144,32]", donate=(0,))
def coupling_flow(params: Dict, x: Array) -> Any:
    def loss(p: Dict) -> Array:
        y, volume = x, jnp.zeros(len(x))
        for k in range(6):
            left, right = jnp.split(y, 2, -1)
            h = jnp.tanh(jnp.tanh(left @ p["a"][k]) @ p["b"][k]) @ p["c"][k]
            scale, shift = jnp.tanh(h[:, :16]), h[:, 16:]
            y = jnp.concatenate([right * jnp.exp(scale) + shift, left], -1)
            volume += scale.sum(-1)
        return (0.5 * (y**2).sum(-1) - volume).mean()

    return trained(loss, params)


# Learning.


@kind({"a": "f32[64,16,64]", "b": "f32[64,64,64]", "c": "f32[64,64,1]"}, "f32[8192,16]", "f32[8192,1]", donate=(0,))
def mlp_ensemble(params: Dict, x: Array, y: Array) -> Any:
    def loss(p: Dict) -> Array:
        h = jax.nn.relu(jnp.einsum("bi,eih->ebh", x, p["a"]))
        h = jax.nn.relu(jnp.einsum("ebh,ehk->ebk", h, p["b"]))
        return jnp.square(jnp.einsum("ebh,eho->ebo", h, p["c"]) - y).mean()

    return trained(loss, params)


@kind({"a": "f32[2,64]", "b": "f32[64,64]", "c": "f32[64,1]"}, "f32[131072,2]", donate=(0,))
def physics_informed(params: Dict, points: Array) -> Any:
    def u(p: Dict, x: Array) -> Array:
        return (jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"])[0]

    def loss(p: Dict) -> Array:
        laplacian = jax.vmap(lambda x: jnp.trace(jax.hessian(lambda x: u(p, x))(x)))(points)
        return jnp.square(laplacian - jnp.sin(points.sum(-1))).mean()

    return trained(loss, params)


@kind({"a": "f32[63,256]", "b": "f32[256,256]", "c": "f32[256,4]"}, "f32[8192,64,3]", "f32[8192,64]")
def radiance_field(p: Dict, points: Array, depth: Array) -> Array:
    waves = points[..., None, :] * 2.0 ** jnp.arange(10)[:, None]
    x = jnp.concatenate([points, jnp.sin(waves).reshape(8192, 64, 30), jnp.cos(waves).reshape(8192, 64, 30)], -1)
    out = jax.nn.relu(jax.nn.relu(x @ p["a"]) @ p["b"]) @ p["c"]
    alpha = 1 - jnp.exp(-jax.nn.relu(out[..., 3]) * depth)
    weight = alpha * jnp.cumprod(1 - alpha + 1e-6, -1)
    return (weight[..., None] * jax.nn.sigmoid(out[..., :3])).sum(1)


@kind({"w": "f32[128,768]", "u": "f32[256,768]", "o": "f32[256,128]"}, "f32[1024,64,128]", donate=(0,))
def gated_recurrence(params: Dict, x: Array) -> Any:
    def loss(p: Dict) -> Array:
        def step(h: Array, x: Array) -> Any:
            a, b = jnp.split(x @ p["w"], [512], -1)
            c, d = jnp.split(h @ p["u"], [512], -1)
            z, r = jnp.split(jax.nn.sigmoid(a + c), 2, -1)
            h = (1 - z) * h + z * jnp.tanh(b + r * d)
            return h, h @ p["o"]

        _, y = lax.scan(step, jnp.zeros((1024, 256)), jnp.moveaxis(x, 1, 0))
        return jnp.square(y).mean()

    return trained(loss, params)


@kind("bf16[2048,200,64]", {"w": "bf16[64,512]", "u": "bf16[128,512]"})
def two_way_lstm(x: Array, p: Dict) -> Array:
    def run(x: Array) -> Array:
        def step(carry: Any, x: Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(x @ p["w"] + h @ p["u"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), jax.nn.sigmoid(o) * jnp.tanh(c)

        zero = jnp.zeros((2048, 128), jnp.bfloat16)
        return lax.scan(step, (zero, zero), x)[1]

    turned = jnp.moveaxis(x, 1, 0)
    return jnp.concatenate([run(turned), run(turned[::-1])[::-1]], -1)


@kind("f32[4096,128]", "f32[4096,128]", "f32[4096,128]")
def generalized_advantages(reward: Array, value: Array, done: Array) -> Any:
    def step(total: Array, now: Any) -> Any:
        r, v, after, d = now
        total = r + 0.99 * after * (1 - d) - v + 0.95 * total * (1 - d)
        return total, total

    after = jnp.concatenate([value[:, 1:], value[:, -1:]], 1)
    rows = tuple(x.T for x in (reward, value, after, done))
    _, advantages = lax.scan(step, jnp.zeros(4096), rows, reverse=True)
    return (advantages - advantages.mean()) / advantages.std(), advantages.T + value


@kind(
    {"q": "bf16[4,1024,1024]", "k": "bf16[4,1024,256]", "v": "bf16[4,1024,256]", "o": "bf16[4,1024,1024]"},
    "bf16[256,1024]",
    "bf16[4,256,1024,4,64]",
    "bf16[4,256,1024,4,64]",
    "i32[]",
    donate=(2, 3),
)
def decode_step(p: Dict, x: Array, keys: Array, values: Array, at: Array) -> Any:
    def layer(x: Array, this: Any) -> Any:
        w, k, v = this
        k = lax.dynamic_update_slice(k, (x @ w["k"]).reshape(256, 1, 4, 64), (0, at, 0, 0))
        v = lax.dynamic_update_slice(v, (x @ w["v"]).reshape(256, 1, 4, 64), (0, at, 0, 0))
        q = (x @ w["q"]).reshape(256, 4, 4, 64)
        s = jnp.einsum("bgqd,btgd->bgqt", q, k).astype(jnp.float32) / 8
        s = jax.nn.softmax(jnp.where(jnp.arange(1024) <= at, s, -1e9)).astype(jnp.bfloat16)
        y = jnp.einsum("bgqt,btgd->bgqd", s, v).reshape(256, 1024)
        return x + y @ w["o"], (k, v)

    return lax.scan(layer, x, (p, keys, values))


@kind("f32[64,8,32000]", "f32[64,8]", "bf16[64,8,512,64]", donate=(2,))
def beam_search(logits: Array, score: Array, cache: Array) -> Any:
    total = (score[..., None] + jax.nn.log_softmax(logits)).reshape(64, 8 * 32000)
    best, at = lax.top_k(total, 8)
    beam, token = at // 32000, at % 32000
    return best, token, jnp.take_along_axis(cache, beam[:, :, None, None], 1)


@kind("f32[256,8,256,32]", "f32[256,8,256,32]", "f32[256,8,256,32]", "f32[8,256,256]")
def biased_attention(q: Array, k: Array, v: Array, bias: Array) -> Array:
    def attend(q: Array) -> Array:
        s = jnp.einsum("bhqd,bhkd->bhqk", q, k) / 32**0.5 + bias
        e = jnp.exp(s - s.max(-1, keepdims=True))
        return jnp.einsum("bhqk,bhkd->bhqd", e / e.sum(-1, keepdims=True), v)

    return jax.grad(lambda q: jnp.square(attend(q)).sum())(q)


@kind("f32[64,2048,8,64]", "f32[64,2048,8,64]", "f32[64,2048,8,64]")
def linear_attention(q: Array, k: Array, v: Array) -> Array:
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    state = jnp.einsum("bthd,bthe->bhde", k, v)
    return jnp.einsum("bthd,bhde,bth->bthe", q, state, 1 / jnp.einsum("bthd,bhd->bth", q, k.sum(1)))


@kind("i8[8192,1024]", "i8[1024,4096]", "f32[4096]", "i8[4096,1024]")
def quantized_mlp(x: Array, up: Array, scale: Array, down: Array) -> Array:
    h = lax.dot(x, up, preferred_element_type=jnp.int32).astype(jnp.float32) * scale
    h = jnp.clip(jnp.round(jax.nn.gelu(h)), -127, 127).astype(jnp.int8)
    return lax.dot(h, down, preferred_element_type=jnp.int32).astype(jnp.bfloat16)


@kind("f32[64,1024,1024]", "f32[64,1024,1024]", "f32[64,1024,1024]", "bf16[64,1024,1024]", donate=(0, 1, 2))
def mixed_adam(w: Array, m: Array, v: Array, gradient: Array) -> Any:
    g = gradient.astype(jnp.float32)
    g = g * jnp.minimum(1, 1 / (jnp.sqrt((g**2).sum()) + 1e-6))
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    new = w - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * w)
    return new, m, v, new.astype(jnp.bfloat16)


@kind({"router": "f32[256,8]", "up": "f32[8,256,512]", "down": "f32[8,512,256]"}, "f32[32768,256]", donate=(0,))
def dense_experts(params: Dict, x: Array) -> Any:
    def loss(p: Dict) -> Array:
        share, expert = lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
        weight = (jax.nn.one_hot(expert, 8) * share[..., None]).sum(1)
        h = jax.nn.relu(jnp.einsum("nd,edh->neh", x, p["up"]))
        return jnp.square(jnp.einsum("neh,ehd,ne->nd", h, p["down"], weight)).mean()

    return trained(loss, params)


@kind(
    {"e": "f32[50000,64]", "a": "f32[26,16,64]", "w": "f32[832,256]", "o": "f32[256,1]"}, "i32[16384,13]", "f32[16384]"
)
def click_model(params: Dict, ids: Array, clicked: Array) -> Any:
    def loss(p: Dict) -> Array:
        x = p["e"][ids].reshape(16384, 832)
        logits = (jax.nn.relu(x @ p["w"]) @ p["o"])[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, clicked).mean() + 1e-6 * jnp.square(p["a"]).sum()

    return trained(loss, params)


# Windows at computed places.


@kind("f32[1024,16384]", "i32[1024]")
def audio_crops(waves: Array, start: Array) -> Array:
    return jax.vmap(lambda w, s: lax.dynamic_slice(w, (s,), (8192,)))(waves, start)


@kind("f32[64,8192,32]", "i32[4096]", "i32[4096]")
def trajectory_windows(buffer: Array, row: Array, start: Array) -> Array:
    return jax.vmap(lambda r, s: lax.dynamic_slice(buffer, (r, s, 0), (1, 64, 32))[0])(row, start).mean(1)


@kind("f32[256,160,160,3]", "i32[256,2]")
def float_crops(images: Array, at: Array) -> Array:
    return jax.vmap(lambda x, o: lax.dynamic_slice(x, (o[0], o[1], 0), (128, 128, 3)))(images, at) * 2 - 1


@kind("f32[512,64,64]", "f32[512,16,16]", "i32[512,2]")
def pasted_patches(canvas: Array, patch: Array, at: Array) -> Array:
    return jax.vmap(lambda c, p, o: lax.dynamic_update_slice(c, p, (o[0], o[1])))(canvas, patch, at)


@kind("f32[2048,2048]", "i32[8192,2]")
def image_patches(image: Array, at: Array) -> Array:
    return jax.vmap(lambda o: lax.dynamic_slice(image, (o[0], o[1]), (24, 24)))(at).std((1, 2))
