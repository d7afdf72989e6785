"""Time and memory before the first step of a run on many images: records, checks, split, sampler, data module.

    python experiments/bench/scale.py                          # 100,000, a million and ten million images
    python experiments/bench/scale.py --images 1000000 --order random

The records are made up: ten images a class, half of the classes to train on, a quarter of those for validation, and
paths that do not exist. Real files also take the time to look each up once, and to list their folders. Each size is
measured in a process of its own, so that the peak is that of this size. The peak includes the imports of a run, torch
and Lightning, which `before` gives alone. Seconds are processor time of one core (`time.process_time`); nothing here
waits.

    records     making the columns of paths, labels and roles, and checking them
    files       checking which paths are files, and whether each could be decoded at the last start
    split       protocol=conventional protocol.select=val_classes, and checking that its parts do not overlap
    sampler     making m_per_class and others, and their first batches
    data        the data module: renumbering labels, fingerprint, loaders
    start       the sum of all but `records`
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image

from dml.bench.memory import resident
from dml.bench.rows import make_folder, out_option, write_rows
from dml.configuration.command_line import ending
from dml.data.check import readable
from dml.data.datamodule import DataModule
from dml.data.paths import Paths
from dml.data.records import Records, renumbered
from dml.data.samplers import MPerClass, Pairs, Uniform
from dml.data.transforms import Transform
from dml.evaluation.protocol import Conventional

PER_CLASS = 10
PARTS = ("records", "files", "split", "sampler", "data")
GREY = Image.new("RGB", (8, 8))


def names(rows: np.ndarray) -> Iterator[str]:
    return (f"/data/photographs/class {row // PER_CLASS:07d}/photograph {row:08d}.jpg" for row in rows.tolist())


def made(images: int, order: str) -> Records:
    rows = np.arange(images) if order == "sorted" else np.random.default_rng(0).permutation(images)
    classes = images // PER_CLASS
    labels = rows // PER_CLASS
    roles = np.where(labels < classes // 2, "train", "test")
    return Records("many", Paths.of(names(rows)), labels, roles, [f"class {c:07d}" for c in range(classes)], grey)


def grey(row: int) -> Image.Image:
    return GREY


class Black(Transform):
    """Replaces every image by a black one of 8 x 8 pixels."""

    def pixels(self, picture: Image.Image) -> torch.Tensor:
        return torch.zeros(3, 8, 8, dtype=torch.uint8)


def peak() -> float:
    """Returns the peak memory of this process in GB."""
    return resident("VmHWM") * 2**30 / 1e9


def measured(images: int, order: str) -> dict[str, float]:
    """Returns the seconds of each of `PARTS`, and GB `before` them and at `peak`."""
    figures, at = {"before": peak()}, time.process_time()

    def done(part: str) -> None:
        nonlocal at
        figures[part] = time.process_time() - at
        at = time.process_time()

    records = made(images, order)
    done("records")
    with tempfile.TemporaryDirectory() as cache:
        records = readable(records, cache)
    done("files")
    split = Conventional(select="val_classes").split(records)
    done("split")
    labels = renumbered(records.labels[split.train])[1]
    sampler = MPerClass(labels, 64, 0)
    for rule in (sampler, Pairs(labels, 64, 0), Uniform(labels, 64, 0)):
        batches = rule.batches(0)
        assert len({len(next(batches)) for _ in range(10)}) == 1
    done("sampler")
    transform = Black()
    rows = (split.train, split.query, split.gallery)
    data = DataModule(records, *rows, sampler, transform, transform, seed=0, num_workers=0, eval_batch_size=128)
    stream = iter(data.train_dataloader())
    assert next(stream)["image"].shape == (64, 3, 8, 8)
    assert len(data.eval_dataloader(split.query)) == -(-len(split.query) // 128)
    done("data")
    return figures | {"peak": peak()}


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument(
        "--order", choices=("sorted", "random"), default="sorted", help="order of the images in the records"
    )
    parser.add_argument(
        "--here", action="store_true", help="measure the first size alone, in this process, and print JSON"
    )
    parser.add_argument("--shrink", type=int, default=1, help="divide the sizes by this, to try the script")
    out_option(parser)
    options = parser.parse_args()
    make_folder(options.out)
    if options.here:
        print(json.dumps(measured(options.images[0] // options.shrink, options.order)))
        return
    print(f"{'images':>10}{'classes':>10}" + "".join(f"{part:>9}" for part in PARTS) + "    start  before     peak")
    told = {}
    for images in options.images:
        command = [sys.executable, __file__, "--here", "--images", str(images), "--order", options.order]
        command += ["--shrink", str(options.shrink)]
        one = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        seconds = "".join(f"{one[part]:7.1f} s" for part in PARTS)
        total = sum(one[part] for part in PARTS) - one["records"]
        sizes = "".join(f"{one[name]:6.2f} GB" for name in ("before", "peak"))
        print(f"{images:10,}{images // PER_CLASS:10,}{seconds}{total:7.1f} s{sizes}", flush=True)
        row = f"{images:,}" + (", in random order" if options.order == "random" else "")
        told[row] = {f"seconds/{part}": one[part] for part in PARTS}
        told[row] |= {"seconds/start": total, "gigabytes/before": one["before"], "gigabytes/peak": one["peak"]}
    write_rows(options.out, told)


if __name__ == "__main__":
    main()
