"""Composes every row of experiments, and trains it for one step on miniature data with a small backbone.

The metrics mean nothing. The run shows that rows compose and train, and that they give the figures the paper prints.
"""

import io
import json
import logging
import multiprocessing as mp
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar
from unittest.mock import patch

import torch
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from dml.analysis.mlrc import KINDS
from dml.configuration.composition import composed, folder_option
from dml.configuration.trainings import left_open, settle, trainings_of
from dml.data.miniatures import smoke as make_miniatures
from dml.errors import UserError
from dml.evaluation.metric import of_queries
from dml.papers.catalogue import FOLDER
from dml.papers.drawn import along_axes
from dml.papers.experiment import Experiment
from dml.papers.tuning import example, searches
from dml.process import cores
from dml.runs.folder import RunFolder
from dml.training.build import build, build_method
from dml.training.callbacks.order import callbacks_of
from dml.training.run import fit
from dml.training.trainer import trainer_of

# Prefixes of options that fit one backbone alone, and are dropped with it.
OF_A_BACKBONE = ("backbone", "method.branch=", "method.attention_depth=", "method.object_layers=")

# Prefixes of options that a backbone is composed with.
WITH_A_BACKBONE = ("experiment=", "method=")

BATCH = 8

# Metrics that come from the trainings of all folds together; one training alone does not have them.
OF_COLLECTIONS = {f"mlrc/{kind}/{name}/mean" for kind in KINDS for name in of_queries()}

Job = TypeVar("Job")
Done = TypeVar("Done")

Options = tuple[str, ...]
Shown = dict[str, set[str]]  # by row, the metrics that the paper prints


class Small(NamedTuple):
    """A row's configuration in miniature, and whether it is one of several trainings that are collected."""

    config: DictConfig
    collected: bool


def check_rows(experiments: Sequence[Experiment], rows: Sequence[str], processes: int | None = None) -> dict[str, str]:
    """Composes each distinct set of options, and trains what is distinct in miniature, several at a time.

    Rows that differ in the length of training, the rate, the batch or the backbone alone are one training in miniature.

    Args:
        rows: names; empty: all rows.
        processes: how many at a time; None: one for each core.

    Returns:
        `experiment: row, part` -> what went wrong, for those that failed.

    Raises:
        UserError: there is no such row, a row's grid has more or fewer combinations than every row is given, or one of
            the processes was killed.
    """
    wanted: dict[Options, Shown] = {}
    places: dict[Options, list[str]] = {}
    scripts: dict[Options, list[str]] = {}
    for experiment in experiments:
        for training in experiment.trainings(rows, seeds=[0]):
            row = experiment.rows[training.row]
            shown = experiment.promised(row, training.part)
            if row.x is not None:
                shown |= _over(experiment, training.part)
            wanted.setdefault(training.overrides, {}).setdefault(row.name, set()).update(shown)
            places.setdefault(training.overrides, []).append(f"{training.experiment}: {row.name}, {training.part}")
            if training.script:
                scripts[training.overrides] = row.smoke
        for search in searches(experiment, rows, again=True):
            options = tuple(example(search))
            wanted.setdefault(options, {}).setdefault(search.row, set())
            places.setdefault(options, []).append(f"{search.experiment}: {search.row}, search")
    wrong: dict[Options, str] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_miniatures(folder / "data")
        with _workers(processes or cores()) as pool:
            alike: dict[tuple[str, bool], tuple[Small, list[Options]]] = {}
            jobs = [(options, folder) for options in wanted if options not in scripts]
            for options, small in tqdm(_each(pool, _compose, jobs), total=len(jobs), desc="composing"):
                if isinstance(small, str):
                    wrong[options] = small
                else:
                    alike.setdefault((OmegaConf.to_yaml(small.config), small.collected), (small, []))[1].append(options)
            todo: list[tuple[Small | list[str], list[Options], Path]] = [
                *((smoke, [options], folder) for options, smoke in scripts.items()),
                *((small, several, folder) for small, several in alike.values()),
            ]
            for several, found in tqdm(_each(pool, _run, todo), total=len(todo), desc="running"):
                for options in several:
                    wrong[options] = found if isinstance(found, str) else _lacking(wanted[options], found)
    return {place: said for options, said in wrong.items() if said for place in places[options]}


@contextmanager
def _workers(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Starts worker processes. Raises UserError if one of them is killed, for which multiprocessing's pool would wait
    without end."""
    try:
        with ProcessPoolExecutor(processes, mp.get_context("spawn"), _quietly) as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    except BrokenProcessPool:
        raise UserError(
            "a process of the check was killed, perhaps for lack of memory: close other programs, or name fewer rows."
        ) from None


def _each(pool: ProcessPoolExecutor, do: Callable[[Job], Done], jobs: Iterable[Job]) -> Iterator[Done]:
    """Does each job in some worker, and yields the results as they come."""
    for future in as_completed([pool.submit(do, job) for job in jobs]):
        yield future.result()


def _quietly() -> None:
    torch.set_num_threads(1)
    setup_globals()  # resolvers of Hydra, also for a worker that composes nothing
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  silences progress bars


def _compose(job: tuple[Options, Path]) -> tuple[Options, Small | str]:
    """Returns a set of options, and its configuration in miniature or what is wrong with it."""
    options, folder = job
    try:
        own = (*OF_A_BACKBONE, *WITH_A_BACKBONE)
        _check_backbone(tuple(option for option in options if option.startswith(own)))
        return options, in_miniature(options, folder)
    except (Exception, SystemExit) as error:
        return options, _told(error)


def _run(job: tuple[Small | list[str], list[Options], Path]) -> tuple[list[Options], Shown | set[str] | str]:
    """Runs a training or a script. Returns the sets of options that it stands for, and its figures or what went wrong.

    A script gives the figures of each row for itself.
    """
    what, several, folder = job
    try:
        if isinstance(what, Small):
            return several, train(what, several[0], folder)
        return several, _script(several[0], what, folder)
    except (Exception, SystemExit) as error:
        return several, _told(error)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _lacking(shown: Shown, found: Shown | set[str]) -> str:
    """Says which figures of the rows were not given; empty: none."""
    lacking = {
        metric
        for row, metrics in shown.items()
        for metric in metrics - (found if isinstance(found, set) else found.get(row, set()))
    }
    return f"lacks {', '.join(sorted(lacking))}" if lacking else ""


def _script(options: Options, shorter: Sequence[str], folder: Path) -> Shown:
    """Runs a script. Returns the names of the figures that it gives for each row."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        out = Path(made) / "seed=0"  # as `experiment run` names it: scripts have to quote the "=" for Hydra
        out.mkdir()
        path, *given = (option.replace("{seed}", "0") for option in options)
        script = FOLDER.parent / path
        places = [option.replace("{data}", str(folder / "data")) for option in shorter]
        words, modules = [str(script), *given, *places, "--out", str(out)], [str(script.parent), *sys.path]
        said = io.StringIO()
        with patch.object(sys, "argv", words), patch.object(sys, "path", modules), redirect_stderr(said):
            try:
                runpy.run_path(str(script), run_name="__main__")  # a process of its own would import torch again
            except SystemExit as end:
                if end.code:
                    raise RuntimeError(f"{path} ended with {end.code}: {said.getvalue()[-300:]}") from end
        return {row: set(metrics) for row, metrics in json.loads((out / "metrics.json").read_text()).items()}


def _over(experiment: Experiment, part: str) -> set[str]:
    """Returns the metrics that the paper's figure draws and that are columns of this part."""
    return along_axes(experiment.figure) & {column.metric for column in experiment.parts[part].columns.values()}


@cache  # hundreds of rows share a dozen backbones
def _check_backbone(options: Options) -> None:
    """Composes a row's own backbone, and builds the model if options name stages of that backbone."""
    config = composed(*options)
    if any(option.startswith(OF_A_BACKBONE[1:]) for option in options):
        config.backbone.weights = "none"
        config.runtime.train_classes = 2
        build_method(config)


def in_miniature(options: Options, folder: Path) -> Small:
    """Composes options in miniature: a step, a batch of 8, small images, a small network, no pictures."""
    kept = [option for option in options if not option.startswith(OF_A_BACKBONE)]
    if any("collage" in option.partition("=")[2] for option in options):  # a collage needs all of CIFAR-100
        kept = [option for option in kept if not option.startswith("dataset.")]
        kept += ["dataset=glyphs"]
    places = [folder_option("data_dir", folder / "data"), folder_option("cache_dir", folder / "cache")]
    kept += ["backbone=small", *places]
    config = composed(*kept)
    several, collected = trainings_of(config), any(axis.collected for axis in left_open(config))
    if several:  # only the first of its trainings
        config = composed(*kept, *next(iter(several.values())))
    settle(config)
    OmegaConf.set_struct(config, False)
    config.report = False
    config.lr = 1e-4  # a step at any rate runs the same code
    config.image_size = 32
    config.sampler.batch_size = BATCH
    if config.dataset._target_ == "dml.data.glyphs.glyphs":
        config.dataset.update(classes=16, images_per_class=4, size=32)
    if "m" in config.sampler:
        config.sampler.m = min(2, config.sampler.m or 2)
        if config.sampler.m == 1:  # a fold has six classes
            config.sampler.batch_size = 6
    config.backbone.update(weights="none", train="all", batch_norm="running")
    config.trainer.update(max_steps=1, num_workers=0, accelerator="cpu", devices=1, checkpoint_every=1)
    config.protocol.update(every=1, unit="steps", batch_size=64)
    for part, option, value in (
        *(
            ("dataset", "strict", False),
            ("dataset", "cache", "none"),
            ("method", "warm_up", 0),
            ("head", "init", "random"),
        ),
        *(("loss", "memory_from", 0), ("protocol", "clustering", bool(config.protocol.clustering))),
    ):
        if option in config[part]:
            config[part][option] = value
    if "memory_size" in config.loss.get("loss", {}):
        config.loss.loss.memory_size = 4 * BATCH
    OmegaConf.set_struct(config, True)
    return Small(config, collected)


def train(miniature: Small, options: Options, folder: Path) -> set[str]:
    """Trains one step and evaluates. Returns the names of the metrics."""
    config, collected = miniature
    with tempfile.TemporaryDirectory(dir=folder) as place:
        config.paths.output_dir = place
        run_folder = RunFolder(Path(place) / "run")
        parts = build(config)
        run_folder.open(config, list(options))
        fit(config, run_folder, parts, trainer_of(config, parts.method, callbacks_of(config, run_folder, parts)))
        metrics = run_folder.metrics()
    return {*metrics, *(OF_COLLECTIONS if collected else ())}
