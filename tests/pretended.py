"""A pretended device, which a machine without a GPU has too: what would mix devices on a GPU is refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class There(Tensor):
    """A tensor that says it lies on the device `meta`; its numbers are in `here`, on the CPU."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> "There":
        made = Tensor._make_wrapper_subclass(
            cls, here.shape, here.stride(), here.storage_offset(), dtype=here.dtype, device="meta"
        )
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{operator} outside of `pretended`")


INDEXED = ("aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class Pretended(TorchDispatchMode):
    """Has operators of `There` computed, refuses those that mix devices, and counts what leaves for the CPU.

    Args:
        indices: allow indices on the CPU, which CUDA copies to the device and waits for.

    Attributes:
        left: operators that brought more than one number to the CPU.
    """

    def __init__(self, *, indices: bool) -> None:
        super().__init__()
        self.indices = indices
        self.left: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        given = [x for x in leaves if isinstance(x, Tensor)]
        there = [x for x in given if isinstance(x, There)]
        name, device = operator.name(), kwargs.get("device")
        if not there and not any(isinstance(x, torch.device) and x.type == "meta" for x in leaves):
            return operator(*args, **kwargs)
        if operator._can_decompose():  # in inference mode operators come whole
            with self:
                return operator.decompose(*args, **kwargs)
        assert all(isinstance(x, There) for x in given if x.device.type == "meta"), (
            f"{name} has a tensor without numbers"
        )
        copies = name in ("aten::_to_copy", "aten::copy_")
        free = args[1] if self.indices and name in INDEXED and isinstance(args[0], There) else ()
        mixed = [x for x in given if not isinstance(x, There) and x.dim() and not any(x is one for one in free)]
        assert copies or not mixed, f"{name} mixes devices"
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        inner = {id(x.here): x for x in there}
        host = args[0] if name == "aten::copy_" and not isinstance(args[0], There) else None
        args, kwargs = tree_map(lambda x: x.here if isinstance(x, There) else x, (args, kwargs))
        found = operator(*args, **kwargs)
        if host is not None:
            self.left.append(name)
            return host
        if name == "aten::_to_copy" and device is not None and device.type == "cpu":
            self.left.append(name)
            return found
        return tree_map(lambda x: (inner[id(x)] if id(x) in inner else There(x)) if isinstance(x, Tensor) else x, found)


class _Makers(TorchFunctionMode):
    """Makes `There` of numbers where PyTorch calls no operator for it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if function in (torch.tensor, torch.as_tensor, torch.asarray) and device is not None:
            return function(*args, **(kwargs | {"device": "cpu"})).to(device)
        if function is Tensor.tolist and isinstance(args[0], There):
            return args[0].cpu().tolist()
        if function in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], There):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            at = tuple(torch.as_tensor(x).to("meta") if isinstance(x, list | np.ndarray) else x for x in places)
            args = (args[0], at if isinstance(args[1], tuple) else at[0], *args[2:])
        return function(*args, **kwargs)


@contextmanager
def pretended(*, indices: bool = False) -> Iterator[Pretended]:
    """`tensor.to("meta")` is on the device in here, and autocast of any device is the CPU's; `indices` as in
    `Pretended`."""
    autocast = torch.autocast
    with (
        patch.object(torch, "autocast", lambda device, *args, **kwargs: autocast("cpu", *args, **kwargs)),
        Pretended(indices=indices) as mode,
        _Makers(),
    ):
        yield mode


def there(values: Tensor) -> Tensor:
    return There(values.clone())
