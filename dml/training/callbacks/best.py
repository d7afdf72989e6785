"""Keeps the best checkpoint so far, and ends a training that has found no better one for some time."""

import logging
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from dml.configuration.composition import elsewhere
from dml.errors import UserError
from dml.evaluation.metric import metric
from dml.evaluation.protocol import Conventional
from dml.files import load_checkpoint
from dml.runs.folder import RunFolder
from dml.training.callbacks.course import Course
from dml.training.callbacks.evaluation import Evaluation

log = logging.getLogger("dml")


class BestCheckpoint(Callback):
    """Keeps the checkpoint with the best criterion on the monitored part; when patience runs out, it ends the training.

    Attributes:
        metrics, step: of the best evaluation so far.
    """

    def __init__(self, course: Course, evaluation: Evaluation, folder: RunFolder, protocol: Conventional) -> None:
        self.monitor = evaluation.parts.split.monitor
        if protocol.patience is not None and self.monitor == "test":
            raise UserError("protocol.patience needs validation classes: set protocol.select=val_classes too.")
        self.course, self.evaluation, self.protocol = course, evaluation, protocol
        self.file = folder.best(self.monitor)
        self.metrics: dict[str, float] = {}
        self.step = 0
        self.before_the_end: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"metrics": self.metrics, "step": self.step, "before_the_end": self.before_the_end}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.metrics, self.step = state_dict["metrics"], state_dict["step"]
        self.before_the_end = state_dict["before_the_end"]
        if self.step or self.file.exists():
            self._read_the_best()  # before anything of the training is written

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.course.lengthened:
            self._go_on_from_an_end(trainer)

    def _read_the_best(self) -> None:
        """Reads the record of the best checkpoint, which may be newer than the last one after a kill.

        Raises:
            UserError: it is gone or damaged, and the run tests it at its end.
        """
        try:
            saved = load_checkpoint(self.file)["callbacks"][self.state_key]
        except UserError as error:
            if self.monitor == "test" and self.protocol.select == "last":
                return  # nothing needs it; what the last checkpoint says of it is true
            what = "is damaged" if self.file.exists() else "is gone"
            raise UserError(
                f"{self.file} {what}, and this run tests that checkpoint at its end: put back a copy of it, or train "
                f"anew in another folder {elsewhere()}."
            ) from error
        self.metrics, self.step = saved["metrics"], saved["step"]

    def _go_on_from_an_end(self, trainer: pl.Trainer) -> None:
        """Repeats the step at which a shorter training ended as a longer one does it: it evaluates only if that is due.

        If it is not due, and the evaluation at the end found the best checkpoint so far, that checkpoint stays.
        """
        before, self.before_the_end = self.before_the_end, None
        step = trainer.global_step
        if step % self.course.every == 0:
            assert before is not None
            self.metrics, self.step = before["metrics"], before["step"]
            self._keep(trainer, self.evaluation.evaluate(trainer, self.monitor)[0])
            if self._out_of_patience(step):
                raise UserError(
                    f"A longer training ends at step {step} too, by protocol.patience: raise that option in a new run."
                )

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.evaluation.latest is None:
            return
        step = trainer.global_step
        if self.course.is_last(step):
            self.before_the_end = {"metrics": self.metrics, "step": self.step}
        with self.evaluation.timing.paused():
            self._keep(trainer, self.evaluation.latest[0])
        if not self.course.is_last(step) and self._out_of_patience(
            step
        ):  # it depends on steps alone, so all ranks agree
            log.info("stopped at step %d: the best on %s was step %d", step, self.monitor, self.step)
            self.course.last_step, trainer.should_stop = step, True

    def _keep(self, trainer: pl.Trainer, metrics: dict[str, float]) -> None:
        name = f"{self.monitor}/{self.protocol.criterion}"
        # The first rank decides for all, since the last bit of a metric may differ between processors.
        better = metric(name).better(metrics[name], than=self.metrics.get(name))
        if trainer.strategy.broadcast(better):
            self.metrics, self.step = metrics, trainer.global_step
            trainer.save_checkpoint(self.file, weights_only=False)

    def _out_of_patience(self, step: int) -> bool:
        patience = self.protocol.patience
        return patience is not None and step - self.step >= patience * self.course.every
