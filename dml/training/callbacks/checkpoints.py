"""Writes the last checkpoint, and stops the run after it if a signal asked for that."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from dml.errors import Interrupted
from dml.methods.finite import NonFiniteLoss
from dml.runs.folder import RunFolder
from dml.training.callbacks.course import Course
from dml.training.callbacks.steps import Timing


class Checkpoints(Callback):
    """Writes `last.ckpt` after everything else that a step does, so that a killed run repeats all that is not in it."""

    def __init__(self, course: Course, timing: Timing, folder: RunFolder) -> None:
        self.course, self.timing, self.folder = course, timing, folder

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if not self.course.saves(step):
            return
        with self.timing.paused():
            trainer.save_checkpoint(self.folder.last, weights_only=False)
            if not self.course.is_last(step) and trainer.is_global_zero:
                self.folder.forget_results()  # those of a shorter training
        if self.course.told and not self.course.is_last(step):
            received = self.course.signals.received or "a signal to another process"
            raise Interrupted(f"{received} at step {step}, which is saved", together=True)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Corrects what averages of weights say of states that are no tensors to be averaged, such as whether there are
        prototypes: torch keeps those of the moment when the averages were begun."""
        now = checkpoint.get("current_model_state", {})
        checkpoint["state_dict"] |= {name: state for name, state in now.items() if name.endswith("_extra_state")}

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, NonFiniteLoss):
            trainer.save_checkpoint(self.folder.path / "checkpoints" / "non_finite.ckpt", weights_only=False)
