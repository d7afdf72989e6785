"""Opens the data set of a configuration."""

from omegaconf import DictConfig

from dml.configuration.components import instantiate, without
from dml.data.records import Records
from dml.errors import UserError


def open_dataset(config: DictConfig) -> Records:
    """Returns the records of the configured data set. Raises UserError if files are missing or damaged, or if its
    function returns something else."""
    # The cache is no option of a single data set: dml.training.build makes it.
    records = instantiate(without(config.dataset, ["cache"]))
    if not isinstance(records, Records):
        said = type(records).__name__
        raise UserError(f"dataset: {config.dataset._target_} returns {said}: it has to return Records.")
    return records
