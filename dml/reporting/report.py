"""`report.html`: one self-contained file that a person enjoys opening."""

import base64
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

import dml
from dml.build import Parts
from dml.evaluation.evaluator import Table
from dml.files import replace_file
from dml.loggers import read_metrics
from dml.methods.base import Shares
from dml.reporting import figures
from dml.reporting.page import render
from dml.reporting.table import rows, tested, title, watched


@dataclass(frozen=True)
class Examples:
    """Some test images and what a method attends to in them, on the CPU.

    Attributes:
        images: `[B,3,H,W]` in 0..1.
        attention: of each learner, `[B,L,C,h,w]`; None: it does not attend.
        regions: proposal `[B,H,W]` and boxes `[B,4]` of each scale but the last.
        shares: of prototypes in these images; None: there are none.
        of_classes: attributes `[N,m]` and labels `[N]` of images of a few test classes, where there are prototypes.
    """

    images: Tensor
    attention: Tensor | None
    regions: list[tuple[Tensor, Tensor]]
    shares: Shares | None
    of_classes: tuple[Tensor, Tensor] | None


def write_report(
    folder: Path,
    config: Mapping[str, Any],
    metrics: Mapping[str, float],
    table: Table,
    parts: Parts,
    examples: Examples,
) -> dict[str, Path]:
    """Draws the figures into `figures/` and writes `report.html` around them.

    Args:
        folder: of the run; its `metrics.jsonl` gives the curves.
        config: resolved, plain containers.
        metrics: what `metrics.json` will hold.
        table: test embeddings of the checkpoint that is the result.
        parts: data and split of the run.
        examples: for the pictures of attention.

    Returns:
        The pictures by name.
    """
    learners = table.embeddings.shape[1]
    queries = table.take(parts.split.query)
    gallery = None if parts.split.gallery is None else table.take(parts.split.gallery)
    records, open_image = read_metrics(folder / "metrics.jsonl"), parts.records.open_image
    drawn = {"curves": figures.curves(records), "similarities": figures.similarity_histograms(table)}
    images = {"gallery": figures.retrieval_gallery(queries, gallery, open_image, parts.split.cameras)}
    if learners > 1:
        drawn["learners"] = figures.learner_bars(metrics, learners)
    if learners > 1 and parts.split.cameras is None:
        images["easiest"] = figures.easiest_queries(queries, gallery, open_image)
    if "first/2/recall@1" in metrics:
        drawn["first"] = figures.first_learners(metrics)
    if examples.attention is not None:
        drawn["attention"] = figures.attention_maps(examples.images, examples.attention)
    if examples.regions:
        drawn["regions"] = figures.object_regions(examples.images, examples.regions)
    if examples.shares is not None and examples.of_classes is not None:
        shares, (attributes, labels) = examples.shares, examples.of_classes
        names = {int(c): parts.records.class_names[c] for c in labels.unique()}
        drawn["weights"] = figures.pooling_weights(
            examples.images, shares.weights, shares.dominant, shares.attributes.shape[1]
        )
        drawn["prototypes"] = figures.prototype_histograms(attributes, labels, names)
    if (groups := parts.method.groups()) is not None:
        drawn["clusters"] = figures.clusters_over_steps(records)
        images["cluster_images"] = figures.cluster_images(groups, parts.data.train_rows, open_image)
        if groups.negatives is not None:
            drawn["negatives"] = figures.negative_distances(*groups.negatives)
    pictures = {name: folder / "figures" / f"{name}.png" for name in (*drawn, *images)}
    for name, figure in drawn.items():
        figure.savefig(pictures[name])
    for name, image in images.items():
        image.save(pictures[name])
    replace_file(folder / "report.html", _html(parts.records.name, config, metrics, learners, pictures))
    return pictures


def _html(
    dataset: str, config: Mapping[str, Any], metrics: Mapping[str, float], learners: int, pictures: Mapping[str, Path]
) -> str:
    columns, together = rows(metrics)
    ranked = [column for column in columns if f"learners/0/{column}" in metrics]  # learners are not clustered
    return render(
        "report.html.jinja",
        method=config["method"]["_target_"].rsplit(".", 1)[1],
        dataset=dataset,
        metrics=metrics,
        tested=tested(metrics),
        watched=watched(metrics),
        columns=[title(column) for column in columns],
        together=together,
        ranked=[title(column) for column in ranked],
        scales=[[metrics[f"scales/{i}/{column}"] for column in ranked] for i in range(_scales(metrics))],
        apart=[[metrics[f"learners/{i}/{column}"] for column in ranked] for i in range(learners)],
        config=OmegaConf.to_yaml(OmegaConf.create(dict(config))),
        pictures={name: base64.b64encode(path.read_bytes()).decode() for name, path in pictures.items()},
        versions=f"dml {dml.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    )


def _scales(metrics: Mapping[str, float]) -> int:
    return sum(name.startswith("scales/") and name.endswith("/recall@1") for name in metrics)
