"""Every row of every experiment for one step, on miniature data and a small backbone.

What comes out is no figure; it shows that rows compose, train, and give the figures that the paper prints of them.
"""

import json
import logging
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from omegaconf import OmegaConf
from tqdm import tqdm

from dml.analysis.mlrc import KINDS
from dml.configuration.composition import composed
from dml.configuration.trainings import left_open, settle, trainings_of
from dml.data.miniatures import smoke as make_miniatures
from dml.evaluation.metric import of_queries
from dml.papers.catalogue import FOLDER
from dml.papers.experiment import Experiment
from dml.papers.tuning import example, searches
from dml.runs.folder import RunFolder
from dml.training.build import build, build_method
from dml.training.callbacks.order import callbacks_of
from dml.training.run import fit
from dml.training.trainer import trainer_of

# What belongs to a backbone, and cannot be kept beside another.
OF_A_BACKBONE = ("backbone", "method.branch=", "method.attention_depth=", "method.object_layers=")

BATCH = 8

# What an aggregate adds to the metrics of one training.
OF_COLLECTIONS = {f"mlrc/{kind}/{name}/mean" for kind in KINDS for name in of_queries()}

Shown = dict[str, set[str]]  # by row, what the paper prints of it


def check_rows(experiments: Sequence[Experiment], rows: Sequence[str], processes: int | None = None) -> dict[str, str]:
    """Runs each distinct row, several at a time.

    Returns:
        What went wrong, by `experiment: row, part`.
    """
    wanted: dict[tuple[str, ...], Shown] = {}
    places: dict[tuple[str, ...], list[str]] = {}
    scripts: dict[tuple[str, ...], list[str]] = {}
    for experiment in experiments:
        for training in experiment.trainings(rows, seeds=[0]):
            columns, row = experiment.parts[training.part].columns, experiment.rows[training.row]
            # A row that is not printed has all its columns' figures.
            shown = {columns[title].metric for title in row.published.get(training.part, columns)}
            if row.x is not None:
                shown |= _over(experiment, training.part)
            shown = {metric for metric in shown if not metric.endswith("/std")}
            wanted.setdefault(training.overrides, {}).setdefault(row.name, set()).update(shown)
            places.setdefault(training.overrides, []).append(f"{training.experiment}: {row.name}, {training.part}")
            if training.script:
                scripts[training.overrides] = row.smoke
        for search in searches(experiment, rows, again=True):
            options = tuple(example(search))
            wanted.setdefault(options, {}).setdefault(search.row, set())
            places.setdefault(options, []).append(f"{search.experiment}: {search.row}, search")
    with tempfile.TemporaryDirectory() as folder:
        make_miniatures(Path(folder) / "data")
        jobs = [(options, shown, scripts.get(options), folder) for options, shown in wanted.items()]
        wrong: dict[str, str] = {}
        with mp.get_context("spawn").Pool(processes or os.cpu_count(), _quietly) as pool:
            for options, said in tqdm(pool.imap_unordered(_one, jobs), total=len(jobs), desc="rows"):
                wrong |= dict.fromkeys(places[options], said) if said else {}
            pool.close()
            pool.join()  # rather than be killed, with semaphores left behind
    return wrong


def _quietly() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  as many bars


def _one(job: tuple[tuple[str, ...], Shown, list[str] | None, str]) -> tuple[tuple[str, ...], str]:
    """What went wrong with one run; nothing where it went through and its rows have their figures."""
    options, shown, shorter, folder = job
    try:
        if shorter is not None:
            found = _script(options, shorter, Path(folder))
        else:
            _check_backbone(options)
            found = dict.fromkeys(shown, train(options, Path(folder)))
        lacking = sorted({metric for row, metrics in shown.items() for metric in metrics - found.get(row, set())})
    except (Exception, SystemExit) as error:
        return options, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return options, f"lacks {', '.join(lacking)}" if lacking else ""


def _script(options: Sequence[str], shorter: Sequence[str], folder: Path) -> dict[str, set[str]]:
    """Which figures a script gives of each row."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        path, *given = (option.replace("{seed}", "0") for option in options)
        places = [option.replace("{data}", str(folder / "data")) for option in shorter]
        command = [sys.executable, str(FOLDER.parent / path), *given, *places, "--out", out]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{path} ended with {done.returncode}: {done.stderr[-300:]}")
        return {row: set(metrics) for row, metrics in json.loads((Path(out) / "metrics.json").read_text()).items()}


def _over(experiment: Experiment, part: str) -> set[str]:
    """What a figure of this part has above its numbers, where that is one of the columns."""
    said = experiment.figure.get("y", [])
    drawn = {one["metric"] for one in (said if isinstance(said, list) else [said])}
    return drawn & {column.metric for column in experiment.parts[part].columns.values()}


def _check_backbone(options: Sequence[str]) -> None:
    """Composes a row as it stands, and builds its model where options name stages of the backbone."""
    config = composed(*options)
    if any(option.startswith(OF_A_BACKBONE[1:]) for option in options):
        config.backbone.weights = "none"
        config.runtime.train_classes = 2
        build_method(config)


def train(options: Sequence[str], folder: Path) -> set[str]:
    """One step and its evaluation, without pictures: which figures `metrics.json` would have."""
    small = [option for option in options if not option.startswith(OF_A_BACKBONE)]
    if any("collage" in option.partition("=")[2] for option in options):  # needs the whole of CIFAR-100
        small = [option for option in small if not option.startswith("dataset.")]
        small += ["dataset=glyphs", "dataset.classes=16", "dataset.images_per_class=4", "dataset.size=32"]
    places = [f"paths.data_dir={folder / 'data'}", f"paths.cache_dir={folder / 'cache'}"]
    small += ["backbone=small", *places]
    config = composed(*small)
    several, collected = trainings_of(config), any(axis.collected for axis in left_open(config))
    if several:  # the first of its trainings
        config = composed(*small, *next(iter(several.values())))
    settle(config)
    OmegaConf.set_struct(config, False)
    config.report = False
    config.image_size = 32
    config.sampler.batch_size = BATCH
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
            ("head", "init_steps", 0),
        ),
        *(("loss", "memory_from", 0), ("protocol", "clustering", bool(config.protocol.clustering))),
    ):
        if option in config[part]:
            config[part][option] = value
    if "memory_size" in config.loss.get("loss", {}):
        config.loss.loss.memory_size = 4 * BATCH
    OmegaConf.set_struct(config, True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        config.paths.output_dir = place
        run_folder = RunFolder(Path(place) / "run")
        parts = build(config)
        run_folder.open(config, list(options))
        fit(config, run_folder, parts, trainer_of(config, parts.method, callbacks_of(config, run_folder, parts)))
        metrics = run_folder.metrics()
    return {*metrics, *(OF_COLLECTIONS if collected else ())}
