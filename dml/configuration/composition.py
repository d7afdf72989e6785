"""Finds `conf/`, composes a configuration from it, and lists the options that do not change what a run computes."""

import re
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig

_PACKAGE = Path(__file__).resolve().parents[1]

# Inside the wheel, or beside the package in a checkout.
CONF = next(folder / "conf" for folder in (_PACKAGE, _PACKAGE.parent) if (folder / "conf").is_dir())


def composed(*overrides: str) -> DictConfig:
    """Composes the configuration that `python -m dml.run OVERRIDES` would run."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def output_dir(folder: Path) -> str:
    """Returns the override that names the folder of a run."""
    return folder_option("output_dir", folder)


def folder_option(name: str, folder: Path) -> str:
    """Returns the override that names a folder of `paths`, such as its `sweep_dir`. The folder is quoted where Hydra
    might read it otherwise: it takes few characters bare, and takes 2026 for a number."""
    plain = re.fullmatch(r"[\w./-]*/[\w./-]*", str(folder), re.ASCII)
    return f"paths.{name}={folder if plain else QuotedString(str(folder), Quote.single).with_quotes()}"


# These options say how and where a run is executed, not what it computes: they may change when it is resumed.
EXECUTION = (
    "paths.",
    "logger",
    "report",
    "note",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.strategy",
    "trainer.sync_batchnorm",  # several devices need it, or frozen statistics
    "trainer.num_workers",
    "trainer.micro_batch",  # the gradient is the same for pieces of any size
    "dataset.cache",
    "download",
    "trainer.log_every",
    "trainer.checkpoint_every",
)
