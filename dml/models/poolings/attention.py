"""Poolings whose weights are computed by small networks from the local embeddings: CBAM, DeLF, GSoP and SOLAR.

B images, d channels, n = h w locations.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dml.configuration.ranges import Few, Size
from dml.errors import UserError
from dml.models.poolings.means import GeneralizedMeanPool


class CBAM(nn.Module):
    """Channel attention, then spatial attention, then the mean: `[B,d,h,w] -> [B,d]` (Woo et al., ECCV 2018,
    section 3: one perceptron on means and maxima, a 7x7 convolution on the mean and maximum over channels).

    Args:
        dim: d.
        reduction: the perceptron's hidden layer has d / reduction units.
    """

    def __init__(self, dim: Size, reduction: Size = 16) -> None:
        super().__init__()
        hidden = max(1, dim // reduction)
        self.channels = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, dim))
        self.space = nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, features: Tensor) -> Tensor:
        weights = torch.sigmoid(self.channels(features.mean((2, 3))) + self.channels(features.amax((2, 3))))
        features = features * weights[:, :, None, None]
        views = torch.stack([features.mean(1), features.amax(1)], dim=1)
        return (features * torch.sigmoid(self.space(views))).mean((2, 3))


class DeLF(nn.Module):
    """A weighted sum; a two-layer network with a softplus at its end computes each location's weight:
    `[B,d,h,w] -> [B,d]` (Noh et al., ICCV 2017, section 4.2; here trained together with the features, as GSP does).

    Args:
        dim: d.
        hidden: channels of the first layer.
    """

    def __init__(self, dim: Size, hidden: Size = 512) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Conv2d(dim, hidden, 1), nn.ReLU(inplace=True), nn.Conv2d(hidden, 1, 1))

    def forward(self, features: Tensor) -> Tensor:
        return (features * F.softplus(self.score(features))).mean((2, 3))


class GSoP(nn.Module):
    """Channels weighted by a function of their covariances, then the mean: `[B,d,h,w] -> [B,d]` (Gao et al., CVPR 2019,
    section 3.1: reduce, covariance, row-wise convolution, sigmoid).

    Args:
        dim: d.
        reduced: number of channels whose covariance is computed.
    """

    def __init__(self, dim: Size, reduced: Few = 64) -> None:
        super().__init__()
        self.reduce = nn.Sequential(nn.Conv2d(dim, reduced, 1), nn.BatchNorm2d(reduced), nn.ReLU(inplace=True))
        self.rows = nn.Conv1d(reduced, 4 * reduced, reduced, groups=reduced)  # each row of the covariance to 4 numbers
        self.excite = nn.Linear(4 * reduced, dim)

    def forward(self, features: Tensor) -> Tensor:
        cells = self.reduce(features).flatten(2)
        cells = cells - cells.mean(-1, keepdim=True)
        covariance = cells @ cells.transpose(1, 2) / cells.shape[-1]  # [B,reduced,reduced]
        weights = torch.sigmoid(self.excite(F.leaky_relu(self.rows(covariance).flatten(1), 0.1)))
        return features.mean((2, 3)) * weights


class SOLAR(nn.Module):
    """Second-order attention, then the generalised mean: `[B,d,h,w] -> [B,d,1,1]` (Ng et al., ECCV 2020, section 3.1:
    `f + psi(softmax(alpha q k^T) v)`).

    psi starts at zero, so that training starts from the generalised mean.

    Args:
        dim: d.
        reduction: queries and keys have d / reduction channels.
    """

    def __init__(self, dim: Size, reduction: Size = 2) -> None:
        super().__init__()
        if reduction > dim:
            raise UserError(
                f"head.pooling.reduction={reduction} leaves no channel of a learner's {dim}: make it {dim} or less."
            )
        inner = dim // reduction
        self.query, self.key = (nn.Conv2d(dim, inner, 1) for _ in range(2))
        self.value, self.out = nn.Conv2d(dim, inner, 1), nn.Conv2d(inner, dim, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)  # type: ignore[arg-type]
        self.pool = GeneralizedMeanPool()

    def forward(self, features: Tensor) -> Tensor:
        # torch's attention takes [B,n,c] and scales by 1 / sqrt(c), SOLAR's alpha.
        query, key, value = (layer(features).flatten(2).transpose(1, 2) for layer in (self.query, self.key, self.value))
        seen = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        return self.pool(features + self.out(seen.unflatten(2, features.shape[2:])))
