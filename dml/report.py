"""`python -m dml.report FOLDER...`: one table of all finished runs below some folders, what they cost, and a metric
over each swept number.

Runs that differ in their seed, split, fold or repetition alone are one row: mean and standard deviation over them.
summary.html, .md, .csv, .tex and .json, and figures/, go to the folder of -o; none of the runs is written to.
"""

import argparse
import base64
import csv
import difflib
import io
import json
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tabulate import tabulate

from dml.command import ending
from dml.errors import UserError
from dml.files import beside, read_yaml, replace_file
from dml.folder import RunFolder, flat
from dml.loggers import read_metrics
from dml.pieces import pieces
from dml.reading import check, read_figures, reading
from dml.reporting import figures
from dml.reporting.page import render

REPEATS = ("seed", "protocol.split", "protocol.fold", "protocol.repeat")  # what a repetition of a run differs in

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

OUT = Path("runs/summary")

PRINTED = ("test/recall@1", "learners/mean/recall@1", "learners/self_cosine")  # what 80 columns have room for


@dataclass
class Run:
    """A finished run."""

    folder: Path
    config: Any
    overrides: list[str]
    metrics: dict[str, float]


@dataclass
class Row:
    """Runs of one configuration."""

    label: str
    runs: list[Run]
    options: dict[str, str]  # typed, and not common to all rows

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Mean of each figure and, as `<name>/std`, its standard deviation; `gain` is the ensemble's over its mean
        learner."""
        figures = [dict(run.metrics) for run in self.runs]
        for one in figures:
            if {"learners/1/recall@1", "learners/mean/recall@1"} <= one.keys():
                one["gain"] = one["test/recall@1"] - one["learners/mean/recall@1"]
        return mean_and_std(figures)

    def cell(self, name: str) -> str:
        """`mean±std` of a figure; the mean alone of one run; nothing where it has none."""
        if name not in self.metrics:
            return ""
        std = self.metrics.get(f"{name}/std")
        return f"{self.metrics[name]:.4f}" + ("" if std is None else f"±{std:.4f}")


def mean_and_std(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each figure that all runs have its mean; of several runs also the standard deviation (n - 1), `<name>/std`."""
    result = {}
    for name in runs[0]:
        values = [run[name] for run in runs if name in run]
        if len(values) == len(runs):
            result[name] = statistics.fmean(values)
            if len(values) > 1:
                result[f"{name}/std"] = statistics.stdev(values)
    return result


def leaves(folders: Iterable[Path]) -> list[Run]:
    """The finished runs below some folders, in the order of their paths; a run of several trainings is those.

    Raises:
        UserError: a folder that is not there, or a run with a damaged file.
    """
    found = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder.")
        for file in sorted(folder.rglob("metrics.json")):
            run = _finished(file.parent)
            if run is not None:
                found[file.parent.resolve()] = run
    return list(found.values())


def _finished(folder: Path) -> Run | None:
    """The run of one training in a folder; None where it is of several or, which is said, no run's.

    Raises:
        UserError: a damaged file.
    """
    file = RunFolder(folder).config_file
    config = RunFolder(folder).config()
    if config is None:
        if file.exists():
            print(f"Left out: {folder}, whose config.yaml is no run's or damaged.", file=sys.stderr)
        return None
    remedy = "repeat the run, or leave its folder out"
    with reading(file, remedy):
        if pieces(config):
            return None
        check(bool(configuration(config) and label(config)), "it is of no run")  # what is asked of it later
        for name in ("seed", "image_size"):
            check(isinstance(config[name], int), f"{name}={config[name]}")
    typed, overrides = folder / "overrides.yaml", []
    if typed.exists():
        with reading(typed, remedy):
            given = read_yaml(typed)
            check(isinstance(given, list) and all(isinstance(o, str) for o in given), "it is no list of overrides")
            overrides = given
    return Run(folder, config, overrides, read_figures(folder / "metrics.json"))


def rows(runs: Sequence[Run]) -> list[Row]:
    """Runs of one configuration together; the label is what was typed and is not common to all rows."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(configuration(run.config), []).append(run)
    if len(groups) == 1:
        return [Row(label(runs[0].config)[0], list(runs), {})]
    typed = [[o for o in group[0].overrides if _tells(o)] for group in groups.values()]
    common = set(typed[0]).intersection(*typed)
    own = [[o for o in options if o not in common] for options in typed]
    return [
        Row(
            " ".join(options) or "the rest by default",
            group,
            dict(o.lstrip("+").split("=", 1) for o in options if "=" in o),
        )
        for options, group in zip(own, groups.values(), strict=True)
    ]


def configuration(config: DictConfig) -> str:
    """The same of runs that differ in their repetition alone, which may have other numbers of training classes."""
    options = {}
    for name, value in flat(config, config.runtime).items():
        counted = name.startswith(("method.", "loss.")) and value == config.runtime.train_classes
        if name not in REPEATS and not (counted and name.endswith("classes")):
            options[name] = value
    return json.dumps(options, sort_keys=True, default=str)


def label(config: DictConfig) -> tuple[str, str, str]:
    """Method, data set and protocol, by the names of what they are made of."""
    method, protocol = (str(part._target_).rsplit(".", 1)[1] for part in (config.method, config.protocol))
    return method, str(config.dataset.get("name") or config.dataset._target_.rsplit(".", 1)[1]), protocol


def _tells(override: str) -> bool:
    name = override.lstrip("+~").partition("=")[0]
    return name not in REPEATS and not name.startswith(("paths.", "logger", "hydra"))


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
        "cost": figures.recall_and_cost([_point(row) for row in table]),
        "recall": figures.recall_over_steps({row.label: _course(row) for row in table}),
    } | {f"over_{name}": figures.over(lines, name, metric) for name, lines in swept.items()}
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
            with beside(pictures[name]) as new:
                figure.savefig(new, format="png")
        for kind, text in texts.items():
            replace_file(out / f"summary.{kind}", text)
        replace_file(page, _html(table, shown, pictures, list(swept)))
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): name another with -o.") from error
    print(f"Report: {page}")
    return page


def _swept(table: Sequence[Row], metric: str, over: str | None) -> dict[str, dict[str, list[figures.Measured]]]:
    """Of each option that has several numbers: lines of what else differs, of the metric by the number."""
    if not any(metric in row.metrics for row in table):
        near = ", ".join(
            difflib.get_close_matches(metric, sorted({n for row in table for n in row.metrics}), cutoff=0.4)
        )
        raise UserError(f"no run has the figure {metric}" + (f": did you mean {near}?" if near else "."))
    found: dict[str, dict[str, list[figures.Measured]]] = {}
    for name in dict.fromkeys(name for row in table for name in row.options):
        lines: dict[str, list[figures.Measured]] = {}
        for row in table:
            value = _number(row.options.get(name, ""))
            if value is not None and metric in row.metrics:
                others = (
                    " ".join(f"{o}={v}" for o, v in row.options.items() if o != name) or label(row.runs[0].config)[0]
                )
                point = figures.Measured(value, row.metrics[metric], row.metrics.get(f"{metric}/std", 0.0))
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


def _point(row: Row) -> figures.Point:
    """A line of the picture joins what differs in the number of learners alone."""
    others = [option for option in row.label.split(" ") if not re.match(r"method\.[A-Z]=", option)]
    figure = row.metrics
    return figures.Point(
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


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dml.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of runs or sweeps")
    parser.add_argument("-o", "--out", type=Path, default=OUT, metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--metric", default="test/recall@1", help="drawn over what was swept (default: %(default)s)")
    parser.add_argument("--over", help="the only swept option to draw it over, for example method.M")
    options = parser.parse_args()
    write_summary(options.folders, options.out, options.metric, options.over)


if __name__ == "__main__":
    main()
