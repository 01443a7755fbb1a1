"""Graph network simulator (arXiv 2002.09405) in PartIR's sizes: encode, pass messages 24 times, decode."""

from functools import partial

import jax
import jax.numpy as jnp

from .layers import COMPUTE, cast, layer_norm, run_layers
from .program import Config, ZooProgram
from .specs import Tree, integers, layered, mlp_spec, norm_spec, normal, training


def build(config: Config) -> ZooProgram:
    latent = config.latent
    step = {"edge": normed_mlp_spec(config, 3 * latent, latent), "node": normed_mlp_spec(config, 2 * latent, latent)}
    params = {
        "encode_nodes": normed_mlp_spec(config, config.node_features, latent),
        "encode_edges": normed_mlp_spec(config, config.edge_features, latent),
        "steps": layered(step, config.layers, config.scan),
        "decode": normed_mlp_spec(config, latent, config.targets, norm=False),
    }
    nodes, edges = config.batch * config.nodes, config.batch * config.edges
    batch = {
        "nodes": normal(nodes, config.node_features),
        "edges": normal(edges, config.edge_features),
        "senders": integers(edges, below=nodes),
        "receivers": integers(edges, below=nodes),
        "targets": normal(nodes, config.targets),
    }
    return training(config, partial(loss, config), params, batch)


def normed_mlp_spec(config: Config, inputs: int, outputs: int, norm: bool = True) -> Tree:
    """`mlp_layers` dense layers, and a LayerNorm at the end."""
    hidden = [config.hidden] * (config.mlp_layers - 1)
    return {"dense": mlp_spec(inputs, *hidden, outputs), "norm": norm_spec(outputs) if norm else None}


def mlp(p: Tree, x: jax.Array) -> jax.Array:
    for i, layer in enumerate(cast(p["dense"])):
        x = (jax.nn.relu(x) if i else x) @ layer["kernel"] + layer["bias"]
    return x if p["norm"] is None else layer_norm(x, p["norm"])


def message_passing(
    senders: jax.Array, receivers: jax.Array, p: Tree, graph: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Edges look at both their ends, nodes at the sum of what arrives; both are residual."""
    nodes, edges = graph
    ends = [edges, jnp.take(nodes, senders, axis=0), jnp.take(nodes, receivers, axis=0)]
    messages = mlp(p["edge"], jnp.concatenate(ends, axis=-1))
    arrived = jax.ops.segment_sum(messages, receivers, num_segments=nodes.shape[0])
    return nodes + mlp(p["node"], jnp.concatenate([nodes, arrived], axis=-1)), edges + messages


def loss(config: Config, params: Tree, batch: Tree) -> jax.Array:
    """Mean squared error of the predicted accelerations."""
    nodes = mlp(params["encode_nodes"], batch["nodes"].astype(COMPUTE))
    edges = mlp(params["encode_edges"], batch["edges"].astype(COMPUTE))
    step = partial(message_passing, batch["senders"], batch["receivers"])
    nodes, _ = run_layers(step, params["steps"], (nodes, edges), remat=config.remat)
    return jnp.mean(jnp.square(mlp(params["decode"], nodes).astype(jnp.float32) - batch["targets"]))
