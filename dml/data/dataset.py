"""Opens the data set of a configuration."""

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from dml.configuration.components import instantiate
from dml.data.records import Records
from dml.errors import UserError


def open_dataset(config: DictConfig) -> Records:
    """Returns the records of the configured data set. Raises UserError if files are missing or damaged."""
    options = config.dataset.copy()
    OmegaConf.set_struct(options, False)
    options.pop("cache")  # no option of a single data set: dml.training.build makes the caches
    try:
        return instantiate(options)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno:
            raise UserError(f"{cause.filename or 'the data'} cannot be read ({cause.strerror}): make it readable, or "
                            "set dataset.root to another folder.") from error  # fmt: skip
        raise
