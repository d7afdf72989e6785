"""Prints after the first steps how long a run will take and how much memory it needs."""

import sys
from typing import Any

import psutil
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from tqdm import tqdm

if sys.platform != "win32":
    import resource

from dml.process import duration
from dml.training.callbacks.course import Course
from dml.training.callbacks.evaluation import Evaluation
from dml.training.callbacks.steps import Timing

UNTIL = 6  # steps of this process; the first one, which makes buffers and kernels, is not timed


class Forecast(Callback):
    """Prints the forecast after `UNTIL` steps, if more than `UNTIL` steps are still to come."""

    def __init__(self, course: Course, timing: Timing, evaluation: Evaluation) -> None:
        self.course, self.timing, self.evaluation = course, timing, evaluation
        self.first = 0  # step at which this process began
        self.since: float | None = None  # seconds of training after the first step

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.first, self.since = trainer.global_step, None

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        done = trainer.global_step - self.first
        if done == 1:
            self.since = self._seconds(trainer)
        elif done == UNTIL and self.since is not None and self.course.last_step - trainer.global_step > UNTIL:
            each = (self._seconds(trainer) - self.since) / (UNTIL - 1)
            reports = bool(self.course.config["report"])
            said = forecast(
                self.course.last_step - trainer.global_step,
                each,
                self.course.evaluations_after(trainer.global_step),
                self.evaluation.seconds,
                reports,
            )
            if trainer.is_global_zero:
                tqdm.write(f"{said}. {_memory(trainer.strategy.root_device, reports)}", file=sys.stderr)

    def _seconds(self, trainer: pl.Trainer) -> float:
        device = trainer.strategy.root_device
        if device.type == "cuda":  # the host runs ahead of the device
            torch.cuda.synchronize(device)
            self.timing.count()
        return self.timing.seconds


def forecast(steps: int, each: float, evaluations: int, of_evaluation: float | None, reports: bool) -> str:
    """Returns a sentence, without its full stop, on the time that is left.

    Args:
        steps: number of steps to come.
        each: seconds of one step.
        evaluations: number of evaluations to come.
        of_evaluation: seconds of one evaluation; None: not known yet.
        reports: whether a report follows.
    """
    parts = [f"{steps:,} steps of {each:.2g} s"]
    if evaluations:
        known = "of unknown length" if of_evaluation is None else f"of {of_evaluation:.2g} s"
        parts.append(f"{evaluations:,} evaluation{'s' if evaluations > 1 else ''} {known}")
    after = ", then the report" if reports else ""
    return f"About {duration(steps * each + evaluations * (of_evaluation or 0))}: {', '.join(parts)}{after}"


def _memory(device: torch.device, reports: bool) -> str:
    """Returns a sentence on the memory of this process and its GPU: their peak so far.

    It is unknown what the last evaluation and the report will add.
    """
    if sys.platform == "win32":
        of_host = psutil.Process().memory_info().peak_wset
    else:
        of_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    said = f"It takes at least {of_host / 1e9:.1f} GB of memory in each process"
    if device.type == "cuda":
        said += f" and at least {torch.cuda.max_memory_reserved(device) / 1e9:.1f} GB of a GPU's"
    return f"{said}, its peak so far{'; the report may add to it' if reports else ''}."
