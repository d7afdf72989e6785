"""Clusters of training images: how they are matched to learners, and the distances of negative pairs in them (DCES)."""

from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F

from dml.errors import UserError


class Remembered:
    """The latest embedding of each training image that training computed, kept on the device of the batches.

    Args:
        rows: `[N]`, the images' rows in the records, ascending.
        embeddings: `[N,D]`, the first ones; kept in float32.
    """

    def __init__(self, rows: np.ndarray, embeddings: Tensor) -> None:
        self.rows, self.embeddings = torch.as_tensor(rows), embeddings.float()

    @torch.no_grad()
    def update(self, index: Tensor, embeddings: Tensor) -> None:
        """Replaces the embeddings of rows `[B]` by `[B,D]`; if an image occurs twice, the last embedding is kept."""
        self.rows, self.embeddings = self.rows.to(index.device), self.embeddings.to(index.device)
        same = index[:, None] == index
        last = torch.where(same, torch.arange(len(index), device=index.device), -1).amax(1)
        self.embeddings.index_copy_(0, torch.searchsorted(self.rows, index), embeddings.detach()[last].float())


def blind_grouping(kind: str, k: int, labels: np.ndarray, seed: Sequence[int]) -> np.ndarray | None:
    """Returns the learner `[N]` of each image for a grouping that does not use embeddings; None for any other kind.

    Args:
        kind: `one` learner for all images, a `random` partition, or by `labels`: the classes in their order, cut into k
            runs of about equally many images.
        k: number of learners.
        labels: `[N]`.
        seed: of the random partition.
    """
    if kind == "one":
        return np.zeros(len(labels), np.int64)
    if kind == "random":
        return np.random.default_rng(seed).permutation(len(labels)) % k
    if kind == "labels":
        sizes = np.bincount(labels)
        middle = np.cumsum(sizes) - sizes / 2  # a class belongs to the run that its middle image lies in
        return (middle * k / len(labels)).astype(np.int64)[labels]
    return None


def match_clusters(previous: np.ndarray, current: np.ndarray, k: int) -> np.ndarray:
    """Relabels the clusters in `current` so that each one goes to the learner whose previous cluster it overlaps most.

    Overlap is intersection over union; clusters are assigned to learners by the linear assignment with the largest
    total overlap (appendix A).

    Args:
        previous: `[N]`, the learner of each image until now, 0..k-1.
        current: `[N]`, the new cluster of each image, 0..k-1, in any order.
        k: number of learners and of clusters.

    Returns:
        `[N]` int64, the learner of each image from now on.

    Raises:
        UserError: the arrays have different lengths, or a number is not in 0..k-1.
    """
    previous, current = np.asarray(previous, np.int64), np.asarray(current, np.int64)  # int64, to hold k * k
    if previous.shape != current.shape or previous.ndim != 1:
        raise UserError(
            f"The clusters have shapes {previous.shape} and {current.shape}: give two arrays with one number per image."
        )
    for clusters in (previous, current):
        if clusters.size and not 0 <= clusters.min() <= clusters.max() < k:
            raise UserError(
                f"The clusters are numbered {clusters.min()} to {clusters.max()}: number them within 0 to {k - 1}."
            )
    learner, cluster = linear_sum_assignment(overlaps(previous, current, k), maximize=True)
    learner_of = np.empty(k, np.int64)
    learner_of[cluster] = learner
    return learner_of[current]


def overlaps(first: np.ndarray, second: np.ndarray, k: int) -> np.ndarray:
    """Computes the intersection over union of each cluster in `first` with each in `second`: `[k,k]`, 0 if both are
    empty."""
    both = np.bincount(first * k + second, minlength=k * k).reshape(k, k)
    either = both.sum(1, keepdims=True) + both.sum(0) - both
    return both / np.maximum(either, 1)


def negative_distances(
    embeddings: np.ndarray, clusters: np.ndarray, labels: np.ndarray, pairs: int = 50_000
) -> tuple[Tensor, Tensor]:
    """Computes the distances of negative pairs within clusters `[P]` and between clusters `[Q]` (Fig. 8).

    Args:
        embeddings: `[N,D]`; they are normalised to unit norm first.
        clusters, labels: `[N]`.
        pairs: number of random pairs of images, from which the negative ones are taken.
    """
    first, second = np.random.default_rng(0).integers(len(labels), size=(2, pairs))
    negative = labels[first] != labels[second]
    first, second = first[negative], second[negative]
    points = F.normalize(torch.as_tensor(embeddings))
    distances = torch.linalg.vector_norm(points[first] - points[second], dim=1)
    inside = torch.as_tensor(clusters[first] == clusters[second])
    return distances[inside], distances[~inside]
