"""Run folders without a training, and photographs to show them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from dml.inference.embedding import Trained, embed_files
from dml.methods.base import Method


def photographs(folder: Path, classes: int = 4, each: int = 4) -> list[Path]:
    """`folder/class/image.png`, smooth noise of several shapes, in the order of their paths."""
    random = np.random.default_rng(0)
    files = []
    for number in range(classes * each):
        file = folder / f"class{number // each}" / f"{number % each}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (4, 5, 3), np.uint8)
        Image.fromarray(pixels).resize((30 + number, 44 - number), Image.Resampling.BICUBIC).save(file)
        files.append(file)
    return files


def save_run(folder: Path, config: DictConfig, method: Method, name: str = "last") -> Path:
    """A run folder with a checkpoint of the method, as if after 7 steps."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    container = OmegaConf.to_container(config, resolve=True)
    state = {"state_dict": method.state_dict(), "config": container, "finished": True, "global_step": 7}
    torch.save(state, folder / "checkpoints" / f"{name}.ckpt")
    return folder


def untrained_run(configure: Callable[..., DictConfig], folder: Path, method: Method, *overrides: str) -> Path:
    """`save_run` of what the fixture `method_of` made with the same overrides."""
    small = ["dataset=glyphs", "backbone=small", "head.dim=24", "image_size=32"]
    sizes = ["runtime.train_classes=5", "runtime.embedding_dim=24"]
    return save_run(folder, configure(*small, *sizes, *overrides), method)


def embed_images(
    run: Path, files: Sequence[Path], checkpoint: str = "last", device: str = "auto", **options: Any
) -> np.ndarray:
    """The embeddings of images by a run, `[N,D]`."""
    return embed_files(Trained.of(run, checkpoint, device), files, **options).embeddings
