"""Images per second that a loader gives for each value of dataset.cache, and the share of a step spent waiting for it.

    python experiments/bench/feeding.py                   # generated JPEGs of 500 x 375, on the CPU
    python experiments/bench/feeding.py --device cuda --batch 128 --workers 16

The loader alone gives random resized crops with flips (transform=resized_crop) at 128 and at 224 pixels, as float
images on the device. A step trains a baseline with MobileNetV2 at 96 pixels. Its waiting time is the time that the loop
spends asking for the next batch; with dataset.cache=device that includes cropping the batch, which the training process
does itself. Values take turns, and ratios to `none` are medians over the rounds.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch

from dml.bench.feeding import WORDS, Loading, parts_of
from dml.bench.images import drawn
from dml.bench.rows import device_option, make_folder, out_option, set_threads, threads_option, write_rows
from dml.bench.timing import now, ratio
from dml.configuration.command_line import ending
from dml.training.build import Parts

SIZES = (128, 224)


def options_of(root: Path, word: str, size: int, options: argparse.Namespace) -> list[str]:
    places = [f"dataset.root={root / 'data'}", f"paths.cache_dir={root / 'cache'}", f"paths.output_dir={root / 'run'}"]
    return [
        *("dataset=folder", "dataset.train_fraction=0.5", "method=baseline", "backbone=mobilenet_v2", *places),
        *("backbone.weights=none", "head.dim=128", "transform=resized_crop", f"image_size={size}"),
        *(f"sampler.batch_size={options.batch}", f"dataset.cache={word}", f"trainer.num_workers={options.workers}"),
    ]


class Training:
    """Training steps of a baseline."""

    def __init__(self, parts: Parts, device: torch.device) -> None:
        self.batches, self.device = iter(parts.data.train_dataloader()), device
        self.method = parts.method.to(device).train()
        self.optimizer = torch.optim.AdamW(self.method.parameters(), lr=1e-4)
        self(1)

    def __call__(self, batches: int) -> tuple[float, float]:
        """Takes so many steps. Returns images per second, and the share of the time spent waiting for batches."""
        waiting, images = 0.0, 0
        started = now(self.device)
        for _ in range(batches):
            asked = now(self.device)
            batch = next(self.batches)
            waiting += now(self.device) - asked
            batch = {name: value.to(self.device) for name, value in batch.items()}
            self.optimizer.zero_grad()
            torch.stack(list(self.method.compute_terms(batch).values())).sum().backward()
            self.optimizer.step()
            images += len(batch["image"])
        taken = now(self.device) - started
        return images / taken, waiting / taken


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device_option(parser)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--side", type=int, default=500, help="longer side of the JPEGs, in pixels")
    parser.add_argument("--batches", type=int, default=8, help="batches of a round")
    parser.add_argument("--rounds", type=int, default=3)
    threads_option(parser)
    out_option(parser)
    options = parser.parse_args()
    set_threads(options.threads)
    make_folder(options.out)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        (root / "data").mkdir()
        drawn(root / "data", options.images, options.side, classes=64)
        found: dict[str, dict[str, list[float]]] = {word: {} for word in WORDS}
        for size in SIZES:
            loading = {
                word: Loading(parts_of(options_of(root, word, size, options), options.device), options.device)
                for word in WORDS
            }
            for _ in range(options.rounds):
                for word, load in loading.items():
                    found[word].setdefault(f"{size}", []).append(load(options.batches))
            del loading
        training = {
            word: Training(parts_of(options_of(root, word, 96, options), options.device), options.device)
            for word in WORDS
        }
        for _ in range(options.rounds):
            for word, train in training.items():
                speed, share = train(options.batches)
                found[word].setdefault("step", []).append(speed)
                found[word].setdefault("waits", []).append(share)
        del training
    told = rows(found)
    table(told)
    write_rows(options.out, told)


def rows(found: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Takes medians over the rounds: value of dataset.cache -> metric -> figure."""
    told: dict[str, dict[str, float]] = {}
    for word, columns in found.items():
        told[word] = {"step/waits": statistics.median(columns["waits"])}
        for column in (*map(str, SIZES), "step"):
            name = "step" if column == "step" else f"loader_at_{column}"
            told[word][f"{name}/images_a_second"] = statistics.median(columns[column])
            told[word][f"{name}/over_none"] = ratio(columns[column], found["none"][column])
    return told


def table(told: dict[str, dict[str, float]]) -> None:
    print("\nimages per second, and their ratio to those of `none` in the same round")
    print(f"{'cache':8}" + "".join(f"{f'loader at {size}':>24}" for size in SIZES) + f"{'training at 96':>24}  waits")
    for word, figures in told.items():
        line = f"{word:8}"
        for name in (*(f"loader_at_{size}" for size in SIZES), "step"):
            line += f"{figures[f'{name}/images_a_second']:15.0f}{figures[f'{name}/over_none']:9.2f}"
        print(f"{line}{100 * figures['step/waits']:6.0f} %")


if __name__ == "__main__":
    main()
