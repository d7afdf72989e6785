"""Finds `conf/`, composes a configuration from it, and lists the options that do not change what a run computes."""

import os
import re
import shlex
from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

_PACKAGE = Path(__file__).resolve().parents[1]

# Inside the wheel, or beside the package in a checkout.
CONF = next(folder / "conf" for folder in (_PACKAGE, _PACKAGE.parent) if (folder / "conf").is_dir())


def composed(*overrides: str) -> DictConfig:
    """Composes the configuration that `python -m dml.run OVERRIDES` would run.

    Hydra needs most of its time for the choice of files, which hundreds of configurations share: it is kept, and values
    are set in a copy, as Hydra sets them.

    Raises:
        HydraException: there is no such option or file, or an override cannot be read.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        if all(map(_is_plain, parsed)):
            config = deepcopy(_chosen(tuple(str(one.input_line) for one in parsed if _is_choice(one))))
            for value in parsed:
                if not _is_choice(value):
                    OmegaConf.update(config, value.key_or_group, value.value(), merge=True)
            return config
    except (HydraException, OmegaConfBaseException):
        pass  # Hydra says below what is wrong
    return _by_hydra(overrides)


def search_paths(overrides: Sequence[str]) -> list[str]:
    """Returns those overrides that name folders with further components, which every process of a run has to know."""
    return [one for one in overrides if one.lstrip("+").startswith("hydra.searchpath=")]


def _is_plain(override: Override) -> bool:
    """Whether this is `name=value`, for one value of an option that is not Hydra's own."""
    plain = override.type is OverrideType.CHANGE and override.package is None and not override.is_sweep_override()
    return plain and not override.is_hydra_override()


def _is_choice(override: Override) -> bool:
    """Whether this chooses a file of a group."""
    return (CONF / override.key_or_group).is_dir()


@lru_cache(maxsize=512)
def _chosen(choices: tuple[str, ...]) -> DictConfig:
    return _by_hydra(choices)


def _by_hydra(overrides: Sequence[str]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def output_dir(folder: Path) -> str:
    """Returns the override that names the folder of a run."""
    return folder_option("output_dir", folder)


AGAIN = "DML_AGAIN"  # environment variable of a run that belongs to a sweep or a protocol: see `going_on`


def going_on(folder: Path) -> str:
    """Returns, as a shell takes it, the option with which a stopped run is continued beside its other options: that of
    the sweep or protocol that started it, else the one that names its folder."""
    return shlex.quote(os.environ.get(AGAIN) or output_dir(folder))


def elsewhere() -> str:
    """Returns how another folder is named for a run, or for the sweep or protocol that it belongs to."""
    return f"with {os.environ.get(AGAIN, 'paths.output_dir=').partition('=')[0]}=FOLDER"


def folder_option(name: str, folder: Path) -> str:
    """Returns the override that names a folder of `paths`, such as its `sweep_dir`.

    The folder is quoted where Hydra might read it otherwise: it takes few characters bare, and takes 2026 for a number.
    OmegaConf takes `${` for a reference unless a backslash is before it, and ??? for a value that is missing.
    """
    plain = re.fullmatch(r"[\w./-]*/[\w./-]*", str(folder), re.ASCII)
    said = str(folder if str(folder) != "???" else folder.absolute()).replace("${", "\\${")
    return f"paths.{name}={folder if plain else QuotedString(said, Quote.single).with_quotes()}"


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
    "trainer.enable_progress_bar",
    "trainer.detect_anomaly",
    "trainer.checkpoint_every",
)
