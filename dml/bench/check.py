"""Runs all parts, prints their table, and keeps a GPU's figures in a file with a drawing."""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from dml.bench import kept, page, running
from dml.bench.machine import about, check_device
from dml.bench.results import Outcome, Remark
from dml.bench.sizes import CPU, GPU, Sizes
from dml.configuration.composition import CONF
from dml.errors import UserError
from dml.runs.provenance import commit


def kept_in() -> Path:
    """Returns the file for a GPU's figures: in the checkout, or in the working directory without a checkout."""
    folder = CONF.parent / "experiments" / "bench"
    return (folder if (CONF.parent / "pyproject.toml").exists() else Path()) / "gpu.json"


def check(
    gpu: bool,
    minutes: float,
    only: Sequence[str],
    out: Path | None,
    sizes: Sizes | None = None,
    parts: Mapping[str, str] = running.PARTS,
) -> bool:
    """Measures the parts, prints the results, and keeps them in a file.

    Args:
        gpu: whether a GPU is measured; else the small check runs on the CPU.
        minutes: time for all parts together.
        only: names of parts; empty: all.
        out: the JSON file; the drawing goes beside it. None: `kept_in()` for a GPU, no file for a CPU.
        sizes, parts: used in place of the usual ones.

    Returns:
        True if nothing failed.

    Raises:
        UserError: there is no GPU, or the file cannot be written or has other content.
    """
    sizes = sizes or (GPU if gpu else CPU)
    check_device(sizes.device)
    path = out or (kept_in() if gpu else None)
    if path is not None:
        _check_place(path)
    machine = about(sizes.device)
    page.print_machine(machine)
    stamp = {"date": datetime.now(UTC).date().isoformat(), "commit": commit(), **machine}
    outcomes: dict[str, Outcome] = {}
    names = [name for name in parts if not only or name in only]
    for name, outcome in running.carry_out(names, sizes, 60 * minutes, parts):
        outcomes[name] = outcome
        if path is not None and not kept.keep(path, name, outcome, stamp, list(parts)):
            outcome.add(Remark("kept", f"{path.name} keeps the figures that it had for this part."))
    page.print_table(outcomes)
    if path is not None:
        written = [path, *page.draw(kept.read(path), path.with_suffix(".png"))]
        print(f"Kept: {', '.join(map(str, written))}")
    return not any(outcome.failed for outcome in outcomes.values())


def _check_place(path: Path) -> None:
    """Raises UserError if the file cannot be used, before anything is measured in vain."""
    if path.suffix != ".json":
        raise UserError(f"-o {path} has to end in .json: the drawing gets the same name with .png.")
    if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"{path.parent} is no folder that can be written to: name another file with -o.")
    kept.read(path)
