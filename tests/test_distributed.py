"""Two real gloo processes with half the batch each take the step of one process with the whole batch."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from torch import nn
from torch.nn import functional as F

from dml import distributed
from dml.configuration.trainings import settle
from dml.distributed import gather
from dml.errors import UserError
from dml.evaluation.collecting import Collector
from dml.losses.functional import contrastive, contrastive_of_pairs, divergence
from dml.runs.log import read_metrics
from dml.training.run import run
from tests.conftest import TINY


def _gradients(part: slice) -> dict[str, torch.Tensor]:
    """Gradients of network and loss parameters, averaged over the ranks as DDP does."""
    torch.manual_seed(0)
    network = nn.Linear(6, 8).double()
    scale = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))  # a parameter of the loss
    images, labels = torch.randn(8, 6, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 0, 1, 2, 2])
    embeddings = F.normalize(network(images[part]).unflatten(1, (2, 4)), dim=-1)
    everything, all_labels = gather(embeddings), gather(labels[part])
    loss = scale * contrastive(everything[:, 0], all_labels) + divergence(everything, 1.5)
    loss = loss + contrastive_of_pairs(everything[:, 1], all_labels, margin=2.0)  # image i and image i + 4
    loss = loss + (gather(embeddings[:, 0]) + gather(embeddings[:, 1])).square().sum()  # both are given one gradient
    loss.backward()
    result = {"loss": loss.detach(), "scale": scale.grad, "weight": network.weight.grad, "bias": network.bias.grad}
    if torch.distributed.is_initialized():
        for name in ("scale", "weight", "bias"):
            torch.distributed.all_reduce(result[name])
            result[name] /= torch.distributed.get_world_size()
    return {name: value for name, value in result.items() if value is not None}


SHARDS = {"uneven": [[5, 3, 9], [7]], "padded": [[9, 7, 5], [3, 9, 5]]}  # rows that each rank sees


def _collect() -> dict[str, dict[str, torch.Tensor]]:
    tables = {}
    for case, rows_of_rank in SHARDS.items():
        collector = Collector()
        for row in rows_of_rank[torch.distributed.get_rank()]:
            collector.update(torch.full((1, 2, 3), float(row)), torch.tensor([row % 3]), torch.tensor([row]))
        table = collector.embedded()
        tables[case] = {"embeddings": table.embeddings, "labels": table.labels, "rows": table.rows}
    return tables


def _on_rank() -> dict[str, Any]:
    half = 4 * torch.distributed.get_rank()
    return {"gradients": _gradients(slice(half, half + 4)), "tables": _collect()}


@pytest.mark.exhaustive
def test_two_ranks_take_the_step_of_one_and_count_each_image_once(on_ranks: Callable[..., list[Any]]) -> None:
    whole = _gradients(slice(None))
    for of_rank in on_ranks(2, _on_rank):
        assert set(of_rank["gradients"]) == set(whole)
        for name, value in whole.items():
            torch.testing.assert_close(of_rank["gradients"][name], value, rtol=1e-12, atol=1e-14, msg=name)
        assert set(of_rank["tables"]) == set(SHARDS)
        for table in of_rank["tables"].values():
            np.testing.assert_array_equal(table["rows"], [3, 5, 7, 9])
            np.testing.assert_array_equal(table["labels"], [0, 2, 1, 0])
            np.testing.assert_array_equal(table["embeddings"][:, 1, 2], [3, 5, 7, 9])


PLATEAU = ["scheduler=plateau", "scheduler.patience=0", "scheduler.warm_up=1", "optimizer=sgd", "lr=0.02"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["method=abe", "protocol=conventional"], marks=pytest.mark.exhaustive, id="abe"),
        pytest.param(
            ["protocol=conventional", "callbacks=[ema,gradient_norm]", "callbacks.ema.decay=0.7", *PLATEAU],
            marks=pytest.mark.exhaustive,
            id="recipe",
        ),
        pytest.param(["method=deml", "protocol=conventional"], marks=pytest.mark.exhaustive, id="deml"),
        pytest.param(["method=gsp", "head.m=8", "protocol=conventional"], marks=pytest.mark.exhaustive, id="gsp"),
        pytest.param(
            ["method=abe", "method.checkpointing=true", "trainer.compile=true", "protocol=conventional"],
            marks=[pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore::DeprecationWarning")],  # of the compiler
            id="compiled",
        ),
        pytest.param(
            ["method=dces", "method.T=1", "protocol=random_class_split", "protocol.split=1", "protocol.every=2"],
            marks=pytest.mark.exhaustive,
            id="dces",
        ),
    ],
)
def test_a_run_on_two_processes_is_the_run_on_one(
    configure: Callable[..., DictConfig], tmp_path: Path, options: list[str]
) -> None:
    """The command line, Lightning's launcher and gloo: losses, figures and clusters of both runs agree."""
    options = [*TINY, *options, "backbone.batch_norm=running", "trainer.num_workers=0"]
    options += ["protocol.clustering=false", f"paths.cache_dir={tmp_path}"]
    alone, together = tmp_path / "alone", tmp_path / "together"
    config = configure(*options, f"paths.output_dir={alone}")
    settle(config)
    run(config, options)
    two = ["trainer=ddp", "trainer.devices=2", "trainer.sync_batchnorm=false", f"paths.output_dir={together}"]
    subprocess.run([sys.executable, "-m", "dml.run", *two, *options], check=True, capture_output=True)
    for one, other in zip(read_metrics(alone / "metrics.jsonl"), read_metrics(together / "metrics.jsonl"), strict=True):
        # Adam makes whole steps of gradients near 0, whose last bits differ, and so an image may change its place in a
        # ranking of 36 or 72 images. DeML's boxes are whole pixels, of which one may move, and with it an image.
        assert one == pytest.approx(other, rel=5e-4, abs=1e-5 if "train/loss" in one else 0.03)
    metrics = json.loads((together / "metrics.json").read_text())
    assert metrics["test/queries"] == 72  # each image once
    if "method=dces" in options:
        assert metrics["best_on_validation/step"] < 10  # so that another checkpoint than the last one is tested
        one, other = (
            torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["dces"] for folder in (alone, together)
        )
        assert torch.equal(one["clusters"], other["clusters"])
        assert len(one["clusters"].unique()) == 4
        torch.testing.assert_close(one["memory"], other["memory"], rtol=1e-3, atol=1e-4)


def test_one_rank_alone_knows_what_it_was_told() -> None:
    assert [distributed.on_any_rank(found) for found in (True, False)] == [True, False]


def test_ranks_that_do_not_reach_each_other_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside NCCL the group of the hosts is made later, by an interface that gloo has to find."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
        sentence = r"by gloo \(Unable to find address for: nowhere0\): set GLOO_SOCKET_IFNAME to the network "
        with pytest.raises(UserError, match=sentence):
            distributed._host_group(torch.distributed.group.WORLD)
    finally:
        torch.distributed.destroy_process_group()
