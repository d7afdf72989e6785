"""Callbacks that `conf/callbacks` offers in addition to Lightning's own."""

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, WeightAveraging
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_avg_fn

from dml.configuration.ranges import BelowOne, Count
from dml.methods.base import Method


class ExponentialAveraging(WeightAveraging):
    """Evaluates the exponential moving average of the weights; statistics of batch norm are averaged too.

    Lightning's EMAWeightAveraging takes one tensor after another, which needs several times as long.

    Args:
        decay: weight of the previous average at every step.
    """

    def __init__(self, decay: BelowOne = 0.999) -> None:
        super().__init__(multi_avg_fn=get_ema_multi_avg_fn(decay))


class EqualAveraging(WeightAveraging):
    """Evaluates the mean of the weights over the last part of a training (SWA, Izmailov et al., UAI 2018).

    Before that part the weights themselves are evaluated. Statistics of batch norm are averaged too.

    Args:
        total_steps: steps of the training.
        start: share of the steps after which averaging begins.
        every: steps between two weights that are averaged.
    """

    def __init__(self, total_steps: Count, start: BelowOne = 0.75, every: Count = 1) -> None:
        # Without this torch averages all tensors of a GPU at once, which fails for the whole numbers of batch norm.
        super().__init__(avg_fn=get_swa_avg_fn())
        self.first, self.every = int(start * total_steps), every  # counted from 0

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and (step_idx <= self.first or (step_idx - self.first) % self.every == 0)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step - 1 <= self.first:
            assert self._average_model is not None
            self._average_model.n_averaged.zero_()  # averaging has not begun: the weights are their own mean
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


class GradientNorm(Callback):
    """Logs, with the loss terms, the 2-norm of the gradient of each parameter group and of all, before clipping."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
        assert isinstance(module, Method)
        gradients: dict[str, list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            found = gradients.setdefault(group["name"].partition(" ")[0], [])
            found += [p.grad for p in group["params"] if p.grad is not None]
        gradients["all"] = [gradient for found in gradients.values() for gradient in found]
        for name, found in gradients.items():
            module.terms[f"train/gradient_norm/{name}"] = torch.nn.utils.get_total_norm(found)
