"""Calculates what the loss of the global batch costs on many ranks: bytes between ranks, flops and memory.

    python experiments/bench/gathering.py                                   # 64 images a rank, 512 dimensions
    python experiments/bench/gathering.py --ranks 8 64 --batch 32 --dim 128

Each rank gathers the embeddings of all ranks, as `dml.distributed.gather` does, and computes the loss of all N = ranks
x batch images. This is compared with a step of its own images through a ResNet-50 at 224 pixels, and with DDP's sum of
that network's gradients. One multiply-add is one flop. In a ring, each of R ranks receives (R - 1) / R of what is
gathered, and twice that of what is summed. A link is given as the bytes that one rank receives a second. Latency, which
grows with the ranks, and overlap with the backward pass are left out.

    gathered    MB that a rank receives in a step: float32 embeddings, labels and row numbers of all ranks
    summed      MB of the gradient of all embeddings, which the backward pass sums over the ranks
    DDP         MB of the network's own gradients
    25 GB/s ... milliseconds that `gathered` and `summed` take on a link of that speed
    loss        Gflops of the N x N similarities, forward and backward
    of ResNet   these flops relative to the network's
    one N x N   MB of one float32 matrix of that size
    kept        MB that multi-similarity with its miner keeps for its backward pass, measured at a small N
"""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dml.configuration.command_line import ending
from dml.losses.miners import MultiSimilarityMiner
from dml.losses.pairwise import MultiSimilarity

FLOPS, PARAMETERS = 4.1e9, 25.6e6  # of a ResNet-50, for an image of 224 pixels
THERE_AND_BACK = 3  # a layer's backward pass is two products of the size of its forward pass
LINKS = (25e9, 200e9)  # bytes a second: a network of 200 Gb/s, and NVLink


@dataclass(frozen=True)
class Cost:
    """Cost of a step on one rank, in bytes and flops. The module's docstring explains the fields."""

    images: int
    gathered: float
    summed: float
    ddp: float
    loss: float
    network: float
    matrix: float

    def seconds(self, link: float) -> float:
        """Returns the seconds of the loss's traffic on a link of so many bytes a second, without DDP's own traffic."""
        return (self.gathered + self.summed) / link


def cost(ranks: int, batch: int, dim: int) -> Cost:
    """Calculates the cost of the loss of `ranks` x `batch` images in `dim` dimensions."""
    images, received = ranks * batch, (ranks - 1) / ranks
    embeddings = 4 * images * dim
    return Cost(
        images=images,
        gathered=received * (embeddings + 2 * 8 * images),
        summed=2 * received * embeddings,
        ddp=2 * received * 4 * PARAMETERS,
        loss=THERE_AND_BACK * images**2 * dim,
        network=THERE_AND_BACK * batch * FLOPS,
        matrix=4 * images**2,
    )


def kept(images: int = 1024, dim: int = 32) -> float:
    """Measures how many bytes multi-similarity with its miner keeps for its backward pass, for each pair of images."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    labels = torch.arange(images) // 4
    embeddings = F.normalize(torch.randn(images, dim, generator=torch.Generator().manual_seed(0))).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        pairs = MultiSimilarityMiner()(embeddings, labels)
        loss = MultiSimilarity()(embeddings, labels, pairs)
    assert loss.requires_grad
    return sum(size for size in storages.values() if size >= images**2) / images**2


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--batch", type=int, default=64, help="images on each rank")
    parser.add_argument("--dim", type=int, default=512)
    options = parser.parse_args()
    of_a_pair = kept()
    links = [f"{link / 1e9:.0f} GB/s" for link in LINKS]
    titles = ("ranks", "N", "gathered", "summed", "DDP", *links, "loss", "of ResNet", "one N x N", "kept")
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    for ranks in options.ranks:
        one = cost(ranks, options.batch, options.dim)
        traffic = [f"{value / 1e6:,.1f} MB" for value in (one.gathered, one.summed, one.ddp)]
        times = [f"{1000 * one.seconds(link):.2f} ms" for link in LINKS]
        share = f"{one.loss / one.network:.2%}"
        sizes = [f"{value / 1e6:,.0f} MB" for value in (one.matrix, of_a_pair * one.images**2)]
        row = (str(ranks), f"{one.images:,}", *traffic, *times, f"{one.loss / 1e9:,.1f} G", share, *sizes)
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
