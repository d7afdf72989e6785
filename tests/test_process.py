"""What a process does with memory that it frees."""

import os
import platform
import subprocess
import sys

import pytest

from dml.process import OF_MALLOC

# Prints how many MiB of a freed tensor of 256 MiB the process still holds.
FREES = """
import sys, torch
from pathlib import Path
from dml.process import keep_freed_memory

def held():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024

if sys.argv[1] == "kept":
    keep_freed_memory()
torch.ones(1)
before = held()
tensor = torch.ones(2**26)
assert held() - before > 250
del tensor
print(held() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
@pytest.mark.parametrize(
    ("how", "settings", "kept"),
    [
        ("as it comes", {}, False),
        ("kept", {}, True),
        ("kept", {"MALLOC_MMAP_THRESHOLD_": "131072"}, False),
        ("kept", {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, False),
    ],
)
def test_freed_memory_is_kept_unless_the_environment_says_how(how: str, settings: dict[str, str], kept: bool) -> None:
    env = {name: value for name, value in os.environ.items() if name not in (*OF_MALLOC, "GLIBC_TUNABLES")}
    done = subprocess.run(
        [sys.executable, "-c", FREES, how], check=True, capture_output=True, text=True, env=env | settings
    )
    assert (float(done.stdout) > 250) == kept
    assert float(done.stdout) < 270
