"""Images per second for training: decoded by Pillow, decoded by torchvision, or read from dataset.cache=disk.

    python experiments/bench/cache.py                           # generated JPEGs of 500 x 375
    python experiments/bench/cache.py --root photos --images 1000

It runs on one thread, as a DataLoader worker does. Each contender does all that a training image needs: open, resize
the shorter side to 256, crop 224 at random, flip, make a float tensor. torchvision decodes and resizes tensors, whose
pixels differ from Pillow's by about one level, so it is a peer and not a replacement. The bound of the cache is copying
the pixels: 256 x 341 x 3 = 0.26 MB an image, which allows 19,000 images a second at 5 GB a second. The rest is the crop
and the conversion, which all contenders share; `tensors only` measures these alone.

Contenders take turns, so that a machine that slows down slows all of them; ratios are medians of the ratios within a
round.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2

from dml.bench.images import drawn
from dml.bench.rows import make_folder, out_option, write_rows
from dml.bench.timing import ratio
from dml.configuration.command_line import ending
from dml.configuration.composition import composed
from dml.data.cache import build_cache
from dml.data.folder import folder
from dml.data.images import quiet
from dml.data.records import Records
from dml.data.transforms import scaled, transform_of

SIZE, SIDES = 224, (256, 224)


def contenders(records: Records, count: int, cache_dir: str) -> dict[str, Callable[[int], torch.Tensor]]:
    transform = transform_of(composed("transform=shorter_crop", f"image_size={SIZE}").transform.train)
    rows = np.linspace(0, len(records) - 1, count).astype(int)
    started = time.perf_counter()
    cache = build_cache(records, rows, transform, "", cache_dir)
    print(f"cache of {count} images made in {time.perf_counter() - started:.1f} s")
    tensors = v2.Compose(
        [
            v2.Resize(SIZE * SIDES[0] // SIDES[1], antialias=True),
            v2.RandomCrop(SIZE),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    picture = cache.image(int(rows[0]))
    return {
        "Pillow": lambda i: transform(records.open_image(int(rows[i]))),
        "torchvision": lambda i: tensors(decode_jpeg(read_file(str(records.paths[rows[i]])), ImageReadMode.RGB)),
        "dataset.cache=disk": lambda i: scaled(transform.pixels(cache.image(int(rows[i])))),
        "tensors only": lambda i: scaled(transform.pixels(picture)),
    }


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--root", type=Path, help="folder with a sub-folder of JPEGs for each class (default: generated ones)"
    )
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--side", type=int, default=500, help="longer side of generated images")
    parser.add_argument("--rounds", type=int, default=5)
    out_option(parser)
    options = parser.parse_args()
    make_folder(options.out)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary, quiet():
        root = options.root or drawn(Path(temporary), options.images, options.side)
        records = folder(str(root))
        count = min(options.images, len(records))
        timed: dict[str, list[float]] = {}
        named = contenders(records, count, f"{temporary}/cache")
        for _ in range(options.rounds):
            for name, of in named.items():
                started = time.perf_counter()
                for i in range(count):
                    of(i)
                timed.setdefault(name, []).append(count / (time.perf_counter() - started))
    print(f"\n{'':20}{'images/s':>10}{'over Pillow':>13}")
    told = {}
    for name, speeds in timed.items():
        speed, over = statistics.median(speeds), ratio(speeds, timed["Pillow"])
        told[name] = {"images/second": speed, "images/over_pillow": over}
        print(f"{name:20}{speed:10.0f}{over:13.2f}")
    write_rows(options.out, told)


if __name__ == "__main__":
    main()
