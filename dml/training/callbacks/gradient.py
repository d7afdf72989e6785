"""Stops trainings that cannot learn anything: batches without pairs, losses without a gradient, non-finite weights."""

import math
from itertools import islice
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import Callback
from pytorch_metric_learning.losses import CrossBatchMemory, ManifoldLoss
from pytorch_metric_learning.losses.base_metric_loss_function import BaseMetricLossFunction
from pytorch_metric_learning.losses.mixins import WeightMixin
from torch import Tensor, nn

from dml.data.datamodule import DataModule
from dml.data.samplers import Sampler
from dml.errors import UserError
from dml.losses import Loss
from dml.methods.base import Method
from dml.methods.finite import NonFiniteLoss
from dml.training.callbacks.course import Course

BATCHES = 32  # batches that are checked before the training

STEPS = 20  # first steps, one of which needs a gradient; later a miner may find nothing, as nothing is left to learn


def check_batches(config: DictConfig, method: Method, data: DataModule) -> None:
    """Checks that some batches have pairs to compare; it draws only their labels.

    Raises:
        UserError: a loss compares only the images of a batch, and no batch has two images of a class, or images of two
            classes.
    """
    if any(isinstance(loss, Loss) and _compares_images(loss.loss) for loss in method.losses):
        lacking = _lacking(config, data.sampler)
        if lacking:
            raise UserError(f"{lacking} Or choose a loss on proxies, such as loss=proxy_anchor.")


def _compares_images(loss: nn.Module) -> bool:
    """Says whether a loss is known to learn nothing without positive and negative pairs in the batch."""
    if isinstance(loss, CrossBatchMemory | WeightMixin | ManifoldLoss):
        return False
    return isinstance(loss, BaseMetricLossFunction) or type(loss).__module__.startswith("dml.losses")


def _lacking(config: DictConfig, sampler: Sampler) -> str:
    """Returns a sentence on the kind of pairs that batches never have; empty if they have both kinds."""
    batches = [sampler.labels[batch] for batch in islice(sampler.batches(0), BATCHES)]
    classes = [len(np.unique(labels)) for labels in batches]
    sizes = f"sampler.batch_size={config.sampler.batch_size}"
    if "m" in config.sampler:
        sizes += f" and sampler.m={config.sampler.m}"
    if all(count == 1 for count in classes):
        return f"With {sizes} a batch has images of one class only, hence no negative pairs: change these options."
    if all(count == len(labels) for count, labels in zip(classes, batches, strict=True)):
        return f"With {sizes} a batch has no two images of a class, hence no positive pairs: change these options."
    return ""


class FiniteWeights(Callback):
    """Checks that loss terms and weights are finite before anything is evaluated or saved.

    A run that resumed from weights that are not finite would only fail again.
    """

    def __init__(self, course: Course) -> None:
        self.course = course

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if not self.course.saves(step):
            return
        assert isinstance(module, Method)
        module.finite.check()
        for name, parameter in module.named_parameters():
            if not torch.isfinite(parameter.detach().sum()):
                raise NonFiniteLoss(
                    f"The parameter '{name}' became NaN or infinite at step {step}: lower lr or set "
                    "trainer.gradient_clip_val."
                )


class FirstGradient(Callback):
    """Ends a training whose first steps have no gradient.

    Args:
        config: whose options the message names.
        data: of the training.
    """

    def __init__(self, config: DictConfig, data: DataModule) -> None:
        self.config, self.data = config, data
        self.found = False

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.found = state_dict["found"]

    def on_before_backward(self, trainer: pl.Trainer, module: pl.LightningModule, loss: Tensor) -> None:
        """Raises UserError if the loss depends on no trained parameter."""
        if not loss.requires_grad:
            raise UserError(
                "The loss does not depend on any parameter that is trained: see backbone.train, and change "
                f"{self._options()}."
            )

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not self.found:
            self.look(module, trainer.global_step + 1)

    def look(self, module: nn.Module, step: int) -> None:
        """Looks for a gradient after the backward pass of a step, counted from 1.

        Raises:
            UserError: none of the first steps, or of all steps of a short training, had a gradient.
        """
        self.found = self.found or any(p.grad is not None and bool(p.grad.any()) for p in module.parameters())
        last = min(STEPS, self.config.trainer.max_steps)
        if not self.found and step >= max(last, 2):  # a miner may find nothing in a single step
            why = _lacking(self.config, self.data.sampler)
            why = why or f"the loss finds nothing to compare with {self._options()}."
            raise UserError(f"No parameter got a gradient in the first {step} steps, so nothing is learned: {why}")

    def _options(self) -> str:
        """Returns the options of the loss and its miner; only those that are NaN or infinite, if there are any."""
        said = {
            option: value
            for name in ("loss", "miner")
            for option, value in _numbers(OmegaConf.to_container(self.config[name], resolve=True), name)
        }
        odd = {name: value for name, value in said.items() if not math.isfinite(value)}
        return ", ".join(f"{name}={value}" for name, value in (odd or said).items()) or "the loss"


def _numbers(node: Any, name: str) -> list[tuple[str, float]]:
    if isinstance(node, dict):
        return [found for key, value in node.items() for found in _numbers(value, f"{name}.{key}")]
    return [(name, node)] if isinstance(node, int | float) and not isinstance(node, bool) else []
