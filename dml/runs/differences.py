"""Finds in what groups of runs differ: in typed options, in options that come from a component's file, and in the
circumstances of the runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dml.configuration.identity import flat, repeats
from dml.runs.about import settings
from dml.runs.collecting import FinishedRun, Group
from dml.runs.provenance import starts

ABSENT = "–"

MADE_OF = ("data set", "protocol", "backbone", "loss", "steps")  # settings that a heading shows


@dataclass(frozen=True)
class Difference:
    """An option, or a circumstance, that is not the same in all groups.

    Attributes:
        name: the full name of the option, with dots, or the name of the circumstance.
        values: one for each group; `ABSENT` for a group that has no such option. Several values of one group are joined
            by commas.
        meant: whether the option was typed for some group, so that the runs were meant to differ in it.
        detail: whether it is an option of a component that differs itself, and some group has no such option.
    """

    name: str
    values: tuple[str, ...]
    meant: bool
    detail: bool = False


def differences(table: Sequence[Group]) -> list[Difference]:
    """Returns all differences between groups, those that were meant first; none for a single group.

    Options of repetitions (seed, fold) and options of how a run is carried out do not count. Commit, libraries,
    hardware and the numbers of images are compared too, as far as the runs recorded them.
    """
    options = [_options(group.runs[0]) for group in table]
    typed = {name for group in table for name in group.options}
    # An option that refers to a typed number, as optimizer.lr does to lr, was meant too.
    numbers = [of for name in typed if (of := _numbers(name, options)) is not None]
    components = [
        name.removesuffix("_target_").rstrip(".")
        for name in dict.fromkeys(name for one in options for name in one)
        if name.endswith("_target_") and len({one.get(name) for one in options}) > 1
    ]
    found = []
    for name in dict.fromkeys(name for one in options for name in one):
        values = tuple(_said(name, one[name]) if name in one else ABSENT for one in options)
        if len(set(values)) > 1:
            meant = any(name == option or name.startswith(f"{option}.") for option in typed)
            meant = meant or _numbers(name, options) in numbers
            of_component = any(name.startswith(f"{part}.") for part in components) and not name.endswith("_target_")
            found.append(Difference(_title(name), values, meant, of_component and ABSENT in values))
    found += _circumstances(table)
    return sorted(found, key=lambda one: (not one.meant, one.detail))


def heading(table: Sequence[Group]) -> list[str]:
    """Returns data set, protocol, backbone, loss, steps and days of the runs, for a heading. If the runs differ in one
    of them, all its values are listed."""
    runs = [run for group in table for run in group.runs]
    said = [settings(run.config) for run in runs]
    parts = []
    for title in MADE_OF:
        values = list(dict.fromkeys(one[title] for one in said if title in one))
        if values:
            parts.append(f"{title} {' / '.join(values)}")
    days = sorted({str(start["date"]) for run in runs for start in starts(run.folder)})
    if days:
        parts.append(days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")
    return parts


def _options(run: FinishedRun) -> dict[str, Any]:
    """Returns a run's options by name, without those of repetitions and those that are filled in from the data."""
    config, differ = run.config, repeats(run.config)
    counted = {
        name
        for name, value in flat(config, config.runtime).items()
        if name.endswith("classes") and name.startswith(("method.", "loss.")) and value == config.runtime.train_classes
    }
    every = flat(config, config.runtime)
    kept: dict[str, Any] = {name: value for name, value in every.items() if name not in differ | counted}
    left_out = [
        name for name, value in kept.items() if value == {}
    ]  # components that are not used; other runs name theirs by _target_
    return {name: value for name, value in kept.items() if value != {}} | {f"{n}._target_": None for n in left_out}


def _numbers(name: str, options: Sequence[Mapping[str, Any]]) -> tuple[float, ...] | None:
    """Returns an option's values in all configurations if they are numbers and not all equal, else None."""
    values = tuple(one.get(name) for one in options)
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return values if numbers and len(set(values)) > 1 else None  # type: ignore[return-value]


def _title(name: str) -> str:
    return name.removesuffix("._target_")


def _said(name: str, value: Any) -> str:
    if value is None:
        return "none"
    return str(value).rsplit(".", 1)[-1] if name.endswith("_target_") else str(value)


def _circumstances(table: Sequence[Group]) -> list[Difference]:
    """Returns the differences in where the groups ran and on how many images, as far as they recorded it."""
    names: dict[str, list[dict[str, None]]] = {}
    for at, group in enumerate(table):
        for run in group.runs:
            for name, value in _circumstances_of(run).items():
                names.setdefault(name, [{} for _ in table])[at][value] = None
    found = []
    for name, values in names.items():
        written = tuple(", ".join(one) or ABSENT for one in values)
        if len(set(written)) > 1:
            found.append(Difference(name, written, meant=False))
    return found


def _circumstances_of(run: FinishedRun) -> dict[str, str]:
    result: dict[str, str] = {}
    for start in starts(run.folder)[-1:]:
        result |= {name: str(start[name]) for name in ("commit", "hardware")}
        versions = start.get("versions")
        result |= {k: str(v) for k, v in versions.items()} if isinstance(versions, Mapping) else {}
    for name in ("test/images", "test/classes", "query/images", "gallery/images"):
        if f"data/{name}" in run.metrics:
            result[f"{name.replace('/', ' ')}"] = f"{run.metrics[f'data/{name}']:,.0f}"
    return result
