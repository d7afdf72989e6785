"""Cuts networks of timm into stages, if they are a sequence of modules from the image to the map."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dml.errors import UserError

LISTS = (nn.Sequential, nn.ModuleList)
NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm)  # timm's own contain an activation
POOLS = (nn.MaxPool2d, nn.AvgPool2d)
FEWEST = 3  # stages; fewer have no middle to branch at

Unit = tuple[str, nn.Module]


class ChannelsLast(nn.Module):
    """A stage `[B,C,h,w] -> [B,C',h',w']` around a module that computes in `[B,h,w,C]`.

    Args:
        body: `[B,h,w,C] -> [B,h',w',C']`, or `[B,3,H,W] -> [B,h',w',C']` with `images`.
        images: the input is images, whose axes are not permuted.
    """

    def __init__(self, body: nn.Module, *, images: bool = False) -> None:
        super().__init__()
        self.body, self.images = body, images

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x if self.images else x.permute(0, 2, 3, 1))
        return out.permute(0, 3, 1, 2)


class Merging(nn.Module):
    """Swin's merging of 2 x 2 cells into one, `[B,h,w,C] -> [B,h/2,w/2,C']`, with a stride that can be removed.

    Args:
        body: timm's module.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.every_cell = body, False

    def keep_resolution(self) -> None:
        """From now on merges each cell with those right of it and below it; cells at the last edges are repeated."""
        self.every_cell = True

    def forward(self, x: Tensor) -> Tensor:
        for side in (1, 2) if self.every_cell else ():
            after = torch.cat([x.narrow(side, 1, x.shape[side] - 1), x.narrow(side, x.shape[side] - 1, 1)], dim=side)
            x = torch.stack([x, after], dim=side + 1).flatten(side, side + 1)
        out: Tensor = self.body(x)
        return out


class Entrance(nn.Module):
    """The first stage of a network that only takes images whose sides are multiples of a number.

    Args:
        body: the stage.
        pixels: the sides have to be multiples of this.
        why: why that is so, for the message.

    Raises:
        UserError: (forward) the sides of the images are no such multiples.
    """

    def __init__(self, body: nn.Module, pixels: int, why: str) -> None:
        super().__init__()
        self.body, self.pixels, self.why = body, pixels, why

    def forward(self, images: Tensor) -> Tensor:
        need_sides(images, (self.pixels, self.pixels), self.why)
        out: Tensor = self.body(images)
        return out


def need_sides(images: Tensor, multiple: tuple[int, int], why: str) -> None:
    """Raises UserError unless the sides of images `[B,3,H,W]` are multiples of some numbers; proposes near ones."""
    (height, width), (tall, wide) = images.shape[-2:], multiple
    if height % tall or width % wide:
        below = height // tall * tall
        sizes = f"{below} or {below + tall}" if below else f"{tall}"
        raise UserError(f"image_size={height}: {why}; choose {sizes}.")


def cut_sequence(network: Any, probe: int) -> dict[str, nn.Module]:
    """Cuts a network into stages, which share its modules and are named after them.

    A stage is a block, or a sequence of layers up to the next block or pooling; a norm after a block is in the block's
    stage. Modules after the map are left out.

    Args:
        network: with `forward_features`, `[B,3,H,W] -> [B,C,h,w]`, or `[B,h,w,C]` if its `output_fmt` says so.
        probe: side in pixels of a square image that the network takes.

    Raises:
        ValueError: the network gives no map, or is no sequence of modules that each take the output of the last one.
    """
    network.eval()
    images = torch.rand(1, 3, probe, probe, generator=torch.Generator().manual_seed(0))
    called, features = _called(network, images)
    last = getattr(network, "output_fmt", "NCHW") == "NHWC"
    if features.dim() != 4 or features.shape[3 if last else 1] != network.num_features:
        raise ValueError("it gives no map")
    if len({id(module) for _, module in called}) != len(called):
        raise ValueError("a module is passed more than once")
    stages: dict[str, nn.Module] = {}
    for i, (name, modules) in enumerate(_grouped(called)):
        body = nn.Sequential(*(Merging(one) if type(one).__name__ == "PatchMerging" else one for one in modules))
        whole = body if len(body) > 1 else body[0]
        stages[name.replace(".", "_")] = ChannelsLast(whole, images=i == 0) if last else whole
    with torch.no_grad():
        out = images
        for stage in stages.values():
            out = stage(out)
    if len(stages) < FEWEST or not _same(out, features.permute(0, 3, 1, 2) if last else features):
        raise ValueError("its modules are no chain")
    return stages


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def _called(network: Any, images: Tensor) -> tuple[list[Unit], Tensor]:
    """Returns the units that images pass, in order, and the output."""
    called: list[Unit] = []
    handles = [
        module.register_forward_hook(lambda *_, unit=(name, module): called.append(unit))
        for name, module in _units("", network)
    ]
    try:
        with torch.no_grad():
            return called, network.forward_features(images)
    finally:
        for handle in handles:
            handle.remove()


def _units(name: str, module: nn.Module) -> Iterator[Unit]:
    """Yields the units of a network: lists, and modules made of lists alone, are taken apart."""
    for child, one in module.named_children():
        whole = f"{name}.{child}" if name else child
        if isinstance(one, nn.Identity):
            continue
        if _is_list(one) and (not _is_layer(one) or any(isinstance(m, POOLS) for m in one.children())):
            yield from _units(whole, one)
        else:
            yield whole, one


def _is_list(module: nn.Module) -> bool:
    children = {name for name, child in module.named_children() if not isinstance(child, nn.Identity)}
    of_blocks = "blocks" in children and children <= {"blocks", "downsample"}  # a stage of ConvNeXt, Swin, MaxViT
    numbered = bool(children) and all(re.fullmatch(r"b\d+", name) for name in children)  # of RegNet
    return isinstance(module, LISTS) or of_blocks or numbered


def _is_layer(module: nn.Module) -> bool:
    """Says whether a module is a single layer, or a list of layers, as a stem is."""
    if isinstance(module, nn.Sequential):
        return all(_is_layer(one) for one in module)
    return isinstance(module, NORMS) or not any(True for _ in module.children())


def _grouped(called: list[Unit]) -> list[tuple[str, list[nn.Module]]]:
    groups: list[tuple[str, list[nn.Module]]] = []
    layers = False  # whether the last group has layers only, and no block
    for name, module in called:
        convolves = any(isinstance(one, nn.Conv2d) for one in module.modules())
        joins = _is_layer(module) and not isinstance(module, POOLS) and (layers or not convolves)
        if groups and joins:
            groups[-1][1].append(module)
        else:
            groups.append((name, [module]))
            layers = _is_layer(module)
    return groups
