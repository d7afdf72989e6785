"""Exact retrieval metrics: who stands nearer, counted for every query against the whole gallery.

Q queries, M gallery items, D width, b queries of a block, L items of the largest class in a block, R positives of
a query, k scores kept.

Items are ranked by Euclidean distance, as in all five papers; for unit-norm embeddings that is ranking by cosine.
**Ties go against the query**: a negative exactly as near as a positive stands before it, and positives tied with
each other follow one another. A collapsed embedding scores 0, and no metric depends on the order of storage.
Identical embeddings always tie; different ones at the same distance do as far as float32 scores show it.
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
from dml.evaluation.scores import TILE, Space, Strip, descending, each_strip, full_precision


@dataclass(frozen=True)
class Ranking:
    """What became of each query; all zero for one that has no positive in the gallery.

    Attributes:
        best_rank: `[Q]` int64, rank of the nearest positive, from 1. Recall@K is `best_rank <= K`, for any K.
        values: `[Q]` float64 of each metric that is a mean over queries (`dml.evaluation.metric.of_queries`), by name.
        positives: `[Q]` int64, R: items of the query's class in the gallery, without the query itself.
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
    """Averages over the queries that have a positive; all fractions, 0 to 1.

    Args:
        embeddings, labels, gallery, gallery_labels, block, shared: see `rank`.
        ks: the K of Recall@K, each 1 or more and there once; a large one costs no more time than a small one.
        clustering: k-means of the queries' embeddings as given, one cluster a class.
        seed: of k-means.

    Returns:
        `recall@K` of each K, the metrics of `dml.evaluation.metric.of_queries` (`precision@1`, `r_precision`, `map@r`),
        the counts `queries` (all of them) and
        `queries_without_positive` (left out of the averages), and with `clustering` `nmi` and `f1`.

    Raises:
        UserError: as `rank` does; a K that is none; no query has a positive; clustering without faiss.
    """
    ks = as_ks(ks)
    ranking = rank(embeddings, labels, gallery=gallery, gallery_labels=gallery_labels, block=block, shared=shared)
    result = averages(ranking, ks)
    if clustering:
        result |= cluster(embeddings, labels.labels if isinstance(labels, Layout) else labels, seed=seed)
    return result


def averages(ranking: Ranking, ks: Sequence[int]) -> dict[str, float]:
    """What `evaluate` returns of a ranking. Raises UserError where no query has a positive."""
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
    """`nmi` and `f1` of k-means, one cluster a class: `[N,D]`, `[N]`. Raises UserError as `evaluate` does."""
    points = as_embeddings(embeddings, "embeddings")
    classes = as_labels(labels, points, "labels").cpu().numpy()
    seed = as_number(seed, "seed", 0)
    return clustering_scores(kmeans(points.float().cpu().numpy(), len(np.unique(classes)), seed=seed), classes)


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
        labels: `[Q]` whole numbers; or the `Layout` of these and of the gallery's, which serves all embeddings of the
            same images.
        gallery: `[M,D]`. None: the queries are the gallery, each without itself (by index).
        gallery_labels: `[M]`, given with `gallery` unless `labels` is a layout.
        block: queries at a time, rounded up to whole tiles of 128; None: a tile on a CPU, as many as the free memory of
            a GPU has room for. Memory is about 4 * block * M bytes beside the embeddings, for each of torch's threads
            on a CPU; no metric depends on it.
        shared: all ranks of a distributed run call this with the same arguments: each takes its share of the queries,
            in whole tiles, and all get the ranking of all, to the last bit that of a single process.

    Raises:
        UserError: shapes that do not fit, labels that are no whole numbers, NaN or infinity among the embeddings,
            one of `gallery` and `gallery_labels` without the other, a block below 1.
    """
    block = block if block is None else as_number(block, "block")
    queries, items, layout = _laid_out(embeddings, labels, gallery, gallery_labels)
    best = torch.zeros_like(layout.positives)
    values = {name: best.new_zeros(len(queries), dtype=torch.float64) for name in of_queries()}
    mine = torch.cat([layout.rows[:0], *rank_shard(layout.rows.split(TILE))]) if shared else layout.rows

    def of_block(at: Tensor, strip: Strip) -> tuple[Tensor, dict[str, Tensor]]:
        positives = layout.positives[at]
        first, ranks = _ranks(strip, _take_positives(strip, layout, at), positives)
        return first, {name: of_query(ranks, positives) for name, of_query in of_queries().items()}

    for at, (first, of_metrics) in each_strip(Space.of(queries, items[layout.order]), mine, block, of_block):
        best[at] = first
        for name, of_rows in of_metrics.items():
            values[name][at] = of_rows
    if shared:
        best, values = sum_of_shards(best), {name: sum_of_shards(of_all) for name, of_all in values.items()}
    by_name = {name: of_all.cpu().numpy() for name, of_all in values.items()}
    return Ranking(best.cpu().numpy(), by_name, layout.positives.cpu().numpy())


def rank_scores(scores: Callable[[Tensor], Tensor], layout: Layout) -> Ranking:
    """As `rank`, of scores from elsewhere.

    Args:
        scores: rows `[b]` of the queries -> `[b,M]`, the larger the nearer.
        layout: of the labels.
    """
    best = torch.zeros_like(layout.positives)
    values = {name: best.new_zeros(len(best), dtype=torch.float64) for name in of_queries()}
    for at in layout.rows.split(TILE):
        strip = Strip(scores(at)[:, layout.order], None, len(layout.order))
        positives = layout.positives[at]
        best[at], ranks = _ranks(strip, _take_positives(strip, layout, at), positives)
        for name, of_query in of_queries().items():
            values[name][at] = of_query(ranks, positives)
    by_name = {name: of_all.cpu().numpy() for name, of_all in values.items()}
    return Ranking(best.cpu().numpy(), by_name, layout.positives.cpu().numpy())


def _laid_out(
    embeddings: ArrayLike | Tensor,
    labels: ArrayLike | Tensor | Layout,
    gallery: ArrayLike | Tensor | None,
    gallery_labels: ArrayLike | Tensor | None,
) -> tuple[Tensor, Tensor, Layout]:
    """What `rank` is given, checked: queries `[Q,D]`, gallery `[M,D]`, and the layout of their labels."""
    if isinstance(labels, Layout):
        if labels.apart != (gallery is not None) or gallery_labels is not None:
            raise UserError("A layout holds the gallery's labels: give a gallery where it was made with one.")
        queries, items = as_pair(embeddings, gallery)
        if (len(queries), len(items)) != (len(labels.own), len(labels.order)):
            raise UserError(
                f"The layout is of {len(labels.own)} queries and {len(labels.order)} items, not of {len(queries)} and "
                f"{len(items)}."
            )
        return queries, items, labels
    if (gallery is None) != (gallery_labels is None):
        raise UserError("gallery and gallery_labels belong together: give both or neither.")
    queries, items = as_pair(embeddings, gallery)
    of_queries = as_labels(labels, queries, "labels")
    of_items = None if gallery_labels is None else as_labels(gallery_labels, items, "gallery_labels")
    return queries, items, Layout.of(of_queries, of_items)


def _take_positives(strip: Strip, layout: Layout, at: Tensor) -> Tensor:
    """Moves the scores of the queries' classes out of their strip: `[b,L]`, own and padding -inf."""
    length = layout.length[at, None]
    place = torch.arange(int(length.max()), device=at.device)
    run = layout.start[at, None] + torch.minimum(place, length - 1)
    nearness = strip.scores.gather(1, run)
    nearness.masked_fill_((place >= length) | (run == layout.own[at, None]), -math.inf)
    strip.hide(run)
    return nearness


def _ranks(negatives: Strip, nearness: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Of a block the best ranks `[b]`, and the ranks `[b,L]` of all positives as `Metric.of_query` has them.

    The i-th nearest positive has rank i + the number of negatives at least as near. Metrics ask only about ranks up to
    R, for which the R nearest negatives are enough: a positive behind all of them has a rank above R. Where the best
    one is, its rank takes a pass over the whole gallery.

    Args:
        negatives: scores `[b,P]`, -inf where no negative is.
        nearness: `[b,L]` scores of the positives, -inf where none is.
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
    """Scores `[n,P]` at or above `[n,1]`, counted in place: float sums are several times as fast as boolean ones.

    They are exact up to 2^24, 16.7 million gallery items.
    """
    return torch.ge(scores, threshold, out=scores).sum(1).long()
