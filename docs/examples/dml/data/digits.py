"""Handwritten digits of 8 x 8 pixels (Alpaydin & Kaynak 1998), which scikit-learn ships."""

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from dml.data.paths import Paths
from dml.data.records import Records


def digits() -> Records:
    """Returns 1,797 images: the digits 0 to 4 train, 5 to 9 test."""
    found = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)  # 17 grey levels
    labels = found.target.astype(np.int64)
    return Records(
        name="digits",
        paths=Paths.of(f"{label} {number:04d}" for number, label in enumerate(labels)),
        labels=labels,
        roles=np.where(labels < 5, "train", "test"),
        class_names=[str(digit) for digit in range(10)],
        open_image=lambda row: Image.fromarray(pixels[row]).convert("RGB"),
    )
