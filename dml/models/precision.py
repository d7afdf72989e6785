"""Switches mixed precision off for some computations."""

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Switches autocast off, except while a graph is exported.

    An exported graph has no mixed precision, and could not be read again with this switch in it.
    """
    return nullcontext() if torch.compiler.is_exporting() else torch.autocast(device.type, enabled=False)
