"""The JSON file that keeps the newest figures of each part."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dml.bench.results import Figure, Outcome, as_json, of_json
from dml.errors import UserError
from dml.files import alone, read_json, write_atomically

Kept = dict[str, dict[str, Any]]  # by part: date, commit, hardware, versions, seconds, figures, remarks


def read(path: Path) -> Kept:
    """Reads the file; empty if there is none.

    Raises:
        UserError: it is damaged, or not a file of `dml.smoke`.
    """
    if not path.exists():
        return {}
    content = read_json(path)
    try:
        for part in content.values():
            list(figures_of(part))
            str(part["hardware"]["name"])  # the drawing names it
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not a file of figures of dml.smoke: name another file with -o.") from error
    kept: Kept = content
    return kept


def figures_of(part: Mapping[str, Any]) -> Iterator[Figure]:
    for one in part["figures"]:
        found = of_json(one)
        assert isinstance(found, Figure)
        yield found


def keep(path: Path, part: str, outcome: Outcome, about: Mapping[str, Any], order: Sequence[str]) -> bool:
    """Writes a part's outcome into the file, in place of its earlier one. Without figures it does not replace figures.

    Args:
        about: date, commit, hardware and versions.
        order: names of parts in the order that the file has.

    Returns:
        Whether it was written.
    """
    with alone(path.with_name(f".{path.name}.lock")):  # another process may keep another part
        kept = read(path)
        if not outcome.figures and kept.get(part, {}).get("figures"):
            return False
        kept[part] = {
            **about,
            "seconds": round(outcome.seconds, 1),
            "figures": [as_json(one) for one in outcome.figures],
            "remarks": [as_json(one) for one in outcome.remarks],
        }
        known = {name: kept[name] for name in order if name in kept}
        write_atomically(path, json.dumps(known | kept, indent=1) + "\n")
        return True
