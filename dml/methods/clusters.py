"""Clusters of training images from one clustering to the next, and what they do to negative pairs (DCES)."""

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F

from dml.errors import UserError


class Remembered:
    """The embedding of each training image as training saw it last, on the device that makes embeddings.

    Args:
        rows: `[N]` of the records, ascending.
        embeddings: `[N,D]`, to begin with; kept in float32.
    """

    def __init__(self, rows: np.ndarray, embeddings: Tensor) -> None:
        self.rows, self.embeddings = torch.as_tensor(rows), embeddings.float()

    @torch.no_grad()
    def update(self, index: Tensor, embeddings: Tensor) -> None:
        """Those of a batch: rows `[B]` and `[B,D]`. Of an image that is there twice the last one counts."""
        self.rows, self.embeddings = self.rows.to(index.device), self.embeddings.to(index.device)
        same = index[:, None] == index
        last = torch.where(same, torch.arange(len(index), device=index.device), -1).amax(1)
        self.embeddings.index_copy_(0, torch.searchsorted(self.rows, index), embeddings.detach()[last].float())


def fixed_grouping(kind: str, k: int, labels: np.ndarray, seed: int) -> np.ndarray | None:
    """The learner `[N]` of each of N images where it does not depend on embeddings; None: it does.

    Args:
        kind: `one` learner of all, a `random` partition, or by `labels`, the classes in their order cut into k runs of
            about as many images.
        labels: `[N]`.
    """
    if kind == "one":
        return np.zeros(len(labels), np.int64)
    if kind == "random":
        return np.random.default_rng([seed, 0, 2]).permutation(len(labels)) % k
    if kind == "labels":
        sizes = np.bincount(labels)
        middle = np.cumsum(sizes) - sizes / 2  # a class is where its middle image is
        return (middle * k / len(labels)).astype(np.int64)[labels]
    return None


def match_clusters(previous: np.ndarray, current: np.ndarray, k: int) -> np.ndarray:
    """`current`, relabelled so that each cluster goes to the learner whose previous cluster it overlaps most.

    Overlap is intersection over union; which learner gets which cluster is the linear assignment of the largest total
    (appendix A).

    Args:
        previous: `[N]` the learner of each image until now, 0..k-1.
        current: `[N]` its new cluster, 0..k-1, in any order.

    Returns:
        `[N]` int64, the learner of each image from now on.

    Raises:
        UserError: arrays of different lengths, or a number that is none of 0..k-1.
    """
    previous, current = np.asarray(previous, np.int64), np.asarray(current, np.int64)  # k * k has to fit
    if previous.shape != current.shape or previous.ndim != 1:
        raise UserError(f"Clusters of shapes {previous.shape} and {current.shape}: give one number an image.")
    for clusters in (previous, current):
        if clusters.size and not 0 <= clusters.min() <= clusters.max() < k:
            raise UserError(f"Clusters {clusters.min()} to {clusters.max()} where 0 to {k - 1} can be.")
    learner, cluster = linear_sum_assignment(overlaps(previous, current, k), maximize=True)
    learner_of = np.empty(k, np.int64)
    learner_of[cluster] = learner
    return learner_of[current]


def overlaps(first: np.ndarray, second: np.ndarray, k: int) -> np.ndarray:
    """Intersection over union of each cluster of `first` with each of `second`, `[k,k]`; 0 of two empty ones."""
    both = np.bincount(first * k + second, minlength=k * k).reshape(k, k)
    either = both.sum(1, keepdims=True) + both.sum(0) - both
    return both / np.maximum(either, 1)


def negative_distances(
    embeddings: np.ndarray, clusters: np.ndarray, labels: np.ndarray, pairs: int = 50_000
) -> tuple[Tensor, Tensor]:
    """Distances of negative pairs within clusters and between clusters (Fig. 8), `[P]` and `[Q]`.

    Args:
        embeddings: `[N,D]`, taken at unit norm.
        clusters, labels: `[N]`.
        pairs: random pairs of images to look among.
    """
    first, second = np.random.default_rng(0).integers(len(labels), size=(2, pairs))
    negative = labels[first] != labels[second]
    first, second = first[negative], second[negative]
    points = F.normalize(torch.as_tensor(embeddings))
    distances = torch.linalg.vector_norm(points[first] - points[second], dim=1)
    inside = torch.as_tensor(clusters[first] == clusters[second])
    return distances[inside], distances[~inside]
