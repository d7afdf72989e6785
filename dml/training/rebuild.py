"""Builds the networks and the transform of a checkpoint again to embed images, and nothing else of it.

A checkpoint may come from anyone: at each place of its configuration it may only name a component that belongs there,
or one of a package that the user trusts, and components of dml use no path or address in it.
"""

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from dml.configuration.composition import CONF
from dml.data.transforms import Transform, transform_of
from dml.errors import UserError, own_code
from dml.files import load_checkpoint
from dml.losses import Loss
from dml.methods.base import Method
from dml.training.build import build_method

# Components that a checkpoint may name in addition to those in conf/: names that are looked up at all, and for each
# place a base class and the packages that the class may come from.
OPEN = r"(torch\.nn|torchvision\.transforms\.v2|dml\.models\.poolings)\.[\w.]+"

TEST = "transform.test"  # its operations have names that the user chooses

KINDS: dict[str, tuple[type, tuple[str, ...]]] = {
    "head.pooling": (torch.nn.Module, ("torch.nn.modules.", "dml.models.poolings.")),
    TEST: (torch.nn.Module, ("torchvision.transforms.v2.",)),
}

TRUST = "DML_TRUST"  # environment variable: packages, with commas between them, whose components may be named as well

ARITHMETIC = ("precision", "matmul")  # options of the trainer

# Set at any depth, since the checkpoint has the weights; in trusted components where there is a text, which names some.
FROM_ELSEWHERE = {"weights": "none", "weights_dir": None}


@dataclass(frozen=True)
class Rebuilt:
    """The usable parts of a checkpoint.

    Attributes:
        method: with its trained weights, in evaluation mode and without its losses.
        transform: of test images.
        config: the checked parts of the configuration.
        step: at which the checkpoint was written.
    """

    method: Method
    transform: Transform
    config: DictConfig
    step: int


def load_method(path: str | Path) -> Method:
    """Loads the method of a checkpoint. Errors are those of `rebuild`."""
    return rebuild(Path(path)).method


def rebuild(path: Path) -> Rebuilt:
    """Builds the method and the transform of a checkpoint, such as `checkpoints/last.ckpt` of a run folder.

    Raises:
        UserError: the file is no checkpoint of a run, names a component that makes neither a network nor a transform
            and is of no trusted package, or its weights do not fit its networks.
    """
    checkpoint = load_checkpoint(path)
    said = checkpoint["config"]
    parts = {name: _checked(said[name], name, path) for name in ("backbone", "head", "method")}
    transform = _checked(_part(said, "transform", "test"), TEST, path)
    if not isinstance(transform, dict):
        raise UserError(f"{path} does not describe the transform of test images: it is not loaded.")
    rest = {name: _checked(said.get(name), name, path) for name in ("image_size", "runtime")}
    arithmetic = {name: _checked(_part(said, "trainer", name), f"trainer.{name}", path) for name in ARITHMETIC}
    config = OmegaConf.create({**parts, **rest, "transform": {"test": transform}, "trainer": arithmetic, "loss": {}})
    try:
        method = build_method(config, loss=lambda dim: Loss(torch.nn.Identity()))
        network = {name: value for name, value in checkpoint["state_dict"].items() if not name.startswith("losses.")}
        kept = {name: value for name, value in method.state_dict().items() if name.startswith("losses.")}
        method.load_state_dict(network | kept)
        image_to_tensor = transform_of(config.transform.test)
    except UserError as error:
        raise UserError(f"{path} cannot be rebuilt: {error}") from error
    except Exception as error:  # networks may raise anything for options that no run has
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        place = own_code(error)
        where = f"{place} failed" if place else "it is no checkpoint of this version of dml"
        raise UserError(f"{path} cannot be rebuilt: {where}: {said}") from error
    return Rebuilt(method.eval(), image_to_tensor, config, int(checkpoint.get("global_step", 0)))


def described(path: Path, *groups: str) -> DictConfig:
    """Returns other groups of a checkpoint's configuration, such as `dataset`, after the same checks.

    Raises:
        UserError: a group names a component that conf/ does not have at this place, and that is of no trusted package.
    """
    said = load_checkpoint(path)["config"]
    return OmegaConf.create({name: _checked(said.get(name), name, path) for name in groups})


def _part(node: Any, *names: str) -> Any:
    for name in names:
        node = node.get(name) if isinstance(node, dict) else None
    return node


def _checked(node: Any, at: str, path: Path) -> Any:
    """Checks a part of a configuration, and returns it with `weights` and `weights_dir` set to load nothing.

    Args:
        node: plain containers.
        at: name of the part in the configuration, with dots.
        path: of the checkpoint, for messages.

    Raises:
        UserError: the part names a component that does not belong there, or holds something that no configuration
            holds.
    """
    if isinstance(node, str) and "${" in node:
        raise UserError(f"{path} holds a reference ({node}), which no run writes there: it is not loaded.")
    if isinstance(node, list | tuple):
        return [_checked(part, at, path) for part in node]
    if isinstance(node, dict):
        if not all(isinstance(name, str) for name in node):
            raise UserError(f"{path} has names under {at} that are no text: it is not loaded.")
        if "_target_" in node:
            _check_target(node["_target_"], at, path)
        own = isinstance(node.get("_target_"), str) and _is_trusted(node["_target_"], at, path)
        given = [name for name in FROM_ELSEWHERE if name in node and (not own or isinstance(node[name], str))]
        elsewhere = {name: FROM_ELSEWHERE[name] for name in given}
        checked = {_checked(name, at, path): _checked(part, f"{at}.{name}", path) for name, part in node.items()}
        return checked | elsewhere
    if node is not None and not isinstance(node, str | int | float):
        raise UserError(f"{path} holds a {type(node).__name__} under {at}: it is not loaded.")
    return node


def _check_target(target: Any, at: str, path: Path) -> None:
    """Raises UserError unless conf/ has this component at this place, or it is of a kind that belongs there, or of a
    package that the user trusts."""
    if isinstance(target, str) and target in _named().get(TEST if at.startswith(f"{TEST}.") else at, ()):
        return
    if isinstance(target, str) and _is_trusted(target, at, path):
        return
    base, packages = next((kind for place, kind in KINDS.items() if f"{at}.".startswith(f"{place}.")), (None, ()))
    if base is not None and isinstance(target, str) and re.fullmatch(OPEN, target):
        try:
            found = get_object(target)
        except Exception:  # a module that cannot be imported may raise anything
            found = None
        # A name may lead to another package by way of a module's imports, so the class's own module is checked.
        if isinstance(found, type) and issubclass(found, base) and found.__module__.startswith(packages):
            return
    raise UserError(
        f"{path} asks for {target} at {at}, where no file of conf/ in the package has it: if it is code of your own, "
        f"or that you trust, name its package in {TRUST}."
    )


def _is_trusted(target: str, at: str, path: Path) -> bool:
    """Says whether a component is defined in a package that the user trusts. Raises UserError if it cannot be imported
    from there."""
    names = [name.strip().rstrip(".") for name in os.environ.get(TRUST, "").split(",")]
    trusted = tuple(f"{name}." for name in names if name)
    if not target.startswith(trusted):
        return False
    try:
        found = get_object(target)
    except Exception as error:  # a module may raise anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path} asks for {target} at {at}, which cannot be imported ({reason}): put the folder of the package "
            "that it was trained with on PYTHONPATH."
        ) from error
    # The name may lead to another package by way of a module's imports, so the component's own module is checked.
    return f"{getattr(found, '__module__', '')}.".startswith(trusted)


@cache
def _named() -> dict[str, frozenset[str]]:
    """Returns place in the configuration -> components that conf/ names there."""
    found: dict[str, set[str]] = {}

    def walk(node: Any, at: str) -> None:
        if isinstance(node, dict):
            if "_target_" in node:
                found.setdefault(TEST if at.startswith(f"{TEST}.") else at, set()).add(node["_target_"])
            for name, part in node.items():
                walk(part, f"{at}.{name}")

    for file in CONF.rglob("*.yaml"):
        text = file.read_text()
        content = yaml.safe_load(text) or {}
        group = file.relative_to(CONF).parent.as_posix()
        for at, part in content.items() if "@package _global_" in text or group == "." else ((group, content),):
            walk(part, at)
    return {at: frozenset(names) for at, names in found.items()}
