"""Pictures of the learners and their embeddings."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from dml.evaluation.evaluator import Embedded
from dml.evaluation.metric import HEADLINE, metric
from dml.figures.style import BLUE, GREEN, GREY, RED, below, canvas, legend_above

PAIRS = 50_000  # of each kind that are drawn for histograms


def learner_bars(metrics: Mapping[str, float], learners: int) -> Figure:
    """Draws Recall@1 of each learner as a bar, with lines for the ensemble and the untrained ensemble."""
    figure = canvas(max(3.5, 0.6 * learners + 2), 3.2)
    axes = figure.subplots()
    axes.bar(range(learners), [metrics[f"learners/{i}/{HEADLINE}"] for i in range(learners)], color=BLUE)
    axes.axhline(metrics[f"test/{HEADLINE}"], color=RED, linestyle="--", label="ensemble")
    axes.axhline(metrics[f"untrained/{HEADLINE}"], color=GREY, linestyle=":", label="untrained ensemble")
    axes.set(xlabel="learner", ylabel="Recall@1", xticks=range(learners))
    axes.set_ylim(0)
    legend_above(axes, columns=1)
    return figure


def first_learners(metrics: Mapping[str, float], of: str = "learners") -> Figure:
    """Draws Recall@K of the ensemble of the first m learners or slices over m (DCES Fig. 10), from `first/<m>/...`."""
    figure = canvas(6, 3.2)
    axes = figure.subplots()
    names = [name.removeprefix("first/1/") for name in metrics if name.startswith("first/1/recall@")]
    counts = range(1, 1 + sum(name.endswith(f"/{HEADLINE}") for name in metrics if name.startswith("first/")))
    for name in names:
        values = [metrics[f"first/{m}/{name}"] for m in counts]
        axes.plot(counts, values, marker="o", markersize=3, linewidth=1, label=metric(name).title)
    axes.set(xlabel=f"first m {of}", ylabel="Recall@K", xticks=list(counts))
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def distance_histograms(within: Tensor, between: Tensor) -> Figure:
    """Draws histograms of the distances of negative pairs (DCES Fig. 8).

    Args:
        within: `[P]`, pairs of images of one cluster.
        between: `[Q]`, pairs of images of two clusters.
    """
    figure = canvas(6, 3.2)
    axes = figure.subplots()
    _histograms(axes, {"within a cluster": (within, RED), "between clusters": (between, GREEN)}, (0, 2))
    axes.set(xlabel="Euclidean distance of a negative pair", ylabel="density")
    return figure


def similarity_histograms(embedded: Embedded) -> Figure:
    """Draws histograms of the cosines of positive, negative and self pairs (ABE Fig. 5).

    Positive and negative pairs are two images embedded by the same learner; `PAIRS` of each kind are drawn, see
    `random_pairs`. A self pair is one image embedded by two learners; all of them are counted if they are not more than
    the learners times `PAIRS`, else as many are drawn.
    """
    figure = canvas(6, 3.2)
    axes = figure.subplots()
    first, second = random_pairs(embedded.labels, PAIRS, seed=0)
    cosines = (embedded.embeddings[first] * embedded.embeddings[second]).sum(-1).flatten()  # [P*L]
    same = (embedded.labels[first] == embedded.labels[second]).repeat_interleave(embedded.embeddings.shape[1])
    kinds = {"positive pairs": (cosines[same], BLUE), "negative pairs": (cosines[~same], RED)}
    if embedded.embeddings.shape[1] > 1:
        kinds["self pairs"] = (_self_cosines(embedded.embeddings), GREEN)
    _histograms(axes, kinds, (-1, 1))
    axes.set(xlabel="cosine similarity", ylabel="density")
    return figure


def _self_cosines(embeddings: Tensor) -> Tensor:
    """Returns cosines between different learners' embeddings of the same image: `[N,L,d]` -> `[P]`."""
    images, learners = embeddings.shape[:2]
    first, second = np.triu_indices(learners, 1)
    every, most = images * len(first), learners * PAIRS
    chosen = np.arange(every) if every <= most else np.random.default_rng(0).integers(every, size=most)
    found = []
    for part in np.array_split(chosen, 1 + len(chosen) // PAIRS):
        image, pair = np.divmod(part, len(first))
        found.append((embeddings[image, first[pair]] * embeddings[image, second[pair]]).sum(-1))
    return torch.cat(found)


def _histograms(axes: Axes, kinds: Mapping[str, tuple[Tensor, str]], limits: tuple[float, float]) -> None:
    """Draws a histogram of each kind of values, over the range that the values cover within `limits`.

    A kind without values is left out. The bin width is the widest that the rule of Freedman and Diaconis gives for any
    kind: narrower bins would be empty here and there, and look like a comb. There are 10 to 80 bins.
    """
    there = {name: (values.double().numpy(), colour) for name, (values, colour) in kinds.items() if len(values)}
    if not there:
        return
    # The ends of each kind: there may be far fewer values of one kind than of the others.
    ends = np.array([np.quantile(values, (0.0005, 0.9995)) for values, _ in there.values()])
    low, high = (float(np.clip(end, *limits)) for end in (ends[:, 0].min(), ends[:, 1].max()))
    margin = max(0.03 * (high - low), 1e-4)
    low, high = max(limits[0], low - margin), min(limits[1], high + margin)
    widths = [
        2 * float(np.subtract(*np.quantile(values, (0.75, 0.25)))) * len(values) ** (-1 / 3)
        for values, _ in there.values()
    ]
    count = int(np.clip((high - low) / max(*widths, 1e-9), 10, 80))
    bins = np.linspace(low, high, count + 1).tolist()
    for name, (values, colour) in there.items():
        label = f"{name}, mean {values.mean():.3f}"
        shown = np.clip(values, low, high)  # the few values beyond go into the outermost bins
        axes.hist(shown, bins=bins, density=True, color=colour, alpha=0.35, histtype="stepfilled")
        axes.hist(shown, bins=bins, density=True, color=colour, histtype="step", linewidth=1.2, label=label)
    axes.set_xlim(low, high)
    legend_above(axes, columns=1)


def class_sizes(sizes: Sequence[int], recalls: Sequence[float], title: str) -> Figure:
    """Draws the share of right queries of each class over its number of queries, and the mean of each fifth of the
    classes.

    Args:
        sizes: queries of each class.
        recalls: the share of each class, in the same order.
        title: what the share is called.
    """
    figure = canvas(6, 3.2)
    axes = figure.subplots()
    axes.plot(sizes, recalls, "o", color=BLUE, markersize=4, alpha=0.5, markeredgewidth=0, label="a class")
    # Classes of one size stay together: `recalls` may be sorted.
    _, size, count = np.unique(sizes, return_inverse=True, return_counts=True)
    fifth = ((count.cumsum() - count / 2) * 5 // len(sizes))[size]
    means = [[np.mean(np.compress(fifth == f, of)) for of in (sizes, recalls)] for f in np.unique(fifth)]
    axes.plot(*zip(*means, strict=True), color=RED, marker="s", linewidth=1.5, label="mean of a fifth of the classes")
    if max(sizes) / min(sizes) >= 8:
        axes.set_xscale("log", base=2)  # in base 10, labels such as 3 x 10^0 overlap
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set(xlabel="queries of the class", ylabel=title)
    axes.grid(alpha=0.3)
    legend_above(axes, columns=2)
    return figure


def embedding_map(points: np.ndarray, outcome: np.ndarray, title: str) -> Figure:
    """Draws test images as points in two dimensions, those whose nearest image is wrong as crosses.

    Args:
        points: `[N,2]`.
        outcome: `[N]`: 1 if the nearest image is of the same class, 0 if it is not, -1 if the image is no query, or one
            that has no other image of its class.
        title: how the points were projected.
    """
    figure = canvas(6, 5)
    axes = figure.subplots()
    for label, kind, colour, marker in (
        ("no query here, or none with a positive", -1, GREY, "."),
        ("nearest image right", 1, BLUE, "o"),
        ("nearest image wrong", 0, RED, "x"),
    ):
        x, y = points[outcome == kind].T
        if len(x):
            axes.scatter(x, y, s=8, c=colour, marker=marker, linewidths=0.8, alpha=0.6, label=label)
    axes.set(xticks=[], yticks=[], xlabel=title)
    legend_above(axes)
    return figure


def random_pairs(labels: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Samples `count` pairs of images of one class and `count` pairs of any images.

    Pairs of an image with itself are dropped, so there may be fewer.

    Args:
        labels: `[N]`.

    Returns:
        Indices of the first and of the second image of each pair, `[P]` each.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.argsort(labels, stable=True)
    _, sizes = torch.unique_consecutive(labels[order], return_counts=True)
    starts = sizes.cumsum(0) - sizes
    anchor = torch.randint(len(labels), (count,), generator=generator)  # positions in `order`
    group = torch.repeat_interleave(torch.arange(len(sizes)), sizes)[anchor]
    within = (anchor - starts[group] + 1 + below((sizes[group] - 1).clamp(min=1), generator)) % sizes[group]
    positive = order[anchor], order[starts[group] + within]
    negative = tuple(torch.randint(len(labels), (count,), generator=generator) for _ in range(2))
    first, second = torch.cat([positive[0], negative[0]]), torch.cat([positive[1], negative[1]])
    return first[first != second], second[first != second]
