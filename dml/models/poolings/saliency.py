"""Poolings that weight locations by the magnitude of the backbone's features: CroW and trainable SMK.

B images, C channels, n = h w locations.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dml.configuration.ranges import Positive


class CroW(nn.Module):
    """Cross-dimensional weighting (Kalantidis et al., ECCVW 2016, section 4): `[B,C,h,w] -> [B,C]`.

    Locations are weighted by the sum S' of their channels, `S = (S' / |S'|)^(1/2)` (a = b = 2). Channels are weighted
    by how rarely they respond, `log(sum_k Q_k / Q_c)` with Q the share of locations where a channel is above 0. It is
    meant for features after a ReLU: negative values count as 0.

    Args:
        eps: keeps quotients finite.
    """

    def __init__(self, eps: Positive = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, features: Tensor) -> Tensor:
        cells = F.relu(features.flatten(2))
        saliency = cells.sum(1)  # [B,n]
        weights = (saliency / (torch.linalg.vector_norm(saliency, dim=1, keepdim=True) + self.eps) + self.eps).sqrt()
        share = (cells > 0).to(cells.dtype).mean(-1)  # [B,C]
        rarity = ((share.sum(1, keepdim=True) + self.eps) / (share + self.eps)).log()
        return rarity * (cells * weights[:, None]).sum(-1)


class TrainableSMK(nn.Module):
    """The training side of HOW (Tolias et al., ECCV 2020, section 4): `[B,C,h,w] -> [B,C]`.

    Local features are smoothed over 3 x 3 cells and averaged with the norms of the unsmoothed features as weights. The
    linear layer that follows takes the place of the paper's whitening.
    """

    def forward(self, features: Tensor) -> Tensor:
        weights = torch.linalg.vector_norm(features, dim=1, keepdim=True)
        smooth = F.avg_pool2d(features, 3, stride=1, padding=1, count_include_pad=False)
        return (smooth * weights).mean((2, 3))
