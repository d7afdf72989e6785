"""All-CNN-C (Springenberg et al., ICLR 2015 workshop): only convolutions, with strides in place of pooling."""

from torch import nn

from dml.models.backbones.normalize import half
from dml.models.backbones.stages import Backbone
from dml.models.weights import load_weights


def all_conv(*, weights: str = "none", weights_dir: str | None = None) -> Backbone:
    """Builds three stages that end in 192 x 8 x 8 for images of 32 pixels (Table 1, model C, without its last layers).

    Args:
        weights: see `load_weights`. The file has the keys of this module, as a checkpoint of a run has.
    """
    stages: dict[str, nn.Module] = {
        "scale1": nn.Sequential(*_conv(3, 96), *_conv(96, 96), *_conv(96, 96, stride=2)),
        "scale2": nn.Sequential(*_conv(96, 192), *_conv(192, 192), *_conv(192, 192, stride=2)),
        "scale3": nn.Sequential(*_conv(192, 192), *_conv(192, 192, kernel=1)),
    }
    backbone = Backbone(stages, normalize=half(), branch="scale1", attention_depth=1, late_branch="scale2")
    backbone.source = load_weights(backbone, weights, published=None, weights_dir=weights_dir)
    return backbone


def _conv(channels: int, out: int, *, stride: int = 1, kernel: int = 3) -> list[nn.Module]:
    conv = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return [conv, nn.ReLU(inplace=True)]
