"""Poolings that torch.nn lacks: `[B,C,h,w] -> [B,C,1,1]`, like `torch.nn.AdaptiveAvgPool2d(1)`.

timm's `SelectAdaptivePool2d` was passed over: it averages the sum of mean and maximum, and has no
generalised mean.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class AvgMaxPool(nn.Module):
    """Sum of global average and global maximum (GMP+GAP in GSP, Table 6): `[B,C,h,w] -> [B,C,1,1]`."""

    def forward(self, features: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(features, 1) + F.adaptive_max_pool2d(features, 1)


class GeneralizedMeanPool(nn.Module):
    """Generalised mean `(mean x^p)^(1/p)` over locations, p learned (Radenovic et al. 2018, eq. 3).

    p=1 is the average of the clamped features, p towards infinity their maximum.

    Args:
        p: where the exponent starts; must be positive.
        eps: features are clamped from below at this value, so that the power has a gradient.
    """

    def __init__(self, p: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor([float(p)]))
        self.eps = eps

    def forward(self, features: Tensor) -> Tensor:
        """`[B,C,h,w] -> [B,C,1,1]`."""
        return F.adaptive_avg_pool2d(features.clamp(min=self.eps).pow(self.p), 1).pow(1 / self.p)
