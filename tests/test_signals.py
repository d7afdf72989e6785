"""A signal to all processes of a run at once, as schedulers send it, and Ctrl-C at any moment."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from dml.data.loading import Loader
from dml.errors import CTRL_C, INTERRUPTED
from dml.files import sound
from dml.process import STOPPING, held, leave_to_the_parent
from tests.test_faults import after_step, eventually
from tests.test_resume import LONGER, start

ENDLESS = "trainer.max_steps=50000"


def children(pid: int) -> list[int]:
    """The processes that a process started, where the system tells."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in task.read_text().split()]
    return found


def workers(loader: Any) -> list[Any]:
    return list(loader._iterator._workers)


def test_loader_workers_leave_signals_to_the_parent_and_obey_it() -> None:
    data: Any = TensorDataset(torch.arange(40))
    data.finish = lambda batch: batch
    loader = Loader(data, num_workers=1, worker_init_fn=leave_to_the_parent, persistent_workers=True)
    batches = iter(loader)
    assert next(batches)[0] == 0
    (worker,) = (one.pid for one in workers(loader))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        subprocess.run(["kill", f"-{int(number)}", str(worker)], check=True)  # of another process than its parent
    assert sum(int(batch[0]) for batch in batches) == sum(range(1, 40))
    os.kill(worker, signal.SIGTERM)
    (process,) = workers(loader)
    assert eventually(lambda: not process.is_alive(), 10)
    assert process.exitcode == 0


def test_signals_wait_while_they_are_held() -> None:
    """By this thread, and by the processes that it starts meanwhile; another thread may still take them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with held():
        started = subprocess.run(
            [sys.executable, "-c", "import signal; print(*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))"],
            capture_output=True,
            text=True,
            check=True,
        )
    assert {*map(int, started.stdout.split())} >= {*STOPPING, signal.SIGINT}
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def told(process: subprocess.Popen[bytes], ready: Callable[[], bool], number: signal.Signals) -> int:
    """The exit code after a signal to the whole group of a process."""
    assert eventually(lambda: ready() or process.poll() is not None, 150)
    assert process.poll() is None
    os.killpg(process.pid, number)
    return process.wait(120)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_the_whole_group(tmp_path: Path, number: signal.Signals) -> None:
    run = start(tmp_path / "run", ENDLESS, "trainer.checkpoint_every=50000", "protocol.every=50000")
    assert told(run, after_step(tmp_path / "run", 5), number) == INTERRUPTED
    assert sound(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert number.name in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local"])
def test_a_signal_to_the_whole_group_of_a_sweep(tmp_path: Path, launcher: str) -> None:
    at_once = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    options = [*LONGER, ENDLESS, "trainer.checkpoint_every=50000", "protocol.every=50000", "seed=1,2", *at_once]
    command = [sys.executable, "-m", "dml.run", "-m", *options, f"hydra/launcher={launcher}"]
    with (tmp_path / "out").open("w") as out:
        sweep = subprocess.Popen(
            [*command, f"paths.sweep_dir={tmp_path}"], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    runs = [tmp_path / "seed=1"] if launcher == "basic" else [tmp_path / "seed=1", tmp_path / "seed=2"]
    assert told(sweep, lambda: all(after_step(run, 5)() for run in runs), signal.SIGTERM) == INTERRUPTED
    assert "Traceback" not in (tmp_path / "out").read_text()
    assert all(eventually(lambda run=run: sound(run / "checkpoints" / "last.ckpt")) for run in runs)
    assert not list(tmp_path.glob("*.failed"))


@pytest.mark.exhaustive
def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    run = start(tmp_path / "run", ENDLESS)
    assert eventually(after_step(tmp_path / "run", 2), 150)
    workers = children(run.pid)
    assert len(workers) >= 2
    run.kill()
    run.wait()
    assert eventually(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), 30)


@pytest.mark.exhaustive
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("run", LONGER),
        ("describe", LONGER),
        ("embed", ["nowhere", "one.png", "-o", "vectors.npz"]),
        ("report", ["nowhere"]),
    ],
)
def test_ctrl_c_while_a_command_starts(tmp_path: Path, module: str, words: Sequence[str], early: bool) -> None:
    """As early as Python may handle it, and while the packages are imported that the command needs."""
    command = [sys.executable, "-m", f"dml.{module}", *words]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=tmp_path, text=True
    ) as process:
        if early:
            time.sleep(0.3)
        else:
            assert eventually(lambda: "numpy" in Path(f"/proc/{process.pid}/maps").read_text())
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    # On a slow machine the signal comes before Python handles any. For a shell it is the same code.
    assert process.returncode in (CTRL_C, -signal.SIGINT)
    assert "Traceback" not in said
