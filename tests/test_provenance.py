"""What `provenance.json` says of the machine."""

import os
import subprocess
import sys

import torch

from dml.runs.provenance import hardware


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
