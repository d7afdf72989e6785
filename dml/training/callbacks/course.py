"""What is due at which step."""

import logging
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import Callback
from torch.distributed import ProcessGroup

from dml.distributed import host_group, on_any_rank
from dml.process import Signals
from dml.runs.folder import FORMAT
from dml.runs.log import FolderLogger

log = logging.getLogger("dml")


class Course(Callback):
    """What is due at which step, for the callbacks behind it, and what a checkpoint says of its run.

    Args:
        config: of the run.
        every: steps between two evaluations.
    """

    def __init__(self, config: DictConfig, every: int) -> None:
        self.config = OmegaConf.to_container(config, resolve=True)
        self.every, self.checkpoint_every = every, config.trainer.checkpoint_every
        self.last_step: int = config.trainer.max_steps
        self.signals = Signals()
        self.told = False  # to stop, by a signal to one of the ranks
        self.hosts: ProcessGroup | None = None
        self.lengthened = False  # resumed where a shorter training ended

    def is_last(self, step: int) -> bool:
        return step == self.last_step

    def evaluates(self, step: int) -> bool:
        return self.is_last(step) or step % self.every == 0

    def evaluations_after(self, step: int) -> int:
        """How many there are to come."""
        return self.last_step // self.every - step // self.every + (self.last_step % self.every > 0)

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
        self.hosts = host_group()
        step = trainer.global_step
        for logger in trainer.loggers:
            if isinstance(logger, FolderLogger):
                logger.forget_after(step if step else -1, training_alone=self.lengthened)
        if step:
            log.info("resumed at step %d", step)
        if self.lengthened:
            log.info("lengthened at step %d to %d steps", step, self.last_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Of all ranks, which a signal reaches at different steps if at all.
        told = not self.is_last(trainer.global_step) and self.signals.received is not None
        self.told = on_any_rank(told, self.hosts)  # Lightning's reduce_boolean_decision waits for the device
