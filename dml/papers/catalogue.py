"""Finds and reads experiments: experiments/PAPER/NAME.yaml, and beside it what was measured, NAME.json."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dml.configuration.composition import CONF
from dml.errors import UserError
from dml.evaluation.metric import METRICS
from dml.papers.experiment import Column, Experiment, Row, Section, Tuning, near
from dml.papers.forms import FIGURES, ExperimentForm, RecordForm, check_form
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
        content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        check_form(content, ExperimentForm)
        parts = {part: _part(part, said) for part, said in content["parts"].items()}
        rows = [_row(said, parts) for said in content["rows"]]
        if len({row.name for row in rows}) < len(rows):
            raise ValueError("two rows have the same name")
        if (base := content.get("compared_with", "")) and base not in {row.name for row in rows}:
            raise ValueError(f"compared_with names '{base}', which is no row")
        if unknown := [one for one in content.get("spread_of", []) if not (FOLDER / f"{one}.yaml").exists()]:
            raise ValueError(f"spread_of names '{unknown[0]}', which is no experiment")
        _check_patterns(rows, base)
        _check_figure(content.get("figure", {}), rows)
        if (searched := [row.name for row in rows if row.search]) and not content.get("tuning"):
            raise ValueError(f"the row '{searched[0]}' has search:, but the experiment has no tuning:")
        experiment = Experiment(
            name,
            path.with_suffix(".json"),
            content["title"],
            content["source"],
            " ".join(content.get("about", "").split()),
            content.get("overrides", []),
            content.get("seeds", [0]),
            parts,
            {row.name: row for row in rows},
            content.get("figure", {}),
            base,
            content.get("spread_of", []),
            Tuning(**content["tuning"]) if content.get("tuning") else None,
        )
    except (KeyError, TypeError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path} cannot be read as an experiment: {' '.join(str(error).split())}.") from error
    return _with_record(experiment)


def _with_record(experiment: Experiment) -> Experiment:
    """Adds what was measured. Records of rows whose options have changed since, or that are gone, are left out.

    Raises:
        UserError: the record is damaged, or the grid of a row has more or fewer combinations than every row is given.
    """
    if not experiment.record.exists():
        return experiment
    try:
        kept = json.loads(experiment.record.read_text(encoding="utf-8"))
        check_form(kept, RecordForm)
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


def _check_patterns(rows: list[Row], base: str) -> None:
    known = [metric.name for metric in METRICS if "compare" in metric.tables]
    for row in rows:
        for name, direction in row.pattern.items():
            if not base or row.name == base:
                raise ValueError(f"the row '{row.name}' has a pattern, and nothing that it is compared with")
            if name not in known or direction not in (ABOVE, BELOW):
                right = f"one of {', '.join(known)} is {ABOVE} or {BELOW}"
                raise ValueError(f"the row '{row.name}' has the pattern {name}: {direction}, but {right}")


def _check_figure(figure: dict[str, Any], rows: list[Row]) -> None:
    if not figure:
        return
    kind = str(figure.get("kind"))
    if kind not in FIGURES:
        raise ValueError(f"figure.kind is {kind}, not one of {', '.join(FIGURES)}")
    check_form({key: value for key, value in figure.items() if key != "kind"}, FIGURES[kind], "figure")
    if kind == "over" and isinstance(figure["x"], dict):
        for row in rows:
            if row.x is not None and row.line not in figure["x"]:
                raise ValueError(f"figure.x has no title for the line '{row.line}' of the row '{row.name}'")


def _part(name: str, said: dict[str, Any]) -> Section:
    columns = {title: Column(**one) for title, one in said["columns"].items()}
    return Section(name, said.get("overrides", []), columns, said.get("seeds"))


def _row(said: dict[str, Any], parts: dict[str, Section]) -> Row:
    published = said.get("published") or {}
    wrong = [
        *(part for part in (*published, *said.get("parts", ())) if part not in parts),
        *(title for title in said.get("without", ()) if not any(title in part.columns for part in parts.values())),
        *(title for part, of in published.items() if part in parts for title in of if title not in parts[part].columns),
    ]
    if wrong:
        raise ValueError(f"the row '{said.get('name')}' has an unknown part or column '{wrong[0]}'")
    if said.get("overrides") is not None and said.get("command") is not None:
        raise ValueError(f"the row '{said['name']}' has both overrides: and command:")
    if said.get("overrides") is None and said.get("search"):
        raise ValueError(f"the row '{said['name']}' has search:, but no overrides:")
    if said.get("command") is None and said.get("smoke"):
        raise ValueError(f"the row '{said['name']}' has smoke:, but no command:")
    return Row(
        str(said["name"]),
        said.get("overrides"),
        said.get("search", {}),
        said.get("command"),
        said.get("smoke", []),
        published,
        said.get("pattern", {}),
        said.get("without", []),
        said.get("parts", list(parts)),
        said.get("x"),
        str(said.get("line", "")),
        said.get("note", ""),
    )
