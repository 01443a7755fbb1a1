"""The programs of the zoo by name, and their options."""

import difflib
import importlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from types import ModuleType
from typing import Any

from .program import Config, ZooError, ZooProgram

_ENTRIES: Mapping[str, tuple[str, str, str]] = {
    "t2b": ("decoder", "2b tiny", "Gemma-1 2B shaped decoder, multi-query attention, tied embeddings"),
    "t7b": ("decoder", "7b tiny", "Gemma-1 7B shaped decoder, multi-head attention, tied embeddings"),
    "gpt": ("gpt", "2.6b 6.7b 39b tiny", "GPT-3 shaped decoder, learned positions, fused q/k/v projection"),
    "llama3": (
        "decoder", "8b 70b 405b tiny", "Llama-3 decoder, grouped-query attention, rotary positions, untied head",
    ),
    "mixtral": ("mixtral", "8x7b tiny", "Mixtral decoder, 8 experts, top 2: dispatch with capacity, or dropless"),
    "gns": ("gns", "full tiny", "graph network simulator: gather, message MLPs, segment sums"),
    "unet": ("unet", "full tiny", "diffusion U-Net (Flax nnx): residual convolutions, skips, one attention"),
    "itx": (
        "itx", "decode prefill step tiny tiny-prefill tiny-step",
        "inference transformer, multi-query attention, key-value cache",
    ),
    "vit": ("vit", "l16 h14 tiny", "vision transformer (Flax nnx), patch convolution, mean-pooled head"),
    "wresnet": ("wresnet", "1b 4b tiny", "wide ResNet-50 (Flax nnx), batch normalization with running statistics"),
    "t5": ("t5", "3b 11b tiny", "T5 encoder-decoder, cross attention, relative position bias"),
    "ssm": ("ssm", "2.8b tiny", "Mamba-like state-space model, recurrence by associative scan"),
    "dlrm": ("dlrm", "full tiny", "recommendation model, 26 embedding tables, pairwise interactions"),
    "mlp": ("mlp", "full tiny", "deep multilayer perceptron"),
}  # fmt: skip
"""By name: the module, imported on demand since it imports JAX; the configurations, the default first; and
a description."""

_OFF_WHERE_ABSENT = ("scan", "remat", "train")
"""Flags that every program accepts as false: a U-Net is unrolled, a decode loop does not train."""


def names() -> tuple[str, ...]:
    """Returns the names of all programs.

    >>> names()[:3]
    ('t2b', 't7b', 'gpt')
    """
    return tuple(_ENTRIES)


def configs(name: str) -> tuple[str, ...]:
    """Returns the configurations of a program; the first is the default, and one is tiny enough to run anywhere.

    >>> configs("gpt")
    ('2.6b', '6.7b', '39b', 'tiny')
    """
    return tuple(_entry(name)[1].split())


def description(name: str) -> str:
    """Returns a one-line description of a program.

    >>> description("mlp")
    'deep multilayer perceptron'
    """
    return _entry(name)[2]


def load(name: str, config: str | None = None, **options: Any) -> ZooProgram:
    """Returns a program of the zoo.

    Args:
      name: one of `names()`.
      config: one of `configs(name)`; the first of them if not given.
      **options: any size or flag of the configuration, such as `batch`, `layers`, `seq`, `scan` (layers
        scanned over stacked parameters, else unrolled), `remat` (each layer under `jax.checkpoint`), `train`
        (false: the forward loss alone).

    Returns:
      The program, its arguments as shapes: nothing is allocated.

    Raises:
      ZooError: no such program, configuration or option, or sizes that do not fit each other.

    >>> program = load("gpt", "tiny", layers=3, scan=False)
    >>> program.roles
    ('params', 'optimizer', 'batch')
    >>> program.args[2]["inputs"].shape
    (16, 24)
    """
    available = _configs(name)
    config = config or configs(name)[0]
    if config not in available:
        raise ZooError(_unknown(f"configuration of {name}", config, available))
    sizes = _with_options(name, available[config], options)
    program: ZooProgram = _module(name).build(sizes)
    return replace(program, name=name, config=config, description=_describe(name, sizes))


def parse(target: str) -> ZooProgram:
    """Returns a program from its text: a name and, after a colon, a configuration, flags and options.

    Flags are `scan`, `unrolled`, `remat`, `forward` and any other on/off option of the program; options are
    `key=value`.

    >>> parse("mlp:tiny,remat,layers=3,width=96").description
    'deep multilayer perceptron; training step, batch 16, 3 layers, unrolled, remat'
    """
    name, _, rest = target.strip().partition(":")
    available = _configs(name)
    config: str | None = None
    options: dict[str, Any] = {}

    flags = {"unrolled": ("scan", False), "forward": ("train", False)}
    flags |= {flag: (flag, True) for flag in ("scan", "remat", *_flags(next(iter(available.values()))))}
    for word in filter(None, (word.strip() for word in rest.split(","))):
        key, equals, text = word.partition("=")
        if word in available:
            if config is not None:
                raise ZooError(f"{target!r} names two configurations: {config} and {word}")
            config = word
            continue
        if not equals and word not in flags:
            raise ZooError(_unknown(f"configuration or flag of {name}", word, [*available, *flags]))
        key, value = (key.strip(), _value(text.strip())) if equals else flags[word]
        if key in options:
            raise ZooError(f"{target!r} says {key!r} twice")
        options[key] = value
    return load(name, config, **options)


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(f".{_entry(name)[0]}", __package__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("optax", "flax"):
            raise
        raise ZooError(f"zoo program {name} needs the package {error.name}: pip install {error.name}") from error


def _entry(name: str) -> tuple[str, str, str]:
    if name not in _ENTRIES:
        raise ZooError(_unknown("zoo program", name, _ENTRIES))
    return _ENTRIES[name]


def _configs(name: str) -> Mapping[str, Config]:
    programs: Mapping[str, Mapping[str, Config]] = _module(name).PROGRAMS
    return programs[name]


def _with_options(name: str, config: Config, options: Mapping[str, Any]) -> Config:
    defaults = asdict(config)
    accepted: dict[str, Any] = {}
    for key, value in options.items():
        if key not in defaults:
            if key in _OFF_WHERE_ABSENT and value is False:
                continue
            raise ZooError(_unknown(f"option of {name}", key, defaults))
        kind = type(defaults[key])
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ZooError(f"option {key!r} of {name} wants {_KINDS.get(kind, kind.__name__)}, got {value!r}")
        if kind is int and value < 1:
            raise ZooError(f"option {key!r} of {name} must be at least 1, got {value}")
        accepted[key] = value
    return replace(config, **accepted)


_KINDS = {int: "a whole number", bool: "true or false", str: "a word", float: "a number"}


def _value(text: str) -> Any:
    """Returns the option value that a text denotes: a number, true, false, or a word."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def _flags(config: Config) -> tuple[str, ...]:
    return tuple(name for name, value in asdict(config).items() if isinstance(value, bool))


def _describe(name: str, config: Config) -> str:
    options = asdict(config)
    facts = [options.get("mode") or ("training step" if options["train"] else "forward loss"), f"batch {config.batch}"]
    if "seq" in options:
        facts.append(f"seq {options['seq']}")
    if "layers" in options:
        facts.append(f"{options['layers']} layers, {'scanned' if options['scan'] else 'unrolled'}")
    facts += [flag for flag in _flags(config) if options[flag] and flag not in ("scan", "train")]
    return f"{description(name)}; {', '.join(facts)}"


def _unknown(what: str, word: str, valid: Iterable[str]) -> str:
    valid = list(valid)
    near = difflib.get_close_matches(word, valid, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    return f"no {what} called {word!r}{hint} There are: {', '.join(valid)}"
