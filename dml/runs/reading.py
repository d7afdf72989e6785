"""Files that runs left, read as if anything could have become of them since."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dml.errors import UserError

LARGEST = 1e30  # no figure of a run is larger; statistics and pictures of larger ones leave the range of floats


@contextmanager
def reading(path: Path, remedy: str) -> Iterator[None]:
    """Raises UserError, with the remedy, for whatever a missing, damaged or foreign file leads its reader to."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"there is no {error.filename or path}: {remedy}.") from error
    except Exception as error:  # of NumPy, zipfile, torch, yaml, json and what works with what they gave
        said = (str(error).strip().splitlines() or [""])[0].rstrip(".:")[:200]
        if "pickle" in said:  # NumPy's and torch's advice is to run what the file holds
            said = "it holds Python objects"
        raise UserError(f"{path} is damaged, or none of a run ({said or type(error).__name__}): {remedy}.") from error


def read_metrics_json(path: Path) -> dict[str, float]:
    """The content of a `metrics.json`. Raises UserError where it is not finite numbers by name."""
    with reading(path, "repeat the run, or leave its folder out"):
        found = json.loads(path.read_text())
        require(isinstance(found, dict), "it holds no figures by name")
        for name, value in found.items():
            require(is_metric(value), f"{name} is {str(value)[:40]}")
    figures: dict[str, float] = found
    return figures


def is_metric(value: Any) -> bool:
    """Whether it is a finite number that a run can have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and _size(value) <= LARGEST


def is_logged(value: Any) -> bool:
    """Whether it is a number, as a loss that has diverged is too."""
    return (isinstance(value, float) and not math.isfinite(value)) or is_metric(value)


def _size(value: float) -> float:
    return math.inf if math.isnan(value) else abs(value)


def require(holds: bool, otherwise: str) -> None:
    """Raises ValueError, which `reading` makes a sentence of, unless it holds."""
    if not holds:
        raise ValueError(otherwise)
