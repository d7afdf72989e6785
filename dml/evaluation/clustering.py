"""K-means, and how well clusters of embeddings agree with the classes: NMI and F1 (Song et al. 2017, section 5)."""

import math
import warnings
from typing import Any

import numpy as np
import torch

from dml.errors import UserError


def need_faiss(what: str = "K-means") -> Any:
    """Imports faiss and returns the module.

    Args:
        what: what needs faiss, as the first words of the error message.

    Raises:
        UserError: faiss is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise UserError(
            f"{what} needs faiss, which is not installed: pip install '.[cpu]' or '.[gpu]' (with "
            "protocol.clustering=false an evaluation does not need it)."
        ) from error
    return faiss


def kmeans(embeddings: np.ndarray, clusters: int, *, seed: int) -> np.ndarray:
    """Clusters points with faiss: 20 Lloyd iterations over all points, starting from `clusters` random ones. It uses a
    GPU if faiss was built for one.

    The clusters depend on the set of points alone: the order of storage does not matter, nor does a common factor that
    is a power of two, and equal points are in one cluster.

    Args:
        embeddings: `[N,D]`, N >= clusters.
        clusters: number of clusters.
        seed: the same seed gives the same clusters.

    Returns:
        `[N]` int64, the nearest centroid of each point.

    Raises:
        UserError: faiss is not installed, the embeddings hold NaN or infinity (faiss would abort), or there are fewer
            points than clusters.
    """
    faiss = need_faiss()
    points = np.asarray(embeddings)
    points = points if points.dtype == np.float64 else points.astype(np.float32)
    if not np.isfinite(points).all():
        raise UserError("K-means cannot cluster NaN or infinity: look for a diverged training.")
    if not 1 <= clusters <= len(points):
        raise UserError(f"K-means cannot make {clusters} clusters of {len(points)} points: each needs at least one.")
    # Squares of large or tiny values would leave float32, and faiss would abort. Dividing by a power of two rounds
    # nothing. Adding 0 turns -0 into 0.
    points = np.ldexp(points, -math.frexp(float(np.abs(points).max()))[1]).astype(np.float32)
    points = np.ascontiguousarray(points + np.float32(0))
    _, first, place, count = np.unique(_sortable(points), return_index=True, return_inverse=True, return_counts=True)
    distinct = points[first]
    # By default faiss warns of fewer than 39 points a centroid, and uses 256 of them at most. Test sets have 2 to 82.
    limits = {"min_points_per_centroid": 1, "max_points_per_centroid": len(points)}
    # faiss's seed is an int32.
    model = faiss.Kmeans(points.shape[1], clusters, niter=20, seed=seed % 2**31, **limits)
    if faiss.get_num_gpus():  # on this process's GPU; the option gpu=1 means all of them
        device = 0
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # faiss has no part in what torch keeps of the memory
            device = torch.cuda.current_device()
        resources = faiss.StandardGpuResources()
        model.index = faiss.index_cpu_to_gpu(resources, device, model.index)
    model.train(distinct.repeat(count, axis=0))
    assignment: np.ndarray = model.assign(distinct)[1][place]
    return assignment


def _sortable(points: np.ndarray) -> np.ndarray:
    """Turns points `[N,D]` float32 into byte strings `[N]` that sort as the rows do, by the first coordinate first.

    So a difference in the last bit, as between two processors, moves no row far.
    """
    bits = points.view(np.uint32)
    # IEEE floats are ordered as their bits are, once the bits of negative ones are inverted.
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(">u4")
    return ordered.view(np.dtype((np.void, ordered.itemsize * points.shape[1]))).reshape(-1)


def clustering_scores(assignment: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Measures how well clusters `[N]` agree with classes `[N]`, both whole numbers.

    `nmi`: mutual information divided by the arithmetic mean of the two entropies. `f1`: harmonic mean of precision and
    recall over pairs of points. A pair is positive if both points are in one cluster, and relevant if both are of one
    class. Without any such pair `f1` is 1, since the two partitions are then the same.

    Both are computed from a sparse contingency table: a dense one of 11,316 classes takes 1 GB.
    """
    # Imported here: retrieval metrics alone need not wait for scikit-learn.
    from sklearn.metrics import normalized_mutual_info_score
    from sklearn.metrics.cluster import pair_confusion_matrix

    with warnings.catch_warnings():
        # scikit-learn takes many small classes for a regression target.
        warnings.filterwarnings("ignore", "The number of unique classes is greater than 50%", UserWarning)
        nmi = float(normalized_mutual_info_score(labels, assignment, average_method="arithmetic"))
        (_, false_positive), (false_negative, true_positive) = pair_confusion_matrix(labels, assignment).tolist()
    pairs = 2 * true_positive + false_positive + false_negative
    return {"nmi": nmi, "f1": 2 * true_positive / pairs if pairs else 1.0}
