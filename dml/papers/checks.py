"""What the subcommands of `python -m dml.experiment` check before they start anything."""

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from tqdm import tqdm

from dml.errors import UserError
from dml.papers.experiment import Experiment, Search, Training
from dml.papers.trainings import checked, lacking
from dml.papers.tuning import example


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


def check_options(wanted: Sequence[Search | Training]) -> None:
    """Checks whether the options of searches and trainings compose and are allowed; scripts have none.

    Of those that choose the same components, which take the same options, one is checked: composing takes a third of a
    second, and there are hundreds of rows.

    Raises:
        UserError: an option does not fit a row.
    """
    distinct: dict[frozenset[str], tuple[str, Sequence[str]]] = {}
    for one in wanted:
        if isinstance(one, Search) or not one.script:
            options = example(one) if isinstance(one, Search) else one.overrides
            chosen = frozenset(o for o in options if o.startswith(("+", "~")) or "." not in o.partition("=")[0])
            distinct.setdefault(chosen, (f"{one.experiment}, {one.row}", options))
    for place, options in tqdm(distinct.values(), desc="checking", leave=False, disable=None):
        checked(place, options)


def possible(trainings: Sequence[Training], elsewhere: bool = False) -> list[Training]:
    """Returns the trainings that lack nothing, and prints what the others lack, see `lacking`. UserError if none is
    left."""
    missing = lacking([one for one in trainings if not one.script], elsewhere)
    for sentence, (first, *more) in missing.items():
        others = f" and {len(more)} more" if more else ""
        print(f"Cannot be trained ({first.experiment}, {first.row}, {first.part}{others}): {sentence}", file=sys.stderr)
    gone = {one.overrides for some in missing.values() for one in some}
    possible = [one for one in trainings if one.overrides not in gone]
    if not possible:
        raise UserError("nothing of this can be trained here, see above: --dry-run prints the commands.")
    return possible
