"""Resizes and crops views of many pictures at once, on any device, with the same bits as Pillow.

Pillow resizes with antialiasing in two passes, along the rows and along the columns (`src/libImaging/Resample.c`). Each
result is a weighted sum under a triangle filter whose width follows from the scale. The weights are rounded to 22 bits,
and the sums, of whole numbers, to 8 bits after each pass. This module does the same steps, and whole numbers are the
same on every device. `torch.nn.functional.interpolate(antialias=True)` is not used: it takes one size per call, hence
one call per image, and on a GPU its pixels differ by a level or so.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dml.data.transforms import MEAN_COLOUR

BITS = 22  # precision of a weight, as in Pillow

MOST = 2**24  # most pixels of the first pass that are computed at a time: some 0.6 GB


def views(pixels: Tensor, numbers: Tensor) -> Tensor:
    """Makes the images that some views describe.

    Args:
        pixels: `[P,3]` uint8, the pixels of all pictures, one picture after another, row after row.
        numbers: `[B,13]` int64, on the CPU, since sizes are computed from them there: the 11 numbers of a `View`, then
            the index of the picture's first pixel and the picture's width. All windows have the same size.

    Returns:
        `[B,3,high,wide]` uint8 on the device of the pixels, without waiting for it.
    """
    zero = numbers[:, 0] * 0
    asked = _Asked._make([*numbers.T, zero, zero + 1])
    turned = asked.columns_first()
    parts = []
    for which in (turned.logical_not(), turned):
        places = which.nonzero().flatten()
        if len(places):
            some = _Asked(*(field[places] for field in asked))
            done = _windows(pixels, some.transposed() if which is turned else some)
            parts.append((places, done.transpose(1, 2) if which is turned else done))
    if len(parts) == 1:
        result = parts[0][1]
    else:
        order = torch.cat([places for places, _ in parts]).argsort().to(pixels.device, non_blocking=True)
        result = torch.cat([done for _, done in parts])[order]
    return result.permute(0, 3, 1, 2).contiguous()


_PAIRS = (
    *(("top", "left"), ("height", "width"), ("rows", "columns"), ("down", "right"), ("high", "wide")),
    *(("flipped_down", "flipped"), ("line", "pixel")),
)


class _Asked(NamedTuple):
    """The views of a batch, a tensor `[B]` in each field: those of `View`, and where the picture lies in the pixels.

    Attributes:
        start: index of the picture's first pixel.
        line: distance in pixels from one row to the next.
        flipped_down: 1 if the window is upside down.
        pixel: distance in pixels from one column to the next.
    """

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    rows: Tensor
    columns: Tensor
    down: Tensor
    right: Tensor
    high: Tensor
    wide: Tensor
    flipped: Tensor
    start: Tensor
    line: Tensor
    flipped_down: Tensor
    pixel: Tensor

    def transposed(self) -> "_Asked":
        """Returns the same views of the transposed pictures."""
        pairs = [*_PAIRS, *((other, one) for one, other in _PAIRS)]
        return self._replace(**{one: getattr(self, other) for one, other in pairs})

    def columns_first(self) -> Tensor:
        """Returns `[B]` bool: True for views whose first pass in Pillow is the one along the columns."""
        fewer = self.height - self.rows
        return (fewer > 0) & (fewer > 2 * (self.width - self.columns)) & pillow_chooses()


@cache
def pillow_chooses() -> bool:
    """Says whether this Pillow begins with the columns if that is less work, as version 13 does.

    Earlier versions always begin with the rows.
    """
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (33, 28, 3), np.uint8))
    rows_first = noise.resize((32, 33), Image.Resampling.BILINEAR).resize((32, 32), Image.Resampling.BILINEAR)
    return noise.resize((32, 32), Image.Resampling.BILINEAR) != rows_first


class _Work(NamedTuple):
    """The sizes of the work for some views, as plain numbers.

    Attributes:
        high, wide: height and width of the windows.
        lines: the most lines of a picture that a window is computed from.
        down, across: the most pixels that one result is computed from, along the columns and along the rows; 1: nothing
            is resized.
        filled: whether some window reaches beyond its plane and has to be filled there.
    """

    high: int
    wide: int
    lines: int
    down: int
    across: int
    filled: bool

    @classmethod
    def of(cls, asked: _Asked) -> "_Work":
        high, wide = int(asked.high[0]), int(asked.wide[0])
        assert (asked.high == high).all()
        assert (asked.wide == wide).all()
        step = asked.height / asked.rows
        lines = torch.minimum((high * step + 2 * step.clamp(min=1) + 2).ceil().long(), asked.height)
        over = (asked.down < 0) | (asked.right < 0)
        over |= (asked.down + high > asked.rows) | (asked.right + wide > asked.columns)
        down, across = _taps(asked.height, asked.rows), _taps(asked.width, asked.columns)
        return cls(high, wide, int(lines.max()), down, across, bool(over.any()))


def _taps(source: Tensor, target: Tensor) -> int:
    if bool((source == target).all()):
        return 1
    return int((2 * (source.double() / target.double()).clamp(min=1)).max().ceil())


def _windows(pixels: Tensor, asked: _Asked) -> Tensor:
    """Computes the windows, `[B,high,wide,3]` uint8, with the pass along the rows first."""
    work = _Work.of(asked)
    at_a_time = max(1, MOST // (work.lines * work.wide))
    everything = torch.stack(list(asked)).split(at_a_time, dim=1)
    return torch.cat([_some(pixels, _Asked(*part.to(pixels.device, non_blocking=True)), work) for part in everything])


def _some(pixels: Tensor, asked: _Asked, work: _Work) -> Tensor:
    rows = _places(work.high, asked.down, asked.flipped_down)
    columns = _places(work.wide, asked.right, asked.flipped)
    y = _Taps.of(rows, asked.height, asked.rows, work.down)
    x = _Taps.of(columns, asked.width, asked.columns, work.across)
    top = y.first.amin(1, keepdim=True)
    lines = _clamped(top + torch.arange(work.lines, device=pixels.device), asked.height)
    begin = asked.start[:, None] + (asked.top[:, None] + lines) * asked.line[:, None]  # [B,lines]

    def of_rows(tap: int) -> Tensor:
        across = (asked.left[:, None] + _clamped(x.first + tap, asked.width)) * asked.pixel[:, None]
        return pixels[begin[:, :, None] + across[:, None]]  # [B,lines,wide,3]

    strip = _summed(of_rows, x.weights[:, None, :, :, None])
    image = torch.arange(len(rows), device=pixels.device)[:, None]

    def of_columns(tap: int) -> Tensor:
        return strip[image, (y.first - top + tap).clamp(max=work.lines - 1)]  # [B,high,wide,3]

    result = _summed(of_columns, y.weights[:, :, None, :, None])
    if not work.filled:
        return result
    there = _inside(rows, asked.rows)[:, :, None] & _inside(columns, asked.columns)[:, None]
    fill = torch.stack([torch.full_like(result[..., 0], level) for level in MEAN_COLOUR], -1)
    return torch.where(there[..., None], result, fill)


class _Taps(NamedTuple):
    """The pixels of a line that each result is a weighted sum of: K from `first [B,S]` on, `weights [B,S,K]` int32."""

    first: Tensor
    weights: Tensor

    @classmethod
    def of(cls, places: Tensor, source: Tensor, target: Tensor, taps: int) -> "_Taps":
        """Computes the taps of places `[B,S]` in lines of `target [B]` results made from `source [B]` pixels.

        The steps have Pillow's order, since each of them rounds.
        """
        places, source = _clamped(places.clamp(min=0), target), source[:, None]
        step = source.double() / target[:, None].double()
        wide = step.clamp(min=1)
        centre = (places + 0.5) * step
        first = (centre - wide + 0.5).long().clamp(min=0)
        end = torch.minimum((centre + wide + 0.5).long(), source)
        tap = torch.arange(taps, device=places.device)
        distance = (first[..., None] + tap - centre[..., None] + 0.5) * (1 / wide)[..., None]
        weights = (1 - distance.abs()).clamp(min=0) * (tap < (end - first)[..., None])
        total = torch.zeros_like(centre)
        for one in weights.unbind(-1):  # added in order: another order would round differently
            total = total + one
        return cls(first, (weights / total[..., None] * 2**BITS + 0.5).int())


def _summed(of: Callable[[int], Tensor], weights: Tensor) -> Tensor:
    """Computes the weighted sum over K taps, as uint8.

    `of(k)` gives the pixels of tap k; `weights [...,K,1]` has their shape but for K.
    """
    taps = weights.shape[-2]
    if taps == 1:
        return of(0)
    total = of(0) * weights[..., 0, :] + 2 ** (BITS - 1)
    for tap in range(1, taps):
        total += of(tap) * weights[..., tap, :]
    return (total >> BITS).to(torch.uint8)


def _places(size: int, begin: Tensor, flipped: Tensor | None = None) -> Tensor:
    """Returns `[B,size]`: the place in its plane of each pixel of a window, along one side."""
    along = torch.arange(size, device=begin.device).expand(len(begin), size)
    if flipped is not None:
        along = torch.where(flipped.bool()[:, None], size - 1 - along, along)
    return begin[:, None] + along


def _clamped(places: Tensor, size: Tensor) -> Tensor:
    """Limits places `[B,S]` to lines of `size [B]` pixels."""
    return torch.minimum(places, size[:, None] - 1)


def _inside(places: Tensor, size: Tensor) -> Tensor:
    return (places >= 0) & (places < size[:, None])
