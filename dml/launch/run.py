"""The task of `python -m dml.run`: a run, a protocol of several trainings, or a job of a sweep.

Heavy imports wait until the environment variables are checked, since Lightning reads them when it is imported. The
process of a sweep does without these imports: its jobs are processes of their own.
"""

import os

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from dml.configuration.composition import search_paths
from dml.errors import UserError
from dml.launch.entry import check_overlay
from dml.launch.job import objective
from dml.launch.sweep import job_of_a_sweep
from dml.started import check_environment, processes


def task(config: DictConfig) -> float | None:
    """Carries out a run, and returns what a search over hyper-parameters maximises: see `objective`."""
    given = HydraConfig.get().overrides
    # Jobs and trainings of a protocol find the components of the same folders.
    overrides = [*given.task, *search_paths(given.hydra)]
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return job_of_a_sweep(config, overrides)
    check_overlay()
    check_environment()
    _check_folder_is_named(overrides)
    from dml.configuration.options import check
    from dml.configuration.trainings import settle, trainings_of
    from dml.launch.collection import run_all
    from dml.training.run import run

    check(config)
    settle(config)
    metrics = run_all(config, overrides) if trainings_of(config) else run(config, overrides)
    return objective(config, metrics) if metrics else None


def _check_folder_is_named(overrides: list[str]) -> None:
    """Raises UserError if several processes were started without a folder: each would name one by its starting time."""
    several = processes() > 1
    named = "DML_OUTPUT_DIR" in os.environ or any(o.startswith("paths.output_dir=") for o in overrides)
    if several and not named:
        raise UserError(
            "Several processes were started together: name their folder with paths.output_dir=FOLDER, in which a "
            "restart continues."
        )
