"""From the configuration of a component to the component."""

from collections.abc import Iterable
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from dml.errors import Interrupted, UserError


class Waits:
    """A component of which something begins at a later step."""

    def waits(self) -> dict[str, int]:
        """The step, by the option that says it, as `loss.memory_from=1000`; 0: from the start."""
        raise NotImplementedError(f"{type(self).__name__} has to define waits()")


def without(config: DictConfig, names: Iterable[str]) -> DictConfig:
    """A component's configuration without some of its options, which are for others. References stay."""
    rest = config.copy()
    OmegaConf.set_struct(rest, False)
    for name in names:
        rest.pop(name, None)
    return rest


def instantiate(config: DictConfig, **arguments: Any) -> Any:
    """`hydra.utils.instantiate`, with a user's mistake told as such.

    Raises:
        UserError: what a component said of its options, with the component's name before it if it was a plain
            TypeError or ValueError.
    """
    try:
        return hydra.utils.instantiate(config, **arguments)
    except InstantiationException as error:
        cause: BaseException | None = error
        while isinstance(cause, InstantiationException):  # a component inside another
            cause = cause.__cause__
        if isinstance(cause, UserError | Interrupted):  # a signal may come while a component is made
            raise cause from None
        if isinstance(cause, TypeError | ValueError):
            raise UserError(f"{config._get_full_key(None)}: {' '.join(str(cause).split())}.") from error
        raise
