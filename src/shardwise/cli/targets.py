"""What a command works on: ``zoo:NAME[:CONFIG]`` or ``file.py:function``."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import itertools
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise.errors import TargetError


@dataclass(frozen=True, slots=True)
class Target:
    """A function with its arguments."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    donate_argnums: tuple[int, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ``plan``, ``compare`` and ``analyze`` besides ``fn`` and ``args``."""
        return {"kwargs": self.kwargs, "donate_argnums": self.donate_argnums or None}


def load_target(text: str) -> Target:
    """Loads a target.

    The function of ``file.py:function`` is called without arguments and returns the function to work on and its arguments:
    ``return step, (params, batch)`` or ``return step, (params, batch), {"lr": lr}``. Arguments may be
    ``jax.ShapeDtypeStruct``s.
    """
    if text.startswith("zoo:"):
        from shardwise import zoo

        return _unpack(text, zoo.parse(text.removeprefix("zoo:")))
    file, colon, name = text.rpartition(":")
    if not colon or not file.endswith(".py") or not name:
        if text.endswith(".py") and Path(text).is_file():
            raise TargetError(f"{text!r} needs a function: use {text}:NAME, one of {', '.join(_functions(Path(text)))}")
        raise TargetError(f"{text!r} is no target: use zoo:NAME, zoo:NAME:CONFIG or path/to/file.py:function")
    module = _load_module(Path(file))
    if not hasattr(module, name):
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        near = difflib.get_close_matches(name, functions, n=3)
        raise TargetError(f"{file} has no {name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
    return _unpack(text, _call(text, getattr(module, name)))


def _functions(path: Path) -> list[str]:
    """Returns the functions of a file that take no arguments, without running it; ``make`` if there are none."""
    try:
        body = ast.parse(path.read_text("utf-8")).body
    except (OSError, SyntaxError, ValueError):
        body = []
    plain = (
        f
        for f in body
        if isinstance(f, ast.FunctionDef) and not (f.args.posonlyargs or f.args.args or f.args.kwonlyargs)
    )
    return [f.name for f in plain] or ["make"]


def _load_module(path: Path) -> ModuleType:
    """Imports a file as ``python file.py`` does: its folder is on the path, ``sys.argv`` is its name. A file of a package is
    imported as part of it, so that it can import relatively."""
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
    file = path.resolve()
    folders = itertools.takewhile(lambda folder: (folder / "__init__.py").is_file(), file.parents)
    package = [folder.name for folder in folders][::-1]
    name = ".".join([*package, file.stem])
    sys.path.insert(0, str(file.parents[len(package)]))
    sys.argv = [str(path)]
    try:
        return importlib.import_module(name) if package else _import_file(file)
    except (Exception, SystemExit) as error:
        raise TargetError(f"{path} cannot be imported: {_failure(error)}") from None


def _import_file(file: Path) -> ModuleType:
    # A file may have the name of a module that is imported already (json.py), which it must not replace.
    name = file.stem if file.stem not in sys.modules else f"shardwise_target_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _call(text: str, make: Any) -> Any:
    if not callable(make):
        raise TargetError(f"{text} is {type(make).__name__}, not a function that returns (function, arguments)")
    try:
        signature(make).bind()
    except TypeError:
        raise TargetError(
            f"{text} takes arguments; a target is a function without any that returns the function to plan and its "
            f"arguments: def make(): return {getattr(make, '__name__', 'step')}, (params, batch)"
        ) from None
    except ValueError:  # some built-in functions have no signature
        pass
    try:
        return make()
    except (Exception, SystemExit) as error:
        file = text.rpartition(":")[0]
        raise TargetError(f"{text} failed: {_failure(error, Path(file).resolve())}") from None


def _failure(error: BaseException, file: Path | None = None) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in (__file__, importlib.__file__)]
    own = [
        f for f in frames[:-1] if file is not None and Path(f.filename) == file and frames[-1].filename != f.filename
    ]
    shown = [*own[-1:], *frames[-1:]]
    where = f" ({'; raised in '.join(f'line {f.lineno} of {Path(f.filename).name}' for f in shown)})" if shown else ""
    if isinstance(error, SyntaxError):
        where = f" (line {error.lineno})"
    if isinstance(error, SystemExit):
        return f"it called sys.exit({'' if error.code is None else repr(error.code)}){where}"
    first = (str(error).splitlines() or [""])[0]
    return f"{': '.join(filter(None, (type(error).__name__, first)))}{where}"


def _unpack(text: str, returned: Any) -> Target:
    if all(hasattr(returned, attribute) for attribute in ("fn", "args")):
        return Target(
            returned.fn, tuple(returned.args), getattr(returned, "kwargs", {}), getattr(returned, "donate_argnums", ())
        )
    if not isinstance(returned, tuple) or not returned or not callable(returned[0]):
        raise TargetError(
            f"{text} must return the function and its arguments, as in 'return step, (params, batch)'; "
            f"it returned {type(returned).__name__}"
        )
    fn, *rest = returned
    if len(rest) in (1, 2) and type(rest[0]) is tuple and (len(rest) == 1 or isinstance(rest[1], dict)):
        return Target(fn, rest[0], rest[1] if len(rest) == 2 else {})
    return Target(fn, tuple(rest))
