"""One page of experiments: what was published, what was measured here, and the difference; paper figures drawn."""

import base64
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tabulate import tabulate

from dml.evaluation.metric import declared
from dml.figures import course, summaries
from dml.files import write_atomically
from dml.papers.experiment import Compared, Experiment, Measurement, Row, Training, Tuned
from dml.papers.trainings import finished
from dml.reporting.page import render
from dml.runs.log import read_metrics


@dataclass(frozen=True)
class Cell:
    """A metric of a row in the unit of the paper; None: not printed, or not measured.

    Attributes:
        published: as printed.
        mean, std: of n seeds; std None of one.
        higher_is_better: None: neither way, as for a spread, or not known.
    """

    published: float | None
    mean: float | None
    std: float | None
    n: int
    higher_is_better: bool | None = True

    @property
    def better(self) -> bool | None:
        """Than published; None: neither way, or not known."""
        if not self.difference or self.higher_is_better is None:
            return None
        return (self.difference > 0) == self.higher_is_better

    @property
    def difference(self) -> float | None:
        """Measured less published."""
        return None if self.mean is None or self.published is None else self.mean - self.published


@dataclass(frozen=True)
class Setting:
    """Measurements that were made with the same changes to the paper's setting; none: the paper's own."""

    changes: list[str]
    rows: dict[str, dict[str, dict[str, Cell]]]  # by row, part and column


def settings(experiment: Experiment) -> list[Setting]:
    """The paper's setting first, with every row, then each other that was measured, with the rows that were."""
    found = sorted(
        {tuple(one.changes) for one in experiment.measured if one.changes}, key=lambda changes: (len(changes), changes)
    )
    return [_setting(experiment, list(changes)) for changes in ((), *found)]


def _setting(experiment: Experiment, changes: list[str]) -> Setting:
    rows = {}
    for row in experiment.rows.values():
        of_row = [one for one in experiment.measured if one.row == row.name and one.changes == changes]
        if changes and not of_row:
            continue
        rows[row.name] = {
            part: {
                title: _cell(row.published.get(part, {}).get(title), column.metric, column.scale, part, of_row)
                for title, column in experiment.parts[part].columns.items()
            }
            for part in experiment.parts
        }
    return Setting(changes, rows)


def _cell(published: float | None, metric: str, scale: float, part: str, measured: Sequence[Measurement]) -> Cell:
    # Over repetitions, not over learners or collections, which runs tell by that name.
    spread = metric.endswith("/std") and not metric.startswith(("learners/", "mlrc/"))
    name = metric.removesuffix("/std") if spread else metric
    mine = [one for one in measured if one.part == part and name in one.metrics]
    # Sizes are counted once: where there are trainings, these have them too.
    values = [scale * one.metrics[name] for one in ([m for m in mine if m.seed is not None] or mine)]
    if spread:
        return Cell(published, statistics.stdev(values) if len(values) > 1 else None, None, len(values), None)
    std = statistics.stdev(values) if len(values) > 1 else None
    known = declared(name)
    better = None if known is None else known.higher_is_better
    return Cell(published, statistics.fmean(values) if values else None, std, len(values), better)


def drawing(experiment: Experiment, out: Path) -> list[tuple[str, str]]:
    """Caption and PNG, as a data URI, of what can be drawn of a paper figure."""
    kind = experiment.figure.get("kind")
    if kind == "over":
        return _over(experiment)
    if kind == "scatter":
        return _scatter(experiment)
    if kind == "course":
        return _course(experiment, out)
    if kind == "comparison":
        picture = comparison(experiment)
        return [] if picture is None else [("", _uri(picture))]
    return _pictures(experiment, out) if kind == "pictures" else []


def comparison(experiment: Experiment) -> Figure | None:
    """The rows of an experiment beside the one that they are compared with, by its figure's `metric`, in the
    setting of the experiment; None where nothing was measured in it."""
    metric = experiment.figure["metric"]
    compared = [one for one in experiment.compared if one.metric == metric["compared"] and not one.changes]
    differences = {(one.row, one.part): one for one in compared}
    parts: dict[str, list[summaries.MethodPoint]] = {}
    for part in experiment.parts:
        for row in experiment.rows:
            if values := _values(experiment, row, part, [], metric["metric"]):
                found = differences.get((row, part))
                between = None if found is None else (100 * found.estimate, 100 * found.low, 100 * found.high)
                parts.setdefault(part, []).append(
                    summaries.MethodPoint(row, [100 * value for value in values], between)
                )
    return summaries.methods(parts, metric["title"], experiment.compared_with) if parts else None


def markdown(experiment: Experiment) -> str:
    """What was measured, a table a setting and part: mean ± std of so many seeds, and the distance in points from the
    row that all are compared with."""
    tables = []
    for setting in settings(experiment):
        for part in experiment.parts:
            shown = [title for title, (_, any_of) in columns(experiment, setting, part).items() if any_of]
            rows = {name: cells[part] for name, cells in setting.rows.items()}
            rows = {name: of for name, of in rows.items() if any(of[title].mean is not None for title in shown)}
            compared = [one for one in experiment.compared if one.part == part and one.changes == setting.changes]
            metrics = list(dict.fromkeys(one.metric for one in compared))
            table = []
            for name, of in rows.items():
                line = {"": name} | {title: measured(of[title]) for title in shown}
                for metric in metrics:
                    found = [one for one in compared if (one.row, one.metric) == (name, metric)]
                    line[f"{metric} less {experiment.compared_with}"] = interval(found[0]) if found else ""
                table.append(line | {"n": str(max(of[title].n for title in shown))})
            if table:
                text = tabulate(table, headers="keys", tablefmt="github", disable_numparse=True)
                tables.append(f"{' '.join([part, *setting.changes])}:\n\n{text}\n")
    if experiment.tuned:
        tuned = [
            {"": one.row, "found": " ".join(one.chosen), "best": number(one.best), "trials": str(len(one.trials))}
            for one in experiment.tuned
        ]
        text = tabulate(tuned, headers="keys", tablefmt="github", disable_numparse=True)
        tables.append(f"Tuned on validation classes:\n\n{text}\n")
    return "\n".join(tables)


def interval(found: Compared) -> str:
    """A difference in points, with its interval."""
    return f"{100 * found.estimate:+.2f} ({100 * found.low:+.2f} to {100 * found.high:+.2f})"


def measured(cell: Cell) -> str:
    """Mean ± standard deviation; nothing of what was not measured."""
    return number(cell.mean) + ("" if cell.std is None else f" ± {number(cell.std)}")


Lines = dict[str, list[summaries.Measured]]

PUBLISHED = ", published"  # of a line


def _over(experiment: Experiment) -> list[tuple[str, str]]:
    """What was measured over a number; of the paper's setting beside what was published."""
    x, ys, drawn = experiment.figure["x"], experiment.figure["y"], []
    for y in ys if isinstance(ys, list) else [ys]:
        for changes, part in product(_changes(experiment), experiment.parts):
            lines: Lines = {}
            for row in experiment.rows.values():
                values = _values(experiment, row.name, part, list(changes), y["metric"])
                if row.x is not None and values:
                    std = statistics.stdev(values) if len(values) > 1 else None
                    lines.setdefault(row.line, []).append(summaries.Measured(row.x, statistics.fmean(values), std))
                printed_here = _published(experiment, row, part, y["metric"])
                if row.x is not None and printed_here is not None and not changes:
                    lines.setdefault(row.line + PUBLISHED, []).append(summaries.Measured(row.x, printed_here, None))
            # Lines over different things are pictures of their own.
            for title in x.values() if isinstance(x, dict) else [y.get("x", x)]:
                mine = {
                    line: points
                    for line, points in lines.items()
                    if not isinstance(x, dict) or x[line.removesuffix(PUBLISHED)] == title
                }
                if mine:
                    picture = summaries.over(mine, title, y["title"], [one for one in mine if one.endswith(PUBLISHED)])
                    drawn.append((" ".join([part, *changes]), _uri(picture)))
    return drawn


def _changes(experiment: Experiment) -> list[tuple[str, ...]]:
    """The paper's setting, and every other that was measured."""
    return sorted({(), *(tuple(one.changes) for one in experiment.measured)})


def _published(experiment: Experiment, row: Row, part: str, metric: str) -> float | None:
    """What the paper prints of a row, in the unit of the metric."""
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


def _scatter(experiment: Experiment) -> list[tuple[str, str]]:
    """One metric of a row against another; of the paper's setting beside what was published."""
    x, y, drawn = experiment.figure["x"], experiment.figure["y"], []
    for changes, part in product(_changes(experiment), experiment.parts):
        lines: Lines = {}
        for row in experiment.rows.values():
            xs, ys = (_values(experiment, row.name, part, list(changes), axis["metric"]) for axis in (x, y))
            if xs and ys:
                point = summaries.Measured(statistics.fmean(xs), statistics.fmean(ys), None)
                lines.setdefault(row.line, []).append(point)
            at, of = (_published(experiment, row, part, axis["metric"]) for axis in (x, y))
            if at is not None and of is not None and not changes:
                lines.setdefault(row.line + PUBLISHED, []).append(summaries.Measured(at, of, None))
        if lines:
            picture = summaries.over(lines, x["title"], y["title"], [one for one in lines if one.endswith(PUBLISHED)])
            drawn.append((" ".join([part, *changes]), _uri(picture)))
    return drawn


def _course(experiment: Experiment, out: Path) -> list[tuple[str, str]]:
    lines: dict[str, dict[int, float]] = {}
    for training, folder in _runs(experiment, out):
        records = read_metrics(folder / "metrics.jsonl")
        for one in experiment.figure["y"]:
            values = {record["step"]: record[one["metric"]] for record in records if one["metric"] in record}
            lines[f"{training.row}, {training.part}: {one['title']}"] = values
    return [("", _uri(course.recall_over_steps(lines)))] if lines else []


def _pictures(experiment: Experiment, out: Path) -> list[tuple[str, str]]:
    places: dict[Path, str] = {}  # rows of one script share its pictures
    for training, folder in _runs(experiment, out):
        where = folder if training.script else folder / "figures"
        places.setdefault(where, training.part if training.script else f"{training.row}, {training.part}")
    return [
        (f"{name}: {picture}", _data((place / f"{picture}.png").read_bytes()))
        for place, name in places.items()
        for picture in experiment.figure["names"]
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


def _digits(value: float) -> int:
    """As many places as the paper prints of a number of this size."""
    return 1 if abs(value) >= 10 else 2


def columns(experiment: Experiment, setting: Setting, part: str) -> dict[str, tuple[bool, bool]]:
    """Whether anything was published and measured in each column of a part."""
    result = {}
    for title in experiment.parts[part].columns:
        cells = [cells[part][title] for cells in setting.rows.values()]
        result[title] = (any(c.published is not None for c in cells), any(c.mean is not None for c in cells))
    return result


def number(value: float | None, sign: bool = False) -> str:
    """In the precision of the papers; nothing for None."""
    return "" if value is None else f"{value:{'+' if sign else ''}.{_digits(value)}f}"


def printed(value: float | None, places: int) -> str:
    """A published number, to the digit."""
    return "" if value is None else f"{value:.{places}f}"


def places(experiment: Experiment, part: str, title: str) -> int:
    """Of a column: as many decimals as the paper prints where it prints the most."""
    values = [row.published[part][title] for row in experiment.rows.values() if title in row.published.get(part, {})]
    return max((len(repr(value).partition(".")[2]) for value in values), default=1)


def sources(measured: Sequence[Measurement | Tuned]) -> list[Mapping[str, Any]]:
    """Where measurements come from, equal ones once."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for one in measured:
        groups.setdefault((one.hardware, one.commit, one.date), []).append(one.command)
    return [
        {"hardware": hardware, "commit": commit, "date": date, "commands": list(dict.fromkeys(commands))}
        for (hardware, commit, date), commands in groups.items()
    ]


def write_page(experiments: Sequence[Experiment], out: Path) -> Path:
    """`index.html` in `out`, self-contained."""
    content = [
        {
            "experiment": one,
            "settings": settings(one),
            "drawing": drawing(one, out),
            "sources": sources([*one.tuned, *one.measured]),
            "compared": one.compared,
            "trained": sum(row.overrides is not None or row.command is not None for row in one.rows.values()),
            "measured": len({m.row for m in one.measured}),
        }
        for one in experiments
    ]
    page = render(
        "experiments.html.jinja", content=content, number=number, printed=printed, columns=columns, places=places
    )
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "index.html", page)
    return out / "index.html"
