"""Trains every method for a few steps, as `python -m dml.run` does, and evaluates it."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dml.bench.results import Figure, Record
from dml.bench.running import Task
from dml.bench.sizes import Sizes
from dml.configuration.composition import CONF, composed

STEPS = 3


def tiny_options(sizes: Sizes, folder: Path) -> list[str]:
    """Returns the options of a training that takes seconds; those of method and length are left to the caller."""
    return [
        *("dataset=glyphs", "dataset.classes=24", "dataset.images_per_class=6", "head.dim=24", "report=false"),
        *("trainer.num_workers=0", "trainer.log_every=1", f"trainer.accelerator={sizes.accelerator}", *sizes.options),
        *("protocol.clustering=false", f"paths.output_dir={folder / 'run'}", f"paths.cache_dir={folder / 'cache'}"),
    ]


def measure(task: Task) -> Iterator[Record]:
    names = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
    yield from task.pieces({name: partial(_train, name, task) for name in names}, 2)


def _train(name: str, task: Task) -> Iterator[Record]:
    from dml.training.run import run

    folder = task.folder / name
    steps = [f"trainer.max_steps={STEPS}", f"protocol.every={STEPS}", f"trainer.checkpoint_every={STEPS}"]
    options = [*tiny_options(task.sizes, folder), f"method={name}", *steps]
    start = time.perf_counter()
    metrics = run(composed(*options), options)
    assert 0 <= metrics["test/recall@1"] <= 1
    yield Figure(f"{name}, {STEPS} steps and two evaluations", time.perf_counter() - start, "s")
