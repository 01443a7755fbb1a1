"""Values that a shell offers for an argument when Tab is pressed; so nothing here imports JAX.

Argcomplete calls these with the text that is there already (``prefix``) and with the arguments before it, and leaves out values
that do not begin with the prefix.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.errors import HardwareError


def files(*endings: str) -> Callable[..., list[str]]:
    """Files with some endings, and folders."""

    def complete(prefix: str, **_: Any) -> list[str]:
        from argcomplete.completers import FilesCompleter

        return FilesCompleter(endings)(prefix)

    return complete


def targets(prefix: str, **_: Any) -> list[str]:
    """``zoo:``, then programs, then their configurations; Python files, then their functions."""
    from shardwise import zoo

    first, colon, rest = prefix.partition(":")
    if not colon:
        return ["zoo:", *(name if name.endswith("/") else f"{name}:" for name in files("py")(prefix))]
    if first != "zoo":
        return [f"{first}:{name}" for name in _functions(Path(first))]
    near = [name for name in zoo.names() if name.startswith(rest.partition(":")[0])]
    configs = {name: () if len(near) > 1 and ":" not in rest else zoo.configs(name) for name in near}
    return [f"zoo:{name}{config}" for name in near for config in ("", *(f":{c}" for c in configs[name]))]


def _functions(file: Path) -> list[str]:
    """Functions of a file that can be called without arguments."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and len(node.args.posonlyargs + node.args.args) == len(node.args.defaults)
        and None not in node.args.kw_defaults
    ]


def hardware(prefix: str, **_: Any) -> list[str]:
    """Names of profiles, and files that have one."""
    return [*_profiles(), *files("toml")(prefix)]


def topologies(prefix: str, **_: Any) -> list[str]:
    """Names of profiles, then the usual shapes of each."""
    from shardwise.hardware.topology import topology

    name, colon, _rest = prefix.partition(":")
    if not colon:
        return [f"{name}:" for name in _profiles()]
    shapes: dict[str, None] = {}
    for count in (2**k for k in range(9)):
        with contextlib.suppress(HardwareError):
            shapes[topology(f"{name}:{count}").text] = None
    return list(shapes)


def backends(prefix: str, **_: Any) -> list[str]:
    """The host, and TPUs, which can be compiled for without them."""
    return topologies(prefix) if ":" in prefix else ["host", *(f"{name}:" for name in _profiles("torus"))]


def _profiles(kind: str = "") -> list[str]:
    """Names of all profiles, or of those with links of a kind."""
    from shardwise.hardware.load import profiles

    return [p.name for p in profiles()[0] if not kind or any(tier.kind == kind for tier in p.links)]


def tactics(prefix: str, **_: Any) -> list[str]:
    """The next of ``dp,megatron+sequence``; axes are not known here."""
    from shardwise.tactics.text import NAMES

    before = prefix[: max(prefix.rfind(","), prefix.rfind("+")) + 1]
    return [before + name for name in NAMES]


def paths(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """The arguments and outputs of the plan that is named before."""
    try:
        data = json.loads(Path(parsed_args.plan).read_text(encoding="utf-8"))
        return [array["path"] for array in (*data["arguments"], *data["outputs"])]
    except (OSError, ValueError, KeyError, TypeError):
        return []
