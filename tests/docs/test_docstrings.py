"""Public names have docstrings, and examples that run: pytest runs the examples of all modules (``--doctest-modules``)."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import shardwise
from shardwise import errors
from shardwise.dims.analysis import Analysis
from shardwise.plans.plan import Plan
from shardwise.tactics import auto, strategies


def members(cls: type) -> dict[str, object]:
    """Methods and properties that a class has itself."""
    return {
        f"{cls.__name__}.{name}": thing
        for name, thing in {**vars(cls.__base__), **vars(cls)}.items()
        if not name.startswith("_") and (callable(thing) or hasattr(type(thing), "__get__"))
        if not inspect.ismemberdescriptor(thing)
    }


TACTICS = {
    name: thing
    for module in (strategies, auto)
    for name, thing in vars(module).items()
    if inspect.isclass(thing) and thing.__module__ == module.__name__
}
PUBLIC = {name: getattr(shardwise, name) for name in shardwise.__all__}
ERRORS = {name for name, thing in PUBLIC.items() if inspect.isclass(thing) and issubclass(thing, Exception)}
DESCRIBED = {**PUBLIC, **members(Plan), **members(Analysis), **TACTICS}


@pytest.mark.parametrize("name", DESCRIBED)
def test_there_is_a_docstring(name: str) -> None:
    text = DESCRIBED[name].__doc__ or ""
    assert text.strip() and not text.startswith(f"{name}("), "a dataclass writes its signature where nothing is written"


@pytest.mark.parametrize("name", sorted(DESCRIBED.keys() - ERRORS))
def test_there_is_an_example(name: str) -> None:
    assert ">>> " in (DESCRIBED[name].__doc__ or "")


def test_the_reference_has_every_public_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    listed = set(re.findall(r"^\.\. auto(?:function|class):: (\w+)$", page, flags=re.M))
    assert set(PUBLIC) - ERRORS - TACTICS.keys() <= listed, "errors and tactics come with their modules"
    modules = re.findall(r"^\.\. automodule:: shardwise.tactics.\w+\n   :members: (.*)$", page, flags=re.M)
    assert {thing.__name__ for thing in TACTICS.values()} == {name for names in modules for name in names.split(", ")}


def test_every_tactic_and_every_error_is_public() -> None:
    defined = {name for name, thing in vars(errors).items() if inspect.isclass(thing)}
    assert defined == ERRORS and TACTICS.keys() <= PUBLIC.keys()
    assert set(dir(shardwise)) == {*shardwise.__all__, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'ZeRO3'"):
        shardwise.ZeRO3  # noqa: B018


def test_members_are_found() -> None:
    assert {"Plan.spec", "Plan.in_specs", "Plan.jit"} <= members(Plan).keys()
    assert {"Analysis.colors", "Analysis.bits", "Analysis.why"} <= members(Analysis).keys()
    assert "FSDP" in TACTICS and "Decision" not in TACTICS
