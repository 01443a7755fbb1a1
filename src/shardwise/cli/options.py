"""The parser of commands, and the arguments that several commands share."""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from shardwise.errors import ShardwiseError

#: What a command returns: text, or data to print as JSON; and an exit code where that is not 0.
Result = str | dict[str, Any] | tuple[str | dict[str, Any], int]
#: Names and options of ``add_argument``.
Argument = tuple[tuple[str, ...], dict[str, Any]]


class Parser(argparse.ArgumentParser):
    """Reports what is wrong with a command in one line that names the help."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong is not None:
            near = difflib.get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), n=2, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {wrong[2]}"
            message = f"{message[: wrong.start()]}there is no {wrong[1]!r}; {hint}"
        self.exit(2, f"shardwise: {message}; see '{self.prog} --help'\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but suggests the options of the command that are close to an unknown one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command: Parser = getattr(parsed, "parser", self)
            near = difflib.get_close_matches(unknown[0].partition("=")[0], command._option_string_actions, n=2)
            hint = f" (did you mean {' or '.join(near)}?)" if near else ""
            command.error(f"unknown argument {shlex.join(unknown[:1])}{hint}")
        return parsed


@dataclass(frozen=True, slots=True)
class Command:
    """A command, made by ``@command``. With ``accelerators`` JAX may open them; ``trouble`` is the exit code of an error."""

    name: str
    run: Callable[[argparse.Namespace], Result]
    arguments: tuple[Argument, ...]
    accelerators: bool = False
    trouble: int = 1

    def add_to(self, commands: Any) -> None:
        """The docstring of ``run`` is the help: a line for the list of commands, more about it, and examples."""
        summary, *about, examples = (inspect.getdoc(self.run) or "\n\n").split("\n\n")
        parser: Parser = commands.add_parser(
            self.name,
            help=summary[:1].lower() + summary[1:].rstrip("."),
            description=textwrap.fill(" ".join([summary, *about]), 78),
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for names, options in self.arguments:
            action = parser.add_argument(*names, **options)
            if names == ("target",):
                action.completer = _complete_target  # type: ignore[attr-defined]
        parser.set_defaults(parser=parser, command=self)


def command(name: str, *arguments: Argument, **options: Any) -> Callable[[Callable[..., Result]], Command]:
    return lambda run: Command(name, run, arguments, **options)


def argument(*names: str, **options: Any) -> Argument:
    return names, options


def flag(name: str, help: str) -> Argument:
    return argument(name, action="store_true", help=help)


JSON: Final = flag("--json", "print JSON")
QUIET: Final = flag("--quiet", "no progress on the terminal")
VERBOSE: Final = flag("--verbose", "the full traceback where something fails")
ROLES: Final = (
    argument("--batch", metavar="PATH", action="append", help="an argument of the batch (default: inferred)"),
    argument("--params", metavar="PATH", action="append", help="an argument with parameters (default: inferred)"),
)


def target(use: str = "") -> Argument:
    """Returns the argument for the program of a command; with a ``use`` it is optional."""
    help = "zoo:NAME[:CONFIG], or file.py:function returning (fn, args)" + (f"; {use}" if use else "")
    options = {"nargs": "?"} if use else {}
    return argument("target", metavar="TARGET", help=help, **options)


def _complete_target(prefix: str, **_: Any) -> list[str]:
    """Returns the programs of the zoo and Python files, for Argcomplete."""
    from argcomplete.completers import FilesCompleter

    from shardwise import zoo

    programs = [f"zoo:{name}:{config}" for name in zoo.names() for config in zoo.configs(name)]
    return [*programs, *FilesCompleter(("py",))(prefix)]


def saved_plan(name: str = "plan", metavar: str = "PLAN", **options: Any) -> Argument:
    return argument(name, metavar=metavar, **{"help": "a plan that Plan.save wrote", **options})


def mesh(topology_default: str, mesh_default: str) -> tuple[Argument, Argument]:
    devices = f"devices and links, such as v5e:4x4 or h100:8x4{topology_default}"
    axes = f"axes and sizes, such as data=4,model=4{mesh_default}"
    return argument("--topology", metavar="T", help=devices), argument("--mesh", metavar="AXES", type=_mesh, help=axes)


def roles(arguments: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Returns the values of ``ROLES``."""
    return {role: tuple(paths) for role in ("batch", "params") if (paths := getattr(arguments, role))}


def _mesh(text: str) -> dict[str, int | None]:
    """
    >>> _mesh("data=4,model=?")
    {'data': 4, 'model': None}
    """
    sizes: dict[str, int | None] = {}
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not name or not (size == "?" or size.isdigit()) or name in sizes:
            raise ShardwiseError(f"{text!r} is no mesh: write axes and sizes, such as data=4,model=4 or data=?,model=4")
        sizes[name] = None if size == "?" else int(size)
    return sizes


def width() -> int:
    """Returns the width of the terminal, or ``COLUMNS``, which counts in a pipe too; at least 80."""
    return max(shutil.get_terminal_size().columns, 80)


def colored() -> bool:
    """Returns whether the output is a terminal that shows colors, and nobody asked for none (``NO_COLOR``)."""
    shown = sys.__stdout__ is not None and sys.__stdout__.isatty() and os.environ.get("TERM") != "dumb"
    return bool(os.environ.get("FORCE_COLOR")) or (shown and not os.environ.get("NO_COLOR"))
