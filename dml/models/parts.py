"""Finds connected parts of masks by tensor operations whose number and sizes depend on the size of the mask alone.

B images, H x W pixels. `scipy.ndimage.label` is not used: it works on the host, for which a GPU would have to wait.

The four pixels of a 2 x 2 block touch one another, so the algorithm joins n blocks instead of pixels. In each round
every part known so far joins the touching part with the lowest number. What will be one part and consists of c known
parts then has at most c/2 of them, so that log2(n) rounds are enough. Parts that join form chains of at most c links,
and each step of following links halves a chain.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def largest_parts(masks: Tensor) -> Tensor:
    """Finds the box around the largest connected part of each mask; pixels that touch at corners are connected too.

    Args:
        masks: `[B,H,W]` bool.

    Returns:
        `[B,4]` int64: left, top, right, bottom, with right and bottom exclusive. Among parts of equal size it is the
        one whose first pixel comes first; for an empty mask it is the whole image.
    """
    height, width = masks.shape[1:]
    padded = F.pad(masks, (0, width % 2, 0, height % 2))
    pixels = torch.stack(
        [padded[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], dim=1
    )  # [B,4,h,w], the pixels of each block
    part = _parts(pixels)  # [B,n]
    image = torch.arange(part.shape[0], device=part.device)[:, None] * part.shape[1]
    number = torch.arange(padded[0].numel(), device=part.device).view(padded.shape[1:])
    numbers = torch.stack([number[i::2, j::2] for i in (0, 1) for j in (0, 1)])  # numbers of the pixels, line by line
    first = torch.where(pixels, numbers, padded[0].numel()).amin(1).flatten(1)
    first = torch.full_like(part, padded[0].numel()).scatter_reduce(1, part, first, "amin")
    # On one axis, since only then a GPU adds up in a fixed order.
    size = torch.zeros_like(part.flatten()).scatter_add(0, (part + image).flatten(), pixels.sum(1).flatten())
    chosen = (size.view_as(part) * padded[0].numel() - first).argmax(1, keepdim=True)
    inside = (part == chosen).view(pixels[:, 0].shape).repeat_interleave(2, 1).repeat_interleave(2, 2)
    inside = inside[:, :height, :width] & masks | ~masks.any(2, keepdim=True).any(1, keepdim=True)
    (left, right), (top, bottom) = _extent(inside.any(1)), _extent(inside.any(2))
    return torch.stack([left, top, right, bottom], dim=1)


def _parts(pixels: Tensor) -> Tensor:
    """Numbers the blocks of pixels `[B,4,h,w]` by their part: `[B,n]`, the number of one of the part's blocks.

    An empty block is a part of its own.
    """
    size = pixels.shape[2:]
    count = size.numel()
    joined = _joined(pixels)
    own = part = torch.arange(count, device=pixels.device).expand(
        pixels.shape[0], -1
    )  # not len(), which an export would fix
    left = count  # the most known parts that one final part may consist of
    while left > 1:
        known = part.int().unflatten(1, size)
        around = _framed(known, count)
        least = torch.full_like(known, count)
        for (down, right), touch in joined:
            beside = _moved(around, down, right)
            least = least.minimum(torch.where(touch & (beside != known), beside, count))
        joins = torch.full_like(part, count).scatter_reduce(1, part, least.flatten(1).long(), "amin")
        joins = torch.where(joins < count, joins, own)
        joins = torch.where(
            (joins.gather(1, joins) == own) & (own < joins), own, joins
        )  # of two that join each other, one stays
        for _ in range((left - 1).bit_length()):
            joins = joins.gather(1, joins)
        part = joins.gather(1, part)
        left //= 2
    return part


def _joined(pixels: Tensor) -> list[tuple[tuple[int, int], Tensor]]:
    """Returns for each direction (down, right) which blocks `[B,h,w]` touch their neighbour there."""
    a, b, c, d = pixels.unbind(1)  # a b above c d
    found = []
    for (down, right), ours, theirs in (
        ((0, 1), b | d, a | c),
        ((1, 0), c | d, a | b),
        ((1, 1), d, a),
        ((1, -1), c, b),
    ):
        found.append(((down, right), ours & _moved(_framed(theirs, False), down, right)))
        found.append(((-down, -right), theirs & _moved(_framed(ours, False), -down, -right)))
    return found


def _framed(values: Tensor, fill: float) -> Tensor:
    """Adds a frame of `fill`: `[B,h,w] -> [B,h+2,w+2]`."""
    return F.pad(values, (1, 1, 1, 1), value=fill)


def _moved(framed: Tensor, down: int, right: int) -> Tensor:
    """Returns at each place the value that lies `down` and `right` of it: `[B,h+2,w+2] -> [B,h,w]`."""
    height, width = (side - 2 for side in framed.shape[1:])
    return framed[:, 1 + down : 1 + down + height, 1 + right : 1 + right + width]


def _extent(lines: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where the true cells of `[B,n]` begin, and where they end (exclusive), `[B]` each."""
    return lines.int().argmax(1), lines.shape[1] - lines.flip(1).int().argmax(1)
