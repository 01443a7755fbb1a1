"""What an argument may be: asked by a shell whenever Tab is pressed, so nothing here imports JAX.

Argcomplete calls these with what stands there already (``prefix``) and with what was parsed before it, and leaves out what does
not begin with the prefix.
"""

from __future__ import annotations

import argparse
import ast
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


def words(*known: str) -> Callable[..., list[str]]:
    return lambda **_: list(known)


def targets(prefix: str, **_: Any) -> list[str]:
    """``zoo:``, then programs, then their configurations; Python files, then their functions."""
    from shardwise import zoo

    first, colon, rest = prefix.partition(":")
    if first == "zoo" and colon:
        near = [name for name in zoo.names() if name.startswith(rest.partition(":")[0])]
        if len(near) > 1 and ":" not in rest:
            return [f"zoo:{name}" for name in near]
        return [f"zoo:{name}{config}" for name in near for config in ("", *(f":{c}" for c in zoo.configs(name)))]
    if colon:
        return [f"{first}:{name}" for name in _functions(Path(first))]
    python = files("py")(prefix)
    return ["zoo:", *(name if name.endswith("/") else f"{name}:" for name in python)]


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
    found: dict[str, None] = {}
    for count in (2**k for k in range(9)):
        try:
            found[topology(f"{name}:{count}").text] = None
        except HardwareError:
            continue
    return list(found)


def backends(prefix: str, **_: Any) -> list[str]:
    """The host, and devices that can be compiled for without them: TPUs, which lie on a torus."""
    return ["host", *(f"{name}:" for name in _profiles("torus"))] if ":" not in prefix else topologies(prefix)


def _profiles(*kinds: str) -> list[str]:
    """All names, or those of devices with links of a kind."""
    from shardwise.hardware.load import profiles

    return [p.name for p in profiles()[0] if not kinds or any(tier.kind in kinds for tier in p.links)]


def tactics(prefix: str, **_: Any) -> list[str]:
    """The next of ``dp,megatron+sequence``; axes are not known here."""
    from shardwise.tactics.named import NAMES

    before = prefix[: max(prefix.rfind(","), prefix.rfind("+")) + 1]
    return [before + name for name in NAMES]


def paths(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """The arguments and outputs of the plan that was named before."""
    try:
        data = json.loads(Path(parsed_args.plan).read_text(encoding="utf-8"))
        return [array["path"] for array in (*data["arguments"], *data["outputs"])]
    except (OSError, ValueError, KeyError, TypeError):
        return []
