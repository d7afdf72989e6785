"""Losses that are retrieval metrics of a batch, smoothed: each image asks for those of its class among all.

N images of a batch, Q pairs of images of one class. Temporaries have `[Q,N]` entries, hence grow with a class's images.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from dml.configuration.ranges import Count, Sharpness
from dml.losses.functional import all_pairs


def _above(similarities: Tensor, queries: Tensor, items: Tensor, temperature: float) -> Tensor:
    """`[Q,N]`: how much each image is ahead of an item for a query, 0 to 1; 0 of the item itself."""
    seen = similarities[queries]
    ahead = torch.sigmoid((seen - seen.gather(1, items[:, None])) / temperature)
    return ahead.scatter(1, items[:, None], 0)


def _sum_of_queries(values: Tensor, queries: Tensor, count: int) -> Tensor:
    """`[Q,...] -> [N,...]`."""
    return values.new_zeros(count, *values.shape[1:]).index_add(0, queries, values)


def smooth_ap(embeddings: Tensor, labels: Tensor, temperature: float = 0.01) -> Tensor:
    """One minus the smoothed average precision (Brown et al. 2020, eq. 6 and 7), with cosine similarities s.

    `1 - 1/N sum_q 1/|P_q| sum_{i in P_q} R(i, P_q) / R(i, batch)`, where `R(i, S) = 1 + sum_{j in S, j != i}
    sigmoid((s_qj - s_qi) / temperature)` and P_q are the images of q's class, q among them, as in the authors' code.

    pytorch-metric-learning's is the same for as many classes as a class has images, one behind the other; for others
    it takes images of several classes for positives.

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
    are the other images of q's class. The value is the mean of `1 - R@k(q)` over the ks and the q that have any. The
    outer minimum is that of the authors' code.

    Args:
        embeddings: `[N,d]`, rows of unit norm.
        labels: `[N]`.
        ks: numbers of images that are looked at.
        temperature, temperature_k: of the ranks; of whether they are at most k.

    Returns:
        Scalar.
    """
    positive, _ = all_pairs(labels)
    queries, items = positive.nonzero().unbind(1)
    above = _above(embeddings @ embeddings.mT, queries, items, temperature)
    ranks = 1 + above.scatter(1, queries[:, None], 0).sum(1, keepdim=True)
    # Made on the device: numbers of the host would be waited for.
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
