"""Carries out one run, from its folder to its report: training, evaluation and resuming."""

import logging
import shlex
import sys
import warnings
from collections.abc import Sequence

import pytorch_lightning as pl
from omegaconf import DictConfig
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from dml.configuration.components import instantiate
from dml.configuration.composition import going_on
from dml.distributed import is_first
from dml.errors import UserError, causes, enough_memory, no_permission, no_room
from dml.files import load_checkpoint
from dml.models.backbones.stem import Stem
from dml.process import keep_freed_memory, no_more, started_from_here
from dml.reporting.table import print_table
from dml.runs.folder import RunFolder
from dml.runs.log import logged
from dml.runs.scores import QUERIES
from dml.runs.starts import note_start
from dml.training.build import Parts, build
from dml.training.callbacks.gradient import check_batches
from dml.training.callbacks.order import callbacks_of
from dml.training.loggers import FolderLogger, check_wandb, shareable
from dml.training.trainer import refused, trainer_of

log = logging.getLogger("dml")

# Hides Lightning's lists of devices, tips and advertisements.
logging.getLogger("pytorch_lightning.utilities.rank_zero").setLevel(logging.WARNING)


@enough_memory()
def run(config: DictConfig, overrides: Sequence[str]) -> dict[str, float]:
    """Trains, evaluates and reports.

    A killed run of the same configuration is continued from its last checkpoint, and a shorter one from its end.

    Args:
        config: composed.
        overrides: of the command line, kept in the folder.

    Returns:
        The content of `metrics.json` on rank 0, and nothing on the other ranks.

    Raises:
        UserError: the configuration or the data has a mistake, which is found before anything is written; or the loss
            became NaN or infinite, or has no gradient.
    """
    folder = RunFolder.of(config, overrides)
    folder.check(config)
    if folder.finished(config):
        return _finished(folder, config)
    parts, trainer = prepare_run(config, folder)
    with folder.locked():
        if is_first():  # another process may have finished this run in the meantime
            folder.check(config)
            if folder.finished(config):
                return _finished(folder, config)
        with logged(folder.path):
            folder.open(config, overrides)
            _train(config, overrides, folder, parts, trainer)
    return _close(folder) if trainer.is_global_zero else {}


def _train(config: DictConfig, overrides: Sequence[str], folder: RunFolder, parts: Parts, trainer: pl.Trainer) -> None:
    """Trains, and writes the cause of a failure into the log. Raises it; a mistake or a full disk as UserError."""
    try:
        note_start(folder, config, overrides, trainer.world_size, parts.method.source)
        fit(config, folder, parts, trainer)
        if trainer.is_global_zero and not load_checkpoint(folder.last)["finished"]:
            raise RuntimeError(f"the training ended at step {trainer.global_step} of {config.trainer.max_steps}")
    except BaseException as error:
        go_on = f"continue with the same options and {going_on(folder.path)}"
        if no_room(error) and not isinstance(error, UserError):  # there may be no room for a line in run.log either
            raise UserError(f"There is no room left in {folder.path}: free some, then {go_on}.") from error
        log.error("%s: %s", type(error).__name__, error)
        if (file := no_permission(error)) is not None:
            raise UserError(f"{file} cannot be read or written: correct its permissions, then {go_on}.") from error
        if not isinstance(error, UserError) and trainer.is_global_zero:
            print(f"\nStopped: {go_on}.", file=sys.stderr)
        if isinstance(error.__context__, KeyboardInterrupt):  # Lightning would exit with 1
            raise KeyboardInterrupt from None
        raise


def prepare_run(config: DictConfig, folder: RunFolder) -> tuple[Parts, pl.Trainer]:
    """Builds all that a run needs, before anything is written. Raises UserError for mistakes in options or data."""
    check_wandb(config)
    parts = build(config)
    check_batches(config, parts.method, parts.data)
    trainer = trainer_of(config, parts.method, callbacks_of(config, folder, parts))
    parts.data.check_room(trainer.strategy.root_device)
    return parts, trainer


def fit(config: DictConfig, folder: RunFolder, parts: Parts, trainer: pl.Trainer) -> None:
    """Trains from the last checkpoint on, with all loggers. Raises UserError if Lightning refuses an option."""
    code = 1
    try:
        trainer.loggers = [FolderLogger(folder.path), *_asked_for(config)]
        for logger in trainer.loggers:
            logger.log_hyperparams(shareable(config))
        # The ranks that Lightning starts compose the configuration again: their own time would give another folder.
        with started_from_here(DML_OUTPUT_DIR=str(folder.path)), warnings.catch_warnings():
            # Frozen batch norm is in eval mode on purpose.
            warnings.filterwarnings("ignore", ".*in eval mode at the start of training")
            # How many there are was decided by `DataModule`.
            warnings.filterwarnings("ignore", ".*does not have many workers")
            device = trainer.strategy.root_device
            if device.type == "cpu" and config.trainer.micro_batch is None:
                keep_freed_memory()
            parts.method.to(device)  # averages of its weights are made on the device where the weights are
            if parts.data.features is not None:
                stem = Stem.of(parts.method.normalize, parts.method.openings())
                parts.data.store_features(stem, device, trainer.precision_plugin.val_step_context)
            trainer.fit(parts.method, datamodule=parts.data, ckpt_path=folder.checkpoint(), weights_only=True)
        code = 0
    except MisconfigurationException as error:
        raise refused(error) from error
    except BaseException as error:
        if any(isinstance(one, KeyboardInterrupt) for one in causes(error)):
            no_more()  # what started this run may have got no Ctrl-C itself, and sends SIGTERM
        raise
    finally:
        _finish_loggers(code)


def _asked_for(config: DictConfig) -> list[Logger]:
    return [instantiate(one) for one in config.logger.values()]


def _finish_loggers(code: int) -> None:
    """Ends W&B's run, as failed unless the exit code is 0; otherwise the next run of this process would continue it."""
    if "wandb" in sys.modules:
        sys.modules["wandb"].finish(code)


def _finished(folder: RunFolder, config: DictConfig) -> dict[str, float]:
    if not is_first():
        return {}
    print(f"{folder.path} already holds this run, and it is finished: nothing was trained.")
    if config.report and not (folder.path / "report.html").exists():
        print("It has no report.html, which report=true would have made in the training.")
    return _close(folder)


def _close(folder: RunFolder) -> dict[str, float]:
    metrics = folder.metrics()
    print_table(metrics)
    report = folder.path / "report.html"
    print(f"Report: {report}" if report.exists() else f"Run: {folder.path}")
    if (folder.path / QUERIES).exists():
        print(f"Compare it: python -m dml.compare ANOTHER_RUN {shlex.quote(str(folder.path))}")
    return metrics
