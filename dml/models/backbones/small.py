"""A small plain network for character images of 48 to 64 pixels, trained from scratch on two CPU cores."""

from torch import nn

from dml.models.backbones.normalize import half
from dml.models.backbones.stages import Backbone
from dml.models.weights import load_weights

WIDTHS = (16, 32, 64, 128)


def small(*, weights: str = "none", weights_dir: str | None = None) -> Backbone:
    """Four blocks of 3x3 convolutions, batch norm and ReLU; each of the first three ends with a 2x2 max pooling.

    128 x 6 x 6 for 48 x 48 images. The first block, at full resolution, and the last have one convolution, the others
    two.

    Args:
        weights: see `load_weights`; keys are this module's own, as in a run's checkpoint.
    """
    first, second, third, fourth = WIDTHS
    stages: dict[str, nn.Module] = {
        "block1": nn.Sequential(*_conv(3, first), nn.MaxPool2d(2)),
        "block2": nn.Sequential(*_conv(first, second), *_conv(second, second), nn.MaxPool2d(2)),
        "block3": nn.Sequential(*_conv(second, third), *_conv(third, third), nn.MaxPool2d(2)),
        "block4": nn.Sequential(*_conv(third, fourth)),
    }
    backbone = Backbone(stages, normalize=half(), branch="block2", attention_depth=1, late_branch="block3")
    backbone.source = load_weights(backbone, weights, published=None, weights_dir=weights_dir)
    return backbone


def _conv(channels: int, out: int) -> list[nn.Module]:
    conv = nn.Conv2d(channels, out, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return [conv, nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
