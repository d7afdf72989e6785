"""The course of a run: what happens at which step."""

import copy
import logging
import time
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dml.build import Parts
from dml.errors import Interrupted, UserError
from dml.evaluation.evaluator import Table, embed_rows
from dml.evaluation.metrics import evaluate
from dml.evaluation.protocol import Part
from dml.files import load_checkpoint
from dml.folder import RunFolder
from dml.gradient import FirstGradient
from dml.loggers import FolderLogger, log_outcome, log_pictures
from dml.methods.base import Method, NonFiniteLoss, Shares
from dml.reporting.report import Examples, write_report
from dml.reporting.scores import write_scores
from dml.signals import Signals

log = logging.getLogger("dml")


def plain(config: DictConfig) -> dict[str, Any]:
    """The configuration with its references filled in, as plain containers."""
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    return {str(name): value for name, value in container.items()}


class Course(Callback):
    """What happens at which step: seeds, evaluations, figures, checkpoints and the report at the end.

    A step's evaluation comes before its checkpoint, and the last step's report before the last checkpoint, so that
    a run killed anywhere repeats what it has not written.
    """

    def __init__(self, config: DictConfig, folder: RunFolder, parts: Parts) -> None:
        self.config = config
        self.container = plain(config)
        self.folder, self.parts = folder, parts
        self.last_step: int = config.trainer.max_steps
        self.watched = parts.split.watched
        if parts.protocol.patience is not None and self.watched == "test":
            raise UserError("protocol.patience looks at validation classes: give protocol.select=val_classes too.")
        self.best = folder.best(self.watched)
        self.every = parts.protocol.interval(parts.data.sampler.steps_per_epoch)
        self.state: dict[str, Any] = {"untrained": {}, "best": {}, "best_step": 0, "seconds": 0.0}
        self.state["seconds_between_steps"] = 0.0
        self.plateau: ReduceLROnPlateau | None = None
        self.loss_of_epoch = torch.zeros(())
        self.signals = Signals()
        self.gradient = FirstGradient(config, parts.data)

    def state_dict(self) -> dict[str, Any]:
        state = self.state | {"learns": self.gradient.found}
        if self.plateau is None:
            return state
        return state | {"plateau": self.plateau.state_dict(), "loss_of_epoch": self.loss_of_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = dict(state_dict)
        self.gradient.found = self.state.pop("learns", False)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["config"] = self.container
        checkpoint["finished"] = trainer.global_step == self.last_step

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.signals.watch()
        fresh, lengthened = trainer.global_step == 0, "before_the_end" in self.state
        for logger in trainer.loggers:
            if isinstance(logger, FolderLogger):
                logger.forget_after(-1 if fresh else trainer.global_step, training_alone=lengthened)
        self._watch_for_a_plateau(trainer)
        if fresh:
            self.state["untrained"] = self._evaluate(trainer, "test")[0]
            if self.watched != "test":
                self._evaluate(trainer, self.watched)  # where its curve starts
            self._between_steps(trainer)
        else:
            log.info("resumed at step %d", trainer.global_step)
            self._take_up_the_best()
            if lengthened:
                self._go_on_from_an_end(trainer)
        self.started = time.perf_counter()

    def _go_on_from_an_end(self, trainer: pl.Trainer) -> None:
        """What a training that does not end at this step does here, in place of what the shorter one did.

        Only where no evaluation is due here, and that of the end found the best checkpoint so far, that one stays.
        """
        before = self.state.pop("before_the_end")
        log.info("lengthened at step %d to %d steps", trainer.global_step, self.last_step)
        if trainer.global_step % self.every == 0:
            self.state |= before
            self._keep_the_best(trainer, self._evaluate(trainer, self.watched)[0])
            if self._out_of_patience(trainer.global_step):
                raise UserError(f"A longer training ends at step {trainer.global_step} too, by protocol.patience.")
        self._between_steps(trainer)

    def _take_up_the_best(self) -> None:
        """A best checkpoint may be younger than the last one that a kill left: what it says of itself holds."""
        if self.best.exists():
            saved = load_checkpoint(self.best)["callbacks"][self.state_key]
            self.state |= {name: saved[name] for name in ("best", "best_step")}

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        # Miners and dropout draw from the global generators: a step's draws depend on the seed and the step alone,
        # so that a resumed run needs no generator state.
        seed = np.random.SeedSequence([self.config.seed, trainer.global_step]).generate_state(1)[0]
        pl.seed_everything(int(seed), verbose=False)

    def on_before_backward(self, trainer: pl.Trainer, module: pl.LightningModule, loss: Tensor) -> None:
        self.gradient.check_loss(loss)

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not self.gradient.found:
            self.gradient.look(module, trainer.global_step + 1)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, last = trainer.global_step, trainer.global_step == self.last_step
        self._halve_on_a_plateau(trainer)
        self.state["seconds"] += time.perf_counter() - self.started
        if step % self.config.trainer.log_every == 0:
            self._log(trainer, {name: float(value) for name, value in _method(trainer).terms.items()})
        evaluated = last or step % self.every == 0
        # Of all ranks, which a signal reaches at different steps if at all.
        told = not last and trainer.strategy.reduce_boolean_decision(self.signals.received is not None, all=False)
        saved = told or evaluated or step % self.config.trainer.checkpoint_every == 0
        if saved:
            _check_finite(module, step)
        if evaluated:
            figures, table = self._evaluate(trainer, self.watched)
            if last:
                self.state["before_the_end"] = {name: self.state[name] for name in ("best", "best_step")}
            self._keep_the_best(trainer, figures)
            if not last and self._out_of_patience(step):  # of the steps alone, which all ranks have in common
                log.info("stopped at step %d: the best on %s was step %d", step, self.watched, self.state["best_step"])
                last, self.last_step, trainer.should_stop = True, step, True
            if last and self.watched == "test" and self.parts.protocol.select == "last":
                self._report(trainer, figures, table)
            elif last:
                self._test_the_best(trainer)
        if not last:
            self._between_steps(trainer)
        if saved:
            trainer.save_checkpoint(self.folder.last, weights_only=False)
            if not last and trainer.is_global_zero:
                self.folder.forget_results()  # of a shorter training
        if told and not last:
            raise Interrupted(
                f"{self.signals.received or 'a signal to another process'} at step {step}, which is saved"
            )
        self.started = time.perf_counter()

    def _keep_the_best(self, trainer: pl.Trainer, figures: dict[str, float]) -> None:
        name = f"{self.watched}/{self.parts.protocol.criterion}"
        # One rank decides for all: on other processors the last bit of a figure may be another.
        if trainer.strategy.broadcast(figures[name] > self.state["best"].get(name, -1.0)):
            self.state |= {"best": figures, "best_step": trainer.global_step}
            trainer.save_checkpoint(self.best, weights_only=False)

    def _out_of_patience(self, step: int) -> bool:
        patience = self.parts.protocol.patience
        return patience is not None and step - self.state["best_step"] >= patience * self.every

    def _watch_for_a_plateau(self, trainer: pl.Trainer) -> None:
        patience = self.config.trainer.halve_lr_after
        if not patience:
            return
        # Not as a scheduler of Lightning's: it steps those after callbacks have written the step's checkpoint.
        self.plateau = ReduceLROnPlateau(trainer.optimizers[0], factor=0.5, patience=patience - 1, threshold=0)
        if "plateau" in self.state:
            self.plateau.load_state_dict(self.state.pop("plateau"))
            self.loss_of_epoch = self.state.pop("loss_of_epoch")

    def _halve_on_a_plateau(self, trainer: pl.Trainer) -> None:
        """Halves all learning rates after some epochs whose mean training loss is not below the lowest so far (which a
        term that joins in later, as that of a memory or of prototypes awaited, may hold off for good)."""
        if self.plateau is None:
            return
        loss = _method(trainer).terms["train/loss"]
        self.loss_of_epoch = self.loss_of_epoch.to(loss.device) + loss
        if trainer.global_step % self.parts.data.sampler.steps_per_epoch == 0:
            self.plateau.step(float(self.loss_of_epoch))
            self.loss_of_epoch = torch.zeros(())
            self._log(trainer, {"train/lr": trainer.optimizers[0].param_groups[0]["lr"]})

    def _between_steps(self, trainer: pl.Trainer) -> None:
        """What the method does between steps is training time too, and is in the step's checkpoint."""
        started = time.perf_counter()
        figures = _method(trainer).between_steps(trainer.global_step)
        seconds = time.perf_counter() - started
        self.state["seconds"] += seconds
        self.state["seconds_between_steps"] += seconds
        if figures:
            self._log(trainer, figures)

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, NonFiniteLoss):
            trainer.save_checkpoint(self.folder.path / "checkpoints" / "non_finite.ckpt", weights_only=False)

    def _test_the_best(self, trainer: pl.Trainer) -> None:
        """Tests and reports the checkpoint that was the best, and leaves the method as it was."""
        method = _method(trainer)
        figures, table = self._score(trainer, "test")
        last = _renamed(figures, "last")
        if self.state["best_step"] < self.last_step:
            weights = copy.deepcopy(method.state_dict())
            method.load_state_dict(load_checkpoint(self.best)["state_dict"])
            figures, table = self._score(trainer, "test")
        # Where the course of test figures is watched, its last point is that of the last checkpoint.
        self._log_evaluation(trainer, _renamed(figures, "chosen") if self.watched == "test" else figures | last)
        self._report(trainer, figures | last, table)
        if self.state["best_step"] < self.last_step:
            method.load_state_dict(weights)

    def _evaluate(self, trainer: pl.Trainer, part: Part) -> tuple[dict[str, float], Table]:
        figures, table = self._score(trainer, part)
        if self.parts.protocol.seen and part == self.watched:
            rows = self.parts.split.train
            trained = embed_rows(trainer, rows, f"training images at step {trainer.global_step}")
            recall = evaluate(trained.embeddings.flatten(1), trained.labels, ks=(1,), shared=True, clustering=False)[
                "recall@1"
            ]
            figures["seen/recall@1"] = recall
        log.info("step %d: Recall@1 %.4f on %s", trainer.global_step, figures[f"{part}/recall@1"], part)
        self._log_evaluation(trainer, figures)
        return figures, table

    def _score(self, trainer: pl.Trainer, part: Part) -> tuple[dict[str, float], Table]:
        """The method as it is now on one part of the split."""
        data, split = self.parts.data, self.parts.split
        rows = data.eval_rows if split.validation is None or part == "test" else split.validation
        table = embed_rows(trainer, rows, f"evaluating at step {trainer.global_step}")
        final = trainer.global_step == self.last_step
        scales = _method(trainer).scales_of_learners
        return self.parts.protocol.score(table, split, part, scales=scales, final=final), table

    def _log(self, trainer: pl.Trainer, figures: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)

    def _log_evaluation(self, trainer: pl.Trainer, figures: dict[str, float]) -> None:
        self._log(trainer, figures)
        for logger in trainer.loggers:
            logger.save()

    def _metrics(self, trainer: pl.Trainer, figures: dict[str, float]) -> dict[str, float]:
        """The content of `metrics.json`."""
        data, state = self.parts.data, self.state
        images = self.last_step * self.config.sampler.batch_size
        return (
            figures
            | _renamed(state["best"], f"best_on_{self.watched}", of=self.watched)
            | {f"best_on_{self.watched}/step": state["best_step"]}
            | _renamed(state["untrained"], "untrained")
            | data.sizes
            | {f"model/{name}": value for name, value in self.parts.complexity.items()}
            | {"run/steps": self.last_step, "run/devices": trainer.world_size, "run/seconds": state["seconds"]}
            | {"run/seconds_between_steps": state["seconds_between_steps"]}
            | {"run/images_per_second": images / state["seconds"]}
        )

    @rank_zero_only
    def _report(self, trainer: pl.Trainer, figures: dict[str, float], table: Table) -> None:
        """`metrics.json`, figures and `report.html`."""
        metrics = self._metrics(trainer, figures)
        examples = self._examples(trainer)
        pictures = write_report(self.folder.path, self.container, metrics, table, self.parts, examples)
        log_pictures(trainer.loggers, pictures, self.last_step)
        log_outcome(trainer.loggers, metrics)
        write_scores(self.folder.path, self.parts, table)
        self.folder.write_metrics(metrics)

    def _examples(self, trainer: pl.Trainer, count: int = 4, classes: int = 16, of_class: int = 16) -> Examples:
        """Some test images and what the method attends to in them."""
        method, data = _method(trainer), self.parts.data
        rows, rng = data.query_rows, np.random.default_rng(0)
        images = self._test_images(rng.choice(rows, min(count, len(rows)), replace=False))
        training = method.training
        method.eval()
        with torch.inference_mode(), trainer.precision_plugin.val_step_context():
            seen = self._as_the_method_sees(trainer, images)
            maps, regions, shares = method.attention(seen), method.regions(seen), method.shares(seen)
            of_classes = None
            if shares is not None:
                labels = self.parts.records.labels[rows]
                chosen = [np.flatnonzero(labels == c)[:of_class] for c in np.unique(labels)[:classes]]
                found = [method.shares(self._as_the_method_sees(trainer, self._test_images(rows[c]))) for c in chosen]
                attributes = torch.cat([of.attributes.float().cpu() for of in found if of is not None])
                of_classes = attributes, torch.as_tensor(labels[np.concatenate(chosen)])
                shares = Shares(shares.weights.cpu(), shares.dominant.cpu(), shares.attributes.cpu())
        method.train(training)
        on_cpu = [(r.proposal.float().cpu(), r.boxes.cpu()) for r in regions]
        return Examples(images, None if maps is None else maps.float().cpu(), on_cpu, shares, of_classes)

    def _test_images(self, rows: np.ndarray) -> Tensor:
        return torch.stack([self.parts.data.test_image(row) for row in np.sort(rows)])

    @staticmethod
    def _as_the_method_sees(trainer: pl.Trainer, images: Tensor) -> Tensor:
        method = _method(trainer)
        seen = method.normalize(trainer.precision_plugin.convert_input(images.to(method.device)))
        return seen.contiguous(memory_format=torch.channels_last)


def _renamed(figures: dict[str, float], prefix: str, of: Part = "test") -> dict[str, float]:
    """`test/recall@1` -> `<prefix>/recall@1`; the learners' figures are left out."""
    return {f"{prefix}/{name.removeprefix(f'{of}/')}": v for name, v in figures.items() if name.startswith(f"{of}/")}


def _check_finite(module: pl.LightningModule, step: int) -> None:
    """Before a checkpoint that could be resumed from only to fail again."""
    for name, parameter in module.named_parameters():
        if not torch.isfinite(parameter.detach().sum()):
            raise NonFiniteLoss(
                f"The parameter '{name}' became NaN or infinite at step {step}: lower lr or set "
                "trainer.gradient_clip_val."
            )


def _method(trainer: pl.Trainer) -> Method:
    method = trainer.lightning_module
    assert isinstance(method, Method)
    return method
