"""PyTorch modules as JAX functions by torchax: layers of PyTorch, and PyTorch models of transformers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from corpus.registry import Case, normal, program, tokens, training
from corpus.torch_names import import_torchax


def _functional(module: Any) -> tuple[Any, Any, Any]:
    """Returns functions that make the parameters and the buffers of a module, and the module as a function of both and of its
    inputs. A module on the device ``meta`` has only shapes."""
    torchax = import_torchax()
    from torchax import interop

    jittable, env = interop.JittableModule(module.eval()), torchax.default_env()

    def values(tensors: Any) -> Any:
        def zeros(x: Any) -> jax.Array:
            return jnp.zeros(tuple(x.shape), str(x.dtype).removeprefix("torch."))

        return {n: zeros(x) if x.device.type == "meta" else env.t2j_copy(x) for n, x in tensors.items()}

    def call(params: Any, buffers: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = env.j2t_iso((params, buffers, args, kwargs))
        with env:
            found = jittable.functional_call("forward", inputs[0], inputs[1], *inputs[2], **inputs[3])
        return env.t2j_iso(found)

    return (lambda: values(jittable.params)), (lambda: values(jittable.buffers)), call


def _device(full: bool) -> Any:
    import_torchax()
    import torch

    torch.manual_seed(0)
    return torch.device("meta" if full else "cpu")


@program(
    "torchax",
    "train",
    "test",
    small=dict(layers=2, width=64, heads=4, batch=8, length=32),
    full=dict(layers=12, width=1024, heads=16, batch=64, length=512, full=True),
)
def torch_encoder(layers: int, width: int, heads: int, batch: int, length: int, full: bool = False) -> Case:
    """torch.nn.TransformerEncoder through torchax, trained by optax; AdamW."""
    device = _device(full)
    import torch

    with device:
        layer = torch.nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        module = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    params, buffers, call = _functional(module)

    def loss(params: Any, buffers: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((call(params, buffers, x) - x) ** 2)

    return training(loss, optax.adamw(1e-3), params, buffers, normal(batch, length, width))


@program(
    "torchax",
    "infer",
    "fit",
    small=dict(width=16, batch=8, image=32),
    full=dict(width=128, batch=512, image=128, full=True),
)
def torch_convnet(width: int, batch: int, image: int, full: bool = False) -> Case:
    """A PyTorch network of Conv2d, BatchNorm2d, max pooling and Linear through torchax."""
    device = _device(full)
    import torch

    def stage(inputs: int, outputs: int) -> list[Any]:
        convolution = torch.nn.Conv2d(inputs, outputs, 3, padding=1)
        return [convolution, torch.nn.BatchNorm2d(outputs), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]

    with device:
        stages = [*stage(3, width), *stage(width, 2 * width), *stage(2 * width, 4 * width)]
        head = torch.nn.Linear(4 * width * (image // 8) ** 2, 1000)
        module = torch.nn.Sequential(*stages, torch.nn.Flatten(), head)
    params, buffers, call = _functional(module)
    return Case(call, lambda: (params(), buffers(), normal(batch, 3, image, image)()))


@program(
    "torchax",
    "infer",
    "test",
    small=dict(layers=2, width=64, heads=4, groups=2, vocabulary=512, batch=8, length=32),
    full=dict(layers=16, width=2048, heads=32, groups=8, vocabulary=128256, batch=32, length=1024, full=True),
)
def torch_llama(
    layers: int, width: int, heads: int, groups: int, vocabulary: int, batch: int, length: int, full: bool = False
) -> Case:
    """The PyTorch Llama of transformers through torchax: logits of a batch of texts."""
    device = _device(full)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=length,
        use_cache=False,
        attn_implementation="eager",
    )
    with device:
        module = LlamaForCausalLM(config)
    params, buffers, call = _functional(module)

    def logits(params: Any, buffers: Any, text: jax.Array) -> jax.Array:
        return call(params, buffers, text, return_dict=False)[0]

    return Case(logits, lambda: (params(), buffers(), tokens(batch, length, below=vocabulary)()))


@program(
    "torchax",
    "train",
    "fit",
    small=dict(layers=2, width=64, heads=4, vocabulary=512, batch=8, length=32),
    full=dict(layers=24, width=1024, heads=16, vocabulary=50257, batch=32, length=1024, full=True),
)
def torch_gpt2(
    layers: int, width: int, heads: int, vocabulary: int, batch: int, length: int, full: bool = False
) -> Case:
    """The PyTorch GPT-2 of transformers through torchax, trained by optax; SGD with momentum."""
    device = _device(full)
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        use_cache=False,
        attn_implementation="eager",
    )
    with device:
        module = GPT2LMHeadModel(config)
    params, buffers, call = _functional(module)

    def loss(params: Any, buffers: Any, text: jax.Array) -> jax.Array:
        logits = call(params, buffers, text, return_dict=False)[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], text[:, 1:]).mean()

    return training(loss, optax.sgd(1e-2, 0.9), params, buffers, tokens(batch, length, below=vocabulary))
