"""The number of processes is how a run is carried out: every method and loss takes the same steps on two as on one."""

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

from dml.bench.ranks import as_torchrun
from dml.configuration.composition import composed
from dml.distributed import gather_rows, host_group, on_any_rank, own_draws
from dml.errors import UserError
from dml.evaluation.metrics import evaluate, rank
from dml.evaluation.reidentification import across_cameras, one_image_gallery
from dml.runs.folder import RunFolder
from dml.training.build import build
from dml.training.callbacks.checkpoints import Checkpoints
from dml.training.callbacks.course import Course
from dml.training.callbacks.steps import MethodStep, StepSeed, Timing
from dml.training.trainer import trainer_of
from tests.components import components
from tests.conftest import TINY

METHODS = components("method")
LOSSES = ("contrastive", "margin", "proxy_anchor", "xbm")
ALL = [*itertools.product(METHODS, LOSSES), *(("mheads", loss) for loss in components("loss") if loss not in LOSSES)]
# What a method has of its own between ranks, and losses with every kind of state.
SOME = [("abe", "xbm"), ("dces", "margin"), ("gsp", "contrastive"), ("deml", "proxy_anchor"), ("mheads", "arcface")]
STEPS = 5


class Losses(Callback):
    """What every step minimised."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *arguments: Any) -> None:
        self.values.append(float(module.terms["train/loss"]))


def train_in_float64(method: str, loss: str, folder: Path, *more: str) -> dict[str, Any]:
    """Losses and the state after some steps, of this process or of its group."""
    options = [*TINY, f"method={method}", f"loss={loss}", "backbone.batch_norm=running", "trainer.precision=64-true"]
    options += ["head.dim=24", f"trainer.max_steps={STEPS}", f"protocol.every={STEPS}", "trainer.checkpoint_every=100"]
    options += ["loss.loss.memory_size=32"] if loss == "xbm" else []
    options += ["head.m=8"] if method == "gsp" else []
    options += [f"paths.output_dir={folder / f'{method}_{loss}'}", f"paths.cache_dir={folder / 'cache'}"]
    config = composed(*options, *more)
    run_folder = RunFolder(Path(config.paths.output_dir))
    parts = build(config)
    course, timing, losses = Course(config, every=STEPS), Timing(), Losses()
    # A run without its evaluations.
    own = [MethodStep(course, timing), Checkpoints(course, timing, run_folder)]
    trainer = trainer_of(config, parts.method, [course, losses, StepSeed(config.seed), *own])
    run_folder.open(config, options)
    with patch.object(torch.distributed, "broadcast", wraps=torch.distributed.broadcast) as asked:
        trainer.fit(parts.method, datamodule=parts.data)
    assert not asked.called  # no step waits for what another rank has to say of signals
    state = {name: value for name, value in parts.method.state_dict().items() if isinstance(value, torch.Tensor)}
    if "dces" in (saved := torch.load(run_folder.last, weights_only=True)):
        state |= {f"dces/{name}": value for name, value in saved["dces"].items() if isinstance(value, torch.Tensor)}
    return {"losses": losses.values, "state": {name: value.clone() for name, value in state.items()}}


def _train_as_a_rank(cases: list[tuple[str, str]], folder: Path) -> dict[str, Any]:
    as_torchrun(one_machine=True)
    return {f"{method} {loss}": train_in_float64(method, loss, folder) for method, loss in cases}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*in eval mode at the start of training")  # frozen batch norm means to be
@pytest.mark.parametrize("cases", [SOME, pytest.param(ALL, marks=pytest.mark.exhaustive)], ids=["some", "all"])
def test_every_method_and_loss_on_two_ranks_is_that_on_one(
    on_ranks: Callable[..., list[Any]], tmp_path: Path, cases: list[tuple[str, str]], one_thread: None
) -> None:
    first, second = on_ranks(2, _train_as_a_rank, cases, tmp_path / "two")
    for method, loss in cases:
        name = f"{method} {loss}"
        alone = train_in_float64(method, loss, tmp_path / "one")
        assert len(alone["losses"]) == STEPS
        assert alone["losses"] == pytest.approx(first[name]["losses"], rel=1e-6, abs=1e-6), name
        assert first[name]["losses"] == second[name]["losses"], name  # each has the loss of the whole batch
        assert alone["state"].keys() == first[name]["state"].keys()
        for part, value in alone["state"].items():
            there = f"{name}: {part}"
            # Loss parameters, memories and clusters too, which no one else keeps in step.
            torch.testing.assert_close(
                second[name]["state"][part], first[name]["state"][part], rtol=0, atol=0, msg=there
            )
            torch.testing.assert_close(first[name]["state"][part], value, rtol=1e-6, atol=1e-6, msg=there)


def _points(count: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(count)
    points = torch.as_tensor(np.round(rng.normal(size=(count, 3)), 1), dtype=torch.float32)  # with ties
    return points, torch.as_tensor(rng.integers(classes, size=count))


def _figures(shared: bool) -> dict[str, dict[str, Any]]:
    """Of sets that no world size divides, and of one too small for all ranks to have a part of."""
    found: dict[str, dict[str, Any]] = {}
    for count in (7, 257, 517):
        points, labels = _points(count, 5)
        ranking = rank(points, labels, shared=shared)
        of_queries = {"best_rank": ranking.best_rank, "positives": ranking.positives, **ranking.values}
        found[f"rank {count}"] = {name: torch.as_tensor(value) for name, value in of_queries.items()}
        found[f"evaluate {count}"] = evaluate(points, labels, ks=(1, 3), shared=shared, clustering=False)
        found[f"one image {count}"] = one_image_gallery(points, labels, draws=2, shared=shared)
        gallery, there = _points(count + 4, 5)
        cameras, others = torch.arange(count) % 3, torch.arange(count + 4) % 2
        found[f"cameras {count}"] = across_cameras(
            points, labels, cameras, gallery=gallery, gallery_labels=there, gallery_cameras=others, shared=shared
        )
    return found


def _whether_some_rank_was_told(rank: int) -> list[bool]:
    assert host_group() is host_group() is not torch.distributed.group.WORLD
    return [on_any_rank(rank == told) for told in (0, 1, 3)]


def _resumed_apart(rank: int) -> str:
    trainer: Any = SimpleNamespace(global_step=5 * (rank > 0), loggers=[])
    with pytest.raises(UserError) as told:
        Course(composed(*TINY), every=5).on_train_start(trainer, pl.LightningModule())
    return str(told.value)


def _draws() -> list[torch.Tensor]:
    torch.manual_seed(3)
    with own_draws(torch.device("cpu")):
        drawn = [torch.rand(4), torch.rand(4)]
    return [*drawn, torch.rand(4)]


def _shared() -> tuple[dict[str, dict[str, Any]], torch.Tensor, list[bool], str, list[torch.Tensor]]:
    rank = torch.distributed.get_rank()
    known = gather_rows(torch.tensor([rank]))
    return _figures(shared=True), known, _whether_some_rank_was_told(rank), _resumed_apart(rank), _draws()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_figures_shared_by_ranks_are_those_of_one_to_the_last_bit(
    on_ranks: Callable[..., list[Any]], world_size: int, one_thread: None
) -> None:
    alone = _figures(shared=False)
    masks: list[torch.Tensor] = []
    for figures, ranks, told, apart, drawn in on_ranks(world_size, _shared):
        masks += drawn[:2]
        torch.manual_seed(3)
        assert torch.equal(drawn[2], torch.rand(4))  # as if nothing had been drawn before
        assert ranks.tolist() == list(range(world_size))
        assert told == [True, True, False]  # each learns what one of them was told
        assert "resume at different steps (0, 5): paths.output_dir" in apart
        for name, expected in alone.items():
            assert figures[name].keys() == expected.keys()
            for figure, value in expected.items():
                assert torch.equal(torch.as_tensor(figures[name][figure]), torch.as_tensor(value)), (name, figure)
    assert len({tuple(mask.tolist()) for mask in masks}) == 2 * world_size  # each rank has drawn others
