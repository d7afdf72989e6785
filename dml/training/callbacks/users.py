"""Callbacks that the configuration names: beside ours, which they neither replace nor get in the way of."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig
from pytorch_lightning import callbacks
from pytorch_lightning.callbacks import Callback, WeightAveraging

from dml.configuration.components import instantiate
from dml.errors import UserError

# What would do again, or against, what a run does.
REFUSED: dict[type[Callback], str] = {
    callbacks.Checkpoint: "a run writes its checkpoints itself, see trainer.checkpoint_every",
    callbacks.EarlyStopping: "a run ends after trainer.max_steps, or by protocol.patience",
    callbacks.Timer: "a run ends after trainer.max_steps",
    callbacks.ProgressBar: "a run has its bar",
    callbacks.GradientAccumulationScheduler: "losses compare the images of one batch",
    callbacks.BatchSizeFinder: "the batch is what a loss compares: set sampler.batch_size",
    callbacks.LearningRateFinder: "the rate is optimizer.lr",
    callbacks.StochasticWeightAveraging: "it counts Lightning's epochs, of which a run has one: choose callbacks=swa",
}


def users_callbacks(config: DictConfig) -> list[Callback]:
    """Those of the group `callbacks`, in its order.

    Raises:
        UserError: what is no callback, or one that a run cannot do with.
    """
    made: dict[str, Any] = {f"callbacks.{name}": instantiate(node) for name, node in (config.callbacks or {}).items()}
    for option, callback in made.items():
        if not isinstance(callback, Callback):
            raise UserError(f"{option} makes a {type(callback).__name__}, which is no callback of Lightning's.")
        for refused, why in REFUSED.items():
            if isinstance(callback, refused):
                raise UserError(f"{option}: {type(callback).__name__} cannot be used: {why}.")
    averages = [option for option, callback in made.items() if isinstance(callback, WeightAveraging)]
    if len(averages) > 1:
        raise UserError(f"{' and '.join(averages)} both say which weights are evaluated: choose one.")
    return list(made.values())


@contextmanager
def evaluated_weights(trainer: pl.Trainer) -> Iterator[None]:
    """The method with the weights that are evaluated: averages, where a callback averages them."""
    known: Any = trainer  # callbacks are no attribute that Lightning declares
    averages = [callback for callback in known.callbacks if isinstance(callback, WeightAveraging)]
    for average in averages:
        average.on_validation_epoch_start(trainer, trainer.lightning_module)
    try:
        yield
    finally:
        for average in averages:
            average.on_validation_epoch_end(trainer, trainer.lightning_module)
