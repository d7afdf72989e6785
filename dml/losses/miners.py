"""Miners that pytorch-metric-learning lacks, or has only with tensors whose sizes depend on values."""

import torch
from torch import Tensor, nn

from dml.configuration.ranges import Number, Positive
from dml.losses.functional import multi_similarity_pairs, squared_distances


class DistanceWeighted(nn.Module):
    """Distance-weighted negatives (Wu et al. 2017, section 4): one for each ordered positive pair.

    A negative at distance D of an anchor is drawn with a probability proportional to 1 / q(D), where
    `q(D) = D^(d-2) (1 - D^2/4)^((d-3)/2)` is the density of distances between random points of the unit sphere in d
    dimensions. Distances below `cutoff` count as `cutoff`, and negatives at `nonzero_loss_cutoff` or beyond are not
    drawn. If all negatives of an anchor are that far, one of them is drawn uniformly.

    pytorch-metric-learning's DistanceWeightedMiner silently drops such an anchor together with its positive pairs.

    Args:
        cutoff: the smallest distance that is used in the weights.
        nonzero_loss_cutoff: negatives at this distance or beyond are not drawn.
    """

    def __init__(self, cutoff: Positive = 0.5, nonzero_loss_cutoff: Positive = 1.4) -> None:
        super().__init__()
        self.cutoff, self.nonzero_loss_cutoff = cutoff, nonzero_loss_cutoff

    @torch.no_grad()
    def forward(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mines triplets: indices of anchors, positives and negatives, `[T]` each.

        An anchor without a positive or without any negative is in no triplet.

        Args:
            embeddings: `[N,d]`, rows of unit norm.
            labels: `[N]`.
        """
        same = labels[:, None] == labels[None, :]
        weights = self.weights(squared_distances(embeddings, embeddings).sqrt(), same, embeddings.shape[1])
        own = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        anchors, positives = (same & ~own & ~same.all(1, keepdim=True)).nonzero().unbind(1)
        if not len(anchors):
            return anchors, positives, anchors
        return anchors, positives, torch.multinomial(weights[anchors], 1).squeeze(1)

    def weights(self, distances: Tensor, same: Tensor, dim: int) -> Tensor:
        """Computes the weights `[N,N]` of the negatives of each anchor, not normalised.

        Args:
            distances: `[N,N]`.
            same: `[N,N]` bool, True for images of equal labels.
            dim: d, width of the embeddings.
        """
        apart = distances.clamp(min=self.cutoff)
        # Logarithms, since the powers overflow. Beyond the far cutoff, where 1 - D^2/4 may be 0, no weight is used.
        log_density = (dim - 2) * apart.log() + (dim - 3) / 2 * (1 - apart.square() / 4).clamp(min=1e-8).log()
        near = ~same & (distances < self.nonzero_loss_cutoff)
        log_weights = (-log_density).masked_fill(~near, -torch.inf)
        largest = log_weights.amax(1, keepdim=True)
        weights = (log_weights - largest.nan_to_num(neginf=0.0)).exp()
        return torch.where(near.any(1, keepdim=True), weights, (~same).to(weights))


class MultiSimilarityMiner(nn.Module):
    """Mines pairs by `functional.multi_similarity_pairs`, as masks for `dml.losses.pairwise.MultiSimilarity`.

    Args:
        epsilon: margin of the selection, in cosine similarity.
    """

    masks = True

    def __init__(self, epsilon: Number = 0.1) -> None:
        super().__init__()
        self.epsilon = epsilon

    @torch.no_grad()
    def forward(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mines `embeddings [N,d]` of unit norm with `labels [N]`: positive and negative pairs, `[N,N]` bool each."""
        return multi_similarity_pairs(embeddings, labels, self.epsilon)
