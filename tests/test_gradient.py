"""A training that cannot learn anything stops, and says why."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from omegaconf import DictConfig
from torch import nn

from dml.errors import UserError
from dml.training.build import build
from dml.training.callbacks.gradient import STEPS, FirstGradient, check_batches
from dml.training.run import run
from tests.conftest import TINY

Configure = Callable[..., DictConfig]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["sampler.m=16"], r"sampler\.batch_size=16 and sampler\.m=16 a batch has images of one class only"),
        (["sampler.m=1", "sampler.batch_size=12"], r"sampler\.m=1 a batch has no two images of a class"),
        (["sampler=uniform", "sampler.batch_size=1"], r"sampler\.batch_size=1 a batch has images of one class"),
        (["sampler.m=16", "loss=contrastive"], "one class only"),
    ],
)
def test_batches_without_pairs(configure: Configure, tmp_path: Path, options: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        run(configure(*TINY, *options), options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["loss=proxy_anchor", "sampler.m=1", "sampler.batch_size=12"],
        ["loss=proxy_nca", "sampler=uniform", "sampler.batch_size=1"],
        ["loss=xbm", "sampler.m=1", "sampler.batch_size=12"],
        ["loss=multi_similarity"],
        ["loss=abe_contrastive", "sampler=abe_pairs"],
    ],
)
def test_losses_that_need_none_and_batches_that_have_them(configure: Configure, options: list[str]) -> None:
    config = configure(*TINY, *options)
    parts = build(config)
    check_batches(config, parts.method, parts.data)


def test_a_loss_without_a_gradient_names_its_options(configure: Configure, tmp_path: Path) -> None:
    options = ["loss=contrastive", "loss.loss.pos_margin=2", "loss.loss.neg_margin=0", "trainer.max_steps=2"]
    with pytest.raises(UserError, match=r"No parameter got a gradient in the first 2 steps.*loss\.loss\.pos_margin=2"):
        run(configure(*TINY, *options), options)
    assert not (tmp_path / "run" / "metrics.json").exists()


@pytest.fixture
def gradient(configure: Configure) -> FirstGradient:
    config = configure(*TINY, "trainer.max_steps=1000")
    return FirstGradient(config, build(config).data)


def test_one_gradient_is_enough(gradient: FirstGradient) -> None:
    module = nn.Linear(2, 2)
    for step in range(1, STEPS):
        gradient.look(module, step)
    module.weight.grad = torch.zeros(2, 2)
    module.weight.grad[0, 0] = 1e-30
    gradient.look(module, STEPS)
    module.weight.grad = None
    gradient.look(module, STEPS + 1)


def test_none_in_the_first_steps(gradient: FirstGradient) -> None:
    module = nn.Linear(2, 2)
    module.weight.grad = torch.zeros(2, 2)
    with pytest.raises(UserError, match=r"nothing to compare with loss\.loss\.alpha="):
        gradient.look(module, STEPS)


def test_a_loss_of_constants(gradient: FirstGradient) -> None:
    gradient.on_before_backward(Mock(), Mock(), torch.ones(1, requires_grad=True))
    with pytest.raises(UserError, match=r"does not depend on any parameter that is trained: see backbone\.train"):
        gradient.on_before_backward(Mock(), Mock(), torch.ones(1))
