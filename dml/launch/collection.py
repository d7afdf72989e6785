"""Protocols of several trainings: all are trained one after another, each in its own folder, and then summarised."""

import json
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from dml.analysis.mlrc import write_aggregate
from dml.configuration.composition import going_on, output_dir
from dml.configuration.options import check
from dml.configuration.trainings import left_open, trainings_of
from dml.errors import INTERRUPTED, MISTAKE, Interrupted, UserError, enough_memory
from dml.files import write_atomically
from dml.launch.job import job
from dml.reporting.summary import write_summary
from dml.runs.collecting import leaves, mean_and_std
from dml.runs.folder import RunFolder
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
    parts = trainings_of(config)
    if not folder.path.exists() or not all((folder.path / name / "metrics.json").exists() for name in parts):
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
    folder.name(whole, overrides)
    if not all((folder.path / name / "metrics.json").exists() for name in parts):
        folder.note_start(whole, overrides)
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
    runs = [run for run in leaves([folder.path]) if run.folder.name in parts]
    metrics = mean_and_std([run.metrics for run in runs]) | {"run/trainings": len(runs)}
    print()
    folders = [run.folder for run in runs]  # and no other trainings, of a time when there were more repetitions
    write_summary(folders, folder.path)
    if any(axis.collected for axis in left_open(config)):
        metrics |= write_aggregate(folders, folder.path)
    write_atomically(folder.path / "metrics.json", json.dumps(metrics, indent=1) + "\n")
    return metrics


@enough_memory()
def _try_one(config: DictConfig) -> None:
    """Prepares the first training without starting it. Raises UserError for any mistake that this finds."""
    one = config.copy()
    one.merge_with(OmegaConf.from_dotlist(next(iter(trainings_of(config).values()))))
    prepare_run(one, RunFolder(Path(one.paths.output_dir)))
