"""Images per second that the loader gives for each value of `dataset.cache`, beside those that a training step takes.

If a step takes images faster than the loader gives them, the GPU waits. It is busy for the ratio of the two.
"""

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from dml.bench.bare import NETWORKS, Bare
from dml.bench.images import drawn
from dml.bench.results import Figure, Goal, Record
from dml.bench.running import Task
from dml.bench.throughput import PLAIN, run_options
from dml.bench.timing import now, seconds
from dml.configuration.composition import composed
from dml.training.build import Parts, build

WORDS = ("none", "disk", "memory", "device")
BUSY = Goal(95)  # %


def parts_of(options: Sequence[str], device: torch.device) -> Parts:
    """Builds the parts of a run of one process on a device, with a stand-in for its trainer."""
    parts = build(composed(*options))
    ranks = {"global_rank": 0, "world_size": 1, "num_devices": 1}
    trainer: Any = SimpleNamespace(
        **ranks, strategy=SimpleNamespace(root_device=device), global_step=0, max_steps=10**6
    )
    parts.data.trainer = trainer
    return parts


class Loading:
    """Times the training loader alone, without a model.

    Args:
        settle: batches that are taken before any is timed: the loader may have these ready.
    """

    def __init__(self, parts: Parts, device: torch.device, settle: int = 1) -> None:
        self.batches, self.device = iter(parts.data.train_dataloader()), device
        for _ in range(settle):
            next(self.batches)

    def __call__(self, batches: int) -> float:
        """Takes so many batches. Returns images per second."""
        started = now(self.device)
        images = sum(len(next(self.batches)["image"]) for _ in range(batches))
        return images / (now(self.device) - started)


def measure(task: Task) -> Iterator[Record]:
    sizes, device, network = task.sizes, task.sizes.where(), task.sizes.networks[0]
    drawn(task.folder / "images", sizes.images, sizes.side, sizes.classes)
    torch.backends.cudnn.benchmark = True  # as in a run
    bare = Bare(network, sizes)
    bare(sizes.warm_up)
    taken = [seconds(partial(bare, sizes.window), device) for _ in range(sizes.rounds)]
    step = sizes.batch * sizes.window / statistics.median(taken)
    del bare
    yield Figure(f"{network}, a step without a loader", step, "images/s")
    yield from task.pieces({word: partial(_word, word, network, step, task) for word in WORDS}, 10)


def _word(word: str, network: str, step: float, task: Task) -> Iterator[Record]:
    sizes, device = task.sizes, task.sizes.where()
    options = [*NETWORKS[network].options, *run_options(sizes, task.folder), *PLAIN]
    places = [f"dataset.cache={word}", f"paths.output_dir={task.folder / 'run'}"]
    load = Loading(parts_of([*options, *places], device), device, sizes.settle)
    speed = statistics.median(load(sizes.window) for _ in range(3))
    yield Figure(f"{word}, loader alone", speed, "images/s")
    yield Figure(f"{word}, a step is busy", 100 * min(1.0, speed / step), "%", BUSY)
