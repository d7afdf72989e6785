"""The finished runs below some folders, and runs of one configuration together."""

import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dml.configuration.identity import configuration, label, repeats
from dml.configuration.trainings import trainings_of
from dml.errors import UserError
from dml.evaluation.interval import ENDS
from dml.evaluation.metric import GAIN, HEADLINE, metric
from dml.files import read_yaml
from dml.runs.folder import RunFolder
from dml.runs.reading import read_metrics_json, reading, require

BELOW = " ↓"

BELOW_SAYS = (
    "↓ below the untrained network: the same network embeds the test images better before its first step, so that this "
    "training has taught it nothing that the test asks for; look at the rate, the loss and the number of steps."
)


@dataclass
class FinishedRun:
    """A finished run."""

    folder: Path
    config: Any
    overrides: list[str]
    metrics: dict[str, float]


@dataclass
class Group:
    """Runs of one configuration."""

    label: str
    runs: list[FinishedRun]
    options: dict[str, str]  # typed, and not common to all groups

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Mean of each metric and, as `<name>/std`, its standard deviation; `gain` is the ensemble's over its mean
        learner."""
        measured = [dict(run.metrics) for run in self.runs]
        for one in measured:
            if {f"learners/1/{HEADLINE}", f"learners/mean/{HEADLINE}"} <= one.keys():
                one["gain"] = one[f"test/{HEADLINE}"] - one[f"learners/mean/{HEADLINE}"]
        return mean_and_std(measured)

    def cell(self, name: str) -> str:
        """`mean±std` of a declared metric; the mean alone of one run, and where all have the same; nothing where it has
        none. `BELOW` follows what is below the untrained network's. What re-ranking gains has a sign and, of one run,
        its interval."""
        of, std = metric(name), self.metrics.get(f"{name}/std")
        if name.startswith(f"{GAIN}/") and name in self.metrics:
            ends = [self.metrics[name + end] for end in ENDS if name + end in self.metrics]
            return of.change(self.metrics[name], ends) + ("" if std is None else f"±{of.written(std)}")
        same = std is None or (std == 0 and of.format.endswith(".0f"))  # a size
        if name.startswith("learners/") and f"learners/1/{HEADLINE}" not in self.metrics:
            return ""  # a single learner is no mean of any
        mark = BELOW if below_untrained(self.metrics, name) else ""
        return of.written(self.metrics.get(name)) + ("" if same else f"±{of.written(std)}") + mark


def below_untrained(metrics: Mapping[str, float], name: str = f"test/{HEADLINE}") -> bool:
    """Whether a metric of the test, `test/...`, is worse than the same network's before its first step."""
    before = metrics.get(name.replace("test/", "untrained/", 1)) if name.startswith("test/") else None
    if before is None or name not in metrics or metric(name).higher_is_better is None:
        return False
    return before != metrics[name] and not metric(name).better(metrics[name], before)


def mean_and_std(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each metric that all runs have its mean; of several runs also the standard deviation (n - 1), `<name>/std`.

    Ends of intervals, `<name>/low` and `<name>/high`, are left out of several runs: the interval of a mean is not the
    mean of intervals.
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
    """The finished runs below some folders, in the order of their paths; a run of several trainings is those.

    Raises:
        UserError: a folder that is not there, or a run with a damaged file.
    """
    found = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder.")
        for file in sorted(folder.rglob("metrics.json")):
            run = _finished(file.parent)
            if run is not None:
                found[file.parent.resolve()] = run
    return list(found.values())


def _finished(folder: Path) -> FinishedRun | None:
    """The run of one training in a folder; None where it is of several or, which is said, no run's.

    Raises:
        UserError: a damaged file.
    """
    file = RunFolder(folder).config_file
    config = RunFolder(folder).config()
    if config is None:
        if file.exists():
            print(f"Left out: {folder}, whose config.yaml is no run's or damaged.", file=sys.stderr)
        return None
    remedy = "repeat the run, or leave its folder out"
    with reading(file, remedy):
        if trainings_of(config):
            return None
        require(bool(configuration(config) and label(config)), "it is of no run")  # what is asked of it later
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
    """Runs of one configuration together; the label is what was typed and is not common to all groups."""
    found: dict[str, list[FinishedRun]] = {}
    for run in runs:
        found.setdefault(configuration(run.config), []).append(run)
    if len(found) == 1:
        return [Group(label(runs[0].config)[0], list(runs), {})]
    typed = [[o for o in group[0].overrides if _tells(o, repeats(group[0].config))] for group in found.values()]
    common = set(typed[0]).intersection(*typed)
    own = [[o for o in options if o not in common] for options in typed]
    return [
        Group(
            " ".join(options) or "the rest by default",
            group,
            dict(o.lstrip("+").split("=", 1) for o in options if "=" in o),
        )
        for options, group in zip(own, found.values(), strict=True)
    ]


def _tells(override: str, differ: Collection[str]) -> bool:
    name = override.lstrip("+~").partition("=")[0]
    return name not in differ and not name.startswith(("paths.", "logger", "hydra"))
