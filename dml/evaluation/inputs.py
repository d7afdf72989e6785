"""Embeddings and labels as a caller has them, checked once and turned into tensors."""

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dml.errors import UserError


def as_embeddings(values: ArrayLike | Tensor, name: str) -> Tensor:
    """`[N,D]`, on the device where it is.

    Raises:
        UserError: another number of dimensions, no row or no column, or a value that is not finite.
    """
    tensor = _tensor(values)
    if tensor.dim() != 2 or 0 in tensor.shape:
        raise UserError(f"{name} has shape {list(tensor.shape)}; give it as [N,D] with at least one row and column.")
    broken = (~tensor.isfinite()).any(1).nonzero()
    if len(broken):
        raise UserError(
            f"Row {int(broken[0])} of {name} holds NaN or infinity ({len(broken)} such rows); look for a diverged "
            "training or a division by a zero norm."
        )
    return tensor


def as_labels(values: ArrayLike | Tensor, embeddings: Tensor, name: str) -> Tensor:
    """`[N]` int64 on the device of the embeddings that it belongs to; only equality of labels has a meaning.

    Raises:
        UserError: labels that are not whole numbers, or another number of them than of embeddings.
    """
    tensor = _tensor(values)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise UserError(f"{name} holds {tensor.dtype}; give class labels as whole numbers.")
    if tensor.shape != embeddings.shape[:1]:
        raise UserError(
            f"{name} has shape {list(tensor.shape)} beside {len(embeddings)} embeddings; give one label a row."
        )
    return tensor.to(embeddings.device, torch.int64)


def as_pair(queries: ArrayLike | Tensor, gallery: ArrayLike | Tensor | None) -> tuple[Tensor, Tensor]:
    """Both as tensors on the device of the queries; the same one twice without a gallery."""
    points = as_embeddings(queries, "embeddings")
    if gallery is None:
        return points, points
    items = as_embeddings(gallery, "gallery").to(points.device)
    if items.shape[1] != points.shape[1]:
        raise UserError(
            f"Queries have {points.shape[1]} dimensions and the gallery {items.shape[1]}: embed both alike."
        )
    return points, items


def _tensor(values: ArrayLike | Tensor) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach()
    # torch refuses negative strides and warns of read-only memory.
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))
