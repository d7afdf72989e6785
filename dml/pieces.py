"""Which trainings a protocol consists of."""

from omegaconf import DictConfig


def pieces(config: DictConfig) -> dict[str, str]:
    """Folder and override of each training where the configuration leaves open which is meant; else nothing."""
    if "split" in config.protocol and config.protocol.split is None:
        return {f"split_{i}": f"protocol.split={i}" for i in range(config.protocol.splits)}
    return {}
