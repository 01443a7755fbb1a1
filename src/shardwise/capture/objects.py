"""Flax nnx objects as arguments: modules, optimizers, metrics, random streams and variables, which functions change in place.

A call is made pure in three steps, as ``nnx.jit`` does it:

- :func:`apart` replaces each object by a :class:`State`, the pytree of its arrays. All objects of a call are taken apart
  together, so that what they share is shared again inside.
- :func:`pure` puts objects together from the states, calls the function, and returns a :class:`Result`: the function's own
  result and the arrays that it changed. An unchanged array is no output.
- :meth:`Objects.finish` writes the changed arrays into the objects of the caller.

Everything between the first step and the last sees a function of arrays. Flax is never imported here: without objects of
``flax.nnx`` in a call nothing happens. A change of anything but arrays (a counter that is a Python number, a new attribute)
would need a new plan at every call, and is an error.

Modules of Equinox are pytrees whose leaves are arrays and settings: activation functions, rates, flags. As ``eqx.filter_jit``
does it, each setting of arguments and results becomes a :class:`Setting`, which is a part of the tree's structure.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import DictKey

from shardwise.capture import jax_internals as internals
from shardwise.errors import CaptureError


class State(dict[str, Any]):
    """The arrays of an object by path, such as ``blocks/0/up/kernel``. The first state of a call has the ``graph`` of all its
    objects: their types, static attributes and shared parts."""

    graph: Any = None


def _state(graph: Any, keys: Sequence[str], values: Sequence[Any]) -> State:
    state = State(zip(keys, values, strict=True))
    state.graph = graph
    return state


def _with_keys(state: State) -> Any:
    return [(DictKey(key), value) for key, value in state.items()], (state.graph, tuple(state))


def _flatten(state: State) -> Any:
    return tuple(state.values()), (state.graph, tuple(state))


def _unflatten(aux: Any, values: Any) -> State:
    return _state(aux[0], aux[1], tuple(values))


jax.tree_util.register_pytree_with_keys(State, _with_keys, _unflatten, _flatten)


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True)
class Setting:
    """A leaf of an Equinox module that is no array. Its type counts, since 1 and 1.0 are equal."""

    kind: type
    value: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=("changed", "own"), meta_fields=())
@dataclass(frozen=True, slots=True)
class Result:
    """What a pure function returns. ``changed`` has the structure of ``(args, kwargs)``, with None for what is unchanged."""

    changed: Any
    own: Any


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True)
class _Known:
    """A result that is an object of the caller, by its path among the objects of the call."""

    path: tuple[Any, ...]


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def _is_object(x: Any) -> bool:
    nnx = _nnx()
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _stops(x: Any) -> bool:
    # The variables of an nnx.State, which is split from an object, are arrays to the functional style.
    return isinstance(x, State | _nnx().State) or _is_object(x)


def _is_module(x: Any) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(x, equinox.Module)


def _setting(x: Any) -> Any:
    """Returns the setting of a leaf that is no array. One that cannot be hashed remains, and is an error later."""
    if hasattr(x, "dtype"):
        return x
    try:
        hash(x)
    except TypeError:
        return x
    return Setting(type(x), x)


def _without_settings(tree: Any) -> Any:
    """Returns a tree with settings in place of the leaves of Equinox modules that are no arrays."""
    if "equinox" not in sys.modules or all(hasattr(kind, "dtype") for kind in set(map(type, jax.tree.leaves(tree)))):
        return tree
    return jax.tree.map(lambda x: jax.tree.map(_setting, x) if _is_module(x) else x, tree, is_leaf=_is_module)


class Objects:
    """The nnx objects of a call. Without any it is false."""

    def __init__(self, objects: Sequence[Any] = ()):
        self._objects = list(objects)

    def __bool__(self) -> bool:
        return bool(self._objects)

    @functools.cached_property
    def _flat(self) -> tuple[Any, list[tuple[tuple[Any, ...], Any]]]:
        if not self._objects:
            return None, []
        graph, flat = _nnx().flatten(self._objects, graph=True)
        return graph, list(flat)

    def states(self) -> list[State]:
        """Returns the states of the objects."""
        graph, flat = self._flat
        states = [State() for _ in self._objects]
        states[0].graph = graph
        for (number, *names), leaf in flat:
            path, value = "/".join(map(str, names)), _raw(leaf)
            if internals.is_reference(getattr(value, "aval", None)):
                raise CaptureError(
                    f"{type(self._objects[number]).__name__}.{path} is a mutable array, which cannot be planned: make its "
                    "nnx.Variable with ref=False"
                )
            states[number][path] = value
        return states

    def nodes(self) -> dict[tuple[Any, ...], Any]:
        """Returns all objects in these objects, and all attributes, by path."""
        return dict(_nnx().iter_graph(self._objects, graph=True)) if self._objects else {}

    def write(self, tree: Any) -> Any:
        """Writes the arrays of states, except for None, into the objects; returns the tree with the objects in their place, and
        with settings again."""
        leaves, structure = jax.tree.flatten(tree, is_leaf=_is_replaced)
        values = (value for state in leaves if isinstance(state, State) for value in state.values())
        for (path, leaf), value in zip(self._flat[1], values, strict=True):
            if value is None:
                continue
            # Some arrays of a variable whose value is a tree may be unchanged.
            value = jax.tree.map(
                lambda new, old: old if new is None else new, value, _raw(leaf), is_leaf=lambda x: x is None
            )
            if isinstance(leaf, _nnx().Variable):
                leaf.set_raw_value(value)
            else:
                _nnx().update(self._objects, _nnx().from_flat_state([(path, value)]))
        objects = iter(self._objects)
        put = (next(objects) if isinstance(x, State) else x.value if isinstance(x, Setting) else x for x in leaves)
        return jax.tree.unflatten(structure, put)

    def finish(self, result: Any) -> Any:
        """Writes what a pure function changed, and returns the function's own result."""
        if not isinstance(result, Result):
            return result
        self.write(result.changed)
        return together(result.own, self)[0]


def _is_state(x: Any) -> bool:
    return isinstance(x, State)


def _is_replaced(x: Any) -> bool:
    return isinstance(x, State | Setting | _Known)


def _raw(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, _nnx().Variable) else leaf


def _has_objects(tree: Any) -> bool:
    leaves, structure = jax.tree.flatten(tree)
    kinds = (_nnx().Pytree, _nnx().Variable)
    if any(issubclass(kind, kinds) for kind in set(map(type, leaves))):
        return True
    try:
        return _holds(structure, kinds)
    except TypeError:  # a static attribute of some class cannot be hashed
        return _holds.__wrapped__(structure, kinds)


@functools.lru_cache(maxsize=64)
def _holds(structure: Any, kinds: tuple[type, ...]) -> bool:
    """Returns whether objects of these kinds are nodes of a tree."""
    kind = (structure.node_data() or (None,))[0]
    if kind is None or kind is _nnx().State:
        return False
    return issubclass(kind, kinds) or any(_holds.__wrapped__(child, kinds) for child in structure.children())


def apart(tree: Any) -> tuple[Any, Objects]:
    """Returns a tree with the state of each object in its place, and the objects; with settings in Equinox modules."""
    tree = _without_settings(tree)
    if _nnx() is None or not _has_objects(tree):
        return tree, Objects()
    leaves, structure = jax.tree.flatten(tree, is_leaf=_stops)
    objects = Objects([x for x in leaves if _is_object(x)])
    states = iter(objects.states())
    return jax.tree.unflatten(structure, [next(states) if _is_object(x) else x for x in leaves]), objects


def together(tree: Any, known: Objects | None = None) -> tuple[Any, Objects]:
    """Returns a tree with new objects in place of states, and those objects; with ``known`` ones in place of their paths, and
    with settings again."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_replaced)
    states = [x for x in leaves if isinstance(x, State)]
    arrays = [value for state in states for value in state.values()]
    objects = _nnx().merge(states[0].graph, arrays) if states else []
    new = iter(objects)
    nodes = known.nodes() if known is not None and any(isinstance(x, _Known) for x in leaves) else {}
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Setting):
            leaves[k] = leaf.value
        elif isinstance(leaf, State | _Known):
            leaves[k] = next(new) if isinstance(leaf, State) else nodes.get(leaf.path)
    return jax.tree.unflatten(structure, leaves), Objects(objects)


def of_objects(tree: Any) -> list[bool]:
    """Returns for each array of a tree whether it is in a state."""
    marks = jax.tree.map(lambda x: jax.tree.map(lambda _: _is_state(x), x), tree, is_leaf=_is_state)
    return jax.tree.leaves(marks)


def pure_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns a pure function and its arguments: the given ones where no nnx object and no setting is among them."""
    tree, _ = apart((tuple(args), dict(kwargs)))
    is_replaced = any(map(_is_replaced, jax.tree.leaves(tree, is_leaf=_is_replaced)))
    return (pure(fn) if is_replaced else fn, *tree)


def pure(fn: Callable[..., Any]) -> Callable[..., Result]:
    """Returns a function of states that returns what ``fn`` changes in objects, with its result."""
    # Inside of an nnx.jit unchanged arrays would be results too.
    fn = fn.__wrapped__ if hasattr(fn, "jitted_fn") and hasattr(fn, "__wrapped__") else fn

    @functools.wraps(fn, updated=())
    def run(*args: Any, **kwargs: Any) -> Result:
        tree, objects = together((args, kwargs))
        graph, before = _arrays(objects)
        attributes = objects.nodes()
        own = fn(*tree[0], **tree[1])
        graph_after, after = _arrays(objects)
        if graph_after != graph:
            raise CaptureError(f"{getattr(fn, '__name__', 'the function')} {_difference(attributes, objects.nodes())}")
        changed = (None if _same(x, y) else y for x, y in zip(before, after, strict=True))

        def updates(x: Any) -> Any:
            return _state(x.graph, tuple(x), [next(changed) for _ in x]) if isinstance(x, State) else None

        return Result(jax.tree.map(updates, (args, kwargs), is_leaf=_is_state), _returned(own, objects))

    return run


def _arrays(objects: Objects) -> tuple[Any, list[Any]]:
    graph, flat = Objects(objects._objects)._flat
    return graph, [_raw(leaf) for _, leaf in flat]


def _same(before: Any, after: Any) -> bool:
    """Whether a variable has the same arrays; its value may be a tree."""
    return list(map(id, jax.tree.leaves(before))) == list(map(id, jax.tree.leaves(after)))


def _returned(own: Any, objects: Objects) -> Any:
    """Returns a result with states in place of new objects, and paths in place of those of the caller."""
    known = {id(x): path for path, x in objects.nodes().items() if _is_object(x)}
    if known:
        own = jax.tree.map(lambda x: _Known(known[id(x)]) if id(x) in known else x, own, is_leaf=_stops)
    own, new = apart(own)
    if any(id(x) in known for x in new.nodes().values() if _is_object(x)):
        raise CaptureError(
            "a new nnx object is returned that has parts of an argument: return the argument itself, or nnx.clone the part"
        )
    return own


def _difference(before: Mapping[tuple[Any, ...], Any], after: Mapping[tuple[Any, ...], Any]) -> str:
    """Returns the first change of something that is no array."""
    for path, x in after.items():
        if len(path) < 2 or str(path[-1]).startswith("_pytree__"):  # the bookkeeping of Flax
            continue
        where = f"{type(after[path[:-1]]).__name__}.{path[-1]}"
        if path not in before:
            return (
                f"adds {where}, so that the next call would need another plan: create it before the first call, or remove it "
                "(del, nnx.pop) before the function returns"
            )
        if not _is_object(x) and not hasattr(x, "shape") and x != before[path]:
            return (
                f"changes {where} from {before[path]!r:.40} to {x!r:.40}, which is no array, so that every call would need "
                "another plan: make it an nnx.Variable of an array, or change it outside of the function"
            )
    return (
        "changes the structure of an nnx object, so that the next call would need another plan: change arrays alone, and the "
        "structure outside of the function"
    )
