"""Conversion of a Hydra sweep into a file for `wandb sweep`. W&B's agents then run its jobs, on any number of machines.

https://docs.wandb.ai/guides/sweeps/define-sweep-configuration
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from omegaconf import DictConfig

from dml.configuration.composition import CONF, search_paths
from dml.configuration.options import check
from dml.configuration.trainings import left_open, validates
from dml.errors import UserError
from dml.files import write_atomically
from dml.launch.search import on_the_test

# The folder of a job has W&B's names of sweep and run, so that agents that start at once have different folders.
PLACE = "paths.output_dir=runs/wandb_${oc.env:WANDB_SWEEP_ID}/${oc.env:WANDB_RUN_ID}"


def write_sweep(path: Path | None, project: str, entity: str | None, overrides: Sequence[str]) -> None:
    """Writes the sweep file and prints what to do with it.

    Args:
        path: of the file; None: its content is printed instead.
        project, entity: of W&B. Without an entity, W&B takes that of the key used by `wandb sweep`.
        overrides: as after `python -m dml.run -m`.

    Raises:
        UserError: as `sweep_of`; also if the file cannot be written.
    """
    text = yaml.safe_dump(sweep_of(project, entity, overrides), sort_keys=False, width=1000)
    if path is None:
        print(text, end="")
        return
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): name another file with --sweep-file.") from error
    print(f"Sweep: {path}\nStart it: wandb sweep {path}, then run on each machine the command that it prints")


def sweep_of(project: str, entity: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the content of the sweep file.

    Lists and ranges become the values of a grid. An interval becomes a range of numbers, on a logarithmic scale with
    `tag(log, ...)`. It makes the search a Bayesian one, with as many runs as `hydra.sweeper.n_trials` says. The search
    maximises the protocol's criterion: on validation classes if the protocol has some, else on the test classes.

    Args:
        project, entity, overrides: see `write_sweep`.

    Raises:
        UserError: nothing is swept, W&B cannot express a range, an option does not exist, or a job would have several
            trainings.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    swept = [one for one in parsed if one.is_sweep_override()]
    fixed = [one for one in parsed if not one.is_sweep_override() and not _of_hydra(one)]
    of_hydra = [str(one.input_line) for one in parsed if _of_hydra(one)]
    places = search_paths(of_hydra)
    given = {one.get_key_element().lstrip("+~") for one in parsed}
    with initialize_config_dir(str(CONF), version_base="1.3"):
        texts = [str(one.input_line) for one in fixed]
        own: Any = compose("config", [*texts, *of_hydra], return_hydra_config=True).hydra.sweeper
    overlaid = [f"{name}={value}" for name, value in (own.get("params") or {}).items() if name not in given]
    swept += OverridesParser.create().parse_overrides(overlaid)
    if not swept:
        raise UserError(
            "nothing is swept: give an option several values, such as method.M=1,2,4, or name an overlay, such as "
            "sweep=M."
        )
    parameters = {one.get_key_element(): _parameter(one) for one in swept}
    logged = [] if "logger" in given else ["logger=wandb"]
    logged += [] if "logger.wandb.project" in given else [f"logger.wandb.project={project}"]
    first = [f"{name}={_first(values)}" for name, values in parameters.items()]
    config = _checked([*places, *texts, *logged, *first])
    searched = any("values" not in one for one in parameters.values()) or "optuna" in str(own.get("_target_")).lower()
    metric = f"{'best_on_validation' if validates(config.protocol) else 'test'}/{config.protocol.criterion}"
    if searched and (said := on_the_test(config)):
        print(said, file=sys.stderr)
    cap = own.get("n_trials") if searched else None
    words = [*places, *texts, *logged, PLACE]
    return (
        {"project": project}
        | ({"entity": entity} if entity else {})
        | {"method": "bayes" if searched else "grid", "metric": {"name": metric, "goal": "maximize"}}
        | ({"run_cap": cap} if cap else {})
        | {"parameters": parameters}
        | {"command": ["${env}", "${interpreter}", "-m", "dml.run", *words, "${args_no_hyphens}"]}
    )


def _of_hydra(one: Override) -> bool:
    return one.is_hydra_override() or one.get_key_element().lstrip("+~").startswith("hydra.")


def _parameter(one: Override) -> dict[str, Any]:
    """Returns W&B's definition of an option that is swept."""
    if one.is_interval_sweep():
        sweep: Any = one.value()
        whole, logarithmic = isinstance(sweep.start, int), "log" in sweep.tags
        if not (whole and logarithmic):
            kind = "int_uniform" if whole else "log_uniform_values" if logarithmic else "uniform"
            return {"distribution": kind, "min": sweep.start, "max": sweep.end}
    if not one.is_discrete_sweep() or one.value_type == ValueType.GLOB_CHOICE_SWEEP:
        raise UserError(
            f"{one.input_line}: W&B has no such range; name the values, such as {one.get_key_element()}=a,b."
        )
    return {"values": [_number(text) for text in one.sweep_string_iterator()]}


def _number(text: str) -> int | float | str:
    """Returns a text as a number if it is one, so that W&B draws it so; else the text."""
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    return text


def _first(parameter: dict[str, Any]) -> Any:
    return parameter["values"][0] if "values" in parameter else parameter["min"]


def _checked(overrides: Sequence[str]) -> DictConfig:
    """Composes the configuration of the first job and checks it.

    Raises:
        UserError: an option does not exist, or the job would have several trainings.
    """
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", list(overrides))
    check(config)
    if axes := left_open(config):
        name, count = f"protocol.{axes[0].name}", config.protocol[axes[0].count]
        every = ",".join(str(i) for i in range(count))
        raise UserError(
            f"a job of W&B is one training, but {name} leaves open which of {count} it is: sweep it too, "
            f"{name}={every}."
        )
    return config
