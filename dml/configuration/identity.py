"""Compares runs by what they compute: which options tell configurations apart, and what the configurations are called.

Options that only say how a run is executed do not count.
"""

import json
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dml.configuration.composition import EXECUTION
from dml.configuration.trainings import axes_of


def flat(config: DictConfig, runtime: Any) -> dict[str, Any]:
    """Returns dotted name -> value of all options that change what is computed. Whole numbers are int, as 1 for 1.0.

    `runtime`, whose values are known only once the data is read, is given separately.
    """

    def walk(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        if isinstance(node, dict) and node:
            for name, value in node.items():
                yield from walk(value, f"{prefix}.{name}" if prefix else str(name))
        else:
            yield prefix, _plain(node)

    filled = config.copy()
    OmegaConf.set_struct(filled, False)
    filled.runtime = runtime
    container = OmegaConf.to_container(filled, resolve=True)
    assert isinstance(container, dict)
    counts = {f"protocol.{axis.count}" for axis in axes_of(filled.protocol) if not axis.shapes}
    left_out = ("runtime.", *EXECUTION)
    flat = {name: v for name, v in walk(container, "") if name not in counts and not name.startswith(left_out)}
    data_dir = str(filled.paths.data_dir).rstrip("/")  # data that was moved is the same data
    return {
        name: "DATA" + value.removeprefix(data_dir)
        if isinstance(value, str) and (value == data_dir or value.startswith(f"{data_dir}/"))
        else value
        for name, value in flat.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def repeats(config: DictConfig) -> set[str]:
    """Returns the options in which repetitions of a run differ."""
    return {"seed", *(f"protocol.{axis.name}" for axis in axes_of(config.protocol))}


def configuration(config: DictConfig) -> str:
    """Returns a text that is the same for runs that are repetitions of one another.

    Repetitions may have other numbers of training classes, so these do not count.
    """
    options, differ = {}, repeats(config)
    for name, value in flat(config, config.runtime).items():
        counted = name.startswith(("method.", "loss.")) and value == config.runtime.train_classes
        if name not in differ and not (counted and name.endswith("classes")):
            options[name] = value
    return json.dumps(options, sort_keys=True, default=str)


def label(config: DictConfig) -> tuple[str, str, str]:
    """Returns the names of the method, the data set and the protocol."""
    method, protocol = (str(part._target_).rsplit(".", 1)[1] for part in (config.method, config.protocol))
    return method, str(config.dataset.get("name") or config.dataset._target_.rsplit(".", 1)[1]), protocol
