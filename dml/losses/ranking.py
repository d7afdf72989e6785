"""Losses that are smoothed retrieval metrics of a batch: each image is a query for the images of its class.

N images of a batch, Q pairs of images of one class. Temporary tensors have `[Q,N]` entries, so they grow with the
number of images per class.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from dml.configuration.ranges import Count, Sharpness
from dml.losses.functional import all_pairs


def _above(similarities: Tensor, queries: Tensor, items: Tensor, temperature: float) -> Tensor:
    """Returns `[Q,N]`: how far each image is ranked ahead of an item for a query, 0 to 1; 0 for the item itself."""
    seen = similarities[queries]
    ahead = torch.sigmoid((seen - seen.gather(1, items[:, None])) / temperature)
    return ahead.scatter(1, items[:, None], 0)


def _sum_of_queries(values: Tensor, queries: Tensor, count: int) -> Tensor:
    """Sums the pairs' values over each query's pairs: `[Q,...] -> [N,...]`."""
    return values.new_zeros(count, *values.shape[1:]).index_add(0, queries, values)


def smooth_ap(embeddings: Tensor, labels: Tensor, temperature: float = 0.01) -> Tensor:
    """One minus the smoothed average precision (Brown et al. 2020, eq. 6 and 7), with cosine similarities s.

    `1 - 1/N sum_q 1/|P_q| sum_{i in P_q} R(i, P_q) / R(i, batch)`, where `R(i, S) = 1 + sum_{j in S, j != i}
    sigmoid((s_qj - s_qi) / temperature)` and P_q are the images of q's class, q among them, as in the authors' code.

    pytorch-metric-learning's SmoothAPLoss is the same only for batches sorted by class that have as many classes as
    images per class; in other batches it takes images of several classes for positives.

    Args:
        embeddings: `[N,d]`, rows of unit norm.
        labels: `[N]`.

    Returns:
        Scalar.
    """
    same = labels[:, None] == labels[None, :]
    queries, items = same.nonzero().unbind(1)
    above = _above(embeddings @ embeddings.mT, queries, items, temperature)
    precision = (1 + (above * same[queries]).sum(1)) / (1 + above.sum(1))
    return 1 - (_sum_of_queries(precision, queries, len(labels)) / same.sum(1)).mean()


def recall_at_k(
    embeddings: Tensor,
    labels: Tensor,
    ks: tuple[int, ...] = (1, 2, 4, 8, 16),
    temperature: float = 0.01,
    temperature_k: float = 1.0,
) -> Tensor:
    """One minus the smoothed recall at several k (Patel et al. 2022), with cosine similarities s.

    `r(x) = 1 + sum_{z not in {q,x}} sigmoid((s_qz - s_qx) / temperature)` is the smoothed rank of x among the images
    other than q, and `R@k(q) = min(k, sum_{x in P_q} sigmoid((k - r(x)) / temperature_k)) / min(k, |P_q|)`, where P_q
    are the other images of q's class. The value is the mean of `1 - R@k(q)` over the ks and over the q with at least
    one such image. The outer minimum is that of the authors' code.

    Args:
        embeddings: `[N,d]`, rows of unit norm.
        labels: `[N]`.
        ks: the values of k, numbers of nearest images.
        temperature: of the sigmoid that smooths the ranks.
        temperature_k: of the sigmoid that smooths whether a rank is at most k.

    Returns:
        Scalar.
    """
    positive, _ = all_pairs(labels)
    queries, items = positive.nonzero().unbind(1)
    above = _above(embeddings @ embeddings.mT, queries, items, temperature)
    ranks = 1 + above.scatter(1, queries[:, None], 0).sum(1, keepdim=True)
    # Made on the device: a copy of numbers from the host would make the step wait.
    k = torch.cat([ranks.new_full((1,), float(one)) for one in ks])
    found = _sum_of_queries(torch.sigmoid((k - ranks) / temperature_k), queries, len(labels))
    there = positive.sum(1, keepdim=True)
    lost = 1 - torch.minimum(found, k) / torch.minimum(there.clamp(min=1), k)
    asked = (there > 0).sum().clamp(min=1)
    return torch.where(there > 0, lost, 0).mean(1).sum() / asked


class SmoothAP(nn.Module):
    """`smooth_ap`."""

    def __init__(self, temperature: Sharpness = 0.01) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return smooth_ap(embeddings, labels, self.temperature)


class RecallAtK(nn.Module):
    """`recall_at_k`."""

    def __init__(
        self,
        ks: Annotated[tuple[Count, ...], Field(min_length=1, max_length=64)] = (1, 2, 4, 8, 16),
        temperature: Sharpness = 0.01,
        temperature_k: Sharpness = 1.0,
    ) -> None:
        super().__init__()
        self.ks, self.temperature, self.temperature_k = tuple(ks), temperature, temperature_k

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return recall_at_k(embeddings, labels, self.ks, self.temperature, self.temperature_k)
