"""What the subcommands of `python -m dml.experiment` check of their own options."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from dml.errors import UserError
from dml.papers.experiment import Experiment


def check_changes(changes: Sequence[str]) -> None:
    """Raises UserError for a change that is none, or that has an option of its own: the seed and paths."""
    for change in changes:
        if "=" not in change and not change.startswith("~"):
            raise UserError(f"--set {change} is not possible: write OPTION=VALUE.")
        with suppress(HydraException):  # what cannot be read is told once it is composed with a row
            if OverridesParser.create().parse_override(change).is_sweep_override():
                raise UserError(f"--set {change} has several values: give one, and repeat the command for the others.")
        name = change.lstrip("+~").partition("=")[0]
        own = {
            "seed": "--seeds",
            "paths": "--out, or DML_DATA and DML_CACHE in the environment,",
            "hydra": "--launcher, --jobs and --out",
        }
        if (use := own.get(re.split("[./@]", name)[0])) is not None:
            raise UserError(f"--set {change} is not possible: use {use} instead.")


def check_searched(experiments: Sequence[Experiment], rows: Sequence[str], changes: Sequence[str]) -> None:
    """Raises UserError for a change of an option that is searched for, since what the search finds would replace it."""
    for one in experiments:
        for row in one.rows.values():
            for change in changes if not rows or row.name in rows else ():
                if (name := change.lstrip("+~").partition("=")[0]) in one.searched(row):
                    raise UserError(
                        f"--set {change} is not possible: {name} is searched for ({one.name}, {row.name}), and the row "
                        "takes what the search finds. Leave it out, or name other rows."
                    )


def check_folder(out: Path, writes: bool = False) -> None:
    """Raises UserError if `out` cannot be the folder of trainings; with `writes` also if it cannot be written."""
    nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not nearest.is_dir() or (writes and not os.access(nearest, os.W_OK | os.X_OK)):
        said = "cannot be written" if nearest.is_dir() else "is no folder"
        raise UserError(f"--out {out} is not possible, as {nearest} {said}: name another folder.")
