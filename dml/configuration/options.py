"""Checks a configuration: the annotations of a component's parameters are the types and ranges of its options.

A component declares `m: Count` or `mu: Share` and nothing more: `check` finds each component by its `_target_` and
compares every option with the annotation. Ranges that libraries do not declare are in `dml.configuration.libraries`.
"""

import difflib
import inspect
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from pydantic import Field

from dml.configuration.composition import CONF
from dml.configuration.libraries import LIBRARIES
from dml.configuration.ranges import (
    Count,
    Few,
    NotNegative,
    Number,
    Pixels,
    Positive,
    Seed,
    Size,
    WholeNumber,
    adapts,
    check_value,
    members,
    shown,
)
from dml.configuration.trainings import axes_of
from dml.errors import UserError

# Options at the top of every configuration.
COMMON: dict[str, Any] = {
    "seed": Seed,
    "image_size": Pixels,
    "lr": Positive,
    "report": bool,  # pictures and report.html at the end
    "note": Any,  # the user's own remark: +note=...
    "tuned": Any,  # settings for a data set, to which losses refer
    "download": Any,
    "runtime": Any,
}

# Our own options, and those of pl.Trainer that change neither when a run ends nor what our callbacks rely on.
TRAINER: dict[str, Any] = {
    "accelerator": Literal["auto", "cpu", "gpu"],
    "strategy": Literal["auto", "ddp"],
    "devices": Annotated[int, Field(ge=-1, le=4096)]
    | Annotated[str, Field(pattern=r"^(auto|\d+(,\d+)*)$")]
    | list[WholeNumber],
    "num_nodes": Few,
    "deterministic": bool | Literal["warn"],
    "gradient_clip_val": NotNegative | None,
    "gradient_clip_algorithm": Literal["norm", "value"] | None,
    "overfit_batches": NotNegative,
    "max_steps": Count,
    "log_every": Count,
    "checkpoint_every": Count,
    "num_workers": Annotated[int, Field(ge=0, le=1024)] | Literal["auto"],
    "matmul": Literal["highest", "high", "medium"],
    "compile": bool,
    "micro_batch": Size | None,
    **dict.fromkeys(("precision", "benchmark", "sync_batchnorm"), None),  # as Lightning annotates them
    **dict.fromkeys(("detect_anomaly", "enable_progress_bar"), None),
}

# Options of a group that are no arguments of its component; for the scheduler's see `dml.methods.recipe.Recipe`.
DATASET: dict[str, Any] = {"cache": Literal["none", "disk", "memory", "device", "features"]}

TRANSFORM: dict[str, Any] = {"copies": Few | None}

BACKBONE: dict[str, Any] = {  # see `dml.models.backbones.trained`
    "train": str,
    "batch_norm": Literal["batch", "running", "frozen"],
    "lora_rank": Few,
    "lora_alpha": Positive,
    "lora_layers": Annotated[list[str], Field(min_length=1)] | None,
}

OPTIMIZER: dict[str, Any] = {"layer_decay": Annotated[float, Field(gt=0, le=1)]}

SCHEDULER: dict[str, Any] = {"unit": Literal["step", "epoch"], "warm_up": WholeNumber, "length": Count | None}

OWN = {
    "dataset": DATASET,
    "transform": TRANSFORM,
    "backbone": BACKBONE,
    "optimizer": OPTIMIZER,
    "scheduler": SCHEDULER,
}

# Arguments that the build gives to a group's component itself, so that no option may set them.
GIVEN: dict[str, tuple[str, ...]] = {
    "method": ("backbone", "head", "loss", "dim"),
    "optimizer": ("params",),
    # The length sets some; the same rate in all parameter groups would break the proportion of their rates.
    "scheduler": ("optimizer", "last_epoch", "T_max", "total_steps", "max_lr", "base_lr", "eta_min", "min_lr"),
    "head": ("in_channels",),
    "loss": ("miner",),
    "sampler": ("labels", "seed"),
}

# Options of a loss that follow from the data and the embedding, as its file has to say.
FOLLOW = {"num_classes": "${runtime.train_classes}", "embedding_size": "${runtime.embedding_dim}"}

_HYDRA = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")


def check(config: DictConfig, without: tuple[str, ...] = ()) -> None:
    """Checks every option against the annotation of the parameter that takes it.

    Args:
        config: composed.
        without: groups to leave out, since no component is made of them.

    Raises:
        UserError: an option is unknown, has no value, or is not of its type or in its range, or a component does not
            exist. The sentence names the option.
    """
    needed = {"seed", "image_size", "lr", "report"} | (_groups() - {"rerank", "experiment", "sweep", "debug"})
    for name in sorted(needed - {*without, *map(str, config)}):
        raise UserError(f"{name} is missing, and every run has it: leave out ~{name}.")
    if "loss" not in without:
        _check_follows("loss", OmegaConf.to_container(config.loss) if OmegaConf.is_config(config.loss) else None)
    check_plain(filled(config, without))


def _check_follows(option: str, node: Any) -> None:
    """Raises UserError for an option of a loss whose value cannot be chosen."""
    for name, value in node.items() if isinstance(node, Mapping) else ():
        if name in FOLLOW and value != FOLLOW[name]:
            why = "cannot be chosen, since it follows from the data"
            raise UserError(f"{option}.{name}={shown(value)} {why}: leave it out (its file has {FOLLOW[name]}).")
        _check_follows(f"{option}.{name}", value)


def check_plain(container: Mapping[str, Any]) -> None:
    """Does the same as `check`, for a configuration in plain containers."""
    groups = _groups()
    for name in sorted(container.keys() - COMMON.keys() - groups):
        raise UserError(f"{name} is no option{_near(name, {*COMMON, *groups})}.")
    for name in sorted(COMMON.keys() & container.keys()):  # checked first, since other options refer to them
        _check(name, container[name], COMMON[name])
    for name in sorted(groups & container.keys()):
        value = container[name]
        if name == "trainer":
            _check_trainer(value)
        elif name != "paths":
            value = _check_own(name, value, OWN.get(name, {}))
            if name == "transform":
                for part, steps in ((part, value.get(part)) for part in ("train", "test")):
                    if not isinstance(steps, Mapping) or "_target_" in steps:
                        raise UserError(
                            f"transform.{part}={shown(steps)} is no list of operations: see conf/transform."
                        )
            if name == "protocol":  # a number may be null, which means all trainings
                numbers = {axis.name for axis in axes_of(value)}
                value = {option: given for option, given in value.items() if given is not None or option not in numbers}
            _walk(name, value)


def _groups() -> set[str]:
    return {folder.name for folder in CONF.iterdir() if folder.is_dir()}


def _check_own(group: str, node: Any, own: Mapping[str, Any]) -> Any:
    """Checks a group's options that are no arguments of its component, and returns the node without them."""
    if not isinstance(node, Mapping):
        return node
    for name in own.keys() & node.keys():
        _check(f"{group}.{name}", node[name], own[name])
    return {option: given for option, given in node.items() if option not in own}


def filled(config: DictConfig, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the configuration as plain containers. Raises UserError for an option without a value."""
    filled = config.copy()
    OmegaConf.set_struct(filled, False)
    for group in without:
        filled.pop(group)
    filled.runtime = {"train_classes": 1, "embedding_dim": 1}  # known later
    try:
        missing = sorted(OmegaConf.missing_keys(filled))
        if missing:
            raise UserError(f"{missing[0]} has no value: give it with {missing[0]}=VALUE.")
        container = OmegaConf.to_container(filled, resolve=True)
    except InterpolationKeyError as error:
        where = ": choose settings for the data set, as experiment=gsp_cub does" if "tuned" in str(error) else ""
        raise UserError(
            f"{error.full_key} refers to an option that is not set ({str(error).splitlines()[0]}){where}."
        ) from None
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key} cannot be read ({str(error).splitlines()[0]}).") from None
    assert isinstance(container, dict)
    return {str(name): value for name, value in container.items()}


def _walk(option: str, node: Any) -> None:
    """Checks the components below a group's node."""
    if not isinstance(node, Mapping):
        if node is not None or option in GIVEN:
            raise UserError(f"{option}={shown(node)} is no component: choose a file of conf/{option.split('.')[0]}.")
    elif "_target_" in node:
        _check_component(option, node)
    else:
        for name, value in node.items():
            _walk(f"{option}.{name}", value)


def _check_component(option: str, node: Mapping[str, Any]) -> None:
    target = node["_target_"]
    try:
        taker = resolve_name(target)
    except (ImportError, AttributeError, ValueError, TypeError):
        raise UserError(f"{option}._target_={shown(target)} names nothing that can be imported.") from None
    if not callable(taker):
        raise UserError(f"{option}._target_={target} is no class and no function.")
    for name in _HYDRA[1:]:
        if name in node and name != "_partial_":
            raise UserError(
                f"{option}.{name} cannot be set: components take their options by name, so give each one by its name."
            )
    _check(f"{option}._partial_", node.get("_partial_", False), bool)
    options = {str(name): value for name, value in node.items() if name not in _HYDRA}
    for name in GIVEN.get(option, ()):
        if name in options:
            raise UserError(f"{option}.{name} cannot be set by hand: it follows from other options, so remove it.")
    _check_taken(option, options, parameters(target), target.rpartition(".")[2])


def _check_taken(option: str, options: Mapping[str, Any], takes: Mapping[str, Any], taker: str) -> None:
    for name, value in options.items():
        if name not in takes:
            near = _near(name, takes.keys() - GIVEN.get(option, ()))
            raise UserError(f"{option}.{name} is no option of {taker}{near}.")
        _check(f"{option}.{name}", value, takes[name])


def _near(name: str, known: Iterable[str]) -> str:
    """Returns the end of a sentence that proposes similar names."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    if near:
        return f": did you mean {' or '.join(near)}"
    return f": choose among {', '.join(sorted(known))}" if known else ": it has no options"


def _check(option: str, value: Any, annotation: Any) -> None:
    """Raises UserError unless `value` fits the annotation."""
    if isinstance(value, Mapping) and "_target_" in value:
        if _scalar(annotation):
            raise UserError(f"{option} is a value, not a component: leave out its _target_.")
        _check_component(option, value)
        return
    if annotation is Any:
        _check_finite(option, value)
        return
    check_value(option, value, annotation)


def _check_finite(option: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{option}={shown(value)} has to be a finite number.")
    if isinstance(value, Mapping):
        for name, part in value.items():
            _check_finite(f"{option}.{name}", part)
    elif isinstance(value, list):
        for i, part in enumerate(value):
            _check_finite(f"{option}[{i}]", part)


@cache
def parameters(target: str) -> dict[str, Any]:
    """Returns parameter -> annotation of a component, with those of the bases that get its `**options`."""
    taker = resolve_name(target)
    bases = [base for base in inspect.getmro(taker) if "__init__" in vars(base)] if isinstance(taker, type) else []
    calls: list[tuple[Callable[..., Any], str]] = [(vars(base)["__init__"], base.__module__) for base in bases]
    taken: dict[str, Any] = {}
    for call, module in calls or [(taker, target)]:
        library = next((ranges for name, ranges in LIBRARIES.items() if f"{module}.".startswith(f"{name}.")), {})
        signature = inspect.signature(call)
        hints = _hints(call)
        for name, parameter in signature.parameters.items():
            if name == "self" or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            taken.setdefault(name, library.get(name, hints.get(name, _like(parameter.default))))
        rest = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
        if not rest:
            break
        if (passed_on := getattr(taker, "options_of", None)) is not None:
            return parameters(f"{passed_on.__module__}.{passed_on.__qualname__}") | taken
    return taken


def _hints(call: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(call, include_extras=True)
    except (NameError, TypeError):  # annotations may use names that are imported for type checkers only
        return {}


def _like(default: Any) -> Any:
    """Returns the annotation for an option that has none, judged by its default."""
    if isinstance(default, bool):
        return bool
    return Number if isinstance(default, int | float) else Any


def _check_trainer(options: Mapping[str, Any]) -> None:
    """Checks the trainer's options.

    Raises UserError for an option of Lightning that would end a run before its last step or disturb our callbacks.
    """
    lightnings = parameters("pytorch_lightning.Trainer")
    takes = {name: lightnings[name] if annotation is None else annotation for name, annotation in TRAINER.items()}
    if "accumulate_grad_batches" in options:
        raise UserError(
            "trainer.accumulate_grad_batches cannot be used: losses compare the images of one batch, so smaller parts "
            "would give another loss. Set sampler.batch_size, and trainer.micro_batch if memory is short."
        )
    for name in options:
        if name in lightnings and name not in takes:
            raise UserError(
                f"trainer.{name} cannot be used: a run ends after trainer.max_steps, and saves, evaluates and reports "
                f"on its own. Possible options are {', '.join(sorted(takes))}."
            )
    _check_taken("trainer", options, takes, "the trainer")


def _scalar(annotation: Any) -> bool:
    """Says whether an annotation allows plain values only, and no component."""
    return annotation is not Any and all(adapts(member) for member in members(annotation))
