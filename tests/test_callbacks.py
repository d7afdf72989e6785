"""A user's own callbacks, beside those of every run."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from pytorch_lightning.callbacks import Callback

from dml.evaluation.metrics import evaluate
from dml.files import load_checkpoint
from dml.runs.folder import RunFolder
from dml.runs.log import read_metrics
from dml.training import run as train
from dml.training.build import build
from dml.training.callbacks.steps import StepSeed
from dml.training.rebuild import load_method
from tests.conftest import TINY
from tests.test_resume import outcome

Configure = Callable[..., DictConfig]
SHORT = [*TINY, "trainer.max_steps=9", "protocol.every=3", "trainer.checkpoint_every=2", "protocol.clustering=false"]
SHORT += ["lr=0.02"]
DIVIDED = ["method=dces", "method.K=2", "method.T=1"]


class Weights(Callback):
    """What the network was after each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.seen.append({name: value.clone() for name, value in network(module.state_dict()).items()})


def network(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def trained(config: DictConfig) -> tuple[list[dict[str, torch.Tensor]], dict[str, Any]]:
    """The weights of each step, and the last checkpoint."""
    folder = RunFolder.of(config)
    parts, trainer = train.prepare_run(config, folder)
    watch = Weights()
    trainer.callbacks.append(watch)  # type: ignore[attr-defined]
    folder.open(config, [])
    train.fit(config, folder, parts, trainer)
    return watch.seen, load_checkpoint(folder.last)


def scores(config: DictConfig, checkpoint: Path) -> dict[str, float]:
    """Of what is embedded with a checkpoint."""
    data = build(config).data
    images = data.test_images(data.query_rows)
    with torch.no_grad():
        embeddings = load_method(checkpoint).embed(images).flatten(1)
    return evaluate(embeddings, torch.as_tensor(data.records.labels[data.query_rows]), ks=(1,), clustering=False)


@pytest.mark.slow
def test_ema_is_the_average_of_a_literal_loop(configure: Configure, tmp_path: Path) -> None:
    """And it is what evaluation and embedding see; training goes on from the weights themselves."""
    plain = configure(*SHORT, f"paths.output_dir={tmp_path / 'plain'}")
    train.run(plain, [])
    config = configure(*SHORT, "callbacks=ema", "callbacks.ema.decay=0.7")
    seen, saved = trained(config)
    average = {name: value.double() for name, value in seen[0].items()}
    for weights in seen[1:]:
        average = {name: 0.7 * average[name] + 0.3 * value for name, value in weights.items()}
        for name, value in weights.items():
            if not value.is_floating_point():  # the counters of batch norm
                average[name] = average[name].floor()
    found = network(saved["state_dict"])
    assert found.keys() == average.keys()
    for name, value in average.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-7, msg=name)
    assert all(torch.equal(saved["current_model_state"][name], value) for name, value in seen[-1].items())
    without = network(load_checkpoint(tmp_path / "plain" / "checkpoints" / "last.ckpt")["state_dict"])
    assert all(torch.equal(seen[-1][name], value) for name, value in without.items())
    of_average = scores(config, tmp_path / "run" / "checkpoints" / "last.ckpt")
    logged = RunFolder(tmp_path / "run").metrics()
    assert logged["test/map@r"] == pytest.approx(of_average["map@r"], abs=1e-6)
    of_weights = scores(plain, tmp_path / "plain" / "checkpoints" / "last.ckpt")
    assert abs(of_weights["map@r"] - of_average["map@r"]) > 1e-4  # else nothing was looked at


@pytest.mark.slow
def test_averages_know_that_there_are_prototypes(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are begun before there are any."""
    monkeypatch.setattr("dml.models.gsp.SEEDS", 32)
    _, saved = trained(configure(*SHORT, "callbacks=ema", "method=gsp", "head.m=4", "head.init=kcenter"))
    states = [saved[weights]["head.pooling._extra_state"] for weights in ("state_dict", "current_model_state")]
    assert not states[0][0]  # no longer waiting
    assert torch.equal(*states)


@pytest.mark.slow
@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_swa_is_the_mean_of_the_last_part(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: bool
) -> None:
    if as_on_a_gpu:  # there torch averages all tensors of a kind at once, and cannot for whole numbers
        devices = "torch.optim.swa_utils._get_foreach_kernels_supported_devices"
        monkeypatch.setattr(devices, lambda: ["cpu"])
    seen, saved = trained(configure(*SHORT, "callbacks=swa", "callbacks.swa.start=0.5", "callbacks.swa.every=2"))
    averaged = [seen[step] for step in (4, 6, 8)]  # from step 4 on, counted from 0
    for name, value in network(saved["state_dict"]).items():
        mean = torch.stack([weights[name].double() for weights in averaged]).mean(0)
        torch.testing.assert_close(value.double(), mean.to(value.dtype).double(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
def test_swa_is_the_weights_before_it_starts(configure: Configure) -> None:
    seen, saved = trained(configure(*SHORT, "callbacks=swa", "callbacks.swa.start=0.99"))
    assert all(torch.equal(value, seen[-1][name]) for name, value in network(saved["state_dict"]).items())


class Stop(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["scheduler=cosine", "scheduler.warm_up=5", "callbacks=[ema,gradient_norm]", "protocol.select=best_test"],
        pytest.param(
            ["scheduler=plateau", "scheduler.patience=0", "callbacks=swa", "callbacks.swa.start=0.3", "optimizer=sgd"],
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            ["scheduler=onecycle", "loss=xbm", "loss.loss.memory_size=64", "callbacks=ema", *DIVIDED],
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
def test_stopped_and_resumed_equals_undisturbed(configure: Configure, tmp_path: Path, options: list[str]) -> None:
    """In a warm-up, in an epoch, and while weights are averaged."""
    whole = tmp_path / "whole"
    train.run(configure(*SHORT, *options, f"paths.output_dir={whole}"), options)
    config = configure(*SHORT, *options)
    for stop in (3, 7):
        folder = RunFolder.of(config)
        parts, trainer = train.prepare_run(config, folder)
        folder.open(config, [])

        def stopped(*_: object, trainer: pl.Trainer = trainer, stop: int = stop) -> None:
            if trainer.global_step == stop:
                raise Stop

        parts.method.on_before_zero_grad = stopped
        with pytest.raises(Stop):
            train.fit(config, folder, parts, trainer)
    train.run(config, options)
    (metrics, records, tensors), again = outcome(whole), outcome(tmp_path / "run")
    assert again[0] == metrics
    assert again[1] == records
    assert all(torch.equal(again[2][name], value) for name, value in tensors.items())
    one, other = (load_checkpoint(folder / "checkpoints" / "last.ckpt") for folder in (whole, tmp_path / "run"))
    weights = network(one["current_model_state"])
    assert all(torch.equal(other["current_model_state"][name], value) for name, value in weights.items())
    assert one["lr_schedulers"][0]["steps"] == 9


@pytest.mark.slow
def test_gradient_norms_and_rates_are_logged(configure: Configure, tmp_path: Path) -> None:
    options = [*SHORT, "loss=margin", "trainer.max_steps=2", "callbacks=gradient_norm", "method.head_lr_factor=10"]
    train.run(configure(*options, "scheduler.warm_up=1", "trainer.gradient_clip_val=1e-6"), [])
    records = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if "train/loss" in record]
    for record, rise in zip(records, (0.5, 1), strict=True):
        norms = [record[f"train/gradient_norm/{name}"] for name in ("backbone", "head", "loss")]
        assert record["train/gradient_norm/all"] == pytest.approx(sum(norm**2 for norm in norms) ** 0.5)
        assert norms[0] > 1e-3  # before it is clipped
        rates = [record[f"train/lr/{name}"] for name in ("backbone", "head", "loss")]
        assert rates == pytest.approx([0.02 * rise, 0.2 * rise, 1.0 * rise])


class Counts(Callback):
    """A user's: it has a state, and is called before the step is saved."""

    def __init__(self, first: int = 0) -> None:
        self.steps = first

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


@pytest.mark.slow
def test_a_users_own_beside_ours(configure: Configure, tmp_path: Path) -> None:
    own = [f"+callbacks.mine._target_={__name__}.Counts", "+callbacks.mine.first=100"]
    for steps in (2, 4):  # resumed, and lengthened
        train.run(configure(*SHORT, "callbacks=gradient_norm", *own, f"trainer.max_steps={steps}"), [])
        states = load_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")["callbacks"]
        assert states["Counts"] == {"steps": 100 + steps}


def test_every_step_of_every_seed_has_random_numbers_of_its_own() -> None:
    def drawn(seed: int, step: int) -> tuple[float, float]:
        trainer: Any = SimpleNamespace(global_step=step)
        StepSeed(seed).on_train_batch_start(trainer, pl.LightningModule(), None, 0)
        return float(torch.rand(())), float(np.random.random())  # noqa: NPY002  the generators that miners draw from

    found = {(seed, step): drawn(seed, step) for seed in range(3) for step in range(3)}
    assert drawn(1, 2) == found[1, 2]
    for numbers in zip(*found.values(), strict=True):
        assert len(set(numbers)) == 9
