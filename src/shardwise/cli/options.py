"""What several commands take: said once, so that it means, reads and completes the same in all of them."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from shardwise.cli import completers
from shardwise.errors import ShardwiseError


class Parser(argparse.ArgumentParser):
    """What is wrong with a command is one line, and where help is; not the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"shardwise: {message}; see '{self.prog} --help'\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but what is not known is put beside what its command knows."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            # The command that was parsed, where there was one.
            command: Parser = getattr(found, "parser", self)
            near = difflib.get_close_matches(unknown[0].partition("=")[0], command._option_string_actions, n=2)
            hint = f" (did you mean {' or '.join(near)}?)" if near else ""
            command.error(f"unknown argument {shlex.join(unknown[:1])}{hint}")
        return found


class Help(argparse.HelpFormatter):
    """Wraps text line by line; what stands further in, as examples do, stays as it is. The names of commands have a column of
    their own width, in which argparse does not count how far in they stand."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        for one in self._iter_indented_subactions(action):
            length = self._current_indent + len(str(one.metavar))
            self._action_max_length = max(self._action_max_length, length)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for line in text.splitlines():
            lines += [line] if line.startswith(" ") else textwrap.wrap(line, width) or [""]
        return "\n".join(indent + line for line in lines)


def add_command(commands: Any, name: str, *, help: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A command with its help. ``examples`` are lines of at most 78 columns."""
    lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
    word = "examples" if "\n" in lines else "example"
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=description, epilog=f"{word}:\n{lines}", formatter_class=Help
    )
    made.set_defaults(parser=made)
    return made


def completed(action: argparse.Action, by: Callable[..., Iterable[str]]) -> None:
    """Says what an argument may be, to a shell that asks."""
    action.completer = by  # type: ignore[attr-defined]


def add_target(parser: argparse.ArgumentParser, optional: str = "") -> None:
    """``optional``: what it is good for, where it can be left out."""
    shown = "zoo:NAME[:CONFIG], or file.py:function returning (fn, args)" + (f"; {optional}" if optional else "")
    given: dict[str, Any] = {"nargs": "?"} if optional else {}
    completed(parser.add_argument("target", metavar="TARGET", help=shown, **given), completers.targets)


def add_plan(parser: argparse.ArgumentParser, name: str = "plan", metavar: str = "PLAN", **options: Any) -> None:
    options = {"help": "a plan that Plan.save wrote", **options}
    completed(parser.add_argument(name, metavar=metavar, **options), completers.files("json"))


def add_where(parser: argparse.ArgumentParser, topology: str, mesh: str) -> None:
    """The devices and the mesh; the texts say what is taken where they are not given."""
    shown = f"devices and links, such as v5e:4x4 or h100:8x4{topology}"
    completed(parser.add_argument("--topology", metavar="T", help=shown), completers.topologies)
    parser.add_argument("--mesh", metavar="AXES", help=f"axes and sizes, such as data=4,model=4{mesh}")


def add_tactics(parser: argparse.ArgumentParser, shown: str) -> None:
    completed(parser.add_argument("--tactics", metavar="NAMES", help=shown), completers.tactics)


def add_roles(parser: argparse.ArgumentParser) -> None:
    for role, shown in (("batch", "an argument that is the batch"), ("params", "one that is parameters")):
        parser.add_argument(f"--{role}", metavar="PATH", action="append", help=f"{shown} (default: inferred)")


def roles(arguments: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """What was given with the options of ``add_roles``."""
    return {role: tuple(paths) for role in ("batch", "params") if (paths := getattr(arguments, role))}


def add_json(parser: argparse.ArgumentParser, what: str = "JSON") -> None:
    parser.add_argument("--json", action="store_true", help=f"print {what}")


def add_loudness(parser: argparse.ArgumentParser, progress: str = "") -> None:
    """``--verbose``, and ``--quiet`` for what takes so long that it shows its progress."""
    group = parser.add_mutually_exclusive_group()
    if progress:
        group.add_argument("--quiet", action="store_true", help="no progress on the terminal")
    more = f"{progress}; " if progress else ""
    group.add_argument("--verbose", action="store_true", help=f"{more}where something fails, the whole traceback")


def mesh_of(text: str) -> dict[str, int | None]:
    """
    >>> mesh_of("data=4,model=?")
    {'data': 4, 'model': None}
    """
    found: dict[str, int | None] = {}
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not name or not (size == "?" or size.isdigit()) or name in found:
            raise ShardwiseError(f"{text!r} is no mesh: write axes and sizes, such as data=4,model=4 or data=?,model=4")
        found[name] = None if size == "?" else int(size)
    return found


def terminal_width() -> int:
    """The terminal's width between 80 and 120 columns; 80 where there is none."""
    try:
        return min(max(os.get_terminal_size(1).columns, 80), 120)
    except OSError:
        return 80
