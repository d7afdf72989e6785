"""In what configurations differ, whoever set it: what was typed, and what a component's file brought along."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dml.configuration.identity import flat, repeats
from dml.runs.about import settings
from dml.runs.collecting import FinishedRun, Group
from dml.runs.provenance import starts

ABSENT = "–"

MADE_OF = ("data set", "protocol", "backbone", "loss", "steps")  # what a heading says of runs


@dataclass(frozen=True)
class Difference:
    """An option, or a circumstance, that is not the same in all groups.

    Attributes:
        name: of the option with its dots, or what else it is.
        values: one a group; `ABSENT` where it has no such option. Several of one group are joined by a comma.
        meant: it was typed, in some group, so that it is what the runs were made to differ in.
        detail: it belongs to a component that differs itself, and some group has no such option.
    """

    name: str
    values: tuple[str, ...]
    meant: bool
    detail: bool = False


def differences(table: Sequence[Group]) -> list[Difference]:
    """All of them, what was meant first; of a single group none.

    Options of repetitions (seed, fold) and of how a run is carried out are none; commit, libraries, hardware and the
    numbers of images are looked at too, as far as the runs say.
    """
    options = [_options(group.runs[0]) for group in table]
    typed = {name for group in table for name in group.options}
    # What refers to a typed number, as optimizer.lr to lr, was meant with it.
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
    """Data set, protocol, backbone, loss, steps and the days of the runs; where they differ, all that there are."""
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
    """Without what repetitions differ in, and without what is filled in of the data."""
    config, differ = run.config, repeats(run.config)
    counted = {
        name
        for name, value in flat(config, config.runtime).items()
        if name.endswith("classes") and name.startswith(("method.", "loss.")) and value == config.runtime.train_classes
    }
    every = flat(config, config.runtime)
    kept: dict[str, Any] = {name: value for name, value in every.items() if name not in differ | counted}
    left_out = [name for name, value in kept.items() if value == {}]  # components, of which others name theirs
    return {name: value for name, value in kept.items() if value != {}} | {f"{n}._target_": None for n in left_out}


def _numbers(name: str, options: Sequence[Mapping[str, Any]]) -> tuple[float, ...] | None:
    """An option's values in all configurations, where they are numbers that are not all the same."""
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
    """Where the groups ran, and on how many images, as far as they say."""
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
