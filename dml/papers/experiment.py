"""What an experiment is: rows, parts and columns, the trainings that they need, and what was measured of them.

A row is a setting with Hydra overrides, or a figure quoted from elsewhere, without; a part is a block of columns, one
training each; a column is a published figure and the name that it has in a run's `metrics.json`. Where rows are tuned,
each is first searched for the options that do best on validation classes, which all its trainings then have.
"""

import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dml.errors import UserError


@dataclass(frozen=True)
class Column:
    """`metric` of `metrics.json` times `scale` is what the paper prints."""

    metric: str
    scale: float = 1.0


@dataclass(frozen=True)
class Section:
    """A block of columns.

    Attributes:
        seeds: of its trainings; None: the experiment's.
    """

    name: str
    overrides: list[str]
    columns: dict[str, Column]
    seeds: list[int] | None = None


@dataclass(frozen=True)
class Tuning:
    """How the rows of an experiment are tuned, all alike: each tries every combination of a few values, and is judged
    on validation classes.

    A grid rather than a random search: of four to eight draws, few fall where the best value lies.

    Attributes:
        trials: trainings of each row's search; every row's grid has to have as many combinations.
        overrides: options of every trial.
        search: options that are searched for every row beside the row's own, and their values.
    """

    trials: int
    overrides: list[str]
    search: dict[str, list[Any]]


@dataclass(frozen=True)
class Trial:
    """One training of a search.

    Attributes:
        options: what was tried.
        value: the criterion on validation classes; None: the training failed.
        seconds: of training.
    """

    options: list[str]
    value: float | None
    seconds: float | None


@dataclass(frozen=True)
class Tuned:
    """What the search of a row came to.

    Attributes:
        key: of the search (`Search.key`): a row that is searched in another way by now was not tuned.
        changes: see `Measurement`.
        chosen: options of the best trial.
        trials: all of them.
        command, commit, date, hardware: how it came about.
    """

    row: str
    key: str
    changes: list[str]
    chosen: list[str]
    trials: list[Trial]
    command: str
    commit: str
    date: str
    hardware: str

    @property
    def best(self) -> float:
        """The criterion of the best trial."""
        return max(one.value for one in self.trials if one.value is not None)


@dataclass(frozen=True)
class Search:
    """The search of a row.

    Attributes:
        overrides: options of every trial.
        options: those that are searched, each with its values: `lr=choice(1e-4,1e-3)`.
        trials: how many combinations there are.
    """

    experiment: str
    row: str
    overrides: tuple[str, ...]
    options: tuple[str, ...]
    trials: int

    @property
    def key(self) -> str:
        """Of its configuration: its folder."""
        return f"search_{_digest([*self.overrides, *self.options, str(self.trials)])}"


@dataclass(frozen=True)
class Row:
    """A line of a table or a point of a figure.

    Attributes:
        overrides: None: it is not trained here.
        command: a script of experiments/ in place of a training, with its options, of which "{seed}" stands for the
            seed; `metrics.json` in its --out has the figures of each row.
        smoke: options that make the script short.
        search: options of its own that are tuned, and their values.
        published: by part and column.
        pattern: of a metric that rows are compared by, `above` or `below`: where the paper has this row, seen from the
            one that all are compared with.
        parts: which are trained.
        x, line: its place in a figure over numbers.
    """

    name: str
    overrides: list[str] | None
    search: dict[str, list[Any]]
    command: list[str] | None
    smoke: list[str]
    published: dict[str, dict[str, float]]
    pattern: dict[str, str]
    parts: list[str]
    x: float | None
    line: str
    note: str


@dataclass(frozen=True)
class Training:
    """One run that an experiment needs. Equal overrides are the same run, whichever tables ask for it.

    Attributes:
        overrides: of `dml.run`, or where `script`, a script of experiments/ and its options.
    """

    experiment: str
    row: str
    part: str
    seed: int
    overrides: tuple[str, ...]
    script: bool = False

    @property
    def key(self) -> str:
        """Of its configuration: the folder that all its seeds share."""
        kind = next((o.split("=")[1] for o in reversed(self.overrides) if o.startswith("method=")), "run")
        kind = Path(self.overrides[0]).stem if self.script else kind
        return f"{kind}_{_digest(self.overrides)}"


def _digest(options: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(options).encode()).hexdigest()[:10]


@dataclass(frozen=True)
class Measurement:
    """What was measured for a row.

    Attributes:
        key: of the training (`Training.key`): a row that has other options by now was not measured.
        seed: None of what is not trained, as sizes.
        changes: overrides beside the paper's, as of a shorter training; empty: the setting is the paper's.
        metrics: those that its columns show.
        command, commit, date, hardware, seconds: how it came about.
    """

    row: str
    part: str
    key: str
    seed: int | None
    changes: list[str]
    metrics: dict[str, float]
    command: str
    commit: str
    date: str
    hardware: str
    seconds: float | None = None


@dataclass(frozen=True)
class Compared:
    """By how much a row is above another on the same queries (`dml.compare`, drawing classes).

    Attributes:
        metric: recall@1 or map@r, a share.
        against: the other row.
        low, high: of the 95 % interval.
        runs: how many there are of the row, and of the other; each query's figure is their mean.
    """

    row: str
    part: str
    changes: list[str]
    metric: str
    against: str
    estimate: float
    low: float
    high: float
    p: float
    runs: list[int]


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of a paper.

    Attributes:
        compared_with: the row that all others are compared with; empty: none.
        record: where what was measured is kept.
        tuning: None: rows are trained as they stand.
        measured, compared, tuned: what was recorded of rows as they are now.
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
    figure: dict[str, Any]
    compared_with: str = ""
    tuning: Tuning | None = None
    measured: list[Measurement] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    tuned: list[Tuned] = field(default_factory=list)

    def of_row(self, row: Row, part: str) -> tuple[str, ...]:
        """All overrides of a row in a part, but the seed."""
        return (*self.overrides, *self.parts[part].overrides, *(row.overrides or []))

    def search(self, row: Row, changes: Sequence[str] = ()) -> Search | None:
        """What has to be searched before a row is trained; None: nothing.

        Raises:
            UserError: a row whose grid has another number of combinations than every row is given.
        """
        if self.tuning is None or row.overrides is None:
            return None
        overrides = (*self.overrides, *row.overrides, *changes, *self.tuning.overrides)
        grid = {**self.tuning.search, **row.search}
        trials = math.prod(len(values) for values in grid.values())
        if trials != self.tuning.trials:
            said = f"{self.name}, {row.name}: its values have {trials} combinations, and every row is given"
            raise UserError(f"{said} {self.tuning.trials} trials: change the values or tuning.trials.")
        options = tuple(f"{name}=choice({','.join(map(str, values))})" for name, values in grid.items())
        return Search(self.name, row.name, overrides, options, trials)

    def chosen(self, row: Row, changes: Sequence[str] = ()) -> list[str] | None:
        """The options that the search of a row found; None: it was not searched yet."""
        search = self.search(row, changes)
        if search is None:
            return []
        return next((one.chosen for one in self.tuned if (one.row, one.key) == (row.name, search.key)), None)

    def trainings(
        self, rows: Sequence[str] = (), seeds: Sequence[int] = (), changes: Sequence[str] = ()
    ) -> list[Training]:
        """What has to be run, of some rows and seeds or of all; scripts where there are no changes, which they have no
        options for, and once where the seed is none of their options. A row that was not searched yet is as it stands.

        Raises:
            UserError: a row that is not there, with the near ones.
        """
        for name in rows:
            if name not in self.rows:
                raise UserError(f"{self.name} has no row '{name}'{near(name, self.rows)}.")
        result = []
        for row in self.rows.values():
            if rows and row.name not in rows:
                continue
            for part in row.parts:
                if row.overrides is not None:
                    settings = (*self.of_row(row, part), *changes, *(self.chosen(row, changes) or []))
                    of = seeds or self.parts[part].seeds or self.seeds
                    result += [Training(self.name, row.name, part, s, settings) for s in of]
                elif row.command is not None and not changes:
                    several = any("{seed}" in option for option in row.command)
                    of = seeds or self.seeds if several else [0]
                    result += [Training(self.name, row.name, part, s, tuple(row.command), script=True) for s in of]
        return result


def near(name: str, names: Iterable[str]) -> str:
    """The end of a sentence that knows no such name; empty where none is alike."""
    alike = difflib.get_close_matches(name, list(names), n=5, cutoff=0.3)
    return f": did you mean {', '.join(alike)}?" if alike else ""
