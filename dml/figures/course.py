"""Pictures of the course of a training."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dml.evaluation.metric import HEADLINE
from dml.figures.style import canvas, height, shade, wrapped

RATE, NORM = "train/lr/", "train/gradient_norm/"  # what is logged beside the terms of the loss


def curves(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Loss terms over steps beside Recall@1 over steps, from the records of `metrics.jsonl`; and the rates of the
    parameter groups, where they changed."""
    logged = dict.fromkeys(key for record in records for key in record if key.startswith("train/"))
    lines = {name: [(record["step"], record[name]) for record in records if name in record] for name in logged}
    rates = {name: points for name, points in lines.items() if name.startswith(RATE)}
    changed = any(len({rate for _, rate in points}) > 1 for points in rates.values())
    figure = canvas(12 if changed else 9, 3.2)
    loss, recall, *rest = figure.subplots(1, 3 if changed else 2)
    _draw(loss, {name: points for name, points in lines.items() if not name.startswith((RATE, NORM))}, "train/")
    for axes in rest:
        _draw(axes, rates, RATE)
        axes.set(xlabel="step", ylabel="learning rate", yscale="log")
    monitored = "validation" if any(f"validation/{HEADLINE}" in record for record in records) else "test"
    shown = {f"{monitored}/{HEADLINE}": "ensemble"}
    if monitored == "test":
        shown[f"learners/mean/{HEADLINE}"] = "mean learner"
    if any(f"seen/{HEADLINE}" in record for record in records):
        shown[f"seen/{HEADLINE}"] = "training images"
    for name, label in shown.items():
        points = [(record["step"], record[name]) for record in records if name in record]
        recall.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label, linewidth=1)
    loss.set(xlabel="step", ylabel="training loss")
    seen = " and training" if f"seen/{HEADLINE}" in shown else ""
    recall.set(xlabel="step", ylabel=f"Recall@1 on {monitored}{seen} classes")
    for axes, corner in ((loss, "upper right"), (recall, "lower right"), *((axes, "lower left") for axes in rest)):
        if axes.lines:  # a training shorter than trainer.log_every has no losses
            axes.legend(frameon=False, fontsize=8, loc=corner)
        axes.grid(alpha=0.3)
    return figure


def _draw(axes: Axes, lines: Mapping[str, Sequence[tuple[int, float]]], prefix: str) -> None:
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), label=name.removeprefix(prefix), linewidth=1)


def recall_over_steps(lines: Mapping[str, Mapping[int, float]]) -> Figure:
    """Recall@1 while training (DCES Fig. 1: a line a K), step -> metric for each line's label."""
    labels = wrapped(lines)
    figure = canvas(9, 3.4 + height(labels.values()))
    axes = figure.subplots()
    for line, points in lines.items():
        axes.plot(list(points), list(points.values()), marker="o", markersize=3, linewidth=1, label=labels[line])
    axes.set(xlabel="step", ylabel="Recall@1")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", frameon=False, fontsize=7)
    return figure


def clusters_over_steps(records: Sequence[Mapping[str, Any]]) -> Figure:
    """How many images each learner's cluster has, and how much of its last one it kept, from `metrics.jsonl`."""
    figure = canvas(9, 3.2)
    sizes, kept = figure.subplots(1, 2)
    grouped = [record for record in records if "clusters/0/images" in record]
    learners = sum(name.endswith("/images") for name in grouped[0])
    steps = [record["step"] for record in grouped]
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
