"""Normalises RGB images in [0, 1] as a network's weights expect."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalize(nn.Module):
    """(x - mean) / std per channel, images [B, 3, H, W] in [0, 1].

    Args:
        mean, std: in units of x; in B, G, R order if `bgr`.
        bgr: reverse the channels first.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], *, bgr: bool = False) -> None:
        super().__init__()
        self.bgr = bgr
        # Not persistent: they belong to the architecture, or to the file of its weights, as `Backbone.colours` says.
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]."""
        if self.bgr:
            images = images.flip(1)
        return (images - self.mean) / self.std


def imagenet() -> Normalize:
    """Mean and standard deviation of ImageNet's channels, as torchvision's weights expect."""
    return Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def half() -> Normalize:
    """Maps [0, 1] to [-1, 1]."""
    return Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def caffe(mean_bgr: Sequence[float]) -> Normalize:
    """Makes Caffe's input: B, G, R in 0..255 minus the channel means `mean_bgr`."""
    return Normalize([m / 255 for m in mean_bgr], [1 / 255] * 3, bgr=True)
