"""Sizes of everything that is measured: large for a GPU, small for a CPU, with the same code."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts.

    Attributes:
        device: `cuda` or `cpu`.
        goals: whether figures have goals; those of a CPU have none.
        seconds: part -> seconds that it takes about. A part is left out if less time is left.
        networks: names in `dml.bench.bare.NETWORKS`.
        ensemble: the network on which ABE with `learners` learners is compared with the baseline.
        batch, image, dim: images of a step, their side in pixels, width of the embedding.
        precision: `trainer.precision`; the bare loop follows it.
        images, side, classes: number of the generated image files, their longer side in pixels, number of classes.
        warm_up, settle, window, rounds: steps before the first cycle, steps of each cycle before its timed window (more
            than a loader has ready), steps of a window, and number of windows. After three windows it stops early
            once `enough` seconds have passed.
        items: number of embeddings that are searched among each other, with `width` dimensions.
        cells, channels, pixels: side and channels of the maps for heads and object attention; side of the proposals.
        repeats: calls that are timed together of what takes little time.
        options: overrides of the trainings of a few steps, beside those in `tiny_options`.
        tests: pytest's -m expression, then the test files; without files, all files with that mark.
    """

    device: str
    goals: bool
    seconds: Mapping[str, float]
    networks: tuple[str, ...]
    ensemble: str
    learners: int
    batch: int
    image: int
    dim: int
    precision: str
    images: int
    side: int
    classes: int
    warm_up: int
    settle: int
    window: int
    rounds: int
    enough: float
    items: int
    width: int
    cells: int
    channels: int
    pixels: int
    repeats: int
    options: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def bfloat16(self) -> bool:
        return self.precision.startswith("bf16")

    def where(self) -> "torch.device":
        """Returns the device with its number: torch takes `cuda` and `cuda:0` for different devices."""
        import torch

        return torch.device("cuda", 0) if self.device == "cuda" else torch.device(self.device)

    @property
    def accelerator(self) -> str:
        """Returns Lightning's name of the device."""
        return "gpu" if self.device == "cuda" else self.device


GPU = Sizes(
    device="cuda",
    goals=True,
    seconds={
        "tests": 120,
        "methods": 60,
        "throughput": 90,
        "evaluation": 20,
        "layers": 20,
        "ranks": 60,
        "feeding": 60,
    },
    networks=("resnet50", "googlenet", "vit_small"),
    ensemble="googlenet",
    learners=8,
    batch=128,
    image=224,
    dim=512,
    precision="bf16-mixed",
    images=2048,
    side=400,
    classes=128,
    warm_up=20,
    settle=40,
    window=40,
    rounds=5,
    enough=60,
    items=60_502,
    width=512,
    cells=7,
    channels=2048,
    pixels=224,
    repeats=20,
    options=("image_size=64", "dataset.size=64", "sampler.batch_size=32"),
    tests=("gpu",),
)

CPU = Sizes(
    device="cpu",
    goals=False,
    seconds=dict.fromkeys(GPU.seconds, 25),
    networks=("small",),
    ensemble="small",
    learners=2,
    batch=8,
    image=32,
    dim=32,
    precision="bf16-mixed",
    images=64,
    side=64,
    classes=16,
    warm_up=1,
    settle=1,
    window=2,
    rounds=3,
    enough=5,
    items=1000,
    width=32,
    cells=3,
    channels=64,
    pixels=32,
    repeats=3,
    options=("image_size=32", "dataset.size=32", "sampler.batch_size=16"),
    tests=("not gpu and not slow and not exhaustive", "tests/losses/test_functional.py"),
)
