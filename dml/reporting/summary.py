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
from dml.configuration.trainings import declared
from dml.errors import UserError
from dml.evaluation.metric import HEADLINE, of_runs
from dml.evaluation.metric import metric as declared_metric
from dml.figures import course, summaries
from dml.files import atomic_path, write_atomically
from dml.reporting.console import print_in_blocks
from dml.reporting.page import render
from dml.reporting.table import monitor
from dml.runs.collecting import Group, groups, leaves
from dml.runs.log import read_metrics

NEEDED = (f"test/{HEADLINE}", "model/params", "model/flops")  # of every run


def write_summary(
    folders: Sequence[Path], out: Path, metric: str = f"test/{HEADLINE}", over: str | None = None
) -> Path:
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
    table = groups(runs)
    shown = {name: title for name, title, _ in of_runs() if any(name in group.metrics for group in table)}
    swept = _swept(table, metric, over)
    _print(table, shown)
    content = [
        {"label": group.label, "runs": [str(run.folder) for run in group.runs], "metrics": group.metrics}
        for group in table
    ]
    page, place = out / "summary.html", out / "figures"
    drawn = {
        "cost": summaries.recall_and_cost([_point(group) for group in table]),
        "recall": course.recall_over_steps({group.label: _course(group) for group in table}),
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
        for name, picture in drawn.items():
            with atomic_path(pictures[name]) as new:
                picture.savefig(new, format="png")
        for kind, text in texts.items():
            write_atomically(out / f"summary.{kind}", text)
        write_atomically(page, _html(table, shown, pictures, list(swept)))
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): name another with -o.") from error
    print(f"Report: {page}")
    return page


def _swept(table: Sequence[Group], metric: str, over: str | None) -> dict[str, dict[str, list[summaries.Measured]]]:
    """Of each option that has several numbers: lines of what else differs, of the metric by the number."""
    if not any(metric in group.metrics for group in table):
        near = ", ".join(
            difflib.get_close_matches(metric, sorted({n for group in table for n in group.metrics}), cutoff=0.4)
        )
        raise UserError(f"no run has the metric {metric}" + (f": did you mean {near}?" if near else "."))
    found: dict[str, dict[str, list[summaries.Measured]]] = {}
    for name in dict.fromkeys(name for group in table for name in group.options):
        lines: dict[str, list[summaries.Measured]] = {}
        for group in table:
            value = _number(group.options.get(name, ""))
            if value is not None and metric in group.metrics:
                others = (
                    " ".join(f"{o}={v}" for o, v in group.options.items() if o != name)
                    or label(group.runs[0].config)[0]
                )
                point = summaries.Measured(value, group.metrics[metric], group.metrics.get(f"{metric}/std", 0.0))
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


def _cells(table: Sequence[Group], shown: Mapping[str, str]) -> list[dict[str, str]]:
    return [
        {"configuration": group.label, "n": str(len(group.runs))}
        | {title: group.cell(name) for name, title in shown.items()}
        for group in table
    ]


def _csv(table: Sequence[Group]) -> str:
    """All metrics, to their last digit: `configuration, n`, and a column each, its deviation as `<name>/std`."""
    names = sorted({name for group in table for name in group.metrics})
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["configuration", "n", *names])
    for group in table:
        writer.writerow([group.label, len(group.runs), *(group.metrics.get(name, "") for name in names)])
    return text.getvalue()


def _point(group: Group) -> summaries.Point:
    """A line of the picture joins what differs in the number of learners alone."""
    counting = {f"method.{name}" for name in declared(group.runs[0].config.method, "counted_by")}
    others = [option for option in group.label.split(" ") if option.lstrip("+").partition("=")[0] not in counting]
    metrics = group.metrics
    return summaries.Point(
        line=" ".join(others) or label(group.runs[0].config)[0],
        learners=sum(bool(re.fullmatch(rf"learners/\d+/{HEADLINE}", name)) for name in group.runs[0].metrics),
        params=metrics["model/params"],
        flops=metrics["model/flops"],
        recall=metrics[f"test/{HEADLINE}"],
        std=metrics.get(f"test/{HEADLINE}/std", 0.0),
    )


def _course(group: Group) -> dict[int, float]:
    """Recall@1 by step, the mean over the runs that were evaluated there, on what was monitored while training."""
    values: dict[int, list[float]] = {}
    for run in group.runs:
        log = run.folder / "metrics.jsonl"
        records = read_metrics(log) if log.exists() else []
        name = f"{monitor(run.metrics)}/{HEADLINE}"
        for record in records:
            if name in record:
                values.setdefault(record["step"], []).append(record[name])
    return {step: statistics.fmean(values[step]) for step in sorted(values)}


def _print(table: Sequence[Group], shown: Mapping[str, str]) -> None:
    def table_of(names: Sequence[str]) -> Table:
        printed = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        printed.add_column("", overflow="fold", max_width=max(20, Console().width // 3))
        for title in ("n", *(shown[name] for name in names)):
            printed.add_column(title, justify="right", no_wrap=True)
        for group in table:
            printed.add_row(group.label, str(len(group.runs)), *(group.cell(name) for name in names))
        return printed

    print_in_blocks(list(shown), table_of)
    print("mean±standard deviation (n - 1)")


def _html(table: Sequence[Group], shown: Mapping[str, str], pictures: Mapping[str, Path], swept: Sequence[str]) -> str:
    return render(
        "summary.html.jinja",
        table=table,
        swept=swept,
        columns=shown,
        headline=f"test/{HEADLINE}",
        number=declared_metric(HEADLINE).written,
        pictures={name: base64.b64encode(path.read_bytes()).decode() for name, path in pictures.items()},
        commands=[
            (run, shlex.join(["python", "-m", "dml.run", *run.overrides])) for group in table for run in group.runs
        ],
    )
