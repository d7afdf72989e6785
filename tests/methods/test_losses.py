"""Every loss of conf/loss with every method: it trains, and a training that was stopped goes on as if it had not been.

Each method with one loss that has a state, and each loss for a step; with -m exhaustive all with all.
"""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from pytorch_lightning.callbacks import Callback
from torch.nn import functional as F

from dml.errors import UserError
from dml.runs.folder import RunFolder
from dml.training.build import build, build_method
from dml.training.callbacks.checkpoints import Checkpoints
from dml.training.callbacks.course import Course
from dml.training.callbacks.steps import MethodStep, StepSeed, Timing
from dml.training.trainer import trainer_of
from tests.components import components
from tests.conftest import TINY

pytestmark = pytest.mark.usefixtures("one_thread")

METHODS, LOSSES = components("method"), components("loss")
MINERS = [name for name in components("miner") if name != "none"]
WITH_STATE = ("xbm", "margin", "soft_triple", "proxy_anchor", "subcenter_arcface", "arcface")
DIAGONAL = set(zip(METHODS, itertools.cycle(WITH_STATE), strict=False))
CASES = [
    pytest.param(*case, marks=() if case in DIAGONAL else pytest.mark.exhaustive)
    for case in itertools.product(METHODS, LOSSES)
]
STEPS = 4
OF_A_METHOD = {
    "dces": ["method.full_embedding_from=0.75", "method.finetune_from=0.75"],  # losses are merged after the third step
    "gsp": ["head.m=8"],
}
OF_A_LOSS = {"xbm": ["loss.loss.memory_size=32"]}


class Stopped(Exception):
    """In place of a signal."""


class Watch(Callback):
    """What every step minimised; stops a training after one."""

    def __init__(self, stop_after: int | None) -> None:
        self.values: dict[int, float] = {}
        self.stop_after = stop_after

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *arguments: Any) -> None:
        self.values[trainer.global_step] = float(module.terms["train/loss"])
        if trainer.global_step == self.stop_after:
            raise Stopped


def train(config: DictConfig, stop_after: int | None = None) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """From the last checkpoint of its folder on, without evaluations: the loss of each step, and the last state."""
    folder, parts = RunFolder(Path(config.paths.output_dir)), build(config)
    course, timing, watch = Course(config, every=STEPS), Timing(), Watch(stop_after)
    own = [MethodStep(course, timing), Checkpoints(course, timing, folder), watch]
    trainer = trainer_of(config, parts.method, [course, StepSeed(config.seed), *own])
    folder.open(config, [])
    try:
        trainer.fit(parts.method, datamodule=parts.data, ckpt_path=folder.checkpoint(), weights_only=True)
    except Stopped:
        assert stop_after is not None
    state = {name: value for name, value in parts.method.state_dict().items() if isinstance(value, torch.Tensor)}
    return watch.values, state


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tiny(configure: Callable[..., DictConfig], cache: Path, tmp_path: Path) -> Callable[..., DictConfig]:
    def tiny(folder: str, method: str, *options: str) -> DictConfig:
        fixed = [f"trainer.max_steps={STEPS}", f"protocol.every={STEPS}", "trainer.checkpoint_every=2", "head.dim=24"]
        places = [f"paths.cache_dir={cache}", f"paths.output_dir={tmp_path / folder}"]
        return configure(*TINY, f"method={method}", *fixed, *places, *OF_A_METHOD.get(method, ()), *options)

    return tiny


@pytest.mark.slow
@pytest.mark.parametrize(("method", "loss"), CASES)
def test_every_loss_trains_and_resumes(tiny: Callable[..., DictConfig], method: str, loss: str) -> None:
    options = [f"loss={loss}", *OF_A_LOSS.get(loss, ())]
    values, state = train(tiny("undisturbed", method, *options))
    assert list(values) == [1, 2, 3, 4]
    assert all(math.isfinite(value) for value in values.values())
    first, _ = train(tiny("disturbed", method, *options), stop_after=3)
    rest, again = train(tiny("disturbed", method, *options))
    assert list(rest) == [3, 4]  # from the checkpoint on
    assert {**first, **rest} == values
    assert again.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(again[name], value), name


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_its_own_for_each_learner(tiny: Callable[..., DictConfig], loss: str) -> None:
    """Widths and class counts follow from the configuration, and all that a loss learns is trained."""
    config = tiny("run", "mheads", f"loss={loss}", *OF_A_LOSS.get(loss, ()))
    config.runtime.train_classes = 12
    losses = build_method(config).losses
    assert len(losses) == 4
    embeddings = F.normalize(torch.randn(8, 6), dim=1).requires_grad_()
    for one in losses:
        value = one(embeddings, torch.arange(4).repeat(2), index=torch.arange(8), norms=torch.ones(8))
        (sum(value.values()) if isinstance(value, dict) else value).backward()
        assert all(p.grad is not None for p in one.parameters())
    assert embeddings.grad is not None
    assert bool(embeddings.grad.any())


@pytest.mark.parametrize("miner", MINERS)
@pytest.mark.parametrize("loss", ["contrastive", "triplet", "multi_similarity", "xbm"])
def test_every_miner(tiny: Callable[..., DictConfig], loss: str, miner: str) -> None:
    config = tiny("run", "baseline", f"loss={loss}", f"miner={miner}", *OF_A_LOSS.get(loss, ()))
    config.runtime.train_classes = 12
    if loss == "xbm" and miner in ("distance_weighted", "multi_similarity"):
        with pytest.raises(UserError, match="compares the batch with a memory: choose miner=none"):
            build_method(config)
        return
    (one,) = build_method(config).losses
    labels = torch.arange(4).repeat(4)
    torch.manual_seed(0)
    points = F.normalize(F.one_hot(labels, 24) + 0.3 * torch.randn(16, 24), dim=1).requires_grad_()
    for _ in range(2):  # of the batch, then of a memory
        value = one(points, labels)
    value.backward()
    assert points.grad is not None
    assert torch.isfinite(points.grad).all()


@pytest.mark.parametrize("loss", ["arcface", "proxy_anchor", "ranked_list", "smooth_ap", "abe_contrastive", "instance"])
def test_a_loss_without_pairs_takes_no_miner(tiny: Callable[..., DictConfig], loss: str) -> None:
    config = tiny("run", "baseline", f"loss={loss}", "miner=semihard")
    config.runtime.train_classes = 12
    with pytest.raises(UserError, match=r"^miner=TripletMarginMiner chooses pairs .+, but loss=\w+ takes none"):
        build_method(config)
