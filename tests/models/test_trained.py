"""How much of a backbone is trained, of convolutional networks and transformers."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch import nn

from dml.errors import UserError
from dml.inference.export import Embedding
from dml.methods.base import Method
from dml.models.backbones.mobilenet_v2 import mobilenet_v2
from dml.models.backbones.resnet import resnet18
from dml.models.backbones.resnet_cifar import resnet20
from dml.models.backbones.small import small
from dml.models.backbones.stages import Backbone
from dml.models.backbones.timm_model import timm_model
from dml.models.backbones.trained import choose_trained, merge_adapters
from dml.training.build import build
from dml.training.complexity import complexity
from tests.conftest import TINY

pytestmark = pytest.mark.usefixtures("one_thread")

MethodOf = Callable[..., Method]
MAKES: dict[str, Callable[[], Backbone]] = {
    "small": small,
    "resnet20": resnet20,
    "mobilenet_v2": lambda: mobilenet_v2(weights="none"),
    "vit": lambda: timm_model(model_name="test_vit", weights="none"),
}
VIT = ["backbone=timm", "backbone.model_name=test_vit", "backbone.weights=none"]


@pytest.fixture(params=MAKES)
def backbone(request: pytest.FixtureRequest) -> Backbone:
    torch.manual_seed(0)
    return MAKES[request.param]()


def trained(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def test_everything_is_trained_by_default(backbone: Backbone) -> None:
    choose_trained(backbone)
    assert trained(backbone) == {name for name, _ in backbone.named_parameters()}


def test_nothing_is_trained(backbone: Backbone) -> None:
    choose_trained(backbone, train="none")
    assert not trained(backbone)
    assert not any(stage.training for stage in backbone.train().stages.values() if list(stage.parameters()))


@pytest.mark.parametrize("count", [1, 2])
def test_the_last_stages_are_trained(backbone: Backbone, count: int) -> None:
    deep = [name for name, stage in backbone.stages.items() if list(stage.parameters())]
    choose_trained(backbone, train=f"last:{count}")
    found = {name.split(".")[1] for name in trained(backbone)}
    assert found == set(deep[-count:])
    modes = {name: backbone.stages[name].training for name in deep}
    assert modes == {name: name in deep[-count:] for name in deep}
    assert [backbone.follows_batches(name) for name in deep[:-count]] == [False] * (len(deep) - count)


def test_norms_alone_are_trained(backbone: Backbone) -> None:
    choose_trained(backbone, train="norm")
    kinds = dict(backbone.named_modules())
    owners = {type(kinds[name.rpartition(".")[0]]) for name in trained(backbone)}
    assert owners in ({nn.BatchNorm2d}, {nn.LayerNorm}, {type(module) for module in backbone.modules()} & owners)
    assert all("Norm" in owner.__name__ for owner in owners)
    assert owners


def test_norms_without_a_mean_are_norms() -> None:
    backbone = timm_model(model_name="test_vit", weights="none", options={"norm_layer": "rmsnorm"})
    choose_trained(backbone, train="norm")
    norms = [name for name, module in backbone.named_modules() if "RmsNorm" in type(module).__name__]
    assert len(norms) > 2
    assert trained(backbone) == {f"{name}.weight" for name in norms}


def test_norms_that_are_frozen_train_nothing() -> None:
    with pytest.raises(UserError, match=r"train=norm trains nothing with backbone\.batch_norm=frozen"):
        choose_trained(small(), train="norm", batch_norm="frozen")


def adapted(make: Callable[[], Backbone], **options: Any) -> tuple[Backbone, Backbone]:
    """With adapters that add something, and without."""
    torch.manual_seed(0)
    plain = make()
    with_adapters = copy.deepcopy(plain)
    choose_trained(with_adapters, train="lora", **options)
    return with_adapters, plain


@pytest.mark.parametrize("make", [MAKES["vit"], small, lambda: resnet18(weights="none")])
def test_adapters_start_as_nothing_and_merge_to_what_they_were(make: Callable[[], Backbone]) -> None:
    net, plain = adapted(make, lora_rank=4, lora_alpha=8.0)
    assert trained(net)
    assert all(".lora." in name for name in trained(net))
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(net.eval()(images), plain.eval()(images))
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    before = net(images)
    assert not torch.allclose(before, plain(images), atol=1e-3)
    merge_adapters(net)
    assert net.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(net(images), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "probe", "options"),
    [
        ("eva02_tiny_patch14_224", 56, {"depth": 2}),
        ("swinv2_tiny_window8_256", 256, {"depths": (1, 1, 1, 1), "embed_dim": 24, "num_heads": (1, 2, 3, 3)}),
        ("vit_small_patch16_dinov3_qkvb", 64, {"depth": 2}),
    ],
)
def test_no_adapter_is_passed_over(name: str, probe: int, options: dict[str, Any]) -> None:
    """These attentions use the weights of `qkv` themselves."""

    def make() -> Backbone:
        return timm_model(model_name=name, weights="none", options=options)

    with pytest.raises(UserError, match=r"qkv can have no adapter"):
        adapted(make, lora_layers=["qkv"])
    net, _ = adapted(make)
    for adapter, parameter in net.named_parameters():
        if "lora_B" in adapter:
            nn.init.normal_(parameter, std=0.05)
    net(torch.rand(1, 3, probe, probe)).square().mean().backward()
    assert [adapter for adapter in trained(net) if net.get_parameter(adapter).grad is None] == []


def test_standardised_convolutions_have_no_adapters() -> None:
    with pytest.raises(UserError, match=r"\.conv1 can have no adapter"):
        adapted(lambda: timm_model(model_name="nfnet_l0", weights="none"), lora_layers=["conv1"])


def test_a_distilled_transformer_keeps_no_classifier() -> None:
    net = timm_model(model_name="deit_tiny_distilled_patch16_224", weights="none", options={"depth": 2})
    net(torch.rand(1, 3, 32, 32)).square().mean().backward()
    assert [name for name, parameter in net.named_parameters() if parameter.grad is None] == []


def test_an_adapter_adds_alpha_over_r_b_a() -> None:
    net, plain = adapted(MAKES["vit"], lora_rank=3, lora_alpha=7.0, lora_layers=["qkv"])
    names = {name.rpartition(".lora_A")[0] for name in trained(net) if "lora_A" in name}
    assert {name.rpartition(".")[2] for name in names} == {"qkv"}
    layer: Any = net.get_submodule(min(names))
    nn.init.normal_(layer.lora_B["lora"].weight)
    x = torch.rand(5, layer.in_features)
    weight = plain.get_submodule(min(names)).weight + 7 / 3 * layer.lora_B["lora"].weight @ layer.lora_A["lora"].weight
    torch.testing.assert_close(layer(x), x @ weight.T + layer.bias, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [["backbone.train=last:1"], ["backbone.train=lora"], ["backbone.train=none"]])
@pytest.mark.parametrize("name", ["abe", "mheads_att", "mtails", "diablo", "deml", "dces", "gsp"])
def test_copies_of_stages_are_trained_as_their_models_are(method_of: MethodOf, name: str, options: list[str]) -> None:
    if name == "mtails" and options != ["backbone.train=lora"]:  # its copies are of the first stages
        with pytest.raises(UserError, match=r"backbone\.train freezes these stages, so all learners would stay equal"):
            method_of(f"method={name}", *options)
        return
    method = method_of(f"method={name}", *options)
    loss = method.embed(torch.rand(4, 3, 32, 32)).square().sum(-1).sqrt().sum()
    (loss + method.learners(method.normalize(torch.rand(4, 3, 32, 32))).raw.sum()).backward()
    graded = {key for key, parameter in method.named_parameters() if parameter.grad is not None}
    assert graded <= trained(method)
    stages = [key for key in trained(method) if ".stages." in key or key.startswith("stages.")]
    if options == ["backbone.train=lora"]:
        assert stages
        assert all(".lora." in key for key in stages)
    if options == ["backbone.train=last:1"]:
        assert {key.partition("stages.")[2].split(".")[0] for key in stages} <= {"block4"}
    if options == ["backbone.train=none"]:
        assert not stages


def test_an_exported_embedding_has_merged_adapters(method_of: MethodOf) -> None:
    method = method_of("method=abe", *VIT, "backbone.train=lora").eval()
    for name, parameter in method.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        expected = method.embed(images).flatten(1) / 2
        network = Embedding(method)
        torch.testing.assert_close(network(images), expected, rtol=1e-5, atol=1e-5)
    assert not any("lora" in name for name in network.state_dict())


def test_trained_parameters_are_counted(method_of: MethodOf) -> None:
    method = method_of("method=baseline", "backbone.train=none")
    found = complexity(method, 32)
    assert found["trained_params"] == sum(p.numel() for p in method.head.parameters())
    assert found["trained_params"] < found["params"]
    assert complexity(method_of("method=baseline"), 32)["trained_params"] == found["params"]


@pytest.mark.parametrize("name", ["baseline", "abe", "deml"])
def test_earlier_stages_learn_more_slowly(configure: Callable[..., DictConfig], name: str) -> None:
    parts = build(configure(*TINY, f"method={name}", "optimizer.layer_decay=0.5", "lr=0.01"))
    method = parts.method
    optimizer = method.optimizer_alone()
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    names = list(small().stages)
    for key, parameter in method.named_parameters():
        if "stages." in key:
            stage = key.partition("stages.")[2].split(".")[0]
            assert rates[id(parameter)] == pytest.approx(0.01 * 0.5 ** (len(names) - 1 - names.index(stage))), key
    assert len(rates) == sum(p.requires_grad for p in method.parameters())
    assert [group["name"] for group in optimizer.param_groups][:1] == [f"backbone {len(names) - 1}"]


def test_one_group_without_a_decay(configure: Callable[..., DictConfig]) -> None:
    groups = build(configure(*TINY)).method.optimizer_alone().param_groups
    assert [group["name"] for group in groups] == ["backbone", "head"]


# --- user errors ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["backbone.train=last:99"], r"backbone\.train=last:99: the backbone has 4 stages with weights \(block1, "),
        (["backbone.train=last:0"], r"backbone\.train=last:0 is unknown: choose all, none, last:N \(N stages\), norm"),
        (["backbone.train=some"], r"backbone\.train=some is unknown"),
        (["backbone.train=lora", "backbone.lora_layers=[nothing]"], r"no layer of the backbone has this name"),
        (["backbone.train=lora", "backbone.lora_layers=[block2]"], r"no layer of the backbone has this name"),
        (["backbone.train=lora", "backbone.lora_layers=[block2.1]"], r"stages\.block2\.1 can have no adapter"),
        (["backbone.train=lora", "backbone.lora_layers=[]"], r"backbone\.lora_layers"),
        (["backbone.batch_norm=no"], r"backbone\.batch_norm=no"),
        (["backbone.lora_rank=0"], r"backbone\.lora_rank=0"),
        (["backbone=googlenet_v1", "backbone.weights=none", "backbone.train=norm"], r"has no norm with weights"),
        (["optimizer.layer_decay=0"], r"optimizer\.layer_decay=0"),
    ],
)
def test_what_cannot_be_trained_is_told(method_of: MethodOf, options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        method_of("method=baseline", *options)


def test_layers_of_adapters_without_adapters_are_told(configure: Callable[..., DictConfig]) -> None:
    with pytest.raises(UserError, match=r"lora_layers=\['block2'\] is for backbone\.train=lora: set both, or leave it"):
        build(configure(*TINY, "backbone.lora_layers=[block2]"))


def test_peft_is_named_where_it_is_missing(method_of: MethodOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"backbone\.train=lora needs peft, .* install '\.\[lora\]'"):
        method_of("method=baseline", "backbone.train=lora")
