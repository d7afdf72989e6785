"""All parts, their table, and for a GPU the file and the drawing that are kept."""

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
    """Where the figures of a GPU are kept: in the checkout; of a wheel, here."""
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
    """Measures, prints, keeps.

    Args:
        only: names of parts; none: all.
        out: JSON, with a drawing beside it; None: `kept_in()` for a GPU, nothing is kept for a CPU.
        sizes, parts: other ones than those of the GPU and the CPU.

    Returns:
        Whether nothing failed.

    Raises:
        UserError: no GPU; a file that cannot be written or holds something else.
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
            outcome.add(Remark("kept", f"{path.name} keeps the figures that it had of this part."))
    page.print_table(outcomes)
    if path is not None:
        written = [path, *page.draw(kept.read(path), path.with_suffix(".png"))]
        print(f"Kept: {', '.join(map(str, written))}")
    return not any(outcome.failed for outcome in outcomes.values())


def _check_place(path: Path) -> None:
    """Raises UserError before anything is measured in vain."""
    if path.suffix != ".json":
        raise UserError(f"-o {path} has to end in .json: the drawing beside it ends in .png.")
    if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"{path.parent} is no folder that can be written: name another file with -o.")
    kept.read(path)
