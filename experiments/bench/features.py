"""Time of a training step through a frozen MobileNetV2, and of one on its kept features (dataset.cache=features).

    DML_DATA=... OMP_NUM_THREADS=1 python experiments/bench/features.py

The data is Cars196 cropped to the cars, in batches of 64 at 96 pixels. The loss is multi-similarity, and only the head
is trained. Both steps load a batch, pass it forward and backward, and step the optimizer. The bound of a step on
features is what it reads: 64 x 1280 x 3 x 3 floats, 2.9 MB, which take 0.6 ms at 5 GB a second. The rest is the head,
the loss and the optimizer. The two take turns, so that a machine that slows down slows both; the ratio is the median of
the rounds.
"""

import argparse
import os
import statistics
import time
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from dml.configuration.composition import composed
from dml.models.backbones.stem import Stem
from dml.runs.folder import RunFolder
from dml.training.run import prepare_run

COMMON = (
    *("experiment=comparison_cars196", "method=baseline", "backbone.train=none", "transform=unchanged", "report=false"),
    *("trainer.accelerator=cpu", "trainer.num_workers=0"),
)


def seconds_a_step(cache: str, steps: int, folder: Path) -> float:
    """Returns the seconds of a step, without the first five."""
    options = [*COMMON, f"dataset.cache={cache}", f"trainer.max_steps={steps + 5}", f"paths.output_dir={folder}"]
    parts, _ = prepare_run(composed(*options), RunFolder(folder))
    method, data = parts.method, parts.data
    if data.features is not None:
        data.store_features(Stem.of(method.normalize, method.openings()), torch.device("cpu"), torch.no_grad)
    optimizer = method.train().optimizer_alone()
    batches = iter(data.train_dataloader())
    started = 0.0
    for step, batch in enumerate(islice(batches, steps + 5)):
        if step == 5:
            started = time.perf_counter()
        torch.stack(list(method.compute_terms(batch).values())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - started) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    ratios = []
    with TemporaryDirectory() as folder:
        for turn in range(options.rounds):
            through = seconds_a_step("disk", 8, Path(folder) / f"through{turn}")
            kept = seconds_a_step("features", 100, Path(folder) / f"kept{turn}")
            ratios.append(through / kept)
            print(f"through the network {1e3 * through:.1f} ms, kept {1e3 * kept:.2f} ms: {ratios[-1]:.1f} times")
    print(f"median: {statistics.median(ratios):.1f} times as fast")


if __name__ == "__main__":
    main()
