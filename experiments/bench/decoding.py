"""Decoders of JPEGs: Pillow, Pillow's draft mode and torchvision. Speed, and how far the pixels are from Pillow's.

    python experiments/bench/decoding.py --root ../shared/data/cars196/cars_train

It uses the images of the folder, and generated ones of 500 x 375 (like CUB's and Cars') and 2000 x 1500. Each contender
reads the file, decodes it and resizes the shorter side to 256 with Pillow, as training does. Draft mode decodes at a
half, a quarter or an eighth of the size if that is still large enough. torchvision decodes to a tensor, which Pillow
takes without a copy. The last two columns are the differences from Pillow's pixels, the largest and the mean, in levels
of 255: `decoded` before the resize (draft mode has another size there), `resized` after it.

Contenders take turns, image by image, on one thread. A ratio is that of the total times.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2

from dml.bench.images import drawn
from dml.configuration.command_line import ending

SHORTER = 256


def pillow(path: str) -> Image.Image:
    return Image.open(path, formats=("JPEG",)).convert("RGB")


def draft(path: str) -> Image.Image:
    image = Image.open(path, formats=("JPEG",))
    image.draft("RGB", (SHORTER, SHORTER))  # decodes to a size at least as large as this
    return image.convert("RGB")


def torchvision(path: str) -> Image.Image:
    pixels = decode_jpeg(read_file(path), ImageReadMode.RGB)
    return Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))


CONTENDERS: dict[str, Callable[[str], Image.Image]] = {"Pillow": pillow, "draft": draft, "torchvision": torchvision}


def apart(ours: Image.Image, theirs: Image.Image) -> tuple[int, float]:
    """Returns the largest and the mean difference of pixels; -1 and 0 if the sizes differ."""
    if ours.size != theirs.size:
        return -1, 0.0
    levels = np.abs(np.asarray(ours, np.int16) - np.asarray(theirs, np.int16))
    return int(levels.max()), float(levels.mean())


def told(differences: Sequence[tuple[int, float]]) -> str:
    largest = max(most for most, _ in differences)
    mean = np.mean([mean for most, mean in differences if most >= 0]) if largest >= 0 else 0
    return "other size" if largest < 0 else f"{largest}, {mean:.2f}"


def measure(name: str, paths: list[Path], rounds: int) -> None:
    resize = v2.Resize(SHORTER)
    decoding, resized = dict.fromkeys(CONTENDERS, 0.0), dict.fromkeys(CONTENDERS, 0.0)
    differ: dict[str, list[tuple[tuple[int, float], tuple[int, float]]]] = {contender: [] for contender in CONTENDERS}
    for turn in range(rounds + 1):  # the first turn is not timed: it compares pixels
        for path in map(str, paths):
            found = {}
            for contender, of in CONTENDERS.items():
                started = time.perf_counter()
                picture = of(path)
                decoded = time.perf_counter()
                found[contender] = picture, resize(picture)
                if turn:
                    decoding[contender] += decoded - started
                    resized[contender] += time.perf_counter() - started
            if not turn:
                for contender, (picture, small) in found.items():
                    plain, smaller = found["Pillow"]
                    differ[contender].append((apart(plain, picture), apart(smaller, small)))
    count = len(paths) * rounds
    for contender, differences in differ.items():
        line = f"{name:14}{contender:13}"
        for taken in (decoding, resized):
            line += f"{count / taken[contender]:12.0f}{taken['Pillow'] / taken[contender]:8.2f}"
        before, after = zip(*differences, strict=True)
        print(f"{line}{told(before):>14}{told(after):>14}")


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="a folder of JPEGs")
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    titles = zip(
        ("decoded/s", "ratio", "resized/s", "ratio", "decoded", "resized"), (12, 8, 12, 8, 14, 14), strict=True
    )
    print(f"{'':27}" + "".join(f"{title:>{width}}" for title, width in titles))
    if options.root:
        paths = sorted(options.root.rglob("*.jpg"))
        if not paths:
            parser.error(f"--root {options.root} has no images that end in .jpg")
        measure(options.root.name, paths[:: max(1, len(paths) // options.images)][: options.images], options.rounds)
    for side in (500, 2000):
        with tempfile.TemporaryDirectory() as folder:
            paths = sorted(drawn(Path(folder), max(4, options.images * 500 // side), side).rglob("*.jpg"))
            measure(f"{side} x {side * 3 // 4}", paths, options.rounds)


if __name__ == "__main__":
    main()
