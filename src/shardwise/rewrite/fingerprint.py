"""What tells one version of a program from another."""

from __future__ import annotations

import hashlib

from shardwise.ir.program import Program
from shardwise.ir.text import format_program


def fingerprint(program: Program) -> str:
    """A digest of the program's text: ops, shapes, rules and structure, not source lines."""
    return hashlib.sha256(format_program(program).encode()).hexdigest()[:16]
