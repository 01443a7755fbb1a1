"""Sizes and parameters of decoders with rotary positions."""

from collections.abc import Callable
from dataclasses import dataclass

from .layers import attention_spec, gated_mlp_spec
from .program import LayeredConfig
from .specs import Leaf, Tree, layered, normal, ones, weight

Norm = Callable[[int], Leaf]
"""The scale of a norm over this many features, as it is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(LayeredConfig):
    """Sizes of a decoder."""

    seq: int
    d: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocab: int

    def __post_init__(self) -> None:
        self.require_divisible(heads_by_kv_heads=(self.heads, self.kv_heads), head_by_two=(self.head, 2))


def attention_layer(config: DecoderConfig, norm: Norm = ones) -> dict[str, Tree]:
    """Returns the parameters of the attention half of a layer."""
    return {
        "attention_norm": norm(config.d),
        "attention": attention_spec(config.d, config.heads, config.kv_heads, config.head),
    }


def dense_layer(config: DecoderConfig, norm: Norm = ones) -> dict[str, Tree]:
    """Returns the parameters of a layer with a gated MLP."""
    return attention_layer(config, norm) | {"mlp_norm": norm(config.d), "mlp": gated_mlp_spec(config.d, config.ffn)}


def decoder(config: DecoderConfig, layer: Tree, norm: Norm = ones, *, head: bool = True) -> dict[str, Tree]:
    """Returns the parameters of the model; without `head` the embedding is used for it."""
    params = {
        "embed": normal(config.vocab, config.d, scale=0.02),
        "layers": layered(layer, config.layers, config.scan),
        "final_norm": norm(config.d),
    }
    return params | {"head": weight(config.d, config.vocab, fan_in=config.d)} if head else params
