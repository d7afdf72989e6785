"""Every row of every experiment for one step, on miniature data and a small backbone.

What comes out is no figure; it shows that rows compose, train, and give the figures that the paper prints of them.
"""

import multiprocessing as mp
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dml.papers import Experiment, Training

# What belongs to a backbone, and cannot be kept beside another.
OF_A_BACKBONE = ("backbone", "method.branch=", "method.object_layers=")
BATCH = 8


def smoke(experiments: Sequence[Experiment], rows: Sequence[str], processes: int | None = None) -> dict[str, str]:
    """Trains each distinct row, several at a time.

    Returns:
        What went wrong, by `experiment: row, part`.
    """
    wanted: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for experiment in experiments:
        for training in experiment.trainings(rows, seeds=[0]):
            columns = experiment.parts[training.part].columns
            printed = experiment.rows[training.row].published.get(training.part, ())
            shown = [columns[title].metric for title in printed if not columns[title].metric.endswith("/std")]
            place = f"{training.experiment}: {training.row}, {training.part}"
            wanted.setdefault(_kept(training), {})[place] = shown
    from tqdm import tqdm

    with tempfile.TemporaryDirectory() as folder:
        from dml.data.miniatures import smoke as make

        make(Path(folder) / "data")
        jobs = [
            (options, sorted({m for ms in places.values() for m in ms}), folder) for options, places in wanted.items()
        ]
        wrong: dict[str, str] = {}
        with mp.get_context("spawn").Pool(processes or os.cpu_count(), _quietly) as pool:
            for options, said in tqdm(pool.imap_unordered(_one, jobs), total=len(jobs), desc="rows"):
                wrong |= dict.fromkeys(wanted[options], said) if said else {}
    return wrong


def _kept(training: Training) -> tuple[str, ...]:
    return tuple(option for option in training.overrides if not option.startswith(OF_A_BACKBONE))


def _quietly() -> None:
    import logging
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  as many bars


def _one(job: tuple[tuple[str, ...], list[str], str]) -> tuple[tuple[str, ...], str]:
    """What went wrong with one row; nothing where it trained and has its figures."""
    options, shown, folder = job
    try:
        lacking = sorted(set(shown) - train(options, Path(folder)).keys())
    except (Exception, SystemExit) as error:
        return options, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return options, f"lacks {', '.join(lacking)}" if lacking else ""


def train(options: Sequence[str], folder: Path) -> dict[str, float]:
    """One step and its evaluation: what `metrics.json` would have, without pictures."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from dml.build import build
    from dml.command import CONF
    from dml.folder import RunFolder
    from dml.pieces import pieces, settle
    from dml.train import Course, fit, trainer_of

    class OneStep(Course):
        def _report(self, trainer: Any, figures: dict[str, float], table: Any) -> None:
            metrics.update(self._metrics(trainer, figures))

    metrics: dict[str, float] = {}
    with initialize_config_dir(str(CONF), version_base="1.3"):
        collage = any("cifar_collage" in o or "collage" in o.partition("=")[2] for o in options)
        glyphs = ["dataset=glyphs", "dataset.classes=16", "dataset.images_per_class=4", "dataset.size=32"]
        places = [f"paths.data_dir={folder / 'data'}", f"paths.cache_dir={folder / 'cache'}"]
        small = [*options, "backbone=small", *(glyphs if collage else []), *places]
        config = compose("config", overrides=small)
        several = pieces(config)
        if several:  # the first of its trainings
            config = compose("config", overrides=[*small, *next(iter(several.values()))])
    settle(config)
    OmegaConf.set_struct(config, False)
    config.image_size = 32
    config.sampler.batch_size = BATCH
    if "m" in config.sampler:
        config.sampler.m = min(2, config.sampler.m or 2)
    config.backbone.weights, config.backbone.freeze = "none", "bn_statistics"
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
        fit(config, run_folder, parts, trainer_of(config, OneStep(config, run_folder, parts)))
    return metrics
