"""Checks trainings of several processes: they take the steps of one, and more ranks than GPUs are refused."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from dml.bench.methods import tiny_options
from dml.bench.results import FAILED, LEFT_OUT, Figure, Goal, Record, Remark
from dml.bench.running import Task
from dml.bench.sizes import Sizes
from dml.configuration.composition import composed
from dml.errors import MISTAKE
from dml.runs.log import read_metrics

STEPS = 5
APART = 1e-4  # the largest difference of losses allowed, in double precision


def of_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, folder: Path, backend: str = "gloo"
) -> list[Any]:
    """Calls a function in several real processes that form a process group. Returns its results in rank order.

    Args:
        function: of the top level of a module; what it returns must be a tensor or plain values.
        arguments: for the function.
        folder: an empty folder, or one that does not exist yet.
        backend: with `nccl` each process gets a GPU of its own; with `gloo` they share the devices.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(exist_ok=True)
    mp.spawn(_rank, (world_size, port, backend, function, folder, arguments), nprocs=world_size)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world_size)]


def _rank(
    rank: int,
    world_size: int,
    port: int,
    backend: str,
    function: Callable[..., Any],
    folder: Path,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    torch.save(function(*arguments), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def as_torchrun(one_machine: bool) -> None:
    """Sets the environment variables that torchrun would set for this rank.

    Args:
        one_machine: whether all ranks are on one machine, each with its own device. Otherwise each rank counts as a
            machine of its own, and all take the first device.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    local, group = ((rank, world), (0, 1)) if one_machine else ((0, 1), (rank, world))
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local[0], "LOCAL_WORLD_SIZE": local[1]}
    numbers |= {"GROUP_RANK": group[0], "GROUP_WORLD_SIZE": group[1]}
    os.environ |= {name: str(number) for name, number in numbers.items()} | {"TORCHELASTIC_RUN_ID": "dml"}


def measure(task: Task) -> Iterator[Record]:
    gpus = torch.cuda.device_count() if task.sizes.device == "cuda" else 0
    jobs: dict[str, Callable[[], Iterator[Record]]] = {"two ranks by gloo": partial(_two, task, "gloo")}
    if gpus > 1:
        jobs["two ranks by NCCL"] = partial(_two, task, "nccl")
    else:
        yield Remark(LEFT_OUT, f"two ranks by NCCL: that needs two GPUs, and there {'is one' if gpus else 'is none'}.")
    jobs["more ranks than GPUs"] = partial(_too_many, task, max(2, gpus + 1))
    yield from task.pieces(jobs, 5)


def _train(sizes: Sizes, folder: Path, one_machine: bool = False) -> list[float]:
    """Trains ABE in double precision, alone or as a rank of the group. Returns the loss of every step."""
    if torch.distributed.is_initialized():
        as_torchrun(one_machine)
    from dml.training.run import run

    steps = [f"trainer.max_steps={STEPS}", f"protocol.every={STEPS}", f"trainer.checkpoint_every={STEPS}"]
    exact = ["trainer.precision=64-true", "backbone.batch_norm=running"]
    options = [*tiny_options(sizes, folder), "method=abe", *steps, *exact]
    run(composed(*options), options)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    records = read_metrics(folder / "run" / "metrics.jsonl")
    return [record["train/loss"] for record in records if "train/loss" in record]


def _two(task: Task, backend: str) -> Iterator[Record]:
    own = task.folder / backend
    own.mkdir()
    alone = _train(task.sizes, own / "alone")
    of_each = of_ranks(2, _train, task.sizes, own / "two", backend == "nccl", folder=own / "ranks", backend=backend)
    assert len(alone) == len(of_each[0]) == STEPS, f"{len(alone)} and {len(of_each[0])} losses of {STEPS} steps"
    apart = float(np.abs(np.subtract(alone, of_each[0])).max())  # NaN if a loss is
    name = f"two ranks by {'NCCL' if backend == 'nccl' else backend}"
    yield Figure(f"{name}, largest difference of the loss from one process", apart, "", Goal(APART, at_most=True))
    if not apart <= APART:
        yield Remark(FAILED, f"{name} do not take the steps of one process: their losses differ by {apart:.2g}.")


def _too_many(task: Task, devices: int) -> Iterator[Record]:
    """Checks that a run with too many devices is refused in one sentence, before anything is trained."""
    options = [*tiny_options(task.sizes, task.folder / "many"), "trainer=ddp", "trainer.accelerator=gpu"]
    command = [sys.executable, "-m", "dml.run", *options, f"trainer.devices={devices}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stderr.strip().splitlines()
    told = [line for line in lines if line.startswith("dml:")]  # packages may warn of what they miss
    if done.returncode == MISTAKE and len(told) == 1 and "Traceback" not in done.stderr:
        yield Figure(f"trainer.devices={devices} is refused in one sentence, with exit code", done.returncode)
    else:
        print(done.stderr)
        yield Remark(
            FAILED,
            f"trainer.devices={devices} ended with exit code {done.returncode} and {len(lines)} lines, the last "
            f"of them: {(lines or [''])[-1][:200]}",
        )
