"""Time of DCES's re-clustering, relative to the epochs between two clusterings, and what each speed-up saves.

    python experiments/bench/clustering.py                                   # glyphs, a few minutes on 2 cores
    DML_DATA=... python experiments/bench/clustering.py dataset=cars196 backbone=mobilenet_v2 image_size=128 \
        backbone.batch_norm=running
    python experiments/bench/clustering.py --train 400                       # also trains, and compares running
    assignments

The bound: for every image a training step computes a forward and a backward pass, which is about three forward passes.
A clustering computes one forward pass. With T = 2 epochs between clusterings it therefore costs 1 / (2 * 3) = 17 % of
the training time if all else is free; the paper (section 4.4) says 25 % at T = 2. Assignments from running embeddings
need K-means alone.

The passes take turns, and each is compared with the training epoch of the same rounds. Run it on idle cores.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig
from torch.utils.data import DataLoader, Dataset

from dml.bench.rows import device_option
from dml.configuration.command_line import ending
from dml.configuration.composition import composed
from dml.data.records import Records
from dml.data.transforms import Transform
from dml.evaluation.clustering import kmeans
from dml.evaluation.collecting import embed_batches
from dml.launch.job import job
from dml.methods.clusters import match_clusters
from dml.methods.dces import DCES
from dml.training.build import Parts, build
from dml.training.rebuild import load_method

PAPER = 0.25


def configuration(*overrides: str) -> DictConfig:
    return composed("method=dces", *overrides)


class Images(Dataset[torch.Tensor]):
    """Images of rows of the records, opened and transformed each time."""

    def __init__(self, records: Records, rows: np.ndarray, transform: Transform) -> None:
        self.records, self.rows, self.transform = records, rows, transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> torch.Tensor:
        return self.transform(self.records.image(int(self.rows[at])))


class Passes:
    """Training steps and embedding passes over the same images of one run."""

    def __init__(self, parts: Parts, images: int, device: torch.device) -> None:
        self.parts, self.device = parts, device
        method = parts.method.to(device)
        assert isinstance(method, DCES)
        self.method = method
        self.rows = parts.split.train[:images]
        self.optimizer = method.optimizer_alone()
        self.method.clusters = np.arange(parts.data.train_images) % self.method.K
        self.method.sampler.regroup(self.method.clusters)
        # Workers are kept, as in a run: they start only once.
        self.stream = iter(parts.data.train_dataloader())
        self.augmented = self._loader(parts.data.train_transform, parts.data.sampler.batch_size)
        self.plain = self._loader(parts.data.test_transform, parts.data.sampler.batch_size)

    def _loader(self, transform: Transform, batch_size: int) -> DataLoader[torch.Tensor]:
        images = Images(self.parts.records, self.rows, transform)
        return DataLoader(images, batch_size, num_workers=self.parts.data.num_workers)

    def train(self, steps: int) -> None:
        self.method.train()
        for batch in islice(self.stream, steps):
            self.optimizer.zero_grad()
            terms = self.method.compute_terms({name: batch[name].to(self.device) for name in batch})
            torch.stack(list(terms.values())).sum().backward()
            self.optimizer.step()

    def forward(self, batches: Iterator[torch.Tensor], *, inference: bool) -> None:
        self.method.eval()
        with torch.inference_mode() if inference else nullcontext():
            for images in batches:
                self.method.embed(images.to(self.device)).detach().cpu()

    def ours(self, *, bf16: bool = False) -> torch.Tensor:
        """Embeds as a run does, by `embed_batches` over the evaluation's loader. Returns `[N,D]`."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bf16):
            table = embed_batches(
                self.method,
                self.parts.data.eval_dataloader(self.rows),
                lambda batch: {name: value.to(self.device) for name, value in batch.items()},
            )
        return table.embeddings.flatten(1)


def seconds(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def measure(parts: Parts, options: argparse.Namespace) -> None:
    data, method = parts.data, parts.method
    assert isinstance(method, DCES)
    passes = Passes(parts, options.images, options.device)
    count, size = len(passes.rows), data.sampler.batch_size
    steps = max(1, count // size)
    contenders: dict[str, Callable[[], object]] = {
        "training, forward and backward": lambda: passes.train(steps),
        "as training embeds: augmented, graph kept": lambda: passes.forward(iter(passes.augmented), inference=False),
        "no augmentation": lambda: passes.forward(iter(passes.plain), inference=False),
        "and inference mode": lambda: passes.forward(iter(passes.plain), inference=True),
        f"and batches of {data.eval_batch_size}, decoded once (ours)": passes.ours,
        "and bfloat16 (trainer.precision=bf16-mixed)": lambda: passes.ours(bf16=True),
    }
    embeddings = passes.ours()  # fills the cache of decoded images
    for contender in contenders.values():
        contender()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.repeats):
        for name, contender in contenders.items():
            times[name].append(seconds(contender))
    images = {name: steps * size if name.startswith("training") else count for name in contenders}
    each = {name: statistics.median(taken) / images[name] for name, taken in times.items()}
    training = next(iter(each.values()))
    print(
        f"{parts.records.name}, {data.train_images} training images, {passes.device}, {torch.get_num_threads()} "
        f"threads, {data.num_workers} workers, {count} images a pass, median of {options.repeats}"
    )
    print(f"{'':52} {'images/s':>9} {f'pass / {method.T} epochs':>16}")
    for name, one in each.items():
        ratio = "" if name.startswith("training") else f"{one / (method.T * training):16.1%}"
        print(f"{name:52} {1 / one:9.1f} {ratio}")
    epochs = method.T * training * data.train_images
    ours = each[next(name for name in each if name.endswith("(ours)"))] * data.train_images
    points = embeddings.numpy()
    points = np.resize(
        points, (data.train_images, points.shape[1])
    )  # repeats the embeddings up to the full number of images
    clustering = seconds(lambda: kmeans(points, method.K, seed=0))
    clusters = kmeans(points, method.K, seed=0)
    matching = seconds(lambda: match_clusters(clusters, (clusters + 1) % method.K, method.K))
    print(f"K-means {clustering:.3f} s, matching {matching:.4f} s")
    print(
        f"re-clustering over {method.T} epochs of training: fresh {(ours + clustering + matching) / epochs:.1%}, "
        f"running {(clustering + matching) / epochs:.1%} (the paper: {PAPER:.0%} at T = 2; forward alone: "
        f"{1 / (3 * method.T):.0%})"
    )


def train(options: argparse.Namespace) -> None:
    """Trains with fresh and with running assignments under the same seed: recall, time, and how far they agree."""
    print(f"\n{'':8} {'Recall@1':>9} {'mean learner':>13} {'correlation':>12} {'seconds':>11} {'between steps':>20}")
    with tempfile.TemporaryDirectory() as place:
        for kind in ("fresh", "running"):
            folder = Path(place) / kind
            more = [f"trainer.max_steps={options.train}", f"method.assignments_from={kind}"]
            if job(["method=dces", *options.overrides, *more], folder):
                raise SystemExit(f"the training with method.assignments_from={kind} failed: its output is above")
            metrics = json.loads((folder / "metrics.json").read_text())
            print(
                f"{kind:8} {metrics['test/recall@1']:9.4f} {metrics['learners/mean/recall@1']:13.4f} "
                f"{metrics['learners/correlation']:12.4f} {metrics['run/seconds']:11.1f} "
                f"{metrics['run/seconds_between_steps']:20.1f}"
            )
        last = Path(place) / "running" / "checkpoints" / "last.ckpt"
        parts = build(configuration(*options.overrides))
        parts.method = load_method(str(last))
        running = torch.load(last, weights_only=True)["dces"]["memory"].numpy()
        parts.data.test_cache = None
        table = embed_batches(parts.method, parts.data.eval_dataloader(parts.split.train), lambda batch: batch)
        fresh = table.embeddings.flatten(1).numpy()
    k = configuration(*options.overrides).method.K
    reference = kmeans(fresh, k, seed=0)

    def agreement(clusters: np.ndarray) -> float:
        return float((match_clusters(reference, clusters, k) == reference).mean())

    print(
        f"images in the cluster that a fresh pass of the same network puts them in: running embeddings "
        f"{agreement(kmeans(running, k, seed=0)):.1%}; fresh ones from another start of K-means "
        f"{agreement(kmeans(fresh, k, seed=1)):.1%}"
    )


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="options of a run, for example dataset=cars196 method.K=8")
    parser.add_argument("--images", type=int, default=1024, help="images of each pass")
    parser.add_argument("--repeats", type=int, default=3)
    device_option(parser)
    parser.add_argument("--train", type=int, default=0, metavar="STEPS", help="also train with both assignments")
    options = parser.parse_intermixed_args()
    config = configuration(*options.overrides)
    measure(build(config), options)
    if options.train:
        train(options)


if __name__ == "__main__":
    main()
