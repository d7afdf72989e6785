"""Whole runs on a pretended device: training, evaluations, checkpoints, resumption and report, as on the CPU.

What a GPU would refuse, an operator of tensors on two devices, fails here (`tests/pretended.py`).
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.strategies import SingleDeviceStrategy

from dml.bench.images import drawn
from dml.models.backbones import timm_model
from dml.training.run import run
from tests.components import components, on_transformers
from tests.conftest import TINY
from tests.pretended import There, pretended

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter"),  # which is copied, as it should be
]

Configure = Callable[..., DictConfig]
DEVICE = torch.device("meta")


class Pretender(CPUAccelerator):
    """Lightning's accelerator for the pretended device."""

    def setup_device(self, device: torch.device) -> None:
        assert device == DEVICE


class Stop(Exception):
    """Ends a training."""


class Stopper(pl.Callback):
    """Ends a training in its seventh step, after a checkpoint."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 6:
            raise Stop


def on_device(patched: pytest.MonkeyPatch, *callbacks: pl.Callback) -> None:
    """Has trainers work on the pretended device, whose tensors are saved as those of a GPU are loaded: on the CPU."""
    init, save = pl.Trainer.__init__, torch.save

    @functools.wraps(init)
    def of_device(self: pl.Trainer, **options: Any) -> None:
        for name in ("accelerator", "devices", "strategy"):
            options.pop(name, None)
        options["callbacks"] = [*options["callbacks"], *callbacks]
        init(self, **options, strategy=SingleDeviceStrategy(DEVICE, accelerator=Pretender()))

    patched.setattr(pl.Trainer, "__init__", of_device)
    patched.setattr(torch, "save", lambda saved, *args, **kwargs: save(_on_cpu(saved), *args, **kwargs))


def _on_cpu(saved: Any) -> Any:
    if isinstance(saved, There):
        return saved.cpu()
    if isinstance(saved, dict):
        return {name: _on_cpu(value) for name, value in saved.items()}
    return [_on_cpu(value) for value in saved] if isinstance(saved, list) else saved


def assert_as_on_the_cpu(configure: Configure, folder: Path, *options: str) -> None:
    """Runs on the CPU and on the device, resumed halfway, and compares the metrics."""
    own = any(option.startswith("dataset=") for option in options)
    tiny = [option for option in TINY if not (own and option.startswith("dataset"))]

    def done(place: str) -> dict[str, float]:
        given = [*tiny, *options, f"paths.output_dir={folder / place}"]
        return run(configure(*given), given)

    plain = torch.random.fork_rng([])(timm_model._plain)  # a network on the real `meta` draws no numbers
    expected = done("cpu")
    with pretended(indices=True) as mode, patch.object(timm_model, "_plain", plain):
        with pytest.MonkeyPatch.context() as patched:
            on_device(patched, Stopper())
            with pytest.raises(Stop):
                done("device")
        with pytest.MonkeyPatch.context() as patched:
            on_device(patched)
            mode.left.clear()
            found = done("device")
    assert mode.left  # embeddings and losses came from there
    assert "resumed at step 5" in (folder / "device" / "run.log").read_text()
    # Another rounding may find another step the best, and clusters are counted at the last step alone.
    assert {*found} ^ {*expected} <= {"best_on_test/nmi", "best_on_test/f1"}
    for name in {"untrained/recall@1", "test/recall@1", "test/map@r"} & expected.keys():
        assert found[name] == pytest.approx(expected[name], abs=0.03), name  # another rounding


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "baseline" else pytest.mark.exhaustive) for name in components("method")],
)
def test_a_method(configure: Configure, tmp_path: Path, name: str) -> None:
    assert_as_on_the_cpu(configure, tmp_path, f"method={name}", "report=true")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        ["callbacks=ema"],
        ["callbacks=swa"],
        ["callbacks=gradient_norm"],
        ["loss=xbm"],
        ["loss=proxy_anchor"],
        ["protocol.select=val_classes"],
        ["protocol=vehicleid"],
        ["trainer.gradient_clip_val=1"],
        ["trainer.precision=bf16-mixed"],
        ["trainer.micro_batch=4", "backbone.batch_norm=running"],
        ["scheduler=plateau"],
        ["optimizer.layer_decay=0.8"],
        ["rerank=alpha_qe"],
        ["rerank=database_augmentation"],
        ["rerank=diffusion"],
        ["rerank=k_reciprocal"],
        ["method=dces", "method.space=features"],
        ["method=dces", "method.assignments_from=running", "loss=abe_contrastive"],
        ["method=gsp", "callbacks=ema"],
    ],
    ids=" ".join,
)
def test_options(configure: Configure, tmp_path: Path, options: list[str]) -> None:
    assert_as_on_the_cpu(configure, tmp_path, *options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cache", ["disk", "memory", "device"])
def test_a_cache(configure: Configure, tmp_path: Path, cache: str) -> None:
    root = drawn(tmp_path / "photographs", 96, 60, classes=16)
    own = ["dataset=folder", f"dataset.root={root}", "dataset.train_fraction=0.5", "transform=resized_crop"]
    assert_as_on_the_cpu(configure, tmp_path, *own, "backbone=small", f"dataset.cache={cache}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("network", [["backbone=small"], on_transformers("cls")], ids=["cells", "tokens"])
def test_kept_features(configure: Configure, tmp_path: Path, network: list[str]) -> None:
    root = drawn(tmp_path / "photographs", 48, 60, classes=16)
    own = ["dataset=folder", f"dataset.root={root}", "dataset.train_fraction=0.5", "transform=resized_crop"]
    kept = ["dataset.cache=features", "transform.copies=2", "backbone.train=last:1"]
    assert_as_on_the_cpu(configure, tmp_path, *own, *network, *kept)
