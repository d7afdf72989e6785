"""The provenance of figures: command, commit, versions, hardware and day, in `provenance.json` beside them."""

import json
import os
import platform
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dml.files import write_atomically

FILE = "provenance.json"

# Files that measurements write. Changes in them do not make the code dirty.
RESULTS = (":!experiments/*.json", ":!experiments/*.jsonl", ":!experiments/*.png")


def add_start(folder: Path, command: Sequence[str], machine: str, more: Mapping[str, Any] | None = None) -> None:
    """Adds a start to the `provenance.json` of a folder. A run that was resumed has several starts.

    Args:
        folder: an existing folder.
        command: the words of the command.
        machine: see `hardware`.
        more: other facts about this start, by name.
    """
    now = {
        "command": shlex.join(command),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": machine,
        "versions": versions(),
        **(more or {}),
    }
    write_atomically(folder / FILE, json.dumps([*starts(folder), now], indent=1) + "\n")


def versions() -> dict[str, str]:
    """Returns the versions of Python, of dml, and of the packages that take part in the figures of a run."""
    packages = ("torch", "torchvision", "pytorch-lightning", "pytorch-metric-learning", "timm", "numpy")
    found = {"python": platform.python_version(), "dml": _version("dml-research")}
    return found | {name: _version(name) for name in packages}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # imported by way of PYTHONPATH
        return "not installed"


def versions_line(start: Mapping[str, Any]) -> str:
    """Writes the versions of a start in one line; empty if it has none."""
    said = start.get("versions")
    return ", ".join(f"{name} {one}" for name, one in said.items()) if isinstance(said, Mapping) else ""


def numerics(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the trainer's options that change how numbers are rounded."""
    return {name: trainer[name] for name in ("precision", "matmul", "compile", "deterministic")}


def starts(folder: Path) -> list[dict[str, Any]]:
    """Returns all starts of a folder, the oldest first; none if its `provenance.json` is missing or damaged."""
    try:
        found = json.loads((folder / FILE).read_text())
    except (OSError, ValueError, RecursionError):
        return []
    needed = {"command", "commit", "date", "hardware"}
    whole = isinstance(found, list) and all(isinstance(one, dict) and needed <= one.keys() for one in found)
    return found if whole else []


def said_of_starts(folder: Path) -> list[dict[str, Any]]:
    """Returns `starts`, or, if there are none, one start whose facts are all `unknown`."""
    return starts(folder) or [dict.fromkeys(("command", "commit", "date", "hardware"), "unknown")]


def said_together(begun: Sequence[Mapping[str, Any]]) -> tuple[str, str, str, str]:
    """Returns commit, date, hardware and versions of a measurement with these starts.

    A run that was resumed elsewhere has several commits and machines: all are kept. The day is that of the last start.
    """

    def each(values: Iterable[str], between: str) -> str:
        return between.join(dict.fromkeys(value for value in values if value))

    commits, machines = (each((one[name] for one in begun), ", ") for name in ("commit", "hardware"))
    return commits, begun[-1]["date"], machines, each(map(versions_line, begun), "; ")


def commit() -> str:
    """Returns the commit of this code, with `-dirty` if its files were changed or added; `unknown` outside a
    repository."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return "unknown"

    def git(*words: str) -> str:
        said = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
        return said.stdout.strip()

    try:
        found = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--", "dml", "conf", "experiments", *RESULTS)
    except OSError:  # no git
        return "unknown"
    return (found + ("-dirty" if changed else "")) or "unknown"


def hardware(accelerator: str = "auto", devices: int = 1) -> str:
    """Returns the processor, its number of cores and the instructions that torch uses there, or the GPU and how many of
    them are used.

    Other instructions round in another way, so the same run has other figures: many processors hide their model's name.
    """
    import torch

    if accelerator != "cpu" and torch.cuda.is_available():
        return (f"{devices} x " if devices > 1 else "") + torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, {instructions}"
