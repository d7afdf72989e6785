"""How far rounding can change a rank: another processor sums products in another order.

Q queries, M items of the gallery, D width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 128  # queries at a time


def rank_bounds(
    queries: Tensor,
    labels: Tensor,
    tolerance: float,
    *,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    left_out: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the smallest and the largest possible rank of each query's nearest positive, if every cosine may be off
    by a tolerance.

    Args:
        queries: `[Q,D]` of unit norm.
        labels: `[Q]`.
        tolerance: of one cosine; the difference of two may be off by twice as much.
        gallery: `[M,D]` of unit norm; None: the queries are the gallery, each without itself.
        gallery_labels: `[M]`, given with `gallery`.
        left_out: a function from rows `[b]` of the queries to `[b,M]` bool: which items are taken out of their
            rankings.

    Returns:
        The smallest and the largest ranks, `[Q]` int64 each, from 1; 0 for a query that has no positive.
    """
    items, classes = (queries, labels) if gallery is None else (gallery, gallery_labels)
    assert classes is not None
    found = []
    for start in range(0, len(queries), BLOCK):
        rows = torch.arange(start, min(start + BLOCK, len(queries)), device=queries.device)
        cosines = queries[rows].double() @ items.double().T
        if gallery is None:
            cosines[rows - start, rows] = -torch.inf
        same = labels[rows, None] == classes
        if left_out is not None:
            cosines[left_out(rows)] = -torch.inf
        best = cosines.masked_fill(~same, -torch.inf).amax(1, keepdim=True)
        others = cosines.masked_fill(same, -torch.inf)
        ranks = torch.stack([(others > best + 2 * tolerance).sum(1), (others >= best - 2 * tolerance).sum(1)]) + 1
        found.append(ranks * best.squeeze(1).isfinite())
    low, high = torch.cat(found, dim=1)
    return low, high
