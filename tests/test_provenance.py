"""What `provenance.json` says of the machine and of the packages, and what records take over from it."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from dml.runs.provenance import add_start, hardware, said_of_starts, said_together, starts, versions, versions_line


@pytest.mark.slow
def test_the_instructions_that_torch_uses_are_named() -> None:
    """Not those that the processor has: torch can be told to use others, and then rounds in another way."""
    name, cores, instructions = hardware("cpu").rsplit(", ", 2)
    assert name
    assert cores == f"{os.cpu_count()} cores"
    assert instructions == torch.backends.cpu.get_cpu_capability()
    told = subprocess.run(
        [sys.executable, "-c", "from dml.runs.provenance import hardware; print(hardware('cpu'))"],
        env=os.environ | {"ATEN_CPU_CAPABILITY": "default"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip().rsplit(", ", 1)[1] == "DEFAULT"


def test_the_versions_are_those_that_are_installed() -> None:
    found = versions()
    assert found["dml"] == version("dml-research")  # the distribution has another name than the package
    assert found["torch"] == version("torch")
    assert "not installed" not in found.values()
    assert versions_line({"versions": {"python": "3.11.7", "torch": "2.8"}}) == "python 3.11.7, torch 2.8"
    assert versions_line({}) == ""


def test_of_several_starts_each_fact_is_told_once(tmp_path: Path) -> None:
    for machine in ("a Zen 4", "a Zen 5", "a Zen 4"):
        add_start(tmp_path, ["python"], machine)
    _, date, machines, packages = said_together([*starts(tmp_path), *said_of_starts(tmp_path / "another")])
    assert machines == "a Zen 4, a Zen 5, unknown"
    assert packages == versions_line({"versions": versions()})
    assert date == "unknown"
