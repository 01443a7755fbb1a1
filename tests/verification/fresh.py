"""Runs a module of programs in a fresh interpreter, whose device count no other test can have fixed before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(module: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """What ``python -m module arguments…`` prints last, as JSON."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"} | environment
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
