"""The parts of a model: what each is made of, and what an image costs there.

One flop is one multiply-add, of one image.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


def describe(method: "Method", image_size: int) -> tuple[list[Part], dict[str, int]]:
    """The parts of a method in the order in which an image first meets them, and its totals.

    Returns:
        Parts; a part that several learners pass is counted each time in `flops`, once in `params`; its shape begins
        with how many learners pass it at once where that is more than one. Totals `params`, `flops`
        (`dml.training.complexity`), `learners` L and `dim` D = L*d.
    """
    import torch

    from dml.training.complexity import complexity, counted

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
        maps = output[0] if isinstance(output, tuple) else output
        part.shape = tuple(maps.shape) if len(maps) > 1 else tuple(maps.shape[1:])

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
