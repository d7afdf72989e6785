"""Opens the data set of a configuration."""

from omegaconf import DictConfig

from dml.configuration.components import instantiate, without
from dml.data.records import Records


def open_dataset(config: DictConfig) -> Records:
    """Returns the records of the configured data set. Raises UserError if files are missing or damaged."""
    # The cache is no option of a single data set: dml.training.build makes it.
    return instantiate(without(config.dataset, ["cache"]))
