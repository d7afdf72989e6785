"""The two sides of a comparison: which runs a folder or a pattern of folders stands for."""

import shlex
from glob import escape, glob
from pathlib import Path

from dml.errors import UserError
from dml.runs.collecting import Group, copies, groups, leaves
from dml.runs.scores import QUERIES


def runs_of(place: Path) -> list[Path]:
    """Returns the run in a folder, or the finished runs below it or below the folders that a pattern matches, such as
    `runs/sweep/*method=abe*`. They have to be repetitions of one configuration.

    Raises:
        UserError: the runs have several configurations, or one of them is there twice.
    """
    if (place / QUERIES).exists():
        return [place]
    found = leaves([place] if place.is_dir() else matched(place))
    several = groups(found) if found else []
    if len(several) > 1:
        raise UserError(
            f"{place} holds runs of {len(several)} configurations ({several[0].label}; {several[1].label}): name the "
            f"folder of one, or a pattern that folders of one match, {_pattern_of(place, several[0])}."
        )
    for copy, first in (pair for group in several for pair in copies(group).items()):
        raise UserError(
            f"{first} and {copy} are the same training, which would count twice: move one of them elsewhere."
        )
    return [run.folder for run in found] or [place]


def _pattern_of(place: Path, group: Group) -> str:
    """Proposes a pattern, in quotes, that the folders of a group match and no other below a place."""
    options = "*".join(map(escape, group.label.split(" ")))
    for one in (f"*{options}", f"{options},*", f"*{options},*", f"*{options}*"):
        pattern = Path(escape(str(place))) / one
        if [run.folder for run in leaves(matched(pattern))] == [run.folder for run in group.runs]:
            return f"such as {shlex.quote(str(pattern))}"
    return "in quotes"


def matched(pattern: Path) -> list[Path]:
    """Returns the folders that a pattern with `*`, `?` or `[...]` matches, in the order of their names. The folders
    above that exist as they are written are no part of the pattern."""
    above = next((folder for folder in pattern.parents if folder.is_dir()), Path())
    found = glob(str(Path(escape(str(above))) / pattern.relative_to(above)))
    return sorted(Path(one) for one in found if Path(one).is_dir())
