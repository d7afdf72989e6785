"""Which trainings a protocol consists of."""

from itertools import product

from omegaconf import DictConfig, OmegaConf

from dml.errors import whole_number

AXES = {"repeat": "repeats", "fold": "folds", "split": "splits"}  # number of the training, how many there are


def pieces(config: DictConfig) -> dict[str, list[str]]:
    """Folder and overrides of each training where the configuration leaves open which is meant; else nothing.

    Raises:
        UserError: no number of trainings.
    """
    left_open = [axis for axis in AXES if axis in config.protocol and config.protocol[axis] is None]
    for axis in left_open:
        whole_number(f"protocol.{AXES[axis]}", config.protocol[AXES[axis]], 1)
    if not left_open:
        return {}
    numbers = product(*(range(config.protocol[AXES[axis]]) for axis in left_open))
    return {
        "_".join(f"{axis}_{i}" for axis, i in zip(left_open, at, strict=True)): [
            f"protocol.{axis}={i}" for axis, i in zip(left_open, at, strict=True)
        ]
        for at in numbers
    }


def settle(config: DictConfig) -> None:
    """A repetition trains with a seed of its own, `seed + repeat`.

    Raises:
        UserError: a seed or a repetition that is no number.
    """
    repeat = OmegaConf.select(config, "protocol.repeat")
    if repeat is not None:
        whole_number("protocol.repeat", repeat, 0)
        whole_number("seed", config.seed, 0)
        config.seed += repeat
