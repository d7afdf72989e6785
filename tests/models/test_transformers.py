"""Transformers as stages, against timm and against a loop over images and learners."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from dml.configuration.composition import composed
from dml.errors import UserError
from dml.methods.abe import ABE
from dml.models.backbones.small import small
from dml.models.backbones.stages import Backbone
from dml.models.backbones.timm_model import timm_model
from dml.models.poolings.tokens import ClassToken, ClassTokenAndAverage
from dml.models.tokens import TokenMap, taken
from dml.training.build import build_method
from tests.pretended import pretended

METHODS = ("baseline", "mheads", "mheads_att", "mtails", "abe", "dces", "diablo", "deml", "gsp")


@pytest.fixture(scope="module", params=["test_vit", "test_vit3", "eva02_tiny_patch14_224"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """timm's network with weights unlike the initial ones, and ours from its file, in double precision."""
    torch.manual_seed(0)
    net = timm.create_model(request.param, dynamic_img_size=True)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    file = tmp_path_factory.mktemp("weights") / "net.pth"
    torch.save(net.state_dict(), file)
    ours = timm_model(model_name=request.param, weights=str(file))
    return SimpleNamespace(net=net.eval().double(), ours=ours.eval().double(), patch=net.patch_embed.patch_size[0])


def patches(tokens: Tensor, like: Tensor) -> Tensor:
    """The last of `[B,P+N,C]` as a map."""
    cells = like.shape[2] * like.shape[3]
    return tokens[:, -cells:].transpose(1, 2).unflatten(2, like.shape[2:])


@pytest.mark.parametrize("cells", [(4, 4), (6, 3)])
def test_stages_equal_timm(both: Any, cells: tuple[int, int]) -> None:
    """Each block's patches and other tokens, at sizes for which positions are interpolated."""
    images = torch.rand(2, 3, *(both.patch * n for n in cells), dtype=torch.double)
    theirs = both.net.forward_intermediates(images, return_prefix_tokens=True, intermediates_only=True, norm=False)
    features = both.ours.stages["patches"](images)
    blocks = [stage for name, stage in both.ours.stages.items() if name != "patches"]
    count = both.net.num_prefix_tokens
    for i, (block, (maps, tokens)) in enumerate(zip(blocks, theirs, strict=True)):
        last = i == len(blocks) - 1
        features = block(features)
        ours = taken(features, count)
        if not last:  # timm's last one is before the norm
            torch.testing.assert_close(ours[0], maps)
            torch.testing.assert_close(ours[1], tokens)
    whole = both.net.forward_features(images)
    torch.testing.assert_close(ours[0], patches(whole, ours[0]))
    torch.testing.assert_close(ours[1], whole[:, :count])


def test_gradients_equal_timm(both: Any) -> None:
    images = torch.rand(2, 3, 4 * both.patch, 4 * both.patch, dtype=torch.double)
    weights = torch.rand(2, both.ours.dim, 4, 4, dtype=torch.double)
    gradients = []
    for network in (both.ours, both.net.forward_features):
        seen = images.clone().requires_grad_()
        out = network(seen)
        maps = out.as_subclass(Tensor) if out.dim() == 4 else patches(out, weights)
        (gradient,) = torch.autograd.grad((maps * weights).sum(), seen)
        gradients.append(gradient)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(*gradients)


def vit() -> Backbone:
    torch.manual_seed(0)
    return timm_model(model_name="test_vit", weights="none").eval()


def test_what_a_backbone_of_a_transformer_is() -> None:
    backbone = vit()
    assert list(backbone.stages) == ["patches", *(f"block{i}" for i in range(6))]
    assert set(backbone.stride.values()) == {16}
    assert set(backbone.out_channels.values()) == {backbone.dim}
    copied = backbone.copy_after("block1", 2, keep_resolution=True)
    assert list(copied.stages) == ["block2", "block3"]


@torch.no_grad()
def test_abe_masks_patches_alone_and_each_learner_keeps_its_images_token() -> None:
    """Against a loop: the blocks behind the mask, one image and one learner at a time."""
    config = composed("method=abe", "method.M=3", "backbone=timm", "backbone.model_name=test_vit", "head=cls_avg")
    config.backbone.weights, config.runtime.train_classes, config.head.dim = "none", 2, 12
    torch.manual_seed(0)
    method = build_method(config).eval()
    assert isinstance(method, ABE)
    nn.init.normal_(method.masks.A.weight)  # else masks are 1/2 everywhere
    images = method.normalized(torch.rand(2, 3, 64, 64))
    spatial = method.spatial(images)
    masks = method.masks(spatial)
    found = method.learners(images).embeddings
    for image in range(2):
        tokens = spatial.tokens[image]
        for learner in range(3):
            masked = (spatial[image].as_subclass(Tensor) * masks[image, learner].as_subclass(Tensor)).flatten(1).T
            sequence = torch.cat([tokens, masked])[None]
            for block in method.embedding.stages.values():
                sequence = block.norm(block.block(sequence))
            pooled = torch.cat([sequence[0, 0], sequence[0, 1:].mean(0)])
            expected = nn.functional.normalize(method.head.projection(pooled), dim=0)
            torch.testing.assert_close(found[image, learner], expected, rtol=1e-4, atol=1e-5)


def test_learners_with_tokens_of_their_own_are_told_apart() -> None:
    """As M-tails stacks them, and takes them out again."""
    maps = [TokenMap.of(torch.rand(2, 4, 3, 3), torch.rand(2, 1, 4)) for _ in range(3)]
    stacked = torch.stack(maps, dim=1)
    _, tokens = taken(stacked.flatten(0, 1), 1)
    assert torch.equal(tokens.unflatten(0, (2, 3)), torch.stack([one.tokens for one in maps], dim=1))
    for learner, (taken_out, unbound) in enumerate(
        zip((stacked[:, i] for i in range(3)), stacked.unbind(1), strict=True)
    ):
        assert torch.equal(taken_out.tokens, maps[learner].tokens)  # type: ignore[attr-defined]
        assert torch.equal(unbound.tokens, maps[learner].tokens)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "change", [lambda x: x[[1, 0]], lambda x: x.flip(0), lambda x: torch.cat([x, x]), lambda x: x.mean(0, keepdim=True)]
)
def test_a_map_that_may_have_changed_its_order_has_no_tokens(change: Any) -> None:
    backbone = vit()
    first, rest = backbone.split("block1")
    with pytest.raises(RuntimeError, match="without the tokens"):
        rest(change(first(torch.rand(2, 3, 64, 64))))


def test_heads_of_the_class_token() -> None:
    features = vit()(torch.rand(2, 3, 64, 64))
    token = ClassToken()(features)
    assert torch.equal(token[:, :, 0, 0], features.tokens[:, 0])
    both = ClassTokenAndAverage()(features)
    assert torch.equal(both, torch.cat([token, features.as_subclass(Tensor).mean((2, 3), keepdim=True)], dim=1))
    with pytest.raises(UserError, match="this backbone has none"):
        ClassToken()(small()(torch.rand(2, 3, 64, 64)))


def test_images_that_patches_do_not_fill() -> None:
    with pytest.raises(UserError, match=r"image_size=72: test_vit cuts images into patches of 16 pixels; .* 64 or 80"):
        vit()(torch.rand(1, 3, 72, 72))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_interpolated_positions_have_no_deterministic_gradient_on_a_gpu() -> None:
    """The GPU is pretended."""
    with pretended("cuda"):
        entrance = timm_model(model_name="test_vit", weights="none").stages["patches"].to("cuda")
        native, smaller = torch.rand(1, 3, 160, 160).to("cuda"), torch.rand(1, 3, 80, 80).to("cuda")
        refused = r"test_vit interpolates .* of 80 pixels.*image_size=160 or trainer.deterministic=warn"
        with pytest.raises(UserError, match=refused):
            entrance(smaller)
        assert entrance(native).shape[2:] == (10, 10)
        entrance.requires_grad_(False)
        assert entrance(smaller).shape[2:] == (5, 5)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_on_it(method: str) -> None:
    """Each weight that is to learn gets a gradient, the class token included, which methods know nothing of."""
    options = ["method.I=2", "method.J=2"] if method == "deml" else []
    config = composed(f"method={method}", "backbone=timm", "backbone.model_name=test_vit", *options)
    config.backbone.weights, config.runtime.train_classes, config.head.dim = "none", 4, 16
    torch.manual_seed(0)
    made = build_method(config).train()
    batch = {"label": torch.arange(8) // 2, "index": torch.arange(8)}
    output = made.learners(made.normalized(torch.rand(8, 3, 64, 64)))
    assert type(output.embeddings) is Tensor
    torch.stack(list(made.objective(output, batch).values())).sum().backward()
    token = next(p for name, p in made.named_parameters() if name.endswith("cls_token"))
    assert token.grad is not None
    assert token.grad.abs().max() > 0


@pytest.mark.parametrize("kind", ["state dict", "none"])
def test_weights_of_a_file_are_all_taken(kind: str, tmp_path: Path) -> None:
    net = timm.create_model("test_vit")
    torch.save(net.state_dict() if kind == "state dict" else {"a": torch.zeros(1)}, tmp_path / "net.pth")
    if kind == "none":
        with pytest.raises(UserError):
            timm_model(model_name="test_vit", weights=str(tmp_path / "net.pth"))
        return
    backbone = timm_model(model_name="test_vit", weights=str(tmp_path / "net.pth"))
    theirs = {
        tensor.sum().item() for name, tensor in net.state_dict().items() if not name.startswith(("head", "fc_norm"))
    }
    assert {tensor.sum().item() for tensor in backbone.state_dict().values()} >= theirs
