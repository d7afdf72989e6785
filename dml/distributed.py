"""Communication between ranks: losses see the global batch on every rank, and an evaluation is divided among them.

All functions also work in a single process. Lightning's `all_gather(sync_grads=True)` was passed over: it uses
`torch.distributed.nn.functional`, for which current torch prints a deprecation warning at every step.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import (
    ProcessGroup,
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    get_backend,
    get_rank,
    get_world_size,
    group,
    is_initialized,
    new_group,
)

from dml.errors import UserError

T = TypeVar("T")

# Its name in torch 2.14, which warns of the former one at every call.
NAMES = ("all_gather_single", "all_gather_into_tensor")
all_gather = next(getattr(torch.distributed, name) for name in NAMES if hasattr(torch.distributed, name))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return gather_rows(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        # A copy, since other nodes of the graph may have been given the same tensor.
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        all_reduce(gradient)
        return gradient.chunk(get_world_size())[get_rank()]


def gather_rows(rows: Tensor) -> Tensor:
    """Gathers `[b,...]` of every rank into `[B,...]` in rank order, without gradient; b has to be equal on all ranks.
    In a single process it returns `rows` itself."""
    if not _several():
        return rows
    gathered = rows.new_empty((get_world_size() * len(rows), *rows.shape[1:]))
    all_gather(gathered, rows.contiguous())
    return gathered


def gather(rows: Tensor) -> Tensor:
    """Gathers `[b,...]` of every rank into `[B,...]` in rank order, with gradient to every rank's part; b has to be
    equal on all ranks. In a single process it returns `rows` itself.

    All ranks compute the same loss. The backward pass sums the gradients that these losses send to this rank's rows,
    which is world size times the gradient of one loss. DDP averages the gradients of parameters, which divides by the
    world size again. So two ranks with half the batch each take the same step as one rank with the whole batch.
    """
    if not _several():
        return rows
    return _Gather.apply(rows) if rows.requires_grad else gather_rows(rows)


@functools.lru_cache(1)
def _host_group(world: ProcessGroup) -> ProcessGroup:
    """Makes the group of all processes; one for each default group `world`, since ranks can form another later."""
    try:
        made = new_group(backend="gloo", timeout=timedelta(days=30))
    except RuntimeError as error:
        # Of gloo's first line without the place in its source and the condition: "[enforce fail at ...] a == b. Cause"
        cause = re.sub(r"^\[enforce [^]]*\] [^.]*\. ", "", f"{error}\n".splitlines()[0]).strip().rstrip(".")
        raise UserError(
            f"The processes do not reach each other by gloo ({cause or repr(error)}): set GLOO_SOCKET_IFNAME to the "
            "network interface that connects the machines."
        ) from error
    assert isinstance(made, ProcessGroup)  # since every process is a member
    return made


def host_group() -> ProcessGroup | None:
    """Returns a group of all processes that communicates through the CPU, None in a single process. All processes have
    to call it.

    In it, processes wait for one that works alone as long as it takes. NCCL ends a process that waited half an hour.

    Raises:
        UserError: the processes do not reach each other.
    """
    return _host_group(group.WORLD) if _several() and group.WORLD is not None else None


def on_any_rank(found: bool) -> bool:
    """Returns on every rank whether any rank found something, without waiting for a device."""
    if not _several():
        return found
    ranks = torch.tensor(int(found))
    all_reduce(ranks, group=host_group())  # the sum over ranks
    return bool(ranks)


def wait_for_all() -> None:
    """Waits until all ranks have come here."""
    if _several():
        barrier(group=host_group())


def of_first(value: Tensor) -> Tensor:
    """Returns the first rank's value, of any shape, on all ranks."""
    if not _several():
        return value
    told = value.clone()
    broadcast(told, 0)
    return told


@contextmanager
def own_draws(device: torch.device) -> Iterator[None]:
    """Makes torch draw other numbers on each rank meanwhile, since dropout would otherwise have the same masks on all
    ranks. Afterwards all ranks draw the same again, as if nothing had been drawn.

    Args:
        device: of the rank.
    """
    if not _several():
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(torch.randint(2**32, ())) + get_rank())  # the first number is the same on all
        yield


def _several() -> bool:
    return is_initialized() and get_world_size() > 1


def is_first() -> bool:
    """Returns whether this is the first process of the run, also before the processes form a group."""
    from pytorch_lightning.utilities.rank_zero import rank_zero_only  # takes seconds, and what reads results needs none

    return not getattr(rank_zero_only, "rank", 0)


def rank_shard(tiles: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns this rank's share of the tiles: of n ranks, rank r has tiles r, r + n, r + 2n and so on. A single process
    has all."""
    return tiles[get_rank() :: get_world_size()] if is_initialized() else tiles


def sum_of_shards(values: Tensor) -> Tensor:
    """Combines values that each rank computed for its share and left at zero elsewhere. All ranks get the exact
    result."""
    if not _several():
        return values
    # NCCL sends only what is on the GPU.
    there = values.to("cuda") if get_backend() == "nccl" else values.clone()
    all_reduce(there)
    return there.to(values.device)


def from_all_ranks(found: T) -> list[T]:
    """Returns what each rank found, in rank order, on all ranks. It may be plain containers and arrays."""
    if not _several():
        return [found]
    of_ranks: list[Any] = [None] * get_world_size()
    all_gather_object(of_ranks, found, group=host_group())
    return of_ranks
