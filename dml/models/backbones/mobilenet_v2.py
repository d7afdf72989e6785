"""torchvision's MobileNetV2 (Sandler et al. 2018, CVPR): a pre-trained backbone that trains on two CPU cores."""

import torchvision
from torch import nn
from torchvision.models import MobileNet_V2_Weights

from dml.models.backbones.normalize import imagenet
from dml.models.backbones.stages import Backbone, published_names
from dml.models.weights import TORCHVISION, Published, load_weights

URL = MobileNet_V2_Weights.IMAGENET1K_V1.url
# The second file is the same network without its classifier.
PUBLISHED = Published((URL.rpartition("/")[2], "mobilenet_v2_features_imagenet.pth"), URL, licence=TORCHVISION)


def mobilenet_v2(*, weights: str = "imagenet", weights_dir: str | None = None) -> Backbone:
    """MobileNetV2: 1280 x 7 x 7 for 224 x 224 images; stages features0 ... features18.

    Args:
        weights: see `load_weights`; published keys are torchvision's.
    """
    net = torchvision.models.mobilenet_v2(weights=None)
    stages: dict[str, nn.Module] = {f"features{i}": block for i, block in net.features.named_children()}
    backbone = Backbone(
        stages,
        normalize=imagenet(),
        branch="features6",
        attention_depth=7,
        late_branch="features13",
    )
    names = published_names(net.state_dict(keep_vars=True), backbone)
    backbone.source = load_weights(backbone, weights, published=PUBLISHED, weights_dir=weights_dir, names=names)
    return backbone
