"""A notebook: functions defined in cells, planned and run there; their source lines are cells, not files."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

LIMIT_S = 120

SETUP = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, shardwise
from shardwise.tactics.strategies import FSDP
where = dict(mesh={"data": 4}, tactics=[FSDP("data")], roles={"params": "w", "batch": "x"})
"""

DECORATED = """
@shardwise.jit(**where)
def update(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

w, x = jnp.ones((8, 16)), jnp.ones((64, 8))
new = update(w, x)
print(len(jax.devices()), new.sharding.spec, float(new[0, 0]))
"""

PLANNED = """
plan = shardwise.plan(update.__wrapped__, w, x, **where)
print(plan)
print(shardwise.verify(plan, update.__wrapped__, w, x).agrees)
print(shardwise.analyze(update.__wrapped__, w, x))
print({c.source for c in plan.collectives if c.source != "?"})
plan
"""

WRONG = """
shardwise.plan(lambda x: x if x.sum() > 0 else -x, x, mesh={"data": 4})
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")

    def execute(*cells: str) -> list[str]:
        """What each cell printed and showed. The kernel is gone afterwards, whatever happens."""
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
        path = {"metadata": {"path": str(tmp_path)}}
        done = NotebookClient(made, timeout=LIMIT_S, kernel_name="python3", resources=path).execute()
        outputs = [cell["outputs"] for cell in done.cells]
        return ["".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in shown) for shown in outputs]

    return execute


def test_functions_of_cells_are_planned_and_run(run) -> None:
    _, decorated, planned = run(SETUP, DECORATED, PLANNED)
    assert decorated.split()[0] == "4" and "'data'" in decorated
    assert float(decorated.split()[-1]) == pytest.approx(1 - 0.1 * 2 * 8 / 16)
    for part in ("float32[8/data, 16]", "all-gather", "True", "What can be sharded"):
        assert part in planned, planned
    assert planned.count("update on data 4") == 2, "a plan at the end of a cell is shown as it is printed"
    assert re.search(r"\{'[^']+:3'\}", planned), "the line of the cell"
    assert "\x1b" not in planned, "no escape codes"


def test_errors_in_cells_say_where(run) -> None:
    with pytest.raises(CellExecutionError) as caught:
        run(SETUP, DECORATED, WRONG)
    assert "cannot be traced" in str(caught.value) and "jnp.where" in str(caught.value)
