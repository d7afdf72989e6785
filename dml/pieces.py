"""Which trainings a protocol consists of."""

from omegaconf import DictConfig

from dml.errors import whole_number


def pieces(config: DictConfig) -> dict[str, str]:
    """Folder and override of each training where the configuration leaves open which is meant; else nothing.

    Raises:
        UserError: no number of trainings.
    """
    if "split" in config.protocol and config.protocol.split is None:
        whole_number("protocol.splits", config.protocol.splits, 1)
        return {f"split_{i}": f"protocol.split={i}" for i in range(config.protocol.splits)}
    return {}
