"""Which trainings a protocol consists of: its class declares the numbers that tell them apart."""

import sys
from dataclasses import dataclass
from itertools import product
from pkgutil import resolve_name
from typing import Any

from omegaconf import DictConfig

from dml.errors import UserError


@dataclass(frozen=True)
class Axis:
    """A number that tells the trainings of a protocol apart; a protocol's class has them as `axes`.

    Attributes:
        name: the option of the protocol that is the number, from 0; None there: all of them.
        count: its option that says how many there are.
        reseeds: training i has the seed `seed + i`.
        collected: one training of each number make a result of their own (`dml.analysis.mlrc`).
        shapes: how many there are changes each training, as the number of folds does.
    """

    name: str
    count: str
    reseeds: bool = False
    collected: bool = False
    shapes: bool = False

    def check(self, number: int, count: int) -> None:
        """Raises UserError for a number that is none of so many."""
        if number >= count:
            raise UserError(
                f"protocol.{self.name}={number} is none of the {count} {self.count}: they are 0 to {count - 1}."
            )


def axes_of(protocol: Any) -> tuple[Axis, ...]:
    """Those of the class that the options `protocol` name as `_target_`; none where there is no such class.

    They may be a file's, which shall not have other modules imported than ours.
    """
    found: tuple[Axis, ...] = declared(protocol, "axes")
    return found


def declared(component: Any, name: str) -> tuple[Any, ...]:
    """What the class that the options of a component name as `_target_` declares under `name`; else nothing."""
    target = str(component.get("_target_", ""))
    module = target.rpartition(".")[0]
    if module.partition(".")[0] != "dml" and module not in sys.modules:
        return ()
    try:
        return tuple(getattr(resolve_name(target), name, ()))
    except (ImportError, AttributeError, ValueError):  # which check tells
        return ()


def left_open(config: DictConfig) -> list[Axis]:
    """The axes along which all trainings are meant."""
    return [axis for axis in axes_of(config.protocol) if config.protocol.get(axis.name) is None]


def trainings_of(config: DictConfig) -> dict[str, list[str]]:
    """Folder and overrides of each training where the configuration leaves open which is meant; else nothing."""
    axes = left_open(config)
    if not axes:
        return {}
    numbers = product(*(range(config.protocol[axis.count]) for axis in axes))
    return {
        "_".join(f"{axis.name}_{i}" for axis, i in zip(axes, at, strict=True)): [
            f"protocol.{axis.name}={i}" for axis, i in zip(axes, at, strict=True)
        ]
        for at in numbers
    }


def settle(config: DictConfig) -> None:
    """Adds to the seed the numbers that change it."""
    for axis in axes_of(config.protocol):
        number = config.protocol.get(axis.name)
        if axis.reseeds and number is not None:
            config.seed += number
