"""One run, from its folder to its report: fit, evaluate, resume."""

import copy
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import Callback, TQDMProgressBar
from pytorch_lightning.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dml.build import Parts, build, make
from dml.errors import Interrupted, UserError, no_room
from dml.evaluation.evaluator import Table, embed_rows
from dml.evaluation.metrics import evaluate
from dml.evaluation.protocol import Part
from dml.files import WholeCheckpoints
from dml.folder import RunFolder, load_checkpoint
from dml.loggers import FolderLogger, log_outcome, log_pictures, shareable
from dml.methods.base import Method, NonFiniteLoss, Shares
from dml.reporting.report import Examples, write_report
from dml.reporting.scores import write_scores
from dml.reporting.table import print_table

log = logging.getLogger("dml")
# Which devices there are, tips and adverts: not what a user waits for.
logging.getLogger("pytorch_lightning.utilities.rank_zero").setLevel(logging.WARNING)


def run(config: DictConfig, overrides: Sequence[str]) -> dict[str, float]:
    """Trains, evaluates and reports; goes on where a killed run of the same configuration stopped.

    Args:
        config: composed.
        overrides: of the command line, kept in the folder.

    Returns:
        The content of `metrics.json`, on rank 0; nothing on the others.

    Raises:
        UserError: a mistake in the configuration or the data, found before anything is written; or a loss that
            became NaN or infinite.
    """
    folder = RunFolder(Path(config.paths.output_dir))
    folder.check(config)
    if folder.finished():
        if getattr(rank_zero_only, "rank", 0):
            return {}
        print(f"{folder.path} holds this run already, finished: nothing was trained.")
        return _close(folder)
    parts, trainer = prepare(config, folder)
    folder.open(config, overrides)
    with folder.logged(), folder.locked():
        try:
            folder.note_start(config, overrides, trainer.world_size)
            fit(config, folder, parts, trainer)
        except BaseException as error:
            go_on = f"the same options with paths.output_dir={folder.path} go on"
            if no_room(error):  # not even for a line in run.log
                raise UserError(f"There is no room left in {folder.path}: make some, then {go_on}.") from error
            log.error("%s: %s", type(error).__name__, error)
            if isinstance(error, UserError) and not trainer.is_global_zero:  # the first rank may never learn of it
                print(f"dml: rank {trainer.global_rank}: {error}", file=sys.stderr)
            if not isinstance(error, UserError) and trainer.is_global_zero:
                print(f"\nStopped: {go_on}.", file=sys.stderr)
            if isinstance(error.__context__, KeyboardInterrupt):  # Lightning leaves with 1
                raise KeyboardInterrupt from None
            raise
    return _close(folder) if trainer.is_global_zero else {}


def prepare(config: DictConfig, folder: RunFolder) -> tuple[Parts, pl.Trainer]:
    """All that a run needs before anything is written. Raises UserError for a mistake in the configuration or data."""
    parts = build(config)
    return parts, trainer_of(config, Course(config, folder, parts))


def _learns_statistics(method: Method) -> bool:
    """Whether batch norm sees the batch, so that it has to be the whole one."""
    return any(isinstance(part, _BatchNorm) and part.training for part in method.train().modules())


def trainer_of(config: DictConfig, course: "Course") -> pl.Trainer:
    """The trainer of a run. Raises UserError where Lightning refuses an option, or we do."""
    learns_statistics = _learns_statistics(course.parts.method)
    if config.trainer.get("accumulate_grad_batches", 1) != 1:
        raise UserError(
            "trainer.accumulate_grad_batches cannot be used: losses compare the images of one batch, and parts of it "
            "are another loss. Set sampler.batch_size, and method.checkpointing=true where there is too little memory."
        )
    ours = ("log_every", "checkpoint_every", "num_workers", "halve_lr_after")
    options = {str(name): value for name, value in config.trainer.items() if name not in ours}
    options |= _as_started(config.trainer.strategy)
    options["sync_batchnorm"] = config.trainer.sync_batchnorm and learns_statistics  # which torch takes on GPUs alone
    try:
        trainer = pl.Trainer(
            **options,
            logger=False,
            log_every_n_steps=1,  # Lightning logs nothing of ours; larger, it warns of short epochs
            callbacks=[course, Bar(refresh_rate=10)],
            plugins=[WholeCheckpoints(), *_environment()],
            max_epochs=-1,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
    except (MisconfigurationException, ValueError, TypeError, RuntimeError) as error:
        sentence = " ".join(str(error).split())
        raise UserError(f"Lightning refuses the options under 'trainer': {sentence}") from error
    if trainer.world_size > 1 and learns_statistics:
        on_cpu = trainer.strategy.root_device.type == "cpu"
        if on_cpu or not config.trainer.sync_batchnorm:
            raise UserError(
                "Each of several devices would see its own part of the batch in batch norm: "
                + ("" if on_cpu else "synchronise it with trainer=ddp, or ")
                + "freeze its statistics with backbone.freeze=bn_statistics."
            )
    return trainer


def _as_started(strategy: str) -> dict[str, Any]:
    """How many processes torchrun or srun started, which need not be said again."""
    devices, nodes = 1, 1
    if TorchElasticEnvironment.detect():
        devices, nodes = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
    elif SLURMEnvironment.detect():
        nodes = int(os.environ["SLURM_NNODES"])
        devices = int(os.environ["SLURM_NTASKS"]) // nodes
    if devices * nodes == 1:
        return {}
    return {"devices": devices, "num_nodes": nodes, "strategy": "ddp" if strategy == "auto" else strategy}


def _environment() -> list[ClusterEnvironment]:
    """A single task of SLURM starts its ranks itself; of several none puts the job into the queue again by itself."""
    if TorchElasticEnvironment.detect() or not SLURMEnvironment.detect():
        return []
    alone = os.environ.get("SLURM_NTASKS", "1") == "1"
    return [LightningEnvironment() if alone else SLURMEnvironment(auto_requeue=False)]


def fit(config: DictConfig, folder: RunFolder, parts: Parts, trainer: pl.Trainer) -> None:
    """Trains from the last checkpoint on, with all loggers."""
    trainer.loggers = [FolderLogger(folder.path), *(make(one) for one in config.logger.values())]
    for logger in trainer.loggers:
        logger.log_hyperparams(shareable(config))
    try:
        with folder.inherited(), warnings.catch_warnings():
            # Frozen batch norm is in eval mode, and means to be.
            warnings.filterwarnings("ignore", ".*in eval mode at the start of training")
            trainer.fit(parts.method, datamodule=parts.data, ckpt_path=folder.checkpoint(), weights_only=True)
    finally:
        _finish_loggers()


def plain(config: DictConfig) -> dict[str, Any]:
    """The configuration with its references filled in, as plain containers."""
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    return {str(name): value for name, value in container.items()}


def _finish_loggers() -> None:
    """Without finish() the next run of this process would go on in this one's W&B run."""
    if "wandb" in sys.modules:
        sys.modules["wandb"].finish()


def _close(folder: RunFolder) -> dict[str, float]:
    metrics = folder.metrics()
    print_table(metrics)
    print(f"Report: {folder.path / 'report.html'}")
    return metrics


class Bar(TQDMProgressBar):
    """Lightning's, without its "Epoch 0": a run is counted in steps."""

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        super().on_train_epoch_start(trainer)
        self.train_progress_bar.set_description("training")


class Signals:
    """SIGTERM, SIGUSR1 and SIGUSR2, by which schedulers say that they will take the machine away."""

    def __init__(self) -> None:
        self.received: str | None = None

    def watch(self) -> None:
        """In place of Lightning's handlers, which do not let ranks finish their step; it puts back what was before."""
        if threading.current_thread() is threading.main_thread():
            for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(one, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.received = signal.Signals(number).name


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

    def state_dict(self) -> dict[str, Any]:
        if self.plateau is None:
            return self.state
        return self.state | {"plateau": self.plateau.state_dict(), "loss_of_epoch": self.loss_of_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = dict(state_dict)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["config"] = self.container
        checkpoint["finished"] = trainer.global_step == self.last_step

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.signals.watch()
        fresh = trainer.global_step == 0
        for logger in trainer.loggers:
            if isinstance(logger, FolderLogger):
                logger.forget_after(-1 if fresh else trainer.global_step)
        if fresh:
            self.state["untrained"] = self._evaluate(trainer, "test")[0]
            if self.watched != "test":
                self._evaluate(trainer, self.watched)  # where its curve starts
            self._between_steps(trainer)
        else:
            log.info("resumed at step %d", trainer.global_step)
            self._take_up_the_best()
        self._watch_for_a_plateau(trainer)
        self.started = time.perf_counter()

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
            name = f"{self.watched}/{self.parts.protocol.criterion}"
            # One rank decides for all: on other processors the last bit of a figure may be another.
            if trainer.strategy.broadcast(figures[name] > self.state["best"].get(name, -1.0)):
                self.state |= {"best": figures, "best_step": step}
                trainer.save_checkpoint(self.best, weights_only=False)
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
        if told and not last:
            raise Interrupted(
                f"{self.signals.received or 'a signal to another process'} at step {step}, which is saved"
            )
        self.started = time.perf_counter()

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
