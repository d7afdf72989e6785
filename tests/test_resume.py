"""A run killed anywhere and started again ends as if nothing had happened, to the last bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dml.errors import INTERRUPTED
from dml.files import load_checkpoint
from dml.runs.log import read_metrics
from tests.conftest import TINY

LONGER = [*TINY, "trainer.max_steps=24", "trainer.checkpoint_every=4", "protocol.every=8", "trainer.num_workers=2"]
CLOCK = ("run/seconds", "run/seconds_between_steps", "run/images_per_second")


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "dml.run", *LONGER, *options, f"paths.output_dir={folder}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def kill_after_step(
    process: subprocess.Popen[bytes], folder: Path, step: int, number: signal.Signals = signal.SIGKILL
) -> int:
    """SIGKILL to the process and its workers, or another signal to it, once the log shows `step`: its exit code."""
    log = folder / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and any(record["step"] >= step for record in read_metrics(log))):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    if number == signal.SIGKILL:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    return process.wait()


def outcome(folder: Path) -> tuple[dict[str, float], list[dict[str, float]], dict[str, torch.Tensor]]:
    metrics = json.loads((folder / "metrics.json").read_text())
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {k: v for k, v in metrics.items() if k not in CLOCK}, read_metrics(folder / "metrics.jsonl"), tensors


@pytest.mark.exhaustive
def test_killed_and_resumed_equals_undisturbed(tmp_path: Path) -> None:
    """Several learners, a memory in the loss, and a checkpoint chosen on validation classes."""
    options = ["method=abe", "loss=xbm", "loss.loss.memory_size=64"]
    options += ["protocol=random_class_split", "protocol.split=1", "lr=0.02"]
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    assert start(undisturbed, *options).wait() == 0
    kill_after_step(start(disturbed, *options), disturbed, 1)  # before the first checkpoint
    (disturbed / "checkpoints" / ".last.ckpt.1").write_bytes(b"torn")
    kill_after_step(start(disturbed, *options), disturbed, 6)  # two steps past a checkpoint
    told = start(disturbed, *options)
    assert kill_after_step(told, disturbed, 11, signal.SIGUSR1) == INTERRUPTED
    saved = load_checkpoint(disturbed / "checkpoints" / "last.ckpt")["global_step"]
    assert saved >= 11  # at the step in which the signal came
    kill_after_step(start(disturbed, *options), disturbed, max(17, saved + 2))
    last = disturbed / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-1000])  # cut short: the one before is taken
    assert start(disturbed, *options).wait() == 0

    metrics, records, tensors = outcome(undisturbed)
    assert metrics["best_on_validation/step"] < 24  # so that another checkpoint than the last one is tested
    again = outcome(disturbed)
    assert again[0] == metrics
    assert again[1] == records
    assert all(torch.equal(again[2][name], value) for name, value in tensors.items())
    assert not (disturbed / "checkpoints" / ".last.ckpt.1").exists()
    log = (disturbed / "run.log").read_text()
    assert "resumed at step" in log
    assert "SIGUSR1" in log
    assert "is damaged (now damaged.ckpt): the run continues from the one before it" in log
