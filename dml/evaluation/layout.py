"""What a ranking needs of the labels alone, once for all embeddings of the same images.

Q queries, M gallery items.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where the positives of each query stand in a gallery that is sorted by label.

    Attributes:
        labels: `[Q]` int64 of the queries.
        apart: the gallery is not the queries themselves.
        order: `[M]` int64, the gallery's indices, sorted by label.
        start, length: `[Q]` int64, the run of places with the query's label.
        own: `[Q]` int64, the place of the query itself; -1: it is not in the gallery.
        positives: `[Q]` int64, R: items of the query's class, without the query itself.
        rows: `[Q']` int64, queries with a positive, by their number of positives.
    """

    labels: Tensor
    apart: bool
    order: Tensor
    start: Tensor
    length: Tensor
    own: Tensor
    positives: Tensor
    rows: Tensor

    @classmethod
    def of(cls, labels: Tensor, gallery_labels: Tensor | None = None) -> "Layout":
        """`[Q]` and `[M]` int64 on one device; without the second the queries are the gallery, each without itself."""
        items, order = (labels if gallery_labels is None else gallery_labels).sort(stable=True)
        start = torch.searchsorted(items, labels)
        length = torch.searchsorted(items, labels, right=True) - start
        own = torch.full_like(start, -1)
        if gallery_labels is None:
            own[order] = torch.arange(len(order), device=order.device)
        positives = length - (own >= 0).long()
        # Queries with about the same number of positives share a block, so that little of it is padding.
        rows = positives.argsort(stable=True)
        rows = rows[positives[rows] > 0]
        return cls(labels, gallery_labels is not None, order, start, length, own, positives, rows)
