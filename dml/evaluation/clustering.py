"""K-means, and how well clusters of the embeddings are the classes: NMI and F1 (Song et al. 2017, section 5)."""

import math
import warnings
from typing import Any

import numpy as np

from dml.errors import UserError


def need_faiss(what: str = "K-means") -> Any:
    """The module faiss.

    Args:
        what: needs it.

    Raises:
        UserError: it is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise UserError(
            f"{what} needs faiss, which is not installed: pip install '.[cpu]' or '.[gpu]' (an evaluation does without "
            "it with protocol.clustering=false)."
        ) from error
    return faiss


def kmeans(embeddings: np.ndarray, clusters: int, *, seed: int) -> np.ndarray:
    """Clusters by faiss: 20 Lloyd iterations over all points from `clusters` random points; on a GPU where its build
    has one.

    The clusters are a function of the set of points: the order of storage does not matter, and equal points are in one
    cluster. Neither does a factor that is a power of two.

    Args:
        embeddings: `[N,D]`, N >= clusters, within the range of float32.
        seed: the same one gives the same clusters.

    Returns:
        `[N]` int64, the nearest centroid of each point.

    Raises:
        UserError: faiss is not installed; NaN or infinity, of which faiss would abort; fewer points than clusters.
    """
    faiss = need_faiss()
    with np.errstate(over="ignore"):
        points = np.asarray(embeddings, dtype=np.float32)
    if not np.isfinite(points).all():
        raise UserError("K-means cannot cluster NaN, infinity or values beyond float32: look for a diverged training.")
    if not 1 <= clusters <= len(points):
        raise UserError(f"K-means cannot make {clusters} clusters of {len(points)} points.")
    # A power of two rounds nothing; squares of larger values would leave float32, and faiss would abort. + 0 for -0.
    points = np.ascontiguousarray(np.ldexp(points, -math.frexp(float(np.abs(points).max()))[1]) + np.float32(0))
    _, first, place, count = np.unique(_sortable(points), return_index=True, return_inverse=True, return_counts=True)
    distinct = points[first]
    # faiss would warn of fewer than 39 points a centroid and sample 256 of more; retrieval test sets have 2 to 82.
    limits = {"min_points_per_centroid": 1, "max_points_per_centroid": len(points)}
    # faiss's seed is an int32.
    options = {"niter": 20, "seed": seed % 2**31, "gpu": min(1, faiss.get_num_gpus())}
    model = faiss.Kmeans(points.shape[1], clusters, **options, **limits)
    model.train(distinct.repeat(count, axis=0))
    assignment: np.ndarray = model.assign(distinct)[1][place]
    return assignment


def _sortable(points: np.ndarray) -> np.ndarray:
    """`[N,D]` float32 -> `[N]` byte strings whose order is that of the rows, the first coordinate before the others.

    A last bit that differs, as between processors, moves no row far.
    """
    bits = points.view(np.uint32)
    # IEEE floats are ordered as their bits are, where those of negative ones are turned over.
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(">u4")
    return ordered.view(np.dtype((np.void, ordered.itemsize * points.shape[1]))).reshape(-1)


def clustering_scores(assignment: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Agreement of clusters `[N]` with classes `[N]`, both of whole numbers.

    `nmi`: mutual information over the arithmetic mean of the two entropies. `f1`: harmonic mean of precision and
    recall over pairs of points, a pair being positive where both are in one cluster and relevant where both are of
    one class; 1 where there is neither sort of pair, as the two partitions are then the same.

    Both come from a sparse contingency table: a dense one of 11,316 classes takes 1 GB.
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
