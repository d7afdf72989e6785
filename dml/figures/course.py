"""Pictures of how a training went: curves over its steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dml.evaluation.metric import HEADLINE
from dml.figures.style import canvas, height, legend_above, marks, shade, wrapped

RATE, NORM = "train/lr/", "train/gradient_norm/"  # prefixes of what is logged beside the terms of the loss


def curves(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Draws the loss terms and Recall@1 over steps, from the records of `metrics.jsonl`.

    A third panel has the learning rates of the parameter groups if one of them changed. A quantity that was not logged
    has no panel.
    """
    logged = dict.fromkeys(key for record in records for key in record if key.startswith("train/"))
    lines = {name: [(record["step"], record[name]) for record in records if name in record] for name in logged}
    rates = {name: points for name, points in lines.items() if name.startswith(RATE)}
    losses = {name: points for name, points in lines.items() if not name.startswith((RATE, NORM))}
    if len(losses) == 2 and len({tuple(points) for points in losses.values()}) == 1:
        losses.pop("train/metric", None)  # the only term: its line would be hidden by that of the sum
    monitored = "validation" if any(f"validation/{HEADLINE}" in record for record in records) else "test"
    recalls = {
        label: points
        for name, label in _recalls(monitored, records).items()
        if (points := [(record["step"], record[name]) for record in records if name in record])
    }
    seen = " and training" if "training images" in recalls else ""
    panels = [
        ("training loss", {name.removeprefix("train/"): points for name, points in losses.items()}, {}),
        (f"Recall@1 on {monitored}{seen} classes", recalls, {"marker": "o", "markersize": 3}),
    ]
    if constant_rates(records) is None:
        alike: dict[tuple[Any, ...], list[str]] = {}  # equal lines would hide one another
        for name, points in rates.items():
            alike.setdefault(tuple(points), []).append(name.removeprefix(RATE))
        panels.append(("learning rate", {", ".join(of): list(points) for points, of in alike.items()}, {}))
    shown = [panel for panel in panels if panel[1]]
    figure = canvas(max(5.0, 4.5 * len(shown)), 3.4)
    for axes, (title, of_panel, style) in zip(
        figure.subplots(1, max(1, len(shown)), squeeze=False)[0], shown, strict=True
    ):
        for label, points in of_panel.items():
            alone = {} if len(points) > 1 else {"marker": "o", "markersize": 3}  # a line of one point is invisible
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1, **(alone | style))
        axes.set(xlabel="step", ylabel=title)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if title == "learning rate":
            axes.set_yscale("log")
        legend_above(axes)
        axes.grid(alpha=0.3)
    return figure


def constant_rates(records: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Returns the learning rate of each parameter group that was logged; None if any of them changed."""
    found: dict[str, set[float]] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith(RATE):
                found.setdefault(name.removeprefix(RATE), set()).add(value)
    if any(len(values) > 1 for values in found.values()):
        return None
    return {name: values.pop() for name, values in found.items()}


def _recalls(monitored: str, records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Maps names in the records to labels. With a single learner there is no mean learner: it is the ensemble."""
    several = any("learners/1/" in name for record in records for name in record)
    shown = {f"{monitored}/{HEADLINE}": "ensemble" if several else "embedding"}
    if monitored == "test" and several:
        shown[f"learners/mean/{HEADLINE}"] = "mean learner"
    return shown | {f"seen/{HEADLINE}": "training images"}


def recall_over_steps(lines: Mapping[str, Mapping[int, float]], y: str = "Recall@1") -> Figure:
    """Draws Recall@1 over training steps (DCES Fig. 1: one line for each K).

    Args:
        lines: from the label of a line to its points, step -> metric.
        y: title of the axis.
    """
    labels = wrapped(lines)
    figure = canvas(9, 3.4 + height(labels.values()))
    axes = figure.subplots()
    for i, (line, points) in enumerate(lines.items()):
        axes.plot(list(points), list(points.values()), markersize=3, linewidth=1, label=labels[line], **marks(i))
    axes.set(xlabel="step", ylabel=y)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", frameon=False, fontsize=7)
    return figure


def reclustered(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns what the caption says of the overlap with the clusters before; there are none before a single one."""
    steps = [record["step"] for record in records if "clusters/0/images" in record]
    if len(steps) == 1:
        return f". They were grouped once, at step {steps[0]}, and never again in this run"
    return ", and its overlap with the learner's previous cluster (intersection over union)"


def _one_clustering(images: Sequence[float], step: int) -> Figure:
    """Draws the cluster sizes alone: a single clustering has no course."""
    figure = canvas(6, 3.2)
    axes = figure.subplots()
    axes.bar(range(len(images)), images, color=[shade(k, len(images)) for k in range(len(images))])
    axes.set(xlabel="learner", ylabel=f"training images, at step {step}", xticks=range(len(images)))
    return figure


def clusters_over_steps(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Draws how many images each learner's cluster has, and its IoU with the cluster before, over steps.

    Args:
        records: those of `metrics.jsonl`.
    """
    figure = canvas(9, 3.2)
    sizes, kept = figure.subplots(1, 2)
    grouped = [record for record in records if "clusters/0/images" in record]
    learners = sum(name.endswith("/images") for name in grouped[0])
    steps = [record["step"] for record in grouped]
    if len(grouped) == 1:
        return _one_clustering([grouped[0][f"clusters/{k}/images"] for k in range(learners)], steps[0])
    bottom = np.zeros(len(grouped))
    width = 0.8 * min(np.diff(steps), default=1)
    for k in range(learners):
        images = np.array([record[f"clusters/{k}/images"] for record in grouped])
        sizes.bar(steps, images, width=width, bottom=bottom, align="edge", color=shade(k, learners))
        bottom += images
        points = [(r["step"], r[f"clusters/{k}/iou"]) for r in grouped if f"clusters/{k}/iou" in r]
        line = {"color": shade(k, learners), "marker": "o", "markersize": 3, "linewidth": 1}
        kept.plot([s for s, _ in points], [iou for _, iou in points], label=f"learner {k}", **line)
    mean = [(record["step"], record["clusters/iou"]) for record in grouped if "clusters/iou" in record]
    kept.plot([s for s, _ in mean], [iou for _, iou in mean], color="black", linewidth=2, label="mean")
    sizes.set(xlabel="step of the clustering", ylabel="training images")
    kept.set(xlabel="step of the clustering", ylabel="IoU with the cluster before", ylim=(0, 1.02))
    figure.legend(*kept.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=7)
    kept.grid(alpha=0.3)
    return figure
