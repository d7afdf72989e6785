"""What a process does with memory that it frees, how it ends among others, and which cores it has."""

import os
import platform
import signal
import subprocess
import sys

import pytest

from dml import process
from dml.process import OF_MALLOC, cores_each

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


@pytest.mark.slow
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


FAREWELL = """
import atexit, sys, types
from dml.process import without_farewell

of_several = {"is_available": True, "is_initialized": True, "get_world_size": 2, "get_backend": sys.argv[1]}
sys.modules["torch.distributed"] = types.SimpleNamespace(**{k: lambda v=v: v for k, v in of_several.items()})
atexit.register(print, "farewell")

@without_farewell()
def main():
    print("begun")
    raise eval(sys.argv[2])

main()
"""


@pytest.mark.parametrize(
    ("backend", "end", "code", "farewell"),
    [
        ("nccl", "SystemExit(2)", 2, False),
        ("cpu:gloo,cuda:nccl", "ValueError('of a rank')", 1, False),
        ("nccl", "SystemExit(0)", 0, True),
        ("gloo", "SystemExit(2)", 2, True),
        ("gloo", "ValueError('of a rank')", 1, True),
    ],
)
def test_a_rank_that_fails_does_not_wait_for_nccl(backend: str, end: str, code: int, farewell: bool) -> None:
    """Lightning's farewell to the other ranks is registered as this one is."""
    done = subprocess.run(
        [sys.executable, "-c", FAREWELL, backend, end], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == code
    assert done.stdout.split() == ["begun", *(["farewell"] if farewell else [])]
    assert done.stderr.count("ValueError: of a rank") == end.startswith("ValueError")


WAITS = """
import sys
from dml import process

process.PATIENCE = float(sys.argv[1])
process.stop_when_told()
print("waiting", flush=True)
print(process.unknown_to_the_first_rank())
"""


@pytest.mark.parametrize(("rank", "unknown"), [("0", "False"), ("1", "True"), ("first", "False")])
def test_another_rank_tells_what_the_first_does_not_know(rank: str, unknown: str) -> None:
    env = os.environ | {"RANK": rank}
    done = subprocess.run([sys.executable, "-c", WAITS, "0.1"], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["waiting", unknown]


@pytest.mark.parametrize("certain", [True, False])
def test_how_long_ranks_wait_for_the_first(monkeypatch: pytest.MonkeyPatch, certain: bool) -> None:
    """Without a limit if it is known to end: its loggers may need minutes, and it is killed when another rank ends."""
    parents = [7] * 9
    monkeypatch.setattr(process, "PATIENCE", 0)
    monkeypatch.setattr(os, "getppid", lambda: parents.pop() if parents else 1)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv(process.PARENT, "7")
    monkeypatch.setenv("LOCAL_RANK", "1")
    process.wait_for_the_first_rank(certain)
    assert bool(parents) == (not certain)  # until the parent is another one, or not


def test_a_mistake_of_all_ranks_is_told_once() -> None:
    """torchrun ends the others when the first has failed."""
    command = [sys.executable, "-c", WAITS, "60"]
    with subprocess.Popen(command, env=os.environ | {"RANK": "1"}, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "waiting\n"
        while signal.SIGTERM not in _defaults(rank.pid):
            assert rank.poll() is None
        rank.terminate()
        assert rank.wait(30) == -signal.SIGTERM
        assert rank.stdout.read() == ""


def _defaults(process: int) -> set[int]:
    """Signals that end a process, which neither catches nor ignores them."""
    with open(f"/proc/{process}/status") as status:
        masks = dict(line.split(":\t", 1) for line in status if line.startswith("Sig"))
    other = int(masks["SigCgt"], 16) | int(masks["SigIgn"], 16)
    return {number for number in (signal.SIGTERM, signal.SIGUSR1) if not other >> (number - 1) & 1}


def test_srun_may_have_divided_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dml.process.cores", lambda: 8)
    for name in ("SLURM_NTASKS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    assert (cores_each(1), cores_each(4)) == (8, 2)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    assert cores_each(4) == 2  # one task, whose ranks Lightning starts
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert cores_each(4) == 8
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "16")
    assert cores_each(4) == 8
