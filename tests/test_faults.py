"""What goes wrong on the machines where trainings run: each run ends clearly, and goes on to the same figures."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dml.errors import INTERRUPTED, MISTAKE
from dml.files import sound
from dml.runs.log import read_metrics
from tests.components import components
from tests.conftest import TINY
from tests.test_resume import LONGER, kill_after_step, outcome, start

METHODS = components("method")
TWO = ["trainer=ddp", "trainer.devices=2", "backbone.batch_norm=running", "trainer.num_workers=0"]


def children(pid: int) -> list[int]:
    """Processes that a process started, and theirs."""
    own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return own + [one for child in own for one in children(child)]


def eventually(condition: Callable[[], object], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


def after_step(folder: Path, step: int) -> Callable[[], bool]:
    log = folder / "metrics.jsonl"
    return lambda: log.exists() and any(record["step"] >= step for record in read_metrics(log))


@pytest.mark.slow
def test_a_full_disk_is_told_and_leaves_no_torn_file(tmp_path: Path) -> None:
    """The limit on the size of a file stands in for the disk: the system's error has the same way through torch."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "dml.run", *TINY, f"paths.output_dir={folder}"]

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))  # more than a log, less than a checkpoint

    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    assert done.returncode == MISTAKE
    assert f"There is no room left in {folder}: free some, then continue with the same options" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((folder / "checkpoints").iterdir()) == []


@pytest.mark.exhaustive
def test_a_worker_that_dies_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "dml.run", *LONGER, "trainer.max_steps=5000", f"paths.output_dir={folder}"]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert eventually(after_step(folder, 5))
    os.kill(random.choice(children(run.pid)), signal.SIGKILL)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "is killed by signal" in said
    assert f"continue with the same options and paths.output_dir={folder}" in said
    assert sound(folder / "checkpoints" / "last.ckpt")


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", ["first", "second"])
def test_a_rank_that_dies_ends_the_others(tmp_path: Path, which: str) -> None:
    folder = tmp_path / "run"
    run = start(folder, *TWO, "trainer.max_steps=5000")
    assert eventually(after_step(folder, 5))
    (second,) = (child for child in children(run.pid) if b"dml.run" in Path(f"/proc/{child}/cmdline").read_bytes())
    os.kill(run.pid if which == "first" else second, signal.SIGKILL)
    assert run.wait(60) != 0
    assert eventually(lambda: not Path(f"/proc/{second}").exists())
    assert sound(folder / "checkpoints" / "last.ckpt")


@pytest.mark.exhaustive
def test_a_signal_to_the_first_of_two_ranks_stops_both_at_one_step(tmp_path: Path) -> None:
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    assert kill_after_step(start(disturbed, *TWO), disturbed, 9, signal.SIGTERM) == INTERRUPTED
    assert sound(disturbed / "checkpoints" / "last.ckpt")
    assert start(disturbed, *TWO).wait() == 0
    assert start(undisturbed, *TWO).wait() == 0
    assert outcome(disturbed)[0] == outcome(undisturbed)[0]


def disturb(method: str, folder: Path, kills: int, rng: random.Random) -> int:
    """Starts a run until it ends, killed at random points up to `kills` times; how often it was killed."""
    killed, seconds = 0, 20.0
    options = [f"method={method}", "loss=xbm", "loss.loss.memory_size=64", "head.dim=24"]
    while True:
        began = time.monotonic()
        run = start(folder, *options)
        if killed == kills:
            assert run.wait() == 0
            return killed
        if rng.random() < 0.7:  # at a random step, or what follows it
            steps = (
                [record["step"] for record in read_metrics(log)] if (log := folder / "metrics.jsonl").exists() else []
            )
            wanted = rng.randint(0, 24) if not steps else min(24, max(steps) - 3 + rng.randint(0, 6))
            reached = after_step(folder, wanted)
            while run.poll() is None and not reached():
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.5))
        else:  # at any moment
            time.sleep(rng.uniform(0, seconds))
        number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
        if run.poll() is None:
            os.killpg(run.pid, number) if number == signal.SIGKILL else run.send_signal(number)
            run.wait()
            killed += 1
        seconds = max(10.0, time.monotonic() - began)
        if run.returncode == 0:
            return killed
        assert run.returncode in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGUSR1, INTERRUPTED)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", METHODS)
def test_a_run_killed_at_random_points_loses_nothing(tmp_path: Path, method: str) -> None:
    """A hundred and more kills over all methods."""
    undisturbed = tmp_path / "undisturbed"
    options = [f"method={method}", "loss=xbm", "loss.loss.memory_size=64", "head.dim=24"]
    assert start(undisturbed, *options).wait() == 0
    expected, killed, rng = outcome(undisturbed), 0, random.Random(METHODS.index(method))
    while killed < 100 / len(METHODS):
        folder = tmp_path / f"disturbed_{killed}"
        killed += disturb(method, folder, 6, rng)
        metrics, records, tensors = outcome(folder)
        assert metrics == expected[0]
        assert records == expected[1]
        assert all((tensors[name] == value).all() for name, value in expected[2].items())
    with Path(os.environ.get("DML_KILLS", os.devnull)).open("a") as file:
        file.write(f"{method}: {killed} kills, 0 runs lost, 0 figures differ\n")
