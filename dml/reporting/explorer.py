"""The data with which the run page shows test images and their neighbours: numbers for its script, and thumbnails."""

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np

from dml.figures.projection import projections
from dml.figures.sprites import COLUMNS, Sprites, sprites
from dml.reporting.retrieved import Retrieved

MOST = 10_000  # images on a page


@dataclass(frozen=True)
class Explorer:
    """The data that goes into the page, which shows N images.

    Attributes:
        data: plain containers, for JSON. Images are numbered in the order of their thumbnails.
        sheets: images that hold the thumbnails, in base64.
        maps: by title, the positions `[N,2]` of the images.
        images, queries: how many images and queries are on the page.
        left_out: how many queries are not on the page.
        place: for each query on the page, its index among all queries -> its number among the images.
        outcome: `[N]`, of each image: 1 if its nearest image is right, 0 if it is wrong, -1 if it is no query, or one
            that has no positive.
    """

    data: dict[str, Any]
    sheets: list[str]
    maps: dict[str, np.ndarray]
    images: int
    queries: int
    left_out: int
    place: dict[int, int]
    outcome: np.ndarray


def explorer(tested: Retrieved, most: int = MOST) -> Explorer:
    """Makes the data of the page, for all test images or, if there are more than `most`, for as many queries with their
    neighbours as fit. These are drawn at random, with a fixed seed."""
    queries, searched, near = tested.queries, tested.searched, tested.neighbours.indices
    query_rows, searched_rows = queries.rows.cpu().numpy(), searched.rows.cpu().numpy()
    chosen = np.arange(len(query_rows))
    every = np.unique(np.concatenate([query_rows, searched_rows]))
    if len(every) > most:
        chosen = np.sort(np.random.default_rng(0).permutation(len(query_rows))[: max(1, most // (near.shape[1] + 1))])
        every = np.unique(np.concatenate([query_rows[chosen], searched_rows[near[chosen]].ravel()]))
    pictures = sprites(tested.records.opened, every.tolist())
    points = tested.embedded.take(every).embeddings.flatten(1)
    maps = projections(points)
    own = np.searchsorted(every, query_rows[chosen])
    cosines = 1 - tested.neighbours.distances[chosen] ** 2 / (2 * tested.learners)  # mean over learners
    labels = tested.records.labels[every]
    there, classes = np.unique(labels, return_inverse=True)
    data = {
        "classes": [tested.records.class_names[c] for c in there],
        "classOf": classes.tolist(),
        "side": pictures.side,
        "columns": COLUMNS,
        "maps": [
            {"title": title, "points": np.round(of * 1000).astype(int).ravel().tolist()} for title, of in maps.items()
        ],
        "queries": own.tolist(),
        "k": near.shape[1],
        "neighbours": np.searchsorted(every, searched_rows[near[chosen]]).ravel().tolist(),
        "cosines": np.round(cosines * 1000).astype(int).ravel().tolist(),
        "right": tested.right[chosen].astype(int).tolist(),
        "counted": tested.counted[chosen].astype(int).tolist(),
        "rank": None if tested.ranking is None else tested.ranking.best_rank[chosen].tolist(),
        "learners": _of_learners(tested, chosen),
    }
    place = dict(zip(chosen.tolist(), own.tolist(), strict=True))
    outcome = np.full(len(every), -1)
    outcome[own] = np.where(tested.counted[chosen], tested.right[chosen], -1)
    left_out = len(query_rows) - len(chosen)
    return Explorer(data, _encoded(pictures), maps, len(every), len(chosen), left_out, place, outcome)


def _of_learners(tested: Retrieved, chosen: np.ndarray) -> list[list[int]]:
    """Returns, for each learner, whether the nearest image of each query is right by it alone; empty for a single
    learner."""
    if tested.best_of_learners is None:
        return []
    return [(best[chosen] == 1).astype(int).tolist() for best in tested.best_of_learners]


def _encoded(pictures: Sprites) -> list[str]:
    return [base64.b64encode(sheet).decode() for sheet in pictures.sheets]
