"""What the examples in docstrings may take for granted: those of ``Plan``'s methods go on from that of ``Plan`` itself."""

from __future__ import annotations

import doctest
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _examples_go_on(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    test = getattr(request.node, "dtest", None)
    if test is None or not test.name.startswith(("shardwise.plans.plan.Plan.", "shardwise.plans.execution.Execution.")):
        return
    from shardwise.plans.execution import Execution
    from shardwise.plans.plan import Plan

    described = Plan if ".Plan." in test.name else Execution
    for example in doctest.DocTestParser().get_examples(described.__doc__ or ""):
        if not example.want:
            exec(example.source, doctest_namespace)
    test.globs.update(doctest_namespace)
