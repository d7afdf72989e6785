"""Protocols of several trainings: all are trained one after another, each in its own folder, and then summarised."""

import json
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from dml.analysis.mlrc import COLLECTED, write_aggregate
from dml.configuration.composition import going_on, output_dir
from dml.configuration.options import check
from dml.configuration.trainings import left_open, settle, trainings_of
from dml.errors import INTERRUPTED, MISTAKE, Interrupted, UserError, enough_memory
from dml.files import write_atomically
from dml.launch.job import job
from dml.reporting.summary import write_summary
from dml.runs.collecting import leaves, mean_and_std
from dml.runs.folder import LENGTH, RunFolder
from dml.runs.starts import note_start
from dml.started import processes
from dml.training.run import prepare_run


def run_all(config: DictConfig, overrides: list[str]) -> dict[str, float]:
    """Carries out all trainings of a protocol that are not done yet, each in its own process and its own folder below
    the run's, and summarises them.

    Args:
        config: the composed configuration; its protocol leaves open which of its trainings is meant.
        overrides: of the command line.

    Returns:
        The content of `metrics.json`: the mean of each metric over the trainings and, as `<name>/std`, its standard
        deviation (n - 1).

    Raises:
        UserError: there is a mistake in the configuration or the data, which is found before anything is written, or
            several processes were started.
        SystemExit: a training ended with an error.
        Interrupted: a signal ended a training.
    """
    if processes() > 1:
        raise UserError(
            "Several processes cannot start all trainings of this protocol: start one training at a time, such as "
            f"{' '.join(next(iter(trainings_of(config).values())))}, and take the table of all from "
            "python -m dml.report FOLDER."
        )
    check(config)
    folder = RunFolder.of(config, overrides)
    folder.check(config)
    if to_do := _to_do(config, folder):
        _check_parts(config, folder, to_do)
        _try_one(config)
    with folder.locked():
        folder.check(config)  # again, since another process may have written here before the lock was taken
        _train_all(config, overrides, folder)
        return _put_together(config, folder)


def _train_all(config: DictConfig, overrides: list[str], folder: RunFolder) -> None:
    """Carries out the trainings. Raises SystemExit if one ends with an error, Interrupted if a signal ends one."""
    parts = trainings_of(config)
    whole = config.copy()
    whole.runtime.update(train_classes=0, embedding_dim=0)  # they differ between trainings
    if to_do := _to_do(config, folder):
        folder.forget_results()  # of fewer or shorter trainings
        (folder.path / COLLECTED).unlink(missing_ok=True)
    folder.name(whole, overrides)
    if to_do:
        note_start(folder, whole, overrides)
    for place, (name, options) in enumerate(parts.items(), 1):
        print(f"\n{' '.join(options)}: training {place} of {len(parts)}", flush=True)
        code = job([*overrides, *options], folder.path / name, again=output_dir(folder.path))
        if code == MISTAKE:
            raise SystemExit(MISTAKE)  # the training has printed what is wrong
        if code == INTERRUPTED:
            raise Interrupted(f"the training in {folder.path / name}")
        if code:
            print(
                f"dml: The training in {folder.path / name} ended with exit code {code}: earlier trainings are kept; "
                f"to continue, repeat the same options with {going_on(folder.path)}.",
                file=sys.stderr,
            )
            raise SystemExit(1)


def _put_together(config: DictConfig, folder: RunFolder) -> dict[str, float]:
    """Summarises the trainings into the files of their folder. Returns the content of `metrics.json`."""
    parts = trainings_of(config)
    places = {folder.path / name for name in parts}
    runs = [run for run in leaves([folder.path]) if run.folder in places]
    metrics = mean_and_std([run.metrics for run in runs]) | {"run/trainings": len(runs)}
    print()
    folders = [run.folder for run in runs]  # and no other trainings, of a time when there were more repetitions
    remedy = f"put that right, then repeat the same options with {going_on(folder.path)}"
    write_summary(folders, folder.path, remedy=remedy)
    if any(axis.collected for axis in left_open(config)):
        metrics |= write_aggregate(folders, folder.path, remedy)
    try:
        write_atomically(folder.path / "metrics.json", json.dumps(metrics, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{folder.path} cannot be written ({error.strerror}): {remedy}.") from error
    return metrics


def _to_do(config: DictConfig, folder: RunFolder) -> list[str]:
    """Returns the names of the trainings that are not done: those without results, or with those of a shorter one."""
    found = []
    for name in trainings_of(config):
        part = RunFolder(folder.path / name)
        said = part.config() if (part.path / "metrics.json").exists() else None
        if said is None or OmegaConf.select(said, LENGTH) != config.trainer.max_steps:
            found.append(name)
    return found


def _check_parts(config: DictConfig, folder: RunFolder, names: list[str]) -> None:
    """Raises UserError if one of these trainings was begun and cannot be continued, before anything is written."""
    parts = trainings_of(config)
    for name in names:
        part = RunFolder(folder.path / name)
        if part.begun():
            part.check(_one(config, parts[name]))


def _one(config: DictConfig, options: list[str]) -> DictConfig:
    """Returns the configuration of one of the trainings."""
    one = config.copy()
    one.merge_with(OmegaConf.from_dotlist(options))
    settle(one)
    return one


@enough_memory()
def _try_one(config: DictConfig) -> None:
    """Prepares the first training without starting it. Raises UserError for any mistake that this finds."""
    one = _one(config, next(iter(trainings_of(config).values())))
    prepare_run(one, RunFolder(Path(one.paths.output_dir)))
