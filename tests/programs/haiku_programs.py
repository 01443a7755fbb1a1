"""Haiku's networks and recurrent cores, Penzai's transformers, Jraph's graph networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .program import (
    Program,
    Step,
    apart,
    conflicts,
    deciding_groups,
    exactly,
    loop,
    no_conflict,
    one_color,
    shape,
    tokens,
    training,
)


def _stateful_training(
    network: Callable[..., Any], loss: Callable[[Any, Any], jax.Array], optimizer: Any, batch: Any
) -> tuple[Step, tuple[Any, ...]]:
    """A training step of a Haiku network with state; ``loss(output, batch)``."""
    import haiku as hk

    model = hk.transform_with_state(network)
    params, state = jax.eval_shape(model.init, jax.random.key(0), batch)

    def step(params: Any, state: Any, moments: Any, batch: Any) -> Any:
        def evaluate(params: Any) -> tuple[jax.Array, Any]:
            output, new_state = model.apply(params, state, None, batch)
            return loss(output, batch), new_state

        (value, new_state), gradients = jax.value_and_grad(evaluate, has_aux=True)(params)
        updates, new_moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), new_state, new_moments, value

    return step, (params, state, jax.eval_shape(optimizer.init, params), batch)


def _classification(logits: jax.Array, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def _images(size: int) -> Any:
    return {"image": shape(32, size, size, 3), "label": tokens(32)}


def resnet() -> tuple[Step, tuple[Any, ...]]:
    import haiku as hk

    def network(batch: Any) -> jax.Array:
        return hk.nets.ResNet50(1000)(batch["image"], is_training=True)

    return _stateful_training(network, _classification, optax.lion(1e-4), _images(224))


def mobilenet() -> tuple[Step, tuple[Any, ...]]:
    import haiku as hk

    def network(batch: Any) -> jax.Array:
        return hk.nets.MobileNetV1((1, 2, 2, 2, 2), (64, 128, 256, 512, 512), 1000)(batch["image"], is_training=True)

    return _stateful_training(network, _classification, optax.rmsprop(1e-3), _images(128))


def vector_quantizer() -> tuple[Step, tuple[Any, ...]]:
    import haiku as hk

    def network(batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        encoded = hk.Conv1D(256, 4, stride=2)(batch)
        quantized = hk.nets.VectorQuantizerEMA(256, 512, 0.25, 0.99)(encoded, is_training=True)
        return hk.Conv1DTranspose(80, 4, stride=2)(quantized["quantize"]), quantized["loss"]

    def loss(output: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean((output[0] - batch) ** 2) + output[1]

    return _stateful_training(network, loss, optax.contrib.schedule_free_adamw(1e-3), shape(64, 128, 80))


def lstm() -> tuple[Step, tuple[Any, ...]]:
    import haiku as hk

    def network(batch: Any) -> jax.Array:
        core = hk.LSTM(512)
        embedded = hk.Embed(128, 512)(batch["text"])
        output, _ = hk.dynamic_unroll(core, embedded, core.initial_state(64), time_major=False)
        return hk.Linear(128)(output)

    model = hk.transform(network)
    batch = {"text": tokens(64, 100), "label": tokens(64, 100)}
    params = jax.eval_shape(model.init, jax.random.key(0), batch)
    return training(lambda p, b: _classification(model.apply(p, None, b), b), optax.adam(1e-3), params, batch)


def stacked_attention() -> tuple[Step, tuple[Any, ...]]:
    import haiku as hk

    class Block(hk.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            init = hk.initializers.VarianceScaling(1.0)
            norm = hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)
            y = norm(x)
            x = x + hk.MultiHeadAttention(8, 64, w_init=init)(y, y, y)
            return x + hk.nets.MLP([2048, 512])(x)

    def network(x: jax.Array) -> jax.Array:
        return hk.experimental.layer_stack(6)(lambda h: Block()(h))(x)

    model = hk.transform(network)
    batch = shape(16, 128, 512)
    params = jax.eval_shape(model.init, jax.random.key(0), batch)
    return training(lambda p, x: jnp.mean(model.apply(p, None, x) ** 2), optax.adam(1e-3), params, batch)


def penzai_llama(stacked: bool) -> tuple[Step, tuple[Any, ...]]:
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common

    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=4,
        query_head_multiplier=2,
        embedding_dim=512,
        projection_dim=64,
        mlp_hidden_dim=1376,
        num_decoder_blocks=4,
        vocab_size=32_000,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
        use_layer_stack=stacked,
    )

    def parameters(key: jax.Array) -> dict[str, Any]:
        _, found = pz.unbind_params(llamalike_common.build_llamalike_transformer(config, init_base_rng=key))
        return {parameter.label: parameter.value for parameter in found}

    unbound, _ = pz.unbind_params(llamalike_common.build_llamalike_transformer(config, init_base_rng=None))

    def loss(params: Any, text: jax.Array) -> jax.Array:
        values = [pz.ParameterValue(label=label, value=value) for label, value in params.items()]
        model = pz.bind_variables(unbound, values)
        logits = model(pz.nx.wrap(text).tag("batch", "seq")).unwrap("batch", "seq", "vocabulary")
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], text[:, 1:]).mean()

    params = jax.eval_shape(parameters, jax.random.key(0))
    return training(loss, optax.adamw(1e-3), params, tokens(16, 128))


def _graph(nodes: int, edges: int) -> Any:
    import jraph

    return jraph.GraphsTuple(
        nodes=shape(nodes, 64),
        edges=shape(edges, 32),
        receivers=tokens(edges),
        senders=tokens(edges),
        globals=shape(32, 16),
        n_node=tokens(32),
        n_edge=tokens(32),
    )


def graph_network() -> tuple[Step, tuple[Any, ...]]:
    import haiku as hk
    import jraph

    def network(graph: Any) -> Any:
        def update(name: str) -> Callable[..., jax.Array]:
            return jraph.concatenated_args(hk.nets.MLP([128, 128], name=name))

        return jraph.GraphNetwork(update("edge"), update("node"), update("global"))(graph)

    model, graph = hk.transform(network), _graph(4096, 16_384)
    params = jax.eval_shape(model.init, jax.random.key(0), graph)
    return training(lambda p, g: jnp.mean(model.apply(p, None, g).globals ** 2), optax.adam(1e-3), params, graph)


def graph_attention() -> tuple[Step, tuple[Any, ...]]:
    import haiku as hk
    import jraph

    def network(graph: Any) -> jax.Array:
        def logits(sent: jax.Array, received: jax.Array, edges: Any) -> jax.Array:
            return hk.Linear(1)(jax.nn.leaky_relu(sent + received))

        return jraph.GAT(lambda nodes: hk.Linear(128)(nodes), logits)(graph).nodes

    model, graph = hk.transform(network), _graph(4096, 16_384)._replace(edges=None, globals=None)
    params = jax.eval_shape(model.init, jax.random.key(0), graph)
    return training(lambda p, g: jnp.mean(model.apply(p, None, g) ** 2), optax.adam(1e-3), params, graph)


_LLAMA = "params/transformer/block_0"
_STACKED = "params/transformer/blocks"


PROGRAMS = (
    Program(
        "haiku-resnet50",
        "dm-haiku",
        "ResNet-50 with BatchNorm statistics, Lion",
        resnet,
        (
            exactly("batch/image[0]", "batch/label[0]"),
            exactly("batch/image[1]"),
            exactly("batch/image[2]"),
            one_color("params/*/logits/w[1]", "params/*/logits/b[0]", "moments/*/logits/w[1]"),
            one_color("params/*/block_group_2/*/batchnorm_2/scale[3]", "params/*/block_group_2/*/conv_2/w[3]"),
            no_conflict(),
        ),
    ),
    Program(
        "haiku-mobilenet",
        "dm-haiku",
        "MobileNet v1: depthwise convolutions as feature groups, RMSProp",
        mobilenet,
        (
            one_color("params/*_block_1/depthwise_conv/w[3]", "params/*_block_1/pointwise_conv/w[2]"),
            apart("params/*_block_1/pointwise_conv/w[2]", "params/*_block_1/pointwise_conv/w[3]"),
            exactly("batch/image[0]", "batch/label[0]"),
            exactly("batch/image[1]"),
            exactly("batch/image[2]"),
            no_conflict(),
        ),
    ),
    Program(
        "haiku-vector-quantizer",
        "dm-haiku",
        "Conv1D, VectorQuantizerEMA and Conv1DTranspose, schedule-free AdamW",
        vector_quantizer,
        (
            exactly("batch[0]"),
            one_color("params/conv1_d/w[2]", "state/vector_quantizer_ema/embeddings[0]"),
            apart("batch[0]", "batch[1]", "batch[2]", "params/conv1_d/w[2]", "state/*/embeddings[1]"),
            no_conflict(),
        ),
    ),
    Program(
        "haiku-lstm",
        "dm-haiku",
        "a character model: Embed, LSTM by dynamic_unroll, Linear; Adam",
        lstm,
        (
            exactly("batch/text[0]", "batch/label[0]"),
            apart("batch/text[0]", "params/linear/b[0]", "params/lstm/linear/b[0]"),
            one_color("params/linear/w[1]", "params/linear/b[0]"),
            conflicts(1, 1, "params/lstm/linear/w[1]"),
        ),
    ),
    Program(
        "haiku-layer-stack",
        "dm-haiku",
        "MultiHeadAttention and MLP under layer_stack, Adam",
        stacked_attention,
        (
            exactly("batch[0]"),
            exactly("batch[1]"),
            loop("params/*/query/w[0]"),
            conflicts(1, 1, "batch[1]"),
            deciding_groups(5),
        ),
    ),
    Program(
        "penzai-llama",
        "penzai",
        "a Llama-like transformer on named axes, grouped queries, rotary embedding, unrolled; AdamW",
        partial(penzai_llama, False),
        (
            exactly("batch[0]"),
            exactly("batch[1]"),
            apart(f"{_LLAMA}/attention/query.weights/*[1]", f"{_LLAMA}/attention/query.weights/*[2]"),
            one_color(f"{_LLAMA}/attention/query.weights/*[1]", f"{_LLAMA}/attention/key.weights/*[1]"),
            conflicts(1, 1, "batch[1]"),
            deciding_groups(10),
        ),
    ),
    Program(
        "penzai-llama-stacked",
        "penzai",
        "the same with LayerStack (a scan): as many decisions as unrolled",
        partial(penzai_llama, True),
        (
            exactly("batch[0]"),
            exactly("batch[1]"),
            loop(f"{_STACKED}/attention/query.weights/*[0]"),
            conflicts(1, 1, "batch[1]"),
            deciding_groups(10),
        ),
    ),
    Program(
        "jraph-graph-network",
        "jraph",
        "GraphNetwork with edge, node and global updates, Adam",
        graph_network,
        (
            exactly("batch/nodes[0]"),
            exactly("batch/edges[0]", "batch/senders[0]", "batch/receivers[0]"),
            exactly("batch/globals[0]"),
            apart("params/edge/~/linear_0/b[0]", "params/node/~/linear_0/b[0]", "params/global/~/linear_0/b[0]"),
            no_conflict(),
        ),
    ),
    Program(
        "jraph-attention",
        "jraph",
        "GAT: softmax over the edges of a node, Adam",
        graph_attention,
        (
            exactly("batch/nodes[0]"),
            exactly("batch/senders[0]", "batch/receivers[0]"),
            one_color("batch/nodes[1]", "params/linear/w[0]"),
            no_conflict(),
        ),
    ),
)
