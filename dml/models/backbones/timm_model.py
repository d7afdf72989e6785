"""Networks of timm: convolutional ones that are a plain sequence, cut at their feature taps, and transformers."""

from typing import Any

import timm
import torch
from timm.models import FeatureListNet
from torch import nn

from dml.errors import UserError
from dml.models.backbones.normalize import Normalize
from dml.models.backbones.stages import Backbone, published_names
from dml.models.backbones.transformer import SEQUENCES, cut
from dml.models.weights import load_weights

REMEDY = (
    "choose a plain convolutional one, such as resnet50d, regnety_008, efficientnet_b0 or densenet121, or a "
    "transformer of one resolution, such as vit_small_patch16_224"
)
PATCHES = 4  # on a side of the blank image on which a transformer is measured


def timm_model(*, model_name: str, weights: str = "imagenet", weights_dir: str | None = None) -> Backbone:
    """Network `model_name` of timm; a stage ends at each feature tap and bears the name of the module there.

    Of a transformer, `patches` is followed by a stage a block, and the final norm is in the last one. The tokens of its
    class and registers travel beside the map (`dml.models.tokens`). Attention methods branch after a third of its
    blocks and copy the next quarter, or branch late, before the last sixth.

    Of others, attention methods branch after the third stage from the end and copy the next one, the counterparts of
    ResNet's layer2 and layer3, or branch late, after the second from the end.

    Args:
        weights: `imagenet` is timm's own default for the model, cached in `weights_dir`; else see `load_weights`:
            published keys are those of the plain timm model.

    Raises:
        UserError: no such model, no weights, or a model that is no plain sequence (Swin, HRNet, ...).
    """
    with torch.device("meta"):
        plain = timm.create_model(model_name) if timm.is_model(model_name) else None
    if isinstance(plain, SEQUENCES):
        return _transformer(model_name, weights, weights_dir)
    net = _features(model_name, weights == "imagenet", weights_dir)
    stages = _cut(net)
    names = list(stages)
    try:
        backbone = Backbone(
            stages,
            normalize=Normalize(net.pretrained_cfg["mean"], net.pretrained_cfg["std"]),
            branch=names[-3],
            attention_depth=1,
            late_branch=names[-2],
        )
        in_order = list(backbone.out_channels.values()) == net.feature_info.channels()
    except (RuntimeError, AssertionError, AttributeError, IndexError):  # not [B, C, h, w] from stage to stage
        in_order = False
    if not in_order:
        raise UserError(f"timm's {model_name} is no sequence of convolutional stages: {REMEDY}.")
    if weights not in ("none", "imagenet"):
        names_there, rest = _plain_names(model_name, published_names(net.state_dict(keep_vars=True), backbone))
        load_weights(backbone, weights, published=None, weights_dir=weights_dir, names=names_there, ignore=rest)
    return backbone


def _transformer(model_name: str, weights: str, weights_dir: str | None) -> Backbone:
    """One of patches, which every block sees."""
    net = _made(model_name, pretrained=weights == "imagenet", cache_dir=weights_dir, dynamic_img_size=True)
    config, published = net.pretrained_cfg, net.state_dict(keep_vars=True)
    patch, blocks = net.patch_embed.feat_ratio(), len(net.blocks)
    backbone = Backbone(
        cut(net, model_name),
        normalize=Normalize(config["mean"], config["std"]),
        branch=f"block{max(1, blocks // 3) - 1}",
        attention_depth=max(1, blocks // 4),
        late_branch=f"block{blocks - max(1, blocks // 6) - 1}",
        probe=PATCHES * patch,
    )
    if weights not in ("none", "imagenet"):
        names, rest = _plain_names(model_name, published_names(published, backbone))
        load_weights(backbone, weights, published=None, weights_dir=weights_dir, names=names, ignore=rest)
    return backbone


def _features(model_name: str, pretrained: bool, cache_dir: str | None) -> Any:
    """timm's feature extractor, as a flat sequence of modules (a `FeatureListNet`)."""
    if not timm.is_model(model_name):
        raise UserError(f"timm has no model '{model_name}': {REMEDY}.")
    wanted: dict[str, Any] = {"pretrained": pretrained, "features_only": True, "cache_dir": cache_dir}
    try:
        net = _made(model_name, **wanted)
        if not isinstance(net, FeatureListNet):  # EfficientNet and MobileNet bring wrappers of their own
            flat = {"feature_cls": "list", "flatten_sequential": True}
            net = _made(model_name, feature_cfg=flat, **wanted)
    except (AssertionError, TypeError):  # the taps are no direct children; no feature_cfg is taken
        raise UserError(f"timm's {model_name} is no sequence of convolutional stages: {REMEDY}.") from None
    return net


def _made(model_name: str, **options: Any) -> Any:
    """What timm makes. Raises UserError where it has no weights."""
    try:
        return timm.create_model(model_name, **options)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"timm cannot give {model_name} its weights ({str(error).rstrip('.')}): set backbone.weights=none or to "
            "the path of a file."
        ) from None


def _cut(net: Any) -> dict[str, nn.Module]:
    """The children of `net`, in groups that end at its feature taps."""
    stages: dict[str, nn.Module] = {}
    group: list[nn.Module] = []
    for name, module in net.items():
        group.append(module)
        if name in net.return_layers:
            stages[name] = nn.Sequential(*group)
            group = []
    return stages


def _plain_names(model_name: str, names: dict[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Keys of the plain model -> ours, and those of its part after the last tap.

    The feature extractor writes the first dot of some keys as an underscore (blocks.0 -> blocks_0).
    """
    with torch.device("meta"):
        plain = timm.create_model(model_name).state_dict()
    flat = {key: key if key in names else key.replace(".", "_", 1) for key in plain}
    ours = {key: names[there] for key, there in flat.items() if there in names}
    return ours, tuple(key for key in plain if key not in ours)
