"""Says what is due at each step: evaluation, checkpoint, or the end."""

import logging
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import Callback

from dml.distributed import from_all_ranks, on_any_rank
from dml.errors import UserError
from dml.process import Signals
from dml.runs.folder import FORMAT
from dml.training.loggers import forget_after

log = logging.getLogger("dml")


class Course(Callback):
    """Tells the callbacks after it what is due at each step, and puts facts about the run into its checkpoints.

    Args:
        config: of the run.
        every: steps between two evaluations.
    """

    def __init__(self, config: DictConfig, every: int) -> None:
        self.config: Any = OmegaConf.to_container(config, resolve=True)
        self.every, self.checkpoint_every = every, config.trainer.checkpoint_every
        self.last_step: int = config.trainer.max_steps
        self.signals = Signals()
        self.told = False  # whether a signal to one of the ranks asked to stop
        self.lengthened = False  # whether the run was resumed at the end of a shorter training

    def is_last(self, step: int) -> bool:
        return step == self.last_step

    def evaluates(self, step: int) -> bool:
        return self.is_last(step) or step % self.every == 0

    def evaluations_after(self, step: int) -> int:
        """Returns how many evaluations are still to come after a step."""
        at_the_end = step < self.last_step and self.last_step % self.every > 0
        return self.last_step // self.every - step // self.every + at_the_end

    def saves(self, step: int) -> bool:
        return self.told or self.evaluates(step) or step % self.checkpoint_every == 0

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["format"] = FORMAT
        checkpoint["config"] = self.config
        checkpoint["finished"] = self.is_last(trainer.global_step)

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.lengthened = checkpoint["finished"]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.signals.watch()
        step = trainer.global_step
        if len(steps := {*from_all_ranks(step)}) > 1:
            raise UserError(
                f"The processes resume at different steps ({', '.join(map(str, sorted(steps)))}): paths.output_dir has "
                "to be a folder that all machines share."
            )
        forget_after(trainer.loggers, step if step else -1, training_alone=self.lengthened)
        if step:
            log.info("resumed at step %d", step)
        if self.lengthened:
            log.info("lengthened at step %d to %d steps", step, self.last_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Agreed by all ranks, since a signal may reach them at different steps or only some of them.
        told = not self.is_last(trainer.global_step) and self.signals.received is not None
        self.told = on_any_rank(told)  # not reduce_boolean_decision, which waits for the device
