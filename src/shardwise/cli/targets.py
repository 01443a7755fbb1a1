"""What a command works on: ``zoo:NAME[:CONFIG]`` or ``file.py:function``."""

from __future__ import annotations

import difflib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise.errors import TargetError


@dataclass(frozen=True, slots=True)
class Target:
    """A function with its arguments."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    donate_argnums: tuple[int, ...] = ()


def load_target(text: str) -> Target:
    """Loads a target.

    The function of ``file.py:function`` is called without arguments and returns the function to work on and its arguments:
    ``return step, (params, batch)`` or ``return step, (params, batch), {"lr": lr}``. Arguments may be
    ``jax.ShapeDtypeStruct``s.
    """
    if text.startswith("zoo:"):
        return _zoo(text)
    file, colon, name = text.rpartition(":")
    if not colon or not file.endswith(".py") or not name:
        raise TargetError(f"{text!r} is no target: use zoo:NAME, zoo:NAME:CONFIG or path/to/file.py:function")
    module = _load_module(Path(file))
    if not hasattr(module, name):
        own = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        near = difflib.get_close_matches(name, own, n=3)
        raise TargetError(f"{file} has no {name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
    return _unpack(text, name, _call(text, getattr(module, name)))


def _zoo(text: str) -> Target:
    try:
        from shardwise import zoo
    except ModuleNotFoundError as error:
        raise TargetError(f'the zoo needs {error.name}: pip install "shardwise[zoo]"') from None
    try:
        program = zoo.parse(text.removeprefix("zoo:"))
    except ValueError as error:
        raise TargetError(str(error)) from None
    return Target(text, program.fn, program.args, {}, program.donate_argnums)


def _load_module(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise TargetError(f"{path} cannot be imported: {_failure(error, str(path))}") from None
    finally:
        sys.path.pop(0)
    return module


def _call(text: str, make: Any) -> Any:
    if not callable(make):
        raise TargetError(f"{text} is {type(make).__name__}, not a function that returns (function, arguments)")
    try:
        return make()
    except Exception as error:
        raise TargetError(f"{text} failed: {_failure(error, '')}") from None


def _failure(error: Exception, fallback: str) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (line {frames[-1].lineno} of {Path(frames[-1].filename).name})" if frames else fallback
    if isinstance(error, SyntaxError):
        where = f" (line {error.lineno})"
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}{where}"


def _unpack(text: str, name: str, made: Any) -> Target:
    if all(hasattr(made, attribute) for attribute in ("fn", "args")):
        return Target(text, made.fn, tuple(made.args), getattr(made, "kwargs", {}), getattr(made, "donate_argnums", ()))
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        raise TargetError(
            f"{text} must return the function and its arguments, as in 'return step, (params, batch)'; "
            f"it returned {type(made).__name__}"
        )
    fn, *rest = made
    if len(rest) in (1, 2) and type(rest[0]) is tuple and (len(rest) == 1 or isinstance(rest[1], dict)):
        return Target(text, fn, rest[0], rest[1] if len(rest) == 2 else {})
    return Target(text, fn, tuple(rest))
