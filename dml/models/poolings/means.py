"""Poolings of each channel without regard to location: means, maxima and generalised means.

timm's `SelectAdaptivePool2d` is not used: it halves the sum of mean and maximum, and has no generalised mean.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dml.configuration.ranges import Count, Positive
from dml.models.precision import without_autocast


class MaxPool(nn.Module):
    """Global maximum (GMP in GSP, Table 6): `[B,C,h,w] -> [B,C,1,1]`.

    `torch.nn.AdaptiveMaxPool2d` is not used: on a GPU its gradient is refused under `trainer.deterministic=true`.
    """

    def forward(self, features: Tensor) -> Tensor:
        return features.flatten(2).max(-1).values[..., None, None]


class AvgMaxPool(MaxPool):
    """Sum of global average and global maximum (GMP+GAP in GSP, Table 6): `[B,C,h,w] -> [B,C,1,1]`."""

    def forward(self, features: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(features, 1) + super().forward(features)


class GeneralizedMeanPool(nn.Module):
    """Generalised mean `(mean x^p)^(1/p)` over locations, with a learned p (Radenovic et al. 2018, eq. 3).

    p = 1 gives the mean of the clamped features, and large p approaches their maximum.

    Args:
        p: initial exponent; must be positive.
        eps: features are clamped from below at this value, so that the power has a gradient.
    """

    def __init__(self, p: Positive = 3.0, eps: Positive = 1e-6) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor([float(p)]))
        self.eps = eps

    def forward(self, features: Tensor) -> Tensor:
        """Pools features: `[B,C,h,w] -> [B,C,1,1]`."""
        return generalized_mean(features.flatten(2), self.p, self.eps)[..., None, None]


def generalized_mean(cells: Tensor, p: Tensor, eps: float) -> Tensor:
    """Computes `(mean x^p)^(1/p)` along the last axis, with x clamped from below at eps: `[B,C,n] -> [B,C]`.

    It is computed relative to the largest value. The power of small values would become 0 otherwise (1e-6 ** 8 does in
    float32), and its root would have no gradient.
    """
    cells = cells.clamp(min=eps)
    largest = cells.detach().amax(-1, keepdim=True)  # the result does not depend on this scale, nor does its gradient
    powers = (cells / largest).pow(p)
    return largest.squeeze(-1) * powers.mean(-1).pow(1 / p)


class Weldon(nn.Module):
    """The mean of the k highest plus the mean of the k lowest values of each channel: `[B,C,h,w] -> [B,C]`
    (Durand et al., CVPR 2016, eq. 2 and 3, with k regions of each kind).

    Args:
        k: number of values of each kind; all of them if there are fewer.
    """

    def __init__(self, k: Count = 3) -> None:
        super().__init__()
        self.k = k

    def forward(self, features: Tensor) -> Tensor:
        cells = features.flatten(2)
        k = min(self.k, cells.shape[-1])
        return cells.topk(k).values.mean(-1) + cells.topk(k, largest=False).values.mean(-1)


class GeneralizedMaxPool(nn.Module):
    """GeMax: the vector whose products with all local embeddings are as equal as possible: `[B,C,h,w] -> [B,C]`
    (Murray et al., TPAMI 2017, eq. 6: `argmin_x |F^T x - 1|^2 + ridge |x|^2`, F the `[C,n]` embeddings).

    Rare local embeddings then count as much as frequent ones. It is solved in the dual form, in float32 at least.

    Args:
        ridge: towards 0 the products become equal; towards infinity the result has the direction of the sum.
    """

    def __init__(self, ridge: Positive = 1.0) -> None:
        super().__init__()
        self.ridge = ridge

    def forward(self, features: Tensor) -> Tensor:
        cells = features.flatten(2)
        cells = cells.to(torch.promote_types(cells.dtype, torch.float32))
        with without_autocast(cells.device):
            kernel = cells.transpose(1, 2) @ cells  # [B,n,n]
            kernel = kernel + self.ridge * torch.eye(kernel.shape[-1], dtype=cells.dtype, device=cells.device)
            ones = torch.ones_like(kernel[..., :1])
            # Not torch.linalg.solve, which waits for the device to learn whether it succeeded.
            return (cells @ torch.linalg.solve_ex(kernel, ones).result).squeeze(-1)
