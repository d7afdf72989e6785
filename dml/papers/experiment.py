"""Experiments: their rows, parts and columns, and the trainings that they need.

A row is a setting, given by Hydra overrides; a row that the paper only quotes from elsewhere has none. A part is a
block of columns, usually a data set: each row is trained once for each part and seed. A column is a figure that the
paper prints, with its name in a run's `metrics.json`. In an experiment with tuning, a search first finds the options of
each row that do best on validation classes; all trainings of the row then use them.
"""

import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, FiniteFloat, WrapValidator

from dml.configuration.ranges import Seed
from dml.errors import UserError
from dml.papers.drawn import Drawn
from dml.papers.measured import Compared, Measurement, Tuned

Seeds = Annotated[list[Seed], Field(min_length=1)]

# Of a row, or of a line of a figure: YAML takes a name like 4 for a number.
Name = Annotated[str, BeforeValidator(lambda name: str(name) if type(name) in (int, float) else name)]

Values = Annotated[list[Any], Field(min_length=1)]

Option = Annotated[str, Field(pattern=r"^[^+~]")]  # that the configuration has

# A finite number that stays as it is written: 67 has no decimals, 67.0 has one.
Printed = Annotated[FiniteFloat, WrapValidator(lambda value, check: (check(value), value)[1])]


@dataclass(frozen=True)
class Column:
    """A column: `metric` of `metrics.json`, times `scale`, is what the paper prints."""

    metric: str
    scale: float = 1.0


@dataclass(frozen=True)
class Section:
    """A part of an experiment: a block of columns.

    Attributes:
        columns: by title.
        overrides: Hydra overrides of all its trainings.
        seeds: of its trainings; None: the experiment's.
    """

    columns: dict[str, Column]
    overrides: list[str] = field(default_factory=list)
    seeds: Seeds | None = None


@dataclass(frozen=True)
class Tuning:
    """How the rows of an experiment are tuned: each tries every combination of a few values, on validation classes.

    It is a grid rather than a random search: of four to eight random draws, few fall where the best value lies.

    Attributes:
        trials: number of trainings in a search; every row's grid has to have as many combinations.
        overrides: Hydra overrides of every trial.
        search: options that are searched for every row, beside the row's own: name -> values.
    """

    trials: Annotated[int, Field(ge=1)]
    overrides: list[str]
    search: dict[str, Values]


@dataclass(frozen=True)
class Search:
    """The search that a row needs.

    Attributes:
        overrides: Hydra overrides of every trial.
        options: what is searched, with its values: `lr=choice(1e-4,1e-3)`.
        trials: number of combinations.
    """

    experiment: str
    row: str
    overrides: tuple[str, ...]
    options: tuple[str, ...]
    trials: int

    @property
    def key(self) -> str:
        """Returns the name of the search's folder, which its configuration determines."""
        return f"search_{_digest([*self.overrides, *self.options, str(self.trials)])}"


@dataclass(frozen=True)
class Row:
    """A line of a table or a point of a figure.

    Attributes:
        overrides: Hydra overrides; None: it is not trained here.
        search: options that are tuned for this row alone: name -> values.
        tuned: whether the row is tuned where the experiment has tuning; else it is trained as it stands.
        command: a script of experiments/ with its options, which runs in place of a training. "{seed}" in it stands
            for the seed. The script writes the figures of each row to `metrics.json` in the folder of --out.
        smoke: options that make the script short.
        published: the paper's figures, by part and column.
        pattern: by metric, `above` or `below`: where the paper has this row, seen from the row that all are compared
            with.
        without: titles of columns that it cannot have, such as the cosine between learners of a single one.
        parts: those that it is trained for; empty: all.
        x, line: its position and its line in a figure over numbers.
    """

    name: Name
    overrides: list[str] | None = None
    search: dict[Option, Values] = field(default_factory=dict)
    tuned: bool = True
    command: Annotated[list[str], Field(min_length=1)] | None = None
    smoke: list[str] = field(default_factory=list)
    published: dict[str, dict[str, Printed]] = field(default_factory=dict)
    pattern: dict[str, str] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    x: float | None = None
    line: Name = ""
    note: str = ""


@dataclass(frozen=True)
class Training:
    """One run that an experiment needs. Equal overrides and seeds are the same run, whichever tables ask for it.

    Attributes:
        overrides: of `dml.run`; if `script`, a script of experiments/ and its options.
    """

    experiment: str
    row: str
    part: str
    seed: int
    overrides: tuple[str, ...]
    script: bool = False

    @property
    def key(self) -> str:
        """Returns the name of the folder that all its seeds share; the configuration determines it."""
        kind = next((o.split("=")[1] for o in reversed(self.overrides) if o.startswith("method=")), "run")
        kind = Path(self.overrides[0]).stem if self.script else kind
        return f"{kind}_{_digest(self.overrides)}"


def _digest(options: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(options).encode()).hexdigest()[:10]


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of a paper.

    Attributes:
        record: the JSON file with what was measured.
        source: paper and number of the table or figure.
        about: the setting, and how it differs from the paper's.
        overrides, seeds: of all trainings.
        parts, rows: by name; each row's parts are named.
        figure: what is drawn; None for a table.
        compared_with: the row that all others are compared with; empty: none.
        spread_of: names of experiments whose parts of the same name have the same setting: their rows tell, with its
            own, how much seeds change.
        tuning: None: rows are trained as they stand.
        measured, compared, tuned: what was recorded for rows that have the same options now.
    """

    name: str
    record: Path
    title: str
    source: str
    about: str
    overrides: list[str]
    seeds: list[int]
    parts: dict[str, Section]
    rows: dict[str, Row]
    figure: Drawn | None = None
    compared_with: str = ""
    spread_of: list[str] = field(default_factory=list)
    tuning: Tuning | None = None
    measured: list[Measurement] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    tuned: list[Tuned] = field(default_factory=list)

    def has(self, training: Training) -> bool:
        """Says whether a training is recorded."""
        wanted = (training.row, training.part, training.key, training.seed)
        return any((one.row, one.part, one.key, one.seed) == wanted for one in self.measured)

    def current(self, found: Iterable[Measurement]) -> list[Measurement]:
        """Returns the measurements of rows that are there and have the options that were trained."""
        keys: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
        kept = []
        for one in found:
            if (changes := tuple(one.changes)) not in keys:
                trainings = self.trainings(seeds=[0], changes=changes)
                keys[changes] = {(training.row, training.part): training.key for training in trainings}
            if keys[changes].get((one.row, one.part)) == one.key:
                kept.append(one)
        return kept

    def current_searches(self, found: Iterable[Tuned]) -> list[Tuned]:
        """Does the same for searches.

        Raises:
            UserError: as `search`.
        """
        of_rows = [one for one in found if one.row in self.rows]
        now = [self.search(self.rows[one.row], one.changes) for one in of_rows]
        return [one for one, search in zip(of_rows, now, strict=True) if search is not None and search.key == one.key]

    def of_row(self, row: Row, part: str) -> tuple[str, ...]:
        """Returns all overrides of a row in a part, without the seed."""
        return (*self.overrides, *self.parts[part].overrides, *(row.overrides or []))

    def search(self, row: Row, changes: Sequence[str] = ()) -> Search | None:
        """Returns the search that a row needs before it is trained; None: it needs none.

        Raises:
            UserError: the row's grid has more or fewer combinations than every row is given.
        """
        if self.tuning is None or row.overrides is None or not row.tuned:
            return None
        overrides = (*self.overrides, *row.overrides, *changes, *self.tuning.overrides)
        grid = {**self.tuning.search, **row.search}
        trials = math.prod(len(values) for values in grid.values())
        if trials != self.tuning.trials:
            said = f"{self.name}, {row.name}: its values have {trials} combinations, and every row is given"
            raise UserError(f"{said} {self.tuning.trials} trials: change the values or tuning.trials.")
        options = tuple(f"{name}=choice({','.join(map(_written, values))})" for name, values in grid.items())
        return Search(self.name, row.name, overrides, options, trials)

    def searched(self, row: Row) -> list[str]:
        """Returns the names of the options that are searched for a row."""
        return [] if self.tuning is None or self.search(row) is None else [*self.tuning.search, *row.search]

    def chosen(self, row: Row, changes: Sequence[str] = ()) -> list[str] | None:
        """Returns the options that a row's search found: [] if it needs no search, None if it was not searched yet."""
        search = self.search(row, changes)
        if search is None:
            return []
        return next((one.chosen for one in self.tuned if (one.row, one.key) == (row.name, search.key)), None)

    def promised(self, row: Row, part: str) -> set[str]:
        """Returns the metrics that the trainings of a row have to give for a part: those of the columns in which the
        paper prints something for it; if it prints nothing for it there, of all that the row can have."""
        columns = self.parts[part].columns
        metrics = {columns[title].metric for title in row.published.get(part, columns) if title not in row.without}
        return {metric for metric in metrics if not metric.endswith("/std")}

    def trainings(
        self,
        rows: Sequence[str] = (),
        seeds: Sequence[int] = (),
        changes: Sequence[str] = (),
        parts: Sequence[str] = (),
    ) -> list[Training]:
        """Returns the trainings that rows need.

        Scripts take no changes and are left out if there are any. A script without a seed among its options is run
        once. A row that was not searched yet is trained as it stands.

        Args:
            rows: names; empty: all rows.
            seeds: empty: those of the part, else of the experiment.
            changes: overrides beside those of each row.
            parts: names; empty: all parts.

        Raises:
            UserError: there is no such row or part; the message has similar ones.
        """
        for what, wanted, there in (("row", rows, self.rows), ("part", parts, self.parts)):
            for name in wanted:
                if name not in there:
                    raise UserError(f"{self.name} has no {what} '{name}'{near(name, there)}")
        result = []
        for row in self.rows.values():
            if rows and row.name not in rows:
                continue
            for part in row.parts:
                if parts and part not in parts:
                    continue
                if row.overrides is not None:
                    settings = (*self.of_row(row, part), *changes, *(self.chosen(row, changes) or []))
                    of = seeds or self.parts[part].seeds or self.seeds
                    result += [Training(self.name, row.name, part, s, settings) for s in of]
                elif row.command is not None and not changes:
                    several = any("{seed}" in option for option in row.command)
                    of = (seeds or self.parts[part].seeds or self.seeds) if several else [0]
                    result += [Training(self.name, row.name, part, s, tuple(row.command), script=True) for s in of]
        return result


def _written(value: Any) -> str:
    """Returns a value of a search as it is typed: null, true, or itself."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def near(name: str, names: Iterable[str]) -> str:
    """Ends a sentence about an unknown name: ": did you mean ...?" with similar names, or "." if none is similar."""
    alike = difflib.get_close_matches(name, list(names), n=5, cutoff=0.3)
    return f": did you mean {', '.join(alike)}?" if alike else "."
