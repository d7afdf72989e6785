"""The reference of the commands, from what each prints with `--help`."""

import contextlib
import importlib
import io
import sys
from unittest.mock import patch

from dml.__main__ import commands

OF_HYDRA = ("dml.run", "dml.describe")  # they take the options of conf/, which have pages of their own


def page() -> str:
    """Returns the Markdown of all commands."""
    lines = ["# Commands", "", "`python -m dml` lists them.", ""]
    for name, about in commands().items():
        lines += [f"## {name} {{ #{name.replace('.', '-')} }}", "", f"{about[:1].upper()}{about[1:]}", ""]
        if name in OF_HYDRA:
            module = importlib.import_module(name)
            more = (module.__doc__ or "").partition("\n")[2].strip()
            lines += [more, "", "It takes the options of [all groups](options/config.md).", ""]
        else:
            lines += ["```text", helped(name), "```", ""]
    return "\n".join(lines)


def helped(name: str) -> str:
    """Returns what a command prints with `--help`."""
    said = io.StringIO()
    with patch.object(sys, "argv", [name, "--help"]), contextlib.redirect_stdout(said):
        try:
            importlib.import_module(name).main()
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(f"{name} --help ended with exit code {ended.code}") from ended
    return said.getvalue().strip()
