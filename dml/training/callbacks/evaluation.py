"""Evaluates the method during a run."""

import logging
import time
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from dml.analysis.reranked import reranked
from dml.evaluation.collecting import embed_rows
from dml.evaluation.evaluator import Embedded
from dml.evaluation.metric import HEADLINE
from dml.evaluation.metrics import evaluate
from dml.evaluation.splits import EvaluatedPart
from dml.methods.base import Method
from dml.training.build import Parts
from dml.training.callbacks.course import Course
from dml.training.callbacks.steps import Timing, log_metrics
from dml.training.callbacks.users import evaluated_weights

log = logging.getLogger("dml")


class Evaluation(Callback):
    """Evaluates the monitored part of the split, before the first step and whenever the course says so.

    Attributes:
        untrained: test metrics before the first step.
        latest: metrics and embeddings of this step's evaluation; None: there was none.
        seconds: time of the last evaluation; None: there was none since the start or the resume.
        recall: its Recall@1.
    """

    def __init__(self, course: Course, timing: Timing, parts: Parts) -> None:
        self.course, self.timing, self.parts = course, timing, parts
        self.untrained: dict[str, float] = {}
        self.latest: tuple[dict[str, float], Embedded] | None = None
        self.seconds: float | None = None
        self.recall: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"untrained": self.untrained}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.untrained = state_dict["untrained"]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_step == 0:
            self.untrained = self.evaluate(trainer, "test")[0]
            if self.parts.split.monitor != "test":
                self.evaluate(trainer, self.parts.split.monitor)  # the first point of its curve

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.latest = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.course.evaluates(trainer.global_step):
            self.latest = self.evaluate(trainer, self.parts.split.monitor)

    def to_come(self, step: int) -> float:
        """Returns how many seconds the evaluations after a step will take, judged by the last one; 0 without one."""
        return self.course.evaluations_after(step) * (self.seconds or 0.0)

    def evaluate(self, trainer: pl.Trainer, part: EvaluatedPart) -> tuple[dict[str, float], Embedded]:
        """Evaluates the method on one part of the split, with averaged weights if there are any, and logs metrics."""
        began = time.perf_counter()
        with self.timing.paused(), evaluated_weights(trainer):
            metrics, embedded = self.score(trainer, part)
            if self.parts.protocol.seen and part == self.parts.split.monitor:
                metrics[f"seen/{HEADLINE}"] = self._among_training_images(trainer)
        self.seconds = time.perf_counter() - began
        self.recall = metrics[f"{part}/{HEADLINE}"]
        log.info("step %d: Recall@1 %.4f on %s", trainer.global_step, self.recall, part)
        self.publish(trainer, metrics)
        return metrics, embedded

    def score(self, trainer: pl.Trainer, part: EvaluatedPart) -> tuple[dict[str, float], Embedded]:
        """Computes what `evaluate` does, but with the current weights, and logs nothing."""
        data, split, method = self.parts.data, self.parts.split, trainer.lightning_module
        assert isinstance(method, Method)
        rows = data.eval_rows if split.validation is None or part == "test" else split.validation
        embedded = embed_rows(trainer, rows, f"evaluating at step {trainer.global_step}")
        final = self.course.is_last(trainer.global_step)
        metrics = self.parts.protocol.score(embedded, split, part, groups=method.groups(), final=final)
        if final and part == "test" and self.parts.protocol.rerank is not None:
            metrics |= reranked(self.parts.protocol, split, embedded)
        return metrics, embedded

    def publish(self, trainer: pl.Trainer, metrics: dict[str, float]) -> None:
        """Logs metrics, and makes the loggers write what they have buffered."""
        log_metrics(trainer, metrics)
        for logger in trainer.loggers:
            logger.save()

    def _among_training_images(self, trainer: pl.Trainer) -> float:
        seen = embed_rows(trainer, self.parts.split.train, f"training images at step {trainer.global_step}")
        metrics = evaluate(seen.embeddings.flatten(1), seen.labels, ks=(1,), shared=True, clustering=False)
        return metrics[HEADLINE]
