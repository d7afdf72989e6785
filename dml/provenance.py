"""Where figures come from: command, commit, versions, hardware and day, kept beside them in `provenance.json`."""

import json
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dml.files import replace_file

FILE = "provenance.json"


def add_start(folder: Path, command: Sequence[str]) -> None:
    """Notes one more start of what is made in a folder: a run that was resumed has several."""
    begun = starts(folder)
    packages = ("dml", "torch", "torchvision", "pytorch-lightning")
    now = {
        "command": shlex.join(command),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
    }
    replace_file(folder / FILE, json.dumps([*begun, now], indent=1) + "\n")


def starts(folder: Path) -> list[dict[str, Any]]:
    """All starts, the first first; none where nothing readable says."""
    try:
        found = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


def commit() -> str:
    """Of this code, `-dirty` where files differ from it; `unknown` where it lies in no repository of its own."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return "unknown"
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        said = subprocess.run(git, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return "unknown"
    return said.stdout.strip() or "unknown"


def hardware() -> str:
    """The processor or GPU, and how many cores."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"
