"""What a ranking needs to know of the labels, computed once for all embeddings of the same images.

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
        apart: whether the gallery is given apart from the queries.
        order: `[M]` int64, the gallery's indices, sorted by label. A place is an index into `order`.
        start, length: `[Q]` int64, the first place with the query's label, and how many places have it.
        own: `[Q]` int64, the place of the query itself; -1: it is not in the gallery.
        positives: `[Q]` int64, R: the number of items of the query's class, without the query itself.
        rows: `[Q']` int64, the queries that have a positive, sorted by their number of positives.
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
        """Lays out the labels of queries `[Q]` and gallery `[M]`, int64 on one device. Without `gallery_labels` the
        queries are the gallery, each without itself."""
        items, order = (labels if gallery_labels is None else gallery_labels).sort(stable=True)
        start = torch.searchsorted(items, labels)
        length = torch.searchsorted(items, labels, right=True) - start
        own = torch.full_like(start, -1)
        if gallery_labels is None:
            own[order] = torch.arange(len(order), device=order.device)
        positives = length - (own >= 0).long()
        # Queries with about the same number of positives share a block, so that blocks have little padding.
        rows = positives.argsort(stable=True)
        rows = rows[positives[rows] > 0]
        return cls(labels, gallery_labels is not None, order, start, length, own, positives, rows)
