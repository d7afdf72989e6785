"""Tuning of rows before they are trained: a search for each, all with the same number of trials, by validation."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep

from dml.configuration.composition import folder_option
from dml.errors import UserError
from dml.files import alone
from dml.launch.at_once import Job
from dml.launch.job import objective
from dml.papers.catalogue import read_experiment
from dml.papers.experiment import Experiment, Search
from dml.papers.measured import Trial, Tuned
from dml.runs.collecting import leaves
from dml.runs.folder import OUTPUT
from dml.runs.provenance import said_of_starts, said_together

OPTUNA = (
    "hydra/sweeper=optuna",
    "hydra/sweeper/sampler=grid",
    "hydra.sweeper.n_jobs=1",  # so that the trials are the same on every machine
    "hydra.sweeper.max_failure_rate=1",
)


def searches(
    experiment: Experiment, rows: Sequence[str] = (), changes: Sequence[str] = (), again: bool = False
) -> list[Search]:
    """Returns the searches that rows need.

    Args:
        rows: names; empty: all rows.
        changes: overrides beside those of each row.
        again: whether those that were carried out already are returned too.
    """
    wanted = [row for row in experiment.rows.values() if not rows or row.name in rows]
    found = [experiment.search(row, changes) for row in wanted if again or experiment.chosen(row, changes) is None]
    return [one for one in found if one is not None]


def command_of_search(search: Search, out: Path) -> list[str]:
    """Returns the command of a search. If it is stopped and started again, it goes on with the same trials."""
    options = [*search.overrides, *OPTUNA, f"hydra.sweeper.n_trials={search.trials}", *search.options]
    return [sys.executable, "-m", "dml.run", "-m", *options, folder_option("sweep_dir", out / search.key)]


def job_of_search(search: Search, out: Path) -> Job:
    """Returns the job that runs a search beside others."""
    name = f"{search.experiment}, {search.row}, search"
    return Job(name, command_of_search(search, out), out / search.key / OUTPUT)


@contextmanager
def alone_with(
    experiment: Experiment, wanted: Sequence[Search], changes: Sequence[str], out: Path
) -> Iterator[list[Search]]:
    """Keeps other processes from the same searches meanwhile. It waits for those that carry out one now.

    Two processes that took turns at the trials of one search would refuse each other's, and count them as failed.

    Args:
        wanted: of this experiment.
        changes: overrides that the searches are started with, beside those of their rows.
        out: the folder of the trainings, which the processes share. It is made if it is not there.

    Yields:
        Those of `wanted` that no other process has recorded by then.
    """
    with ExitStack() as held:
        out.mkdir(parents=True, exist_ok=True)
        for one in sorted(wanted, key=lambda one: one.key):  # in one order, so that no two wait for each other

            def wait(row: str = one.row) -> None:
                print(f"{row}: another process carries out this search; waiting for it.", flush=True)

            held.enter_context(alone(out / f".{one.key}.lock", wait))
        now = read_experiment(experiment.name)
        yield [one for one in wanted if now.chosen(now.rows[one.row], changes) is None]


def tuned(search: Search, changes: Sequence[str], out: Path) -> Tuned:
    """Reads the result of a search that was carried out.

    Args:
        changes: overrides that it was started with, beside those of its row.
        out: the folder of the trainings.

    Raises:
        UserError: all trials failed, or some or all were not carried out.
    """
    folder = out / search.key
    names = {option.partition("=")[0] for option in search.options}
    trials, begun = [], []
    for run in leaves([folder]) if folder.is_dir() else ():
        options = [one for one in run.overrides if one.lstrip("+").partition("=")[0] in names]
        trials.append(Trial(options, objective(run.config, run.metrics), run.metrics.get("run/seconds")))
        begun += said_of_starts(run.folder)
    failed = [file.name.removesuffix(".failed") for file in sorted(folder.glob("*.failed"))]
    trials += [Trial([name], None, None) for name in failed]
    if not trials:
        raise UserError(
            f"{search.experiment}, {search.row}: no trial of the search was carried out: its output says why."
        )
    if len(trials) < search.trials:
        raise UserError(
            f"{search.experiment}, {search.row}: {len(trials)} of {search.trials} trials of the search are done: "
            "repeat the command to carry out the others."
        )
    best = max((one for one in trials if one.value is not None), key=lambda one: one.value or 0.0, default=None)
    if best is None:
        raise UserError(f"{search.experiment}, {search.row}: all trials of the search failed: look into {folder}.")
    typed = ["python", *command_of_search(search, out)[1:]]
    return Tuned(
        *(search.row, search.key, list(changes), best.options, trials, shlex.join(typed), *said_together(begun))
    )


def example(search: Search) -> list[str]:
    """Returns the overrides of one trial: the first value of each option."""
    found = []
    for one in OverridesParser.create().parse_overrides(list(search.options)):
        swept = one.value()
        assert isinstance(swept, ChoiceSweep)  # as Experiment.search writes them
        found.append(f"{one.key_or_group}={swept.list[0]}")
    return [*search.overrides, *found]
