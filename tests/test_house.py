"""What keeps the house easy to walk through: one direction of imports, and nothing too large."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "dml"
MODULES = sorted(HERE.rglob("*.py"))
LINES, METHODS = 350, 15


def classes(path: Path) -> Iterator[ast.ClassDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            yield node


def test_imports_go_one_way() -> None:
    """Each package knows only those before it, and no import leads in a circle: pyproject.toml says the order.

    In a process of its own: import-linter turns the loggers of its process off.
    """
    script = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", script], cwd=HERE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(HERE)))
def test_a_module_is_read_at_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LINES
    for node in classes(path):
        public = [n.name for n in node.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
        assert len(set(public)) <= METHODS, f"{node.name}: {', '.join(public)}"


def test_each_package_says_what_lives_there() -> None:
    for folder in {path.parent for path in MODULES}:
        doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert doc, f"{folder} has no line that says what it is for"
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no line that says what it is for"
