"""Cuts vision transformers of timm into stages: the patches, then one stage per block."""

import copy
from typing import Any

import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from dml.errors import UserError
from dml.models.backbones.sequence import need_sides
from dml.models.tokens import TokenMap, taken

SEQUENCES = (VisionTransformer, Eva)  # classes with patches of one size from the first block to the last


class Patches(nn.Module):
    """The first stage: images `[B,3,H,W]` -> patch tokens with positions `[B,C,H/p,W/p]`, carrying class and register
    tokens along.

    Positions fit all sides that are multiples of p: timm interpolates the learned ones.

    Raises:
        UserError: (forward) the sides of the images are no multiples of p, or a GPU that may only use deterministic
            operations would have to interpolate positions that learn.
    """

    def __init__(self, network: Any, name: str) -> None:
        super().__init__()
        self.network, self.name = network, name
        self.count: int = network.num_prefix_tokens
        self.patch: tuple[int, int] = network.patch_embed.feat_ratio(as_scalar=False)

    def forward(self, images: Tensor) -> Tensor:
        need_sides(images, self.patch, f"{self.name} cuts images into patches of {self.patch[0]} pixels")
        if images.is_cuda and torch.are_deterministic_algorithms_enabled():
            self._need_order(images)
        sequence = self.network.forward_features(images)  # without blocks
        return _map(sequence, self.count, images.shape[2] // self.patch[0])

    def _need_order(self, images: Tensor) -> None:
        """Refuses images for which PyTorch would add gradients of positions in a changing order."""
        positions, patch, grid = self.network.pos_embed, self.patch, self.network.patch_embed.grid_size
        learned = positions is not None and positions.requires_grad and torch.is_grad_enabled()
        fits = tuple(images.shape[2:]) == (grid[0] * patch[0], grid[1] * patch[1])
        if learned and not fits and _is_strict():
            raise UserError(
                f"trainer.deterministic=true: {self.name} interpolates its positions for images of {images.shape[2]} "
                f"pixels, which PyTorch has no deterministic gradient of on a GPU; choose "
                f"image_size={grid[0] * patch[0]} or trainer.deterministic=warn."
            )


@torch.compiler.assume_constant_result
def _is_strict() -> bool:
    """Returns whether PyTorch refuses operations without an order, or only warns of them. Compiled steps cannot ask."""
    return not torch.is_deterministic_algorithms_warn_only_enabled()


class Block(nn.Module):
    """A stage of one transformer block: `[B,C,h,w]` with its tokens -> the same shapes.

    Args:
        block: timm's block, `[B,P+N,C]` -> the same.
        count: P, number of tokens beside the patches.
        positions: rotary positions for any grid; None: the block needs none.
        norm: the final norm, for the last block.
    """

    def __init__(self, block: nn.Module, count: int, positions: nn.Module | None, norm: nn.Module | None) -> None:
        super().__init__()
        self.block, self.count, self.positions = block, count, positions
        self.norm = nn.Identity() if norm is None else norm

    def forward(self, features: Tensor) -> Tensor:
        patches, tokens = taken(features, self.count)
        _, _, height, width = patches.shape
        sequence = patches.flatten(2).transpose(1, 2)
        sequence = torch.cat([tokens, sequence], dim=1)
        if self.positions is None:
            sequence = self.block(sequence)
        else:
            of_grid: Any = self.positions
            sequence = self.block(sequence, rope=of_grid.get_embed(shape=(height, width)))
        return _map(self.norm(sequence), self.count, height)


def _map(sequence: Tensor, count: int, height: int) -> Tensor:
    """Turns `[B,P+N,C]` into a map `[B,C,h,w]` that carries the first P tokens along."""
    patches = sequence[:, count:].transpose(1, 2).unflatten(2, (height, -1))
    return TokenMap.of(patches, sequence[:, :count]) if count else patches


def cut(network: Any, name: str) -> dict[str, nn.Module]:
    """Cuts a transformer into stages; the final norm is at the end of the last one.

    Raises:
        UserError: the network learns its rotary positions.
    """
    rope = getattr(network, "rope", None)
    if rope is not None and any(True for _ in rope.parameters()):
        raise UserError(f"timm's {name} learns rotary positions for each block: choose another transformer.")
    blocks, norm = list(network.blocks), network.norm
    network.blocks, network.norm = nn.Sequential(), nn.Identity()
    for rest in ("fc_norm", "head_drop", "head", "head_dist", "attn_pool"):  # modules after the map
        if isinstance(getattr(network, rest, None), nn.Module):
            setattr(network, rest, nn.Identity())
    count = network.num_prefix_tokens
    stages: dict[str, nn.Module] = {"patches": Patches(network, name)}
    for i, block in enumerate(blocks):
        last = i == len(blocks) - 1
        stages[f"block{i}"] = Block(block, count, copy.deepcopy(rope), norm if last else None)
    return stages
