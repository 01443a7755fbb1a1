"""Commands about this machine: ``doctor``, and ``completion``, whose script is Argcomplete's."""

from __future__ import annotations

import argparse

from shardwise.cli import options
from shardwise.cli.options import Result


@options.command("doctor", options.JSON, accelerators=True)
def _doctor(arguments: argparse.Namespace) -> Result:
    """Check this installation.

    Makes, compiles and runs a tiny plan. The exit code is 1 if something is missing or does not work.

      shardwise doctor --json
    """
    from shardwise.report.installation import doctor_text, examine

    data = examine()
    return data if arguments.json else doctor_text(data), int(bool(data["problems"]))


@options.command(
    "completion", options.argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="the shell")
)
def _completion(arguments: argparse.Namespace) -> Result:
    """Print a script for completion in a shell.

    Put the line of your shell into ~/.bashrc, ~/.zshrc (after compinit) or ~/.config/fish/config.fish.

      eval "$(shardwise completion bash)"
      eval "$(shardwise completion zsh)"
      shardwise completion fish | source
    """
    from argcomplete.shell_integration import shellcode

    return shellcode(["shardwise"], shell=arguments.shell).strip() + "\n"
