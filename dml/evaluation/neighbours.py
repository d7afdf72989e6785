"""The nearest items of a query, for retrieval galleries.

Q queries, M gallery items, P the gallery padded, b queries of a block.
"""

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dml.errors import UserError
from dml.evaluation.inputs import as_number, as_pair
from dml.evaluation.scores import Space, Strip, each_strip, full_precision, room

PART = 1 << 26  # numbers of neighbours' embeddings that are held at once, 256 MiB


@full_precision()
def nearest(
    queries: ArrayLike | Tensor,
    gallery: ArrayLike | Tensor | None = None,
    *,
    k: int,
    block: int | None = None,
    classes: tuple[Tensor, Tensor] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the k nearest gallery items of each query, nearest first; among equally near ones the lower index is first.

    Args:
        queries: `[Q,D]`.
        gallery: `[M,D]`. None: the queries are the gallery, each without itself.
        k: how many items to find for each query.
        block: queries at a time, as for `dml.evaluation.metrics.rank`.
        classes: labels of the queries `[Q]` and of the gallery `[M]`, on the device of the embeddings. If given, of
            equally near items those of the query's class come last, as the metrics rank them.

    Returns:
        Euclidean distances `[Q,k]` float32 and indices into the gallery `[Q,k]` int64.

    Raises:
        UserError: shapes do not fit, an embedding holds NaN or infinity, `block` is below 1, or k is below 1 or above
            the number of items.
    """
    points, items = as_pair(queries, gallery)
    available = len(items) - (gallery is None)
    block = block if block is None else as_number(block, "block")
    k = as_number(k, "k", 0)
    if k not in range(1, available + 1):
        raise UserError(f"k={k} nearest items cannot be found: choose 1 to {available}, the size of the gallery.")
    if block is None:  # of equal embeddings each score is found, with its place
        block = room(points.device, 4 * 4 * len(items))
    space = Space.of(points, items)
    rows_of_part = max(1, PART // (k * points.shape[1]))

    def of_block(at: Tensor, strip: Strip) -> tuple[Tensor, Tensor]:
        if gallery is None:
            strip.hide(at[:, None])
        found = _first_of_equals(strip, k, None if classes is None else (classes[0][at], classes[1]))
        parts = zip(found.split(rows_of_part), at.split(rows_of_part), strict=True)
        apart = [
            torch.linalg.vector_norm(space.gallery[near, :-1] - space.queries[of, None], dim=2) for near, of in parts
        ]
        # In double precision, since the unit of values near the largest one exceeds single precision.
        return (torch.cat(apart).double() * space.unit).clamp(max=torch.finfo(torch.float32).max).float(), found

    rows = torch.arange(len(points), device=points.device)
    blocks = [found for _, found in each_strip(space, rows, block, of_block)]
    distances, indices = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return distances.cpu().numpy(), indices.cpu().numpy()


def _first_of_equals(strip: Strip, k: int, classes: tuple[Tensor, Tensor] | None) -> Tensor:
    """Returns the columns of the k largest scores, `[b,k]`, the lower of two equal ones first; topk alone takes any.
    With the classes `[b]` of rows and `[M]` of columns, of equal ones those of the row's class are last."""
    scores = strip.scores
    row, column = (scores >= strip.largest(k)[:, -1:]).nonzero().unbind(1)
    if classes is not None:
        last = (classes[0][row] == classes[1][column]).byte().argsort(stable=True)
        row, column = row[last], column[last]
    order = scores[row, column].argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    held = row.bincount(minlength=len(scores))
    first = held.cumsum(0) - held
    return column[order[first[:, None] + torch.arange(k, device=scores.device)]]
