"""Attention: weights over locations and channels, as pure functions of feature maps, and regions computed from them.

B images, C channels, h x w cells, H x W pixels.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dml.models.parts import largest_parts
from dml.models.precision import without_autocast


def select(features: Tensor, dictionary: Tensor, alpha: float) -> Tensor:
    """Assigns every location softly to the entries of a dictionary, by cosine (DIABLO eq. 5, 7, 10, 11).

    `A^(n)_k = exp(alpha cos(f, d^(n)_k)) / sum_l exp(alpha cos(f, d^(l)_k))` with f the features at a location. One 1x1
    convolution of normalised features with normalised entries computes all cosines, so that no tensor is larger than
    the resulting weights.

    Args:
        features: `[B,m,h,w]`, phi of the feature map. A location with zero features is assigned evenly to all entries,
            and below a norm of 1e-3 the assignment approaches that.
        dictionary: `[N,c,m]`, dimension-wise: an entry has a direction for each of c channels; `[N,1,m]`,
            feature-wise: one direction for them all.
        alpha: hardness of the assignment.

    Returns:
        `[B,N,c,h,w]` or `[B,N,1,h,w]`, in (0,1), with sum 1 over N.
    """
    directions = alpha * F.normalize(dictionary, dim=-1).flatten(0, 1)[:, :, None, None]
    # Features after a ReLU can be zero; the gradient of their direction is then 1 / eps, and must fit half precision.
    similarities = F.conv2d(F.normalize(features, dim=1, eps=1e-3), directions)
    return similarities.unflatten(1, dictionary.shape[:2]).softmax(dim=1)


class Dictionary(nn.Module):
    """`select` with learned entries: `[B,m,h,w] -> [B,N,c,h,w]`.

    Args:
        entries: N.
        channels: c; 1 for feature-wise selection.
        dim: m.
        alpha: hardness of the assignment.
    """

    def __init__(self, entries: int, channels: int, dim: int, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha
        # Only directions matter. Entries have unit norm, since rates such as the papers' 1e-5 would hardly turn longer
        # ones. They are nearly alike, so that they share locations evenly at the start and learn what to select.
        shared, own = torch.randn(1, channels, dim), torch.randn(entries, channels, dim)
        self.entries = nn.Parameter(F.normalize(shared + 0.1 * own, dim=-1))

    def forward(self, features: Tensor) -> Tensor:
        return select(features, self.entries, self.alpha)


@torch.no_grad()
def object_attention(maps: Tensor, steps: int = 10, locality: float | None = None) -> Tensor:
    """Finds an object by a random walk from every cell to cells with different features (DeML section 3.1, eq. 2, 3).

    The weight of the edge from cell a to cell b is the Euclidean distance of their features, and the weights that leave
    a cell sum to one. Mass flows along them, `M_b <- sum_a M_a D_ab`, from an even start, and gathers at the cells that
    differ from most others. (Eq. 3 as printed, `M <- D M`, never moves any mass, since D's rows sum to one.)

    The result is the mean of the last two states. If cells are of two kinds and alike within each kind, the walk
    alternates between two states for ever, and their mean is still the stationary state.

    Among all cells, those of the kind that covers less than half of the map are the ones that differ from most others,
    be they the object or its background. `locality` compares a cell with its surroundings: weights are multiplied by
    `exp(-d^2 / (2 sigma^2))`, d being the distance of two cells, as in graph-based visual saliency (Harel et al.,
    2007), which the paper cites, and in its released code.

    Args:
        maps: `[B,C,h,w]`, of one layer.
        steps: of the walk.
        locality: sigma, as a share of the map's longer side (released code: 0.15); None: eq. 2 as printed.

    Returns:
        `[B,h,w]` float32, each map with sum one; constant if all features of an image are alike.
    """
    with without_autocast(maps.device):  # distances in bfloat16 would be noise
        return _walked(maps.float(), steps, locality)


def _nearness(height: int, width: int, locality: float, device: torch.device) -> Tensor:
    """Computes the factor of `locality` for each pair of n = h w cells: `[n,n]`."""
    cells = torch.cartesian_prod(torch.arange(height, device=device), torch.arange(width, device=device)).float()
    sigma = locality * max(height, width)
    return torch.exp(-(cells[:, None] - cells).square().sum(-1) / (2 * sigma**2))


def _walked(maps: Tensor, steps: int, locality: float | None) -> Tensor:
    features = maps.flatten(2).mT  # [B,n,C]
    size = features.square().sum(-1).mean(1)[:, None, None]
    features = features - features.mean(1, keepdim=True)  # small distances are then exact too
    squared = features.square().sum(-1)
    squared = squared[:, :, None] + squared[:, None, :] - 2 * features @ features.mT
    others = ~torch.eye(squared.shape[1], dtype=torch.bool, device=maps.device)
    weights = squared.where(others & (squared > 1e-9 * size), 0).sqrt()  # smaller ones are rounding errors
    if locality is not None:
        weights = weights * _nearness(maps.shape[2], maps.shape[3], locality, maps.device)
    leaving = weights.sum(2, keepdim=True)
    count = weights.shape[1]
    walk = torch.where(leaving > 0, weights / leaving, 1 / count)
    mass = before = maps.new_full((maps.shape[0], 1, count), 1 / count)
    for _ in range(steps):
        mass, before = mass @ walk, mass
    return ((mass + before) / 2).unflatten(2, maps.shape[2:]).squeeze(1)


class ObjectAttention(nn.Module):
    """`object_attention` as a module of a network.

    Maps of more than 32 cells a side are averaged over blocks first, since a walk over n cells holds n x n weights per
    image.
    """

    def __init__(self, locality: float | None = None) -> None:
        super().__init__()
        self.locality = locality

    def forward(self, maps: Tensor) -> Tensor:
        """Finds the object in maps `[B,C,h,w]`: `[B,h',w']` with h' and w' at most 32."""
        height, width = maps.shape[2:]
        cells = F.adaptive_avg_pool2d(maps, (min(height, 32), min(width, 32)))
        return object_attention(cells, locality=self.locality)


def object_boxes(proposals: Tensor) -> Tensor:
    """Finds the square around the largest connected part of a proposal that lies above its mean.

    DeML's paper says "cropped&zoomed" (section 3) and no more; the part is its released code's. Pixels that touch at an
    edge or a corner belong to one part. The square has the centre of the part's box and its longer side, so that
    nothing of the object is cut off (released code: the mean of both sides), and is moved inside the image if it
    reaches beyond it (released code: cut off there).

    Args:
        proposals: `[B,H,W]`.

    Returns:
        `[B,4]` int64 on the device of the proposals: left, top, right, bottom, with right and bottom exclusive. If no
        part lies above the mean it is the whole image, or the middle square of an oblong one.
    """
    height, width = proposals.shape[1:]
    mean = proposals.mean((1, 2), keepdim=True)
    above = proposals > mean * (1 + 1e-4)  # the margin keeps a constant map from lying above its mean
    return _squares(largest_parts(above), height, width)


def _squares(boxes: Tensor, height: int, width: int) -> Tensor:
    """Turns boxes `[B,4]` into squares inside the image."""
    start, stop = boxes[:, :2], boxes[:, 2:]
    side = (stop - start).amax(1, keepdim=True).clamp(max=min(height, width))
    start = (start + stop - side) // 2
    start = start.clamp(min=0).minimum(torch.cat([width - side, height - side], dim=1))
    return torch.cat([start, start + side], dim=1)


@torch.no_grad()
def crop_and_zoom(images: Tensor, boxes: Tensor) -> Tensor:
    """Cuts out each image's box and resizes it bilinearly to the image's size: `[B,C,H,W], [B,4] -> [B,C,H,W]`."""
    height, width = images.shape[2:]
    left, right = (boxes[:, ::2].float() / width).unbind(1)  # as shares of the side
    top, bottom = (boxes[:, 1::2].float() / height).unbind(1)
    none = torch.zeros_like(left)
    theta = [right - left, none, left + right - 1, none, bottom - top, top + bottom - 1]
    with without_autocast(images.device):  # in bfloat16 the coordinates would be wrong by pixels
        grid = F.affine_grid(torch.stack(theta, dim=1).unflatten(1, (2, 3)), list(images.shape), align_corners=False)
        zoomed = F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    return zoomed.to(images.dtype)


class ChannelAttention(nn.Module):
    """CAM: weights each channel of a map by a function of the channels' means over the map (DeML section 3.2).

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
        """Weights the channels of maps `[B,C,h,w]`; the shape stays."""
        weights = torch.sigmoid(self.W2(F.relu(self.W1(maps.mean((2, 3))))))
        return maps * weights[:, :, None, None]
