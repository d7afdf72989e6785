"""Finds the finished runs below some folders, and groups runs of one configuration."""

import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dml.configuration.composition import EXECUTION
from dml.configuration.identity import configuration, label, repeats
from dml.configuration.trainings import trainings_of
from dml.errors import UserError
from dml.evaluation.interval import ENDS
from dml.evaluation.metric import GAIN, HEADLINE, metric
from dml.files import MANIFEST, read_yaml, walk
from dml.runs.about import settings
from dml.runs.folder import RunFolder
from dml.runs.reading import read_metrics_json, reading, require

BELOW = " ↓"

BELOW_SAYS = "↓ below the untrained network: before its first step, the same network had a better figure on the test."

HARMED = (
    " Where Recall@1 and MAP@R are both below, the training taught nothing that helps on the test: check the learning "
    "rate, the loss and the number of steps."
)


@dataclass
class FinishedRun:
    """A finished run.

    Attributes:
        folder: of the run.
        config: its configuration.
        overrides: the options that were typed.
        metrics: the content of `metrics.json`.
    """

    folder: Path
    config: Any
    overrides: list[str]
    metrics: dict[str, float]


@dataclass
class Group:
    """Runs of one configuration, which differ only in seed, split, fold or repetition.

    Attributes:
        label: the options that tell this group from the others.
        runs: of the group.
        options: the same options, by name: those that were typed and are not common to all groups.
        number: which of the groups with these options it is, from 1; they differ in what was not typed.
    """

    label: str
    runs: list[FinishedRun]
    options: dict[str, str]
    number: int = 1

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The mean of each metric over the runs and, as `<name>/std`, its standard deviation. `gain` is Recall@1 of the
        ensemble minus that of the mean learner."""
        measured = [dict(run.metrics) for run in self.runs]
        for one in measured:
            if {f"learners/1/{HEADLINE}", f"learners/mean/{HEADLINE}"} <= one.keys():
                one["gain"] = one[f"test/{HEADLINE}"] - one[f"learners/mean/{HEADLINE}"]
        return mean_and_std(measured)

    def cell(self, name: str) -> str:
        """Formats a declared metric for a table as `mean±std`.

        With a single run, or for a size that all runs share, it is the mean alone; without a value it is empty. `BELOW`
        marks a value that is worse than the untrained network's. The gain of re-ranking has a sign and, with a single
        run, its interval.
        """
        of, std = metric(name), self.metrics.get(f"{name}/std")
        if name.startswith(f"{GAIN}/") and name in self.metrics:
            ends = [self.metrics[name + end] for end in ENDS if name + end in self.metrics]
            return of.change(self.metrics[name], ends) + ("" if std is None else f"±{of.written(std)}")
        same = std is None or (std == 0 and of.format.endswith(".0f"))  # a size, such as the number of parameters
        if name.startswith("learners/") and f"learners/1/{HEADLINE}" not in self.metrics:
            return ""  # with a single learner there is no mean over learners
        mark = BELOW if below_untrained(self.metrics, name) else ""
        return of.written(self.metrics.get(name)) + ("" if same else f"±{of.written(std)}") + mark


def below_untrained(metrics: Mapping[str, float], name: str = f"test/{HEADLINE}") -> bool:
    """Returns whether a metric of the test, `test/...`, is worse than that of the same network before its first step.
    It is False if either is not known."""
    before = metrics.get(name.replace("test/", "untrained/", 1)) if name.startswith("test/") else None
    if before is None or name not in metrics or metric(name).higher_is_better is None:
        return False
    return before != metrics[name] and not metric(name).better(metrics[name], before)


def said_below(some: bool, runs: Iterable[Mapping[str, float]]) -> str:
    """Returns what `BELOW` means below a table.

    Args:
        some: whether the table has it; without it there is nothing to say.
        runs: the metrics of each run or group in the table.
    """
    harmed = any(below_untrained(one) and below_untrained(one, "test/map@r") for one in runs)
    return "" if not some else BELOW_SAYS + HARMED if harmed else BELOW_SAYS


def mean_and_std(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each metric that all runs have and, with several runs, as `<name>/std` its standard deviation
    (n - 1).

    With several runs, the ends of intervals, `<name>/low` and `<name>/high`, are left out: the interval of a mean is
    not the mean of intervals.
    """
    result = {}
    for name in runs[0]:
        if len(runs) > 1 and name.endswith(ENDS):
            continue
        values = [run[name] for run in runs if name in run]
        if len(values) == len(runs):
            result[name] = statistics.fmean(values)
            if len(values) > 1:
                result[f"{name}/std"] = statistics.stdev(values)
    return result


def leaves(folders: Iterable[Path]) -> list[FinishedRun]:
    """Finds the finished runs below some folders, sorted by path; those that only links lead to come last. Of a run
    with several trainings it finds these. What was published of a run and lies in its folder counts only if it is named
    itself.

    Raises:
        UserError: a folder does not exist or cannot be read, or a run has a damaged file.
    """
    found: dict[Path, FinishedRun] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder: name the folder of a run, or one that holds runs.")
        places = [Path(place) for place, _, files in walk(folder) if "metrics.json" in files]
        root = folder.resolve()
        for place in sorted(places, key=lambda one: (one.resolve() != root / one.relative_to(folder), one)):
            run = None if place != folder and _published_of_a_run(place) else _finished(place)
            if run is not None:
                found.setdefault(place.resolve(), run)
    return list(found.values())


def _published_of_a_run(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and any((above / "metrics.json").is_file() for above in folder.parents)


def _finished(folder: Path) -> FinishedRun | None:
    """Reads the run in a folder. Returns None if it has several trainings, or if the folder is not that of a run; of a
    folder with a foreign config.yaml it prints that it is left out.

    Raises:
        UserError: a file is damaged.
    """
    file = RunFolder(folder).config_file
    remedy = "repeat the run, or leave its folder out"
    try:
        config = RunFolder(folder).config()
    except UserError as error:
        raise UserError(f"{str(error).removesuffix('.')}: {remedy}.") from error
    if config is None:
        if file.exists():
            print(f"Left out: {folder}, whose config.yaml is damaged or not that of a run.", file=sys.stderr)
        return None
    with reading(file, remedy):
        if trainings_of(config):
            return None
        of_a_run = configuration(config) and label(config) and settings(config)  # raises here, not later
        require(bool(of_a_run), "it is of no run")
        for name in ("seed", "image_size"):
            require(isinstance(config[name], int), f"{name}={config[name]}")
    typed, overrides = folder / "overrides.yaml", []
    if typed.exists():
        with reading(typed, remedy):
            given = read_yaml(typed)
            require(isinstance(given, list) and all(isinstance(o, str) for o in given), "it is no list of overrides")
            overrides = given
    return FinishedRun(folder, config, overrides, read_metrics_json(folder / "metrics.json"))


def groups(runs: Sequence[FinishedRun]) -> list[Group]:
    """Groups runs by configuration. The label of a group has the options that were typed and are not common to all;
    groups that differ only in what was not typed, such as a default of another version, are numbered. A number that
    was typed in two ways is one value, as it was typed first."""
    found: dict[str, list[FinishedRun]] = {}
    for run in runs:
        found.setdefault(configuration(run.config), []).append(run)
    if len(found) == 1:
        return [Group(label(runs[0].config)[0], list(runs), {})]
    spelled: dict[tuple[str, float | str], str] = {}
    typed = [
        [spelled.setdefault(_meant(o), o) for o in group[0].overrides if tells(o, repeats(group[0].config))]
        for group in found.values()
    ]
    common = set(typed[0]).intersection(*typed)
    own = [[o for o in options if o not in common] for options in typed]
    labels = [" ".join(options) or "the rest by default" for options in own]
    numbers = [labels[: i + 1].count(one) for i, one in enumerate(labels)]
    return [
        Group(
            one if number == 1 else f"{one} ({number})",
            group,
            dict(o.lstrip("+").split("=", 1) for o in options if "=" in o),
            number,
        )
        for one, number, options, group in zip(labels, numbers, own, found.values(), strict=True)
    ]


def _meant(override: str) -> tuple[str, float | str]:
    """Returns the name in an override, and its value, the same for all spellings of a number."""
    name, _, value = override.partition("=")
    try:
        return name, float(value)
    except ValueError:
        return name, value


def copies(group: Group) -> dict[Path, Path]:
    """Returns the folders of a group with a training that an earlier one has too, with the same seed and fold, and for
    each the earlier folder."""
    first: dict[tuple[Any, ...], Path] = {}
    found = {}
    for run in group.runs:
        which = tuple(OmegaConf.select(run.config, name) for name in sorted(repeats(run.config)))
        if (earlier := first.setdefault(which, run.folder)) != run.folder:
            found[run.folder] = earlier
    return found


def tells(override: str, differ: Collection[str]) -> bool:
    """Says whether an override can tell a configuration from others; `differ`: the options of repetitions."""
    name = override.lstrip("+~").partition("=")[0]
    silent = [one for one in EXECUTION if one != "note"]  # a user's remark may tell more than the options
    return name not in differ and not name.startswith(("hydra", *silent))
