"""Poolings that keep one vector for each of m prototypes: VLAD and optimal transport.

B images, n = h w locations, c width of a local embedding; the result has width m c.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dml.configuration.ranges import Few, Positive
from dml.models.precision import without_autocast


class VLAD(nn.Module):
    """NetVLAD (Arandjelovic et al., CVPR 2016, eq. 4): `[B,c,h,w] -> [B,m c]`, `V_k = sum_j a_k(f_j) (f_j - w_k)`.

    `a` is a softmax of learned linear functions; each V_k is then brought to unit norm (section 3.1).

    Args:
        dim: c.
        prototypes: m.
        alpha: the assignment starts as that of `-alpha |f - w_k|^2` (eq. 2).
    """

    def __init__(self, dim: int, prototypes: int, alpha: Positive = 1.0) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(F.normalize(torch.randn(prototypes, dim)))
        self.assign = nn.Linear(dim, prototypes)
        with torch.no_grad():
            self.assign.weight.copy_(2 * alpha * self.prototypes)
            self.assign.bias.copy_(-alpha * self.prototypes.square().sum(1))

    def forward(self, features: Tensor) -> Tensor:
        cells = features.flatten(2).transpose(1, 2)  # [B,n,c]
        weights = self.assign(cells).softmax(-1)  # [B,n,m]
        residuals = weights.transpose(1, 2) @ cells - weights.sum(1)[..., None] * self.prototypes
        return F.normalize(residuals, dim=-1).flatten(1)


class TransportPool(nn.Module):
    """OTP: all locations are transported to m prototypes with equal mass: `[B,c,h,w] -> [B,m c]` (Mialon et al., ICLR
    2021; GSP eq. B.1: `sqrt(m) [f_1 .. f_n] pi^T`, where `pi` has row sums 1/m and column sums 1/n, at costs
    `|w_i - f_j|`).

    Sinkhorn's iterations compute `pi`, in logarithms and in float32.

    Args:
        dim: c.
        prototypes: m.
        eps: the entropy's weight is 1 / eps.
        iterations: number of Sinkhorn's iterations.
    """

    def __init__(self, dim: int, prototypes: int, eps: Positive = 5.0, iterations: Few = 25) -> None:
        super().__init__()
        self.eps, self.iterations = eps, iterations
        self.prototypes = nn.Parameter(F.normalize(torch.randn(prototypes, dim)))

    def plan(self, cells: Tensor) -> Tensor:
        """Computes pi `[B,m,n]` of cells `[B,n,c]`; its column sums are exact, its row sums only approximate."""
        logits = -self.eps * torch.cdist(self.prototypes.to(cells.dtype).expand(cells.shape[0], -1, -1), cells)
        m, n = logits.shape[1:]
        for _ in range(self.iterations):
            logits = logits - logits.logsumexp(2, keepdim=True) - math.log(m)
            logits = logits - logits.logsumexp(1, keepdim=True) - math.log(n)
        return logits.exp()

    def forward(self, features: Tensor) -> Tensor:
        with without_autocast(features.device):
            cells = features.flatten(2).transpose(1, 2)
            cells = cells.to(torch.promote_types(cells.dtype, torch.float32))
            return (math.sqrt(len(self.prototypes)) * self.plan(cells) @ cells).flatten(1)
