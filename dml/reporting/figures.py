"""The pictures of a report, one function a picture; each returns a matplotlib figure or an image."""

import math
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from dml.evaluation.evaluator import Table, self_cosines
from dml.evaluation.metrics import rank
from dml.evaluation.neighbours import nearest
from dml.methods.base import Groups
from dml.models.attention import crop_and_zoom

# Okabe & Ito's palette, told apart by colour-blind readers too.
BLUE, RED, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"
RIGHT, WRONG = GREEN, RED


def _figure(width: float, height: float) -> Figure:
    """Without pyplot, so that nothing global is left behind and no display is asked for."""
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def curves(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Loss terms over steps beside Recall@1 over steps, from the records of `metrics.jsonl`."""
    figure = _figure(9, 3.2)
    loss, recall = figure.subplots(1, 2)
    for name in dict.fromkeys(key for record in records for key in record if key.startswith("train/")):
        points = [(record["step"], record[name]) for record in records if name in record]
        loss.plot(*zip(*points, strict=True), label=name.removeprefix("train/"), linewidth=1)
    watched = "validation" if any("validation/recall@1" in record for record in records) else "test"
    lines = {f"{watched}/recall@1": "together"}
    if watched == "test":
        lines["learners/mean/recall@1"] = "mean learner"
    if any("seen/recall@1" in record for record in records):
        lines["seen/recall@1"] = "training images"
    for name, label in lines.items():
        points = [(record["step"], record[name]) for record in records if name in record]
        recall.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label, linewidth=1)
    loss.set(xlabel="step", ylabel="training loss")
    seen = " and training" if "seen/recall@1" in lines else ""
    recall.set(xlabel="step", ylabel=f"Recall@1 on {watched}{seen} classes")
    for axes, corner in ((loss, "upper right"), (recall, "lower right")):
        if axes.lines:  # a training shorter than trainer.log_every has no losses
            axes.legend(frameon=False, fontsize=8, loc=corner)
        axes.grid(alpha=0.3)
    return figure


@dataclass(frozen=True)
class Point:
    """One configuration: its line, what it costs, and Recall@1 with its standard deviation over runs."""

    line: str
    learners: int
    params: float
    flops: float
    recall: float
    std: float


def recall_over_steps(lines: Mapping[str, Mapping[int, float]]) -> Figure:
    """Recall@1 while training (DCES Fig. 1: a line a K), step -> figure for each line's label."""
    labels = _wrapped(lines)
    figure = _figure(9, 3.4 + _height(labels.values()))
    axes = figure.subplots()
    for line, points in lines.items():
        axes.plot(list(points), list(points.values()), marker="o", markersize=3, linewidth=1, label=labels[line])
    axes.set(xlabel="step", ylabel="Recall@1")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", frameon=False, fontsize=7)
    return figure


def _wrapped(lines: Iterable[str]) -> dict[str, str]:
    """Labels that may be whole command lines, as a legend below the picture has room for them."""
    return {line: textwrap.fill(line, 120) for line in lines}


def _height(labels: Iterable[str]) -> float:
    """Inches that a legend of these takes."""
    return 0.15 * sum(label.count("\n") + 1 for label in labels)


def recall_and_cost(points: Sequence[Point]) -> Figure:
    """Recall@1 against parameters and against multiply-adds (ABE Fig. 4: a line a method, a point an M)."""
    labels = _wrapped(point.line for point in points)
    figure = _figure(9, 3.4 + _height(labels.values()))
    left, right = figure.subplots(1, 2, sharey=True)
    for line, label in labels.items():
        on_line = sorted((p for p in points if p.line == line), key=lambda p: p.flops)
        for axes, costs in ((left, [p.params / 1e6 for p in on_line]), (right, [p.flops / 1e9 for p in on_line])):
            recalls, stds = [p.recall for p in on_line], [p.std for p in on_line]
            axes.errorbar(costs, recalls, yerr=stds, marker="o", markersize=4, linewidth=1, capsize=3, label=label)
            for cost, point in zip(costs, on_line, strict=True):
                axes.annotate(str(point.learners), (cost, point.recall), (4, 4), textcoords="offset points", fontsize=7)
    left.set(xlabel="parameters, millions", ylabel="Recall@1")
    right.set(xlabel="multiply-adds of an image, 1e9")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", frameon=False, fontsize=7)
    return figure


@dataclass(frozen=True)
class Measured:
    """A figure at a number of a sweep: its mean over repetitions and their standard deviation."""

    x: float
    mean: float
    std: float


def over(lines: Mapping[str, Sequence[Measured]], x: str, y: str, dashed: Collection[str] = ()) -> Figure:
    """A metric over a number, a line a configuration (ABE Fig. 7; GSP Fig. 10)."""
    labels = _wrapped(lines)
    figure = _figure(6, 3.2 + _height(labels.values()))
    axes = figure.subplots()
    for line, points in lines.items():
        points = sorted(points, key=lambda point: point.x)
        values, stds = [point.mean for point in points], [point.std for point in points]
        xs = [point.x for point in points]
        style = "--" if line in dashed else "-"
        axes.errorbar(xs, values, yerr=stds, fmt=f"o{style}", markersize=4, linewidth=1, capsize=3, label=labels[line])
    numbers = sorted({point.x for points in lines.values() for point in points})
    if numbers[0] > 0 and numbers[-1] / numbers[0] >= 8:
        axes.set_xscale("log", base=2 if all(math.log2(n).is_integer() for n in numbers) else 10)
    axes.autoscale_view()
    at = axes.transAxes.inverted().transform(axes.transData.transform([(n, 0.0) for n in numbers]))[:, 0]
    if len(numbers) == 1 or np.diff(at).min() > 0.04:  # else their labels would lie upon each other
        axes.set_xticks(numbers, [f"{n:g}" for n in numbers])
        axes.set_xticks([], minor=True)
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", frameon=False, fontsize=7)
    return figure


def learner_bars(metrics: Mapping[str, float], learners: int) -> Figure:
    """Recall@1 of each learner beside their concatenation."""
    figure = _figure(max(3.5, 0.6 * learners + 2), 3.2)
    axes = figure.subplots()
    axes.bar(range(learners), [metrics[f"learners/{i}/recall@1"] for i in range(learners)], color=BLUE)
    axes.axhline(metrics["test/recall@1"], color=RED, linestyle="--", label="together")
    axes.axhline(metrics["untrained/recall@1"], color=GREY, linestyle=":", label="untrained, together")
    axes.set(xlabel="learner", ylabel="Recall@1", xticks=range(learners), ylim=(0, 1))
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    return figure


def first_learners(metrics: Mapping[str, float]) -> Figure:
    """Recall@K of the first m learners together, from the figures `first/<m>/...` (DCES Fig. 10)."""
    figure = _figure(6, 3.2)
    axes = figure.subplots()
    names = [name.removeprefix("first/1/") for name in metrics if name.startswith("first/1/recall@")]
    counts = range(1, 1 + sum(name.endswith("/recall@1") for name in metrics if name.startswith("first/")))
    for name in names:
        values = [metrics[f"first/{m}/{name}"] for m in counts]
        axes.plot(counts, values, marker="o", markersize=3, linewidth=1, label=name.replace("recall", "Recall"))
    axes.set(xlabel="first m learners", ylabel="Recall@K", xticks=list(counts), ylim=(0, 1))
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def clusters_over_steps(records: Sequence[Mapping[str, Any]]) -> Figure:
    """How many images each learner's cluster has, and how much of its last one it kept, from `metrics.jsonl`."""
    figure = _figure(9, 3.2)
    sizes, kept = figure.subplots(1, 2)
    grouped = [record for record in records if "clusters/0/images" in record]
    learners = sum(name.endswith("/images") for name in grouped[0])
    steps = [record["step"] for record in grouped]
    bottom = np.zeros(len(grouped))
    width = 0.8 * min(np.diff(steps), default=1)
    for k in range(learners):
        images = np.array([record[f"clusters/{k}/images"] for record in grouped])
        sizes.bar(steps, images, width=width, bottom=bottom, align="edge", color=_shade(k, learners))
        bottom += images
        points = [(r["step"], r[f"clusters/{k}/iou"]) for r in grouped if f"clusters/{k}/iou" in r]
        line = {"color": _shade(k, learners), "marker": "o", "markersize": 3, "linewidth": 1}
        kept.plot([s for s, _ in points], [iou for _, iou in points], label=f"learner {k}", **line)
    mean = [(record["step"], record["clusters/iou"]) for record in grouped if "clusters/iou" in record]
    kept.plot([s for s, _ in mean], [iou for _, iou in mean], color="black", linewidth=2, label="mean")
    sizes.set(xlabel="step of the clustering", ylabel="training images")
    kept.set(xlabel="step of the clustering", ylabel="IoU with the cluster before", ylim=(0, 1.02))
    figure.legend(*kept.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=7)
    kept.grid(alpha=0.3)
    return figure


def _shade(k: int, count: int) -> tuple[float, float, float, float]:
    return matplotlib.colormaps["viridis"](k / max(1, count - 1) * 0.9)


def negative_distances(within: Tensor, between: Tensor) -> Figure:
    """Distances `[P]`, `[Q]` of negative pairs within a cluster and between clusters (DCES Fig. 8)."""
    figure = _figure(6, 3.2)
    axes = figure.subplots()
    bins = np.linspace(0, 2, 81).tolist()  # of unit vectors
    for name, distances, colour in (("within a cluster", within, RED), ("between clusters", between, GREEN)):
        if len(distances):
            label = f"{name}, mean {distances.mean():.3f}"
            axes.hist(distances.numpy(), bins=bins, density=True, color=colour, alpha=0.5, label=label)
    axes.set(xlabel="distance of a negative pair", ylabel="density")
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    return figure


def similarity_histograms(table: Table, pairs: int = 50_000, seed: int = 0) -> Figure:
    """Cosines of positive, negative and self pairs (ABE Fig. 5), the first two within each learner.

    A self pair is one image embedded by two learners. `pairs` of each kind are drawn.
    """
    figure = _figure(6, 3.2)
    axes = figure.subplots()
    first, second = _random_pairs(table.labels, pairs, seed)
    cosines = (table.embeddings[first] * table.embeddings[second]).sum(-1).flatten()  # [P*L]
    same = (table.labels[first] == table.labels[second]).repeat_interleave(table.embeddings.shape[1])
    kinds = {"positive pairs": (cosines[same], BLUE), "negative pairs": (cosines[~same], RED)}
    if table.embeddings.shape[1] > 1:
        kinds["self pairs"] = (self_cosines(table.embeddings), GREEN)
    bins = np.linspace(-1, 1, 101).tolist()
    for name, (values, colour) in kinds.items():
        label = f"{name}, mean {values.mean():.3f}"
        axes.hist(values.numpy(), bins=bins, density=True, color=colour, alpha=0.5, label=label)
    axes.set(xlabel="cosine similarity", ylabel="density", xlim=(-1, 1))
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def attention_maps(images: Tensor, maps: Tensor, channels: int = 2, learners: int = 8) -> Figure:
    """What each learner attends to, over the images (ABE Fig. 6; DIABLO's maps).

    A block of rows an image: the mean over channels, and the channels on which the learners differ most. Within a row
    colours run from the row's lowest to its highest attention, which are printed beside it.

    Args:
        images: `[B,3,H,W]` in 0..1.
        maps: `[B,L,C,h,w]`.
        channels: how many besides the mean, where there are several channels and learners.
        learners: how many, the first ones.
    """
    maps = maps[:, :learners]
    several = maps.shape[1] > 1 and maps.shape[2] > 1
    chosen = maps.var(1).mean((0, 2, 3)).topk(min(channels, maps.shape[2])).indices.tolist() if several else []
    views = {"mean": maps.mean(2)} | {f"channel {c}": maps[:, :, c] for c in chosen}
    rows, columns = len(images) * len(views), maps.shape[1] + 1
    figure = _figure(1.15 * columns + 1.2, 1.15 * rows + 0.4)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    for b, image in enumerate(images):
        for v, (name, view) in enumerate(views.items()):
            row = grid[b * len(views) + v]
            if v == 0:
                row[0].imshow(image.permute(1, 2, 0).clamp(0, 1).numpy())
            low, high = float(view[b].min()), float(view[b].max())
            row[0].set_ylabel(f"{name}\n{low:.2f} to {high:.2f}", rotation=0, ha="right", va="center", fontsize=7)
            for learner, attention in enumerate(view[b]):
                _overlay(row[1 + learner], image, attention, low, high)
    for learner, axes in enumerate(grid[0, 1:]):
        axes.set_title(f"learner {learner}", fontsize=8)
    return figure


def object_regions(images: Tensor, regions: Sequence[tuple[Tensor, Tensor]]) -> Figure:
    """What each scale sees, and what it finds there (DeML Fig. 4a), a row an image.

    Args:
        images: `[B,3,H,W]` in 0..1, what the first scale sees.
        regions: proposal `[B,H,W]` and boxes `[B,4]` of each scale but the last.
    """
    figure = _figure(1.5 * (2 * len(regions) + 1) + 0.2, 1.5 * len(images) + 0.4)
    grid = figure.subplots(len(images), 2 * len(regions) + 1, squeeze=False)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    for i in range(len(regions) + 1):
        grid[0, 2 * i].set_title(f"scale {i} sees", fontsize=8)
        for row, image in zip(grid, images, strict=True):
            row[2 * i].imshow(image.permute(1, 2, 0).clamp(0, 1).numpy())
        if i < len(regions):
            proposals, boxes = regions[i]
            grid[0, 2 * i + 1].set_title("and finds", fontsize=8)
            for row, image, found, box in zip(grid, images, proposals, boxes.tolist(), strict=True):
                _overlay(row[2 * i + 1], image, found, float(found.min()), float(found.max()))
                for axes in row[2 * i : 2 * i + 2]:
                    corner, side = (box[0], box[1]), box[2] - box[0]
                    axes.add_patch(Rectangle(corner, side, side, fill=False, edgecolor=GREEN, linewidth=2))
            images = crop_and_zoom(images, boxes)
    return figure


def pooling_weights(images: Tensor, weights: Tensor, dominant: Tensor, prototypes: int) -> Figure:
    """What pooling keeps of each image, and for which prototype (GSP Fig. 3b and Fig. 5), a row an image.

    Args:
        images: `[B,3,H,W]` in 0..1.
        weights: `[B,h,w]`, mean 1.
        dominant: `[B,h,w]`, the prototype that took most of a location. Locations of less weight are paler.
        prototypes: how many there are; each has a colour of its own.
    """
    figure = _figure(4.6, 1.5 * len(images) + 0.4)
    grid = figure.subplots(len(images), 3, squeeze=False)
    shades = torch.as_tensor(prototype_colours(prototypes)).float()
    top = float(weights.max())
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    for row, image, weight, owner in zip(grid, images, weights, dominant, strict=True):
        row[0].imshow(image.permute(1, 2, 0).clamp(0, 1).numpy())
        _overlay(row[1], image, weight, 0.0, top)
        height, width = image.shape[1:]
        extent = (0, width, height, 0)
        colours = torch.cat([shades[owner], (weight / top)[..., None]], dim=-1)
        row[2].imshow(image.mean(0).clamp(0, 1).numpy(), cmap="gray", vmin=0, vmax=1, alpha=0.3, extent=extent)
        row[2].imshow(colours.numpy(), extent=extent)
    grid[0, 1].set_title(f"weight, 0 to {top:.1f}", fontsize=8)
    grid[0, 2].set_title(f"{len(dominant.unique())} of {prototypes} prototypes", fontsize=8)
    return figure


def prototype_colours(prototypes: int) -> np.ndarray:
    """`[m,3]`, the same in every picture."""
    return np.asarray(matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, prototypes)))[:, :3]


def prototype_histograms(attributes: Tensor, labels: Tensor, names: Mapping[int, str]) -> Figure:
    """The mean share of each prototype in the images of each class (GSP Fig. 5), a row a class.

    Args:
        attributes: `[N,m]`, each row of sum 1.
        labels: `[N]`.
        names: of the labels.
    """
    classes = sorted(names)
    shares = torch.stack([attributes[labels == c].mean(0) for c in classes]).numpy()  # [C,m]
    order = np.argsort(-shares.mean(0), kind="stable")  # prototypes, the most frequent first
    figure = _figure(9, 0.28 * len(classes) + 1.2)
    axes = figure.subplots()
    image = axes.imshow(shares[:, order], aspect="auto", cmap="viridis", vmin=0)
    axes.set_yticks(range(len(classes)), [_cut_short(names[c]) for c in classes])
    axes.tick_params(labelsize=7)
    axes.set(xlabel="prototype, the most frequent first", xticks=[])
    figure.colorbar(image, label="share", pad=0.01)
    return figure


def collections(lines: Sequence[tuple[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]]]) -> Figure:
    """MAP@R of MLRC's collections, a row a configuration and kind: all as dots, the independent ones as circles.

    Args:
        lines: label, and by kind figures of all collections and of the independent ones.
    """
    rows = [(label, kind, *values) for label, kinds in lines for kind, values in kinds.items()]
    figure = _figure(7, 0.6 * len(rows) + 1.2)
    axes = figure.subplots()
    rng = np.random.default_rng(0)
    for at, (_, _, every, apart) in enumerate(rows):
        axes.scatter(every, at + rng.uniform(-0.2, 0.2, len(every)), s=9, color="C0", alpha=0.5, linewidths=0)
        axes.scatter(apart, [at] * len(apart), s=60, facecolors="none", edgecolors="C3")
    names = [f"{_cut_short(label)}\n{kind}" for label, kind, *_ in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel="MAP@R (circles: one repetition each)")
    axes.grid(alpha=0.3, axis="x")
    return figure


def difference(draws: Mapping[str, np.ndarray], estimate: float, interval: tuple[float, float], title: str) -> Figure:
    """What two runs differ by: the bootstrap's draws, by what was drawn; the estimate and the first one's interval."""
    figure = _figure(7, 3.2)
    axes = figure.subplots()
    every = np.concatenate(list(draws.values()))
    bins = np.linspace(every.min() - 1e-6, every.max() + 1e-6, 81).tolist()
    for i, (name, values) in enumerate(draws.items()):
        axes.hist(
            values, bins=bins, density=True, histtype="step" if i else "stepfilled", alpha=1 if i else 0.4, label=name
        )
    axes.axvline(0, color="black", linewidth=1)
    axes.axvline(estimate, color="C3", linewidth=1.5, label=f"difference {estimate:+.4f}")
    axes.axvspan(*interval, color="C3", alpha=0.12, linewidth=0, label="95 % interval over classes")
    axes.set(xlabel=title, yticks=[])
    axes.legend(frameon=False, fontsize=8)
    return figure


@dataclass(frozen=True)
class Compared:
    """A method among others.

    Attributes:
        values: of its repetitions.
        difference: from the base, and its interval; None of the base itself.
    """

    name: str
    values: list[float]
    difference: tuple[float, float, float] | None


def methods(parts: Mapping[str, Sequence[Compared]], metric: str, base: str) -> Figure:
    """A column a protocol: a figure of each method, repetitions as dots, and its distance from the base."""
    longest = max(len(rows) for rows in parts.values())
    figure = _figure(4.4 * len(parts) + 0.6, 0.26 * longest * 2 + 1.5)
    for axes, (title, rows) in zip(figure.subplots(2, len(parts), squeeze=False).T, parts.items(), strict=True):
        above, below = axes
        for at, row in enumerate(rows):
            above.plot(row.values, [at] * len(row.values), "o", markersize=4, color=BLUE, alpha=0.6, linewidth=0)
            above.plot([float(np.mean(row.values))] * 2, [at - 0.3, at + 0.3], color="black", linewidth=1.5)
            if row.difference is not None:
                d, low, high = row.difference
                colour = GREY if low <= 0 <= high else GREEN if d > 0 else RED
                below.errorbar(d, at, xerr=[[d - low], [high - d]], fmt="o", markersize=4, capsize=3, color=colour)
        below.axvline(0, color="black", linewidth=0.8)
        for one in axes:
            one.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
            one.set_ylim(len(rows) - 0.5, -0.5)
            one.grid(alpha=0.3, axis="x")
        above.set_title(title, fontsize=10)
        above.set_xlabel(f"{metric}, % (dots: repetitions; bar: mean)", fontsize=8)
        below.set_xlabel(f"less {base} (95 % interval over test classes)", fontsize=8)
    return figure


def _cut_short(name: str, length: int = 40) -> str:
    return name if len(name) <= length else name[: length - 3] + "..."


def _overlay(axes: Axes, image: Tensor, attention: Tensor, low: float, high: float) -> None:
    """The grey image `[3,H,W]` under the attention `[h,w]`, enlarged to it."""
    height, width = image.shape[1:]
    extent = (0, width, height, 0)
    axes.imshow(image.mean(0).clamp(0, 1).numpy(), cmap="gray", vmin=0, vmax=1, extent=extent)
    axes.imshow(
        attention.numpy(), cmap="inferno", vmin=low, vmax=high, alpha=0.6, extent=extent, interpolation="bilinear"
    )


def _random_pairs(labels: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of `count` random pairs of images, half of them of one class, none of an image with itself."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.argsort(labels, stable=True)
    _, sizes = torch.unique_consecutive(labels[order], return_counts=True)
    starts = sizes.cumsum(0) - sizes
    anchor = torch.randint(len(labels), (count,), generator=generator)  # places in the order by class
    group = torch.repeat_interleave(torch.arange(len(sizes)), sizes)[anchor]
    within = (anchor - starts[group] + 1 + _below((sizes[group] - 1).clamp(min=1), generator)) % sizes[group]
    positive = order[anchor], order[starts[group] + within]
    negative = tuple(torch.randint(len(labels), (count,), generator=generator) for _ in range(2))
    first, second = torch.cat([positive[0], negative[0]]), torch.cat([positive[1], negative[1]])
    return first[first != second], second[first != second]


def _below(limits: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.rand(len(limits), generator=generator) * limits).long()


def cluster_images(groups: Groups, rows: np.ndarray, open_image: Any, count: int = 12, side: int = 72) -> Image.Image:
    """Random images of each learner's cluster, a row a learner; `rows [N]` are those of the training images."""
    rng = np.random.default_rng(0)
    lines = []
    for k in range(groups.learners):
        members = np.flatnonzero(groups.learner == k)
        chosen = rng.choice(members, min(count, len(members)), replace=False)
        tiles = [(_thumbnail(open_image(int(rows[i])), side, GREY), "") for i in chosen]
        lines.append((f"learner {k}: {len(members)} images", tiles))
    return _sheet(lines, count, side)


def easiest_queries(
    queries: Table, gallery: Table | None, open_image: Any, count: int = 10, side: int = 72
) -> Image.Image:
    """Queries that one learner answers and the others do not, a row a learner (DCES Fig. 9).

    Those of a learner have Recall@1 = 1 for it, and stand in the order of how far the best of all other learners is
    from an answer; the rank of its nearest positive is printed below.
    """

    def best_rank(i: int) -> np.ndarray:
        if gallery is None:
            return rank(queries.embeddings[:, i], queries.labels).best_rank
        there = {"gallery": gallery.embeddings[:, i], "gallery_labels": gallery.labels}
        return rank(queries.embeddings[:, i], queries.labels, **there).best_rank  # type: ignore[arg-type]

    best = np.stack([best_rank(i) for i in range(queries.embeddings.shape[1])])  # [L,Q]; 0 without a positive
    lines = []
    for i, own in enumerate(best):
        others = np.delete(best, i, axis=0).min(0)
        alone = np.flatnonzero((own == 1) & (others > 1))
        chosen = alone[np.argsort(-others[alone], kind="stable")][:count]
        tiles = [(_thumbnail(open_image(int(queries.rows[q])), side, GREY), str(others[q])) for q in chosen]
        lines.append((f"learner {i}: {len(alone)} of {len(own)} queries", tiles))
    return _sheet(lines, count, side)


def _sheet(lines: Sequence[tuple[str, Sequence[tuple[Image.Image, str]]]], columns: int, side: int) -> Image.Image:
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
    queries: Table,
    gallery: Table | None,
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
        own = cameras[queries.rows.numpy()][:, None] == cameras[chosen_from.rows.numpy()]
        left_out = own & (queries.labels[:, None] == chosen_from.labels).numpy()  # [Q,M]
        most = int(left_out.sum(1).max())
    k = min(k, len(chosen_from.labels) - (gallery is None) - most)
    where = None if gallery is None else gallery.embeddings.flatten(1)
    found = nearest(queries.embeddings.flatten(1), where, k=k + most)[1]
    if left_out is not None:  # moves behind the others
        found = np.take_along_axis(found, np.take_along_axis(left_out, found, 1).argsort(1, kind="stable"), 1)
    neighbours = torch.as_tensor(found[:, :k])
    right = chosen_from.labels[neighbours] == queries.labels[:, None]  # [Q,k]
    rows = _half_wrong(right[:, 0], count)
    font = ImageFont.truetype(str(matplotlib.get_data_path()) + "/fonts/ttf/DejaVuSans-Bold.ttf", 13)
    step, gap = side + 8, 24
    sheet = Image.new("RGB", (step * (k + 1) + gap, step * len(rows) + 20), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((4, 2), "query", fill="black", font=font)
    draw.text((step + gap, 2), "nearest neighbours, nearest first", fill="black", font=font)
    for y, query in enumerate(rows):
        sheet.paste(_thumbnail(open_image(int(queries.rows[query])), side, GREY), (0, 20 + y * step))
        for x, neighbour in enumerate(neighbours[query]):
            good = bool(right[query, x])
            picture = _thumbnail(open_image(int(chosen_from.rows[neighbour])), side, RIGHT if good else WRONG)
            _mark(picture, good)
            sheet.paste(picture, (gap + (x + 1) * step, 20 + y * step))
    return sheet


def _half_wrong(first_right: Tensor, count: int, seed: int = 0) -> list[int]:
    order = torch.randperm(len(first_right), generator=torch.Generator().manual_seed(seed))
    wrong, right = order[~first_right[order]].tolist(), order[first_right[order]].tolist()
    half = wrong[: count // 2]
    return right[: count - len(half)] + half


def _thumbnail(image: Image.Image, side: int, colour: str) -> Image.Image:
    inner = ImageOps.pad(image.convert("RGB"), (side - 6, side - 6), color="white")
    return ImageOps.expand(inner, border=3, fill=colour)


def _mark(picture: Image.Image, good: bool) -> None:
    """A tick or a cross in the corner: the frame's colour is not all that tells."""
    draw = ImageDraw.Draw(picture)
    draw.rectangle((3, 3, 17, 17), fill=RIGHT if good else WRONG)
    lines = [(6, 10, 9, 14), (9, 14, 15, 6)] if good else [(6, 6, 14, 14), (6, 14, 14, 6)]
    for line in lines:
        draw.line(line, fill="white", width=2)
