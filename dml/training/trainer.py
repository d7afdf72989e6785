"""Makes Lightning's trainer for a run: its options, the number of processes, and the progress bar."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from pytorch_lightning.callbacks import Callback, TQDMProgressBar
from pytorch_lightning.callbacks.progress.tqdm_progress import Tqdm
from pytorch_lightning.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dml import started
from dml.data.samplers import check_share
from dml.errors import UserError
from dml.files import LAST, PREVIOUS, atomic_path
from dml.methods.base import Method
from dml.models.backbones.stages import Stages
from dml.models.products import set_products
from dml.training.callbacks.evaluation import Evaluation
from dml.training.callbacks.steps import Timing
from dml.training.compiling import compile_steps

OURS = ("log_every", "checkpoint_every", "num_workers", "sync_batchnorm", "matmul", "compile", "micro_batch")


def trainer_of(config: DictConfig, method: Method, callbacks: Sequence[Callback]) -> pl.Trainer:
    """Makes the trainer of a run. Raises UserError for options that Lightning or dml refuses."""
    options: dict[str, Any] = {str(name): value for name, value in config.trainer.items() if name not in OURS}
    options |= _as_started(config.trainer.strategy, config.trainer.num_nodes)
    options["accelerator"] = _accelerator(config.trainer.accelerator)
    if options["accelerator"] == "cpu" and str(config.trainer.precision) in ("16-mixed", "16"):
        raise UserError(  # Lightning would take bfloat16 in its place
            f"trainer.precision={config.trainer.precision} is for GPUs: on a CPU choose bf16-mixed or 32-true."
        )
    options["benchmark"] = config.trainer.benchmark and not config.trainer.deterministic
    clipped = str(config.trainer.precision).endswith("-mixed") and options.get("gradient_clip_val")
    if clipped and config.optimizer.get("fused"):
        raise UserError(
            f"optimizer.fused=true cannot be used with trainer.precision={config.trainer.precision} and "
            "trainer.gradient_clip_val, since Lightning clips no gradients of fused optimizers: leave one of them out."
        )
    if options.get("gradient_clip_algorithm") and not options.get("gradient_clip_val"):
        raise UserError(
            f"trainer.gradient_clip_algorithm={config.trainer.gradient_clip_algorithm} clips nothing without a limit: "
            "set trainer.gradient_clip_val too."
        )
    set_products(config.trainer.matmul)
    try:
        trainer = pl.Trainer(
            **options,
            logger=False,
            log_every_n_steps=1,  # not used for our metrics; Lightning would warn of short epochs otherwise
            callbacks=[*callbacks, *([Bar(refresh_rate=10)] if options.get("enable_progress_bar", True) else [])],
            plugins=[WholeCheckpoints(), *_environment()],
            max_epochs=-1,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
    except (MisconfigurationException, ImportError, ValueError, TypeError, RuntimeError) as error:
        raise refused(error) from error
    # `Course` and `stop_when_told` obey signals. Lightning would wait for the device at every step to hear of rank 0's,
    # and its handler would talk to ranks that expect something else.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    trainer._signal_connector._sigterm_notifier_fn = lambda *_: None  # type: ignore[method-assign]
    trainer.limit_val_batches = 0  # our callbacks evaluate; overfit_batches would change this
    check_share(config.sampler.batch_size, trainer.world_size)
    if config.trainer.micro_batch is not None:
        _check_pieces(config.trainer.micro_batch, config.sampler.batch_size, trainer.world_size, method)
    method.micro_batch = config.trainer.micro_batch
    if trainer.world_size > 1 and _learning_norms(method):
        on_cpu = device_of(trainer).type == "cpu"
        if on_cpu or not config.trainer.sync_batchnorm:
            raise UserError(
                "Batch norm on each of several devices would only see its own part of the batch: "
                + ("" if on_cpu else "synchronise it with trainer=ddp, or ")
                + f"{_without_statistics(method)}."
            )
        synchronised_norms(method)
    _check_precision(config.trainer.precision, device_of(trainer))
    if config.trainer.compile:
        compile_steps(method, trainer)
    return trainer


def device_of(trainer: pl.Trainer) -> torch.device:
    """Returns the device of this process."""
    return trainer.strategy.root_device


def _check_precision(precision: str | int | None, device: torch.device) -> None:
    """Raises UserError for bfloat16 on a GPU that can only emulate it, slower than float32."""
    if str(precision).startswith("bf16") and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise UserError(
                f"trainer.precision={precision}: {torch.cuda.get_device_name(device)} (compute capability "
                f"{major}.{minor}) does not compute in bfloat16, which needs 8.0: choose 16-mixed or 32-true."
            )


def refused(error: Exception) -> UserError:
    """Returns the error for options that Lightning refused, in one sentence."""
    return UserError(f"Lightning refuses the options under 'trainer': {' '.join(str(error).split())}")


def _check_pieces(size: int, batch: int, devices: int, method: Method) -> None:
    """Raises UserError for a size of pieces that does not divide the batch, or a network whose results would change."""
    share = batch // devices
    if share % size:
        sizes = [one for one in range(1, share + 1) if share % one == 0]
        near = sorted({max(one for one in sizes if one <= size), min((o for o in sizes if o >= size), default=share)})
        raise UserError(
            f"trainer.micro_batch={size} does not divide the {share} images that a device has of a batch "
            f"(sampler.batch_size={batch}): choose {' or '.join(map(str, near))}."
        )
    if _learning_norms(method):
        raise UserError(
            "Batch norm would take its statistics from the pieces of trainer.micro_batch, and not from the batch: "
            f"{_without_statistics(method)}, or leave trainer.micro_batch out."
        )


def _learning_norms(method: Method) -> list[nn.Module]:
    """Returns the batch norm that takes its statistics from the batch, and therefore has to see the whole batch."""
    return [part for part in method.train().modules() if isinstance(part, _BatchNorm) and part.training]


def synchronised_norms(module: nn.Module) -> nn.Module:
    """Makes its layers of batch norm take their statistics over all devices. The module itself is returned, unless it
    is such a layer.

    Lightning's option was passed over, since it converts for a single device too, where torch runs it on a GPU only;
    and torch's function, since it drops the activations that timm's layers of batch norm have.
    """
    from timm.layers import convert_sync_batchnorm  # takes a second, and few runs need it

    converted: nn.Module = convert_sync_batchnorm(module)
    return converted


def _without_statistics(method: Method) -> str:
    """Says how to avoid batch norm with batch statistics, for the middle of a sentence."""
    of_backbone = {id(part) for stages in method.modules() if isinstance(stages, Stages) for part in stages.modules()}
    places = {id(norm) in of_backbone for norm in _learning_norms(method)}
    freeze = "freeze its statistics with backbone.batch_norm=running"
    other = "choose another head, as this one has batch norm of its own"
    return f"{freeze}, and {other}" if len(places) > 1 else freeze if True in places else other


def _accelerator(name: str) -> str:
    """Returns Lightning's name. Its own `auto` and `gpu` may be an Apple GPU, on which float64 is missing."""
    on_gpu = name == "gpu" or (name == "auto" and torch.cuda.is_available())
    return "cuda" if on_gpu else "cpu"


def _as_started(strategy: str, nodes: int) -> dict[str, Any]:
    """Returns options for the processes that torchrun or srun started, so that the user need not repeat them."""
    if TorchElasticEnvironment.detect():
        devices, nodes = started.of_torchrun()
    elif SLURMEnvironment.detect():
        devices, nodes = started.of_slurm()
    else:
        started.of_hand(nodes)
        return {}
    if devices * nodes == 1:
        return {}
    return {"devices": devices, "num_nodes": nodes, "strategy": "ddp" if strategy == "auto" else strategy}


def _environment() -> list[ClusterEnvironment]:
    """Chooses the environment under SLURM: a single task starts its ranks itself, and no task requeues the job."""
    if TorchElasticEnvironment.detect() or not SLURMEnvironment.detect():
        return []
    alone = os.environ["SLURM_NTASKS"] == "1"  # WORLD_SIZE is not 1 in the ranks that the task has started
    return [LightningEnvironment() if alone else SLURMEnvironment(auto_requeue=False)]


class Steps(Tqdm):
    """The bar of a run's steps, with its speed and the time left.

    The speed does not count steps before a resume, or the time of evaluations. The time left includes evaluations once
    one has taken place since the start.
    """

    timing: Timing | None = None
    evaluation: Evaluation | None = None
    before = 0.0  # seconds of training before this process started

    @property
    def format_dict(self) -> Any:
        known = super().format_dict
        passed = self.timing.seconds - self.before if self.timing is not None else 0.0
        if passed > 0 and self.n > self.initial:
            known["rate"] = (self.n - self.initial) / passed
            evaluating = self.evaluation.to_come(self.n) if self.evaluation is not None else 0.0
            known["remaining"] = self.format_interval((self.total - self.n) / known["rate"] + evaluating)
        return known


class Bar(TQDMProgressBar):
    """Lightning's progress bar, but counting the steps of the run."""

    def init_train_tqdm(self) -> Steps:
        """Makes the same bar as Lightning, but of the class `Steps`."""
        shown = {"disable": self.is_disabled, "file": sys.stdout, "bar_format": self.BAR_FORMAT}
        return Steps(leave=True, dynamic_ncols=True, smoothing=0, **shown)

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        super().on_train_start(trainer)
        bar: Any = self.train_progress_bar
        bar.set_description("training", refresh=False)
        bar.total, bar.initial, bar.n = trainer.max_steps, trainer.global_step, trainer.global_step
        bar.start_t = bar.last_print_t = time.time()
        every: Sequence[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for one in every:
            if isinstance(one, Timing):
                bar.timing, bar.before = one, one.seconds
            if isinstance(one, Evaluation):
                bar.evaluation = one
        bar.refresh()

    def get_metrics(self, trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
        """Returns the loss and the Recall@1 of the last evaluation. The loss is from the method itself: Lightning would
        read back a logged one at every step."""
        assert isinstance(module, Method)
        bar: Any = self.train_progress_bar
        shown: dict[str, Any] = {"loss": float(module.terms["train/loss"])}
        if (one := bar.evaluation) is not None and one.recall is not None:
            of = "" if one.parts.split.monitor == "test" else f"{one.parts.split.monitor} "
            shown[f"{of}Recall@1"] = f"{one.recall:.3f}"
        return shown

    def on_train_epoch_start(self, *_: Any) -> None:
        """Does nothing: an epoch of Lightning is the whole run, or one repeated batch."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if self.is_enabled and (step % self.refresh_rate == 0 or step == trainer.max_steps):
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, module), refresh=False)
            self.train_progress_bar.update(step - self.train_progress_bar.n)
            self.train_progress_bar.refresh()

    def on_train_epoch_end(self, *_: Any) -> None:
        """Does nothing, as at the start of an epoch."""


class WholeCheckpoints(TorchCheckpointIO):
    """Saves checkpoints to a temporary file, flushes it to the disk, and renames it. The previous `last.ckpt` is kept
    as `previous.ckpt`.

    Lightning's own saving moves the file from a temporary folder. Between file systems that is a copy, of which a kill
    leaves half.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as new:
            with new.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            if path.name == LAST and path.exists():
                os.replace(path, path.with_name(PREVIOUS))
