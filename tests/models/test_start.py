"""Networks behind an attention start as the pre-trained ones."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

from dml.configuration.composition import composed
from dml.methods.base import Method
from dml.models.backbones.stages import Backbone, Stages
from dml.models.backbones.start import enlarge_input
from dml.models.backbones.trained import backbone_of

MethodOf = Callable[..., Method]


def made_of(name: str, *options: str) -> Backbone:
    torch.manual_seed(0)
    return backbone_of(
        composed(f"backbone={name}", "backbone.weights=none", "backbone.batch_norm=running", *options).backbone
    )


def given(stages: Stages) -> torch.Tensor:
    return torch.rand(2, stages.in_channels, 6, 6)


@pytest.mark.parametrize("name", ["small", "mobilenet_v2", "googlenet_v1", "bn_inception", "resnet18"])
def test_a_smaller_input_gives_what_the_whole_gave(name: str) -> None:
    backbone = made_of(name)
    _, behind = backbone.split(backbone.branch)
    images, modes = given(behind), [module.training for module in behind.modules()]
    behind.eval()
    before = behind(images)
    behind.train()
    enlarge_input(behind, 4)
    assert [module.training for module in behind.modules()] == modes
    behind.eval()
    torch.testing.assert_close(behind(images / 4), before, rtol=1e-3, atol=1e-3 * float(before.detach().abs().max()))
    assert not torch.allclose(behind(images), before, rtol=1e-3)


@pytest.mark.parametrize("learned", ["none", "last:1", "last:2"])
def test_fixed_stages_before_those_that_learn(learned: str) -> None:
    """What a fixed stage has made of a smaller input, no later batch norm of batches takes out."""
    backbone = made_of("resnet18", "backbone.batch_norm=batch", f"backbone.train={learned}")
    _, behind = backbone.split("layer2_1")
    images = given(behind)
    behind.eval()
    before = behind(images)
    enlarge_input(behind, 2)
    torch.testing.assert_close(behind(images / 2), before, rtol=1e-3, atol=1e-3 * float(before.detach().abs().max()))


def test_an_identity_beside_convolutions_is_told(caplog: pytest.LogCaptureFixture) -> None:
    backbone = made_of("resnet20")
    _, behind = backbone.split("layer1_0")
    before = {name: value.clone() for name, value in behind.state_dict().items()}
    with caplog.at_level(logging.WARNING, logger="dml"):
        enlarge_input(behind, 2)
    assert "Not only convolutions see the input of stage 'layer1_1'" in caplog.text
    assert "or let that stage learn with backbone.batch_norm=batch" in caplog.text
    assert all(torch.equal(before[name], value) for name, value in behind.state_dict().items())


def test_batch_norm_of_batches_takes_it_out_by_itself() -> None:
    backbone = made_of("small", "backbone.batch_norm=batch")
    _, behind = backbone.split(backbone.branch)
    before = {name: value.clone() for name, value in behind.state_dict().items()}
    enlarge_input(behind, 2)
    assert all(torch.equal(before[name], value) for name, value in behind.state_dict().items())


@pytest.mark.parametrize(
    ("options", "share"),
    [
        (["method=abe", "method.M=2"], 1 / 2),
        (["method=mheads_att", "method.M=2"], 1 / 2),
        (["method=diablo", "method.N=4"], 1 / 4),
        (["method=deml", "method.I=1", "method.J=2"], 1 / 2),
    ],
)
def test_methods_start_as_the_plain_network(method_of: MethodOf, options: list[str], share: float) -> None:
    """What follows the attention, given the share that it starts with, is the backbone's."""
    made = method_of(*options, "backbone.batch_norm=running")
    plain = method_of("method=baseline", "backbone.batch_norm=running").backbone
    _, behind = plain.split(plain.branch)
    kinds = [module for module in made.modules() if isinstance(module, Stages)]
    copies = [one for one in kinds if list(one.stages) == list(behind.stages)]
    first = next(module for module in behind.modules() if isinstance(module, nn.Conv2d))
    scales = [next(m for m in one.modules() if isinstance(m, nn.Conv2d)).weight / first.weight for one in copies]
    assert scales
    assert all(torch.allclose(scale, torch.full_like(scale, 1 / share)) for scale in scales)


@pytest.mark.parametrize("selection", ["dimension", "feature"])
def test_a_dictionary_starts_even(method_of: MethodOf, selection: str) -> None:
    method = method_of("method=diablo", "method.N=4", f"method.selection={selection}")
    entries = method.dictionary.entries
    assert torch.allclose(entries.norm(dim=-1), torch.ones(()))
    weights = method.weights(method.F(torch.rand(4, 3, 32, 32)))
    assert (weights - 1 / 4).abs().mean().item() < 0.03
    assert weights.std(dim=1).mean().item() > 1e-3  # entries that are equal would stay equal
