"""Notes each start of a run in its `provenance.json`."""

from collections.abc import Sequence

from omegaconf import DictConfig

from dml.distributed import is_first
from dml.models.weights import Source
from dml.runs.folder import RunFolder
from dml.runs.provenance import add_start, hardware, numerics


def note_start(
    folder: RunFolder, config: DictConfig, overrides: Sequence[str], devices: int = 1, weights: Source | None = None
) -> None:
    """Adds this start to the provenance of a run. Only the first rank, which has locked the folder, does so.

    Args:
        folder: of the run.
        config: of this start.
        overrides: that were typed.
        devices: how many the run uses.
        weights: from which the backbone starts; None: random ones.
    """
    if is_first():
        told = [option for option in overrides if not option.startswith("paths.")]
        machine = hardware(str(config.trainer.accelerator), devices)
        more = {"numerics": numerics(config.trainer)}
        if lengths := folder.lengthening(config):
            more["lengthened"] = lengths
        more |= {} if weights is None else {"weights": weights.told()}
        add_start(folder.path, ["python", "-m", "dml.run", *told], machine, more)
