"""Nearness of queries to gallery items, a block of queries at a time, the same bits for every block size.

Q queries, M gallery items, P the gallery padded to whole lanes, D width, b queries of a block, k kept.

Ranking by the Euclidean distance |q - g| is ranking by the score q.g - |g|^2 / 2, descending, since
|q|^2 is the same for all items of a query. As a matrix product: [q, 1] . [g, -|g|^2 / 2].
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

# Rows of every matrix product. BLAS picks its kernel, and so the order of its sums, by the shape: with one shape
# for all products a score depends neither on the block size nor on how many queries are left for the last block.
# 128 rows of 60,502 float32 scores (31 MB) stay in a last-level cache and leave the product at full speed.
TILE = 128
LANES = 64


@dataclass(frozen=True)
class Space:
    """Queries and gallery, moved and scaled together so that float32 scores are as exact as they can be.

    Attributes:
        queries: `[Q,D]` float32.
        gallery: `[P,D+1]` float32, the last column -|g|^2 / 2; padding has -inf there, so it is never near.
        unit: a distance here times `unit` is the distance of the embeddings as given.
    """

    queries: Tensor
    gallery: Tensor
    unit: float

    @classmethod
    def of(cls, queries: Tensor, gallery: Tensor) -> "Space":
        """Distances do not change when all points move: embeddings of an untrained network share a large component.

        That component would take up the leading digits of every float32 score. The scale is a power of two, so
        it rounds nothing, and keeps squares of very large or small embeddings within float32.
        """
        centre = gallery.mean(0, dtype=torch.float64)
        largest = max(float((bound - centre).abs().max()) for x in (queries, gallery) for bound in x.aminmax(dim=0))
        unit = 2.0 ** math.frexp(largest)[1]
        points, items = ((x - centre).div_(unit).float() for x in (queries, gallery))
        half = items.double().square_().sum(1, keepdim=True) / 2
        padded = pad(torch.cat([items, -half.float()], dim=1), (0, 0, 0, -len(items) % LANES))
        padded[len(items) :, -1] = -math.inf
        return cls(points, padded, unit)


def strips(space: Space, rows: Tensor, block: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores of `rows` of the queries against the whole gallery.

    Args:
        rows: `[R]` int64.
        block: queries at a time, rounded up to whole tiles. It bounds memory and changes no bit.

    Yields:
        The block's rows `[b]` and their scores `[b,P]`, a buffer that the caller may write to and the next
        block uses again.
    """
    if len(rows) == 0:
        return
    block = min(math.ceil(block / TILE), math.ceil(len(rows) / TILE)) * TILE
    tile = space.queries.new_zeros(TILE, space.gallery.shape[1])
    tile[:, -1] = 1
    strip = space.queries.new_empty(block, len(space.gallery))
    for chunk in rows.split(block):
        for out, part in zip(strip.split(TILE), chunk.split(TILE), strict=False):
            tile[: len(part), :-1] = space.queries[part]
            torch.mm(tile, space.gallery.T, out=out)
        yield chunk, strip[: len(chunk)]


def largest(strip: Tensor, k: int) -> Tensor:
    """The k largest scores of each row, descending: `[b,P]` -> `[b,k]`, 1 <= k <= P.

    The maxima of `LANES`-long lanes come first, one fast pass. The k lanes with the largest maxima hold k
    largest scores: were one of these in another lane, k scores at least as large would stand before it.
    """
    lanes = strip.view(len(strip), LANES, -1)
    if 2 * k > lanes.shape[2]:
        return strip.topk(k).values
    best = lanes.amax(1).topk(k, sorted=False).indices
    candidates = lanes.gather(2, best[:, None].expand(-1, LANES, -1))
    return candidates.flatten(1).topk(k).values


@contextmanager
def full_precision() -> Iterator[None]:
    """float32 products in float32: training may have allowed TF32 or bfloat16 for them."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_float32_matmul_precision(before)
