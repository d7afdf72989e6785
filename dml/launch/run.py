"""What `python -m dml.run` does with a configuration: a run, a protocol of several trainings, or a job of a sweep.

Heavy imports wait until the environment is checked, which Lightning reads when it is imported; the process of a sweep,
whose jobs are processes of their own, does without them.
"""

import os

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from dml.errors import UserError
from dml.launch.job import objective
from dml.launch.sweep import job_of_a_sweep
from dml.process import check_environment, processes


def task(config: DictConfig) -> float | None:
    """What a sweep over hyperparameters maximises: see `objective`."""
    overrides = list(HydraConfig.get().overrides.task)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return job_of_a_sweep(config, overrides)
    _check_overlay(overrides)
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


def _check_overlay(overrides: list[str]) -> None:
    """Raises UserError where an overlay names what to sweep, and this is one run and no job of a sweep."""
    given = {override.partition("=")[0].lstrip("+~") for override in overrides}
    hydra_config = HydraConfig.get()
    if still := [str(name) for name in hydra_config.sweeper.get("params") or {} if name not in given]:
        overlay = dict(hydra_config.runtime.choices)["sweep"]
        raise UserError(f"sweep={overlay} is for a sweep over {', '.join(still)}: start it with -m, or leave it out.")


def _check_folder_is_named(overrides: list[str]) -> None:
    """Raises UserError where several processes would each take a folder of the minute in which they start."""
    several = processes() > 1
    named = "DML_OUTPUT_DIR" in os.environ or any(o.startswith("paths.output_dir=") for o in overrides)
    if several and not named:
        raise UserError(
            "Several processes were started together: name their folder with paths.output_dir=FOLDER, which a "
            "restart goes on in."
        )
