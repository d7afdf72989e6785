"""Connected parts of masks, by tensor operations whose number and sizes follow from the size of the mask alone.

B images, H x W pixels. `scipy.ndimage.label` was passed over: it works on the host, for which a GPU would have to wait.

The four pixels of a 2 x 2 block touch one another, so blocks are what is joined: n of them. In each round every part
known so far joins the one of least number that it touches, so that a part of c known ones has at most c/2 afterwards:
rounds are over after log2(n). Parts that join hang in a chain of at most c, which half as many steps shorten each time.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def largest_parts(masks: Tensor) -> Tensor:
    """The box around the largest part of each mask: pixels that touch one another, at corners too.

    Args:
        masks: `[B,H,W]` bool.

    Returns:
        `[B,4]` int64, left, top, right, bottom, right and bottom exclusive; of parts of equal size the one whose first
        pixel comes first; the whole image where the mask is empty.
    """
    height, width = masks.shape[1:]
    padded = F.pad(masks, (0, width % 2, 0, height % 2))
    pixels = torch.stack([padded[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], dim=1)  # [B,4,h,w], of each block
    part = _parts(pixels)  # [B,n]
    image = torch.arange(part.shape[0], device=part.device)[:, None] * part.shape[1]
    number = torch.arange(padded[0].numel(), device=part.device).view(padded.shape[1:])
    numbers = torch.stack([number[i::2, j::2] for i in (0, 1) for j in (0, 1)])  # of pixels, line by line
    first = torch.where(pixels, numbers, padded[0].numel()).amin(1).flatten(1)
    first = torch.full_like(part, padded[0].numel()).scatter_reduce(1, part, first, "amin")
    # Of one axis: that way alone a GPU adds up in a fixed order.
    size = torch.zeros_like(part.flatten()).scatter_add(0, (part + image).flatten(), pixels.sum(1).flatten())
    chosen = (size.view_as(part) * padded[0].numel() - first).argmax(1, keepdim=True)
    inside = (part == chosen).view(pixels[:, 0].shape).repeat_interleave(2, 1).repeat_interleave(2, 2)
    inside = inside[:, :height, :width] & masks | ~masks.any(2, keepdim=True).any(1, keepdim=True)
    (left, right), (top, bottom) = _extent(inside.any(1)), _extent(inside.any(2))
    return torch.stack([left, top, right, bottom], dim=1)


def _parts(pixels: Tensor) -> Tensor:
    """`[B,4,h,w]` -> `[B,n]`, one number for all blocks of a part, that of one of them; empty blocks are alone."""
    size = pixels.shape[2:]
    count = size.numel()
    joined = _joined(pixels)
    own = part = torch.arange(count, device=pixels.device).expand(pixels.shape[0], -1)  # its len() export would fix
    left = count  # the most known parts that one part may have
    while left > 1:
        known = part.int().unflatten(1, size)
        around = _framed(known, count)
        least = torch.full_like(known, count)
        for (down, right), touch in joined:
            beside = _moved(around, down, right)
            least = least.minimum(torch.where(touch & (beside != known), beside, count))
        joins = torch.full_like(part, count).scatter_reduce(1, part, least.flatten(1).long(), "amin")
        joins = torch.where(joins < count, joins, own)
        joins = torch.where((joins.gather(1, joins) == own) & (own < joins), own, joins)  # of each other, one stays
        for _ in range((left - 1).bit_length()):
            joins = joins.gather(1, joins)
        part = joins.gather(1, part)
        left //= 2
    return part


def _joined(pixels: Tensor) -> list[tuple[tuple[int, int], Tensor]]:
    """For each direction, down and right, which blocks touch the one that is there, `[B,h,w]`."""
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
    """`[B,h,w]` -> `[B,h+2,w+2]`."""
    return F.pad(values, (1, 1, 1, 1), value=fill)


def _moved(framed: Tensor, down: int, right: int) -> Tensor:
    """`[B,h+2,w+2]` -> `[B,h,w]`: at each place what is so far down and right of it."""
    height, width = (side - 2 for side in framed.shape[1:])
    return framed[:, 1 + down : 1 + down + height, 1 + right : 1 + right + width]


def _extent(lines: Tensor) -> tuple[Tensor, Tensor]:
    """`[B,n]` bool -> where true cells begin, and where they end, exclusive: `[B]` each."""
    return lines.int().argmax(1), lines.shape[1] - lines.flip(1).int().argmax(1)
