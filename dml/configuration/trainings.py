"""Which trainings a protocol consists of."""

from itertools import product

from omegaconf import DictConfig, OmegaConf

AXES = {"repeat": "repeats", "fold": "folds", "split": "splits"}  # number of the training, how many there are


def trainings_of(config: DictConfig) -> dict[str, list[str]]:
    """Folder and overrides of each training where the configuration leaves open which is meant; else nothing."""
    left_open = [axis for axis in AXES if axis in config.protocol and config.protocol[axis] is None]
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
    """A repetition trains with a seed of its own, `seed + repeat`."""
    repeat = OmegaConf.select(config, "protocol.repeat")
    if repeat is not None:
        config.seed += repeat
