"""Re-identification: retrieval across cameras (Zheng et al. 2015), and among one image an identity (Liu et al. 2016).

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
from dml.evaluation.metrics import Ranking, rank
from dml.evaluation.scores import TILE, Space, Strip, descending, each_strip, full_precision, largest


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
    """CMC and mAP of the Market-1501 protocol; fractions, averaged over the queries that have a positive.

    Of a query, gallery images of its identity from its own camera are junk: they are taken out of its ranking, as are
    those with a label below 0 (detections that are nobody's, Market-1501's identity -1). Distractors that count
    (Market-1501's identity 0000) are an identity that no query has.

    Args:
        embeddings: `[Q,D]`.
        labels, cameras: `[Q]` whole numbers.
        gallery: `[M,D]`.
        gallery_labels, gallery_cameras: `[M]`.
        ks: the K of CMC@K.
        block, shared: see `dml.evaluation.metrics.rank`.

    Returns:
        `recall@K`, CMC@K: share of queries with a positive among the K nearest; `map`, average precision as
        `1/R sum_i i / r_i` over the R positives of ranks r_i; `map_toolkit`, the area under the line through the
        precisions as the data set's own toolkit has it, `1/R sum_i (i / r_i + (i-1) / (r_i - 1)) / 2`, where the
        second term is 1 for r_i = 1; the counts `queries` and `queries_without_positive`.

    Raises:
        UserError: shapes that do not fit, labels that are no whole numbers, NaN, a K below 1, or no query has a
            positive.
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
    answered = ranking.positives > 0
    if not answered.any():
        raise UserError(f"None of the {len(answered)} queries has an image of its identity from another camera.")
    result = {f"recall@{k}": float((ranking.best_rank[answered] <= k).mean()) for k in ks}
    result |= {name: float(values[answered].mean()) for name, values in ranking.values.items()}
    return result | {"queries": float(len(answered)), "queries_without_positive": float((~answered).sum())}


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
    """What became of each query of `across_cameras`, junk taken out, with `map` and `map_toolkit` as its values.

    Arguments are those of `across_cameras`, and so is what is raised, but that a query may have no positive.
    """
    block = block if block is None else as_number(block, "block")
    queries, items = as_pair(embeddings, gallery)
    of_query = torch.stack([as_labels(labels, queries, "labels"), as_labels(cameras, queries, "cameras")])
    of_item = torch.stack(
        [as_labels(gallery_labels, items, "gallery_labels"), as_labels(gallery_cameras, items, "gallery_cameras")]
    )
    rows = torch.arange(len(queries), device=queries.device)
    mine = torch.cat([rows[:0], *rank_shard(rows.split(TILE))]) if shared else rows

    def of_block(at: Tensor, strip: Strip) -> tuple[Tensor, Tensor]:
        """Of each query how many positives it has, `[b]`, and of these the negatives at least as near, `[b,L]`."""
        scores = strip.scores[:, : len(items)]
        same = of_query[0, at, None] == of_item[0]
        junk = (same & (of_query[1, at, None] == of_item[1])) | (of_item[0] < 0)
        positive = same & ~junk
        count = positive.sum(1)
        nearness = largest(scores.masked_fill(~positive, -torch.inf), max(1, int(count.max()))).contiguous()
        negatives = descending(scores.masked_fill(same | junk, -torch.inf)).contiguous()
        return count, torch.searchsorted(-negatives, -nearness, right=True)

    # Of each query and each of its positives, the negatives at least as near.
    ahead_of: dict[int, np.ndarray] = {}
    for at, found in each_strip(Space.of(queries, items), mine, block, of_block):
        for query, number, ahead in zip(*(of_rows.cpu().numpy() for of_rows in (at, *found)), strict=True):
            ahead_of[int(query)] = ahead[:number]
    if shared:
        ahead_of = {query: ahead for of_rank in from_all_ranks(ahead_of) for query, ahead in of_rank.items()}
    # Rank of the i-th nearest positive: the negatives at least as near, and the positives up to it.
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
    """PKU VehicleID's protocol: one random image of each identity is the gallery, all others are queries.

    Args:
        embeddings: `[N,D]`.
        labels: `[N]` whole numbers.
        ks: the K of Recall@K.
        draws: galleries, over which metrics are averaged.
        seed: of the galleries, which are a function of it and the labels alone.
        shared: see `dml.evaluation.metrics.rank`.

    Returns:
        `recall@K`; `map`, the mean of 1 / rank of the one positive; `std_over_draws` of recall@1 (n - 1; 0 of a single
        draw); the counts `queries` of a draw and `queries_without_positive`, 0.

    Raises:
        UserError: as `dml.evaluation.metrics.rank` does; a K or a number of draws below 1; no identity with two images.
    """
    ks, draws, seed = as_ks(ks), as_number(draws, "draws"), as_number(seed, "seed", 0)
    points = as_embeddings(embeddings, "embeddings")
    identities = as_labels(labels, points, "labels")
    if len(identities.unique()) == len(identities):
        raise UserError(f"Each of the {len(identities)} images is alone in its identity: none is left as a query.")
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
    """`[N]` bool, true of one random image of each identity."""
    order = np.random.default_rng([seed, draw]).permutation(len(identities))
    first = np.unique(identities[order], return_index=True)[1]
    chosen = np.zeros(len(identities), bool)
    chosen[order[first]] = True
    return chosen
