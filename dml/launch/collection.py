"""A protocol of several trainings: each in a folder of its own, one after another, and what they come to together."""

import json
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from dml.analysis.mlrc import write_aggregate
from dml.configuration.options import check
from dml.configuration.trainings import left_open, trainings_of
from dml.errors import INTERRUPTED, MISTAKE, Interrupted, UserError
from dml.files import write_atomically
from dml.launch.job import job
from dml.process import processes
from dml.reporting.summary import write_summary
from dml.runs.collecting import leaves, mean_and_std
from dml.runs.folder import RunFolder
from dml.training.run import prepare_run


def run_all(config: DictConfig, overrides: list[str]) -> dict[str, float]:
    """Trains what is not trained yet, each in a process and a folder of its own below the run's.

    Args:
        config: composed, of a protocol that leaves open which of its trainings is meant.
        overrides: of the command line.

    Returns:
        The content of `metrics.json`: of each metric its mean over the pieces, and as `<name>/std` its standard
        deviation (with n - 1).

    Raises:
        UserError: a mistake in the configuration or the data, found before anything is written; several processes.
        SystemExit: a training that ended with an error.
    """
    if processes() > 1:
        raise UserError(
            "All trainings of this protocol cannot be started by several processes at once: start one at a time, here "
            f"with {' '.join(next(iter(trainings_of(config).values())))}, and take the table of all from "
            "python -m dml.report FOLDER."
        )
    check(config)
    folder = RunFolder.of(config, overrides)
    folder.check(config)
    parts = trainings_of(config)
    if not folder.path.exists() or not all((folder.path / name / "metrics.json").exists() for name in parts):
        _try_one(config)
    with folder.locked():
        folder.check(config)  # another process may have been at work here in the meantime
        _train_all(config, overrides, folder)
        return _put_together(config, folder)


def _train_all(config: DictConfig, overrides: list[str], folder: RunFolder) -> None:
    """Raises SystemExit where a training ends with an error, Interrupted where a signal ends it."""
    parts = trainings_of(config)
    whole = config.copy()
    whole.runtime.update(train_classes=0, embedding_dim=0)  # differ from training to training
    folder.name(whole, overrides)
    if not all((folder.path / name / "metrics.json").exists() for name in parts):
        folder.note_start(whole, overrides)
    for place, (name, options) in enumerate(parts.items(), 1):
        print(f"\n{' '.join(options)}: training {place} of {len(parts)}", flush=True)
        code = job([*overrides, *options], folder.path / name)
        if code == MISTAKE:
            raise SystemExit(MISTAKE)  # it has said what is wrong
        if code == INTERRUPTED:
            raise Interrupted(f"the training in {folder.path / name}")
        if code:
            print(
                f"dml: The training in {folder.path / name} ended with exit code {code}: what came before is kept, and "
                f"the same options with paths.output_dir={folder.path} go on.",
                file=sys.stderr,
            )
            raise SystemExit(1)


def _put_together(config: DictConfig, folder: RunFolder) -> dict[str, float]:
    """What the trainings come to, in their folder's files. Returns the content of `metrics.json`."""
    parts = trainings_of(config)
    runs = [run for run in leaves([folder.path]) if run.folder.name in parts]
    metrics = mean_and_std([run.metrics for run in runs]) | {"run/trainings": len(runs)}
    print()
    write_summary([folder.path], folder.path)
    if any(axis.collected for axis in left_open(config)):
        metrics |= write_aggregate([folder.path], folder.path)
    write_atomically(folder.path / "metrics.json", json.dumps(metrics, indent=1) + "\n")
    return metrics


def _try_one(config: DictConfig) -> None:
    """Raises UserError for a mistake that the first training would find."""
    one = config.copy()
    one.merge_with(OmegaConf.from_dotlist(next(iter(trainings_of(config).values()))))
    prepare_run(one, RunFolder(Path(one.paths.output_dir)))
