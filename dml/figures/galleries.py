"""Pictures made of images: neighbours, clusters, queries."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from dml.evaluation.evaluator import Embedded
from dml.evaluation.layout import Layout
from dml.evaluation.metrics import rank
from dml.evaluation.neighbours import nearest
from dml.figures.style import GREY, RIGHT, WRONG, thumbnail


def cluster_images(
    clusters: np.ndarray, learners: int, rows: np.ndarray, open_image: Any, count: int = 12, side: int = 72
) -> Image.Image:
    """Random images of each learner's cluster, a row a learner.

    Args:
        clusters: `[N]`, 0 to `learners` - 1.
        rows: `[N]`, of the records.
        open_image: row of the records -> RGB image.
    """
    rng = np.random.default_rng(0)
    lines = []
    for k in range(learners):
        members = np.flatnonzero(clusters == k)
        chosen = rng.choice(members, min(count, len(members)), replace=False)
        tiles = [(thumbnail(open_image(int(rows[i])), side, GREY), "") for i in chosen]
        lines.append((f"learner {k}: {len(members)} images", tiles))
    return sheet(lines, count, side)


def easiest_queries(
    queries: Embedded, gallery: Embedded | None, open_image: Any, count: int = 10, side: int = 72
) -> Image.Image:
    """Queries that one learner answers and the others do not, a row a learner (DCES Fig. 9).

    Those of a learner have Recall@1 = 1 for it, and stand in the order of how far the best of all other learners is
    from an answer; the rank of its nearest positive is printed below.
    """
    layout = Layout.of(queries.labels, None if gallery is None else gallery.labels)

    def best_rank(i: int) -> np.ndarray:
        there = None if gallery is None else gallery.embeddings[:, i]
        return rank(queries.embeddings[:, i], layout, gallery=there).best_rank

    best = np.stack([best_rank(i) for i in range(queries.embeddings.shape[1])])  # [L,Q]; 0 without a positive
    lines = []
    for i, own in enumerate(best):
        others = np.delete(best, i, axis=0).min(0)
        alone = np.flatnonzero((own == 1) & (others > 1))
        chosen = alone[np.argsort(-others[alone], kind="stable")][:count]
        tiles = [(thumbnail(open_image(int(queries.rows[q])), side, GREY), str(others[q])) for q in chosen]
        lines.append((f"learner {i}: {len(alone)} of {len(own)} queries", tiles))
    return sheet(lines, count, side)


def sheet(lines: Sequence[tuple[str, Sequence[tuple[Image.Image, str]]]], columns: int, side: int) -> Image.Image:
    """Rows of thumbnails, each with a title above, and with a word below each thumbnail."""
    font = ImageFont.truetype(str(matplotlib.get_data_path()) + "/fonts/ttf/DejaVuSans.ttf", 12)
    step, above, below = side + 8, 20, 18 if any(word for _, tiles in lines for _, word in tiles) else 4
    height = above + side + below
    sheet = Image.new("RGB", (step * columns, height * len(lines)), "white")
    draw = ImageDraw.Draw(sheet)
    for y, (title, tiles) in enumerate(lines):
        draw.text((4, y * height + 3), title, fill="black", font=font)
        for x, (picture, word) in enumerate(tiles):
            sheet.paste(picture, (x * step, y * height + above))
            draw.text((x * step + 4, y * height + above + side + 2), word, fill="black", font=font)
    return sheet


def retrieval_gallery(
    queries: Embedded,
    gallery: Embedded | None,
    open_image: Any,
    cameras: np.ndarray | None = None,
    count: int = 10,
    k: int = 8,
    side: int = 88,
) -> Image.Image:
    """Random queries and their nearest neighbours, right ones framed green and ticked, wrong ones red and crossed.

    Half of the rows are queries whose nearest neighbour is wrong, if there are that many.

    Args:
        open_image: row of the records -> RGB image.
        cameras: of all rows; where given, images of the query's class from its own camera are left out.
    """
    chosen_from = gallery or queries
    left_out, most = None, 0
    if cameras is not None:
        own = cameras[queries.rows.cpu().numpy()][:, None] == cameras[chosen_from.rows.cpu().numpy()]
        left_out = own & (queries.labels[:, None] == chosen_from.labels).cpu().numpy()  # [Q,M]
        most = int(left_out.sum(1).max())
    k = min(k, len(chosen_from.labels) - (gallery is None) - most)
    where = None if gallery is None else gallery.embeddings.flatten(1)
    found = nearest(queries.embeddings.flatten(1), where, k=k + most)[1]
    if left_out is not None:  # moves behind the others
        found = np.take_along_axis(found, np.take_along_axis(left_out, found, 1).argsort(1, kind="stable"), 1)
    neighbours = torch.as_tensor(found[:, :k])
    right = chosen_from.labels.cpu()[neighbours] == queries.labels.cpu()[:, None]  # [Q,k]
    rows = _half_wrong(right[:, 0], count)
    font = ImageFont.truetype(str(matplotlib.get_data_path()) + "/fonts/ttf/DejaVuSans-Bold.ttf", 13)
    step, gap = side + 8, 24
    sheet = Image.new("RGB", (step * (k + 1) + gap, step * len(rows) + 20), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((4, 2), "query", fill="black", font=font)
    draw.text((step + gap, 2), "nearest neighbours, nearest first", fill="black", font=font)
    for y, query in enumerate(rows):
        sheet.paste(thumbnail(open_image(int(queries.rows[query])), side, GREY), (0, 20 + y * step))
        for x, neighbour in enumerate(neighbours[query]):
            good = bool(right[query, x])
            picture = thumbnail(open_image(int(chosen_from.rows[neighbour])), side, RIGHT if good else WRONG)
            mark(picture, good)
            sheet.paste(picture, (gap + (x + 1) * step, 20 + y * step))
    return sheet


def _half_wrong(first_right: Tensor, count: int, seed: int = 0) -> list[int]:
    order = torch.randperm(len(first_right), generator=torch.Generator().manual_seed(seed))
    wrong, right = order[~first_right[order]].tolist(), order[first_right[order]].tolist()
    half = wrong[: count // 2]
    return right[: count - len(half)] + half


def mark(picture: Image.Image, good: bool) -> None:
    """A tick or a cross in the corner: the frame's colour is not all that tells."""
    draw = ImageDraw.Draw(picture)
    draw.rectangle((3, 3, 17, 17), fill=RIGHT if good else WRONG)
    lines = [(6, 10, 9, 14), (9, 14, 15, 6)] if good else [(6, 6, 14, 14), (6, 14, 14, 6)]
    for line in lines:
        draw.line(line, fill="white", width=2)
