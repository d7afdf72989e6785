"""The logs of a run in its folder: writing and reading them."""

import csv
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from dml.distributed import is_first
from dml.errors import UserError
from dml.files import write_atomically
from dml.runs.reading import is_logged

log = logging.getLogger("dml")


@contextmanager
def logged(folder: Path) -> Iterator[None]:
    """Also writes log records and warnings to the folder's `run.log` meanwhile; of other ranks only why they failed.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        # A file's name may hold bytes that are not UTF-8.
        handler = logging.FileHandler(folder / "run.log", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(
            f"{folder / 'run.log'} cannot be written ({error.strerror}): correct its permissions, or choose another "
            "folder with paths.output_dir=FOLDER."
        ) from error
    handler.setLevel(logging.NOTSET if is_first() else logging.ERROR)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("dml", "pytorch_lightning", "py.warnings")]
    loggers[0].setLevel(logging.INFO)
    logging.captureWarnings(True)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()


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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a `metrics.jsonl`. Lines that a kill or a crash of the machine cut short are left out.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line break is incomplete
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from error
    return [record for line in lines if (record := _record(line)) is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    numbers = isinstance(record, dict) and all(map(is_logged, record.values()))
    return record if numbers and isinstance(record.get("step"), int) else None
