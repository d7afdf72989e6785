"""Finds and reads experiments: experiments/PAPER/NAME.yaml, and beside it what was measured, NAME.json."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dml.configuration.composition import CONF
from dml.errors import UserError
from dml.evaluation.metric import METRICS
from dml.papers.drawn import KINDS, Drawn, Over
from dml.papers.experiment import Experiment, Row, near
from dml.papers.forms import ExperimentForm, RecordForm, parse
from dml.papers.measured import Compared, Measurement, Trial, Tuned
from dml.papers.verdicts import ABOVE, BELOW

FOLDER = CONF.parent / "experiments"


def names() -> list[str]:
    """Returns the names of all experiments, paper by paper, tables before figures."""

    def order(name: str) -> tuple[str, bool, int, str]:
        paper, kind = name.split("/")
        return paper, kind.startswith("figure"), int("".join(filter(str.isdigit, kind)) or 0), kind

    return sorted((f"{path.parent.name}/{path.stem}" for path in FOLDER.glob("*/*.yaml")), key=order)


def find(wanted: Sequence[str]) -> list[Experiment]:
    """Reads the experiments that are wanted.

    Args:
        wanted: names of experiments (`abe/table1`) or of papers (`abe`); `all` or nothing for all.

    Raises:
        UserError: there is no such name; the message has similar ones.
    """
    known = names()
    found: list[str] = []
    for name in wanted or ["all"]:
        mine = [one for one in known if name in ("all", one, one.split("/")[0])]
        if not mine:
            raise UserError(
                f"there is no experiment '{name}' (python -m dml.experiment list shows all){near(name, known)}"
            )
        found += [one for one in mine if one not in found]
    return [read_experiment(name) for name in found]


def read_experiment(name: str) -> Experiment:
    """Reads one experiment with what was measured for it.

    Raises:
        UserError: the YAML file or the record is damaged or lacks something.
    """
    path = FOLDER / f"{name}.yaml"
    try:
        # OmegaConf refuses a key that is there twice, of which PyYAML takes the last.
        form: ExperimentForm = parse(OmegaConf.to_container(OmegaConf.load(path), resolve=False), ExperimentForm)
        rows = {row.name: row if row.parts else replace(row, parts=list(form.parts)) for row in form.rows}
        if len(rows) < len(form.rows):
            raise ValueError("two rows have the same name")
        if (base := form.compared_with) and base not in rows:
            raise ValueError(f"compared_with names '{base}', which is no row")
        if unknown := [one for one in form.spread_of if not (FOLDER / f"{one}.yaml").exists()]:
            raise ValueError(f"spread_of names '{unknown[0]}', which is no experiment")
        if twice := [one for one, times in Counter([name, *form.spread_of]).items() if times > 1]:
            raise ValueError(f"spread_of would count the seeds of {twice[0]} twice: leave it out")
        for row in rows.values():
            _check_row(row, form)
        figure = _figure(form.figure, form.rows)
    except (TypeError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path} cannot be read as an experiment: {' '.join(str(error).split())}.") from error
    said = {one.name: getattr(form, one.name) for one in fields(form)}
    said |= {"about": " ".join(form.about.split()), "rows": rows, "figure": figure}
    return _with_record(Experiment(name=name, record=path.with_suffix(".json"), **said))


def _with_record(experiment: Experiment) -> Experiment:
    """Adds what was measured. Records of rows whose options have changed since, or that are gone, are left out.

    Raises:
        UserError: the record is damaged, or the grid of a row has more or fewer combinations than every row is given.
    """
    if not experiment.record.exists():
        return experiment
    try:
        kept = json.loads(experiment.record.read_text(encoding="utf-8"))
        parse(kept, RecordForm)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{experiment.record} is damaged ({error}): take it back from git, or move it away and record again."
        ) from error
    trials = [one | {"trials": [Trial(**trial) for trial in one["trials"]]} for one in kept.get("tuned", [])]
    experiment = replace(experiment, tuned=experiment.current_searches(Tuned(**said) for said in trials))
    measured = experiment.current(Measurement(**said) for said in kept["measured"])
    settings = {(one.row, one.part, tuple(one.changes)) for one in measured}
    compared = [Compared(**said) for said in kept["compared"]]
    compared = [
        one
        for one in compared
        if one.against == experiment.compared_with != one.row
        and {(row, one.part, tuple(one.changes)) for row in (one.row, one.against)} <= settings
    ]
    return replace(experiment, measured=measured, compared=compared)


def _check_row(row: Row, form: ExperimentForm) -> None:
    named = [*row.published, *row.parts]
    if unknown := [part for part in named if part not in form.parts]:
        raise ValueError(f"the row '{row.name}' has an unknown part '{unknown[0]}'")
    columns = {(part, title) for part in form.parts for title in form.parts[part].columns}
    unknown = [title for part, of in row.published.items() for title in of if (part, title) not in columns]
    unknown += [title for title in row.without if all(title != one for _, one in columns)]
    if unknown:
        raise ValueError(f"the row '{row.name}' has an unknown column '{unknown[0]}'")
    if row.overrides is not None and row.command is not None:
        raise ValueError(f"the row '{row.name}' has both overrides: and command:")
    if row.overrides is None and row.search:
        raise ValueError(f"the row '{row.name}' has search:, but no overrides:")
    if row.search and not row.tuned:
        raise ValueError(f"the row '{row.name}' has search:, but tuned: false")
    if row.search and form.tuning is None:
        raise ValueError(f"the row '{row.name}' has search:, but the experiment has no tuning:")
    if row.command is None and row.smoke:
        raise ValueError(f"the row '{row.name}' has smoke:, but no command:")
    known = [metric.name for metric in METRICS if "compare" in metric.tables]
    for name, direction in row.pattern.items():
        if form.compared_with in ("", row.name):
            raise ValueError(f"the row '{row.name}' has a pattern, and nothing that it is compared with")
        if name not in known or direction not in (ABOVE, BELOW):
            right = f"one of {', '.join(known)} is {ABOVE} or {BELOW}"
            raise ValueError(f"the row '{row.name}' has the pattern {name}: {direction}, but {right}")


def _figure(said: dict[str, Any], rows: list[Row]) -> Drawn | None:
    if not said:
        return None
    kind = str(said.get("kind"))
    if kind not in KINDS:
        raise ValueError(f"figure.kind is {kind}, not one of {', '.join(KINDS)}")
    figure: Drawn = parse({key: value for key, value in said.items() if key != "kind"}, KINDS[kind], "figure")
    if isinstance(figure, Over) and isinstance(figure.x, dict):
        for row in rows:
            if row.x is not None and row.line not in figure.x:
                raise ValueError(f"figure.x has no title for the line '{row.line}' of the row '{row.name}'")
    return figure
