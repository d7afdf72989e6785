"""Images per second of real runs beside a bare loop of the same network.

A run is what `python -m dml.run` builds, with all its callbacks, on image files, compiled, with its images on the
device. It pauses now and then while the bare loop takes as many steps: both take turns on one machine. Nothing is
evaluated or saved in between.
"""

import gc
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from dml.bench.bare import NETWORKS, Bare
from dml.bench.images import drawn
from dml.bench.results import FAILED, LEFT_OUT, Figure, Goal, Record, Remark
from dml.bench.running import Task
from dml.bench.sizes import Sizes
from dml.bench.timing import forget_peak, held, now, peak, ratio
from dml.configuration.composition import composed
from dml.errors import UserError
from dml.runs.folder import RunFolder
from dml.training.build import build, build_method
from dml.training.callbacks.order import callbacks_of
from dml.training.run import fit
from dml.training.trainer import trainer_of

GOAL = Goal(0.9)
OVER_FLOPS = 1.1  # at most: an ensemble's step over the baseline's, divided by the same ratio of flops
NEVER = 1_000_000  # steps: more than any run here takes

PLAIN = ("method=baseline", "loss=multi_similarity")


def measure(task: Task) -> Iterator[Record]:
    """Measures each network, and how an ABE ensemble's step compares with its flops."""
    sizes = task.sizes
    drawn(task.folder / "images", sizes.images, sizes.side, sizes.classes)
    found: dict[str, Windows] = {}
    jobs = {name: partial(_network, name, task, found) for name in sizes.networks}
    ensemble = f"ABE-{sizes.learners}"
    yield from task.pieces(jobs | {ensemble: partial(_ensemble, ensemble, task, found)}, sizes.seconds["throughput"])


class Windows(Callback):
    """Times windows of a run's steps, and between them windows of the bare loop.

    Args:
        before: bytes that the tensors of the bare loop take before its first step.
        there: bytes of all tensors on the device at that time.

    Attributes:
        ours, bare: seconds of each window, of the run and of the bare loop.
        peaks: peak memory of the tensors of the run and of the bare loop, in bytes.
        flops: multiply-adds of one image in the run's model.
    """

    def __init__(self, sizes: Sizes, bare: Callable[[int], None], before: int = 0, there: int = 0) -> None:
        self.sizes, self.bare_loop, self.before, self.there = sizes, bare, before, there
        self.ours: list[float] = []
        self.bare: list[float] = []
        self.peaks = (0, 0)
        self.flops = 0
        self._begin = self._since = self._began = 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        sizes, device, step = self.sizes, self.sizes.where(), trainer.global_step
        cycle = sizes.settle + sizes.window
        at = (step - sizes.warm_up) % cycle
        if step < sizes.warm_up + sizes.settle:
            return
        if at == sizes.settle:
            forget_peak(device)
            self._since = now(device)
            self._began = self._began or self._since
        elif at == 0:
            end = now(device)
            self.ours.append(end - self._since)
            if not self.bare:  # the bare loop has neither gradients nor optimizer state yet
                self.peaks = (peak(device) - self.there, 0)
            self._bare_window()
            rounds = len(self.ours)
            trainer.should_stop = rounds >= sizes.rounds or (rounds >= 3 and end - self._began > sizes.enough)

    def _bare_window(self) -> None:
        device = self.sizes.where()
        before = held(device)
        self.bare_loop(2 if self.bare else 2 + self.sizes.warm_up)
        self.before += held(device) - before
        forget_peak(device)
        there = held(device)
        start = now(device)
        self.bare_loop(self.sizes.window)
        self.bare.append(now(device) - start)
        self.peaks = (self.peaks[0], max(self.peaks[1], peak(device) - there + self.before))

    def speed(self, seconds: list[float]) -> float:
        """Returns images per second, from the median window."""
        return self.sizes.batch * self.sizes.window / statistics.median(seconds)

    @property
    def ratio(self) -> float:
        """Returns the run's images per second divided by the bare loop's."""
        return ratio(self.bare, self.ours)


def run_options(sizes: Sizes, folder: Path) -> list[str]:
    """Returns options of a run on the images in `folder/images`, without method, backbone and `paths.output_dir`."""
    return [
        *("dataset=folder", f"dataset.root={folder / 'images'}", "dataset.train_fraction=0.5"),
        *("backbone.weights=none", f"head.dim={sizes.dim}", f"image_size={sizes.image}"),
        *(f"sampler.batch_size={sizes.batch}", "sampler.m=4", f"paths.cache_dir={folder / 'cache'}"),
        *(f"trainer.precision={sizes.precision}", f"trainer.accelerator={sizes.accelerator}", "report=false"),
        "protocol.clustering=false",  # which needs faiss
        *(f"trainer.max_steps={NEVER}", f"trainer.checkpoint_every={NEVER}", f"protocol.every={NEVER}"),
    ]


def _run(name: str, network: str, options: Iterable[str], task: Task) -> Windows:
    """Times a run in turns with the bare loop of its network."""
    gc.collect()  # the trainer of the network before
    before = held(task.sizes.where())
    bare = Bare(network, task.sizes)
    there = held(task.sizes.where())
    windows = Windows(task.sizes, bare, there - before, there)
    typed = [*NETWORKS[network].options, *run_options(task.sizes, task.folder), *options]
    typed += ["dataset.cache=device", "trainer.compile=true", f"paths.output_dir={task.folder / name}"]
    params = trained(typed, windows)
    if options == PLAIN and params != bare.parameters:
        raise AssertionError(f"the bare loop has {bare.parameters} parameters, the run {params}")
    del windows.bare_loop  # its network would stay on the device
    return windows


def trained(options: list[str], windows: Windows) -> int:
    """Carries out a run that `windows` times and stops. Returns its number of parameters."""
    config = composed(*options)
    folder = RunFolder.of(config, options)
    parts = build(config)
    trainer = trainer_of(config, parts.method, [*callbacks_of(config, folder, parts), windows])
    windows.flops = parts.complexity["flops"]
    folder.open(config, options)
    fit(config, folder, parts, trainer)
    return parts.complexity["params"]


def _figures(name: str, windows: Windows, goal: Goal | None) -> Iterator[Figure]:
    yield Figure(f"{name}, ours", windows.speed(windows.ours), "images/s")
    yield Figure(f"{name}, bare loop", windows.speed(windows.bare), "images/s")
    yield Figure(f"{name}, ours / bare loop", windows.ratio, "", goal)
    for whose, bytes_ in zip(("ours", "bare loop"), windows.peaks, strict=True):
        if bytes_:
            yield Figure(f"{name}, {whose}, peak memory", bytes_ / 2**30, "GiB")


def _network(name: str, task: Task, found: dict[str, Windows]) -> Iterator[Record]:
    if (lacking := _lacking(name)) is not None:
        yield Remark(LEFT_OUT, f"{name}: {lacking}")
        return
    found[name] = _run(name, name, PLAIN, task)
    yield from _figures(name, found[name], GOAL)


def _lacking(network: str) -> str | None:
    """Returns why the backbone cannot be built, for lack of a package for example; None if it can."""
    try:
        build_method(composed(*NETWORKS[network].options, "backbone.weights=none", *PLAIN, "runtime.train_classes=2"))
    except (UserError, ImportError) as error:
        return str(error)
    return None


def _ensemble(name: str, task: Task, found: dict[str, Windows]) -> Iterator[Record]:
    """Compares steps of ABE with those of the baseline on the same network, both relative to the same bare loop."""
    sizes = task.sizes
    if sizes.ensemble not in found:
        yield Remark(FAILED, f"{name}: the baseline on {sizes.ensemble} that it is compared with has no figures.")
        return
    own = _run(name, sizes.ensemble, ("method=abe", f"method.M={sizes.learners}"), task)
    baseline = found[sizes.ensemble]
    steps, flops = baseline.ratio / own.ratio, own.flops / baseline.flops
    yield Figure(f"{name} on {sizes.ensemble}", own.speed(own.ours), "images/s")
    if own.peaks[0]:
        yield Figure(f"{name} on {sizes.ensemble}, peak memory", own.peaks[0] / 2**30, "GiB")
    yield Figure(f"{name}, step / baseline's", steps)
    yield Figure(f"{name}, flops / baseline's", flops)
    yield Figure(f"{name}, step over flops", steps / flops, "", Goal(OVER_FLOPS, at_most=True))
