"""Schedules are torch's own, behind a linear warm-up, in steps or epochs; any optimizer goes with any of them."""

import io
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from dml.configuration.command_line import hydra_sentence
from dml.configuration.composition import composed
from dml.configuration.options import check
from dml.errors import UserError
from dml.methods.base import Method
from dml.methods.recipe import Recipe, Schedule
from dml.training.build import recipe_of
from tests.components import components

STEPS, LENGTH, RATES = 200, 190, [0.1, 2.0]
EPOCH = 7  # steps

# By hand: a scheduler of torch's with the options of conf/scheduler, for so many units.
TORCH: dict[str, Callable[[Optimizer, int], Any]] = {
    "constant": lambda optimizer, units: ConstantLR(optimizer, 1.0),
    "cosine": lambda optimizer, units: CosineAnnealingLR(optimizer, units),
    "step": lambda optimizer, units: StepLR(optimizer, 10, 0.1),
    "multistep": lambda optimizer, units: MultiStepLR(optimizer, [6, 17, 60], 0.1),
    "exponential": lambda optimizer, units: ExponentialLR(optimizer, 0.97),
    "onecycle": lambda optimizer, units: OneCycleLR(optimizer, RATES, total_steps=units),
    "plateau": lambda optimizer, units: ReduceLROnPlateau(optimizer, factor=0.5, patience=4, threshold=0, eps=0),
}
OPTIONS = {"multistep": ["scheduler.milestones=[6,17,60]"]}


def optimizer_at(rates: list[float]) -> Optimizer:
    groups = [{"name": name, "params": [torch.nn.Parameter(torch.zeros(2))]} for name in ("backbone", "head")]
    return torch.optim.SGD([group | {"lr": lr} for group, lr in zip(groups, rates, strict=True)], momentum=0.9)


def rates_of(optimizer: Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@cache
def configuration(*overrides: str) -> DictConfig:
    return composed("method=baseline", *overrides)


def recipe(name: str, **told: Any) -> Recipe:
    """As a run has it."""
    config = configuration(f"scheduler={name}", f"trainer.max_steps={LENGTH}", *OPTIONS.get(name, [])).copy()
    OmegaConf.update(config, "scheduler", told)
    check(config)
    return recipe_of(config)


def by_hand(name: str, losses: list[torch.Tensor], period: int, warm_up: int) -> list[list[float]]:
    """The rates of each step: a loop over torch's schedulers, which know neither epochs nor each other."""
    units = math.ceil((LENGTH - warm_up) / period)
    optimizer = optimizer_at(RATES)
    main = TORCH[name](optimizer, units)
    rising = optimizer_at(rates_of(optimizer))
    rise = LinearLR(rising, 1 / (warm_up + 1), total_iters=warm_up)
    rates, loss = [], torch.zeros(())
    for step in range(STEPS):
        rates.append(rates_of(rising if step < warm_up else optimizer))
        rising.step()
        optimizer.step()
        if step < warm_up:
            rise.step()
            continue
        loss = loss + losses[step]
        done, rest = divmod(step + 1 - warm_up, period)
        if rest == 0 and (name not in ("cosine", "onecycle") or done < units):
            main.step(*([float(loss)] if name == "plateau" else []))
            loss = torch.zeros(())
    return rates


@pytest.mark.parametrize(("name", "unit", "warm_up"), list(product(components("scheduler"), ("step", "epoch"), (0, 3))))
def test_a_schedule_is_torchs_own_stepped_by_hand(name: str, unit: str, warm_up: int) -> None:
    """Exactly, also when it is saved and restored on the way."""
    given = recipe(name, unit=unit, warm_up=warm_up)
    losses = [torch.tensor(1 / (1 + min(step, 50) // 20) + 0.1 * math.sin(step)) for step in range(STEPS)]
    optimizer = optimizer_at(RATES)
    schedule = given.schedule_of(optimizer, EPOCH)
    found = []
    for step, loss in enumerate(losses):
        if step in (2, 10, 100):  # of a warm-up, of an epoch, and later
            saved = io.BytesIO()
            torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, saved)
            saved.seek(0)
            state = torch.load(saved, weights_only=True)
            optimizer = optimizer_at(RATES)
            schedule = given.schedule_of(optimizer, EPOCH)
            optimizer.load_state_dict(state["optimizer"])
            schedule.load_state_dict(state["schedule"])
        found.append(rates_of(optimizer))
        optimizer.step()
        schedule.step(loss)
    period = EPOCH if unit == "epoch" else 1
    assert found == by_hand(name, losses, period, warm_up * period)
    assert all(head == pytest.approx(20 * backbone, rel=1e-9) for backbone, head in found)
    assert (len({backbone for backbone, _ in found}) == 1) == (name == "constant" and not warm_up)


def test_the_first_steps_of_a_warm_up() -> None:
    optimizer = optimizer_at([0.4, 0.8])
    schedule = Schedule(optimizer, lambda optimizer: StepLR(optimizer, 1, 0.5), period=2, warm_up=3)
    found = []
    for _ in range(8):
        found.append(rates_of(optimizer)[0])
        optimizer.step()
        schedule.step(torch.zeros(()))
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.2, 0.2, 0.1])


@pytest.mark.parametrize("name", components("optimizer"))
def test_an_optimizer_goes_with_every_schedule(method_of: Callable[..., Method], name: str) -> None:
    method = method_of("method=baseline", f"optimizer={name}")
    assert method.recipe is not None
    for schedule in components("scheduler"):
        method.recipe = replace(recipe(schedule, warm_up=2), optimizer=method.recipe.optimizer)
        made = method.configure_optimizers()
        assert [group["name"] for group in made["optimizer"].param_groups] == ["backbone", "head"]
        for parameter in method.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = [parameter.detach().clone() for parameter in method.parameters()]
        made["optimizer"].step()
        made["lr_scheduler"]["scheduler"].step(torch.ones(()))
        assert all((a != b).any() for a, b in zip(before, method.parameters(), strict=True))


PAPERS = ["abe_any", "collage", "dces_any", "deml_any", "diablo_any", "gsp_collage", "gsp_cub"]
CHOSEN = [*(f"method={name}" for name in components("method")), *(f"experiment={name}" for name in PAPERS)]


@pytest.mark.parametrize("chosen", CHOSEN)
def test_the_command_line_chooses_another(chosen: str) -> None:
    """Beside whatever a method or an experiment chose of its paper."""
    options = [chosen, "optimizer=sgd", "scheduler=cosine", "scheduler.warm_up=1"]
    config = composed(*options)
    check(config)
    assert config.optimizer._target_ == "torch.optim.SGD"
    assert config.scheduler._target_.endswith("CosineAnnealingLR")


@pytest.mark.parametrize(
    ("options", "optimizer", "rate", "decay", "scheduler"),
    [
        (["method=abe"], "AdamW", 1e-3, 1e-4, "ConstantLR"),
        (["method=dces"], "Adam", 1e-3, 0, "ConstantLR"),
        (["method=deml"], "Adam", 1e-3, 2e-4, "ConstantLR"),
        (["experiment=deml_cars_baseline"], "Adam", 1e-5, 2e-4, "ConstantLR"),
        (["experiment=gsp_cub"], "Adam", 1e-5, 1e-4, "ConstantLR"),
        (["experiment=collage"], "Adam", 1e-3, 0, "ReduceLROnPlateau"),
        (["experiment=gsp_collage"], "Adam", 1e-3, 0, "ReduceLROnPlateau"),
    ],
)
def test_what_papers_train_with(options: list[str], optimizer: str, rate: float, decay: float, scheduler: str) -> None:
    config = composed(*options)
    made = config.optimizer
    assert (made._target_, made.lr, made.weight_decay) == (f"torch.optim.{optimizer}", rate, decay)
    assert config.scheduler._target_ == f"torch.optim.lr_scheduler.{scheduler}"
    assert made.get("betas") == ([0.9, 0.99] if options == ["experiment=gsp_cub"] else None)


@pytest.mark.parametrize(
    ("chosen", "loss"),
    [
        ("method=deml", "MultiSimilarity"),  # its paper's loss is too slow from scratch
        *((f"experiment=deml_{data}", "BinomialDeviance") for data in ("cub", "cars", "sop", "inshop")),
    ],
)
def test_deml_trains_with_its_papers_loss_where_its_paper_is_asked_for(chosen: str, loss: str) -> None:
    found = composed(chosen)
    assert found.method._target_ == "dml.methods.deml.DeML"
    assert found.loss.loss._target_ == f"dml.losses.pairwise.{loss}"
    assert found.loss.loss.get("gamma") == (35 if loss == "BinomialDeviance" else None)


@pytest.mark.parametrize("name", ["cosine", "onecycle"])
def test_a_schedule_without_its_length_is_told(name: str) -> None:
    with pytest.raises(UserError, match=r"needs the length of the schedule: set scheduler\.length"):
        recipe(name, length=None).schedule_of(optimizer_at(RATES), EPOCH)


def test_an_unknown_choice_is_told() -> None:
    with pytest.raises(MissingConfigException) as caught:
        composed("scheduler=cosin")
    assert hydra_sentence(caught.value) == "scheduler=cosin is unknown: did you mean cosine? --help lists all."
