"""Re-identification metrics: retrieval across cameras (Zheng et al. 2015), and in a gallery that holds one image of
each identity (Liu et al. 2016).

Q queries, M gallery items, D width, b queries of a block. Ties go against the query, as in `dml.evaluation.metrics`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dml.distributed import from_all_ranks, rank_shard
from dml.errors import UserError
from dml.evaluation.inputs import as_embeddings, as_ks, as_labels, as_number, as_pair
from dml.evaluation.metrics import Ranking, averages, rank
from dml.evaluation.scores import TILE, Space, Strip, descending, each_strip, full_precision, largest, room


def across_cameras(
    embeddings: ArrayLike | Tensor,
    labels: ArrayLike | Tensor,
    cameras: ArrayLike | Tensor,
    *,
    gallery: ArrayLike | Tensor,
    gallery_labels: ArrayLike | Tensor,
    gallery_cameras: ArrayLike | Tensor,
    ks: Sequence[int] = (1, 5, 10),
    block: int | None = None,
    shared: bool = False,
) -> dict[str, float]:
    """Computes CMC and mAP of the Market-1501 protocol: fractions, averaged over the queries that have a positive.

    Some gallery images are junk and are taken out of a query's ranking: those of the query's identity from the query's
    own camera, and those with a label below 0 (detections of nobody, identity -1 of Market-1501). Distractors, identity
    0000 of Market-1501, do count: they are negatives, since no query has their identity.

    Args:
        embeddings: `[Q,D]`.
        labels, cameras: `[Q]` whole numbers.
        gallery: `[M,D]`.
        gallery_labels, gallery_cameras: `[M]`.
        ks: the K of CMC@K.
        block, shared: see `dml.evaluation.metrics.rank`.

    Returns:
        `recall@K`, which is CMC@K: the share of queries with a positive among the K nearest. `map`: average precision
        as `1/R sum_i i / r_i` over the R positives, where r_i is the rank of the i-th. `map_toolkit`: average precision
        as the data set's own toolkit computes it, by the trapezoidal rule:
        `1/R sum_i (i / r_i + (i-1) / (r_i - 1)) / 2`, where the second term is 1 for r_i = 1. And the counts `queries`
        (all of them) and `queries_without_positive`.

    Raises:
        UserError: shapes do not fit, labels are not whole numbers, an embedding holds NaN or infinity, a K is below 1
            or named twice, or no query has a positive.
    """
    ks = as_ks(ks)
    ranking = rank_across_cameras(
        embeddings,
        labels,
        cameras,
        gallery=gallery,
        gallery_labels=gallery_labels,
        gallery_cameras=gallery_cameras,
        block=block,
        shared=shared,
    )
    if not ranking.positives.any():
        raise UserError(
            f"None of the {len(ranking.positives)} queries has an image of its identity from another camera."
        )
    return averages(ranking, ks)


@full_precision()
def rank_across_cameras(
    embeddings: ArrayLike | Tensor,
    labels: ArrayLike | Tensor,
    cameras: ArrayLike | Tensor,
    *,
    gallery: ArrayLike | Tensor,
    gallery_labels: ArrayLike | Tensor,
    gallery_cameras: ArrayLike | Tensor,
    block: int | None = None,
    shared: bool = False,
) -> Ranking:
    """Ranks the gallery for every query as `across_cameras` does, without junk; `values` has `map` and `map_toolkit`.

    It takes the same arguments as `across_cameras`, without `ks`, and raises the same errors, with one exception: it
    does not mind if no query has a positive.
    """
    block = block if block is None else as_number(block, "block")
    queries, items = as_pair(embeddings, gallery)
    of_query = torch.stack([as_labels(labels, queries, "labels"), as_labels(cameras, queries, "cameras")])
    of_item = torch.stack(
        [as_labels(gallery_labels, items, "gallery_labels"), as_labels(gallery_cameras, items, "gallery_cameras")]
    )
    if block is None:  # scores are masked twice and sorted whole; a GPU's sort has their places, and a second copy
        block = room(queries.device, 10 * 4 * len(items))
    rows = torch.arange(len(queries), device=queries.device)
    mine = torch.cat([rows[:0], *rank_shard(rows.split(TILE))]) if shared else rows

    def of_block(at: Tensor, strip: Strip) -> tuple[Tensor, Tensor]:
        """Returns how many positives each query has, `[b]`, and how many negatives are at least as near as each
        positive, `[b,L]`."""
        scores = strip.scores[:, : len(items)]
        same = of_query[0, at, None] == of_item[0]
        junk = (same & (of_query[1, at, None] == of_item[1])) | (of_item[0] < 0)
        positive = same & ~junk
        count = positive.sum(1)
        nearness = largest(scores.masked_fill(~positive, -torch.inf), max(1, int(count.max()))).contiguous()
        negatives = descending(scores.masked_fill(same | junk, -torch.inf)).contiguous()
        return count, torch.searchsorted(-negatives, -nearness, right=True)

    # By query: how many negatives are at least as near as each of its positives.
    ahead_of: dict[int, np.ndarray] = {}
    for at, found in each_strip(Space.of(queries, items), mine, block, of_block):
        for query, number, ahead in zip(*(of_rows.cpu().numpy() for of_rows in (at, *found)), strict=True):
            ahead_of[int(query)] = ahead[:number]
    if shared:
        ahead_of = {query: ahead for of_rank in from_all_ranks(ahead_of) for query, ahead in of_rank.items()}
    # The rank of the i-th nearest positive is i plus the number of negatives at least as near.
    ranks = [ahead_of[query] + np.arange(1, len(ahead_of[query]) + 1) for query in range(len(queries))]
    means = {"map": _precisions, "map_toolkit": _toolkit_precisions}
    return Ranking(
        np.array([one[0] if len(one) else 0 for one in ranks]),
        {name: np.array([of(one).mean() if len(one) else 0.0 for one in ranks]) for name, of in means.items()},
        np.array([len(one) for one in ranks]),
    )


def _precisions(ranks: np.ndarray) -> np.ndarray:
    return np.arange(1, len(ranks) + 1) / ranks


def _toolkit_precisions(ranks: np.ndarray) -> np.ndarray:
    before = np.arange(len(ranks)) / np.maximum(ranks - 1, 1)  # at the rank just before
    return (_precisions(ranks) + np.where(ranks == 1, 1.0, before)) / 2


def one_image_gallery(
    embeddings: ArrayLike | Tensor,
    labels: ArrayLike | Tensor,
    *,
    ks: Sequence[int] = (1, 5),
    draws: int = 10,
    seed: int = 0,
    shared: bool = False,
) -> dict[str, float]:
    """Computes PKU VehicleID's metrics: one random image of each identity is the gallery, all others are queries.

    Args:
        embeddings: `[N,D]`.
        labels: `[N]` whole numbers.
        ks: the K of Recall@K.
        draws: how many random galleries are drawn; metrics are averaged over them.
        seed: of the draws. The galleries depend on it and on the labels alone.
        shared: see `dml.evaluation.metrics.rank`.

    Returns:
        `recall@K`; `map`, the mean of 1 / rank of the one positive; `std_over_draws`, the standard deviation of
        recall@1 over the draws (divided by n - 1; 0 for a single draw); and the counts `queries`, of one draw, and
        `queries_without_positive`, which is 0.

    Raises:
        UserError: as `dml.evaluation.metrics.rank`; also if a K or `draws` is below 1, or if no identity has two
            images.
    """
    ks, draws, seed = as_ks(ks), as_number(draws, "draws"), as_number(seed, "seed", 0)
    points = as_embeddings(embeddings, "embeddings")
    identities = as_labels(labels, points, "labels")
    if len(identities.unique()) == len(identities):
        raise UserError(
            f"Each of the {len(identities)} images is alone in its identity, so none is left as a query: give at least "
            "one identity two images."
        )
    best, known = [], identities.cpu().numpy()
    for draw in range(draws):
        chosen = torch.as_tensor(_one_each(known, seed, draw), device=points.device)
        ranking = rank(
            points[~chosen],
            identities[~chosen],
            gallery=points[chosen],
            gallery_labels=identities[chosen],
            shared=shared,
        )
        best.append(ranking.best_rank)
    ranks = np.stack(best)  # [draws, queries]
    result = {f"recall@{k}": float((ranks <= k).mean()) for k in ks}
    result["map"] = float((1 / ranks).mean())
    result["std_over_draws"] = float((ranks == 1).mean(1).std(ddof=1)) if draws > 1 else 0.0
    return result | {"queries": float(ranks.shape[1]), "queries_without_positive": 0.0}


def _one_each(identities: np.ndarray, seed: int, draw: int) -> np.ndarray:
    """Returns `[N]` bool, true for one random image of each identity."""
    order = np.random.default_rng([seed, draw]).permutation(len(identities))
    first = np.unique(identities[order], return_index=True)[1]
    chosen = np.zeros(len(identities), bool)
    chosen[order[first]] = True
    return chosen
