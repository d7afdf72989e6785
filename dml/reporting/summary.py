"""One table of several runs, what they cost, and a metric over each number that was swept.

Runs that differ in their seed, split, fold or repetition alone are one row: mean and standard deviation over them.
"""

import base64
import csv
import difflib
import io
import json
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tabulate import tabulate

from dml.configuration.identity import label
from dml.errors import UserError
from dml.figures import course, summaries
from dml.files import atomic_path, write_atomically
from dml.reporting.page import render
from dml.runs.collecting import Row, leaves, rows
from dml.runs.log import read_metrics

COLUMNS = {
    "test/recall@1": "Recall@1",
    "learners/mean/recall@1": "mean learner",
    "gain": "gain",
    "learners/self_cosine": "self cosine",
    "learners/correlation": "correlation",
    "slices/mean/recall@1": "mean slice",
    "slices/correlation": "correlation of slices",
    "test/map@r": "MAP@R",
    "untrained/recall@1": "untrained",
}

NEEDED = ("test/recall@1", "model/params", "model/flops")  # of every run

PRINTED = ("test/recall@1", "learners/mean/recall@1", "learners/self_cosine")  # what 80 columns have room for


def write_summary(folders: Sequence[Path], out: Path, metric: str = "test/recall@1", over: str | None = None) -> Path:
    """`summary.html`, `.md`, `.csv`, `.tex`, `.json` and `figures/` in a folder; prints the table.

    Args:
        out: the folder, which is made.
        metric: drawn over each number that the runs were swept over, with its standard deviation.
        over: the only option to draw it over; None: every one.

    Returns:
        The page.

    Raises:
        UserError: no finished run below the folders, a metric or an option that they do not have, or a folder that
            cannot be written.
    """
    runs = leaves(folders)
    if not runs:
        raise UserError(f"no finished run (config.yaml with metrics.json) lies below {', '.join(map(str, folders))}.")
    for run in runs:
        if lacking := [name for name in NEEDED if name not in run.metrics]:
            raise UserError(f"{run.folder / 'metrics.json'} has no {lacking[0]}: repeat the run, or leave it out.")
    table = rows(runs)
    shown = [name for name in COLUMNS if any(name in row.metrics for row in table)]
    swept = _swept(table, metric, over)
    _print(table, [name for name in PRINTED if name in shown])
    content = [
        {"label": row.label, "runs": [str(run.folder) for run in row.runs], "metrics": row.metrics} for row in table
    ]
    page, place = out / "summary.html", out / "figures"
    drawn = {
        "cost": summaries.recall_and_cost([_point(row) for row in table]),
        "recall": course.recall_over_steps({row.label: _course(row) for row in table}),
    } | {f"over_{name}": summaries.over(lines, name, metric) for name, lines in swept.items()}
    pictures = {name: place / f"{name}.png" for name in drawn}
    texts = {
        "json": json.dumps(content, indent=1) + "\n",
        "md": tabulate(_cells(table, shown), headers="keys", tablefmt="github", disable_numparse=True) + "\n",
        "tex": tabulate(_cells(table, shown), headers="keys", tablefmt="latex_booktabs", disable_numparse=True) + "\n",
        "csv": _csv(table),
    }
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name, figure in drawn.items():
            with atomic_path(pictures[name]) as new:
                figure.savefig(new, format="png")
        for kind, text in texts.items():
            write_atomically(out / f"summary.{kind}", text)
        write_atomically(page, _html(table, shown, pictures, list(swept)))
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): name another with -o.") from error
    print(f"Report: {page}")
    return page


def _swept(table: Sequence[Row], metric: str, over: str | None) -> dict[str, dict[str, list[summaries.Measured]]]:
    """Of each option that has several numbers: lines of what else differs, of the metric by the number."""
    if not any(metric in row.metrics for row in table):
        near = ", ".join(
            difflib.get_close_matches(metric, sorted({n for row in table for n in row.metrics}), cutoff=0.4)
        )
        raise UserError(f"no run has the figure {metric}" + (f": did you mean {near}?" if near else "."))
    found: dict[str, dict[str, list[summaries.Measured]]] = {}
    for name in dict.fromkeys(name for row in table for name in row.options):
        lines: dict[str, list[summaries.Measured]] = {}
        for row in table:
            value = _number(row.options.get(name, ""))
            if value is not None and metric in row.metrics:
                others = (
                    " ".join(f"{o}={v}" for o, v in row.options.items() if o != name) or label(row.runs[0].config)[0]
                )
                point = summaries.Measured(value, row.metrics[metric], row.metrics.get(f"{metric}/std", 0.0))
                lines.setdefault(others, []).append(point)
        if len({point.x for points in lines.values() for point in points}) > 1:
            found[name] = lines
    if over is not None and over not in found:
        raise UserError(f"the runs were not swept over numbers of {over}; they were over {', '.join(found) or 'none'}.")
    return {over: found[over]} if over is not None else found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _cells(table: Sequence[Row], shown: Sequence[str]) -> list[dict[str, str]]:
    return [
        {"configuration": row.label, "n": str(len(row.runs))} | {COLUMNS[name]: row.cell(name) for name in shown}
        for row in table
    ]


def _csv(table: Sequence[Row]) -> str:
    """All figures, to their last digit: `configuration, n`, and a column each, its deviation as `<name>/std`."""
    names = sorted({name for row in table for name in row.metrics})
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["configuration", "n", *names])
    for row in table:
        writer.writerow([row.label, len(row.runs), *(row.metrics.get(name, "") for name in names)])
    return text.getvalue()


def _point(row: Row) -> summaries.Point:
    """A line of the picture joins what differs in the number of learners alone."""
    others = [option for option in row.label.split(" ") if not re.match(r"method\.[A-Z]=", option)]
    figure = row.metrics
    return summaries.Point(
        line=" ".join(others) or label(row.runs[0].config)[0],
        learners=sum(bool(re.fullmatch(r"learners/\d+/recall@1", name)) for name in row.runs[0].metrics),
        params=figure["model/params"],
        flops=figure["model/flops"],
        recall=figure["test/recall@1"],
        std=figure.get("test/recall@1/std", 0.0),
    )


def _course(row: Row) -> dict[int, float]:
    """Recall@1 by step, the mean over the runs that were evaluated there, on what they watched while training."""
    values: dict[int, list[float]] = {}
    for run in row.runs:
        log = run.folder / "metrics.jsonl"
        records = read_metrics(log) if log.exists() else []
        name = "validation/recall@1" if "best_on_validation/step" in run.metrics else "test/recall@1"
        for record in records:
            if name in record:
                values.setdefault(record["step"], []).append(record[name])
    return {step: statistics.fmean(values[step]) for step in sorted(values)}


def _print(table: Sequence[Row], shown: Sequence[str]) -> None:
    printed = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        caption="mean±standard deviation (n - 1)",
    )
    printed.add_column("", overflow="fold", min_width=20)
    for title in ("n", *(COLUMNS[name] for name in shown)):
        printed.add_column(title, justify="right", no_wrap=True)
    for row in table:
        printed.add_row(row.label, str(len(row.runs)), *(row.cell(name) for name in shown))
    Console().print(printed)


def _html(table: Sequence[Row], shown: Sequence[str], pictures: Mapping[str, Path], swept: Sequence[str]) -> str:
    return render(
        "summary.html.jinja",
        table=table,
        swept=swept,
        columns={name: COLUMNS[name] for name in shown},
        pictures={name: base64.b64encode(path.read_bytes()).decode() for name, path in pictures.items()},
        commands=[(run, shlex.join(["python", "-m", "dml.run", *run.overrides])) for row in table for run in row.runs],
    )
