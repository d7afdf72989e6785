"""The data set of a configuration."""

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from dml.configuration.components import instantiate
from dml.data.records import Records
from dml.errors import UserError


def open_dataset(config: DictConfig) -> Records:
    """The records of the configured data set. Raises UserError for what is missing or damaged."""
    options = config.dataset.copy()
    OmegaConf.set_struct(options, False)
    options.pop("cache")  # of all data sets: see _caches
    try:
        return instantiate(options)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno:
            raise UserError(f"{cause.filename or 'the data'} cannot be read ({cause.strerror}): mend that, or name "
                            "another place with dataset.root.") from error  # fmt: skip
        raise
