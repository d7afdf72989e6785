"""Attention: weights over locations and channels, as pure functions of feature maps."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def select(features: Tensor, dictionary: Tensor, alpha: float) -> Tensor:
    """Soft assignment of every location to the entries of a dictionary by cosine (DIABLO eq. 5, 7, 10, 11).

    `A^(n)_k = exp(alpha cos(f, d^(n)_k)) / sum_l exp(alpha cos(f, d^(l)_k))` with f the features at a location. All
    cosines are one 1x1 convolution of normalised features with normalised entries, so that nothing larger than the
    weights themselves is ever held.

    Args:
        features: `[B,m,h,w]`, phi of the feature map. A location where they all vanish is assigned evenly, and
            below a norm of 1e-3 the assignment fades towards that.
        dictionary: `[N,c,m]`, dimension-wise: an entry has a direction for each of c channels; `[N,1,m]`,
            feature-wise: one direction for them all.
        alpha: hardness of the assignment.

    Returns:
        `[B,N,c,h,w]` or `[B,N,1,h,w]`, in (0,1), with sum 1 over N.
    """
    directions = alpha * F.normalize(dictionary, dim=-1).flatten(0, 1)[:, :, None, None]
    # A ReLU's features can vanish, and the gradient of their direction is 1 / eps: it has to fit into half precision.
    similarities = F.conv2d(F.normalize(features, dim=1, eps=1e-3), directions)
    return similarities.unflatten(1, dictionary.shape[:2]).softmax(dim=1)


class Dictionary(nn.Module):
    """`select` with entries that are learned: `[B,m,h,w] -> [B,N,c,h,w]`.

    Args:
        entries: N.
        channels: c; 1 for feature-wise selection.
        dim: m.
        alpha: hardness of the assignment.
    """

    def __init__(self, entries: int, channels: int, dim: int, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha
        # Directions alone matter, and normal draws are spread evenly over them.
        self.entries = nn.Parameter(torch.randn(entries, channels, dim))

    def forward(self, features: Tensor) -> Tensor:
        return select(features, self.entries, self.alpha)
