"""The tables and figures of the papers: experiments/PAPER/NAME.yaml, and beside it what was measured, NAME.json.

A row is a setting with Hydra overrides, or a figure quoted from elsewhere, without; a part is a block of columns, one
training each; a column is a published figure and the name that it has in a run's `metrics.json`.
"""

import difflib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from dml.configuration.composition import CONF
from dml.errors import UserError

FOLDER = CONF.parent / "experiments"


@dataclass(frozen=True)
class Column:
    """`metric` of `metrics.json` times `scale` is what the paper prints."""

    metric: str
    scale: float = 1.0


@dataclass(frozen=True)
class Section:
    """A block of columns."""

    name: str
    overrides: list[str]
    columns: dict[str, Column]


@dataclass(frozen=True)
class Row:
    """A line of a table or a point of a figure.

    Attributes:
        overrides: None: it is not trained here.
        command: a script of experiments/ in place of a training, with its options, of which "{seed}" stands for the
            seed; `metrics.json` in its --out has the figures of each row.
        smoke: options that make the script short.
        published: by part and column.
        parts: which are trained.
        x, line: its place in a figure over numbers.
    """

    name: str
    overrides: list[str] | None
    command: list[str] | None
    smoke: list[str]
    published: dict[str, dict[str, float]]
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
        return f"{kind}_{hashlib.sha256(json.dumps(self.overrides).encode()).hexdigest()[:10]}"


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
        measured, compared: what was recorded of rows as they are now.
    """

    name: str
    title: str
    source: str
    about: str
    overrides: list[str]
    seeds: list[int]
    parts: dict[str, Section]
    rows: dict[str, Row]
    figure: dict[str, Any]
    compared_with: str = ""
    measured: list[Measurement] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)

    @property
    def record(self) -> Path:
        """Where measurements are kept."""
        return FOLDER / f"{self.name}.json"

    def of_row(self, row: Row, part: str) -> tuple[str, ...]:
        """All overrides of a row in a part, but the seed."""
        return (*self.overrides, *self.parts[part].overrides, *(row.overrides or []))

    def trainings(
        self, rows: Sequence[str] = (), seeds: Sequence[int] = (), changes: Sequence[str] = ()
    ) -> list[Training]:
        """What has to be run, of some rows and seeds or of all; scripts where there are no changes, which they have no
        options for, and once where the seed is none of their options.

        Raises:
            UserError: a row that is not there, with the near ones.
        """
        for name in rows:
            if name not in self.rows:
                raise UserError(f"{self.name} has no row '{name}'{_near(name, self.rows)}.")
        result = []
        for row in self.rows.values():
            if rows and row.name not in rows:
                continue
            for part in row.parts:
                if row.overrides is not None:
                    settings = (*self.of_row(row, part), *changes)
                    result += [Training(self.name, row.name, part, s, settings) for s in seeds or self.seeds]
                elif row.command is not None and not changes:
                    several = any("{seed}" in option for option in row.command)
                    of = seeds or self.seeds if several else [0]
                    result += [Training(self.name, row.name, part, s, tuple(row.command), script=True) for s in of]
        return result


def _near(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, list(names), n=5, cutoff=0.3)
    return f": did you mean {', '.join(near)}?" if near else ""


def names() -> list[str]:
    """Of all experiments, paper by paper, tables before figures."""

    def order(name: str) -> tuple[str, bool, int, str]:
        paper, kind = name.split("/")
        return paper, kind.startswith("figure"), int("".join(filter(str.isdigit, kind)) or 0), kind

    return sorted((f"{path.parent.name}/{path.stem}" for path in FOLDER.glob("*/*.yaml")), key=order)


def find(wanted: Sequence[str]) -> list[Experiment]:
    """Experiments by name, `abe/table1`; of a whole paper, `abe`; all where none is named.

    Raises:
        UserError: a name that is none, with the near ones.
    """
    known = names()
    found: list[str] = []
    for name in wanted or ["all"]:
        mine = [one for one in known if name in ("all", one, one.split("/")[0])]
        if not mine:
            raise UserError(
                f"there is no experiment '{name}'{_near(name, known)}; python -m dml.experiment list shows all."
            )
        found += [one for one in mine if one not in found]
    return [read_experiment(name) for name in found]


def read_experiment(name: str) -> Experiment:
    """One experiment with what was measured for it.

    Raises:
        UserError: a file that does not say what it has to.
    """
    path = FOLDER / f"{name}.yaml"
    try:
        content = yaml.safe_load(path.read_text())
        parts = {part: _part(part, said) for part, said in content["parts"].items()}
        rows = [_row(said, parts) for said in content["rows"]]
        if len({row.name for row in rows}) < len(rows):
            raise ValueError("two rows have one name")
        if (base := content.get("compared_with", "")) and base not in {row.name for row in rows}:
            raise ValueError(f"compared_with names no row: {base}")
        experiment = Experiment(
            name,
            content["title"],
            content["source"],
            " ".join(content.get("about", "").split()),
            content.get("overrides", []),
            content.get("seeds", [0]),
            parts,
            {row.name: row for row in rows},
            content.get("figure", {}),
            base,
        )
        return _with_record(experiment)
    except (KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} is no experiment: {' '.join(str(error).split())}.") from error


def _with_record(experiment: Experiment) -> Experiment:
    """With what was measured of the rows as they are now."""
    if not experiment.record.exists():
        return experiment
    kept = json.loads(experiment.record.read_text())
    now: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}

    def current(one: Measurement) -> bool:
        changes = tuple(one.changes)
        if changes not in now:
            trainings = experiment.trainings(seeds=[0], changes=changes)
            now[changes] = {(training.row, training.part): training.key for training in trainings}
        return now[changes].get((one.row, one.part)) == one.key

    measured = [one for one in (Measurement(**said) for said in kept["measured"]) if current(one)]
    settings = {(one.row, one.part, tuple(one.changes)) for one in measured}
    compared = [Compared(**said) for said in kept["compared"]]
    compared = [one for one in compared if (one.row, one.part, tuple(one.changes)) in settings]
    return replace(experiment, measured=measured, compared=compared)


def _part(name: str, said: dict[str, Any]) -> Section:
    return Section(name, said.get("overrides", []), {title: Column(**one) for title, one in said["columns"].items()})


def _row(said: dict[str, Any], parts: dict[str, Section]) -> Row:
    known = {"name", "overrides", "command", "smoke", "published", "parts", "x", "line", "note"}
    published = said.get("published") or {}
    wrong = [
        *(said.keys() - known),
        *(part for part in (*published, *said.get("parts", ())) if part not in parts),
        *(title for part, of in published.items() if part in parts for title in of if title not in parts[part].columns),
    ]
    if wrong:
        raise ValueError(f"the row '{said.get('name')}' has an unknown {wrong[0]}")
    return Row(
        str(said["name"]),
        said.get("overrides"),
        said.get("command"),
        said.get("smoke", []),
        published,
        said.get("parts", list(parts)),
        said.get("x"),
        str(said.get("line", "")),
        said.get("note", ""),
    )
