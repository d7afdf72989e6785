"""A peer in the comparison on Cars196: pytorch-metric-learning in the plain loop that its documentation shows.

    python experiments/bench/peer.py --seed 0 --out runs/peer

From this project it takes the images, the settings of the comparison's baseline (with the learning rates that its
search found, if there was one), and the ranks of queries for intervals. Network, augmentation, sampler, miner and loss
are those of torchvision and pytorch-metric-learning. The figures are those of `dml.evaluation`, beside those of
pytorch-metric-learning's own calculator. Images are decoded and resized once, then cropped by the training process, as
with dataset.cache=memory. It writes the row's figures to `metrics.json`, and those of each query to `queries.npz`.
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torchvision
from omegaconf import DictConfig
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import MultiSimilarityLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner
from pytorch_metric_learning.samplers import MPerClassSampler
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode
from torchvision.transforms import v2
from tqdm import tqdm

from dml.bench.rows import make_folder, write_rows
from dml.configuration.command_line import ending
from dml.configuration.composition import composed
from dml.data.dataset import open_dataset
from dml.data.records import Records
from dml.errors import UserError
from dml.evaluation.evaluator import Embedded
from dml.evaluation.metrics import evaluate
from dml.evaluation.protocol import Conventional
from dml.evaluation.splits import Split
from dml.papers.catalogue import read_experiment
from dml.papers.experiment import Experiment
from dml.runs.scores import write_scores

COMPARISON, ROW = "comparison/cars196", "baseline"
NAMES = {"torch": "pytorch-metric-learning", "xavier": "pytorch-metric-learning, start as here"}
WEIGHTS = "mobilenet_v2_features_imagenet.pth"
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
SIDES = (256, 224)  # shorter side after resizing, and side of the crop, for a size of 224


class Images(Dataset[tuple[Tensor, int]]):
    """Images of rows of the records, resized once to `[3,H,W]` uint8; crops are random in training, else central."""

    def __init__(self, records: Records, rows: np.ndarray, size: int, *, training: bool) -> None:
        before = v2.Compose([v2.Resize(round(size * SIDES[0] / SIDES[1])), v2.PILToTensor()])
        self.images = [before(records.image(int(row))) for row in tqdm(rows, "reading images", leave=False)]
        self.labels = records.labels[rows].tolist()
        cuts = [v2.RandomCrop(size), v2.RandomHorizontalFlip()] if training else [v2.CenterCrop(size)]
        self.transform = v2.Compose([*cuts, v2.ToDtype(torch.float32, scale=True), v2.Normalize(**IMAGENET)])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        return self.transform(self.images[at]), self.labels[at]


def opened(records: Records, size: int) -> tuple[Images, Images]:
    """Returns the training images and the test images."""
    train = Images(records, records.train_rows, size, training=True)
    return train, Images(records, records.query_rows, size, training=False)


class Network(nn.Module):
    """MobileNetV2, average pooling and a linear layer. Batch norm keeps its pre-trained statistics.

    Args:
        dim: width of the embedding.
        weights: file of torchvision's weights, or None.
        start: of the layer: `torch`, uniform up to 1/sqrt(1280), the default; or `xavier`, as in `dml.models.heads`,
            2.3 times as large, and no bias.
    """

    def __init__(self, dim: int, weights: Path | None, start: str) -> None:
        super().__init__()
        net = torchvision.models.mobilenet_v2(weights=None)
        if weights is not None:
            absent, unknown = net.load_state_dict(torch.load(weights, weights_only=True), strict=False)
            assert not unknown
            assert all(name.startswith("classifier") for name in absent)
        self.trunk = nn.Sequential(net.features, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(net.last_channel, dim)
        if start == "xavier":
            nn.init.xavier_uniform_(self.head.weight)
            nn.init.zeros_(self.head.bias)
        self.to(memory_format=torch.channels_last)

    def train(self, mode: bool = True) -> "Network":
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """`[B,3,H,W]` -> `[B,D]` of unit norm."""
        return F.normalize(self.head(self.trunk(images.contiguous(memory_format=torch.channels_last))))


def settings(experiment: Experiment, lr: float | None, head_factor: float | None) -> tuple[DictConfig, float, float]:
    """Returns the configuration of the baseline, its learning rate, and the factor of the head's learning rate."""
    row = experiment.rows[ROW]
    config = composed(*experiment.overrides, *(row.overrides or []), *(experiment.chosen(row) or []))
    factor = config.method.head_lr_factor if head_factor is None else head_factor
    return config, config.lr if lr is None else lr, factor


def stepper(
    network: Network, config: DictConfig, lr: float, factor: float, falls_in: int | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function that takes one training step on pixels and labels, and returns the loss before it.

    With `falls_in`, the rates fall to 0 along a cosine in so many steps, as with scheduler=cosine.
    """
    groups = [
        {"params": network.trunk.parameters(), "lr": lr},
        {"params": network.head.parameters(), "lr": lr * factor},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=config.optimizer.weight_decay)
    falls = None if falls_in is None else CosineAnnealingLR(optimizer, falls_in)
    said = config.loss.loss
    loss = MultiSimilarityLoss(alpha=said.alpha, beta=said.beta, base=said.base)
    miner = MultiSimilarityMiner(epsilon=config.miner.epsilon)

    def step(pixels: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        embeddings = network(pixels)
        value: Tensor = loss(embeddings, labels, miner(embeddings, labels))
        value.backward()
        optimizer.step()
        if falls is not None:
            falls.step()
        return value.detach()

    return step


def trained(
    network: Network, images: Images, config: DictConfig, step: Callable[[Tensor, Tensor], Tensor], steps: int
) -> float:
    """Trains the network for so many steps. Returns the seconds that they took."""
    batch = config.sampler.batch_size
    sampler = MPerClassSampler(images.labels, config.sampler.m, batch, length_before_new_iter=steps * batch)
    start = time.perf_counter()
    network.train()
    for pixels, labels in tqdm(DataLoader(images, batch, sampler=sampler), "training", steps):
        step(pixels, labels)
    return time.perf_counter() - start


@torch.no_grad()
def embedded(network: Network, images: Images) -> Tensor:
    """Returns the embeddings of all images, `[N,D]`."""
    network.eval()
    return torch.cat([network(pixels) for pixels, _ in tqdm(DataLoader(images, 128), "embedding", leave=False)])


def measured(options: argparse.Namespace) -> dict[str, float]:
    """Trains and tests. Raises UserError if images or weights are missing."""
    config, lr, factor = settings(read_experiment(COMPARISON), options.lr, options.head_lr_factor)
    if options.data is not None:
        config.dataset.update(root=f"{options.data}/cars196", strict=False)
    config.sampler.batch_size = options.batch or config.sampler.batch_size
    records = open_dataset(config)
    size = options.size or config.image_size
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    np.random.seed(options.seed)  # noqa: NPY002  pytorch-metric-learning's sampler draws from it
    weights = None if options.weights == "none" else Path(config.backbone.weights_dir) / WEIGHTS
    if weights is not None and not weights.exists():
        raise UserError(
            f"there is no file {weights}: put torchvision's weights of MobileNetV2 there, or give --weights none."
        )
    network = Network(config.head.dim, weights, options.head_start)
    train, test = opened(records, size)
    untrained = embedded(network, test)
    steps = options.steps or config.trainer.max_steps
    step = stepper(network, config, lr, factor, steps if options.rates == "cosine" else None)
    seconds = trained(network, train, config, step, steps)
    vectors, labels = embedded(network, test), torch.tensor(test.labels)
    calculator = AccuracyCalculator(
        include=("precision_at_1", "mean_average_precision_at_r"),
        k="max_bin_count",
        knn_func=CustomKNN(CosineSimilarity(), batch_size=1024),
    )
    theirs = calculator.get_accuracy(vectors, labels)
    ours = evaluate(vectors, labels, clustering=False)
    split, protocol = Split(records.train_rows, records.query_rows, None), Conventional()
    tested = Embedded(vectors.unsqueeze(1), labels, torch.as_tensor(records.query_rows))
    write_scores(options.out, records, split, protocol, tested, protocol.ranking(split, tested))
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        network(test[0][0].unsqueeze(0))
    return {
        **{f"test/{name}": value for name, value in ours.items()},
        "learners/mean/recall@1": ours["recall@1"],  # the embedding is the only learner
        "untrained/recall@1": evaluate(untrained, labels, clustering=False)["recall@1"],
        "peer/recall@1": theirs["precision_at_1"],  # from its own calculator
        "peer/map@r": theirs["mean_average_precision_at_r"],
        "run/seconds": seconds,
        "model/params": float(sum(parameter.numel() for parameter in network.parameters())),
        "model/flops": counted.get_total_flops() / 2,  # multiply-adds
    }


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/peer"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--lr", type=float, help="learning rate; default: what the baseline's search found, else the comparison's"
    )
    parser.add_argument("--head-lr-factor", type=float, help="the head's learning rate over --lr; same default")
    parser.add_argument("--rates", choices=("constant", "cosine"), default="constant", help="cosine: they fall to 0")
    parser.add_argument("--head-start", choices=("torch", "xavier"), default="torch", help="how the layer starts")
    parser.add_argument("--row", help="row of the comparison to write the figures under; default: by --head-start")
    parser.add_argument("--steps", type=int, help="default: the comparison's")
    parser.add_argument("--batch", type=int, help="default: the comparison's")
    parser.add_argument("--size", type=int, help="of images, in pixels; default: the comparison's")
    parser.add_argument("--data", help="folder that has cars196, or a part of it; default: DML_DATA, else data")
    parser.add_argument("--weights", choices=("imagenet", "none"), default="imagenet")
    options = parser.parse_args()
    make_folder(options.out)
    figures = measured(options)
    name = options.row or NAMES[options.head_start]
    write_rows(options.out, {name: figures})
    print("\n".join(f"{name}: {value:.4f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
