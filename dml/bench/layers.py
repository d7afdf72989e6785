"""Time of layers that no library has: GSP's head beside the plain one, and DeML's search for objects."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from dml.bench.results import Figure, Record
from dml.bench.running import Task
from dml.bench.timing import in_turns, ratio
from dml.models.attention import object_attention, object_boxes
from dml.models.gsp import GSPHead
from dml.models.heads import Head

ROUNDS = 5


def measure(task: Task) -> Iterator[Record]:
    yield from task.pieces({"heads": partial(_heads, task), "boxes": partial(_boxes, task)}, 5)


def _heads(task: Task) -> Iterator[Record]:
    """Times forward and backward passes of the heads, in the precision of the throughput part."""
    sizes, device = task.sizes, task.sizes.where()
    torch.manual_seed(0)
    maps = torch.randn(sizes.batch, sizes.channels, sizes.cells, sizes.cells, device=device)
    maps = maps.to(memory_format=torch.channels_last).requires_grad_()
    heads = {
        "GAP": Head(nn.AdaptiveAvgPool2d(1), sizes.channels, sizes.dim).to(device),
        "GSP": GSPHead(sizes.channels, sizes.dim).to(device),
    }

    def job(head: nn.Module) -> Callable[[], None]:
        def step() -> None:
            maps.grad = None
            with torch.autocast(device.type, torch.bfloat16, enabled=sizes.bfloat16):
                pooled: Tensor = head(maps)
            pooled.float().square().sum().backward()

        return step

    times = in_turns({name: job(head) for name, head in heads.items()}, ROUNDS, device, each=sizes.repeats)
    shape = f"[{sizes.batch},{sizes.channels},{sizes.cells},{sizes.cells}]"
    for name, taken in times.items():
        yield Figure(f"{name}'s head, forward and backward, {shape}", 1e3 * statistics.median(taken), "ms")
    yield Figure("GSP's head / GAP's", ratio(times["GSP"], times["GAP"]))


def _boxes(task: Task) -> Iterator[Record]:
    """Times how DeML gets from feature maps to boxes: the random walk of object attention, then the largest region."""
    sizes, device = task.sizes, task.sizes.where()
    generator = torch.Generator().manual_seed(0)
    side = 2 * sizes.cells
    maps = torch.randn(sizes.batch, sizes.channels // 2, side, side, generator=generator).to(device)
    coarse = torch.rand(sizes.batch, 1, side, side, generator=generator)
    size = (sizes.pixels, sizes.pixels)
    proposals = nn.functional.interpolate(coarse, size, mode="bilinear", align_corners=False).squeeze(1).to(device)
    jobs: dict[str, Callable[[], object]] = {
        f"DeML's object attention, {list(maps.shape)}": lambda: object_attention(maps),
        f"DeML's boxes, {list(proposals.shape)}": lambda: object_boxes(proposals),
    }
    for name, taken in in_turns(jobs, ROUNDS, device, each=sizes.repeats).items():
        yield Figure(name, 1e3 * statistics.median(taken), "ms")
