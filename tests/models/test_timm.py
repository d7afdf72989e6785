"""Networks of timm as stages, against timm's own forward pass, and one of them counted by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from dml.configuration.composition import CONF
from dml.errors import UserError
from dml.methods.base import Method
from dml.models.backbones.sequence import Merging
from dml.models.backbones.timm_model import timm_model
from dml.training.build import build_method
from dml.training.complexity import complexity
from dml.training.description import describe

pytestmark = pytest.mark.usefixtures("one_thread")

FILES = {
    path.stem: OmegaConf.load(path)
    for path in sorted((CONF / "backbone").glob("*.yaml"))
    if "model_name" in OmegaConf.load(path)
}
LIKE_OTHERS = ("vit_small", "deit_small", "dinov2_base", "clip_base", "swin_tiny", "convnext_tiny")  # in other sizes
READY = [pytest.param(name, {}, marks=pytest.mark.exhaustive if name in LIKE_OTHERS else (), id=name) for name in FILES]
SHALLOW = {"clip_base": {"depth": 2}, "dinov2_base": {"depth": 2}}
OTHERS = {  # timm's name: options
    "swinv2_tiny_window8_256": {"depths": [1, 2, 1, 1]},
    "maxvit_pico_rw_256": {"depths": [1, 1, 1, 1]},
    "regnety_002": {},
    "regnetx_002": {},
    "tf_efficientnet_lite0": {},
    "test_convnext": {},
    "test_efficientnet": {},
    "test_resnet": {},
    "densenet121": {},
    "mobilenetv3_small_050": {},
}


def theirs(network: Any, images: Tensor) -> Tensor:
    """timm's features as a map `[B,C,h,w]`."""
    features = network.forward_features(images)
    if getattr(network, "output_fmt", "NCHW") == "NHWC":
        return features.permute(0, 3, 1, 2)
    if features.dim() == 3:
        side = images.shape[-2] // network.patch_embed.patch_size[0]
        return features[:, network.num_prefix_tokens :].transpose(1, 2).unflatten(2, (side, -1))
    return features


def both(name: str, options: dict[str, Any], folder: Path) -> tuple[Any, Any]:
    """timm's network with weights unlike the initial ones, and ours from its file."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"dynamic_img_size": True} if name.startswith(("vit", "deit")) else {}
    sizes |= {"strict_img_size": False, "drop_path_rate": 0.0} if name.startswith("swin") else {}
    network = timm.create_model(name, **options, **sizes)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.2, 0.2)  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
    torch.save(network.state_dict(), folder / "net.pth")
    ours = timm_model(model_name=name, weights=str(folder / "net.pth"), options=options)
    return network.double().eval(), ours.double().eval()


def assert_equal(name: str, options: dict[str, Any], sizes: tuple[int, int], folder: Path) -> None:
    """The features, and the gradients that reach the image and all weights."""
    network, ours = both(name, options, folder)
    for size in sizes:
        images = torch.rand(2, 3, size, size, dtype=torch.double)
        found = []
        for run in (ours, lambda x: theirs(network, x)):
            seen = images.clone().requires_grad_()
            features = run(seen).as_subclass(Tensor)
            weights = torch.rand(features.shape, dtype=torch.double, generator=torch.Generator().manual_seed(1))
            (features * weights).sum().backward()
            assert seen.grad is not None
            found.append((features.detach(), seen.grad))
        for one, other in zip(*found, strict=True):
            assert other.abs().max() > 0
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
    named = dict(network.named_parameters())
    gradients = sorted(float(p.grad.square().sum()) for p in ours.parameters())
    expected = sorted(float(p.grad.square().sum()) for p in named.values() if p.grad is not None)
    torch.testing.assert_close(torch.tensor(gradients), torch.tensor(expected), rtol=1e-4, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), READY)
def test_a_ready_file_equals_timm(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    sizes = (28, 56) if name.startswith("dinov2") else (32, 64)
    assert_equal(FILES[name].model_name, SHALLOW.get(name, options), sizes, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_equal_timm(name: str, tmp_path: Path) -> None:
    sizes = (256, 256) if name.startswith("maxvit") else (32, 64)
    assert_equal(name, OTHERS[name], sizes, tmp_path)


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_merging_at_every_cell(name: str) -> None:
    """Against a loop: what the merging makes of each cell, those right of it and below it, the last repeated."""
    timms = timm.create_model(name).layers[1].downsample.double()
    ours = Merging(timms)
    x = torch.rand(2, 4, 6, 96, dtype=torch.double)
    torch.testing.assert_close(ours(x), timms(x), rtol=0, atol=0)
    ours.keep_resolution()
    found = ours(x)
    assert found.shape == (2, 4, 6, 192)
    for i in range(4):
        for j in range(6):
            rows, columns = [i, min(i + 1, 3)], [j, min(j + 1, 5)]
            torch.testing.assert_close(found[:, i, j], timms(x[:, rows][:, :, columns])[:, 0, 0])


def test_patches_of_cells_at_every_cell() -> None:
    """ConvNeXt's convolution of 2 x 2 cells, as in its attention copy: the cells of even places are the network's."""
    backbone = timm_model(model_name="test_convnext", weights="none").eval()
    name = "stages_1_downsample"
    copied = backbone.copy_of(name, name, keep_resolution=True)
    x = torch.rand(1, copied.in_channels, 6, 8)
    with torch.no_grad():
        every, own = copied(x), backbone.stages[name](x)
    assert every.shape[2:] == (6, 8)
    torch.testing.assert_close(every[:, :, ::2, ::2], own)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnext_tiny", "swin_tiny"])
def test_abe_masks_convnext_and_swin(configure: Callable[..., DictConfig], name: str) -> None:
    """Masks of the resolution of S, and learners that part."""
    options = [f"backbone={name}", "backbone.weights=none", "+backbone.options.depths=[1,2,2,1]", "method.M=2"]
    config = configure("method=abe", *options, "head.dim=16", "runtime.train_classes=3")
    torch.manual_seed(0)
    method: Any = build_method(config).eval()
    images = method.normalized(torch.rand(2, 3, 64, 64))
    with torch.no_grad():
        assert method.masks(method.spatial(images)).shape == (2, 2, 192, 8, 8)
        learners = method.learners(images).embeddings
    assert learners.shape == (2, 2, 8)
    assert not torch.allclose(learners[:, 0], learners[:, 1])


@pytest.mark.slow
def test_nothing_is_dropped_at_random_unless_asked() -> None:
    small = {"depths": [1, 1, 1, 1]}
    images = torch.rand(4, 3, 64, 64)
    for options, same in ((small, True), (small | {"drop_path_rate": 0.5}, False)):
        backbone = timm_model(model_name="swin_tiny_patch4_window7_224", weights="none", options=options).train()
        assert torch.equal(backbone(images), backbone(images)) == same


def test_a_register_is_no_class_token(configure: Callable[..., DictConfig]) -> None:
    net = ["backbone=timm", "backbone.model_name=vit_little_patch16_reg4_gap_256", "backbone.weights=none"]
    options = [*net, "+backbone.options={depth: 2}", "method=baseline", "head=cls", "head.dim=8"]
    config = configure(*options, "runtime.train_classes=2", "image_size=32")
    with pytest.raises(UserError, match=r"use the class token, but this backbone has none: choose head=avg\."):
        build_method(config)


# --- counted by hand ---


@pytest.mark.slow
def test_flops_of_a_vit_are_those_of_the_formula(configure: Callable[..., DictConfig]) -> None:
    """DeiT-S at 224: N patches of p x p, T = N + 1 tokens of width C; for each of 12 blocks qkv 3TC^2, the products of
    queries and keys, and of what they weigh, T^2 C each, the projection TC^2, the MLP 2 x 4TC^2."""
    options = ["backbone=deit_small", "backbone.weights=none", "method=baseline", "head=cls", "head.dim=64"]
    config = configure(*options, "runtime.train_classes=2", "image_size=224")
    method: Method = build_method(config)
    pieces, total = describe(method, 224)
    patch, width, patches = 16, 384, 14 * 14
    tokens = patches + 1
    embedding = patches * 3 * patch**2 * width
    block = 3 * tokens * width**2 + 2 * tokens**2 * width + tokens * width**2 + 2 * 4 * tokens * width**2
    head = width * 64
    of_pieces = {piece.name.split(".")[-1]: piece for piece in pieces}
    assert of_pieces["patches"].flops == embedding
    assert {of_pieces[f"block{i}"].flops for i in range(12)} == {block}
    assert total["flops"] == embedding + 12 * block + head
    layers = 4 * width + (width * 3 * width + 3 * width) + (width**2 + width) + 8 * width**2 + 5 * width  # norms first
    parameters = (3 * patch**2 + 1) * width + (tokens + 1) * width + 12 * layers + 2 * width + (width + 1) * 64
    assert total["params"] == parameters


# --- user errors ---


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_model", "timm has no model 'no_such_model'"),
        ("test_resnet.foo", "timm cannot make test_resnet.foo"),
        ("hrnet_w18_small", "no chain of blocks from the image to a map"),
        ("mixer_s16_224", "no chain of blocks"),
        ("test_vit_relpos", "no chain of blocks"),
    ],
)
def test_networks_that_give_no_map(name: str, said: str) -> None:
    with pytest.raises(UserError, match=f"{said}.*choose a network of blocks") as caught:
        timm_model(model_name=name, weights="none")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("swin_tiny_patch4_window7_224", 50, r"image_size=50: .* patches of 4 pixels; choose 48 or 52"),
        ("maxvit_pico_rw_256", 48, r"image_size=48: .* windows of 8 cells, images into 256 pixels; choose 256"),
    ],
)
def test_images_that_do_not_fit(name: str, size: int, said: str) -> None:
    backbone = timm_model(model_name=name, weights="none", options={"depths": [1, 1, 1, 1]})
    with pytest.raises(UserError, match=said):
        backbone(torch.rand(1, 3, size, size))


@pytest.mark.parametrize(
    ("name", "probe", "said"),
    [
        ("test_vit", 17, "no multiple of a patch's 16 pixels"),
        ("resnet18", 16, "no multiple of all strides of resnet18"),
    ],
)
def test_probes_that_do_not_fit(name: str, probe: int, said: str) -> None:
    with pytest.raises(UserError, match=rf"backbone\.probe={probe} is {said}"):
        timm_model(model_name=name, weights="none", probe=probe)


def test_the_size_of_images_is_told_before_a_run(configure: Callable[..., DictConfig]) -> None:
    options = ["backbone=dinov2_small", "backbone.weights=none", "+backbone.options.depth=2", "method=baseline"]
    config = configure(*options, "runtime.train_classes=2")
    assert config.image_size == 56  # as data sets of characters have it for this backbone
    method = build_method(config)
    assert complexity(method, config.image_size)["flops"] > 0
    with pytest.raises(UserError, match=r"image_size=48: .* patches of 14 pixels; choose 42 or 56"):
        complexity(method, 48)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"depht": 2}, "refuses them"),
        ({"num_heads": 5}, "refuses them"),
        ({"norm_layer": "foo"}, "refuses them"),
        ({"checkpoint_path": "/x"}, r"^backbone\.options\.checkpoint_path is no option of an architecture"),
        ({"dynamic_img_size": True}, r"^backbone\.options\.dynamic_img_size is no option of an architecture"),
        ({"depth": 1}, r"^test_vit has one block, .*: set backbone\.options\.depth to more"),
    ],
)
def test_options_of_no_architecture(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        timm_model(model_name="test_vit", weights="none", options=options)


@pytest.mark.slow
def test_weights_of_another_architecture(tmp_path: Path) -> None:
    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "resnet.pth")
    for name in ("test_vit", "test_convnext", "swin_tiny_patch4_window7_224"):
        with pytest.raises(UserError, match=r"resnet\.pth is not of this backbone") as caught:
            timm_model(model_name=name, weights=str(tmp_path / "resnet.pth"))
        assert "\n" not in str(caught.value)
