"""Describes a model piece by piece: output shape, parameters, and flops for one image (1 flop = 1 multiply-add)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from dml.configuration.options import check
from dml.console import print_columns
from dml.methods.base import Method
from dml.models.backbones.stages import Stages
from dml.training.build import build_method
from dml.training.complexity import complexity, counted


@dataclass
class Piece:
    """A stage, head or layer: its parameters, and its flops and output shape for one image."""

    name: str
    params: int
    flops: int = 0
    shape: tuple[int, ...] = ()


def print_description(config: DictConfig) -> None:
    """Prints a table of the pieces, a sentence, and the totals as one line of JSON. `config` is changed.

    Raises:
        UserError: an option is wrong; the data set's options are not checked.
    """
    check(config, without=("dataset", "download"))
    config.backbone.weights = "none"  # sizes do not depend on them
    config.runtime.train_classes = 2  # any number, since proxies are not counted
    method = build_method(config)
    pieces, total = describe(method, config.image_size)
    cells = {
        "output": [" x ".join(map(str, piece.shape)) for piece in pieces],
        "parameters": [f"{piece.params:,}" for piece in pieces],
        "flops": [f"{piece.flops:,}" for piece in pieces],
    }
    print_columns([[piece.name] for piece in pieces], cells)
    learners = total["learners"]
    print(
        f"{type(method).__name__} on {config.image_size} x {config.image_size} pixels: {learners} "
        f"learner{'' if learners == 1 else 's'} of {total['dim'] // learners}, {_short(total['params'])} parameters, "
        f"{_short(total['flops'])} flops an image (one multiply-add is one flop)"
    )
    print(json.dumps(total))


def _short(number: int) -> str:
    """Writes a large number as papers do, such as 1.20e7."""
    mantissa, _, exponent = f"{number:.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if number >= 1000 else str(number)


def describe(method: Method, image_size: int) -> tuple[list[Piece], dict[str, int]]:
    """Lists the pieces of a method in the order in which an image first passes them, and its totals.

    Returns:
        The pieces: one that several learners use counts each time in `flops` and once in `params`; if several learners
        pass it at once, its shape begins with their number. The totals: `params`, `flops` (see
        `dml.training.complexity`), `learners` L and `dim` D = L*d.
    """
    total = complexity(method, image_size)
    pieces: list[Piece] = []
    with torch.inference_mode(), counted() as counter:
        hooks = []
        for name, module in _modules(method):
            hooks += _watch(module, Piece(name, sum(p.numel() for p in module.parameters())), pieces, counter)
        training = method.training
        _, learners, width = method.eval().embed(torch.zeros(1, 3, image_size, image_size)).shape
        method.train(training)
    for hook in hooks:
        hook.remove()
    return pieces, total | {"learners": learners, "dim": learners * width}


def _modules(method: Method) -> Iterator[tuple[str, nn.Module]]:
    """Yields the stages one by one, and all other modules with parameters."""

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
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


def _watch(module: nn.Module, piece: Piece, seen: list[Piece], counter: Any) -> list[Any]:
    """Adds `piece` to `seen` when an image enters `module`, and counts the flops of the module."""
    before = 0

    def enter(*_: Any) -> None:
        nonlocal before
        before = counter.get_total_flops()
        if piece not in seen:
            seen.append(piece)

    def leave(_: Any, __: Any, output: Any) -> None:
        piece.flops += (counter.get_total_flops() - before) // 2
        maps = output[0] if isinstance(output, tuple) else output
        piece.shape = tuple(maps.shape) if len(maps) > 1 else tuple(maps.shape[1:])

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
