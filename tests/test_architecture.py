"""The folder is the architecture: imports go one way, and one module alone touches JAX's internals."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import shardwise

ROOT = Path(shardwise.__file__).parent

#: A folder may import from folders on its left. The zoo is a set of example programs: it stands aside.
ORDER = (
    "errors files interruption units ir rules capture dims hardware lowering spmd cost evaluator search tactics transforms"
    " plans partitioner planner verification tuning calibration report cli"
).split()


#: What prints or applies itself asks the folder that can do it, when asked.
DISPLAY = {
    ("dims/analysis.py", "report"),
    ("plans/plan.py", "report"),
    ("plans/plan.py", "planner"),
    ("plans/plan.py", "partitioner"),
    ("plans/together.py", "report"),
    ("plans/execution.py", "planner"),
    ("plans/execution.py", "report"),
    ("plans/execution.py", "verification"),
    ("planner/planning.py", "report"),
    ("planner/what_if.py", "report"),
    ("verification/verify.py", "report"),
}


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports, at its top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def test_imports_go_one_way() -> None:
    wrong = []
    for path in sources():
        folder = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if folder in ("__init__", "__main__", "zoo"):
            continue
        for module in imports(path):
            parts = module.split(".")
            if parts[0] != "shardwise" or len(parts) < 2 or parts[1] not in ORDER:
                continue
            name = str(path.relative_to(ROOT))
            if ORDER.index(parts[1]) > ORDER.index(folder) and (name, parts[1]) not in DISPLAY:
                wrong.append(f"{name} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_every_folder_has_its_place() -> None:
    folders = {p.name for p in ROOT.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert folders <= {*ORDER, "zoo"}


def test_one_module_touches_jax_internals() -> None:
    touching = {
        str(path.relative_to(ROOT))
        for path in sources()
        for module in imports(path)
        if module.startswith(("jax._src", "jax.extend", "jaxlib"))
    }
    assert touching == {"capture/jax_internals.py"}


def test_after_capture_nothing_knows_jax() -> None:
    knowing = {
        path.relative_to(ROOT).parts[0]
        for path in sources()
        for module in imports(path)
        if module.split(".")[0] in ("jax", "flax", "optax")
    }
    assert knowing <= {
        "capture",
        "spmd",
        "zoo",
        "plans",
        "planner",
        "transforms",
        "partitioner",
        "verification",
        "tuning",
        "calibration",
    }


def test_decisions_never_look_at_names() -> None:
    """No analysis code may mention a parameter or model name."""
    forbidden = ("kernel", "bias", "embed", "attention", "mlp", "gemma", "llama", "query")
    for path in sorted((ROOT / "dims").glob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                assert not any(word in node.value.lower() for word in forbidden), (path.name, node.value)
