"""Scores of gallery items for queries, a block of queries at a time, with the same bits for every block size.

Q queries, M gallery items, P the gallery padded to whole lanes, D width, b queries of a block, c columns, k kept.

Ranking by the Euclidean distance |q - g| is ranking by the score q.g - |g|^2 / 2, descending, since
|q|^2 is the same for all items of a query. As a matrix product: [q, 1] . [g, -|g|^2 / 2].
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dml.data.room import free_memory
from dml.models.products import products

# Rows of every matrix product. BLAS picks its kernel, and so the order of its sums, by the shape: with one shape
# for all products a score depends neither on the block size nor on how many queries are left for the last block.
# 128 rows of 60,502 float32 scores (31 MB) stay in a last-level cache and leave the product at full speed.
TILE = 128
LANES = 64
# Columns of a product on a CPU: 128 x 4096 scores (2 MB) are still in the cache when their maxima are taken.
CHUNK = 4096
SAMPLE = 4096  # items of which the middle is taken at most
MOST = 64 * TILE  # queries in a block at most: larger blocks are no faster on any GPU

T = TypeVar("T")


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
        """Moves queries `[Q,D]` and gallery `[M,D]` so that the middle of the gallery is 0, and scales them.

        Distances do not change when all points move. Embeddings of an untrained network share a large component, which
        would take up the leading digits of every float32 score. The middle is a median, of some items if there are
        many: a single outlier does not move it as it moves a mean, and since it has values of the data, whole numbers
        stay whole, and what is equally near stays so. The scale is a power of two: it rounds nothing, and keeps squares
        of very large or small embeddings within float32.
        """
        some = gallery[:: math.ceil(len(gallery) / SAMPLE)].double()
        centre = some.sort(dim=0).values[len(some) // 2]
        largest = max(float((bound - centre).abs().max()) for x in (queries, gallery) for bound in x.aminmax(dim=0))
        unit = 2.0 ** math.frexp(largest)[1]
        points, items = ((x - centre).div_(unit).float() for x in (queries, gallery))
        half = items.double().square_().sum(1, keepdim=True) / 2
        padded = pad(torch.cat([items, -half.float()], dim=1), (0, 0, 0, -len(items) % LANES))
        padded[len(items) :, -1] = -math.inf
        return cls(points, padded, unit)


class Strip:
    """Scores of a block of queries, with the maxima of lanes of `LANES` scores each, which speed up `largest`.

    Columns are divided into chunks, and a chunk into lanes: lane j of the n lanes of a chunk has its columns j, j + n,
    j + 2n and so on.

    Attributes:
        scores: `[b,P]`, a buffer that the next block uses again.
        maxima: `[b,P/LANES]`, the largest score of each lane; None: they are out of date.
        chunk: columns of a chunk; the last one may have fewer.
    """

    def __init__(self, scores: Tensor, maxima: Tensor | None, chunk: int) -> None:
        self.scores, self.maxima, self.chunk = scores, maxima, chunk

    def hide(self, columns: Tensor) -> None:
        """Sets the scores of columns `[b,c]` to -inf."""
        self.scores.scatter_(1, columns, -math.inf)
        if self.maxima is None or not self._few(columns.shape[1]):
            self.maxima = None  # for so many columns an update does not pay
            return
        number = columns // self.chunk
        lanes = self._lanes(number)
        touched = number * (self.chunk // LANES) + (columns - number * self.chunk) % lanes
        self.maxima.scatter_(1, touched, self._members(touched).amax(2))

    def largest(self, k: int) -> Tensor:
        """Returns the k largest scores of each row, descending: `[b,k]`, 1 <= k <= P.

        It looks only into the k lanes with the largest maxima. A score in any other lane is at most as large as these k
        maxima, so it is not needed.
        """
        if self.maxima is None or not self._few(k):
            return largest(self.scores, k)
        return largest(self._members(self.maxima.topk(k, sorted=False).indices).flatten(1), k)

    def _few(self, k: int) -> bool:
        return 2 * k * LANES <= self.scores.shape[1]

    def _lanes(self, number: Tensor) -> Tensor:
        """Returns how many lanes chunks of these numbers have: the last chunk may have fewer."""
        columns = self.scores.shape[1]
        last = (columns - 1) // self.chunk
        return torch.where(number == last, columns - last * self.chunk, self.chunk) // LANES

    def _members(self, lane: Tensor) -> Tensor:
        """Returns the scores of lanes: `[b,c]` -> `[b,c,LANES]`."""
        number = lane // (self.chunk // LANES)
        lanes = self._lanes(number)
        first = number * self.chunk + lane % (self.chunk // LANES)
        columns = first[:, :, None] + lanes[:, :, None] * torch.arange(LANES, device=lane.device)
        return self.scores.gather(1, columns.flatten(1)).view(*lane.shape, LANES)


def largest(scores: Tensor, k: int) -> Tensor:
    """Returns the k largest scores of each row, descending: `[b,n]` -> `[b,k]`. For a large k on a CPU it uses NumPy,
    whose vectorised selection takes a tenth of the time of torch's."""
    if scores.device.type != "cpu" or k * LANES < scores.shape[1]:
        return scores.topk(k).values
    return descending(torch.from_numpy(np.partition(scores.numpy(), scores.shape[1] - k, axis=1)[:, -k:]))


def descending(scores: Tensor) -> Tensor:
    """Returns each row sorted, the largest first: `[b,n]`. On a CPU NumPy sorts, which is faster."""
    if scores.device.type != "cpu":
        return scores.sort(1, descending=True).values
    return torch.from_numpy(np.sort(scores.numpy(), axis=1)).flip(1)


def each_strip(
    space: Space, rows: Tensor, block: int | None, visit: Callable[[Tensor, Strip], T]
) -> list[tuple[Tensor, T]]:
    """Scores queries against the whole gallery, a block at a time, and calls `visit` for each block.

    On a CPU each of torch's threads takes whole blocks. If threads shared each short step instead, they would wait for
    one another at its end, which takes far longer than the step when other processes use the cores too.

    Args:
        space: of queries and gallery.
        rows: `[R]` int64, which queries.
        block: queries at a time, rounded up to whole tiles; None: as many as `room` says. It bounds memory and changes
            no bit of the scores.
        visit: a function of the block's rows `[b]` and their scores.

    Returns:
        The rows of each block and what `visit` returned, in the order of `rows`.
    """
    if block is None:
        block = room(rows.device, len(space.gallery) * space.gallery.element_size())
    tiles = math.ceil(block / TILE)
    size = min(tiles, max(1, math.ceil(len(rows) / TILE))) * TILE
    blocks = deque(enumerate(rows.split(size))) if len(rows) else deque()
    found: dict[int, tuple[Tensor, T]] = {}

    def work() -> None:
        chunk = CHUNK if rows.device.type == "cpu" else len(space.gallery)
        tile = space.queries.new_zeros(TILE, space.gallery.shape[1])
        tile[:, -1] = 1
        scores = space.queries.new_empty(size, len(space.gallery))
        maxima = space.queries.new_empty(size, len(space.gallery) // LANES)
        while blocks:
            try:
                number, at = blocks.popleft()
            except IndexError:  # another thread took the last block
                return
            for part, out, best in zip(at.split(TILE), scores.split(TILE), maxima.split(TILE), strict=False):
                tile[: len(part), :-1] = space.queries[part]
                _products(tile, space.gallery, out, best, chunk)
            found[number] = at, visit(at, Strip(scores[: len(at)], maxima[: len(at)], chunk))

    threads = min(torch.get_num_threads(), len(blocks)) if rows.device.type == "cpu" else 1
    if threads > 1:
        _in_threads(threads, work, stop=blocks.clear)
    else:
        work()
    return [found[number] for number in sorted(found)]


def _products(tile: Tensor, gallery: Tensor, scores: Tensor, maxima: Tensor, chunk: int) -> None:
    """Fills `scores [TILE,P]` and `maxima [TILE,P/LANES]`, chunk by chunk."""
    chunks = zip(gallery.split(chunk), scores.split(chunk, 1), maxima.split(chunk // LANES, 1), strict=True)
    for items, of_items, best in chunks:
        torch.mm(tile, items.T, out=of_items)
        best.copy_(of_items.unflatten(1, (LANES, -1)).amax(1))


def _in_threads(count: int, work: Callable[[], None], *, stop: Callable[[], object]) -> None:
    """Runs `work` in `count` threads, each of which uses a single core. If one fails, `stop` ends the others."""
    before, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()

    def alone() -> None:
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.no_grad():  # a new thread does not inherit them
            work()

    try:
        with ThreadPoolExecutor(count) as pool:
            try:
                for done in [pool.submit(alone) for _ in range(count)]:
                    done.result()
            finally:
                stop()
    finally:
        torch.set_num_threads(before)  # for threads that are started later


def room(device: torch.device, of_query: int) -> int:
    """Returns how many queries a block has room for, if the scores of one take `of_query` bytes.

    On a CPU that is one tile, which stays in its cache. On a GPU the scores may take a quarter of the free memory, so
    that what is selected from them has room too.
    """
    if device.type != "cuda":
        return TILE
    return min(max(free_memory(device) // 4 // of_query // TILE, 1) * TILE, MOST)


@contextmanager
def full_precision() -> Iterator[None]:
    """Computes float32 products in full float32 meanwhile, without gradients. Training may have allowed TF32 or
    bfloat16."""
    with products("highest"), torch.no_grad():
        yield
