"""What the examples in docstrings may use: those of methods continue that of their class, and those of tactics that of their
module. Files that they write are in a temporary folder.

Python's garbage collector runs between tests, after some millions of new objects: it would scan all objects of JAX each time,
a quarter of the time of the tests. What is alive afterwards is not scanned again.
"""

from __future__ import annotations

import doctest
import gc
from typing import Any

import pytest

gc.disable()
#: New objects after which the collector runs; they take two gigabytes or so.
_OBJECTS = 20_000_000


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    if gc.get_count()[0] > _OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _examples_go_on(
    request: pytest.FixtureRequest, doctest_namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    test = getattr(request.node, "dtest", None)
    if test is None:
        return
    monkeypatch.chdir(request.getfixturevalue("tmp_path"))  # a folder is made for examples only
    from shardwise.dims.analysis import Analysis
    from shardwise.plans.execution import Execution
    from shardwise.plans.plan import Plan
    from shardwise.tactics import strategies

    homes = {f"{c.__module__}.{c.__name__}.": c for c in (Plan, Execution, Analysis)} | {
        f"{strategies.__name__}.": strategies
    }
    described = next((home for name, home in homes.items() if name in test.name), None)
    for example in doctest.DocTestParser().get_examples((described and described.__doc__) or ""):
        if not example.want:
            exec(example.source, doctest_namespace)
    test.globs.update(doctest_namespace)
