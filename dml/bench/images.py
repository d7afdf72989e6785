"""Image files to train on, generated."""

from pathlib import Path

import numpy as np
from PIL import Image


def drawn(root: Path, count: int, side: int, classes: int = 2) -> Path:
    """Writes JPEGs of a gradient with noise, which compress about as photographs do: `root/class C/I.jpg`.

    Args:
        count: number of images.
        side: the longer side in pixels; the other is three quarters of it.

    Returns:
        `root`.
    """
    rng, (h, w) = np.random.default_rng(0), (side * 3 // 4, side)
    ramp = np.linspace(0, 255, w)[None, :, None] * np.linspace(0.3, 1, h)[:, None, None]
    for i in range(count):
        path = root / f"class {i % classes}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = rng.normal(0, 12, (h // 4, w // 4, 3)).repeat(4, 0).repeat(4, 1)
        pixels = np.clip(ramp[: noise.shape[0], : noise.shape[1]] + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(path, quality=90)
    return root
