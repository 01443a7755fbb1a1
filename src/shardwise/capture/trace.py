"""Traces a function of abstract arguments to a jaxpr, with helpful errors. Nothing runs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from shardwise.capture import equations
from shardwise.capture import jax_internals as internals
from shardwise.capture.expand import forwarded, with_outputs
from shardwise.capture.leaves import abstract, explicit_mesh, unknown_argument
from shardwise.capture.objects import Result, apart, of_objects, pure_call
from shardwise.capture.shifts import with_shifts
from shardwise.errors import CaptureError
from shardwise.ir.collector import collector_paused
from shardwise.ir.program import Argument, Spec
from shardwise.units import listed


@dataclass(frozen=True, slots=True)
class JitOptions:
    """The options of ``jax.jit`` that change what is traced."""

    static_argnums: int | Sequence[int] | None = None
    static_argnames: str | Iterable[str] | None = None
    donate_argnums: int | Sequence[int] | None = None
    donate_argnames: str | Iterable[str] | None = None

    def keywords(self) -> dict[str, Any]:
        """Returns the options that are set."""
        return {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}

    @property
    def static(self) -> tuple[int | str, ...]:
        """Numbers and names of static arguments."""
        numbers = (self.static_argnums,) if isinstance(self.static_argnums, int) else self.static_argnums or ()
        names = (self.static_argnames,) if isinstance(self.static_argnames, str) else self.static_argnames or ()
        return (*numbers, *names)

    @staticmethod
    def of_static(static: Iterable[int | str]) -> JitOptions:
        numbers = tuple(k for k in static if isinstance(k, int))
        names = tuple(k for k in static if isinstance(k, str))
        return JitOptions(numbers or None, names or None)


@dataclass(frozen=True, slots=True)
class Call:
    """A function and the arguments of a call, with shapes instead of arrays."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @staticmethod
    def of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        def shape(leaf: Any) -> Any:
            return abstract(leaf) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else leaf

        shapes, named = jax.tree.map(shape, apart((args, dict(kwargs)))[0])
        return Call(fn, shapes, named)


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced function. ``inputs`` is the tree of ([positional arguments that are not static], keyword arguments)."""

    name: str
    jaxpr: Any
    arguments: tuple[Argument, ...]
    output_paths: tuple[str, ...]
    inputs: Any
    outputs: Any


def trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], options: JitOptions) -> Traced:
    """Traces ``fn`` as ``jax.jit`` does."""
    if not callable(fn):
        raise CaptureError(f"expected a function to analyze, got {type(fn).__name__}: {fn!r:.60}")
    if any(cls.__module__.partition(".")[0] == "torch" for cls in type(fn).__mro__):
        raise CaptureError(
            f"{type(fn).__name__} is a PyTorch module, which JAX cannot trace: torchax makes a JAX function of it "
            "(docs/tutorials/pytorch.md)"
        )
    name = getattr(fn, "__name__", type(fn).__name__)
    given, (fn, args, kwargs) = fn, pure_call(fn, args, kwargs)
    jitted = getattr(given, "jitted_fn", given)  # of an nnx.jit
    if fn is not given and internals.is_jitted(jitted):
        options = JitOptions(**internals.jit_options(jitted))
    names = _argument_names(name, fn, args, kwargs)
    jitted = _jitted(name, fn, options)
    static = internals.static_arguments(jitted, args)
    dynamic = [i for i in range(len(args)) if i not in static]
    tree = [args[i] for i in dynamic], {k: v for k, v in kwargs.items() if k not in static}
    structure: Any
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    places = [_argument_path(path, [names[i] for i in dynamic]) for path, _ in leaves]
    paths = _unique(places)
    _check_leaves(name, [(path, leaf) for path, (_, leaf) in zip(paths, leaves, strict=True)])
    shapes = [abstract(leaf) for _, leaf in leaves]
    positional, keywords = structure.unflatten(shapes)
    abstract_args = list(args)
    for i, argument in zip(dynamic, positional, strict=True):
        abstract_args[i] = argument
    try:
        with collector_paused(), _under_mesh_of(shapes):
            traced = jitted.trace(*abstract_args, **{**kwargs, **keywords})
        jaxpr = with_shifts(internals.without_references(internals.low_jaxpr(traced)))
    except CaptureError as error:
        raise CaptureError(str(error)) from None  # without the frames of JAX
    except Exception as error:
        numbers = [path for path, (_, leaf) in zip(paths, leaves, strict=True) if isinstance(leaf, bool | int | float)]
        raise CaptureError(_trace_failure(name, error, numbers)) from None
    infos = jax.tree.leaves(traced.args_info)
    stated = [equations.spec_of(sharding) for sharding in internals.in_shardings(traced)]
    if len(stated) > len(leaves):
        raise CaptureError(
            f"{name} uses a traced value of another function: return it from there instead of storing it"
        )
    root = "out" if not any(path.split("/")[0] == "out" for path in paths) else "result"
    if not isinstance(traced.out_info, Result):
        outputs, out_tree = jax.tree_util.tree_flatten_with_path(traced.out_info)
        out_paths = _unique([(root, path) for path, _ in outputs])
        donated = [bool(info.donated) for info in infos]
    else:
        jaxpr, result, changed = _changed(jaxpr, traced.out_info, names, places)
        updated = [(f"updated/{argument}", path) for argument, path in changed]
        own = [(root, path) for path, _ in jax.tree_util.tree_leaves_with_path(result.own)]
        out_tree, out_paths = jax.tree.structure(result), _unique([*updated, *own])
        # An unchanged array of an object is used again after the call.
        used_again = (mine and place not in changed for place, mine in zip(places, of_objects(tree), strict=True))
        donated = [info.donated and not again for info, again in zip(infos, used_again, strict=True)]
    arguments = tuple(
        Argument(k, path, given_up, _stated_spec(leaf) or spec)
        for k, (path, (_, leaf), given_up, spec) in enumerate(zip(paths, leaves, donated, stated, strict=True))
    )
    return Traced(name, jaxpr, arguments, out_paths, structure, out_tree)


def _under_mesh_of(shapes: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """A context in which shardings over the explicit axes of arguments can be stated (``out_sharding=P("data")``)."""
    mesh = explicit_mesh(shapes)
    if mesh is None or jax.sharding.get_abstract_mesh() == mesh:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def _stated_spec(leaf: Any) -> Spec | None:
    """Returns the spec of a sharded argument. A replicated one states nothing: under ``jax.set_mesh`` new arrays are."""
    spec = equations.spec_of(getattr(leaf, "sharding", None))
    return spec if spec and any(spec) else None


def _changed(
    jaxpr: Any, result: Result, names: Sequence[str], places: Sequence[_Path]
) -> tuple[Any, Result, list[_Path]]:
    """Returns the jaxpr and the result of a pure function without arrays that only passed through a call (``nnx.remat``), and
    the places of those that are changed."""
    flat, structure = jax.tree_util.tree_flatten_with_path(result.changed)
    changed = [_argument_path(path, names) for path, _ in flat]
    sources = forwarded(jaxpr)
    same = [k is not None and places[k] == place for k, place in zip(sources, changed, strict=False)]
    if any(same):
        jaxpr = with_outputs(jaxpr, [k for k in range(len(sources)) if not (k < len(same) and same[k])])
        leaves = [None if unchanged else leaf for unchanged, (_, leaf) in zip(same, flat, strict=True)]
        result = Result(jax.tree.unflatten(structure, leaves), result.own)
    return jaxpr, result, [place for place, unchanged in zip(changed, same, strict=True) if not unchanged]


def _jitted(name: str, fn: Callable[..., Any], options: JitOptions) -> Any:
    """Returns ``fn`` under ``jax.jit``, with its static and donated arguments."""
    if internals.is_jitted(fn):
        if options.keywords():
            raise CaptureError(
                f"{name} is already jitted: give {', '.join(options.keywords())} to that jax.jit, "
                "or pass the plain function"
            )
        return fn
    try:
        hash(fn)
    except TypeError:  # a module whose fields are arrays: jax.jit wants a key for its cache
        fn = functools.wraps(fn)(functools.partial(fn))
    try:
        return jax.jit(fn, **options.keywords())
    except (TypeError, ValueError) as error:
        raise CaptureError(f"{name}: {error}") from None


def _argument_names(name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Returns a name for every positional argument; raises CaptureError if ``fn`` cannot be called with these arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a function without a signature
        return [f"arg{i}" for i in range(len(args))]
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(
            f"{name}{signature} cannot be called with {len(args)} positional argument{'s' * (len(args) != 1)}"
            + (f" and {', '.join(sorted(kwargs))}" if kwargs else "")
            + f": {error}"
        ) from None
    names = []
    for parameter, value in signature.bind_partial(*args).arguments.items():
        several = signature.parameters[parameter].kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{parameter}/{k}" for k in range(len(value))] if several else [parameter]
    return names


#: The argument's name or the root of the outputs, and the path from there.
_Path = tuple[str, tuple[Any, ...]]


def _argument_path(path: Sequence[Any], names: Sequence[str]) -> _Path:
    """Returns the path in (positional arguments, keyword arguments) with the argument's name instead of its number."""
    part, argument, *rest = path
    return (names[argument.idx] if part.idx == 0 else str(argument.key)), tuple(rest)


def _unique(paths: Sequence[_Path]) -> tuple[str, ...]:
    """Returns paths as text: ``params/w``, and ``params['a/b']`` for those whose text would be equal."""

    def text(simple: bool, root: str, path: tuple[Any, ...]) -> str:
        rest = jax.tree_util.keystr(path, simple=simple, separator="/" if simple else "").removesuffix("/")
        return f"{root}/{rest}" if simple and rest else root + rest

    short = [text(True, *path) for path in paths]
    counts = Counter(short)
    texts = [text(False, *path) if counts[s] > 1 else s for s, path in zip(short, paths, strict=True)]
    seen: Counter[str] = Counter()
    for k, path in enumerate(texts):
        seen[path] += 1
        if seen[path] > 1:
            texts[k] = f"{path}#{seen[path]}"
    return tuple(texts)


def _check_leaves(name: str, leaves: Sequence[tuple[str, Any]]) -> None:
    reasons = ((path, leaf, unknown_argument(leaf)) for path, leaf in leaves)
    problems = [f"  {path} {reason} ({leaf!r:.60})" for path, leaf, reason in reasons if reason]
    if problems:
        shown = problems[:8] + ([f"  … and {len(problems) - 8} more"] if len(problems) > 8 else [])
        raise CaptureError(
            f"{name}: some arguments cannot be traced. Arguments are arrays, jax.ShapeDtypeStructs or pytrees of them; "
            "mark anything else static (static_argnames=...) or close over it.\n" + "\n".join(shown)
        )


def _trace_failure(name: str, error: Exception, numbers: Sequence[str] = ()) -> str:
    where = _user_line(error)
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    first = lines[0] if lines else ""
    text = f"{name} cannot be traced: {type(error).__name__}{f' at {where}' if where else ''}: {first}"
    if type(error).__name__ == "TraceContextError":  # of Flax
        return f"{text}. Pass the nnx object as an argument: changes are followed in arguments alone"
    if "mesh context" in first or "mesh in context" in first:
        return f"{text}\nPlan under jax.set_mesh(mesh), or give the mesh as a jax.sharding.Mesh or AbstractMesh."
    if isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError):
        text += (
            "\nThe function needs the value of an argument while being traced. Mark that argument static"
            " (static_argnames=...), or use jax.lax.cond, jax.lax.scan or jnp.where instead of Python control flow."
        )
    elif isinstance(error, jax.errors.TracerIntegerConversionError | jax.errors.NonConcreteBooleanIndexError):
        text += "\nA shape or an index depends on an argument's value: mark that argument static (static_argnames=...)."
    inner = [path for path in numbers if "/" in path]
    if inner:
        text += (
            f"\nPython numbers inside of arguments are traced, as in jax.jit: {listed(inner, 3)}. If they are settings of a "
            "module, close over them, and pass its arrays alone."
        )
    return text


def _user_line(error: Exception) -> str:
    """Returns the innermost line of the user's code in the error's traceback."""
    library = (equations.JAX_FOLDER, equations.CAPTURE_FOLDER)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(library)]
    lines = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in frames if "site-packages" not in f.filename]
    return lines[-1] if lines else ""
