"""`report.html`: one self-contained file that a person enjoys opening."""

import base64
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

import dml
from dml.data.records import Records
from dml.evaluation.evaluator import Embedded
from dml.evaluation.metric import HEADLINE, metric
from dml.evaluation.splits import Split
from dml.figures import course, embeddings, galleries
from dml.figures.plot import Plot
from dml.files import write_atomically
from dml.reporting.page import render
from dml.reporting.table import cells, columns, monitor, places, tested


def write_report(
    folder: Path,
    config: Mapping[str, Any],
    metrics: Mapping[str, float],
    embedded: Embedded,
    records: Records,
    split: Split,
    log: Sequence[Mapping[str, Any]],
    plots: Sequence[Plot],
) -> dict[str, Path]:
    """Draws what every method has into `figures/`, beside the method's own plots, and writes `report.html` around them.

    Args:
        folder: of the run.
        config: resolved, plain containers.
        metrics: what `metrics.json` will hold.
        embedded: test embeddings of the checkpoint that is the result, on any device: neighbours are sought there.
        records, split: of the run.
        log: records of `metrics.jsonl`.
        plots: of the method.

    Returns:
        The pictures by name.
    """
    learners = embedded.embeddings.shape[1]
    common = [*_of_scores(metrics, embedded.cpu(), log), *_of_images(embedded, records, split)]
    pictures = {plot.name: folder / "figures" / f"{plot.name}.png" for plot in (*common, *plots)}
    for plot in (*common, *plots):
        plot.save(pictures[plot.name])
    sources = {name: base64.b64encode(path.read_bytes()).decode() for name, path in pictures.items()}
    html = _html(records.name, config, metrics, learners, {plot.name: plot for plot in common}, plots, sources)
    write_atomically(folder / "report.html", html)
    return pictures


def _of_scores(metrics: Mapping[str, float], embedded: Embedded, log: Sequence[Mapping[str, Any]]) -> Iterator[Plot]:
    learners = embedded.embeddings.shape[1]
    of = "learners" if learners > 1 else "slices"
    yield Plot("curves", f"Training loss and Recall@1 on the {monitor(metrics)} classes", course.curves(log))
    if learners > 1:
        caption = "Recall@1 of each learner and of the ensemble"
        yield Plot("learners", caption, embeddings.learner_bars(metrics, learners))
    if f"first/2/{HEADLINE}" in metrics:
        yield Plot("first", f"Recall@K of the ensemble of the first m {of}", embeddings.first_learners(metrics))
    caption = (
        "Cosine similarity within each learner of positive and negative pairs of test images, and between learners for "
        "the same image (self pairs)"
    )
    yield Plot("similarities", caption, embeddings.similarity_histograms(embedded))


def _of_images(embedded: Embedded, records: Records, split: Split) -> Iterator[Plot]:
    queries = embedded.take(split.query)
    gallery = None if split.gallery is None else embedded.take(split.gallery)
    if embedded.embeddings.shape[1] > 1 and split.cameras is None:
        caption = (
            "Queries that one learner alone answers: the nearest image is right for it, and the number is the rank of "
            "the nearest right image for the best of the other learners, among all images that are searched"
        )
        yield Plot("easiest", caption, galleries.easiest_queries(queries, gallery, records.open_image))
    caption = (
        "Test queries and their nearest neighbours: ticked and green of the same class, crossed and red of another; "
        "half of the rows were chosen for a wrong nearest neighbour"
    )
    drawn = galleries.retrieval_gallery(queries, gallery, records.open_image, split.cameras)
    yield Plot("gallery", caption, drawn)


def _html(
    dataset: str,
    config: Mapping[str, Any],
    metrics: Mapping[str, float],
    learners: int,
    common: Mapping[str, Plot],
    own: Sequence[Plot],
    sources: Mapping[str, str],
) -> str:
    shown = columns(metrics)
    of_learners = [one for one in shown if one.per_learner]
    return render(
        "report.html.jinja",
        method=config["method"]["_target_"].rsplit(".", 1)[1],
        dataset=dataset,
        metrics=metrics,
        tested=tested(metrics),
        monitor=monitor(metrics),
        columns=[one.title for one in shown],
        ensemble={title: cells(metrics, place, shown) for title, place in places(metrics).items()},
        of_learners=[one.title for one in of_learners],
        scales=[cells(metrics, f"scales/{i}", of_learners) for i in range(_scales(metrics))],
        apart=[cells(metrics, f"learners/{i}", of_learners) for i in range(learners)],
        number=lambda name: metric(name).written(metrics[name]),
        title=lambda name: metric(name).title,
        config=OmegaConf.to_yaml(OmegaConf.create(dict(config))),
        common=common,
        own=own,
        sources=sources,
        versions=f"dml {dml.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    )


def _scales(metrics: Mapping[str, float]) -> int:
    return sum(name.startswith("scales/") and name.endswith(f"/{HEADLINE}") for name in metrics)
