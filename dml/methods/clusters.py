"""Clusters of training images from one clustering to the next, and what they do to negative pairs (DCES)."""

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F

from dml.errors import UserError


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
