"""The loggers of a run: its folder always, and W&B or TensorBoard if the configuration asks for them."""

import csv
import hashlib
import io
import json
import logging
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from pytorch_lightning.loggers import TensorBoardLogger, WandbLogger
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from tabulate import tabulate

from dml.configuration.identity import configuration, flat, label
from dml.configuration.places import holds_path, without_secrets
from dml.configuration.trainings import axes_of
from dml.errors import UserError
from dml.evaluation.metric import HEADLINE
from dml.files import LAST, write_atomically
from dml.process import SWEPT
from dml.reporting.report import Table
from dml.runs.folder import RunFolder
from dml.runs.log import read_metrics
from dml.runs.scores import EMBEDDINGS, QUERIES

log = logging.getLogger("dml")

MOST_LINES = 500  # lines of a table that TensorBoard shows as text

SECONDS = 30  # to wait for W&B to begin and to end; what is not sent by then stays in the folder, for wandb sync
SECONDS_OF_FILES = 1800  # to wait for the end if checkpoints have to be sent


class FolderLogger(Logger):
    """A logger of Lightning's that writes `metrics.jsonl`, one line for each record, and `metrics.csv`, the same as a
    table.

    Lightning's CSVLogger was passed over: when a run is resumed, it empties the file.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "metrics.jsonl"

    @property
    def name(self) -> str:
        return "folder"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing, since the folder has its config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step} | metrics) + "\n")

    @rank_zero_only
    def forget_after(self, step: int, training_alone: bool = False) -> None:
        """Drops what a killed run logged after its last checkpoint, since the resumed run logs it again. Damaged lines
        are dropped too.

        Args:
            step: of the last checkpoint.
            training_alone: of that step itself, keep only what the training logged.
        """

        def stays(record: dict[str, Any]) -> bool:
            of_training = any(name.startswith("train/") for name in record)
            return record["step"] < step or (record["step"] == step and (of_training or not training_alone))

        if self.path.exists():
            records = read_metrics(self.path)
            if (lost := self.path.read_bytes().count(b"\n") - len(records)) > 0:
                log.warning("%d lines of %s are damaged and were left out.", lost, self.path)
            write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in records if stays(record)))

    @rank_zero_only
    def save(self) -> None:
        """Writes `metrics.csv` anew from `metrics.jsonl`."""
        records = read_metrics(self.path) if self.path.exists() else []  # Lightning calls this too, at any time
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, list(dict.fromkeys(name for record in records for name in record)))
        writer.writeheader()
        writer.writerows(records)
        write_atomically(self.path.parent / "metrics.csv", table.getvalue())


def wandb_logger(folder: str, project: str, group: str | None = None, artifacts: bool = False) -> WandbLogger:
    """Makes the logger of a W&B run, whose id is kept in the run's folder, so that a resumed run continues it.

    `WANDB_MODE` says whether the run is online. Without it, the run is online if there is a key and the service
    answers. Job type and tags come from the run's configuration, and so does the group if none is given: runs that are
    repetitions of one another have the same group.

    Args:
        folder: of the run, with its `config.yaml`.
        project: W&B project that the run belongs to.
        group: W&B group; None: made from the configuration.
        artifacts: whether files are sent at the end, see `log_artifacts`.
    """
    import wandb

    first = getattr(rank_zero_only, "rank", 0) == 0
    os.environ.setdefault("WANDB_DATA_DIR", str(Path(folder).absolute()))  # else W&B stages tables in the home folder
    id_file = Path(folder) / "wandb_id"
    if first and not id_file.exists():
        of_agent = os.environ.get("WANDB_RUN_ID") if "WANDB_SWEEP_ID" in os.environ else None
        write_atomically(id_file, of_agent or secrets.token_hex(4))
    mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
    # Only the first process sends them; others need not find the configuration, which it may not have written yet.
    options = _names(Path(folder)) | ({"group": group} if group else {}) if first else {}

    def logger(mode: str) -> WandbLogger:
        return WandbLogger(
            name=Path(folder).name,
            save_dir=folder,
            id=id_file.read_text().strip() if first else None,
            project=project,
            # Not Lightning's offline=True: it permanently sets an environment variable, to a value that W&B dropped.
            mode=mode,
            resume="allow" if mode == "online" else None,
            # Nothing about the machine, its user or the terminal is sent.
            settings=wandb.Settings(
                console="off",
                x_disable_meta=True,
                host="",
                init_timeout=SECONDS,
                finish_timeout=SECONDS_OF_FILES if artifacts else SECONDS,
            ),
            **options,
        )

    if mode != "online" or not first:
        return logger(mode)
    online = logger(mode)
    try:
        online.experiment  # noqa: B018  starts it
    except wandb.errors.Error as error:
        log.warning("W&B does not answer (%s): the run is logged offline in %s, for wandb sync.", _line(error), folder)
        wandb.teardown()  # it would keep the id in use
        return logger("offline")
    return online


def check_wandb(config: DictConfig) -> None:
    """Raises UserError for settings that W&B refuses. It would do so only when the run's folder has been made."""
    for name, one in config.logger.items():
        if one.get("_target_") != f"{wandb_logger.__module__}.{wandb_logger.__name__}":
            continue
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        try:
            wandb.Settings(mode=mode)
        except ValueError as error:
            raise UserError(f"WANDB_MODE={mode} is no mode of W&B: unset it, or choose offline or disabled.") from error
        try:
            wandb.Settings(project=one.project)
        except wandb.errors.UsageError as error:
            raise UserError(f"logger.{name}.project={one.project} is not possible: {_line(error)}.") from error


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _names(folder: Path) -> dict[str, Any]:
    """Returns the group, job type and tags of a run."""
    config = RunFolder(folder).config()
    assert config is not None
    method, dataset, protocol = label(config)
    numbers = " ".join(f"{axis.name} {config.protocol[axis.name]}" for axis in axes_of(config.protocol))
    alike = hashlib.sha256(configuration(config).encode()).hexdigest()[:8]
    sweep = [folder.absolute().parent.name] if SWEPT in os.environ else []
    return {
        "group": f"{method}-{dataset}-{alike}",
        "job_type": numbers or f"seed {config.seed}",
        "tags": [tag[:64] for tag in (method, dataset, protocol, *sweep) if tag],
    }


def shareable(config: DictConfig) -> dict[str, Any]:
    """Returns the options that decide what a run computes, as names with slashes -> resolved values, to be shared.

    Where and how it ran is left out. Of the path of a file (see `holds_path`) only the name is kept, and of an address
    neither the user nor the query.
    """

    def clean(option: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [clean(option, one) for one in value]
        if not isinstance(value, str):
            return value
        if holds_path(option, value):
            return f".../{Path(value).name}"
        return without_secrets(value) if "://" in value else value

    options = flat(config, config.runtime) | {f"runtime.{name}": value for name, value in config.runtime.items()}
    return {name.replace(".", "/"): clean(name.rpartition(".")[2], value) for name, value in options.items()}


@rank_zero_only
def forget_after(loggers: list[Logger], step: int, training_alone: bool = False) -> None:
    """Drops from a run's folder what was logged after a step, see `FolderLogger.forget_after`, and from TensorBoard.

    TensorBoard's files only grow. A start with a step makes it leave out what earlier starts logged from there on; it
    keeps all of the step itself.
    """
    for logger in loggers:
        if isinstance(logger, FolderLogger):
            logger.forget_after(step, training_alone)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.close()
            logger.experiment.purge_step = step + 1


@rank_zero_only
def log_outcome(loggers: list[Logger], config: DictConfig, metrics: dict[str, float]) -> None:
    """Logs the content of `metrics.json` as the summary of a W&B run, and a table of the learners' metrics. TensorBoard
    gets the test's metrics beside the options, for its page of hyper-parameters."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            tested = {name: value for name, value in metrics.items() if re.fullmatch("test/[^/]+", name)}
            logger.log_hyperparams(shareable(config), tested, step=int(metrics["run/steps"]))
        if isinstance(logger, WandbLogger):
            logger.experiment.summary.update(metrics)
            learners = [name.split("/")[1] for name in metrics if re.fullmatch(rf"learners/\d+/{HEADLINE}", name)]
            names = [name.removeprefix("learners/0/") for name in metrics if name.startswith("learners/0/")]
            rows = [[int(i), *(metrics[f"learners/{i}/{name}"] for name in names)] for i in learners]
            logger.log_table("learner_metrics", columns=["learner", *names], data=rows)


@rank_zero_only
def log_tables(loggers: list[Logger], tables: Mapping[str, Table], step: int) -> None:
    """Logs the tables of the run page, as tables of W&B and as text of TensorBoard.

    In W&B their names begin with `report_`, so that none is that of a picture.
    """
    for logger in loggers:
        for name, table in tables.items():
            if isinstance(logger, WandbLogger):
                rows = [list(row) for row in table.rows]
                logger.log_table(f"report_{name}", columns=list(table.columns), data=rows)
            elif isinstance(logger, TensorBoardLogger):
                text = _as_text(table)
                # Names of classes may be no text, which TensorBoard refuses.
                logger.experiment.add_text(f"report/{name}", text.encode("utf-8", "backslashreplace").decode(), step)


def _as_text(table: Table) -> str:
    """Writes the first lines of a table as Markdown."""
    rows = [
        [(f"{cell:.4f}" if isinstance(cell, float) else str(cell)).replace("|", "\\|") for cell in row]
        for row in (table.columns, *table.rows[:MOST_LINES])
    ]
    return tabulate(rows[1:], headers=rows[0], tablefmt="github", disable_numparse=True)


@rank_zero_only
def log_artifacts(loggers: list[Logger], folder: Path, tables: Mapping[str, Table]) -> None:
    """Sends the files of a finished run to W&B as two artifacts.

    `checkpoints-<run id>`, of type `model`, has `last.ckpt`, the best checkpoint and `config.yaml`. `test-<run id>`, of
    type `test`, has the ranks of each query (`queries.npz`), the embeddings if they were kept, `metrics.json` and the
    tables of the run page.

    Args:
        loggers: of the run; only W&B's are used.
        folder: of the run.
        tables: name -> table; empty if the run has no page.
    """
    import wandb

    for logger in loggers:
        if isinstance(logger, WandbLogger):
            run = logger.experiment
            kept = wandb.Artifact(f"checkpoints-{run.id}", "model", metadata={"folder": folder.name})
            checkpoints = folder / "checkpoints"
            for file in (*sorted(checkpoints.glob("best_on_*.ckpt")), checkpoints / LAST):
                kept.add_file(str(file))
            kept.add_file(str(folder / "config.yaml"))
            tested = wandb.Artifact(f"test-{run.id}", "test", metadata={"folder": folder.name})
            for file in (folder / name for name in (QUERIES, EMBEDDINGS, "metrics.json")):
                if file.exists():
                    tested.add_file(str(file))
            for name, table in tables.items():
                tested.add(wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows]), name)
            for artifact in (kept, tested):
                run.log_artifact(artifact)


@rank_zero_only
def log_plots(loggers: list[Logger], pictures: dict[str, Path], step: int) -> None:
    """Logs PNG files (name -> path) to W&B and TensorBoard, which can show pictures."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            for name, path in pictures.items():
                logger.log_image(key=name, images=[str(path)])
        elif isinstance(logger, TensorBoardLogger):
            import numpy as np

            from dml.data.images import decode

            for name, path in pictures.items():
                pixels = np.asarray(decode(str(path)))
                logger.experiment.add_image(name, pixels, step, dataformats="HWC")
