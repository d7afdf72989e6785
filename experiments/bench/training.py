"""Images per second of training on a CPU, beside a plain loop over the same network on images already in memory.

    python experiments/bench/training.py                     # MobileNetV2 at 128 pixels and GoogLeNet at 224
    python experiments/bench/training.py --networks mobilenet_v2 --methods baseline

A run is what `python -m dml.run` builds, with its callbacks, loaders and checks, on image files with
dataset.cache=disk. It pauses now and then while the plain loop takes as many steps of the same network, channels last,
with the same objective and optimizer: both take turns on one machine. The loop lacks what a run adds: Lightning,
callbacks and loading. The bound is a ratio of 1; the aim is 0.95. `make gpu` measures GPUs.
"""

import argparse
import dataclasses
import logging
import tempfile
from pathlib import Path

import torch
from tabulate import tabulate

from dml.bench.images import drawn
from dml.bench.sizes import CPU, Sizes
from dml.bench.throughput import Windows, run_options, trained
from dml.configuration.command_line import ending
from dml.configuration.composition import composed
from dml.training.build import build_method

PIXELS = {"mobilenet_v2": 128, "googlenet": 224}
METHODS = {
    "baseline": ("method=baseline", "loss=multi_similarity"),
    "ABE-4": ("method=abe", "method.M=4"),
}
GOAL = 0.95


class Plain:
    """Training steps of a method's network in a plain loop."""

    def __init__(self, options: list[str], sizes: Sizes) -> None:
        config = composed(*options, f"runtime.train_classes={sizes.classes}")
        self.method = build_method(config).train()
        self.optimizer = self.method.optimizer_alone()
        self.images = torch.rand(sizes.batch, 3, sizes.image, sizes.image)
        self.batch = {"label": torch.arange(sizes.batch) // 4, "index": torch.arange(sizes.batch)}

    def __call__(self, steps: int) -> None:
        with torch.enable_grad():
            for _ in range(steps):
                self.optimizer.zero_grad()
                output = self.method.learners(self.method.normalized(self.images))
                torch.stack(list(self.method.objective(output, self.batch).values())).sum().backward()
                self.optimizer.step()


def measured(network: str, method: str, batch: int, window: int, rounds: int) -> list[str]:
    """Measures one network with one method. Returns a line of the table."""
    logging.disable(logging.WARNING)
    sizes = dataclasses.replace(CPU, batch=batch, image=PIXELS[network], dim=128, window=window, rounds=rounds)
    sizes = dataclasses.replace(sizes, precision="32-true", enough=1e9)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        drawn(folder / "images", 4 * batch, sizes.image * 5 // 4, sizes.classes)
        options = [f"backbone={network}", *run_options(sizes, folder), *METHODS[method], "dataset.cache=disk"]
        options += [f"paths.output_dir={folder / 'run'}"]
        windows = Windows(sizes, Plain(options, sizes))
        trained(options, windows)
    found = [windows.speed(windows.ours), windows.speed(windows.bare)]
    return [network, str(PIXELS[network]), method, *(f"{one:.2f}" for one in found), f"{windows.ratio:.3f}"]


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=PIXELS, default=list(PIXELS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--window", type=int, default=4, help="steps that are timed together (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="windows of the run and of the loop (default: %(default)s)"
    )
    given = parser.parse_args()
    table = [
        measured(network, method, given.batch, given.window, given.rounds)
        for network in given.networks
        for method in given.methods
    ]
    titles = ["network", "pixels", "method", "run, images/s", "loop, images/s", f"ratio (aim {GOAL})"]
    print(tabulate(table, headers=titles, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
