"""torchvision's GoogLeNet: with batch norm, and 3x3 kernels where the original has 5x5 (pytorch/vision#906)."""

import torchvision
from torch import nn
from torchvision.models import GoogLeNet_Weights

from dml.models.backbones.normalize import half
from dml.models.backbones.stages import Backbone, published_names
from dml.models.weights import TORCHVISION, Published, load_weights

URL = GoogLeNet_Weights.IMAGENET1K_V1.url
PUBLISHED = Published((URL.rpartition("/")[2],), URL, licence=TORCHVISION)


def googlenet(*, weights: str = "imagenet", weights_dir: str | None = None) -> Backbone:
    """GoogLeNet with batch norm: 480 x 14 x 14 after pool3 and 1024 x 7 x 7 at the end for 224 x 224 images.

    Args:
        weights: see `load_weights`; published keys are torchvision's.
    """
    net = torchvision.models.googlenet(weights=None, aux_logits=False, init_weights=True)
    unused = ("avgpool", "dropout", "fc", "aux1", "aux2")
    stages: dict[str, nn.Module] = {
        name.replace("maxpool", "pool"): module for name, module in net.named_children() if name not in unused
    }
    # The weights come from TensorFlow: with torchvision's transform_input, mean and deviation are 0.5 and 0.5.
    backbone = Backbone(stages, normalize=half(), branch="pool3", attention_depth=5, late_branch="pool4")
    names = published_names(net.state_dict(keep_vars=True), backbone)
    backbone.source = load_weights(backbone, weights, published=PUBLISHED, weights_dir=weights_dir, names=names)
    return backbone
