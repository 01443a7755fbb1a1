"""The parser, and the options that several commands share."""

from __future__ import annotations

import argparse
import difflib
import inspect
import shlex
import shutil
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

from shardwise.errors import ShardwiseError

#: What a command returns: text, or data to print as JSON; and an exit code where that is not 0.
Result = str | dict[str, Any] | tuple[str | dict[str, Any], int]


class Parser(argparse.ArgumentParser):
    """Reports what is wrong with a command in one line that names the help, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
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

    def add_flag(self, name: str, help: str) -> None:
        self.add_argument(name, action="store_true", help=help)


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], Result], accelerators: bool = False
) -> Parser:
    """Adds a command. The docstring of ``run`` is its help: a line for the list of commands, more about it, and examples.
    With ``accelerators`` JAX may open them."""
    summary, *about, examples = (inspect.getdoc(run) or "\n\n").split("\n\n")
    command: Parser = commands.add_parser(
        name,
        help=summary[:1].lower() + summary[1:].rstrip("."),
        description=textwrap.fill("".join(about) or summary, 78),
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(parser=command, run=run, accelerators=accelerators)
    return command


def add_target(parser: Parser, optional: str = "") -> None:
    """``optional``: what it is good for, where it can be left out."""
    help = "zoo:NAME[:CONFIG], or file.py:function returning (fn, args)" + (f"; {optional}" if optional else "")
    target = parser.add_argument("target", metavar="TARGET", help=help, nargs="?" if optional else None)
    target.completer = _complete_target  # type: ignore[attr-defined]


def _complete_target(prefix: str, **_: Any) -> list[str]:
    """Returns the programs of the zoo and Python files, for Argcomplete."""
    from argcomplete.completers import FilesCompleter

    from shardwise import zoo

    programs = [f"zoo:{name}:{config}" for name in zoo.names() for config in zoo.configs(name)]
    return [*programs, *FilesCompleter(("py",))(prefix)]


def add_plan(parser: Parser, name: str = "plan", metavar: str = "PLAN", **options: Any) -> None:
    options = {"help": "a plan that Plan.save wrote", **options}
    parser.add_argument(name, metavar=metavar, **options)


def add_mesh(parser: Parser, topology: str, mesh: str) -> None:
    """The devices and the mesh; the texts say what the defaults are."""
    help = f"devices and links, such as v5e:4x4 or h100:8x4{topology}"
    parser.add_argument("--topology", metavar="T", help=help)
    parser.add_argument("--mesh", metavar="AXES", type=_mesh, help=f"axes and sizes, such as data=4,model=4{mesh}")


def add_roles(parser: Parser) -> None:
    for role, help in (("batch", "an argument that is the batch"), ("params", "one that is parameters")):
        parser.add_argument(f"--{role}", metavar="PATH", action="append", help=f"{help} (default: inferred)")


def roles(arguments: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """The values of the options of ``add_roles``."""
    return {role: tuple(paths) for role in ("batch", "params") if (paths := getattr(arguments, role))}


def add_json(parser: Parser, what: str = "JSON") -> None:
    parser.add_flag("--json", help=f"print {what}")


def add_loudness(parser: Parser, progress: str = "") -> None:
    """``--verbose``, and ``--quiet`` for commands that show their ``progress``."""
    group = parser.add_mutually_exclusive_group()
    if progress:
        group.add_argument("--quiet", action="store_true", help="no progress on the terminal")
        progress += "; "
    group.add_argument("--verbose", action="store_true", help=f"{progress}the whole traceback where something fails")


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
    """The width of the terminal between 80 and 120 columns; 80 where there is none."""
    return min(max(shutil.get_terminal_size().columns, 80), 120)
