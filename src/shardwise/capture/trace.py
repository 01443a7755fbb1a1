"""From a function and abstract arguments to a jaxpr, with errors a person can act on. Nothing runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from shardwise.capture import jax_internals as internals
from shardwise.errors import CaptureError
from shardwise.ir.program import Spec


@dataclass(frozen=True, slots=True)
class JitOptions:
    """The options of ``jax.jit`` that change what is traced."""

    static_argnums: int | Sequence[int] | None = None
    static_argnames: str | Iterable[str] | None = None
    donate_argnums: int | Sequence[int] | None = None
    donate_argnames: str | Iterable[str] | None = None

    def given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array argument: its path for people, whether it is donated, and a sharding it already has."""

    path: str
    donated: bool
    spec: Spec | None


@dataclass(frozen=True, slots=True)
class Traced:
    name: str
    jaxpr: Any
    leaves: tuple[Leaf, ...]
    output_paths: tuple[str, ...]


def trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], options: JitOptions) -> Traced:
    """Traces ``fn`` as ``jax.jit`` would.

    Raises :class:`CaptureError` for anything that is wrong with the function or its arguments.
    """
    if not callable(fn):
        raise CaptureError(f"expected a function to analyze, got {type(fn).__name__}: {_short(fn)}")
    name = getattr(fn, "__name__", type(fn).__name__)
    signature = _signature(fn)
    _check_call(name, signature, args, kwargs)
    jitted = fn if hasattr(fn, "trace") and hasattr(fn, "lower") else None
    if jitted is not None and options.given():
        raise CaptureError(
            f"{name} is already jitted: give {', '.join(options.given())} to its own jax.jit, or pass the plain function"
        )
    static = _static_names(signature, args, options) if jitted is None else _jit_static(jitted, signature, args, kwargs)
    named = _named_leaves(signature, args, kwargs, static)
    _check_leaves(name, named)
    specs = {path: internals.spec_of(getattr(leaf, "sharding", None)) for path, leaf in named}
    try:
        jitted = jitted or jax.jit(fn, **options.given())
    except (TypeError, ValueError) as error:
        raise CaptureError(f"{name}: {error}") from None
    names = _bound_names(signature, args, kwargs)
    abstract_args = tuple(a if names[i] in static else jax.tree.map(internals.abstract, a) for i, a in enumerate(args))
    abstract_kwargs = {k: v if k in static else jax.tree.map(internals.abstract, v) for k, v in kwargs.items()}
    try:
        traced = jitted.trace(*abstract_args, **abstract_kwargs)
    except Exception as error:
        raise CaptureError(_trace_failure(name, error)) from None
    infos = jax.tree_util.tree_flatten_with_path(traced.args_info)[0]
    leaves = []
    for path, info in infos:
        # args_info is (args, kwargs); static arguments are not among them, so positions are those of the dynamic ones.
        text = _info_path(path, names, static)
        leaves.append(Leaf(text, bool(info.donated), specs.get(text)))
    outputs = jax.tree_util.tree_flatten_with_path(traced.out_info)[0]
    out_paths = tuple(_join("out", path) for path, _ in outputs)
    return Traced(name, traced.jaxpr, tuple(leaves), out_paths)


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def _check_call(
    name: str, signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(
            f"{name}{signature} cannot be called with {len(args)} positional argument{'s' * (len(args) != 1)}"
            + (f" and {', '.join(sorted(kwargs))}" if kwargs else "")
            + f": {error}"
        ) from None


def _bound_names(signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """A name for every positional argument: the parameter's, or its number."""
    names = [f"arg{i}" for i in range(len(args))]
    if signature is None:
        return names
    position = 0
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            for k in range(position, len(args)):
                names[k] = f"{parameter.name}/{k - position}"
            break
        if parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD) or position >= len(args):
            break
        names[position] = parameter.name
        position += 1
    return names


def _static_names(signature: inspect.Signature | None, args: tuple[Any, ...], options: JitOptions) -> set[str]:
    names = _bound_names(signature, args, {})
    static: set[str] = set()
    numbers = options.static_argnums
    for number in [numbers] if isinstance(numbers, int) else list(numbers or ()):
        if -len(args) <= number < len(args):
            static.add(names[number])
    given = options.static_argnames
    static.update([given] if isinstance(given, str) else list(given or ()))
    return static


def _jit_static(
    jitted: Any, signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> set[str]:
    """An already jitted function does not say which arguments are static; those that cannot be arrays must be."""
    names = _bound_names(signature, args, {})
    static = set()
    for name, value in [*zip(names, args, strict=True), *kwargs.items()]:
        leaves = jax.tree.leaves(value)
        if leaves and any(internals.unknown_argument(leaf) for leaf in leaves):
            static.add(name)
    return static


def _join(root: str, path: Sequence[Any]) -> str:
    text = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
    return f"{root}/{text}" if text else root


def _info_path(path: Sequence[Any], names: Sequence[str], static: set[str]) -> str:
    part, rest = path[0].idx, path[1:]
    if part == 1:
        return jax.tree_util.keystr(tuple(rest), simple=True, separator="/")
    dynamic = [n for n in names if n not in static]
    return _join(dynamic[rest[0].idx], rest[1:])


def _named_leaves(
    signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any], static: set[str]
) -> list[tuple[str, Any]]:
    names = _bound_names(signature, args, kwargs)
    found = []
    for name, value in [*zip(names, args, strict=True), *kwargs.items()]:
        if name in static:
            continue
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            found.append((_join(name, path), leaf))
    return found


def _check_leaves(name: str, leaves: Sequence[tuple[str, Any]]) -> None:
    problems = []
    for path, leaf in leaves:
        reason = internals.unknown_argument(leaf)
        if reason:
            problems.append(f"  {path} {reason} ({_short(leaf)})")
    if problems:
        shown = problems[:8] + ([f"  … and {len(problems) - 8} more"] if len(problems) > 8 else [])
        raise CaptureError(
            f"{name}: some arguments cannot be traced. Arguments are arrays, jax.ShapeDtypeStructs or pytrees of them; "
            "mark anything else static (static_argnames=...) or close over it.\n" + "\n".join(shown)
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _trace_failure(name: str, error: Exception) -> str:
    where = _user_line(error)
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    first = lines[0] if lines else ""
    text = f"{name} cannot be traced: {type(error).__name__}{f' at {where}' if where else ''}: {first}"
    if isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError):
        text += (
            "\nThe function needs the value of an argument while being traced. Mark that argument static"
            " (static_argnames=...), or use jax.lax.cond, jax.lax.scan or jnp.where instead of Python control flow."
        )
    elif isinstance(error, jax.errors.TracerIntegerConversionError | jax.errors.NonConcreteBooleanIndexError):
        text += "\nA shape or an index depends on an argument's value: mark that argument static (static_argnames=...)."
    return text


def _user_line(error: Exception) -> str:
    """The innermost line of the user's own code in the error's traceback."""
    found = ""
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith((internals._JAX_FOLDER, internals._OWN_FOLDER)) and "site-packages" not in file:
            found = f"{file.rsplit('/', 1)[-1]}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found
