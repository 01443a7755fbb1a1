"""The list of programs, and ``docs/programs.md`` from it. Regenerate: ``python -m tests.programs.table``."""

from __future__ import annotations

from pathlib import Path

from . import equinox_programs, flax_programs, haiku_programs, optax_programs, science_programs
from .program import Program

PROGRAMS: tuple[Program, ...] = (
    *flax_programs.PROGRAMS,
    *equinox_programs.PROGRAMS,
    *haiku_programs.PROGRAMS,
    *optax_programs.PROGRAMS,
    *science_programs.PROGRAMS,
)

PAGE = Path(__file__).parents[2] / "docs" / "programs.md"

_HEAD = """\
# Programs nobody here wrote

Models, losses and solvers of packages on PyPI, captured and analysed from shapes by `make test-programs`
(`tests/programs`). Each must be captured without an error and without an unexpected opaque op, its program must pass
the verifier, and the facts below must hold. This page is written by `python -m tests.programs.table`.
"""


def page() -> str:
    lines = [_HEAD, "| program | package | what |", "|---|---|---|"]
    lines += [f"| [{p.name}](#{p.name}) | {p.package} | {p.what} |" for p in PROGRAMS]
    for p in PROGRAMS:
        lines += ["", f"## {p.name}", ""]
        lines += [f"- {fact.text}".replace("*", r"\*").replace("~", r"\~") for fact in p.facts]
        lines += [f"- may be opaque: `{kind}`, {reason}" for kind, reason in sorted(p.opaque.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
