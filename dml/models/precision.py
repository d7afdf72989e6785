"""Where mixed precision is not wanted."""

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off; nothing in a graph that is exported, which has no mixed precision and could not be read again with
    the switch in it."""
    return nullcontext() if torch.compiler.is_exporting() else torch.autocast(device.type, enabled=False)
