"""Two processes with four devices each, joined by ``jax.distributed`` on this machine, agree with one process.

The processes run the recipe of docs/recipes.md as it stands there, and are started and stopped here.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from tests.recipes.test_recipes import SECTIONS, check_same, check_sharded_as_planned

RECIPE = SECTIONS["Several processes"]
LIMIT_S = 90

#: Added to the recipe: process 0 prints what came out, and where the parts lie.
TAIL = """
import hashlib
import json

from jax.experimental import multihost_utils

whole = multihost_utils.process_allgather(state, tiled=True)
print("PLAN", hashlib.sha256(plan.to_json().encode()).hexdigest())
if jax.process_index() == 0:
    print("RESULT", json.dumps({
        "processes": jax.process_count(),
        "devices": [jax.local_device_count(), jax.device_count()],
        "loss": float(loss),
        "state": [a.tolist() for a in jax.tree.leaves(whole)],
        "specs": [str(a.sharding.spec) for a in jax.tree.leaves(state)],
        "local": [sum(s.data.size for s in a.addressable_shards) for a in jax.tree.leaves(state)],
        "owners": sorted({d.process_index for d in state["params"]["up"].sharding.device_set}),
    }))
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def environment(devices: int) -> dict[str, str]:
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    flags = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
    proxies = {"http_proxy", "https_proxy", "all_proxy", "grpc_proxy"}  # loopback needs none
    kept = {k: v for k, v in os.environ.items() if k.lower() not in proxies}
    return kept | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def run(folder: Path, text: str, count: int, devices: int) -> tuple[list[int | None], list[str]]:
    """Runs a script in some processes, and returns their exit codes and what they say. None is left, whatever happens."""
    script = folder / "train.py"
    script.write_text(text)
    address = f"127.0.0.1:{free_port()}"
    logs = [folder / f"{k}.log" for k in range(count)]
    started: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + LIMIT_S
    try:
        for k, log in enumerate(logs):
            with log.open("wb") as out:
                command = [sys.executable, str(script), address, str(count), str(k)]
                started.append(
                    subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment(devices))
                )
        while None in (codes := [p.poll() for p in started]) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return codes, [log.read_text() for log in logs]


def run_processes(folder: Path, count: int = 2, devices: int = 4) -> dict[str, Any]:
    """Runs the recipe in some processes, and returns what number 0 says."""
    codes, texts = run(folder, RECIPE + TAIL, count, devices)
    if codes != [0] * count:
        said = "\n".join(f"process {k}: {text[-2000:]}" for k, text in enumerate(texts))
        pytest.fail(f"exit codes {codes} (None: stopped after {LIMIT_S} s)\n{said}")
    plans = [re.findall(r"^PLAN (\w+)$", text, flags=re.M) for text in texts]
    assert all(len(own) == 1 for own in plans) and plans == [plans[0]] * count, "the processes made different plans"
    (line,) = [line for line in texts[0].splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def one_process(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The same recipe in this process, on its eight devices."""
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args: None)
    monkeypatch.setattr(sys, "argv", ["train.py", "127.0.0.1:0", "1", "0"])
    scope: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(RECIPE, "<recipe Several processes>", "exec"), scope)
    return SimpleNamespace(**{name: value for name, value in scope.items() if not name.startswith("__")})


def test_two_processes_agree_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = one_process(monkeypatch)
    check_sharded_as_planned(one, "params/")
    check_same(one)

    two = run_processes(tmp_path)
    assert two["processes"] == 2 and two["devices"] == [4, 8] and two["owners"] == [0, 1]
    state = jax.tree.leaves(one.state)
    assert two["specs"] == [str(a.sharding.spec) for a in state]
    assert {axis for axes in one.plan.array("state/params/up").spec for axis in axes} == {"data", "model"}
    assert two["local"] == [a.size // 2 for a in state], "each process holds half of the state"
    np.testing.assert_allclose(two["loss"], one.loss, rtol=1e-5)
    for a, b in zip(two["state"], state, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_processes_with_different_plans_are_refused(tmp_path: Path) -> None:
    same, other = (
        'sw.FSDP("data"), sw.Megatron("model")',
        'sw.DataParallel("data"), *[sw.Megatron("model")] * int(sys.argv[3])',
    )
    assert same in RECIPE
    codes, texts = run(tmp_path, RECIPE.replace(same, other), 2, 4)
    assert codes == [1, 1]
    assert all("PlanError: the plans of step differ between processes (process 0: " in text for text in texts)
