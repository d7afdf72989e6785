"""Exact retrieval metrics: every query is compared with the whole gallery.

Q queries, M gallery items, D width, b queries of a block, L items of the largest class in a block, R positives of
a query, k scores kept.

Items are ranked by Euclidean distance, as in all five papers; for unit-norm embeddings that is ranking by cosine.
**Ties go against the query**: a negative that is exactly as near as a positive is ranked before it, and positives that
tie with each other get successive ranks. So a collapsed embedding scores 0, and no metric depends on the order of
storage. Identical embeddings always tie; different ones at the same distance tie if their float32 scores are equal.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dml.distributed import rank_shard, sum_of_shards
from dml.errors import UserError
from dml.evaluation.clustering import clustering_scores, kmeans
from dml.evaluation.inputs import as_embeddings, as_ks, as_labels, as_number, as_pair
from dml.evaluation.layout import Layout
from dml.evaluation.metric import of_queries
from dml.evaluation.scores import TILE, Space, Strip, descending, each_strip, full_precision, room


@dataclass(frozen=True)
class Ranking:
    """The result of each query. All numbers are 0 for a query that has no positive in the gallery.

    Attributes:
        best_rank: `[Q]` int64, rank of the nearest positive, from 1. Recall@K is `best_rank <= K`, for any K.
        values: by name, the values `[Q]` float64 of each metric that is a mean over queries
            (`dml.evaluation.metric.of_queries`).
        positives: `[Q]` int64, R: the number of items of the query's class in the gallery, without the query itself.
    """

    best_rank: np.ndarray
    values: Mapping[str, np.ndarray]
    positives: np.ndarray


def evaluate(
    embeddings: ArrayLike | Tensor,
    labels: ArrayLike | Tensor | Layout,
    *,
    gallery: ArrayLike | Tensor | None = None,
    gallery_labels: ArrayLike | Tensor | None = None,
    ks: Sequence[int] = (1, 2, 4, 8),
    block: int | None = None,
    shared: bool = False,
    clustering: bool = True,
    seed: int = 0,
) -> dict[str, float]:
    """Computes the metrics of embeddings: fractions from 0 to 1, averaged over the queries that have a positive.

    Args:
        embeddings, labels, gallery, gallery_labels, block, shared: see `rank`.
        ks: the K of Recall@K, each at least 1 and no two equal; a large K costs no more time than a small one.
        clustering: also run k-means on the queries' embeddings as given, with one cluster for each class.
        seed: of k-means.

    Returns:
        `recall@K` of each K; the metrics of `dml.evaluation.metric.of_queries` (`precision@1`, `r_precision`,
        `map@r`); the counts `queries` (all of them) and `queries_without_positive` (left out of the averages); and
        with `clustering` also `nmi` and `f1`.

    Raises:
        UserError: as `rank`; also if a K is below 1 or named twice, if no query has a positive, or if clustering is
            asked for and faiss is not installed.
    """
    ks = as_ks(ks)
    ranking = rank(embeddings, labels, gallery=gallery, gallery_labels=gallery_labels, block=block, shared=shared)
    result = averages(ranking, ks)
    if clustering:
        result |= cluster(embeddings, labels.labels if isinstance(labels, Layout) else labels, seed=seed)
    return result


def averages(ranking: Ranking, ks: Sequence[int]) -> dict[str, float]:
    """Averages a ranking over its queries: what `evaluate` returns, without clustering.

    Raises:
        UserError: no query has a positive.
    """
    found = ranking.positives > 0
    if not found.any():
        raise UserError(
            f"None of the {len(found)} queries has another item of its class in the gallery; check the labels."
        )
    best = ranking.best_rank[found]
    result = {f"recall@{k}": float((best <= k).mean()) for k in ks}
    result |= {name: float(values[found].mean()) for name, values in ranking.values.items()}
    return result | {"queries": float(len(found)), "queries_without_positive": float((~found).sum())}


def cluster(embeddings: ArrayLike | Tensor, labels: ArrayLike | Tensor, *, seed: int = 0) -> dict[str, float]:
    """Clusters embeddings `[N,D]` by k-means, one cluster for each class, and compares the clusters with labels `[N]`.

    Returns:
        `nmi` and `f1`.

    Raises:
        UserError: shapes do not fit, an embedding holds NaN or infinity, or faiss is not installed.
    """
    points = as_embeddings(embeddings, "embeddings")
    classes = as_labels(labels, points, "labels").cpu().numpy()
    seed = as_number(seed, "seed", 0)
    points = points if points.dtype == torch.float64 else points.float()
    return clustering_scores(kmeans(points.cpu().numpy(), len(np.unique(classes)), seed=seed), classes)


@full_precision()
def rank(
    embeddings: ArrayLike | Tensor,
    labels: ArrayLike | Tensor | Layout,
    *,
    gallery: ArrayLike | Tensor | None = None,
    gallery_labels: ArrayLike | Tensor | None = None,
    block: int | None = None,
    shared: bool = False,
) -> Ranking:
    """Ranks the gallery for every query, on the device of `embeddings`.

    Args:
        embeddings: `[Q,D]` queries, of any number type; scores are float32 (see `Space`).
        labels: `[Q]` whole numbers; or the `Layout` of them and of the gallery's labels, which can be used again for
            other embeddings of the same images.
        gallery: `[M,D]`. None: the queries are the gallery, each without itself (by index).
        gallery_labels: `[M]`, given with `gallery` unless `labels` is a layout.
        block: queries at a time, rounded up to whole tiles of 128. None: one tile on a CPU, and on a GPU as many as its
            free memory has room for. It takes about 4 * block * M bytes beside the embeddings (on a CPU, for each of
            torch's threads). No metric depends on it.
        shared: divide the work among the ranks of a distributed run. All ranks call this with the same arguments; each
            takes its share of the queries, in whole tiles, and all get the whole ranking, to the last bit that of a
            single process.

    Raises:
        UserError: shapes do not fit, labels are not whole numbers, the embeddings hold NaN or infinity, one of
            `gallery` and `gallery_labels` is missing, `block` is below 1, or a metric is no number for some query.
    """
    block = block if block is None else as_number(block, "block")
    queries, items, layout = _laid_out(embeddings, labels, gallery, gallery_labels)
    if block is None:  # of each positive about eight numbers are held beside the scores
        block = room(queries.device, 4 * len(items) + 64 * int(layout.length.max()))
    best = torch.zeros_like(layout.positives)
    metrics = of_queries()
    values = {name: best.new_zeros(len(queries), dtype=torch.float64) for name in metrics}
    mine = torch.cat([layout.rows[:0], *rank_shard(layout.rows.split(TILE))]) if shared else layout.rows

    def of_block(at: Tensor, strip: Strip) -> tuple[Tensor, dict[str, Tensor]]:
        positives = layout.positives[at]
        first, ranks = _ranks(strip, _take_positives(strip, layout, at), positives)
        return first, {
            name: _of_rows(name, of_query(ranks, positives), positives) for name, of_query in metrics.items()
        }

    for at, (first, of_metrics) in each_strip(Space.of(queries, items[layout.order]), mine, block, of_block):
        best[at] = first
        for name, of_rows in of_metrics.items():
            values[name][at] = of_rows
    if shared:
        best, values = sum_of_shards(best), {name: sum_of_shards(of_all) for name, of_all in values.items()}
    return _ranking(best, values, layout.positives)


@full_precision()
def rank_scores(scores: Callable[[Tensor], Tensor], layout: Layout) -> Ranking:
    """Ranks as `rank` does, but by scores that are given, such as those of a re-ranker.

    Args:
        scores: a function from rows `[b]` of the queries to scores `[b,M]`, the larger the nearer.
        layout: of the labels of queries and gallery.

    Raises:
        UserError: a score is NaN, or a metric is no number for some query.
    """
    best = torch.zeros_like(layout.positives)
    metrics = of_queries()
    values = {name: best.new_zeros(len(best), dtype=torch.float64) for name in metrics}
    for at in layout.rows.split(TILE):
        found = scores(at)
        if found.isnan().any():
            raise UserError("The scores to rank by hold NaN: look at what `scores` of the re-ranker returns.")
        strip = Strip(found[:, layout.order], None, len(layout.order))
        positives = layout.positives[at]
        best[at], ranks = _ranks(strip, _take_positives(strip, layout, at), positives)
        for name, of_query in metrics.items():
            values[name][at] = _of_rows(name, of_query(ranks, positives), positives)
    return _ranking(best, values, layout.positives)


def _of_rows(name: str, found: object, positives: Tensor) -> Tensor:
    """Returns what a metric's `of_query` gave for queries, `[b]` float64. Raises UserError unless each has a number."""
    if isinstance(found, Tensor) and found.shape == positives.shape:
        return found.double()
    said = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    raise UserError(
        f"of_query of the metric {name} returns {said} for {len(positives)} queries: return [b], a number for each."
    )


def _ranking(best: Tensor, values: dict[str, Tensor], positives: Tensor) -> Ranking:
    """Puts a ranking together on the CPU, from ranks, metrics and numbers of positives, each `[Q]`. Raises UserError if
    a metric of a query that has a positive is NaN or infinite."""
    by_name, counted = {name: of_all.cpu().numpy() for name, of_all in values.items()}, positives.cpu().numpy()
    for name, of_all in by_name.items():
        if wrong := int((~np.isfinite(of_all[counted > 0])).sum()):
            raise UserError(
                f"of_query of the metric {name} returns NaN or infinity for {wrong} queries: return a number."
            )
    return Ranking(best.cpu().numpy(), by_name, counted)


def _laid_out(
    embeddings: ArrayLike | Tensor,
    labels: ArrayLike | Tensor | Layout,
    gallery: ArrayLike | Tensor | None,
    gallery_labels: ArrayLike | Tensor | None,
) -> tuple[Tensor, Tensor, Layout]:
    """Checks the arguments of `rank`: returns queries `[Q,D]`, gallery `[M,D]`, and the layout of their labels."""
    if isinstance(labels, Layout):
        if labels.apart != (gallery is not None) or gallery_labels is not None:
            raise UserError(
                "A layout holds the gallery's labels: give no gallery_labels, and give a gallery exactly if the layout "
                "was made with one."
            )
        queries, items = as_pair(embeddings, gallery)
        if (len(queries), len(items)) != (len(labels.own), len(labels.order)):
            raise UserError(
                f"The layout is of {len(labels.own)} queries and {len(labels.order)} items, not of {len(queries)} and "
                f"{len(items)}: make it from the labels of these embeddings."
            )
        return queries, items, labels
    if (gallery is None) != (gallery_labels is None):
        raise UserError("gallery and gallery_labels belong together: give both or neither.")
    queries, items = as_pair(embeddings, gallery)
    of_queries = as_labels(labels, queries, "labels")
    of_items = None if gallery_labels is None else as_labels(gallery_labels, items, "gallery_labels")
    return queries, items, Layout.of(of_queries, of_items)


def _take_positives(strip: Strip, layout: Layout, at: Tensor) -> Tensor:
    """Returns the scores of each query's positives, `[b,L]`, and hides the query's class in the strip.

    The query itself and padding have -inf.
    """
    length = layout.length[at, None]
    place = torch.arange(int(length.max()), device=at.device)
    run = layout.start[at, None] + torch.minimum(place, length - 1)
    nearness = strip.scores.gather(1, run)
    nearness.masked_fill_((place >= length) | (run == layout.own[at, None]), -math.inf)
    strip.hide(run)
    return nearness


def _ranks(negatives: Strip, nearness: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the best rank of each query of a block, `[b]`, and the ranks of its positives, `[b,L]`, as
    `Metric.of_query` takes them.

    The i-th nearest positive has rank i + the number of negatives at least as near. Metrics need exact ranks up to R
    only, for which the R nearest negatives are enough: a positive behind all of them has a rank above R. If even the
    best positive is behind them, its rank takes a pass over the whole gallery.

    Args:
        negatives: scores `[b,P]`, -inf where there is no negative.
        nearness: `[b,L]` scores of the positives, -inf where there is none.
        count: `[b]`, R.
    """
    deepest = int(count.max())
    nearness = descending(nearness)[:, :deepest].contiguous()
    hardest = negatives.largest(min(deepest, negatives.scores.shape[1]))
    ahead = torch.searchsorted(-hardest, -nearness, right=True)
    order = torch.arange(1, deepest + 1, device=ahead.device)
    ranks = order + ahead
    best = ranks[:, 0].clone()
    far = (ahead[:, 0] == hardest.shape[1]).nonzero()[:, 0]
    best[far] = 1 + _count_at_least(negatives.scores[far], nearness[far, :1])
    return best, ranks


def _count_at_least(scores: Tensor, threshold: Tensor) -> Tensor:
    """Counts the scores `[n,P]` of each row that are at or above `[n,1]`; the scores are overwritten.

    It sums floats, which is several times as fast as summing booleans and exact up to 2^24, 16.7 million gallery items.
    """
    return torch.ge(scores, threshold, out=scores).sum(1).long()
