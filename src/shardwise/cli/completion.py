"""``shardwise completion``: completion of commands, options and their values by the shell.

The script is Argcomplete's. It makes the shell run ``shardwise`` itself whenever Tab is pressed, with ``_ARGCOMPLETE`` set;
what may stand there is then read off the parser, and off what ``shardwise.cli.completers`` says of arguments.
"""

from __future__ import annotations

import argparse
import os
from typing import Any, Final

from shardwise.cli import options

_ASKED: Final = "_ARGCOMPLETE"


def add_command(commands: Any) -> None:
    """Registers ``completion``."""
    completion = options.add_command(
        commands,
        "completion",
        help="print a script that makes a shell complete commands, options, programs and devices",
        description="Prints a script to be sourced by a shell: then Tab completes commands, options, programs of the zoo, "
        "functions of files, devices and saved plans. Put the line of your shell into ~/.bashrc, ~/.zshrc (after compinit) or "
        "~/.config/fish/config.fish.",
        examples="""
        eval "$(shardwise completion bash)"
        eval "$(shardwise completion zsh)"
        shardwise completion fish | source
        """,
    )
    completion.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")
    completion.set_defaults(run=_completion)


def _completion(arguments: argparse.Namespace) -> str:
    from argcomplete.shell_integration import shellcode

    return shellcode(["shardwise"], shell=arguments.shell).strip() + "\n"


def answer_shell(parser: argparse.ArgumentParser) -> None:
    """Where a shell asks what may come next, says it and ends the program."""
    if _ASKED in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser, always_complete_options=False)
