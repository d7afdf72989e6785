"""Pictures made of images: neighbours, clusters, queries."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from dml.evaluation.evaluator import Embedded
from dml.evaluation.neighbours import nearest
from dml.figures.fonts import fitting, write
from dml.figures.style import GREY, RIGHT, WRONG, thumbnail

SIDE = 72  # of a thumbnail, in pixels

SMALL = 10  # pixels of the names below thumbnails

QUERIES = 10  # of each learner in `easiest_queries`


def cluster_images(
    clusters: np.ndarray,
    learners: int,
    rows: np.ndarray,
    open_image: Any,
    name: Callable[[int], str],
    count: int = 12,
) -> Image.Image:
    """Draws random images of each learner's cluster, one row for each learner, with their classes below.

    Args:
        clusters: `[N]`, the learner of each image, 0 to `learners` - 1.
        rows: `[N]`, the row of each image in the records.
        open_image: row of the records -> RGB image.
        name: row of the records -> its class.
    """
    rng = np.random.default_rng(0)
    lines = []
    for k in range(learners):
        members = np.flatnonzero(clusters == k)
        chosen = rng.choice(members, min(count, len(members)), replace=False)
        tiles = [(thumbnail(open_image(int(rows[i])), SIDE, GREY), name(int(rows[i]))) for i in chosen]
        lines.append((f"learner {k}: {len(members)} images", tiles))
    return sheet(lines, count, SIDE)


def easiest_queries(best: np.ndarray, rows: np.ndarray, open_image: Any, name: Callable[[int], str]) -> Image.Image:
    """Draws queries that one learner answers and the others do not, one row for each learner (DCES Fig. 9).

    A learner answers a query if its nearest image is a positive (Recall@1 = 1). Below each query stand its class and
    the rank of the nearest positive for the best of the other learners. Queries with the highest such rank come first.

    Args:
        best: `[L,Q]`, the rank of the nearest positive of each query for each learner alone; 0 if it has no positive.
        rows: `[Q]`, the row of each query in the records.
        open_image: row of the records -> RGB image.
        name: row of the records -> its class.
    """
    lines = []
    for i, own in enumerate(best):
        others = np.delete(best, i, axis=0).min(0)
        alone = np.flatnonzero((own == 1) & (others > 1))
        chosen = alone[np.argsort(-others[alone], kind="stable")][:QUERIES]
        shown = [(int(rows[q]), int(others[q])) for q in chosen]
        tiles = [(thumbnail(open_image(row), SIDE, GREY), f"{best_rank}: {name(row)}") for row, best_rank in shown]
        if tiles:
            lines.append((f"learner {i}: {len(alone)} of {len(own)} queries", tiles))
    return sheet(lines or [("no learner: none of the queries", [])], QUERIES, SIDE)


def sheet(lines: Sequence[tuple[str, Sequence[tuple[Image.Image, str]]]], columns: int, side: int) -> Image.Image:
    """Draws rows of thumbnails, each with a title above, and with a text below each thumbnail.

    Args:
        lines: for each row its title, and its thumbnails with their texts.
        columns: thumbnails that a row has room for.
        side: of a thumbnail, in pixels.
    """
    step, above, below = side + 8, 20, 18 if any(word for _, tiles in lines for _, word in tiles) else 4
    height = above + side + below
    sheet = Image.new("RGB", (step * columns, height * len(lines)), "white")
    draw = ImageDraw.Draw(sheet)
    for y, (title, tiles) in enumerate(lines):
        write(draw, (4, y * height + 3), title, 12)
        for x, (picture, word) in enumerate(tiles):
            sheet.paste(picture, (x * step, y * height + above))
            write(draw, (x * step + 4, y * height + above + side + 2), fitting(word, SMALL, side), SMALL)
    return sheet


@dataclass(frozen=True)
class Neighbours:
    """The nearest images of each query, nearest first.

    Attributes:
        indices: `[Q,k]` int64, positions in the gallery, or among the queries without one.
        distances: `[Q,k]` float32, between the concatenated embeddings of all learners.
    """

    indices: np.ndarray
    distances: np.ndarray


def neighbours_of(queries: Embedded, gallery: Embedded | None, cameras: np.ndarray | None, k: int) -> Neighbours:
    """Returns the k nearest images of each query in the gallery, or among the other queries without one.

    There are fewer than k if fewer can be searched. Of images that are equally near, those of other classes are first,
    as the metrics rank them.

    Args:
        cameras: the camera of each row of the records. If given, images of the query's class from its own camera are
            left out; they are last where too few others are there.
    """
    searched = gallery or queries
    out = None if cameras is None else _OwnCamera(queries, searched, cameras)
    most = 0 if out is None else out.most
    there = len(searched.labels) - (gallery is None)
    k = max(1, min(k, there - most))
    where = None if gallery is None else gallery.embeddings.flatten(1)
    classes = queries.labels, searched.labels
    distances, found = nearest(queries.embeddings.flatten(1), where, k=min(k + most, there), classes=classes)
    own = searched.labels.cpu().numpy()[found] == queries.labels.cpu().numpy()[:, None]
    hidden = np.zeros_like(own) if out is None else out.of(found)
    order = np.lexsort((own, distances, hidden), axis=1)
    distances, found = (np.take_along_axis(values, order, 1) for values in (distances, found))
    return Neighbours(found[:, :k], distances[:, :k])


class _OwnCamera:
    """Tells which neighbours have both the class and the camera of their query.

    `most` is the largest number of such images that any query can have. No `[Q,N]` matrix is made.
    """

    def __init__(self, queries: Embedded, searched: Embedded, cameras: np.ndarray) -> None:
        def pairs(of: Embedded) -> np.ndarray:  # one number for each class and camera
            return of.labels.cpu().numpy() * (int(cameras.max()) + 1) + cameras[of.rows.cpu().numpy()]

        self.queries, self.searched = pairs(queries), pairs(searched)
        there, counts = np.unique(self.searched, return_counts=True)
        left_out = counts[np.isin(there, self.queries)]
        self.most = int(left_out.max()) if len(left_out) else 0

    def of(self, found: np.ndarray) -> np.ndarray:
        """Positions of neighbours `[Q,k]` -> whether each is of the query's class and camera, `[Q,k]` bool."""
        own: np.ndarray = self.searched[found] == self.queries[:, None]
        return own


def retrieval_gallery(
    queries: Embedded,
    searched: Embedded,
    neighbours: Neighbours,
    right: np.ndarray,
    open_image: Any,
    name: Callable[[int], str],
    count: int = 10,
    side: int = 88,
) -> Image.Image:
    """Draws random queries with their nearest neighbours, right ones green with a tick, wrong ones red with a cross.

    Half of the rows are queries whose nearest neighbour is wrong, if there are enough of them. Below each image stands
    its class.

    Args:
        searched: the images that were searched; `neighbours` has positions in it.
        right: `[Q]` bool, whether the nearest neighbour is of the query's class.
        count: how many queries.
        side: of an image, in pixels.
        open_image: row of the records -> RGB image.
        name: row of the records -> its class.
    """
    rows = _half_wrong(torch.as_tensor(right), count)
    places = neighbours.indices
    step, gap, below = side + 8, 24, 16
    sheet = Image.new("RGB", (step * (places.shape[1] + 1) + gap, (step + below) * len(rows) + 20), "white")
    draw = ImageDraw.Draw(sheet)
    write(draw, (4, 2), "query", 13, "-Bold")
    write(draw, (step + gap, 2), "nearest neighbours, nearest first", 13, "-Bold")
    for y, query in enumerate(rows):
        top, own = 20 + y * (step + below), int(queries.rows[query])
        sheet.paste(thumbnail(open_image(own), side, GREY), (0, top))
        write(draw, (2, top + side + 1), fitting(name(own), SMALL, side), SMALL)
        for x, place in enumerate(places[query]):
            row = int(searched.rows[int(place)])
            good = bool(searched.labels[int(place)] == queries.labels[query])
            picture = thumbnail(open_image(row), side, RIGHT if good else WRONG)
            mark(picture, good)
            left = gap + (x + 1) * step
            sheet.paste(picture, (left, top))
            write(draw, (left + 2, top + side + 1), fitting(name(row), SMALL, side), SMALL)
    return sheet


def _half_wrong(first_right: Tensor, count: int) -> list[int]:
    order = torch.randperm(len(first_right), generator=torch.Generator().manual_seed(0))
    wrong, right = order[~first_right[order]].tolist(), order[first_right[order]].tolist()
    half = wrong[: count // 2]
    return right[: count - len(half)] + half


def mark(picture: Image.Image, good: bool) -> None:
    """Draws a tick or a cross into the corner, for readers who cannot tell the frame's colours apart."""
    draw = ImageDraw.Draw(picture)
    draw.rectangle((3, 3, 17, 17), fill=RIGHT if good else WRONG)
    lines = [(6, 10, 9, 14), (9, 14, 15, 6)] if good else [(6, 6, 14, 14), (6, 14, 14, 6)]
    for line in lines:
        draw.line(line, fill="white", width=2)
