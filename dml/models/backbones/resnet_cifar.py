"""ResNet-20 for 32 x 32 images (He et al. 2016, CVPR, section 4.2), the backbone of GSP's CIFAR Collage."""

import torch.nn.functional as F
from torch import Tensor, nn

from dml.models.backbones.normalize import Normalize
from dml.models.backbones.stages import Backbone
from dml.models.weights import load_weights

WIDTHS = (16, 32, 64)
BLOCKS = 3


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (option A): every stride-th cell, new channels zero."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.subsample = nn.MaxPool2d(1, stride)  # a pooling, since `copy_of` can remove its stride
        self.new_channels = out - channels

    def forward(self, x: Tensor) -> Tensor:
        shortcut = F.pad(self.subsample(x), (0, 0, 0, 0, 0, self.new_channels))
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x)) + shortcut)


def resnet20(*, weights: str = "none", weights_dir: str | None = None) -> Backbone:
    """ResNet-20: 64 x 8 x 8 for 32 x 32 images; stages conv1, layer1_0, ..., layer3_2.

    Args:
        weights: see `load_weights`; keys are this module's own, as in a run's checkpoint.
    """
    conv1 = nn.Sequential(
        nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False), nn.BatchNorm2d(WIDTHS[0]), nn.ReLU(inplace=True)
    )
    stages: dict[str, nn.Module] = {"conv1": conv1}
    channels = WIDTHS[0]
    for group, width in enumerate(WIDTHS, 1):
        for i in range(BLOCKS):
            stages[f"layer{group}_{i}"] = _Block(channels, width, stride=2 if group > 1 and i == 0 else 1)
            channels = width
    for module in nn.ModuleDict(stages).modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    backbone = Backbone(
        stages,
        normalize=Normalize((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),  # of CIFAR-100's training images
        branch="layer1_2",
        attention_depth=BLOCKS,
        late_branch="layer2_2",
    )
    backbone.source = load_weights(backbone, weights, published=None, weights_dir=weights_dir)
    return backbone
