"""The summary of several runs: one table, a picture of their cost, and a metric over each number that was swept.

Runs that differ only in seed, split, fold or repetition are one row, with mean and standard deviation.
"""

import base64
import csv
import difflib
import io
import json
import re
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tabulate import tabulate

from dml.configuration.identity import label
from dml.configuration.trainings import declared
from dml.console import print_in_blocks
from dml.errors import UserError
from dml.evaluation.interval import LEVEL
from dml.evaluation.metric import GAIN, HEADLINE, of_runs
from dml.evaluation.metric import declared as known
from dml.evaluation.metric import metric as declared_metric
from dml.figures import course, summaries
from dml.files import atomic_path, write_atomically
from dml.reporting.page import render
from dml.runs.chosen import monitor
from dml.runs.collecting import BELOW, Group, copies, groups, leaves, said_below
from dml.runs.differences import Difference, differences, heading
from dml.runs.log import read_metrics

ALSO = "also differs"  # marks options in which runs were not meant to differ

NEEDED = (f"test/{HEADLINE}", "model/params", "model/flops")  # metrics that every run has to have


def write_summary(
    folders: Sequence[Path],
    out: Path,
    metric: str = f"test/{HEADLINE}",
    over: str | None = None,
    remedy: str = "name another folder with -o",
) -> Path:
    """Runs the command: prints the table, and writes `summary.html`, `.md`, `.csv`, `.tex`, `.json` and `figures/`.

    Args:
        folders: of runs or sweeps.
        out: the folder to write to; it is made.
        metric: to draw, with its standard deviation, over each option for which the runs have several numbers.
        over: the only option to draw it over; None: all of them.
        remedy: what to do if the folder cannot be written.

    Returns:
        The path of `summary.html`.

    Raises:
        UserError: there is no finished run below the folders, they do not have the metric or the option, or the folder
            cannot be written.
    """
    runs = leaves(folders)
    if not runs:
        raise UserError(
            f"there is no finished run (config.yaml with metrics.json) below {', '.join(map(str, folders))}: name "
            "another folder."
        )
    for run in runs:
        if lacking := [name for name in NEEDED if name not in run.metrics]:
            raise UserError(f"{run.folder / 'metrics.json'} has no {lacking[0]}: repeat the run, or leave it out.")
    table = groups(runs)
    for group in table:
        again = copies(group)
        for copy, first in again.items():
            print(f"Left out: {copy}, the same training as {first}.", file=sys.stderr)
        group.runs = [run for run in group.runs if run.folder not in again]
    shown = {name: title for name, title, _ in of_runs() if any(group.cell(name) for group in table)}
    swept, differ, head = _swept(table, metric, over), differences(table), heading(table)
    _print(table, shown, differ, head)
    content = [
        {"label": group.label, "runs": [str(run.folder) for run in group.runs], "metrics": group.metrics}
        | {
            "differs": {one.name: one.values[i] for one in differ},
            "also_differs": [d.name for d in differ if not d.meant],
        }
        for i, group in enumerate(table)
    ]
    page, place = out / "summary.html", out / "figures"
    drawn = {
        "cost": summaries.recall_and_cost([_point(group) for group in table]),
        **({"recall": _over_steps(table)} if any(map(_course, table)) else {}),
        **{f"over_{name}": summaries.over(lines, name, _titled(metric)) for name, lines in swept.items()},
    }
    pictures = {name: place / f"{name}.png" for name in drawn}
    texts = {
        "json": json.dumps(content, indent=1) + "\n",
        "md": _markdown(table, shown, differ, head),
        "tex": _latex(table, shown),
        "csv": _csv(table),
    }
    try:
        place.mkdir(parents=True, exist_ok=True)
        for old in {place / "recall.png", *place.glob("over_*.png")}.difference(pictures.values()):
            old.unlink(missing_ok=True)  # of an earlier summary
        for name, picture in drawn.items():
            with atomic_path(pictures[name]) as new:
                picture.savefig(new, format="png")
        for kind, text in texts.items():
            write_atomically(out / f"summary.{kind}", text)
        write_atomically(page, _html(table, shown, pictures, list(swept), differ, head))
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): {remedy}.") from error
    print(f"Report: {page}")
    return page


def _swept(table: Sequence[Group], metric: str, over: str | None) -> dict[str, dict[str, list[summaries.Measured]]]:
    """Returns, for each option with several numbers, the lines to draw: the metric by the number, one line for each
    choice of the other options."""
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
                if group.number > 1:
                    others += f" ({group.number})"
                point = summaries.Measured(value, group.metrics[metric], group.metrics.get(f"{metric}/std"))
                lines.setdefault(others, []).append(point)
        if len({point.x for points in lines.values() for point in points}) > 1:
            found[name] = lines
    if over is not None and over not in found:
        known = f"choose from {', '.join(found)}" if found else "nothing else was, so leave out --over"
        raise UserError(f"the runs were not swept over numbers of {over}: {known}.")
    return {over: found[over]} if over is not None else found


def _titled(name: str) -> str:
    """Returns a metric's title, with its place unless that is the test; its name if it is not declared."""
    of, (place, _, _) = known(name), name.rpartition("/")
    if of is None:
        return name
    return of.title if place in ("test", "") else f"{of.title} ({place})"


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


def _markdown(
    table: Sequence[Group], shown: Mapping[str, str], differ: Sequence[Difference], head: Sequence[str]
) -> str:
    parts = [", ".join(head), _tabulated(_cells(table, shown), "github")]
    parts += ["Mean ± standard deviation (n - 1) over n runs."] if any(len(one.runs) > 1 for one in table) else []
    parts += [said] if (said := _below(table, shown)) else []
    if differ:
        parts += ["What differs:", _tabulated([_differing(one, table) for one in differ], "github")]
    return "\n\n".join(parts) + "\n"


def _latex(table: Sequence[Group], shown: Mapping[str, str]) -> str:
    return _tabulated(_cells(table, shown), "latex_booktabs").replace(BELOW, "$\\downarrow$") + "\n"


def _tabulated(rows: Sequence[Mapping[str, str]], form: str) -> str:
    if form == "github":  # a bar would begin another column
        rows = [{name.replace("|", "\\|"): cell.replace("|", "\\|") for name, cell in row.items()} for row in rows]
    return str(tabulate(rows, headers="keys", tablefmt=form, disable_numparse=True))


def _differing(one: Difference, table: Sequence[Group]) -> dict[str, str]:
    cells = dict(zip((group.label for group in table), one.values, strict=True))
    return {"option": one.name if one.meant else f"{one.name} ({ALSO})"} | cells


def _below(table: Sequence[Group], shown: Mapping[str, str]) -> str:
    """Returns what the table's marks mean if a figure is worse than that of its untrained network, else nothing."""
    some = any(group.cell(name).endswith(BELOW) for group in table for name in shown)
    return said_below(some, [group.metrics for group in table])


def _csv(table: Sequence[Group]) -> str:
    """Returns all metrics with all digits, as CSV: columns `configuration, n`, and one for each metric and `/std`."""
    names = sorted({name for group in table for name in group.metrics})
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["configuration", "n", *names])
    for group in table:
        writer.writerow([group.label, len(group.runs), *(group.metrics.get(name, "") for name in names)])
    return text.getvalue()


def _point(group: Group) -> summaries.Point:
    """Returns a point of the cost picture. A line joins groups that differ only in their number of learners."""
    counting = {f"method.{name}" for name in declared(group.runs[0].config.method, "counted_by")}
    others = [option for option in group.label.split(" ") if option.lstrip("+").partition("=")[0] not in counting]
    metrics = group.metrics
    return summaries.Point(
        line=" ".join(others) or label(group.runs[0].config)[0],
        learners=sum(bool(re.fullmatch(rf"learners/\d+/{HEADLINE}", name)) for name in group.runs[0].metrics),
        params=metrics["model/params"],
        flops=metrics["model/flops"],
        recall=metrics[f"test/{HEADLINE}"],
        std=metrics.get(f"test/{HEADLINE}/std"),
    )


def _over_steps(table: Sequence[Group]) -> Figure:
    """Draws Recall@1 over steps, and says on which classes it was evaluated meanwhile."""
    parts = [monitor(group.runs[0].metrics) for group in table]
    if len(set(parts)) == 1:
        return course.recall_over_steps({one.label: _course(one) for one in table}, f"Recall@1 on {parts[0]} classes")
    lines = {f"{one.label}, on {part} classes": _course(one) for one, part in zip(table, parts, strict=True)}
    return course.recall_over_steps(lines)


def _course(group: Group) -> dict[int, float]:
    """Returns Recall@1 by step on the part that was monitored during training: the mean over the runs evaluated
    there."""
    values: dict[int, list[float]] = {}
    for run in group.runs:
        log = run.folder / "metrics.jsonl"
        records = read_metrics(log) if log.exists() else []
        name = f"{monitor(run.metrics)}/{HEADLINE}"
        for record in records:
            if name in record:
                values.setdefault(record["step"], []).append(record[name])
    return {step: statistics.fmean(values[step]) for step in sorted(values)}


def _print(table: Sequence[Group], shown: Mapping[str, str], differ: Sequence[Difference], head: Sequence[str]) -> None:
    width = max(20, Console().width // 3)

    def table_of(names: Sequence[str]) -> Table:
        printed = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        printed.add_column("", overflow="fold", max_width=width)
        for title in ("n", *(shown[name] for name in names)):
            printed.add_column(title, justify="right", no_wrap=True)
        for group in table:
            printed.add_row(Text(group.label), str(len(group.runs)), *(group.cell(name) for name in names))
        return printed

    def differing(labels: Sequence[str]) -> Table:
        printed = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        printed.add_column("what differs", overflow="fold", max_width=width)
        for column in labels:
            printed.add_column(Text(column), overflow="fold", max_width=width)
        for one in told:
            values = dict(zip((group.label for group in table), one.values, strict=True))
            cells = (one.name + ("" if one.meant else " *"), *(values[column] for column in labels))
            printed.add_row(*map(Text, cells))
        return printed

    Console().print(Text(", ".join(head)))
    print_in_blocks(list(shown), table_of)
    if any(len(group.runs) > 1 for group in table):
        print("mean±standard deviation (n - 1)")
    if any(name.startswith(f"{GAIN}/") for name in shown):
        print(f"gained: by re-ranking; of one run with its {LEVEL:.0%} interval over test classes")
    if said := _below(table, shown):
        Console().print(said, highlight=False)
    if told := [one for one in differ if not one.detail]:
        print_in_blocks([group.label for group in table], differing)
        if not all(one.meant for one in told):
            print(f"* {ALSO}: it was not given on the command line")
        if more := len(differ) - len(told):
            print(f"and options of components that differ: {more}, see summary.html")


def _html(
    table: Sequence[Group],
    shown: Mapping[str, str],
    pictures: Mapping[str, Path],
    swept: Sequence[str],
    differ: Sequence[Difference],
    head: Sequence[str],
) -> str:
    return render(
        "summary.html.jinja",
        table=table,
        swept=swept,
        columns=shown,
        differ=[one for one in differ if not one.detail],
        details=[one for one in differ if one.detail],
        also=ALSO,
        heading=head,
        below=_below(table, shown),
        headline=f"test/{HEADLINE}",
        number=declared_metric(HEADLINE).written,
        pictures={name: base64.b64encode(path.read_bytes()).decode() for name, path in pictures.items()},
        commands=[
            (run, shlex.join(["python", "-m", "dml.run", *run.overrides])) for group in table for run in group.runs
        ],
    )
