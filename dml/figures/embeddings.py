"""Pictures of the learners and their embeddings."""

from collections.abc import Mapping

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from dml.evaluation.evaluator import Embedded, self_cosines
from dml.evaluation.metric import HEADLINE, metric
from dml.figures.style import BLUE, GREEN, GREY, RED, below, canvas


def learner_bars(metrics: Mapping[str, float], learners: int) -> Figure:
    """Recall@1 of each learner beside the ensemble."""
    figure = canvas(max(3.5, 0.6 * learners + 2), 3.2)
    axes = figure.subplots()
    axes.bar(range(learners), [metrics[f"learners/{i}/{HEADLINE}"] for i in range(learners)], color=BLUE)
    axes.axhline(metrics[f"test/{HEADLINE}"], color=RED, linestyle="--", label="ensemble")
    axes.axhline(metrics[f"untrained/{HEADLINE}"], color=GREY, linestyle=":", label="untrained ensemble")
    axes.set(xlabel="learner", ylabel="Recall@1", xticks=range(learners), ylim=(0, 1))
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    return figure


def first_learners(metrics: Mapping[str, float]) -> Figure:
    """Recall@K of the ensemble of the first m learners, from the metrics `first/<m>/...` (DCES Fig. 10)."""
    figure = canvas(6, 3.2)
    axes = figure.subplots()
    names = [name.removeprefix("first/1/") for name in metrics if name.startswith("first/1/recall@")]
    counts = range(1, 1 + sum(name.endswith(f"/{HEADLINE}") for name in metrics if name.startswith("first/")))
    for name in names:
        values = [metrics[f"first/{m}/{name}"] for m in counts]
        axes.plot(counts, values, marker="o", markersize=3, linewidth=1, label=metric(name).title)
    axes.set(xlabel="first m learners", ylabel="Recall@K", xticks=list(counts), ylim=(0, 1))
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def distance_histograms(within: Tensor, between: Tensor) -> Figure:
    """Distances `[P]`, `[Q]` of negative pairs within a cluster and between clusters (DCES Fig. 8)."""
    figure = canvas(6, 3.2)
    axes = figure.subplots()
    bins = np.linspace(0, 2, 81).tolist()  # of unit vectors
    for name, distances, colour in (("within a cluster", within, RED), ("between clusters", between, GREEN)):
        if len(distances):
            label = f"{name}, mean {distances.mean():.3f}"
            axes.hist(distances.numpy(), bins=bins, density=True, color=colour, alpha=0.5, label=label)
    axes.set(xlabel="distance of a negative pair", ylabel="density")
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    return figure


def similarity_histograms(embedded: Embedded, pairs: int = 50_000, seed: int = 0) -> Figure:
    """Cosines of positive, negative and self pairs (ABE Fig. 5), the first two within each learner.

    A self pair is one image embedded by two learners. `pairs` of each kind are drawn.
    """
    figure = canvas(6, 3.2)
    axes = figure.subplots()
    first, second = random_pairs(embedded.labels, pairs, seed)
    cosines = (embedded.embeddings[first] * embedded.embeddings[second]).sum(-1).flatten()  # [P*L]
    same = (embedded.labels[first] == embedded.labels[second]).repeat_interleave(embedded.embeddings.shape[1])
    kinds = {"positive pairs": (cosines[same], BLUE), "negative pairs": (cosines[~same], RED)}
    if embedded.embeddings.shape[1] > 1:
        kinds["self pairs"] = (self_cosines(embedded.embeddings), GREEN)
    bins = np.linspace(-1, 1, 101).tolist()
    for name, (values, colour) in kinds.items():
        label = f"{name}, mean {values.mean():.3f}"
        axes.hist(values.numpy(), bins=bins, density=True, color=colour, alpha=0.5, label=label)
    axes.set(xlabel="cosine similarity", ylabel="density", xlim=(-1, 1))
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def random_pairs(labels: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of `count` random pairs of images, half of them of one class, none of an image with itself."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.argsort(labels, stable=True)
    _, sizes = torch.unique_consecutive(labels[order], return_counts=True)
    starts = sizes.cumsum(0) - sizes
    anchor = torch.randint(len(labels), (count,), generator=generator)  # places in the order by class
    group = torch.repeat_interleave(torch.arange(len(sizes)), sizes)[anchor]
    within = (anchor - starts[group] + 1 + below((sizes[group] - 1).clamp(min=1), generator)) % sizes[group]
    positive = order[anchor], order[starts[group] + within]
    negative = tuple(torch.randint(len(labels), (count,), generator=generator) for _ in range(2))
    first, second = torch.cat([positive[0], negative[0]]), torch.cat([positive[1], negative[1]])
    return first[first != second], second[first != second]
