"""The Flax models of transformers: decoder, encoder, encoder-decoder, vision; a decoding step with a cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from corpus.registry import Case, normal, program, tokens, training


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _params(model: Any, *shape: int) -> Any:
    return lambda: model.init_weights(jax.random.key(0), shape)


@program(
    "transformers",
    "train",
    "test",
    small=dict(layers=2, width=64, heads=4, vocabulary=512, batch=8, length=32),
    full=dict(layers=24, width=1024, heads=16, vocabulary=50257, batch=64, length=1024),
)
def transformers_gpt2(layers: int, width: int, heads: int, vocabulary: int, batch: int, length: int) -> Case:
    """FlaxGPT2LMHeadModel with dropout, AdamW."""
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(vocab_size=vocabulary, n_positions=length, n_embd=width, n_layer=layers, n_head=heads)
    model = FlaxGPT2LMHeadModel(config, input_shape=(1, length), _do_init=False)

    def loss(params: Any, text: jax.Array, key: jax.Array) -> jax.Array:
        logits = model(text, params=params, dropout_rng=key, train=True).logits
        return _cross_entropy(logits[:, :-1], text[:, 1:])

    text = tokens(batch, length, below=vocabulary)
    return training(loss, optax.adamw(1e-3), _params(model, 1, length), text, lambda: jax.random.key(3))


@program(
    "transformers",
    "train",
    "test",
    small=dict(layers=2, width=64, heads=4, vocabulary=512, batch=8, length=32),
    full=dict(layers=12, width=1024, heads=16, vocabulary=50265, batch=64, length=512),
)
def transformers_bart(layers: int, width: int, heads: int, vocabulary: int, batch: int, length: int) -> Case:
    """FlaxBartForConditionalGeneration: encoder, decoder and cross attention; Adafactor."""
    from transformers import BartConfig, FlaxBartForConditionalGeneration

    config = BartConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_position_embeddings=length,
    )
    model = FlaxBartForConditionalGeneration(config, input_shape=(1, length), _do_init=False)

    def loss(params: Any, source: jax.Array, target: jax.Array) -> jax.Array:
        shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)))
        logits = model(source, decoder_input_ids=shifted, params=params).logits
        return _cross_entropy(logits, target)

    source, target = tokens(batch, length, below=vocabulary), tokens(batch, length, below=vocabulary, seed=4)
    return training(loss, optax.adafactor(1e-3), _params(model, 1, length), source, target)


@program(
    "transformers",
    "train",
    "fit",
    small=dict(layers=2, width=64, heads=4, vocabulary=512, batch=8, length=32),
    full=dict(layers=24, width=1024, heads=16, vocabulary=30522, batch=128, length=512),
)
def transformers_bert(layers: int, width: int, heads: int, vocabulary: int, batch: int, length: int) -> Case:
    """FlaxBertForMaskedLM with attention mask and segments, LAMB."""
    from transformers import BertConfig, FlaxBertForMaskedLM

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = FlaxBertForMaskedLM(config, input_shape=(1, length), _do_init=False)

    def loss(params: Any, text: jax.Array, mask: jax.Array, chosen: jax.Array) -> jax.Array:
        logits = model(jnp.where(chosen, 1, text), attention_mask=mask, params=params).logits
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, text) * chosen) / jnp.sum(chosen)

    def mask() -> jax.Array:
        return (jnp.arange(length) < jnp.arange(batch)[:, None] % 8 + length - 8).astype(jnp.int32)

    def chosen() -> jax.Array:
        return jax.random.bernoulli(jax.random.key(5), 0.15, (batch, length)).astype(jnp.int32)

    text = tokens(batch, length, below=vocabulary)
    return training(loss, optax.lamb(1e-3), _params(model, 1, length), text, mask, chosen)


@program(
    "transformers",
    "infer",
    "fit",
    small=dict(layers=2, width=64, heads=4, groups=2, vocabulary=512, batch=8, length=32),
    full=dict(layers=22, width=2048, heads=32, groups=4, vocabulary=32000, batch=64, length=2048),
)
def transformers_llama_decode(
    layers: int, width: int, heads: int, groups: int, vocabulary: int, batch: int, length: int
) -> Case:
    """FlaxLlamaForCausalLM: one step of decoding with a key-value cache, grouped queries."""
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=length,
    )
    model = FlaxLlamaForCausalLM(config, input_shape=(1, length), _do_init=False)

    def step(params: Any, cache: Any, token: jax.Array, position: jax.Array) -> Any:
        mask = jnp.ones((batch, length), jnp.int32)
        out = model(token, attention_mask=mask, position_ids=position, params=params, past_key_values=cache)
        return jnp.argmax(out.logits[:, -1:], -1), out.past_key_values

    def make() -> tuple[Any, ...]:
        cache = model.init_cache(batch, length)
        return _params(model, 1, length)(), cache, tokens(batch, 1, below=vocabulary)(), jnp.zeros((batch, 1), int)

    return Case(step, make, donate=(1,))


@program(
    "transformers",
    "infer",
    "test",
    small=dict(layers=2, width=64, heads=4, batch=8, image=32, patch=8),
    full=dict(layers=24, width=1024, heads=16, batch=256, image=224, patch=16),
)
def transformers_vit(layers: int, width: int, heads: int, batch: int, image: int, patch: int) -> Case:
    """FlaxViTForImageClassification on a batch of images."""
    from transformers import FlaxViTForImageClassification, ViTConfig

    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=image,
        patch_size=patch,
        num_labels=1000,
    )
    model = FlaxViTForImageClassification(config, _do_init=False)

    def classify(params: Any, images: jax.Array) -> jax.Array:
        return model(images, params=params).logits

    images = normal(batch, 3, image, image)
    return Case(classify, lambda: (_params(model, 1, image, image, 3)(), images()))


@program(
    "transformers",
    "infer",
    "fit",
    small=dict(layers=2, width=64, heads=4, frames=64, length=16, batch=8),
    full=dict(layers=24, width=1024, heads=16, frames=3000, length=448, batch=32),
)
def transformers_whisper(layers: int, width: int, heads: int, frames: int, length: int, batch: int) -> Case:
    """FlaxWhisperForConditionalGeneration: audio encoder (1-d convolutions) and text decoder."""
    from transformers import FlaxWhisperForConditionalGeneration, WhisperConfig

    config = WhisperConfig(
        vocab_size=51865 if width > 64 else 512,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=frames // 2,
        max_target_positions=length,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = FlaxWhisperForConditionalGeneration(config, input_shape=(1, 80, frames), _do_init=False)

    def transcribe(params: Any, audio: jax.Array, text: jax.Array) -> jax.Array:
        return model(audio, decoder_input_ids=text, params=params).logits

    audio, text = normal(batch, 80, frames), tokens(batch, length, below=512)
    return Case(transcribe, lambda: (_params(model, 1, 80, frames)(), audio(), text()))
