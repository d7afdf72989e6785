"""The reference of the API: one page for each package, with all its public modules."""

import ast
import textwrap
from pathlib import Path

import yaml

import dml

PACKAGE = Path(dml.__file__).parent

# Lower packages first, as they import each other. Packages that are not here only serve commands.
PACKAGES = (
    "errors",
    "files",
    "distributed",
    "process",
    "configuration",
    "losses",
    "models",
    "data",
    "evaluation",
    "figures",
    "runs",
    "methods",
    "reporting",
    "analysis",
    "training",
    "inference",
    "launch",
    "papers",
)


def pages() -> dict[str, str]:
    """Returns the Markdown of each package: name -> page."""
    return {name: page(name) for name in PACKAGES} | {"dml": _module("dml", "# dml")}


def page(name: str) -> str:
    """Returns the Markdown of one package, or of one module."""
    if not (PACKAGE / name).is_dir():
        return _module(f"dml.{name}", f"# dml.{name}")
    about = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text())) or ""
    parts = [f"# dml.{name}", about]
    for path in sorted((PACKAGE / name).rglob("*.py")):
        if path.name != "__init__.py":
            module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            parts.append(_module(module, f"## {module}"))
    return "\n\n".join(parts)


def _module(name: str, heading: str) -> str:
    options = {"heading_level": heading.index(" ") + 1, "show_root_heading": False, "show_root_toc_entry": False}
    return f"{heading}\n\n::: {name}\n" + textwrap.indent(yaml.safe_dump({"options": options}), "    ")
