"""The logs of a run in its folder: writing and reading them."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dml.configuration.composition import elsewhere
from dml.distributed import is_first
from dml.errors import UserError
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
            f"folder {elsewhere()}."
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
