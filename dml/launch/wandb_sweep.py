"""A sweep of Hydra's as a file that `wandb sweep` takes: W&B's agents then run its jobs, on as many machines as wanted.

https://docs.wandb.ai/guides/sweeps/define-sweep-configuration
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from omegaconf import DictConfig

from dml.configuration.composition import CONF
from dml.configuration.options import check
from dml.configuration.trainings import axes_of, left_open
from dml.errors import UserError
from dml.evaluation.metric import HEADLINE
from dml.files import write_atomically

# Of a job: W&B's name of the sweep and of the run, so that agents that start at once have folders of their own.
PLACE = "paths.output_dir=runs/wandb_${oc.env:WANDB_SWEEP_ID}/${oc.env:WANDB_RUN_ID}"


def write_sweep(path: Path | None, project: str, entity: str | None, overrides: Sequence[str]) -> None:
    """Writes the file and prints what to do with it; without a path prints the file itself.

    Args:
        project, entity: of W&B; without an entity it is that of the key with which the file is taken.
        overrides: as after `python -m dml.run -m`.

    Raises:
        UserError: as `sweep_of`, or a file that cannot be written.
    """
    text = yaml.safe_dump(sweep_of(project, entity, overrides), sort_keys=False, width=1000)
    if path is None:
        print(text, end="")
        return
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): name another with --sweep-file.") from error
    print(f"Sweep: {path}\nStart it: wandb sweep {path}, then on each machine the line that it prints")


def sweep_of(project: str, entity: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    """The content of the file.

    Lists and ranges are values of a grid; an interval is a range of numbers, on a logarithmic scale with
    `tag(log, ...)`, and makes the search a Bayesian one, of as many runs as `hydra.sweeper.n_trials` says. It maximises
    what a search of Hydra's does: the criterion on validation classes where the protocol has some, else Recall@1 of the
    test.

    Raises:
        UserError: nothing is swept, a value that W&B has no word for, an option that is none, or several trainings in
            one job.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    swept = [one for one in parsed if one.is_sweep_override()]
    fixed = [one for one in parsed if not one.is_sweep_override() and not _of_hydra(one)]
    of_hydra = [str(one.input_line) for one in parsed if _of_hydra(one)]
    given = {one.get_key_element().lstrip("+~") for one in parsed}
    with initialize_config_dir(str(CONF), version_base="1.3"):
        texts = [str(one.input_line) for one in fixed]
        own: Any = compose("config", [*texts, *of_hydra], return_hydra_config=True).hydra.sweeper
    overlaid = [f"{name}={value}" for name, value in (own.get("params") or {}).items() if name not in given]
    swept += OverridesParser.create().parse_overrides(overlaid)
    if not swept:
        raise UserError(
            "nothing is swept: give an option several values, as method.M=1,2,4, or an overlay, as sweep=M."
        )
    parameters = {one.get_key_element(): _parameter(one) for one in swept}
    config = _checked([*texts, *(f"{name}={_first(values)}" for name, values in parameters.items())])
    validates = bool(axes_of(config.protocol)) or config.protocol.get("select") == "val_classes"
    searched = any("values" not in one for one in parameters.values()) or "optuna" in str(own.get("_target_")).lower()
    metric = f"best_on_validation/{config.protocol.criterion}" if validates else f"test/{HEADLINE}"
    logged = [] if "logger" in given else ["logger=wandb"]
    logged += [] if "logger.wandb.project" in given else [f"logger.wandb.project={project}"]
    cap = own.get("n_trials") if searched else None
    return (
        {"project": project}
        | ({"entity": entity} if entity else {})
        | {"method": "bayes" if searched else "grid", "metric": {"name": metric, "goal": "maximize"}}
        | ({"run_cap": cap} if cap else {})
        | {"parameters": parameters}
        | {"command": ["${env}", "${interpreter}", "-m", "dml.run", *texts, *logged, PLACE, "${args_no_hyphens}"]}
    )


def _of_hydra(one: Override) -> bool:
    return one.is_hydra_override() or one.get_key_element().lstrip("+~").startswith("hydra.")


def _parameter(one: Override) -> dict[str, Any]:
    """What W&B knows of an option that is swept."""
    if one.is_interval_sweep():
        sweep: Any = one.value()
        whole, logarithmic = isinstance(sweep.start, int), "log" in sweep.tags
        if not (whole and logarithmic):
            kind = "int_uniform" if whole else "log_uniform_values" if logarithmic else "uniform"
            return {"distribution": kind, "min": sweep.start, "max": sweep.end}
    if not one.is_discrete_sweep() or one.value_type == ValueType.GLOB_CHOICE_SWEEP:
        raise UserError(f"{one.input_line}: W&B has no such range; name the values, as {one.get_key_element()}=a,b.")
    return {"values": [_number(text) for text in one.sweep_string_iterator()]}


def _number(text: str) -> int | float | str:
    """The number that a text is, so that W&B draws it as one; else the text."""
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
    """The configuration of the first job. Raises UserError for an option that is none, or for several trainings."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", list(overrides))
    check(config)
    if axes := left_open(config):
        name, count = f"protocol.{axes[0].name}", config.protocol[axes[0].count]
        every = ",".join(str(i) for i in range(count))
        raise UserError(
            f"a job of W&B is one training, and {name} leaves {count} of them open: sweep it too, {name}={every}."
        )
    return config
