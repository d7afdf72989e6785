"""Where `conf/` lies, how a configuration is composed of it, and which options say how a run is carried out."""

from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

_PACKAGE = Path(__file__).resolve().parents[1]

# Inside the wheel, or beside the package in a checkout.
CONF = next(folder / "conf" for folder in (_PACKAGE, _PACKAGE.parent) if (folder / "conf").is_dir())


def composed(*overrides: str) -> DictConfig:
    """The configuration that `python -m dml.run OVERRIDES` would run."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


# How and where a run is carried out, not what it computes: these may change when it is resumed.
EXECUTION = (
    "paths.",
    "logger",
    "report",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.strategy",
    "trainer.sync_batchnorm",  # several devices ask for it, or for frozen statistics
    "trainer.num_workers",
    "trainer.micro_batch",  # the same gradient in other pieces
    "dataset.cache",
    "download",
    "trainer.log_every",
    "trainer.checkpoint_every",
)
