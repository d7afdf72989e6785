"""Reading of files that runs wrote. Nothing is trusted: any file may have been damaged or replaced since."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dml.errors import UserError

LARGEST = 1e30  # for larger figures, statistics and pictures would leave the range of floats


@contextmanager
def reading(path: Path, remedy: str) -> Iterator[None]:
    """Turns any error that a missing, damaged or foreign file causes meanwhile into a UserError.

    Args:
        path: of the file.
        remedy: what the user can do, as the end of the sentence.
    """
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"there is no {error.filename or path}: {remedy}.") from error
    except Exception as error:  # raised by NumPy, zipfile, torch, yaml, json, or the code that uses what they return
        said = (str(error).strip().splitlines() or [""])[0].rstrip(".:")[:200]
        if "pickle" in said:  # NumPy and torch advise to allow pickles, which would run code of the file
            said = "it holds Python objects"
        raise UserError(f"{path} is damaged, or none of a run ({said or type(error).__name__}): {remedy}.") from error


def read_metrics_json(path: Path) -> dict[str, float]:
    """Reads a `metrics.json`. Raises UserError unless it holds finite numbers by name."""
    with reading(path, "repeat the run, or leave its folder out"):
        found = json.loads(path.read_text())
        require(isinstance(found, dict), "it holds no figures by name")
        for name, value in found.items():
            require(is_metric(value), f"{name} is {str(value)[:40]}")
    figures: dict[str, float] = found
    return figures


def is_metric(value: Any) -> bool:
    """Returns whether a value is a finite number that a metric of a run can have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_logged(value: Any) -> bool:
    """Returns whether a value is a number that a run can log, including NaN and infinity of a diverged loss."""
    return (isinstance(value, float) and not math.isfinite(value)) or is_metric(value)


def require(holds: bool, otherwise: str) -> None:
    """Raises ValueError with `otherwise` unless `holds`; within `reading` it becomes part of a UserError."""
    if not holds:
        raise ValueError(otherwise)
