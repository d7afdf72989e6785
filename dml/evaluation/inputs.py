"""Checks of what a caller gives - embeddings, labels, numbers - and their conversion to tensors."""

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dml.errors import UserError

# Largest magnitude of an embedding's value: squares and sums of such values stay far within float64.
LARGEST = float(torch.finfo(torch.float32).max)


def as_number(value: Any, name: str, least: int = 1) -> int:
    """Returns a whole number of Python's or NumPy's as int.

    Raises:
        UserError: it is something else, or not between `least` and 2^32 - 1.
    """
    try:
        number = None if isinstance(value, bool | np.bool_ | Tensor) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number < 2**32:
        raise UserError(f"{name}={value!r} has to be a whole number between {least} and {2**32 - 1}.")
    return number


def as_ks(values: Iterable[Any], name: str = "ks") -> tuple[int, ...]:
    """Returns the K of Recall@K, in the order in which they are given.

    Raises:
        UserError: they are no sequence of whole numbers from 1, or one is there twice.
    """
    try:
        given = list(values)
    except TypeError:
        raise UserError(f"{name}={values!r} has to be a sequence of whole numbers, such as (1, 10).") from None
    found = tuple(as_number(k, f"a K in {name}") for k in given)
    if len(set(found)) < len(found):
        raise UserError(f"{name}={list(found)} names a K twice: name each once.")
    return found


def as_embeddings(values: ArrayLike | Tensor, name: str) -> Tensor:
    """Returns embeddings as a tensor `[N,D]`, on the device where they are.

    Raises:
        UserError: they are not real numbers, have another number of dimensions, have no row or no column, or hold a
            value that is not finite or is beyond the range of float32.
    """
    tensor = _tensor(values, name)
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise UserError(f"{name} holds {tensor.dtype}; give real numbers.")
    if tensor.dim() != 2 or 0 in tensor.shape:
        raise UserError(f"{name} has shape {list(tensor.shape)}; give it as [N,D] with at least one row and column.")
    broken = (~tensor.isfinite()).any(1).nonzero()
    if len(broken):
        raise UserError(
            f"Row {int(broken[0])} of {name} holds NaN or infinity, and {len(broken)} rows do in all: look for a "
            "diverged training or a division by a zero norm."
        )
    if max(abs(float(bound)) for bound in tensor.aminmax()) > LARGEST:
        raise UserError(f"{name} holds values beyond {LARGEST:.2g}, the range of float32; divide all by one number.")
    return tensor


def as_labels(values: ArrayLike | Tensor, embeddings: Tensor, name: str) -> Tensor:
    """Returns labels as `[N]` int64 on the device of their embeddings. Only the equality of labels has a meaning.

    Raises:
        UserError: they are not whole numbers, or not one for each embedding.
    """
    tensor = _tensor(values, name)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise UserError(f"{name} holds {tensor.dtype}; give whole numbers.")
    if tensor.shape != embeddings.shape[:1]:
        raise UserError(
            f"{name} has shape {list(tensor.shape)} beside {len(embeddings)} embeddings; give one label for each row."
        )
    return tensor.to(embeddings.device, torch.int64)


def as_pair(queries: ArrayLike | Tensor, gallery: ArrayLike | Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns queries and gallery as tensors on the device of the queries; without a gallery the queries twice.

    Raises:
        UserError: as `as_embeddings`, or their dimensions differ.
    """
    points = as_embeddings(queries, "embeddings")
    if gallery is None:
        return points, points
    items = as_embeddings(gallery, "gallery").to(points.device)
    if items.shape[1] != points.shape[1]:
        raise UserError(
            f"Queries have {points.shape[1]} dimensions and the gallery {items.shape[1]}: embed both alike."
        )
    return points, items


def _tensor(values: ArrayLike | Tensor, name: str) -> Tensor:
    """Returns a dense tensor of a type that torch computes with. Raises UserError if it cannot be made."""
    if isinstance(values, Tensor):
        if values.layout != torch.strided or values.is_quantized:
            raise UserError(f"{name} is a tensor of layout {values.layout}; give a dense one of plain numbers.")
        if values.dtype not in (torch.uint16, torch.uint32, torch.uint64):
            return values.detach()
        return _tensor(values.detach().cpu().numpy(), name).to(values.device)
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:  # rows of different lengths
        raise UserError(f"{name} is no array of numbers ({error}): give rows of equal length.") from error
    if array.dtype.kind not in "biufc":
        raise UserError(f"{name} holds {array.dtype}; give numbers.")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:  # torch counts with int64
        if array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise UserError(f"{name} holds {array.max()}, which is beyond int64; give smaller numbers.")
        array = array.astype(np.int64)
    elif array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    # torch refuses another machine's byte order and negative strides, and warns of read-only memory.
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))
