"""`python -m dml.report FOLDER...`: one table of all finished runs below some folders, and what they cost.

Runs that differ in their seed, split, fold or repetition alone are one row: mean and standard deviation over them.
"""

import argparse
import base64
import json
import re
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dml.command import stop
from dml.errors import UserError
from dml.files import replace_file
from dml.folder import RunFolder, flat
from dml.loggers import read_metrics
from dml.pieces import pieces
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

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Mean of each figure and, as `<name>/std`, its standard deviation; `gain` is the ensemble's over its mean
        learner."""
        figures = [dict(run.metrics) for run in self.runs]
        for one in figures:
            if "learners/1/recall@1" in one:
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
        UserError: a folder that is not there.
    """
    found = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder.")
        for file in sorted(folder.rglob("metrics.json")):
            config = RunFolder(file.parent).config()
            if config is not None and not pieces(config):
                typed = file.parent / "overrides.yaml"
                overrides = [str(o) for o in OmegaConf.load(typed)] if typed.exists() else []
                found[file.parent.resolve()] = Run(file.parent, config, overrides, json.loads(file.read_text()))
    return list(found.values())


def rows(runs: Sequence[Run]) -> list[Row]:
    """Runs of one configuration together; the label is what was typed and is not common to all rows."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(configuration(run.config), []).append(run)
    if len(groups) == 1:
        return [Row(label(runs[0].config)[0], list(runs))]
    typed = [[o for o in group[0].overrides if _tells(o)] for group in groups.values()]
    common = set(typed[0]).intersection(*typed)
    labels = [" ".join(o for o in options if o not in common) or "the rest by default" for options in typed]
    return [Row(label, group) for label, group in zip(labels, groups.values(), strict=True)]


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


def write_summary(folders: Sequence[Path]) -> Path:
    """`summary.html`, `summary.json` and `figures/` in the first folder; prints the table.

    Raises:
        UserError: no finished run below the folders, or the first cannot be written.
    """
    runs = leaves(folders)
    if not runs:
        raise UserError(f"no finished run (config.yaml with metrics.json) lies below {', '.join(map(str, folders))}.")
    table = rows(runs)
    shown = [name for name in COLUMNS if any(name in row.metrics for row in table)]
    _print(table, [name for name in PRINTED if name in shown])
    content = [
        {"label": row.label, "runs": [str(run.folder) for run in row.runs], "metrics": row.metrics} for row in table
    ]
    page, place = folders[0] / "summary.html", folders[0] / "figures"
    drawn = {
        "cost": figures.recall_and_cost([_point(row) for row in table]),
        "recall": figures.recall_over_steps({row.label: _course(row) for row in table}),
    }
    pictures = {name: place / f"{name}.png" for name in drawn}
    try:
        place.mkdir(exist_ok=True)
        for name, figure in drawn.items():
            figure.savefig(pictures[name])
        replace_file(folders[0] / "summary.json", json.dumps(content, indent=1) + "\n")
        replace_file(page, _html(table, shown, pictures))
    except OSError as error:
        raise UserError(f"{folders[0]} cannot be written ({error.strerror}): name a folder of yours first.") from error
    print(f"Report: {page}")
    return page


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


def _html(table: Sequence[Row], shown: Sequence[str], pictures: Mapping[str, Path]) -> str:
    return render(
        "summary.html.jinja",
        table=table,
        columns={name: COLUMNS[name] for name in shown},
        pictures={name: base64.b64encode(path.read_bytes()).decode() for name, path in pictures.items()},
        commands=[(run, shlex.join(["python", "-m", "dml.run", *run.overrides])) for row in table for run in row.runs],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dml.report", description=__doc__)
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="of runs or sweeps; the first is written to"
    )
    try:
        write_summary(parser.parse_args().folders)
    except UserError as mistake:
        stop(str(mistake))


if __name__ == "__main__":
    main()
