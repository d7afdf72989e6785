"""Callbacks for every step: its seed, its time, its log, and the method's own work after it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from torch.optim import Optimizer

from dml.methods.base import Method
from dml.methods.recipe import rates
from dml.training.callbacks.course import Course


def log_metrics(trainer: pl.Trainer, metrics: dict[str, float]) -> None:
    """Sends metrics to all loggers, for the current step."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.global_step)


class StepSeed(Callback):
    """Seeds the global generators, from which miners and dropout draw, at each step by the seed and the step.

    A resumed run therefore needs no generator state.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        seed = np.random.SeedSequence([self.seed, trainer.global_step]).generate_state(1)[0]
        pl.seed_everything(int(seed), verbose=False)


class Timing(Callback):
    """Counts the seconds of training: steps, their data, and the method's work after them; no evaluation, no report."""

    def __init__(self) -> None:
        self.seconds = self.of_step_ends = 0.0
        self._since = time.perf_counter()

    def state_dict(self) -> dict[str, float]:
        return {"seconds": self.seconds, "of_step_ends": self.of_step_ends}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.seconds, self.of_step_ends = state_dict["seconds"], state_dict["of_step_ends"]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.count()

    def count(self) -> float:
        """Adds the time since the last count or pause, and returns it."""
        now = time.perf_counter()
        passed, self._since = now - self._since, now
        self.seconds += passed
        return passed

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.count()
        try:
            yield
        finally:
            self._since = time.perf_counter()


class TrainingLog(Callback):
    """Logs loss terms and the learning rates of a step, every so many steps.

    In a run with fewer steps it logs the first and the last one. Raises NonFiniteLoss if a term has become NaN or
    infinite.
    """

    def __init__(self, every: int, course: Course) -> None:
        self.every, self.course = every, course
        self.rates: dict[str, float] = {}

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
        self.rates = rates(optimizer)  # before the schedule sets those of the next step

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, last = trainer.global_step, self.course.last_step
        if step % self.every == 0 or (last < self.every and step in (1, last)):
            assert isinstance(module, Method)
            module.finite.check()
            terms = {name: float(value) for name, value in module.terms.items()}
            log_metrics(trainer, terms | self.rates)


class MethodStep(Callback):
    """Runs the method's `on_step_end` after a step's evaluation; it counts as training time.

    Its changes are in the step's checkpoint.
    """

    def __init__(self, course: Course, timing: Timing) -> None:
        self.course, self.timing = course, timing

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_step == 0 or self.course.lengthened:
            self._run(trainer, module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.course.is_last(trainer.global_step):
            self._run(trainer, module)

    def _run(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, Method)
        self.timing.count()
        metrics = module.on_step_end(trainer.global_step)
        self.timing.of_step_ends += self.timing.count()
        if metrics:
            log_metrics(trainer, metrics)
