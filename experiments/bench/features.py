"""Time of a training step through a frozen MobileNetV2, and of one on its kept features (dataset.cache=features).

    DML_DATA=... python experiments/bench/features.py --threads 1
    DML_DATA=... python experiments/bench/features.py image_size=128 --rounds 3

The data is Cars196 cropped to the cars, in batches of 64 at 96 pixels, if options of a run do not change it. The loss
is multi-similarity, and only the head is trained. Both steps load a batch, pass it forward and backward, and step the
optimizer. The bound of a step on features is what it reads: 64 x 1280 x 3 x 3 floats, 2.9 MB, which take 0.6 ms at 5 GB
a second. The rest is the head, the loss and the optimizer. The two take turns, so that a machine that slows down slows
both; the ratio is the median of the rounds.
"""

import argparse
import statistics
import time
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from dml.bench.rows import make_folder, out_option, set_threads, threads_option, write_rows
from dml.bench.timing import ratio
from dml.configuration.command_line import ending
from dml.configuration.composition import composed
from dml.models.backbones.stem import Stem
from dml.runs.folder import RunFolder
from dml.training.run import prepare_run

COMMON = (
    *("experiment=comparison_cars196", "method=baseline", "backbone.train=none", "transform=unchanged", "report=false"),
    *("trainer.accelerator=cpu", "trainer.num_workers=0"),
)


def seconds_a_step(cache: str, steps: int, folder: Path, overrides: list[str]) -> float:
    """Returns the seconds of a step, without the first five."""
    options = [
        *COMMON,
        *overrides,
        f"dataset.cache={cache}",
        f"trainer.max_steps={steps + 5}",
        f"paths.output_dir={folder}",
    ]
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


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="of python -m dml.run")
    parser.add_argument("--rounds", type=int, default=5)
    threads_option(parser)
    out_option(parser)
    given = parser.parse_intermixed_args()
    set_threads(given.threads)
    make_folder(given.out)
    through: list[float] = []
    kept: list[float] = []
    with TemporaryDirectory() as folder:
        for turn in range(given.rounds):
            through.append(seconds_a_step("disk", 8, Path(folder) / f"through{turn}", given.options))
            kept.append(seconds_a_step("features", 100, Path(folder) / f"kept{turn}", given.options))
    contenders = {"through the network": through, "kept features": kept}
    told = {
        name: {"step/milliseconds": 1e3 * statistics.median(taken), "step/over_network": ratio(taken, through)}
        for name, taken in contenders.items()
    }
    for name, figures in told.items():
        print(f"{name:20} {figures['step/milliseconds']:8.2f} ms a step {figures['step/over_network']:8.3f}")
    write_rows(given.out, told)


if __name__ == "__main__":
    main()
