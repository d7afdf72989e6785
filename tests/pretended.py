"""A pretended device, which a machine without a GPU has too.

What would mix devices on a GPU is refused, and so is what a GPU refuses under `trainer.deterministic=true`. Its name is
`meta`, or `cuda`: then PyTorch's own autocast for CUDA is at work, but gradients cannot be computed.
"""

import functools
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
    """A tensor that says it lies on the pretended device; its numbers are in `here`, on the CPU."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor, device: str = "meta") -> "There":
        made = Tensor._make_wrapper_subclass(
            cls, here.shape, here.stride(), here.storage_offset(), dtype=here.dtype, device=device
        )
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{operator} outside of `pretended`")


class _As(torch.autograd.Function):
    """`Tensor.as_subclass`, which PyTorch lacks for tensors like these."""

    @staticmethod
    def forward(context: Any, values: There, kind: type[Tensor]) -> There:
        return _kind(kind).__new__(_kind(kind), values.here, str(values.device))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


@functools.cache
def _kind(kind: type[Tensor]) -> type[There]:
    """The class of tensors on the device that are of a class of their own besides."""
    if issubclass(kind, There):
        return kind
    return There if kind is Tensor else type(kind.__name__, (kind, There), {})


# From the list at torch.use_deterministic_algorithms; bilinear resizing is then composed of other operators on CUDA.
NOT_DETERMINISTIC = {
    "aten::_adaptive_avg_pool2d_backward",
    "aten::adaptive_max_pool2d_backward",
    "aten::fractional_max_pool2d_backward",
    "aten::max_unpool2d",
    "aten::avg_pool3d_backward",
    "aten::reflection_pad2d_backward",
    "aten::upsample_bicubic2d_backward",
    "aten::_upsample_bicubic2d_aa_backward",
    "aten::_upsample_bilinear2d_aa_backward",
    "aten::grid_sampler_2d_backward",
    "aten::nll_loss2d_forward",
    "aten::_ctc_loss_backward",
    "aten::kthvalue",
    "aten::median.dim",
    "aten::nanmedian.dim",
    "aten::histc",
    "aten::put_",
}
INDEXED = ("aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class Pretended(TorchDispatchMode):
    """Has operators of `There` computed, refuses those that mix devices, and counts what leaves for the CPU.

    Args:
        device: `meta` or `cuda`.
        indices: allow indices on the CPU, which CUDA copies to the device and waits for.
        deterministic: refuse what CUDA refuses under `trainer.deterministic=true`.

    Attributes:
        left: operators that brought more than one number to the CPU.
    """

    def __init__(self, device: str, *, indices: bool, deterministic: bool) -> None:
        super().__init__()
        self.device = torch.device(device)
        self.indices = indices
        self.deterministic = deterministic
        self.left: list[str] = []
        if device == "cuda":  # as with PyTorch's fake tensors, nothing looks for a driver
            self._mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        given = [x for x in leaves if isinstance(x, Tensor)]
        there = [x for x in given if isinstance(x, There)]
        name, device = operator.name(), kwargs.get("device")
        if not there and not any(isinstance(x, torch.device) and x.type == self.device.type for x in leaves):
            return operator(*args, **kwargs)
        if operator._can_decompose():  # in inference mode operators come whole
            with self:
                return operator.decompose(*args, **kwargs)
        assert all(isinstance(x, There) for x in given if x.device.type == self.device.type), (
            f"{name} has a tensor without numbers"
        )
        assert not self.deterministic or not _alerts(name, args, kwargs), f"{name} is not deterministic on CUDA"
        copies = name in ("aten::_to_copy", "aten::copy_")
        free = args[1] if self.indices and name in INDEXED and isinstance(args[0], There) else ()
        mixed = [x for x in given if not isinstance(x, There) and x.dim() and not any(x is one for one in free)]
        assert copies or not mixed, f"{name} mixes devices"
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        inner = {id(x.here): x for x in there}
        host = args[0] if name == "aten::copy_" and not isinstance(args[0], There) else None
        args, kwargs = tree_map(lambda x: x.here if isinstance(x, There) else x, (args, kwargs))
        if name in ("aten::_softmax", "aten::_log_softmax") and args[2]:
            args = (args[0].float(), args[1], False)  # CUDA's own takes half precision and gives float32
        found = operator(*args, **kwargs)
        if host is not None:
            self.left.append(name)
            return host
        if name == "aten::_to_copy" and device is not None and device.type == "cpu":
            self.left.append(name)
            return found
        return tree_map(
            lambda x: (inner[id(x)] if id(x) in inner else self.there(x)) if isinstance(x, Tensor) else x, found
        )

    def there(self, here: Tensor) -> There:
        return There(here, "cuda:0" if self.device.type == "cuda" else "meta")


def _alerts(name: str, args: Any, kwargs: Any) -> bool:
    if name == "aten::cumsum":
        return bool(args[0].is_floating_point())
    if name == "aten::bincount":
        return (len(args) > 1 and args[1] is not None) or kwargs.get("weights") is not None
    if name.startswith("aten::scatter_reduce"):
        return args[4] in ("sum", "mean")
    return name in NOT_DETERMINISTIC


class _Makers(TorchFunctionMode):
    """Makes `There` of numbers where PyTorch calls no operator for it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if function in (torch.tensor, torch.as_tensor, torch.asarray) and device is not None:
            return function(*args, **(kwargs | {"device": "cpu"})).to(device)
        if function is torch.randperm:
            kwargs.pop("pin_memory", None)  # a driver pins
        if function is Tensor.unbind and isinstance(args[0], There):  # its views cannot be made under inference mode
            at = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            before = (slice(None),) * at  # maps of learners keep their tokens
            return tuple(args[0][(*before, i)] for i in range(args[0].shape[at]))
        if function is Tensor.tolist and isinstance(args[0], There):
            return args[0].cpu().tolist()
        if function in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], There):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            at = tuple(torch.as_tensor(x).to(args[0].device) if isinstance(x, list | np.ndarray) else x for x in places)
            args = (args[0], at if isinstance(args[1], tuple) else at[0], *args[2:])
        return function(*args, **kwargs)


@contextmanager
def _autocast(device: str, dtype: torch.dtype = torch.float16, enabled: bool = True) -> Iterator[None]:
    """`torch.autocast`, which refuses CUDA where there is no GPU."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.clear_autocast_cache()


@contextmanager
def pretended(device: str = "meta", *, indices: bool = False, deterministic: bool = True) -> Iterator[Pretended]:
    """`tensor.to(device)` is on the device in here; autocast for `meta` is the CPU's; options: see `Pretended`."""
    autocast, as_subclass = torch.autocast, Tensor.as_subclass
    if device == "cuda":
        torch._C._ensureCUDADeviceGuardSet()
    with (
        torch.backends.cudnn.flags(enabled=device != "cuda"),  # its operators have no counterparts on the CPU
        patch.object(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True),
        patch.object(
            torch,
            "autocast",
            _autocast if device == "cuda" else lambda device, *args, **kwargs: autocast("cpu", *args, **kwargs),
        ),
        patch.object(
            Tensor,
            "as_subclass",
            lambda values, kind: _As.apply(values, kind) if isinstance(values, There) else as_subclass(values, kind),
        ),
        Pretended(device, indices=indices, deterministic=deterministic) as mode,
        _Makers(),
    ):
        yield mode


def there(values: Tensor) -> Tensor:
    return There(values.clone())
