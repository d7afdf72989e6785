"""The optimizer of a method: parameter groups, their learning rates, and the parameters that rest for a time."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from dml.errors import UserError
from dml.losses import Loss
from dml.methods.recipe import Recipe, Schedule
from dml.models.backbones.stages import Stages
from dml.models.heads import LearnsLater


class Optimized(LightningModule):
    """A module whose parameters are in groups with their own learning rates, which one schedule changes in proportion.

    Attributes:
        recipe: of the training; None: the module is only used to embed.
        steps_per_epoch: of the sampler.
    """

    losses: nn.ModuleList
    head_lr_factor: float
    rests_until: int  # step
    recipe: Recipe | None = None
    steps_per_epoch: int = 1
    terms: dict[str, Tensor]

    def new_modules(self) -> Iterable[nn.Module]:
        """Returns the modules that start from random values, trained with `lr * head_lr_factor`."""
        return ()

    def on_after_backward(self) -> None:
        """Removes the gradients of resting parameters: with a gradient of zero, decay and momentum would move them."""
        if self.global_step < self.rests_until:
            for parameter in self._backbone():
                parameter.grad = None
        for module in self._waiting():
            for parameter in module.resting():
                parameter.grad = None

    def _waiting(self) -> list[LearnsLater]:
        """Returns the modules that do not train some of their parameters yet."""
        later = (module for module in self.modules() if isinstance(module, LearnsLater))
        return [module for module in later if any(True for _ in module.resting())]

    def _backbone(self) -> list[nn.Parameter]:
        """Returns the parameters that belong to neither a new module nor a loss."""
        others = {id(p) for module in (*self.new_modules(), self.losses) for p in module.parameters()}
        return [p for p in self.parameters() if id(p) not in others]

    def _stages(self, decay: float) -> list[dict[str, Any]]:
        """Makes the backbone's groups, the first stages first; without a decay there is a single group.

        Parameters outside the stages have the rate of the last stage.
        """
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
        """Makes the recipe's optimizer without a schedule.

        The parameter groups, each with its own rate, are the backbone, the new modules, and one for each loss.

        Raises:
            UserError: the optimizer refuses its options, or `new_modules` returns no modules.
        """
        assert self.recipe is not None
        lr = self.recipe.lr
        returned = self.new_modules()
        modules = [*returned] if isinstance(returned, Iterable) else [None]
        if not all(isinstance(module, nn.Module) for module in modules):
            raise UserError(
                f"new_modules() of {type(self).__name__} returns {type(returned).__name__}: it has to return modules, "
                "as in `return (self.head,)`."
            )
        fresh = {id(p): p for module in modules for p in module.parameters()}
        groups: list[dict[str, Any]] = [
            *self._stages(self.recipe.layer_decay),
            {"name": "head", "params": list(fresh.values()), "lr": lr * self.head_lr_factor},
        ]
        for i, loss in enumerate(self.losses):
            assert isinstance(loss, Loss)
            group: dict[str, Any] = {"name": f"loss {i}", "params": list(loss.parameters()), "lr": lr * loss.lr_factor}
            groups.append(group | {"weight_decay": 0.0})  # decay would pull proxies and beta to zero
        for group in groups:
            group["params"] = [p for p in group["params"] if p.requires_grad]
        return self.recipe.optimizer_of([group for group in groups if group["params"]], **self._fused())

    def _fused(self) -> dict[str, bool]:
        """Chooses the fused optimizer on a GPU (one kernel per step) if it exists and the options do not decide it."""
        assert self.recipe is not None
        makes = self.recipe.optimizer
        said = getattr(makes, "keywords", {})  # options of a partial
        trainer = self._trainer
        # A fused optimizer scales gradients back itself, after they are clipped and their norms are logged; Lightning
        # refuses to clip them, in bfloat16 too.
        scaled = trainer is not None and (
            trainer.precision == "16-mixed" or (trainer.precision == "bf16-mixed" and bool(trainer.gradient_clip_val))
        )
        kind = getattr(makes, "func", makes)
        # torch's Adagrad has the option too, which older versions offer for CPUs alone.
        has = "fused" in inspect.signature(kind).parameters and kind is not torch.optim.Adagrad
        wanted = self.device.type == "cuda" and has and not {"fused", "foreach"} & said.keys() and not scaled
        return {"fused": True} if wanted else {}

    def configure_optimizers(self) -> Any:
        """Makes the optimizer and its schedule. Raises UserError for options that torch refuses."""
        optimizer = self.optimizer_alone()
        assert self.recipe is not None
        schedule = self.recipe.schedule_of(optimizer, self.steps_per_epoch)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Steps the schedule after every step, before callbacks evaluate and write a checkpoint."""
        assert isinstance(scheduler, Schedule)
        scheduler.step(self.terms["train/loss"])
