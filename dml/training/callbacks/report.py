"""Writes the results of a run at its end."""

import copy
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from dml.data.datamodule import DataModule
from dml.distributed import wait_for_all
from dml.evaluation.evaluator import Embedded
from dml.evaluation.interval import intervals
from dml.evaluation.splits import EvaluatedPart
from dml.figures.plot import Plot
from dml.files import load_checkpoint
from dml.methods.base import Method
from dml.reporting.report import Table, write_report
from dml.reporting.retrieved import Retrieved
from dml.runs.folder import RunFolder
from dml.runs.log import read_metrics
from dml.runs.scores import write_scores
from dml.training.build import Parts
from dml.training.callbacks.best import BestCheckpoint
from dml.training.callbacks.course import Course
from dml.training.callbacks.evaluation import Evaluation
from dml.training.callbacks.steps import Timing
from dml.training.callbacks.users import evaluated_weights
from dml.training.loggers import log_artifacts, log_outcome, log_plots, log_tables

IMAGES = 4  # test images in the method's own pictures


class Report(Callback):
    """Writes `metrics.json` and the scores of the queries at the last step; with `report=true` also `report.html`.

    They are of the last checkpoint, or of the best one if the protocol says so.
    """

    def __init__(
        self,
        course: Course,
        evaluation: Evaluation,
        best: BestCheckpoint,
        timing: Timing,
        folder: RunFolder,
        parts: Parts,
    ) -> None:
        self.course, self.evaluation, self.best, self.timing = course, evaluation, best, timing
        self.folder, self.parts = folder, parts
        self.tables: dict[str, Table] | None = None  # tables of the page; None: nothing was reported yet

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.course.is_last(trainer.global_step):
            return
        assert self.evaluation.latest is not None
        with self.timing.paused(), evaluated_weights(trainer):
            if self.best.monitor == "test" and self.parts.protocol.select == "last":
                self._write(trainer, *self.evaluation.latest)
            else:
                self._test_the_best(trainer)
            wait_for_all()  # the first rank writes alone, for longer than NCCL would let the others wait

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Sends the artifacts, after the last checkpoint."""
        if self.tables is not None and self.course.config["logger"].get("wandb", {}).get("artifacts"):
            log_artifacts(trainer.loggers, self.folder.path, self.tables)

    def _test_the_best(self, trainer: pl.Trainer) -> None:
        """Tests and reports the best checkpoint, and leaves the method unchanged."""
        method, older = trainer.lightning_module, self.best.step < self.course.last_step
        metrics, embedded = self.evaluation.score(trainer, "test")
        last = renamed(metrics, "last")
        if older:
            weights = copy.deepcopy(method.state_dict())
            method.load_state_dict(load_checkpoint(self.best.file)["state_dict"])
            metrics, embedded = self.evaluation.score(trainer, "test")
        # If the test is monitored, the last point of its curve stays that of the last checkpoint.
        chosen = renamed(metrics, "chosen")
        self.evaluation.publish(trainer, chosen if self.best.monitor == "test" else metrics | last)
        self._write(trainer, metrics | last, embedded)
        if older:
            method.load_state_dict(weights)

    @rank_zero_only
    def _write(self, trainer: pl.Trainer, scores: dict[str, float], embedded: Embedded) -> None:
        parts = self.parts
        self.folder.forget_results()  # of a shorter training
        ranking = parts.protocol.ranking(parts.split, embedded)
        if ranking is not None:
            classes = embedded.take(parts.split.query).labels.cpu().numpy()
            scores = scores | {f"test/{name}": value for name, value in intervals(ranking, classes).items()}
        metrics = self._metrics(trainer, scores)
        log = read_metrics(self.folder.path / "metrics.jsonl")
        assert isinstance(self.course.config, dict)
        self.tables = {}
        if self.course.config["report"]:
            plots = plots_of(trainer, parts.data, log)
            about = {str(name): value for name, value in self.course.config.items()}
            tested = Retrieved(embedded, parts.records, parts.split, parts.protocol, ranking)
            pictures, self.tables = write_report(self.folder.path, about, metrics, tested, log, plots)
            log_plots(trainer.loggers, pictures, self.course.last_step)
            log_tables(trainer.loggers, self.tables, self.course.last_step)
        log_outcome(trainer.loggers, OmegaConf.create(dict(self.course.config)), metrics)
        write_scores(self.folder.path, parts.records, parts.split, parts.protocol, embedded, ranking)
        self.folder.write_metrics(metrics)

    def _metrics(self, trainer: pl.Trainer, scores: dict[str, float]) -> dict[str, float]:
        """Returns the content of `metrics.json`."""
        steps, monitor, seconds = self.course.last_step, self.best.monitor, self.timing.seconds
        return (
            scores
            | renamed(self.best.metrics, f"best_on_{monitor}", of=monitor)
            | {f"best_on_{monitor}/step": self.best.step}
            | renamed(self.evaluation.untrained, "untrained")
            | self.parts.data.sizes
            | {f"model/{name}": value for name, value in self.parts.complexity.items()}
            | {"run/steps": steps, "run/devices": trainer.world_size, "run/seconds": seconds}
            | {"run/seconds_between_steps": self.timing.of_step_ends}
            | {"run/images_per_second": steps * self.parts.data.sampler.batch_size / seconds}
        )


def plots_of(trainer: pl.Trainer, data: DataModule, log: list[dict[str, Any]]) -> list[Plot]:
    """Draws the method's own plots, with its current weights."""
    method = trainer.lightning_module
    assert isinstance(method, Method)
    rows = np.random.default_rng(0).choice(data.query_rows, min(IMAGES, len(data.query_rows)), replace=False)
    images = data.test_images(np.sort(rows))
    training = method.training
    method.eval()
    with torch.inference_mode(), trainer.precision_plugin.val_step_context():
        seen: Any = trainer.precision_plugin.convert_input(images.to(method.device))
        drawn = method.plots(seen, data, log)
    method.train(training)
    return drawn


def renamed(metrics: dict[str, float], prefix: str, of: EvaluatedPart = "test") -> dict[str, float]:
    """Renames metrics, `test/recall@1` to `<prefix>/recall@1`, and leaves out those of the learners."""
    return {f"{prefix}/{name.removeprefix(f'{of}/')}": v for name, v in metrics.items() if name.startswith(f"{of}/")}
