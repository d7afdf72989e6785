"""What Lightning asks of a method about its optimizer: parameter groups, their rates, and what rests."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from dml.losses import Loss
from dml.methods.recipe import Recipe, Schedule
from dml.models.backbones.stages import Stages
from dml.models.heads import LearnsLater


class Optimized(LightningModule):
    """Parameters in groups with rates of their own, which one schedule changes alike.

    Attributes:
        recipe: of the training; None: it is to embed only.
        steps_per_epoch: of the sampler.
    """

    losses: nn.ModuleList
    head_lr_factor: float
    rests_until: int  # step
    recipe: Recipe | None = None
    steps_per_epoch: int = 1
    terms: dict[str, Tensor]

    def new_modules(self) -> Iterable[nn.Module]:
        """Modules that start from random values, trained with `lr * head_lr_factor`."""
        return ()

    def on_after_backward(self) -> None:
        """What rests gets no gradient: with one of zero, decay and momentum would move it all the same."""
        if self.global_step < self.rests_until:
            for parameter in self._backbone():
                parameter.grad = None
        for module in self._waiting():
            for parameter in module.resting():
                parameter.grad = None

    def _waiting(self) -> list[LearnsLater]:
        """Parts of the method that leave parameters as they are for the time being."""
        later = (module for module in self.modules() if isinstance(module, LearnsLater))
        return [module for module in later if any(True for _ in module.resting())]

    def _backbone(self) -> list[nn.Parameter]:
        """Parameters of neither a new module nor a loss."""
        others = {id(p) for module in (*self.new_modules(), self.losses) for p in module.parameters()}
        return [p for p in self.parameters() if id(p) not in others]

    def _stages(self, decay: float) -> list[dict[str, Any]]:
        """Groups of the backbone, the first stages first; one without a decay. What is part of no stage learns like
        the last one."""
        assert self.recipe is not None
        if decay == 1:
            return [{"name": "backbone", "params": self._backbone(), "lr": self.recipe.lr}]
        behind: dict[int, int] = {}
        for run in (module for module in self.modules() if isinstance(module, Stages)):
            for name, stage in run.stages.items():
                behind |= {id(parameter): run.behind[name] for parameter in stage.parameters()}
        groups: dict[int, list[nn.Parameter]] = {}
        for parameter in self._backbone():
            groups.setdefault(behind.get(id(parameter), 0), []).append(parameter)
        return [
            {"name": f"backbone {after}", "params": groups[after], "lr": self.recipe.lr * decay**after}
            for after in sorted(groups, reverse=True)
        ]

    def optimizer_alone(self) -> torch.optim.Optimizer:
        """The recipe's, without a schedule. Parameter groups: backbone, fresh modules, and one for the parameters of
        each loss, with their own rates.

        Raises:
            UserError: options that the optimizer does not take.
        """
        assert self.recipe is not None
        lr = self.recipe.lr
        fresh = {id(p): p for module in self.new_modules() for p in module.parameters()}
        groups: list[dict[str, Any]] = [
            *self._stages(self.recipe.layer_decay),
            {"name": "head", "params": list(fresh.values()), "lr": lr * self.head_lr_factor},
        ]
        for i, loss in enumerate(self.losses):
            assert isinstance(loss, Loss)
            group: dict[str, Any] = {"name": f"loss {i}", "params": list(loss.parameters()), "lr": lr * loss.lr_factor}
            groups.append(group | {"weight_decay": 0.0})  # proxies and beta are no weights: it would pull them to zero
        for group in groups:
            group["params"] = [p for p in group["params"] if p.requires_grad]
        return self.recipe.optimizer_of([group for group in groups if group["params"]], **self._fused())

    def _fused(self) -> dict[str, bool]:
        """On a GPU one kernel a step in place of several a tensor, where the optimizer has it and nothing was said."""
        assert self.recipe is not None
        makes = self.recipe.optimizer
        said = getattr(makes, "keywords", {})  # of a partial
        scaled = self._trainer is not None and self._trainer.precision == "16-mixed"  # Lightning cannot clip there
        has = "fused" in inspect.signature(getattr(makes, "func", makes)).parameters
        wanted = self.device.type == "cuda" and has and not {"fused", "foreach"} & said.keys() and not scaled
        return {"fused": True} if wanted else {}

    def configure_optimizers(self) -> Any:
        """The optimizer and its schedule. Raises UserError for options that torch does not take."""
        optimizer = self.optimizer_alone()
        assert self.recipe is not None
        schedule = self.recipe.schedule_of(optimizer, self.steps_per_epoch)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """After every step, before callbacks evaluate it and write its checkpoint."""
        assert isinstance(scheduler, Schedule)
        scheduler.step(self.terms["train/loss"])
