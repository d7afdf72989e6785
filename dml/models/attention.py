"""Attention: weights over locations and channels, as pure functions of feature maps, and regions that follow from them.

B images, C channels, h x w cells, H x W pixels.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dml.models.parts import largest_parts
from dml.models.precision import without_autocast


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
        # Directions alone matter. Of unit norm: rates as the papers' 1e-5 turn longer ones by nothing. Nearly alike:
        # entries then share locations evenly at the start, and learn what they select.
        shared, own = torch.randn(1, channels, dim), torch.randn(entries, channels, dim)
        self.entries = nn.Parameter(F.normalize(shared + 0.1 * own, dim=-1))

    def forward(self, features: Tensor) -> Tensor:
        return select(features, self.entries, self.alpha)


@torch.no_grad()
def object_attention(maps: Tensor, steps: int = 10) -> Tensor:
    """Where an object is: a random walk from every cell to cells with unlike features (DeML section 3.1, eq. 2, 3).

    The weight of the edge from cell a to cell b is the Euclidean distance of their features, and the weights that leave
    a cell sum to one. Mass flows along them, `M_b <- sum_a M_a D_ab`, from an even start, and gathers at the cells that
    are unlike most others. (Eq. 3 as printed, `M <- D M`, never moves: D's rows sum to one.)

    The mean of the last two states is returned: where cells are of two kinds and alike within a kind, the walk
    alternates between them for ever, and their mean is the stationary state all the same.

    Args:
        maps: `[B,C,h,w]`, of one layer.
        steps: of the walk.

    Returns:
        `[B,h,w]` float32, each map with sum one; even where all features of an image are alike.
    """
    with without_autocast(maps.device):  # distances in bfloat16 would be noise
        return _walked(maps.float(), steps)


def _walked(maps: Tensor, steps: int) -> Tensor:
    features = maps.flatten(2).mT  # [B,n,C]
    size = features.square().sum(-1).mean(1)[:, None, None]
    features = features - features.mean(1, keepdim=True)  # distances stay, and are exact for small ones too
    squared = features.square().sum(-1)
    squared = squared[:, :, None] + squared[:, None, :] - 2 * features @ features.mT
    weights = squared.where(squared > 1e-9 * size, 0).sqrt()  # less is rounding
    leaving = weights.sum(2, keepdim=True)
    count = weights.shape[1]
    walk = torch.where(leaving > 0, weights / leaving, 1 / count)
    mass = before = maps.new_full((maps.shape[0], 1, count), 1 / count)
    for _ in range(steps):
        mass, before = mass @ walk, mass
    return ((mass + before) / 2).unflatten(2, maps.shape[2:]).squeeze(1)


class ObjectAttention(nn.Module):
    """`object_attention` as a part of a network. Of maps with more than 32 cells a side the means over blocks are
    taken: a walk over n cells holds n x n weights an image."""

    def forward(self, maps: Tensor) -> Tensor:
        """`[B,C,h,w]` -> `[B,h,w]`, at most 32 x 32."""
        height, width = maps.shape[2:]
        return object_attention(F.adaptive_avg_pool2d(maps, (min(height, 32), min(width, 32))))


def object_boxes(proposals: Tensor) -> Tensor:
    """The square around the largest part of a proposal that lies above its mean (DeML section 3.1).

    A part is a set of pixels that touch one another, at corners too. The square is as long as the longer side of the
    part's box and has its centre, moved inside the image where it stands out.

    Args:
        proposals: `[B,H,W]`.

    Returns:
        `[B,4]` int64 on the device of the proposals: left, top, right, bottom, right and bottom exclusive. The whole
        image (of an oblong one its middle square) where nothing stands out.
    """
    height, width = proposals.shape[1:]
    mean = proposals.mean((1, 2), keepdim=True)
    above = proposals > mean * (1 + 1e-4)  # an even map is above its mean nowhere
    return _squares(largest_parts(above), height, width)


def _squares(boxes: Tensor, height: int, width: int) -> Tensor:
    """`[B,4]` boxes as squares inside the image."""
    start, stop = boxes[:, :2], boxes[:, 2:]
    side = (stop - start).amax(1, keepdim=True).clamp(max=min(height, width))
    start = (start + stop - side) // 2
    start = start.clamp(min=0).minimum(torch.cat([width - side, height - side], dim=1))
    return torch.cat([start, start + side], dim=1)


@torch.no_grad()
def crop_and_zoom(images: Tensor, boxes: Tensor) -> Tensor:
    """Each image's box, resized bilinearly to the size of the image: `[B,C,H,W]`, `[B,4]` -> `[B,C,H,W]`."""
    height, width = images.shape[2:]
    left, right = (boxes[:, ::2].float() / width).unbind(1)  # of 1
    top, bottom = (boxes[:, 1::2].float() / height).unbind(1)
    none = torch.zeros_like(left)
    theta = [right - left, none, left + right - 1, none, bottom - top, top + bottom - 1]
    with without_autocast(images.device):  # coordinates in bfloat16 would be pixels off
        grid = F.affine_grid(torch.stack(theta, dim=1).unflatten(1, (2, 3)), list(images.shape), align_corners=False)
        zoomed = F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    return zoomed.to(images.dtype)


class ChannelAttention(nn.Module):
    """CAM: the channels of a map, each weighed by what the whole map holds (DeML section 3.2).

    `U * sigmoid(W2 relu(W1 mean(U)))`, without biases as printed.

    Args:
        channels: C.
        hidden: rows of W1.
    """

    def __init__(self, channels: int, hidden: int = 64) -> None:
        super().__init__()
        self.W1 = nn.Linear(channels, hidden, bias=False)
        self.W2 = nn.Linear(hidden, channels, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        """`[B,C,h,w]` -> the same, weighed."""
        weights = torch.sigmoid(self.W2(F.relu(self.W1(maps.mean((2, 3))))))
        return maps * weights[:, :, None, None]
