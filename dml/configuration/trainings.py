"""The trainings of a protocol, such as one per fold: its class declares the numbers that tell them apart."""

import sys
from dataclasses import dataclass
from itertools import product
from pkgutil import resolve_name
from typing import Any

from omegaconf import DictConfig

from dml.errors import UserError


@dataclass(frozen=True)
class Axis:
    """A number that tells the trainings of a protocol apart, such as the fold; a protocol's class lists them in `axes`.

    Each training has a seed of its own, see `settle`.

    Attributes:
        name: the protocol's option that holds the number, from 0; a value of None there means all trainings.
        count: the protocol's option that says how many trainings there are along this axis.
        repeats: trainings along this axis differ in their seed alone.
        collected: one training of each number together make a result (`dml.analysis.mlrc`).
        shapes: the count itself changes each training, as the number of folds does.
    """

    name: str
    count: str
    repeats: bool = False
    collected: bool = False
    shapes: bool = False

    def check(self, number: int, count: int) -> None:
        """Raises UserError unless `number` is one of `count`, counted from 0."""
        if number >= count:
            raise UserError(
                f"protocol.{self.name}={number} is none of the {count} {self.count}: they are 0 to {count - 1}."
            )


def axes_of(protocol: Any) -> tuple[Axis, ...]:
    """Returns the axes of the protocol's class, which the options name as `_target_`; none if there is no such class.

    The options may come from a file, so modules outside dml are not imported for it.
    """
    found: tuple[Axis, ...] = declared(protocol, "axes")
    return found


def validates(protocol: Any) -> bool:
    """Returns whether a protocol has validation classes, by which a search can choose."""
    return bool(axes_of(protocol)) or protocol.get("select") == "val_classes"


def declared(component: Any, name: str) -> tuple[Any, ...]:
    """Returns what a component's class, its `_target_`, declares under `name`; empty if it declares nothing."""
    target = str(component.get("_target_", ""))
    module = target.rpartition(".")[0]
    if module.partition(".")[0] != "dml" and module not in sys.modules:
        return ()
    try:
        return tuple(getattr(resolve_name(target), name, ()))
    except (ImportError, AttributeError, ValueError):  # dml.configuration.options.check reports it
        return ()


def left_open(config: DictConfig) -> list[Axis]:
    """Returns the axes whose number is not given, so that all trainings along them are meant."""
    return [axis for axis in axes_of(config.protocol) if config.protocol.get(axis.name) is None]


def trainings_of(config: DictConfig) -> dict[str, list[str]]:
    """Returns folder -> overrides of each training that a configuration stands for; empty if it stands for one."""
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
    """Gives a training of a protocol that has several a seed of its own, drawn from `seed` and the training's numbers.

    With the same seed all folds would start from the same random layers, and a concatenation of their embeddings would
    be one embedding four times. A run that stands for several trainings keeps its seed.
    """
    import numpy as np

    numbers = [config.protocol.get(axis.name) for axis in axes_of(config.protocol)]
    if numbers and None not in numbers:
        config.seed = int(np.random.SeedSequence(config.seed, spawn_key=numbers).generate_state(1)[0])
