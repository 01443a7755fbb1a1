"""The programs of the zoo by name, and their options."""

import difflib
import functools
import importlib
import json
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from .program import Config, ZooError, ZooProgram

_PROGRAMS: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "programs.toml").read_text("utf-8"))

_OFF_WHERE_ABSENT = ("scan", "remat", "train")
"""Flags that every program accepts as false: a U-Net is unrolled, a decode loop does not train."""


def names() -> tuple[str, ...]:
    """Returns the names of all programs.

    >>> names()[:3]
    ('t2b', 't7b', 'gpt')
    """
    return tuple(_PROGRAMS)


def configs(name: str) -> tuple[str, ...]:
    """Returns the configurations of a program; the first is the default, and one is tiny enough to run anywhere.

    >>> configs("gpt")
    ('2.6b', '6.7b', '39b', 'tiny')
    """
    return tuple(_entry(name)["configs"])


def description(name: str) -> str:
    """Returns a one-line description of a program.

    >>> description("mlp")
    'deep multilayer perceptron'
    """
    text: str = _entry(name)["description"]
    return text


def load(name: str, config: str = "", **options: Any) -> ZooProgram:
    """Returns a program of the zoo; the same one for the same sizes, so that JAX traces and compiles it once.

    Args:
      name: one of `names()`.
      config: one of `configs(name)`; by default the first of them.
      **options: any size or flag of the configuration, such as `batch`, `layers`, `seq`, `scan` (layers
        scanned over stacked parameters, else unrolled), `remat` (each layer under `jax.checkpoint`), `train`
        (false: the forward loss alone).

    Raises:
      ZooError: no such program, configuration or option, or sizes that do not fit each other.

    >>> program = load("gpt", "tiny", layers=3, scan=False)
    >>> program.roles
    ('params', 'optimizer', 'batch')
    >>> program.args[2]["inputs"].shape
    (16, 24)
    """
    config = config or configs(name)[0]
    return _built(name, config, config_of(name, config, **options))


@functools.lru_cache(maxsize=32)
def _built(name: str, config: str, sizes: Config) -> ZooProgram:
    program: ZooProgram = _module(name).build(sizes)
    return replace(program, name=name, config=config, description=description(name))


def config_of(name: str, config: str, **options: Any) -> Config:
    """Returns the sizes and flags of a configuration, with some of them replaced."""
    entry = _entry(name)
    if config not in entry["configs"]:
        raise ZooError(_unknown(f"configuration of {name}", config, entry["configs"]))
    defaults = entry["sizes"] | entry["configs"][config]
    accepted: dict[str, Any] = {}
    for key, value in options.items():
        if key not in defaults:
            if key in _OFF_WHERE_ABSENT and value is False:
                continue
            raise ZooError(_unknown(f"option of {name}", key, defaults))
        kind = type(defaults[key])
        if (kind, type(value)) in ((float, int), (list, tuple)):
            value = kind(value)
        if type(value) is not kind:
            raise ZooError(f"option {key!r} of {name} wants {_KINDS.get(kind, kind.__name__)}, got {value!r}")
        if kind is int and value < 1:
            raise ZooError(f"option {key!r} of {name} must be at least 1, got {value}")
        accepted[key] = value
    return Config(**defaults | accepted)


def parse(target: str) -> ZooProgram:
    """Returns a program from its text: a name and, after a colon, a configuration, flags and options.

    Flags are `scan`, `unrolled`, `remat`, `forward` and any other on/off option of the program; options are
    `key=value`.

    >>> parse("mlp:tiny,remat,layers=3,width=96").args[0]["hidden"][2]["kernel"].shape
    (96, 96)
    """
    name, _, rest = target.strip().partition(":")
    available, config, options = configs(name), "", dict[str, Any]()
    flags: dict[str, tuple[str, bool]] = {"unrolled": ("scan", False), "forward": ("train", False)}
    defaults = vars(config_of(name, available[0]))
    flags |= {flag: (flag, True) for flag in ("scan", "remat", *(k for k, v in defaults.items() if v is False))}
    for word in filter(None, (word.strip() for word in rest.split(","))):
        key, equals, text = word.partition("=")
        if word in available and config:
            raise ZooError(f"{target!r} names two configurations: {config} and {word}")
        if word in available:
            config = word
        elif equals:
            options[key.strip()] = _value(text.strip())
        elif word in flags:
            key, value = flags[word]
            options[key] = value
        else:
            raise ZooError(_unknown(f"configuration or flag of {name}", word, [*available, *flags]))
    return load(name, config, **options)


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(f".{_entry(name).get('module', name)}", __package__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("optax", "flax"):
            raise
        raise ZooError(f"zoo program {name} needs the package {error.name}: pip install {error.name}") from error


def _entry(name: str) -> dict[str, Any]:
    if name not in _PROGRAMS:
        raise ZooError(_unknown("zoo program", name, _PROGRAMS))
    return _PROGRAMS[name]


_KINDS = {int: "a whole number", bool: "true or false", str: "a word", float: "a number"}


def _value(text: str) -> Any:
    """Returns the option value that a text denotes: a number, true, false, or a word."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def _unknown(what: str, word: str, valid: Iterable[str]) -> str:
    valid = list(valid)
    near = difflib.get_close_matches(word, valid, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    return f"no {what} called {word!r}{hint} There are: {', '.join(valid)}"
