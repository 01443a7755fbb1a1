"""What a command hands back: text to print, and how it went where that is more than done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """Output and exit code. A command that has nothing to say with its exit code returns the text alone."""

    text: str
    code: int
