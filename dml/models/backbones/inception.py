"""Inception modules whose layers have Caffe's names, shared by the Caffe GoogLeNets."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Inception(nn.Module):
    """Parallel chains of layers on one input, concatenated along the channels: [B, C, h, w] -> [B, sum C_i, h', w'].

    The layers are direct children under their own names (`3x3_reduce`, `relu_3x3_reduce`, ...), so that state-dict
    keys follow from Caffe's.
    """

    def __init__(self, *chains: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.chains = [list(chain) for chain in chains]
        for chain in chains:
            for name, layer in chain.items():
                self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, sum C_i, h', w']."""
        return torch.cat([self._run(chain, x) for chain in self.chains], 1)

    def _run(self, chain: list[str], x: Tensor) -> Tensor:
        for name in chain:
            x = self._modules[name](x)  # type: ignore[misc]
        return x


def caffe_names(stages: nn.ModuleDict) -> dict[str, str]:
    """Returns Caffe's keys (`/` written `_`) -> our keys: inception_3a_1x1.weight -> stages.inception3a.1x1.weight.

    Stage conv3 holds layers whose names in Caffe begin with conv2.
    """
    names: dict[str, str] = {}
    for stage, module in stages.items():
        prefix = "conv2" if stage == "conv3" else stage.replace("inception", "inception_")
        names |= {f"{prefix}_{key}": f"stages.{stage}.{key}" for key in module.state_dict()}
    return names
