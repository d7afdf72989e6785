"""What a run has learned, as the start of another: the backbone's weights in its checkpoint, and their colours."""

import re
from pathlib import Path
from typing import Any

import torch

from dml.errors import UserError
from dml.files import CONFIG, NETWORK, read_yaml

Colours = tuple[list[float], list[float]]  # mean and deviation of the channels R, G, B in 0..1

BASE, DOWN, UP = ".base_layer.", ".lora_A.lora.weight", ".lora_B.lora.weight"  # peft's names, beside a layer's


def configuration(state: Any, path: Path) -> dict[str, Any]:
    """Returns the configuration of the run that a file of weights is from; empty if it is of no run.

    Args:
        state: what the file holds.
        path: of the file.
    """
    found = state.get("config") if isinstance(state, dict) else None
    if path.name == NETWORK and path.with_name(CONFIG).is_file():  # what dml.export and dml.publish wrote
        found = read_yaml(path.with_name(CONFIG))
    return found if isinstance(found, dict) else {}


def colours(both: Any) -> Colours | None:
    """Returns mean and deviation as they are written in a file; None if they are not."""
    if not isinstance(both, list | tuple) or len(both) != 2:
        return None
    if not all(
        isinstance(one, list) and len(one) == 3 and all(isinstance(v, int | float) for v in one) for one in both
    ):
        return None
    mean, std = ([float(v) for v in one] for one in both)
    return mean, std


def colours_of(config: dict[str, Any]) -> Colours | None:
    """Returns the colours of a run whose weights came with their own; None if it had those of its architecture."""
    runtime = config.get("runtime")
    return colours(runtime.get("colours") if isinstance(runtime, dict) else None)


def of_backbone(state: dict[Any, Any], config: dict[str, Any], path: Path) -> dict[Any, Any]:
    """Returns the backbone's part of a method's weights with its adapters merged, or all weights of any other module.

    A method either holds its backbone whole or divides it into runs of stages, at its own top level.

    Raises:
        UserError: the method has several copies of a stage, so that none is the backbone's; or nothing says the scale
            of the adapters.
    """
    named = {str(key): value for key, value in state.items()}
    if ours := {key.removeprefix("backbone."): value for key, value in named.items() if key.startswith("backbone.")}:
        return _merged(ours, config, path)
    places: dict[str, set[str]] = {}
    for key in named:
        if match := re.fullmatch(r"(.+)\.stages\.(\w+)\..*", key):
            places.setdefault(match[2], set()).add(match[1])
    parts = {stage: [place for place in found if "." not in place] for stage, found in places.items()}
    if any(len(found) != 1 for found in parts.values()):
        stage, several = next((stage, places[stage]) for stage in parts if len(parts[stage]) != 1)
        raise UserError(
            f"{path} is of a method that has no single backbone (there is a stage {stage} in each of "
            f"{', '.join(sorted(several))}): give a run of a method that has one, such as baseline, abe or gsp."
        )
    if not parts:
        return state
    begins = tuple(f"{found[0]}.stages.{stage}." for stage, found in parts.items())
    own = {key.partition(".")[2]: value for key, value in named.items() if key.startswith(begins)}
    return _merged(own, config, path)


def _merged(state: dict[str, Any], config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Adds adapters to the weights of their layers: W + alpha / r * B A (Hu et al. 2022, section 4.1)."""
    layers = [key.removesuffix(DOWN) for key in state if key.endswith(DOWN)]
    layers = [one for one in layers if {f"{one}{BASE}weight", one + UP} <= state.keys()]  # others are told as unknown
    if not layers:
        return state
    backbone = config.get("backbone")
    alpha = backbone.get("lora_alpha") if isinstance(backbone, dict) else None
    if not isinstance(alpha, int | float):
        raise UserError(f"{path} has adapters, and no configuration that says their scale: give a run's checkpoint.")
    adapters = {layer + end for layer in layers for end in (DOWN, UP)}
    found = {key.replace(BASE, "."): value for key, value in state.items() if key not in adapters}
    for layer in layers:
        a, b = state[layer + DOWN], state[layer + UP]  # [r,i,...] and [o,r,...], the latter without extent
        added = alpha / len(a) * torch.einsum("or,r...->o...", b.flatten(1), a)
        found[f"{layer}.weight"] = found[f"{layer}.weight"] + added
    return found
