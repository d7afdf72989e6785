"""The subcommands of `python -m dml.experiment` that show what experiments have, and train nothing."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dml.configuration.defaults import EXPERIMENTS
from dml.errors import UserError
from dml.papers.catalogue import find
from dml.papers.checks import check_folder
from dml.papers.classes import compare_rows
from dml.papers.experiment import Experiment, near
from dml.papers.page import markdown, write_page


def show(names: Sequence[str]) -> None:
    """Prints for each experiment how many rows and runs it has, and how many rows were measured."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("experiment", no_wrap=True)
    table.add_column("", overflow="fold")
    for title in ("rows", "trained", "runs", "measured"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in find(names):
        trained = [row for row in one.rows.values() if row.overrides is not None]
        runs = len({(t.key, t.seed) for t in one.trainings()})
        numbers = (len(one.rows), len(trained), runs, len({m.row for m in one.measured}))
        table.add_row(one.name, one.title, *map(str, numbers))
    Console().print(table)


def report(names: Sequence[str], out: Path = EXPERIMENTS) -> None:
    """Writes one page of the experiments, `index.html` in `out`.

    Raises:
        UserError: a name does not exist, or `out` is no folder that can be written.
    """
    check_folder(out, writes=True)
    print(f"Report: {write_page(find(names), out)}")


def table(names: Sequence[str], against: str | None = None) -> None:
    """Prints what was measured as Markdown tables.

    Args:
        against: a row of the one experiment, with which all others are compared in place of its own choice.

    Raises:
        UserError: nothing was measured, or nothing that can be compared with that row.
    """
    measured = [one for one in find(names) if one.measured]
    if not measured:
        raise UserError(f"nothing was measured yet for {', '.join(names)}: run it with --record.")
    if against is not None:
        if len(measured) > 1:
            raise UserError("--against names a row of one experiment: name that one alone, as in comparison/cars196.")
        measured = [_against(measured[0], against)]
    print("\n".join(f"{one.name}: {one.title}\n\n{markdown(one)}" for one in measured))


def _against(experiment: Experiment, row: str) -> Experiment:
    """Returns an experiment whose rows are compared with another one. Patterns, which papers print, are left out."""
    if row not in experiment.rows:
        raise UserError(f"{experiment.name} has no row '{row}'{near(row, experiment.rows)}")
    rows = {name: replace(one, pattern={}) for name, one in experiment.rows.items()}
    other = replace(experiment, rows=rows, compared_with=row)
    if not (compared := compare_rows(other)):
        said = "of no part is it recorded for this row and another what each class scored"
        raise UserError(f"{experiment.name}, --against '{row}': {said}.")
    return replace(other, compared=compared)
