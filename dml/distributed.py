"""Communication between ranks: gathers the global batch for a loss, and divides an evaluation among the ranks.

Lightning's `all_gather(sync_grads=True)` was passed over: it rests on `torch.distributed.nn.functional`,
for which current torch gives a deprecation warning at every step.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed import (
    ProcessGroup,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    broadcast,
    get_backend,
    get_rank,
    get_world_size,
    is_initialized,
    new_group,
)

T = TypeVar("T")


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return gather_rows(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        gradient = gradient.contiguous()
        all_reduce(gradient)
        return gradient.chunk(get_world_size())[get_rank()]


def gather_rows(rows: Tensor) -> Tensor:
    """Gathers `[b,...]` of every rank to `[B,...]` in rank order, without gradient; a single process gets `rows` back.

    All ranks need the same b.
    """
    if not _several():
        return rows
    gathered = rows.new_empty((get_world_size() * len(rows), *rows.shape[1:]))
    all_gather_into_tensor(gathered, rows.contiguous())
    return gathered


def gather(rows: Tensor) -> Tensor:
    """Gathers `[b,...]` of every rank to `[B,...]` in rank order, with gradients; a single process gets `rows` back.

    All ranks need the same b. In the backward pass the losses of all ranks, which are equal, send gradients to this
    rank's rows, and these are summed. The sum is world size times the gradient of one loss; when DDP averages the
    gradients of parameters, it divides by the world size again. Two ranks with half the batch each therefore take the
    step of one rank with the whole batch.
    """
    if not _several():
        return rows
    return _Gather.apply(rows) if rows.requires_grad else gather_rows(rows)


def host_group() -> ProcessGroup | None:
    """Makes a group of all processes that communicates through host memory (gloo).

    Returns None for a single process, or if the default group already uses gloo. All processes have to call it.
    """
    if not _several() or get_backend() == "gloo":
        return None
    group = new_group(backend="gloo")
    assert isinstance(group, ProcessGroup)  # every process is a member
    return group


def on_any_rank(found: bool, group: ProcessGroup | None) -> bool:
    """Tells every rank whether `found` is true on at least one rank, without waiting for a device.

    Args:
        group: what `host_group` returned.
    """
    if not _several():
        return found
    ranks = torch.tensor(int(found))
    all_reduce(ranks, group=group)  # the sum over ranks
    return bool(ranks)


def of_first(value: Tensor) -> Tensor:
    """Returns the first rank's value on all ranks. Shape and type have to be the same on all."""
    if not _several():
        return value
    told = value.clone()
    broadcast(told, 0)
    return told


def _several() -> bool:
    return is_initialized() and get_world_size() > 1


def is_first() -> bool:
    """Returns whether this is the first process of the run. Works before the process group exists, too."""
    return not getattr(rank_zero_only, "rank", 0)


def rank_shard(tiles: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the tiles of this rank: of n ranks, rank r has tiles r, r + n, r + 2n, ...; a single process has all."""
    return tiles[get_rank() :: get_world_size()] if is_initialized() else tiles


def sum_of_shards(values: Tensor) -> Tensor:
    """Adds up the values of all ranks, on all ranks.

    Each rank computes its share and leaves zeros elsewhere, so the sum is exact.
    """
    if not _several():
        return values
    # NCCL can only send tensors on the GPU.
    there = values.to("cuda") if get_backend() == "nccl" else values.clone()
    all_reduce(there)
    return there.to(values.device)


def from_all_ranks(found: T) -> list[T]:
    """Returns the values of all ranks in rank order, on all ranks. Values are plain containers and arrays."""
    if not _several():
        return [found]
    of_ranks: list[Any] = [None] * get_world_size()
    all_gather_object(of_ranks, found)
    return of_ranks
