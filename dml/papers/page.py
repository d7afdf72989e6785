"""One page of experiments: what was published, what was measured here, and the difference."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from dml.evaluation.metric import declared
from dml.files import write_atomically
from dml.papers.drawing import drawing
from dml.papers.experiment import Experiment, Measurement, Tuned
from dml.papers.verdicts import interval, verdicts
from dml.reporting.page import render


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


def markdown(experiment: Experiment) -> str:
    """What was measured, a table a setting and part: mean ± std of so many seeds, and the distance in points from the
    row that all are compared with; then whether the papers' patterns show."""
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
    if said := verdicts(experiment):
        tables.append("".join(f"- {sentence}\n" for sentence in said))
    if experiment.tuned:
        tuned = [
            {"": one.row, "found": " ".join(one.chosen), "best": number(one.best), "trials": str(len(one.trials))}
            for one in experiment.tuned
        ]
        text = tabulate(tuned, headers="keys", tablefmt="github", disable_numparse=True)
        tables.append(f"Tuned on validation classes:\n\n{text}\n")
    return "\n".join(tables)


def measured(cell: Cell) -> str:
    """Mean ± standard deviation; nothing of what was not measured."""
    return number(cell.mean) + ("" if cell.std is None else f" ± {number(cell.std)}")


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


def section(experiment: Experiment, out: Path) -> str:
    """HTML of one experiment: what was published and measured, as tables; pictures; where measurements come from.

    Args:
        out: the folder of the trainings, for pictures that runs made.
    """
    return render("experiment.html.jinja", one=_content(experiment, out), **_WRITTEN)


def write_page(experiments: Sequence[Experiment], out: Path) -> Path:
    """`index.html` in `out`, self-contained."""
    page = render("experiments.html.jinja", content=[_content(one, out) for one in experiments], **_WRITTEN)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "index.html", page)
    return out / "index.html"


def _content(one: Experiment, out: Path) -> dict[str, Any]:
    return {
        "experiment": one,
        "settings": settings(one),
        "drawing": drawing(one, out),
        "sources": sources([*one.tuned, *one.measured]),
        "compared": one.compared,
        "verdicts": verdicts(one),
        "trained": sum(row.overrides is not None or row.command is not None for row in one.rows.values()),
        "measured": len({m.row for m in one.measured}),
    }


# How templates write numbers.
_WRITTEN = {"number": number, "printed": printed, "columns": columns, "places": places}
