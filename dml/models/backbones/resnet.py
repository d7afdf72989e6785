"""torchvision's ResNet-18 and ResNet-50 (He et al. 2016, CVPR), with one stage per residual block."""

import torchvision
from torch import nn
from torchvision.models import ResNet, ResNet18_Weights, ResNet50_Weights

from dml.models.backbones.normalize import imagenet
from dml.models.backbones.stages import Backbone, published_names
from dml.models.weights import TORCHVISION, Published, load_weights


def resnet18(*, weights: str = "imagenet", weights_dir: str | None = None) -> Backbone:
    """ResNet-18: 512 x 7 x 7 for 224 x 224 images; stages conv1, pool1, layer1_0, layer1_1, ..., layer4_1.

    Args:
        weights: see `load_weights`; published keys are torchvision's.
    """
    net = torchvision.models.resnet18(weights=None)
    return _backbone(net, ResNet18_Weights.IMAGENET1K_V1.url, weights, weights_dir)


def resnet50(*, weights: str = "imagenet", weights_dir: str | None = None) -> Backbone:
    """ResNet-50: 2048 x 7 x 7 for 224 x 224 images; stages conv1, pool1, layer1_0, ..., layer4_2.

    `imagenet` is torchvision's first set of weights (76.1 % top-1), which most papers on retrieval start from.

    Args:
        weights: see `load_weights`; published keys are torchvision's.
    """
    net = torchvision.models.resnet50(weights=None)
    return _backbone(net, ResNet50_Weights.IMAGENET1K_V1.url, weights, weights_dir)


def _backbone(net: ResNet, url: str, weights: str, weights_dir: str | None) -> Backbone:
    stages: dict[str, nn.Module] = {"conv1": nn.Sequential(net.conv1, net.bn1, net.relu), "pool1": net.maxpool}
    for layer in ("layer1", "layer2", "layer3", "layer4"):
        stages |= {f"{layer}_{i}": block for i, block in net.get_submodule(layer).named_children()}
    backbone = Backbone(
        stages,
        normalize=imagenet(),
        # At strides 8 and 16, so that the attention module is a copy of layer3; GoogLeNet's is a copy of 4a-4e.
        branch=f"layer2_{len(net.layer2) - 1}",
        attention_depth=len(net.layer3),
        late_branch=f"layer3_{len(net.layer3) - 1}",
    )
    published = Published((url.rpartition("/")[2],), url, licence=TORCHVISION)
    names = published_names(net.state_dict(keep_vars=True), backbone)
    backbone.source = load_weights(backbone, weights, published=published, weights_dir=weights_dir, names=names)
    return backbone
