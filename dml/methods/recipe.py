"""The recipe of a training: an optimizer of torch and a schedule of its learning rates."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer, SparseAdam
from torch.optim.lr_scheduler import LinearLR, LRScheduler, ReduceLROnPlateau

from dml.distributed import of_first
from dml.errors import UserError


@dataclass(frozen=True)
class Recipe:
    """The optimizer of a method, and how its learning rates change.

    Attributes:
        optimizer: `parameter groups -> optimizer`, for example a partial of `torch.optim.Adam`.
        lr: learning rate of the backbone; other parameter groups have multiples of it.
        scheduler: `optimizer -> scheduler`, a partial of a class of `torch.optim.lr_scheduler`.
        unit: in which the scheduler and the warm-up are counted.
        warm_up: units in which all rates rise linearly, step by step, to those that the scheduler starts with.
        length: steps, warm-up included, after which rates stay constant; None: the schedule has no end.
        layer_decay: each stage of the backbone learns at the next stage's rate times this factor (Clark et al. 2020).
    """

    optimizer: Callable[..., Optimizer]
    lr: float
    scheduler: Callable[..., LRScheduler]
    unit: Literal["step", "epoch"] = "step"
    warm_up: int = 0
    length: int | None = None
    layer_decay: float = 1.0

    def optimizer_of(self, groups: list[dict[str, Any]], **options: Any) -> Optimizer:
        """Makes the optimizer of some parameter groups. Raises UserError for options that it refuses."""
        with _told("optimizer"):
            optimizer = self.optimizer(groups, **options)
        if not isinstance(optimizer, Optimizer):
            raise UserError(
                f"optimizer._target_ makes a {type(optimizer).__name__}, which is no optimizer of torch: choose a "
                "class of torch.optim."
            )
        if isinstance(optimizer, SparseAdam):
            raise UserError("optimizer._target_=torch.optim.SparseAdam takes sparse gradients only: choose another.")
        return optimizer

    def schedule_of(self, optimizer: Optimizer, steps_per_epoch: int) -> "Schedule":
        """Makes the schedule of an optimizer. Raises UserError for options that the scheduler refuses."""
        return Schedule(
            optimizer,
            self.scheduler,
            period=steps_per_epoch if self.unit == "epoch" else 1,
            warm_up=self.steps_of_warm_up(steps_per_epoch),
            length=self.length,
        )

    def steps_of_warm_up(self, steps_per_epoch: int) -> int:
        return self.warm_up * (steps_per_epoch if self.unit == "epoch" else 1)


LENGTHS = ("T_max", "total_steps")  # what torch's schedulers call the length


class Schedule:
    """Learning rates that rise linearly and then follow a scheduler of torch, which counts from the end of the rise.

    The proportions between the parameter groups' rates are kept: a rate that a scheduler takes, such as the largest one
    of OneCycleLR, is given for each group. torch's `T_max` and `total_steps` are the length less the warm-up.

    Args:
        optimizer: with its full rates.
        scheduler: see `Recipe`.
        period: steps between two steps of the scheduler.
        warm_up: steps of the rise. The first one is taken at 1 / (warm_up + 1) of the rates.
        length: see `Recipe`.

    Raises:
        UserError: the scheduler refuses its options, or the warm-up leaves no step of the length.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: Callable[..., LRScheduler],
        period: int = 1,
        warm_up: int = 0,
        length: int | None = None,
    ) -> None:
        self.optimizer, self.period, self.warm_up = optimizer, period, warm_up
        left = None if length is None else length - warm_up
        if left is not None and left <= 0:
            raise UserError(f"scheduler.warm_up takes {warm_up} of the {length} steps of scheduler.length: lower it.")
        self.units = None if left is None else math.ceil(left / period)
        given: dict[str, Any] = {"max_lr": [group["lr"] for group in optimizer.param_groups]}
        if self.units is not None:
            given |= dict.fromkeys(LENGTHS, self.units)
        takes = inspect.signature(scheduler).parameters
        if length is None and any(name in takes for name in LENGTHS):
            raise UserError("this scheduler needs the length of the schedule: set scheduler.length.")
        with _told("scheduler"):
            self.main = scheduler(optimizer, **{name: value for name, value in given.items() if name in takes})
        if not isinstance(self.main, LRScheduler):
            made = type(self.main).__name__
            raise UserError(
                f"scheduler._target_ makes a {made}, which is no scheduler of torch: choose a class of "
                "torch.optim.lr_scheduler."
            )
        self.starts = [group["lr"] for group in optimizer.param_groups]
        self.rise = LinearLR(optimizer, 1 / (warm_up + 1), total_iters=warm_up) if warm_up else None
        self.steps = 0
        self.loss = torch.zeros(())  # sum since the scheduler's last step, for ReduceLROnPlateau

    def step(self, loss: Tensor) -> None:
        """Changes the rates after a step of the optimizer; `loss` is the scalar loss of that step."""
        self.steps += 1
        since = self.steps - self.warm_up
        if self.rise is not None and since < 0:
            self.rise.step()
        elif self.rise is not None and since == 0:
            for group, rate in zip(self.optimizer.param_groups, self.starts, strict=True):
                group["lr"] = rate
        else:
            self._follow(since, loss)

    def _follow(self, since: int, loss: Tensor) -> None:
        if isinstance(self.main, ReduceLROnPlateau):
            self.loss = self.loss.to(loss.device) + loss.detach()
        if since % self.period or (self.units is not None and since // self.period >= self.units):
            return
        if isinstance(self.main, ReduceLROnPlateau):
            # The first rank decides for all, since the last bit of a loss may differ between processors.
            self.main.step(float(of_first(self.loss)))
            self.loss = torch.zeros(())
        else:
            self.main.step()

    def state_dict(self) -> dict[str, Any]:
        rise = None if self.rise is None else self.rise.state_dict()
        return {"steps": self.steps, "loss": self.loss, "main": self.main.state_dict(), "rise": rise}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps, self.loss = state_dict["steps"], state_dict["loss"]
        self.main.load_state_dict(state_dict["main"])
        if self.rise is not None:
            self.rise.load_state_dict(state_dict["rise"])


@contextmanager
def _told(option: str) -> Iterator[None]:
    """Turns what torch says of an option into a UserError that names the option."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise UserError(f"{option}: {' '.join(str(error).split())}.") from error


def rates(optimizer: Optimizer) -> dict[str, float]:
    """Returns the current rates of an optimizer as `train/lr/GROUP`; all losses share one entry."""
    return {f"train/lr/{group['name'].partition(' ')[0]}": float(group["lr"]) for group in optimizer.param_groups}
