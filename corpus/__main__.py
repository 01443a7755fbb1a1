"""``python -m corpus``: runs programs, each in a process with a time limit, and writes the page.

A crash or a hang loses one program: its record says so. ``run`` merges what it finds into ``corpus/results.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from corpus import child
from corpus.page import PAGE, RESULTS, failure, load, page, save
from corpus.registry import Program, programs

ROOT: Final = Path(__file__).parents[1]
LIMIT_S: Final = {"small": 600, "full": 900}


def execute(program: Program, mode: str) -> dict[str, Any]:
    """Returns the record of one program; ``error`` says in one line why it failed."""
    environment = child.small_environment() if mode == "small" else child.full_environment()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        command = [sys.executable, "-m", "corpus", "child", program.name, mode, str(out)]
        try:
            ended = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S[mode]
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done in {LIMIT_S[mode]} s"}
        if out.exists():
            return dict(json.loads(out.read_text()))
    said = ended.stderr.strip().splitlines()[-1:]
    return {"error": f"the process ended with code {ended.returncode}: {' '.join(said)[:300]}"}


def run(only: list[str], mode: str, missing: bool) -> int:
    """Runs programs, writes results and page, and returns the number of failures."""
    every, failed = {p.name: p for p in programs()}, 0
    if unknown := set(only) - set(every):
        raise SystemExit(f"no such program: {', '.join(sorted(unknown))}")
    for name in only or every:
        if missing and mode in load().get(name, {}):
            continue
        record = execute(every[name], mode)
        error = failure(record)
        failed += error is not None
        print(f"{name}: {error or 'done'}", flush=True)
        records = load()  # another process may have written meanwhile
        records.setdefault(name, {})[mode] = record
        save({name: records[name] for name in records if name in every})
    PAGE.write_text(page())
    return failed


def _child(name: str, mode: str, out: Path) -> None:
    program = next(p for p in programs() if p.name == name)
    try:
        record = (child.run_small if mode == "small" else child.run_full)(program)
    except Exception as error:
        if "-v" in sys.argv:
            raise
        first = (str(error).strip().splitlines() or [""])[0]
        record = {"error": f"{type(error).__name__}: {first}"[:400]}
    out.write_text(json.dumps(record))


def tutorial() -> int:
    """Runs the code of the PyTorch tutorial and of the PyTorch recipe, each in a process with eight host devices."""
    docs, fence = ROOT / "docs", re.compile(r"```python\n(.*?)```", re.DOTALL)
    recipes = {
        part.split("\n", 1)[0]: part for part in re.split(r"^## ", (docs / "recipes.md").read_text(), flags=re.M)
    }
    start = next(iter(recipes.values()))
    codes = (docs / "tutorials" / "pytorch.md").read_text(), start + recipes["PyTorch"]
    begin = "from corpus.torch_names import import_torchax\nimport_torchax()\n"
    for code in codes:
        source = begin + "\n".join(fence.findall(code))
        ended = subprocess.run([sys.executable, "-c", source], cwd=ROOT, env=child.small_environment())
        if ended.returncode:
            return ended.returncode
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m corpus", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run programs, write results and page")
    running.add_argument("--only", nargs="*", default=[], metavar="NAME")
    running.add_argument("--full", action="store_true", help="full sizes, compiled for v5e:4x4; needs libtpu")
    running.add_argument("--missing", action="store_true", help="only programs without a result")
    commands.add_parser("page", help=f"write {PAGE.name} from {RESULTS.name}")
    commands.add_parser("list", help="print the programs")
    commands.add_parser("tutorial", help="run the code of the PyTorch tutorial and recipe")
    one = commands.add_parser("child", help="one program in this process")
    one.add_argument("name")
    one.add_argument("mode", choices=["small", "full"])
    one.add_argument("out", type=Path)
    one.add_argument("-v", action="store_true", help="show the traceback of a failure")
    asked = parser.parse_args()
    if asked.command == "run":
        return 1 if run(asked.only, "full" if asked.full else "small", asked.missing) else 0
    if asked.command == "child":
        _child(asked.name, asked.mode, asked.out)
    elif asked.command == "tutorial":
        return tutorial()
    elif asked.command == "page":
        PAGE.write_text(page())
    else:
        for p in programs():
            print(f"{p.name:32} {p.package:16} {p.kind:6} {p.split:5} {p.what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
