"""Describes a run's settings in words that fit a heading or a small table."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dml.configuration.composition import CONF
from dml.configuration.identity import label
from dml.files import read_yaml


def settings(config: Any) -> dict[str, str]:
    """Returns the most important settings of a run, by title. Those that the configuration does not have are left out.

    Args:
        config: resolved, as `config.yaml` has it.
    """
    method, dataset, protocol = label(config)
    every = {
        "data set": dataset,
        "protocol": protocol,
        "method": _with_options(method, config.method),
        "backbone": _backbone(config.get("backbone") or {}),
        "head": _head(config.get("head") or {}),
        "loss": loss_of(config),
        "miner": component(config.get("miner") or {}),
        "sampler": _with_options(component(config.get("sampler") or {}), config.get("sampler") or {}),
        "re-ranking": _with_options(component(config.get("rerank") or {}), config.get("rerank") or {}),
        "image size": f"{config.image_size} pixels" if config.get("image_size") else "",
        "optimizer": _with_options(component(config.get("optimizer") or {}), config.get("optimizer") or {}),
        "schedule": _schedule(config.get("scheduler") or {}),
        "steps": f"{config.trainer.max_steps:,}" if isinstance(config.trainer.get("max_steps"), int) else "",
        "precision": str(config.trainer.get("precision", "")),
        "seed": str(config.get("seed", "")),
    }
    return {title: value for title, value in every.items() if value}


def component(options: Mapping[str, Any]) -> str:
    """Returns the name of the class or function in `_target_`; empty without one."""
    return str(options.get("_target_") or "").rsplit(".", 1)[-1]


def loss_of(config: Any) -> str:
    """Returns the name of the innermost loss: `dml.losses.Loss` only wraps another one."""
    options, found = config.get("loss") or {}, ""
    while hasattr(options, "get") and options.get("_target_"):
        found, options = component(options), options.get("loss") or {}
    return found


def choice_of(group: str, options: Mapping[str, Any]) -> str:
    """Returns the name of the file in a configuration group that makes this component; its weights may differ. Empty
    if there is none."""
    for name, known in _choices(group).items():
        if known["_target_"] == options.get("_target_") and all(options.get(key) == known[key] for key in known):
            return name
    return ""


@cache
def _choices(group: str) -> dict[str, dict[str, Any]]:
    """Returns, for each file of a group, what tells it from the others: its component and the model's name."""
    read = {file.stem: read_yaml(file) for file in sorted((CONF / group).glob("*.yaml"))}
    told = ("_target_", "model_name", "variant")
    return {name: {key: content[key] for key in told if key in content} for name, content in read.items()}


def _with_options(name: str, options: Mapping[str, Any]) -> str:
    """Returns a component's name with its options that are numbers or words, such as `ABE (M 4, lambda_div 0.1)`."""
    told = [
        f"{key} {value}"
        for key, value in options.items()
        if not key.startswith("_") and isinstance(value, str | int | float) and not isinstance(value, bool)
    ]
    return f"{name} ({', '.join(told)})" if told else name


def _backbone(options: Mapping[str, Any]) -> str:
    name, model = choice_of("backbone", options), str(options.get("model_name") or component(options))
    weights, train, statistics = (str(options.get(option) or "") for option in ("weights", "train", "batch_norm"))
    said = [] if not name or name == model else [model]
    said += ["untrained" if weights in ("", "none") else f"weights {Path(weights).name}"]
    said += [f"trained {train}"] if train not in ("", "all") else []
    said += [f"batch norm {statistics}"] if statistics not in ("", "batch") else []
    return f"{name or model} ({', '.join(said)})"


def _head(options: Mapping[str, Any]) -> str:
    pooling: Any = options.get("pooling")
    parts = [component(options), component(pooling) if hasattr(pooling, "get") else ""]
    return " ".join([*filter(None, parts), f"to {options['dim']} dimensions" if "dim" in options else ""]).strip()


def _schedule(options: Mapping[str, Any]) -> str:
    warm_up = options.get("warm_up")
    return component(options) + (f", warm-up of {warm_up} steps" if warm_up else "")
