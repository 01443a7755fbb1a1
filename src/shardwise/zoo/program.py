"""A zoo program: a function, the shapes of its arguments, and a maker of arrays for small ones."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ..errors import ShardwiseError


class ZooError(ShardwiseError, ValueError):
    """A program, configuration or option that does not exist or does not fit the others."""


class Config(SimpleNamespace):
    """The sizes and flags of a program, from `programs.toml`. Each is an option of `zoo.load`."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


def require_divisible(what: str, size: int, divisor: int) -> None:
    if size % divisor:
        raise ZooError(f"{what}: {size} is not a multiple of {divisor}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooProgram:
    """A program of the zoo, ready for `jax.jit(fn, donate_argnums=...).trace(*args)`.

    A training step is `(params, opt_state, batch) -> (params, opt_state, loss)`. `args` are pytrees of
    `jax.ShapeDtypeStruct`: nothing is allocated. `roles` says what each argument is: `"params"`, `"optimizer"`,
    `"batch"`, `"cache"`, or `"state"` (running statistics).
    """

    name: str = ""
    config: str = ""
    fn: Callable[..., Any] = field(repr=False)
    args: tuple[Any, ...] = field(repr=False)
    donate_argnums: tuple[int, ...]
    description: str = ""
    roles: tuple[str, ...]
    _make: Callable[[int], tuple[Any, ...]] = field(repr=False)

    def make_args(self, seed: int = 0) -> tuple[Any, ...]:
        """Returns arrays of the shapes in `args`: small random weights, indices in range, a fresh optimizer."""
        return self._make(seed)
