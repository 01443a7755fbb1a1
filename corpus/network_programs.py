"""Neural networks as their libraries document them: Flax linen and nnx, Haiku, Equinox, Penzai, Jraph, flaxmodels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from corpus.registry import Case, normal, program, tokens, training


def _classes(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@program(
    "flax",
    "train",
    "fit",
    small=dict(layers=2, width=64, heads=4, hidden=128, vocabulary=512, batch=8, length=32),
    full=dict(layers=16, width=2048, heads=16, hidden=8192, vocabulary=32000, batch=64, length=1024),
)
def linen_lm(layers: int, width: int, heads: int, hidden: int, vocabulary: int, batch: int, length: int) -> Case:
    """A linen decoder in bfloat16: nn.scan over nn.remat blocks, tied embedding, AdamW."""
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
            attention = nn.MultiHeadDotProductAttention(heads, qkv_features=width, dtype=jnp.bfloat16)
            x = x + attention(nn.RMSNorm()(x), mask=mask)
            up = nn.Dense(hidden, dtype=jnp.bfloat16)(nn.RMSNorm()(x))
            return x + nn.Dense(width, dtype=jnp.bfloat16)(nn.gelu(up)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, text: jax.Array) -> jax.Array:
            embed = nn.Embed(vocabulary, width)
            blocks = nn.scan(
                nn.remat(Block),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=layers,
                in_axes=nn.broadcast,
            )
            x, _ = blocks()(embed(text), nn.make_causal_mask(text))
            return embed.attend(nn.LayerNorm()(x))

    model = Model()

    def loss(params: Any, text: jax.Array) -> jax.Array:
        return _classes(model.apply(params, text)[:, :-1], text[:, 1:])

    text = tokens(batch, length, below=vocabulary)
    return training(loss, optax.adamw(1e-3), lambda: model.init(jax.random.key(0), text()), text)


@program(
    "flax",
    "train",
    "test",
    small=dict(layers=2, width=64, heads=4, patch=8, image=32, batch=16),
    full=dict(layers=24, width=1024, heads=16, patch=16, image=224, batch=256),
)
def nnx_vit(layers: int, width: int, heads: int, patch: int, image: int, batch: int) -> Case:
    """An nnx vision transformer, unrolled, split into graph and state; nnx.Optimizer with Lion."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first, self.second = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
            self.up = nnx.Linear(width, 4 * width, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.attention(self.first(x))
            return x + self.down(nnx.gelu(self.up(self.second(x))))

    class ViT(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Conv(3, width, (patch, patch), strides=(patch, patch), padding="VALID", rngs=rngs)
            self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), ((image // patch) ** 2, width)))
            self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
            self.head = nnx.Linear(width, 1000, rngs=rngs)

        def __call__(self, images: jax.Array) -> jax.Array:
            x = self.embed(images).reshape(images.shape[0], -1, width) + self.positions[...]
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(1))

    def create() -> tuple[Any, Any]:
        model = ViT(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.lion(1e-4), wrt=nnx.Param)

    graph, _ = nnx.split(nnx.eval_shape(create))

    def step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(lambda m: _classes(m(images), labels))(model)
        optimizer.update(model, gradients)
        return nnx.split((model, optimizer))[1], loss

    def make() -> tuple[Any, ...]:
        return nnx.split(create())[1], normal(batch, image, image, 3)(), tokens(batch, below=1000)()

    return Case(step, make, donate=(0,))


@program(
    "dm-haiku",
    "train",
    "test",
    small=dict(depth=18, image=32, batch=8),
    full=dict(depth=50, image=224, batch=512),
)
def haiku_resnet(depth: int, image: int, batch: int) -> Case:
    """Haiku's ResNet with BatchNorm statistics, SGD with momentum."""
    import haiku as hk

    network = {18: hk.nets.ResNet18, 50: hk.nets.ResNet50}[depth]
    model = hk.transform_with_state(lambda x: network(1000)(x, is_training=True))
    optimizer = optax.sgd(0.1, 0.9)

    def step(params: Any, statistics: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            logits, moved = model.apply(params, statistics, None, images)
            return _classes(logits, labels), moved

        (value, moved), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), moved, state, value

    def make() -> tuple[Any, ...]:
        images = normal(batch, image, image, 3)()
        params, statistics = model.init(jax.random.key(0), images)
        return params, statistics, optimizer.init(params), images, tokens(batch, below=1000)()

    return Case(step, make, donate=(0, 1, 2))


@program(
    "dm-haiku",
    "infer",
    "fit",
    small=dict(width=64, hidden=128, vocabulary=512, batch=8, length=32),
    full=dict(width=1024, hidden=4096, vocabulary=32000, batch=256, length=256),
)
def haiku_lstm(width: int, hidden: int, vocabulary: int, batch: int, length: int) -> Case:
    """A Haiku language model: embedding, two LSTMs by dynamic_unroll, linear."""
    import haiku as hk

    def forward(text: jax.Array) -> jax.Array:
        core = hk.DeepRNN([hk.LSTM(hidden), jax.nn.relu, hk.LSTM(hidden)])
        x = hk.Embed(vocabulary, width)(text.T)
        out, _ = hk.dynamic_unroll(core, x, core.initial_state(batch))
        return hk.Linear(vocabulary)(out)

    model = hk.without_apply_rng(hk.transform(forward))
    text = tokens(batch, length, below=vocabulary)
    return Case(model.apply, lambda: (model.init(jax.random.key(0), text()), text()))


@program(
    "equinox",
    "train",
    "test",
    small=dict(layers=2, width=64, heads=4, batch=8, length=32),
    full=dict(layers=12, width=1024, heads=16, batch=64, length=512),
)
def equinox_transformer(layers: int, width: int, heads: int, batch: int, length: int) -> Case:
    """Equinox attention with rotary embedding and MLP blocks under vmap, filtered and partitioned; Adam."""
    import equinox as eqx

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        rope: eqx.nn.RotaryPositionalEmbedding
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __init__(self, key: jax.Array):
            first, second = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(heads, width, key=first)
            self.rope = eqx.nn.RotaryPositionalEmbedding(width // heads)
            self.norm = eqx.nn.LayerNorm(width)
            self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=second)

        def __call__(self, x: jax.Array) -> jax.Array:
            def rotate(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
                turn = jax.vmap(self.rope, in_axes=1, out_axes=1)
                return turn(q), turn(k), v

            y = jax.vmap(self.norm)(x)
            x = x + self.attention(y, y, y, process_heads=rotate)
            return x + jax.vmap(self.mlp)(x)

    def create() -> Any:
        return [Block(key) for key in jax.random.split(jax.random.key(0), layers)]

    static = eqx.partition(eqx.filter_eval_shape(create), lambda x: isinstance(x, jax.ShapeDtypeStruct))[1]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        blocks = eqx.combine(params, static)

        def apply(example: jax.Array) -> jax.Array:
            for block in blocks:
                example = block(example)
            return example

        return jnp.mean((jax.vmap(apply)(x) - x) ** 2)

    params = lambda: eqx.filter(create(), eqx.is_array)  # noqa: E731
    return training(loss, optax.adam(1e-3), params, normal(batch, length, width))


@program(
    "equinox",
    "infer",
    "fit",
    small=dict(width=32, batch=16, image=32),
    full=dict(width=256, batch=256, image=64),
)
def equinox_unet_block(width: int, batch: int, image: int) -> Case:
    """An Equinox convolutional autoencoder: Conv2d, GroupNorm, ConvTranspose2d under vmap."""
    import equinox as eqx

    def create() -> Any:
        keys = jax.random.split(jax.random.key(0), 5)
        return eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(3, width, 3, stride=2, padding=1, key=keys[0]),
                eqx.nn.GroupNorm(8, width),
                eqx.nn.Lambda(jax.nn.silu),
                eqx.nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, key=keys[1]),
                eqx.nn.GroupNorm(8, 2 * width),
                eqx.nn.Lambda(jax.nn.silu),
                eqx.nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, key=keys[2]),
                eqx.nn.Lambda(jax.nn.silu),
                eqx.nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1, key=keys[3]),
            ]
        )

    static = eqx.partition(eqx.filter_eval_shape(create), lambda x: isinstance(x, jax.ShapeDtypeStruct))[1]

    def decode(params: Any, images: jax.Array) -> jax.Array:
        return jax.vmap(eqx.combine(params, static))(images)

    return Case(decode, lambda: (eqx.filter(create(), eqx.is_array), normal(batch, 3, image, image)()))


@program(
    "penzai",
    "infer",
    "test",
    small=dict(layers=2, width=64, heads=4, groups=2, vocabulary=512, batch=8, length=32),
    full=dict(layers=16, width=2048, heads=16, groups=4, vocabulary=32000, batch=32, length=1024),
)
def penzai_llama(layers: int, width: int, heads: int, groups: int, vocabulary: int, batch: int, length: int) -> Case:
    """A Llama-like transformer of Penzai on named axes, layers stacked in a scan."""
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common

    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=groups,
        query_head_multiplier=heads // groups,
        embedding_dim=width,
        projection_dim=width // heads,
        mlp_hidden_dim=4 * width,
        num_decoder_blocks=layers,
        vocab_size=vocabulary,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
        use_layer_stack=True,
    )

    def params() -> dict[str, Any]:
        _, variables = pz.unbind_params(llamalike_common.build_llamalike_transformer(config, jax.random.key(0)))
        return {variable.label: variable.value for variable in variables}

    unbound, _ = pz.unbind_params(llamalike_common.build_llamalike_transformer(config, init_base_rng=None))

    def logits(params: Any, text: jax.Array) -> jax.Array:
        values = [pz.ParameterValue(label=label, value=value) for label, value in params.items()]
        model = pz.bind_variables(unbound, values)
        return model(pz.nx.wrap(text).tag("batch", "seq")).unwrap("batch", "seq", "vocabulary")

    return Case(logits, lambda: (params(), tokens(batch, length, below=vocabulary)()))


@program(
    "jraph",
    "train",
    "fit",
    small=dict(nodes=256, edges=1024, width=32),
    full=dict(nodes=262144, edges=2097152, width=256),
)
def jraph_network(nodes: int, edges: int, width: int) -> Case:
    """A graph network with edge, node and global updates (segment sums), Haiku MLPs, Adam."""
    import haiku as hk
    import jraph

    @jraph.concatenated_args
    def update(features: jax.Array) -> jax.Array:
        return hk.nets.MLP([width, width])(features)

    def forward(graph: Any) -> jax.Array:
        network = jraph.GraphNetwork(update, update, update)
        return network(network(graph)).globals

    model = hk.without_apply_rng(hk.transform(forward))

    def graph() -> Any:
        senders, receivers = tokens(edges, below=nodes)(), tokens(edges, below=nodes, seed=5)()
        return jraph.GraphsTuple(
            nodes=normal(nodes, width)(),
            edges=normal(edges, width, seed=6)(),
            globals=jnp.ones((1, width)),
            senders=senders,
            receivers=receivers,
            n_node=jnp.array([nodes]),
            n_edge=jnp.array([edges]),
        )

    def loss(params: Any, graph: Any) -> jax.Array:
        return jnp.mean(model.apply(params, graph) ** 2)

    return training(loss, optax.adam(1e-3), lambda: model.init(jax.random.key(0), graph()), graph)


@program(
    "flaxmodels",
    "infer",
    "fit",
    small=dict(image=32, batch=8),
    full=dict(image=224, batch=256),
)
def flaxmodels_vgg(image: int, batch: int) -> Case:
    """VGG16 of flaxmodels: convolutions, pooling, wide linear layers."""
    import flaxmodels

    model = flaxmodels.VGG16(output="logits", pretrained=None, include_head=image > 32)

    def classify(params: Any, images: jax.Array) -> jax.Array:
        return model.apply(params, images, train=False)

    def make() -> tuple[Any, ...]:
        images = jax.random.uniform(jax.random.key(1), (batch, image, image, 3))
        return model.init(jax.random.key(0), images), images

    return Case(classify, make)
