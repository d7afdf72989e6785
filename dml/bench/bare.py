"""The bare loop that a training is compared with: written by hand, without callbacks, on images already in memory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dml.bench.sizes import Sizes


def _resnet50(dim: int) -> nn.Module:
    from torchvision.models import resnet50

    return resnet50(num_classes=dim)


def _googlenet(dim: int) -> nn.Module:
    from torchvision.models import googlenet

    net = googlenet(num_classes=dim, aux_logits=False, init_weights=False, transform_input=False)
    net.dropout = nn.Identity()
    return net


def _vit_small(dim: int) -> nn.Module:
    import timm

    net: nn.Module = timm.create_model("vit_small_patch16_224", num_classes=dim)
    return net


def _small(dim: int) -> nn.Module:
    from dml.models.backbones.small import small

    net = small()
    return nn.Sequential(net, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(net.dim, dim))


@dataclass(frozen=True)
class Network:
    """One network, for a run of dml and for the bare loop.

    Attributes:
        options: those of a run that trains it.
        make: from the width `dim` of the embedding to the library's network, `[B,3,H,W]` -> `[B,dim]`.
    """

    options: tuple[str, ...]
    make: Callable[[int], nn.Module]


NETWORKS = {
    "resnet50": Network(("backbone=resnet50",), _resnet50),
    "googlenet": Network(("backbone=googlenet",), _googlenet),
    "vit_small": Network(("backbone=timm", "backbone.model_name=vit_small_patch16_224", "head=cls"), _vit_small),
    "small": Network(("backbone=small",), _small),
}


def multi_similarity(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Returns the multi-similarity loss of the pairs that its miner selects (Wang et al. 2019), in the usual setting.

    It is written here once more so that the bare loop uses nothing of dml; a test compares the two.

    Args:
        embeddings: `[N,d]` of unit norm.
        labels: `[N]`.
    """
    similar = embeddings @ embeddings.T
    same = labels[:, None] == labels[None, :]
    positive, negative = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device), ~same
    with torch.no_grad():
        hardest = similar.masked_fill(same, -torch.inf).amax(1, keepdim=True)
        easiest = similar.masked_fill(~positive, torch.inf).amin(1, keepdim=True)
        positive &= similar - 0.1 < hardest
        negative &= similar + 0.1 > easiest
    pull = (torch.exp(-2 * (similar - 0.5)) * positive).sum(1).log1p() / 2
    push = (torch.exp(40 * (similar - 0.5)) * negative).sum(1).log1p() / 40
    return (pull + push).mean()


class Bare:
    """Training steps of a network with a linear head: forward, loss, backward, AdamW.

    Network and loss are compiled as one graph. It uses channels last, bfloat16 by autocast if the sizes say so, and
    images that lie on the device. Calling it takes so many steps.
    """

    def __init__(self, network: str, sizes: Sizes) -> None:
        torch.manual_seed(0)
        self.device, self.sizes = sizes.where(), sizes
        self.network = NETWORKS[network].make(sizes.dim).train().to(self.device)
        self.network.to(memory_format=torch.channels_last)
        cuda = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-4, weight_decay=1e-4, fused=cuda)
        images = torch.rand(sizes.batch, 3, sizes.image, sizes.image, device=self.device)
        self.images = images.to(memory_format=torch.channels_last)
        self.labels = torch.arange(sizes.batch, device=self.device) // 4
        self.loss = torch.compile(self._loss, dynamic=False)

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.sizes.bfloat16):
            embeddings = self.network(images)
        return multi_similarity(F.normalize(embeddings.float()), labels)

    def __call__(self, steps: int) -> None:
        with torch.enable_grad():
            for _ in range(steps):
                self.optimizer.zero_grad()
                self.loss(self.images, self.labels).backward()
                self.optimizer.step()

    @property
    def parameters(self) -> int:
        """Returns the number of parameters of the network."""
        return sum(parameter.numel() for parameter in self.network.parameters())
