"""`report.html`: the report of a run as one self-contained file."""

import base64
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dml.configuration.composition import output_dir
from dml.evaluation.interval import LEVEL
from dml.evaluation.metric import HEADLINE, metric
from dml.figures import course, embeddings, galleries
from dml.figures.plot import Plot
from dml.files import write_atomically
from dml.reporting.explorer import Explorer, explorer
from dml.reporting.page import render
from dml.reporting.retrieved import Retrieved
from dml.reporting.table import (
    RERANKING_SAYS,
    below,
    cells,
    columns,
    interval,
    marked,
    places,
    reranked,
    tested_on,
)
from dml.runs.about import settings
from dml.runs.chosen import monitor
from dml.runs.folder import RunFolder
from dml.runs.provenance import said_of_starts, versions_line

SHOWN = 12  # worst classes, and pairs of classes, that are shown unfolded


@dataclass(frozen=True)
class Table:
    """A table of a run, for the report and for loggers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]  # words and numbers


def write_report(
    folder: Path,
    config: Mapping[str, Any],
    metrics: Mapping[str, float],
    tested: Retrieved,
    log: Sequence[Mapping[str, Any]],
    plots: Sequence[Plot],
) -> tuple[dict[str, Path], dict[str, Table]]:
    """Draws the plots that every method has and saves them, with the method's own plots, in `figures/`. Then it writes
    `report.html` with all of them.

    Args:
        folder: of the run.
        config: resolved, plain containers.
        metrics: the content of `metrics.json`.
        tested: the test of the checkpoint that is the result; neighbours are sought on the device of its embeddings.
        log: records of `metrics.jsonl`.
        plots: of the method.

    Returns:
        The paths of the pictures, and the tables, by name.
    """
    shown = explorer(tested)
    common = [*_of_scores(metrics, tested, log), *_of_images(tested, shown)]
    pictures = {plot.name: folder / "figures" / f"{plot.name}.png" for plot in (*common, *plots)}
    for plot in (*common, *plots):
        plot.save(pictures[plot.name])
    on_page = {plot.name: plot for plot in common if plot.name not in ("gallery", "map")}  # the page has its own
    names = [*on_page, *(plot.name for plot in plots)]
    sources = {name: base64.b64encode(pictures[name].read_bytes()).decode() for name in names}
    tables = _tables(config, metrics, tested)
    html = render(
        "report.html.jinja",
        about=_about(folder, config, metrics),
        metrics=metrics,
        result=tables["result"],
        reranked=tables.get("reranked"),
        reranking_says=RERANKING_SAYS,
        of_learners=tables.get("learners"),
        classes=tested.classes,
        examples=_examples(tested, shown),
        confusions=[(one, [shown.place[p] for p in one.examples if p in shown.place][:2]) for one in tested.confusions],
        of_a_class=tested.of_a_class,
        drawn_galleries=tested.ranking is None,
        most=SHOWN,
        scales=_scales(metrics),
        own=plots,
        common=on_page,
        sources=sources,
        explorer=shown,
        config=OmegaConf.to_yaml(OmegaConf.create(dict(config))),
        number=lambda name: metric(name).written(metrics[name]),
        title=lambda name: metric(name).title,
    )
    write_atomically(folder / "report.html", html)
    return pictures, tables


def _about(folder: Path, config: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, Any]:
    """Returns the content of the head of the page."""
    made = OmegaConf.create(dict(config))
    said, start = settings(made), said_of_starts(folder)[-1]
    epochs = metrics["run/steps"] * made.sampler.batch_size / max(1, metrics["data/train/images"])
    known = {"epochs": f"{epochs:.3g} (steps times batch, over training images)"}
    known |= {name: str(start[name]) for name in ("hardware", "commit", "date")}
    known["versions"] = versions_line(start) or f"python {platform.python_version()}"
    ends = interval(metrics)
    return {
        "method": made.method["_target_"].rsplit(".", 1)[1],
        "dataset": said["data set"],
        "settings": said | known,
        "command": shlex.join([*shlex.split(start["command"]), *_places(folder), output_dir(folder)]),
        "tested": tested_on(metrics),
        "monitor": monitor(metrics),
        "criterion": metric(made.protocol.criterion).title,
        "interval": ends,
        "below": below(metrics),
    }


def _places(folder: Path) -> list[str]:
    """Returns the folders that were typed for a run, which `provenance.json` leaves out, but its own."""
    typed = [option for option in RunFolder(folder).overrides() if option.startswith("paths.")]
    return [option for option in typed if not option.startswith("paths.output_dir=")]


def _tables(config: Mapping[str, Any], metrics: Mapping[str, float], tested: Retrieved) -> dict[str, Table]:
    shown = columns(metrics)
    result = [
        [title, *(marked(metrics, shown) if place == "test" else cells(metrics, place, shown))]
        for title, place in places(metrics).items()
    ]
    ends = ["–".join(interval(metrics, one.name)) for one in shown]
    if any(ends):
        result.insert(1, [f"{LEVEL:.0%} interval", *ends])
    found = {"result": Table(["", *(one.title for one in shown)], result)}
    titles, again = reranked(metrics)
    if again:
        found["reranked"] = Table(titles, again)
    known = settings(OmegaConf.create(dict(config)))
    found["settings"] = Table(["setting", "value"], [[title, value] for title, value in known.items()])
    if tested.learners > 1:
        found["learners"] = _of_learners(metrics, tested)
    rows = [[one.name, one.queries, one.recall, one.taken_for] for one in tested.classes]
    found["classes"] = Table(["class", "queries", tested.of_a_class, "most often taken for"], rows)
    pairs = [[*one.names, one.count, one.share] for one in tested.confusions]
    found["confusions"] = Table(["class", "and class", "queries", "share of both classes' queries"], pairs)
    return found


def _of_learners(metrics: Mapping[str, float], tested: Retrieved) -> Table:
    """Returns a table of each learner's metrics and of what it adds to the ensemble."""
    of = [one for one in columns(metrics) if one.per_learner]
    rows: list[list[Any]] = [[i, *cells(metrics, f"learners/{i}", of)] for i in range(tested.learners)]
    titles = ["learner", *(one.title for one in of)]
    best = tested.best_of_learners
    if best is not None:
        titles += ["right alone", "ensemble without it", "it adds"]
        right = best == 1
        for i, (row, without) in enumerate(zip(rows, tested.recall_without, strict=True)):
            alone = int((right[i] & (right.sum(0) == 1)).sum())
            row += [alone, f"{without:.4f}", f"{metrics[f'test/{HEADLINE}'] - without:+.4f}"]
    return Table(titles, rows)


def _scales(metrics: Mapping[str, float]) -> Table | None:
    count = sum(name.startswith("scales/") and name.endswith(f"/{HEADLINE}") for name in metrics)
    of = [one for one in columns(metrics) if one.per_learner]
    rows = [[i, *cells(metrics, f"scales/{i}", of)] for i in range(count)]
    return Table(["scale", *(one.title for one in of)], rows) if rows else None


def _examples(tested: Retrieved, shown: Explorer) -> dict[int, list[int]]:
    """Returns some wrong queries of the worst classes: the label of a class -> the numbers of images on the page."""
    found: dict[int, list[int]] = {}
    worst = {one.label for one in tested.classes[:SHOWN]}
    for place, image in shown.place.items():
        label = int(tested.labels[place])
        if label in worst and tested.counted[place] and not tested.right[place]:
            found.setdefault(label, []).append(image)
    return {label: images[:4] for label, images in found.items()}


def _of_scores(metrics: Mapping[str, float], tested: Retrieved, log: Sequence[Mapping[str, Any]]) -> Iterator[Plot]:
    learners = tested.learners
    of = "learners" if learners > 1 else "slices"
    rates = course.constant_rates(log)
    said = "" if not rates else f"; the rate was constant ({', '.join(f'{n} {r:g}' for n, r in rates.items())})"
    seen = " and training" if any(f"seen/{HEADLINE}" in record for record in log) else ""
    caption = f"Training loss and Recall@1 on the {monitor(metrics)}{seen} classes"
    yield Plot("curves", caption + (", and learning rates" if rates is None else said), course.curves(log))
    if learners > 1:
        caption = "Recall@1 of each learner and of the ensemble"
        yield Plot("learners", caption, embeddings.learner_bars(metrics, learners))
    if f"first/2/{HEADLINE}" in metrics:
        yield Plot("first", f"Recall@K of the ensemble of the first m {of}", embeddings.first_learners(metrics, of))
    between = ", and between learners for the same image (self pairs)" if learners > 1 else ""
    caption = (
        f"Cosine similarity{' within each learner' if between else ''} of positive and negative pairs of test images"
    )
    yield Plot("similarities", caption + between, embeddings.similarity_histograms(tested.of_classes.cpu()))
    sizes = [one.queries for one in tested.classes]
    if len(set(sizes)) > 1:
        drawn = embeddings.class_sizes(sizes, [one.recall for one in tested.classes], tested.of_a_class)
        yield Plot("class_sizes", f"{tested.of_a_class}: the test classes over their numbers of queries", drawn)


def _of_images(tested: Retrieved, shown: Explorer) -> Iterator[Plot]:
    records, queries = tested.records, tested.queries
    if tested.best_of_learners is not None:
        caption = (
            "Queries whose nearest image is right for a single learner; the number is the rank of the nearest right "
            "image for the best of the other learners, among all images that are searched; learners without such a "
            "query are left out"
        )
        rows = queries.rows.cpu().numpy()
        drawn = galleries.easiest_queries(tested.best_of_learners, rows, records.open_image, records.class_of)
        yield Plot("easiest", caption, drawn)
    caption = (
        "Test queries and their nearest neighbours: a green tick marks the same class, a red cross another; half of "
        "the rows, or more if few queries are right, were chosen because their nearest neighbour is wrong"
    )
    sheet = galleries.retrieval_gallery(
        queries.cpu(), tested.searched.cpu(), tested.neighbours, tested.right, records.open_image, records.class_of
    )
    yield Plot("gallery", caption, sheet)
    title, points = list(shown.maps.items())[-1]
    some = f"{shown.images:,} of the test images" if shown.left_out else "Test images"
    yield Plot("map", f"{some} in two dimensions", embeddings.embedding_map(points, shown.outcome, title))
