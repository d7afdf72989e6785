"""`python -m dml.describe`: the model of a configuration, without its data: stages, learners, parameters, flops.

One flop is one multiply-add, of one image at `image_size`. The last line is one JSON object with the totals.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from dml.command import command

if TYPE_CHECKING:
    from torch import nn

    from dml.methods.base import Method


@dataclass
class Part:
    """A stage, head or layer: its parameters, and what one image meets there."""

    name: str
    params: int
    flops: int = 0
    shape: tuple[int, ...] = ()


def _task(config: DictConfig) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from dml.build import build_method
    from dml.options import check

    check(config, without=("dataset", "download"))

    config.backbone.weights = "none"  # sizes do not depend on them
    config.runtime.train_classes = 2  # known with the data; proxies are not counted
    method = build_method(config)
    parts, total = describe(method, config.image_size)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    for title in ("output", "parameters", "flops"):
        table.add_column(title, justify="right", no_wrap=True)
    for part in parts:
        table.add_row(part.name, " x ".join(map(str, part.shape)), f"{part.params:,}", f"{part.flops:,}")
    Console().print(table)
    print(
        f"{type(method).__name__} on {config.image_size} x {config.image_size} pixels: {total['learners']} learners of "
        f"{total['dim'] // total['learners']}, {total['params'] / 1e7:.2f}e7 parameters, "
        f"{total['flops'] / 1e9:.2f}e9 flops an image (one multiply-add is one flop)"
    )
    print(json.dumps(total))


def describe(method: "Method", image_size: int) -> tuple[list[Part], dict[str, int]]:
    """The parts of a method in the order in which an image first meets them, and its totals.

    Returns:
        Parts; a part that several learners pass is counted each time in `flops`, once in `params`; its shape begins
        with how many learners pass it at once where that is more than one. Totals `params`, `flops`
        (`dml.build.complexity`), `learners` L and `dim` D = L*d.
    """
    import torch

    from dml.build import complexity, counted

    total = complexity(method, image_size)
    parts: list[Part] = []
    with torch.inference_mode(), counted() as counter:
        hooks = []
        for name, module in _parts(method):
            hooks += _watch(module, Part(name, sum(p.numel() for p in module.parameters())), parts, counter)
        training = method.training
        _, learners, width = method.eval().embed(torch.zeros(1, 3, image_size, image_size)).shape
        method.train(training)
    for hook in hooks:
        hook.remove()
    return parts, total | {"learners": learners, "dim": learners * width}


def _parts(method: "Method") -> Iterator[tuple[str, "nn.Module"]]:
    """Stages one by one, and whatever else has parameters."""
    from dml.models.backbones.stages import Stages

    def walk(name: str, module: "nn.Module") -> Iterator[tuple[str, "nn.Module"]]:
        if isinstance(module, Stages):
            yield from ((f"{name}.{stage}", one) for stage, one in module.stages.items())
        elif any(True for _ in module.parameters(recurse=False)) or not any(True for _ in module.children()):
            yield name, module
        else:
            for child, one in module.named_children():
                yield from walk(f"{name}.{child}", one)

    for name, module in method.named_children():
        if name not in ("normalize", "losses"):
            yield from walk(name, module)


def _watch(module: "nn.Module", part: Part, seen: list[Part], counter: Any) -> list[Any]:
    """Puts `part` among the `seen` when an image enters `module`, and counts what passes."""
    before = 0

    def enter(*_: Any) -> None:
        nonlocal before
        before = counter.get_total_flops()
        if part not in seen:
            seen.append(part)

    def leave(_: Any, __: Any, output: Any) -> None:
        part.flops += (counter.get_total_flops() - before) // 2
        part.shape = tuple(output.shape) if len(output) > 1 else tuple(output.shape[1:])

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


main = command(_task)

if __name__ == "__main__":
    main()
