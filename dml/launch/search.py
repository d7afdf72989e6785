"""Searches of hyper-parameters (`hydra/sweeper=optuna`): what they maximise, how they begin, what they choose on."""

import random
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, read_write

from dml.configuration.trainings import validates
from dml.errors import stop


def settle_search(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Makes a search maximise, since that is what `objective` is for; Optuna's sweeper minimises by default.

    It also gives its sampler the seed of the runs, unless one was given or a storage keeps its trials: then the same
    search, started again, draws the same values and finds the trials that are done. Does nothing for sweeps that are no
    search.

    Args:
        config: of the sweep.
        overrides: of the command line.
    """
    sweeper = config.hydra.sweeper
    if "direction" not in sweeper:
        return
    asked = any(one.lstrip("+").startswith("hydra.sweeper.direction=") for one in config.hydra.overrides.hydra)
    if asked and sweeper.direction != "maximize":
        stop("A search maximises protocol.criterion: leave hydra.sweeper.direction out.")
    ranges = [str(one.input_line) for one in overrides if one.is_range_sweep()]
    params = [f"{name}={value}" for name, value in (sweeper.get("params") or {}).items()]
    of_overlay = OverridesParser.create().parse_overrides(params)
    ranges += [text for text, one in zip(params, of_overlay, strict=True) if one.is_range_sweep()]
    if ranges:  # Optuna's sweeper takes other values, and its grid leaves some out
        stop(f"A search cannot take {ranges[0]} as a sweep does: write the values as a list, or interval(LOW,HIGH).")
    names = [one.get_key_element().lstrip("+~") for one in overrides]
    for name, one in zip(names, overrides, strict=True):
        if one.is_sweep_override() and names.count(name) > 1:  # Optuna's sweeper would not vary it, without a word
            stop(f"{name} is given twice, once as {one.input_line}: leave one of them out.")
    with read_write(config), read_write(config.hydra):
        sweeper.direction = "maximize"
        if sweeper.get("storage") is None:
            random.seed(config.seed)  # Optuna's grid sampler draws from it
            if OmegaConf.select(sweeper, "sampler.seed", default=0) is None:
                sweeper.sampler.seed = config.seed


def on_the_test(config: DictConfig) -> str:
    """Returns a line if a search of this configuration would choose by its test classes, else ""."""
    protocol: Any = config.protocol
    if validates(protocol) or str(protocol.get("_target_")).endswith(".Tuning"):
        return ""
    return (
        "dml: this search chooses on the test classes, which flatters its result: protocol=tuning holds out training "
        "classes for it.\n"
    )


FOUND = "optimization_results.yaml"  # what Optuna's sweeper leaves in the folder of a sweep


def when_found(folder: Path) -> float:
    """Returns when the results of a search in a folder were written; 0 if there are none."""
    file = folder / FOUND
    return file.stat().st_mtime if file.exists() else 0


def told_of_search(folder: Path, criterion: str, before: float) -> str:
    """Returns a line that says which options a search found; "" if it found none.

    Args:
        folder: of the sweep.
        criterion: what was maximised.
        before: `when_found` at the start of the search.
    """
    from dml.files import read_yaml  # imports torch

    if when_found(folder) == before:
        return ""
    found = read_yaml(folder / FOUND)
    options = shlex.join(f"{name}={value}" for name, value in found["best_params"].items())
    return f"Best by {criterion} ({found['best_value']:.4f}): {options}, see {folder / FOUND}\n"
