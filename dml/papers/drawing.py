"""Draws the figures of papers: what was measured here beside what was published."""

import base64
import io
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from matplotlib.figure import Figure

from dml.evaluation.metric import metric
from dml.figures import course, summaries
from dml.papers.drawn import Comparison, Course, Curve, Over, Pictures, Scatter
from dml.papers.experiment import Experiment, Row, Training
from dml.papers.trainings import finished
from dml.papers.verdicts import ABOVE, OPEN, OTHER, SHOWS, patterns, verdict
from dml.runs.log import read_metrics


def drawing(experiment: Experiment, out: Path) -> list[tuple[str, str]]:
    """Draws a paper's figure as far as it was measured; for a table there is nothing to draw.

    Args:
        out: the folder of the trainings.

    Returns:
        Captions and pictures, PNGs as data URIs.
    """
    match experiment.figure:
        case Over() as figure:
            return _over(experiment, figure)
        case Scatter() as figure:
            return _scatter(experiment, figure)
        case Course() as figure:
            return _course(experiment, figure, out)
        case Curve() as figure:
            return _curve(experiment, figure)
        case Pictures() as figure:
            return _pictures(experiment, figure, out)
        case Comparison():
            picture = comparison(experiment)
            return [] if picture is None else [("", _uri(picture))]
        case None:
            return []


def comparison(experiment: Experiment) -> Figure | None:
    """Draws the rows of an experiment and their differences from the row that they are compared with.

    The metric is the `metric` of the experiment's figure. Measurements with changes are left out. Returns None if no
    others were made, or the experiment has another figure or none.
    """
    if not isinstance(experiment.figure, Comparison):
        return None
    drawn = experiment.figure.metric
    compared = [one for one in experiment.compared if one.metric == drawn.compared and not one.changes]
    differences = {(one.row, one.part): one for one in compared}
    parts: dict[str, list[summaries.MethodPoint]] = {}
    for part in experiment.parts:
        for row in experiment.rows:
            if values := _values(experiment, row, part, [], drawn.metric):
                found = differences.get((row, part))
                between = None if found is None else (100 * found.estimate, 100 * found.low, 100 * found.high)
                parts.setdefault(part, []).append(
                    summaries.MethodPoint(row, [100 * value for value in values], between)
                )
    return summaries.methods(parts, drawn.title, experiment.compared_with) if parts else None


def glance(experiments: Sequence[Experiment]) -> tuple[str, str] | None:
    """Draws the patterns of papers that were measured, in all experiments together.

    Returns:
        A sentence with the number of patterns that show, are the other way round, or are open, and the picture, a PNG
        as data URI. None: no experiment has a pattern that was measured.
    """
    groups: dict[str, list[summaries.PatternPoint]] = {}
    said: Counter[str] = Counter()
    for experiment in experiments:
        parted = len({one.part for one, _ in patterns(experiment)}) > 1
        for one, expected in patterns(experiment):
            sign = 100 if expected == ABOVE else -100
            place = "".join(f", {name}" for name in [one.part] * parted + one.changes)
            label = f"{one.row} {expected} {one.against}{place}: {metric(one.metric).title}"
            low, high = sorted((sign * one.low, sign * one.high))
            point = summaries.PatternPoint(label, sign * one.estimate, low, high)
            groups.setdefault(experiment.title, []).append(point)
            said[verdict(one, expected)] += 1
    if not groups:
        return None
    counts = f"{said[SHOWS]} show, {said[OTHER]} the other way round, {said[OPEN]} open"
    sentence = f"Differences that the papers report, and that were measured here: {said.total()} ({counts})."
    return sentence, _uri(summaries.patterns(groups))


Lines = dict[str, list[summaries.Measured]]

PUBLISHED = ", published"  # added to the label of a line


def _over(experiment: Experiment, figure: Over) -> list[tuple[str, str]]:
    """Draws metrics over a number, a picture for each setting; the published ones are in that of the paper's."""
    x, drawn = figure.x, []
    for y in figure.y:
        for changes, part in product(_changes(experiment), experiment.parts):
            lines: Lines = {}
            for row in experiment.rows.values():
                values = _values(experiment, row.name, part, list(changes), y.metric)
                if row.x is not None and values:
                    std = statistics.stdev(values) if len(values) > 1 else None
                    lines.setdefault(row.line, []).append(summaries.Measured(row.x, statistics.fmean(values), std))
                printed_here = _published(experiment, row, part, y.metric)
                if row.x is not None and printed_here is not None and not changes:
                    lines.setdefault(row.line + PUBLISHED, []).append(summaries.Measured(row.x, printed_here, None))
            # Lines over different quantities go into pictures of their own.
            for title in dict.fromkeys(x.values()) if isinstance(x, dict) else [y.x or x]:
                mine = {
                    line: points
                    for line, points in lines.items()
                    if not isinstance(x, dict) or x[line.removesuffix(PUBLISHED)] == title
                }
                if mine:
                    picture = summaries.over(mine, title, y.title, [one for one in mine if one.endswith(PUBLISHED)])
                    drawn.append((" ".join([part, *changes]), _uri(picture)))
    return drawn


def _changes(experiment: Experiment) -> list[tuple[str, ...]]:
    """Returns the changes of every setting that was measured; first none, which is the paper's setting."""
    return sorted({(), *(tuple(one.changes) for one in experiment.measured)})


def _published(experiment: Experiment, row: Row, part: str, metric: str) -> float | None:
    """Returns what the paper prints for a row, in the unit of the metric; None if it prints nothing."""
    for title, column in experiment.parts[part].columns.items():
        if column.metric == metric and title in row.published.get(part, {}):
            return row.published[part][title] / column.scale
    return None


def _values(experiment: Experiment, row: str, part: str, changes: list[str], metric: str) -> list[float]:
    return [
        one.metrics[metric]
        for one in experiment.measured
        if (one.row, one.part, one.changes) == (row, part, changes) and metric in one.metrics
    ]


def _scatter(experiment: Experiment, figure: Scatter) -> list[tuple[str, str]]:
    """Draws one metric of a row against another; the published ones are in the picture of the paper's setting."""
    x, y, drawn = figure.x, figure.y, []
    for changes, part in product(_changes(experiment), experiment.parts):
        lines: Lines = {}
        for row in experiment.rows.values():
            xs, ys = (_values(experiment, row.name, part, list(changes), axis.metric) for axis in (x, y))
            if xs and ys:
                point = summaries.Measured(statistics.fmean(xs), statistics.fmean(ys), None)
                lines.setdefault(row.line, []).append(point)
            at, of = (_published(experiment, row, part, axis.metric) for axis in (x, y))
            if at is not None and of is not None and not changes:
                lines.setdefault(row.line + PUBLISHED, []).append(summaries.Measured(at, of, None))
        if lines:
            picture = summaries.over(lines, x.title, y.title, [one for one in lines if one.endswith(PUBLISHED)])
            drawn.append((" ".join([part, *changes]), _uri(picture)))
    return drawn


def _course(experiment: Experiment, figure: Course, out: Path) -> list[tuple[str, str]]:
    lines: dict[str, dict[int, float]] = {}
    for training, folder in _runs(experiment, out):
        records = read_metrics(folder / "metrics.jsonl")
        for one in figure.y:
            values = {record["step"]: record[one.metric] for record in records if one.metric in record}
            lines[f"{training.row}, {training.part}: {one.title}"] = values
    return [("", _uri(course.recall_over_steps(lines)))] if lines else []


def _curve(experiment: Experiment, figure: Curve) -> list[tuple[str, str]]:
    """Draws Recall@1 over steps from the record, where each evaluation's Recall@1 is a metric of its own."""
    drawn = []
    for changes, part in product(_changes(experiment), experiment.parts):
        lines: dict[str, dict[int, float]] = {}
        for row, (step, name) in product(experiment.rows, figure.steps.items()):
            if values := _values(experiment, row, part, list(changes), name):
                lines.setdefault(row, {})[step] = statistics.fmean(values)
        if lines:
            drawn.append((" ".join([part, *changes]), _uri(course.recall_over_steps(lines))))
    return drawn


def _pictures(experiment: Experiment, figure: Pictures, out: Path) -> list[tuple[str, str]]:
    places: dict[Path, str] = {}  # rows of one script share its pictures
    for training, folder in _runs(experiment, out):
        where = folder if training.script else folder / "figures"
        places.setdefault(where, training.part if training.script else f"{training.row}, {training.part}")
    return [
        (f"{name}: {picture}", _data((place / f"{picture}.png").read_bytes()))
        for place, name in places.items()
        for picture in figure.names
        if (place / f"{picture}.png").exists()
    ]


def _runs(experiment: Experiment, out: Path) -> list[tuple[Training, Path]]:
    found = [(training, finished(training, out)) for training in experiment.trainings(seeds=[0])]
    return [(training, folder) for training, folder in found if folder is not None]


def _uri(figure: Figure) -> str:
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return _data(content.getvalue())


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
