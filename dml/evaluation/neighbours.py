"""The nearest items of a query, for retrieval galleries.

Q queries, M gallery items, P the gallery padded, b queries of a block.
"""

import math

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dml.errors import UserError
from dml.evaluation.inputs import as_number, as_pair
from dml.evaluation.scores import TILE, Space, full_precision, largest, strips


@full_precision()
def nearest(
    queries: ArrayLike | Tensor, gallery: ArrayLike | Tensor | None = None, *, k: int, block: int = TILE
) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest gallery items of each query, nearest first, of equally near ones the lower index first.

    Args:
        queries: `[Q,D]`.
        gallery: `[M,D]`. None: the queries are the gallery, each without itself.
        block: as for `rank`.

    Returns:
        Euclidean distances `[Q,k]` float32 and indices into the gallery `[Q,k]` int64.

    Raises:
        UserError: as `rank` does; k below 1 or above the number of items.
    """
    points, items = as_pair(queries, gallery)
    available = len(items) - (gallery is None)
    block = as_number(block, "block")
    if as_number(k, "k", 0) not in range(1, available + 1):
        raise UserError(f"k={k} nearest items asked for; choose 1 to {available}, what the gallery holds.")
    space = Space.of(points, items)
    distances, indices = [], []
    for at, strip in strips(space, torch.arange(len(points), device=points.device), block):
        if gallery is None:
            strip.scatter_(1, at[:, None], -math.inf)
        found = _first_of_equals(strip, k)
        apart = space.gallery[found, :-1] - space.queries[at, None]
        distances.append(torch.linalg.vector_norm(apart, dim=2) * space.unit)
        indices.append(found)
    return torch.cat(distances).cpu().numpy(), torch.cat(indices).cpu().numpy()


def _first_of_equals(strip: Tensor, k: int) -> Tensor:
    """Columns of the k largest scores, `[b,P]` -> `[b,k]`: topk alone takes any of several equal ones."""
    row, column = (strip >= largest(strip, k)[:, -1:]).nonzero().unbind(1)
    order = strip[row, column].argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    held = row.bincount(minlength=len(strip))
    first = held.cumsum(0) - held
    return column[order[first[:, None] + torch.arange(k, device=strip.device)]]
