"""What a loss needs to see the global batch on every rank, and what divides an evaluation among them.

Lightning's `all_gather(sync_grads=True)` was passed over: it rests on `torch.distributed.nn.functional`,
which current torch deprecates with a warning at every step.
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
    """`[b,...]` of every rank -> `[B,...]` in rank order, without gradient; `rows` itself on a single process."""
    if not _several():
        return rows
    gathered = rows.new_empty((get_world_size() * len(rows), *rows.shape[1:]))
    all_gather_into_tensor(gathered, rows.contiguous())
    return gathered


def gather(rows: Tensor) -> Tensor:
    """`[b,...]` of every rank, equal b on all, -> `[B,...]` in rank order, with gradient to every rank's part; `rows`
    itself on a single process.

    The backward pass sums the gradients that all ranks' (equal) losses send to this rank's rows: world size times
    the gradient of one loss, which DDP's averaging of parameter gradients divides by the world size again. Two
    ranks with half the batch each then take the step of one rank with the whole batch.
    """
    if not _several():
        return rows
    return _Gather.apply(rows) if rows.requires_grad else gather_rows(rows)


def host_group() -> ProcessGroup | None:
    """A group of all processes that talks without their devices; None: the group that there is does, or there is one
    process alone. All processes have to ask for it."""
    if not _several() or get_backend() == "gloo":
        return None
    group = new_group(backend="gloo")
    assert isinstance(group, ProcessGroup)  # which all are in
    return group


def on_any_rank(found: bool, group: ProcessGroup | None) -> bool:
    """Whether some rank found something, on all ranks; no rank waits for a device. `group`: see `host_group`."""
    if not _several():
        return found
    ranks = torch.tensor(int(found))
    all_reduce(ranks, group=group)  # a sum
    return bool(ranks)


def of_first(value: Tensor) -> Tensor:
    """The first rank's value, of any shape, on all ranks."""
    if not _several():
        return value
    told = value.clone()
    broadcast(told, 0)
    return told


def _several() -> bool:
    return is_initialized() and get_world_size() > 1


def is_first() -> bool:
    """Whether this is the first process of the run, also before the others are a group with it."""
    return not getattr(rank_zero_only, "rank", 0)


def rank_shard(tiles: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tiles of this rank: of n ranks, rank r has tiles r, r + n, r + 2n and so on; a single process has all."""
    return tiles[get_rank() :: get_world_size()] if is_initialized() else tiles


def sum_of_shards(values: Tensor) -> Tensor:
    """Values that each rank computed for its share and left at zero elsewhere, put together on all ranks, exactly."""
    if not _several():
        return values
    # NCCL sends what lies on the GPU alone.
    there = values.to("cuda") if get_backend() == "nccl" else values.clone()
    all_reduce(there)
    return there.to(values.device)


def from_all_ranks(found: T) -> list[T]:
    """What each rank found, in rank order, on all ranks: plain containers and arrays."""
    if not _several():
        return [found]
    of_ranks: list[Any] = [None] * get_world_size()
    all_gather_object(of_ranks, found)
    return of_ranks
