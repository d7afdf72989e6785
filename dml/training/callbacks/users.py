"""Callbacks that the configuration names, in addition to ours; those that would conflict with ours are refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig
from pytorch_lightning import callbacks
from pytorch_lightning.callbacks import Callback, WeightAveraging

from dml.configuration.components import instantiate
from dml.errors import UserError

# Callbacks that would repeat or disturb what a run does itself, and why.
REFUSED: dict[type[Callback], str] = {
    callbacks.Checkpoint: "a run writes its checkpoints itself, see trainer.checkpoint_every",
    callbacks.EarlyStopping: "a run ends after trainer.max_steps, or by protocol.patience",
    callbacks.Timer: "a run ends after trainer.max_steps",
    callbacks.ProgressBar: "a run has its own progress bar",
    callbacks.GradientAccumulationScheduler: "losses compare the images of one batch",
    callbacks.BatchSizeFinder: "losses compare the images of one batch: set sampler.batch_size",
    callbacks.LearningRateFinder: "the learning rate is optimizer.lr: set it",
    callbacks.StochasticWeightAveraging: "it counts Lightning's epochs, of which a run has one: choose callbacks=swa",
}


def users_callbacks(config: DictConfig) -> list[Callback]:
    """Makes the callbacks of the group `callbacks`, in its order.

    Raises:
        UserError: a component is no callback, or cannot be used in a run.
    """
    made: dict[str, Any] = {f"callbacks.{name}": instantiate(node) for name, node in (config.callbacks or {}).items()}
    for option, callback in made.items():
        if not isinstance(callback, Callback):
            raise UserError(
                f"{option} makes a {type(callback).__name__}, which is no callback of Lightning: remove it."
            )
        for refused, why in REFUSED.items():
            if isinstance(callback, refused):
                raise UserError(f"{option}: {type(callback).__name__} cannot be used: {why}.")
    averages = [option for option, callback in made.items() if isinstance(callback, WeightAveraging)]
    if len(averages) > 1:
        raise UserError(f"{' and '.join(averages)} both say which weights are evaluated: choose one.")
    return list(made.values())


@contextmanager
def evaluated_weights(trainer: pl.Trainer) -> Iterator[None]:
    """Gives the method the weights to evaluate inside the block: averages, if a callback averages them."""
    known: Any = trainer  # Lightning does not declare the attribute `callbacks`
    averages = [callback for callback in known.callbacks if isinstance(callback, WeightAveraging)]
    for average in averages:
        average.on_validation_epoch_start(trainer, trainer.lightning_module)
    try:
        yield
    finally:
        for average in averages:
            average.on_validation_epoch_end(trainer, trainer.lightning_module)
