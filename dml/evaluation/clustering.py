"""K-means, and how well clusters of the embeddings are the classes: NMI and F1 (Song et al. 2017, section 5)."""

import warnings
from typing import Any

import numpy as np

from dml.errors import UserError


def need_faiss() -> Any:
    """The module faiss.

    Raises:
        UserError: it is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise UserError(
            "K-means needs faiss, which is not installed: install dml[cpu] or dml[gpu] (without it, evaluate with "
            "protocol.clustering=false)."
        ) from error
    return faiss


def kmeans(embeddings: np.ndarray, clusters: int, *, seed: int) -> np.ndarray:
    """Clusters by faiss: 20 Lloyd iterations over all points from `clusters` random points; on a GPU where its build
    has one.

    Args:
        embeddings: `[N,D]`, N >= clusters.
        seed: the same one gives the same clusters.

    Returns:
        `[N]` int64, the nearest centroid of each point.

    Raises:
        UserError: faiss is not installed.
    """
    faiss = need_faiss()
    points = np.ascontiguousarray(embeddings, dtype=np.float32)
    # faiss would warn of fewer than 39 points a centroid and sample 256 of more; retrieval test sets have 2 to 82.
    limits = {"min_points_per_centroid": 1, "max_points_per_centroid": len(points)}
    model = faiss.Kmeans(points.shape[1], clusters, niter=20, seed=seed, gpu=min(1, faiss.get_num_gpus()), **limits)
    model.train(points)
    return model.assign(points)[1]


def clustering_scores(assignment: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Agreement of clusters `[N]` with classes `[N]`, both of whole numbers.

    `nmi`: mutual information over the arithmetic mean of the two entropies. `f1`: harmonic mean of precision and
    recall over pairs of points, a pair being positive where both are in one cluster and relevant where both are of
    one class; 1 where there is neither sort of pair, as the two partitions are then the same.

    Both come from a sparse contingency table: a dense one of 11,316 classes takes 1 GB.
    """
    # Imported here: retrieval figures alone need not wait for scikit-learn.
    from sklearn.metrics import normalized_mutual_info_score
    from sklearn.metrics.cluster import pair_confusion_matrix

    with warnings.catch_warnings():
        # scikit-learn takes many small classes for a regression target.
        warnings.filterwarnings("ignore", "The number of unique classes is greater than 50%", UserWarning)
        nmi = float(normalized_mutual_info_score(labels, assignment, average_method="arithmetic"))
        (_, false_positive), (false_negative, true_positive) = pair_confusion_matrix(labels, assignment).tolist()
    pairs = 2 * true_positive + false_positive + false_negative
    return {"nmi": nmi, "f1": 2 * true_positive / pairs if pairs else 1.0}
