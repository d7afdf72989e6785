"""Nearness of queries to gallery items, a block of queries at a time, the same bits for every block size.

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

# Rows of every matrix product. BLAS picks its kernel, and so the order of its sums, by the shape: with one shape
# for all products a score depends neither on the block size nor on how many queries are left for the last block.
# 128 rows of 60,502 float32 scores (31 MB) stay in a last-level cache and leave the product at full speed.
TILE = 128
LANES = 64
# Columns of a product on a CPU: 128 x 4096 scores (2 MB) are still in the cache when their maxima are taken.
CHUNK = 4096
MOST = 64 * TILE  # queries of a block: more are no faster on any GPU

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


class Strip:
    """Scores of a block of queries, and the maxima of lanes of `LANES` scores each, in which the largest are found.

    Lanes belong to a chunk of columns: the j-th of n lanes of a chunk has its columns j, j + n, j + 2n and so on.

    Attributes:
        scores: `[b,P]`, a buffer that the next block uses again.
        maxima: `[b,P/LANES]`; None: out of date.
    """

    def __init__(self, scores: Tensor, maxima: Tensor | None, chunk: int) -> None:
        self.scores, self.maxima, self.chunk = scores, maxima, chunk

    def hide(self, columns: Tensor) -> None:
        """Sets the scores of columns `[b,c]` to -inf."""
        self.scores.scatter_(1, columns, -math.inf)
        if self.maxima is None or not self._few(columns.shape[1]):
            self.maxima = None  # so many are found without them
            return
        number, lanes = self._chunks(columns // self.chunk)
        touched = number * (self.chunk // LANES) + (columns - number * self.chunk) % lanes
        self.maxima.scatter_(1, touched, self._members(touched).amax(2))

    def largest(self, k: int) -> Tensor:
        """The k largest scores of each row, descending: `[b,k]`, 1 <= k <= P.

        The k lanes with the largest maxima hold k largest scores: were one of these in another lane, k scores at least
        as large would stand before it.
        """
        if self.maxima is None or not self._few(k):
            return largest(self.scores, k)
        return largest(self._members(self.maxima.topk(k, sorted=False).indices).flatten(1), k)

    def _few(self, k: int) -> bool:
        return 2 * k * LANES <= self.scores.shape[1]

    def _chunks(self, number: Tensor) -> tuple[Tensor, Tensor]:
        """Of chunks their numbers again, and how many lanes they have: the last one may have fewer."""
        columns = self.scores.shape[1]
        last = (columns - 1) // self.chunk
        return number, torch.where(number == last, columns - last * self.chunk, self.chunk) // LANES

    def _members(self, lane: Tensor) -> Tensor:
        """Scores of lanes: `[b,c]` -> `[b,c,LANES]`."""
        number, lanes = self._chunks(lane // (self.chunk // LANES))
        first = number * self.chunk + lane % (self.chunk // LANES)
        columns = first[:, :, None] + lanes[:, :, None] * torch.arange(LANES, device=lane.device)
        return self.scores.gather(1, columns.flatten(1)).view(*lane.shape, LANES)


def largest(scores: Tensor, k: int) -> Tensor:
    """The k largest of each row, descending: `[b,n]` -> `[b,k]`. NumPy's vectorised selection takes a tenth of the time
    of torch's on a CPU where k is large."""
    if scores.device.type != "cpu" or k * LANES < scores.shape[1]:
        return scores.topk(k).values
    return descending(torch.from_numpy(np.partition(scores.numpy(), scores.shape[1] - k, axis=1)[:, -k:]))


def descending(scores: Tensor) -> Tensor:
    """Rows sorted, the largest first: `[b,n]`. As for `largest`, NumPy sorts on a CPU."""
    if scores.device.type != "cpu":
        return scores.sort(1, descending=True).values
    return torch.from_numpy(np.sort(scores.numpy(), axis=1)).flip(1)


def each_strip(
    space: Space, rows: Tensor, block: int | None, visit: Callable[[Tensor, Strip], T]
) -> list[tuple[Tensor, T]]:
    """What `visit` makes of the scores of `rows` of the queries against the whole gallery, a block at a time.

    On a CPU each of torch's threads takes whole blocks. Threads that share each short step instead wait for one another
    at its end, for far longer than it lasts where other processes use the cores too.

    Args:
        rows: `[R]` int64.
        block: queries at a time, rounded up to whole tiles; None: `room`. It bounds memory and changes no bit.
        visit: gets the block's rows `[b]` and their scores.

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
            except IndexError:  # another thread was quicker
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
    """`work` in `count` threads, of which each computes alone; `stop` ends the others where one of them fails."""
    before, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()

    def alone() -> None:
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.no_grad():  # both are a thread's own
            work()

    try:
        with ThreadPoolExecutor(count) as pool:
            try:
                for done in [pool.submit(alone) for _ in range(count)]:
                    done.result()
            finally:
                stop()
    finally:
        torch.set_num_threads(before)  # for threads still to come


def room(device: torch.device, of_query: int) -> int:
    """Queries of a block, each with `of_query` bytes of scores: a tile on a CPU, for its cache; on a GPU as many as a
    quarter of its free memory holds, so that what is selected from the scores has room beside them."""
    if device.type != "cuda":
        return TILE
    free, _ = torch.cuda.mem_get_info(device)
    return min(max(free // 4 // of_query // TILE, 1) * TILE, MOST)


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
