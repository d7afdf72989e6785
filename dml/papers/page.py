"""The page of experiments: what was published, what was measured here, and the difference."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from dml.configuration.composition import composed
from dml.errors import UserError, no_room
from dml.evaluation.metric import declared, metric
from dml.files import write_atomically
from dml.papers.drawing import drawing, glance
from dml.papers.experiment import Experiment
from dml.papers.measured import Compared, Measurement, Tuned
from dml.papers.verdicts import interval, verdicts
from dml.reporting.page import render


@dataclass(frozen=True)
class Cell:
    """A metric of a row in the unit of the paper.

    Attributes:
        published: as the paper prints it; None: it does not.
        mean, std: over n seeds; None: not measured, and `std` of a single seed.
        higher_is_better: None: neither direction is better, as for a spread, or it is not known.
    """

    published: float | None
    mean: float | None
    std: float | None
    n: int
    higher_is_better: bool | None = True

    @property
    def better(self) -> bool | None:
        """Whether it is better than published; None: it is equal, neither direction is better, or it is not known."""
        if not self.difference or self.higher_is_better is None:
            return None
        return (self.difference > 0) == self.higher_is_better

    @property
    def difference(self) -> float | None:
        """Returns measured minus published; None if one of them is missing."""
        return None if self.mean is None or self.published is None else self.mean - self.published


@dataclass(frozen=True)
class Setting:
    """Measurements with the same changes to the paper's setting; without changes: the paper's setting itself."""

    changes: list[str]
    rows: dict[str, dict[str, dict[str, Cell]]]  # by row, part and column


def settings(experiment: Experiment) -> list[Setting]:
    """Returns the paper's setting with all its rows, then every other measured setting with the rows measured in it."""
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


def _cell(published: float | None, column: str, scale: float, part: str, measured: Sequence[Measurement]) -> Cell:
    own = [one for one in measured if one.part == part and column in one.metrics]
    # The spread over seeds, unless runs give it themselves: over learners, folds of MLRC, or random splits.
    spread = column.endswith("/std") and not own
    name = column.removesuffix("/std") if spread else column
    mine = [one for one in measured if one.part == part and name in one.metrics]
    # Sizes are recorded without a seed. Trainings have them too, so where there are any, only these count.
    values = [scale * one.metrics[name] for one in ([m for m in mine if m.seed is not None] or mine)]
    if spread:
        return Cell(published, statistics.stdev(values) if len(values) > 1 else None, None, len(values), None)
    std = statistics.stdev(values) if len(values) > 1 else None
    known = declared(name)
    better = None if known is None else known.higher_is_better
    return Cell(published, statistics.fmean(values) if values else None, std, len(values), better)


@dataclass(frozen=True)
class Differences:
    """By how much one metric of the rows is above that of the row that all are compared with.

    Attributes:
        title: of the metric.
        settings: names of the parts, with the changes to the paper's setting, in which any row was compared.
        rows: by row, the comparison in each of the settings; None: not compared there.
    """

    title: str
    settings: list[str]
    rows: dict[str, list[Compared | None]]


def differences(experiment: Experiment) -> list[Differences]:
    """Returns, for each metric that was compared, the differences of all rows, all parts beside one another."""
    found: dict[str, dict[tuple[str, str], Compared]] = {}
    parts = list(experiment.parts)
    for one in sorted(experiment.compared, key=lambda one: parts.index(one.part)):
        found.setdefault(one.metric, {})[one.row, " ".join([one.part, *one.changes])] = one
    tables = []
    for name, by_place in found.items():
        compared, places = (list(dict.fromkeys(names)) for names in zip(*by_place, strict=True))
        table = {row: [by_place.get((row, one)) for one in places] for row in experiment.rows if row in compared}
        tables.append(Differences(metric(name).title, places, table))
    return tables


def markdown(experiment: Experiment) -> str:
    """Returns what was measured as Markdown, one table for each setting and part.

    A table has mean ± standard deviation over n seeds, and the difference in points from the row that all are compared
    with. Further tables have these differences for rows that were compared in several parts, the parts beside one
    another. Sentences below the tables say whether the papers' patterns show.
    """
    tables = []
    for setting in settings(experiment):
        for part in experiment.parts:
            shown = [title for title, (_, any_of) in columns(experiment, setting, part).items() if any_of]
            rows = {row: cells[part] for row, cells in setting.rows.items()}
            rows = {row: of for row, of in rows.items() if any(of[title].mean is not None for title in shown)}
            compared = [one for one in experiment.compared if one.part == part and one.changes == setting.changes]
            names = list(dict.fromkeys(one.metric for one in compared))
            table = []
            for row, of in rows.items():
                line = {"": row} | {title: measured(of[title]) for title in shown}
                for name in names:
                    found = [one for one in compared if (one.row, one.metric) == (row, name)]
                    line[f"{metric(name).title} less {experiment.compared_with}"] = interval(found[0]) if found else ""
                table.append(line | {"n": str(max(of[title].n for title in shown))})
            if table:
                text = _tabulated(table)
                tables.append(f"{' '.join([part, *setting.changes])}:\n\n{text}\n")
    for less in differences(experiment):
        several = {row: cells for row, cells in less.rows.items() if sum(one is not None for one in cells) > 1}
        if several:
            said = {row: ["" if one is None else interval(one) for one in cells] for row, cells in several.items()}
            text = _tabulated([{"": row, **dict(zip(less.settings, of, strict=True))} for row, of in said.items()])
            tables.append(f"{less.title} less {experiment.compared_with}:\n\n{text}\n")
    if any(" ± " in table for table in tables):
        tables.append("Mean ± standard deviation (n - 1) over n seeds.\n")
    if experiment.compared:
        known = "" if all(one.seeds for one in experiment.compared) else "; those of one seed over classes alone"
        tables.append(f"Differences in points, with 95 % intervals over test classes and seeds{known}.\n")
    if any(_fewer(experiment, one) for one in experiment.compared):
        tables.append("Differences are over the seeds that both rows have.\n")
    if sentences := verdicts(experiment):
        tables.append("".join(f"- {sentence}\n" for sentence in sentences))
    if experiment.tuned:
        tuned = [
            {
                "": one.row,
                "found": " ".join(one.chosen),
                "best": f"{100 * one.best:.2f}",
                "trials": str(len(one.trials)),
            }
            for one in experiment.tuned
        ]
        text = _tabulated(tuned)
        tables.append(f"Tuned by {criterion(experiment)} (%) on validation classes:\n\n{text}\n")
    return "\n".join(tables)


def _tabulated(rows: Sequence[Mapping[str, str]]) -> str:
    """Writes a table in Markdown; a bar in a name would begin another column."""
    rows = [{title.replace("|", "\\|"): cell.replace("|", "\\|") for title, cell in row.items()} for row in rows]
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def _fewer(experiment: Experiment, one: Compared) -> bool:
    """Says whether a comparison is of fewer trainings than are recorded; one of MLRC has a run for each fold."""
    a, b = (
        {
            of.seed
            for of in experiment.measured
            if (of.row, of.part, of.changes) == (row, one.part, one.changes) and of.seed is not None  # sizes have none
        }
        for row in (one.row, one.against)
    )
    parted = bool(a & b) and a != b
    return parted or one.runs[0] % max(len(a), 1) > 0 or one.runs[0] * len(b) != one.runs[1] * len(a)


def criterion(experiment: Experiment) -> str | None:
    """Returns the metric that judges the trials of an experiment's searches; None: it has none."""
    if experiment.tuning is None:
        return None
    name: str = composed(*experiment.overrides, *experiment.tuning.overrides).protocol.criterion
    return name


def measured(cell: Cell) -> str:
    """Writes mean ± standard deviation, the mean alone if all seeds agree, as for parameters; empty if not measured."""
    return number(cell.mean) + (f" ± {number(cell.std)}" if cell.std else "")


def _digits(value: float) -> int:
    """Returns the number of decimals that papers print for a number of this size."""
    return 1 if abs(value) >= 10 else 2


def columns(experiment: Experiment, setting: Setting, part: str) -> dict[str, tuple[bool, bool]]:
    """Returns for each column of a part whether anything was published and whether anything was measured."""
    result = {}
    for title in experiment.parts[part].columns:
        cells = [cells[part][title] for cells in setting.rows.values()]
        result[title] = (any(c.published is not None for c in cells), any(c.mean is not None for c in cells))
    return result


def number(value: float | None, sign: bool = False) -> str:
    """Writes a number in the precision of the papers; empty for None."""
    return "" if value is None else f"{value:{'+' if sign else ''}.{_digits(value)}f}"


def printed(value: float | None, places: int) -> str:
    """Writes a published number with so many decimals; empty for None."""
    return "" if value is None else f"{value:.{places}f}"


def places(experiment: Experiment, part: str, title: str) -> int:
    """Returns the largest number of decimals that the paper prints in a column."""
    values = [row.published[part][title] for row in experiment.rows.values() if title in row.published.get(part, {})]
    return max((len(repr(value).partition(".")[2]) for value in values), default=1)


def sources(measured: Sequence[Measurement | Tuned]) -> list[Mapping[str, Any]]:
    """Returns hardware, versions, commit, date and commands of measurements, equal ones once."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for one in measured:
        groups.setdefault((one.date, one.commit, one.hardware, one.versions), []).append(one.command)
    names = ("date", "commit", "hardware", "versions")
    return [
        {**dict(zip(names, said, strict=True)), "commands": list(dict.fromkeys(commands))}
        for said, commands in groups.items()
    ]


def section(experiment: Experiment, out: Path) -> str:
    """Returns the HTML of one experiment: its tables and pictures, and where its measurements come from.

    Args:
        out: the folder of the trainings, for pictures that runs made.
    """
    return render("experiment.html.jinja", one=_content(experiment, out), **_WRITTEN)


def write_page(experiments: Sequence[Experiment], out: Path) -> Path:
    """Writes a self-contained `index.html` into `out`. Returns its path. Raises UserError if it cannot be written."""
    content = [_content(one, out) for one in experiments]
    page = render("experiments.html.jinja", content=content, glance=glance(experiments), **_WRITTEN)
    file = out / "index.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(file, page)
    except OSError as error:
        remedy = "make room, or " if no_room(error) else ""
        raise UserError(
            f"{file} cannot be written ({error.strerror}): {remedy}name another folder with --out."
        ) from error
    return file


def _content(one: Experiment, out: Path) -> dict[str, Any]:
    return {
        "experiment": one,
        "settings": settings(one),
        "drawing": drawing(one, out),
        "sources": sources([*one.tuned, *one.measured]),
        "differences": differences(one),
        "criterion": criterion(one) if one.tuned else None,
        "verdicts": verdicts(one),
        "trained": sum(row.overrides is not None or row.command is not None for row in one.rows.values()),
        "measured": len({m.row for m in one.measured}),
    }


# The functions with which the templates write numbers.
_WRITTEN = {"number": number, "printed": printed, "interval": interval, "columns": columns, "places": places}
